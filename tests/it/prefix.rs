//! `--api-prefix`: routes exist only below it, and links of pages include it.

use super::harness::{Server, client, message_of, thunder, websocket_handshake};
use reqwest::{Client, Response};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::{Read, Write};

const PREFIX: &str = "/llm/v2";
const KEY: &str = "correct-horse-battery";

struct Browser {
    http: Client,
    root: String,
    cookie: String,
}

impl Browser {
    async fn get(&self, path: &str) -> Response {
        let request = self.http.get(format!("{}{path}", self.root)).header("accept", "text/html");
        // The server ignores `x-forwarded-prefix`.
        request.header("cookie", &self.cookie).header("x-forwarded-prefix", "//evil.example").send().await.unwrap()
    }
}

fn location(response: &Response) -> &str {
    assert!(response.status().is_redirection(), "{}", response.status());
    response.headers()["location"].to_str().unwrap()
}

/// Returns the addresses of this server in a page.
fn links(page: &str) -> BTreeSet<String> {
    let values = ["href=\"", "src=\"", "action=\"", "url="].into_iter().flat_map(|name| page.split(name).skip(1));
    let values = values.filter_map(|rest| rest.split('"').next()).filter(|value| value.starts_with('/'));
    values.map(|value| value.replace("&#38;", "&").replace("&amp;", "&")).collect()
}

#[tokio::test]
async fn routes_exist_only_below_prefix() {
    let server = Server::start(&["--api-prefix", &format!("{PREFIX}/"), "--api-key", KEY]);
    server.wait_ready().await;
    server.wait_for_log(&format!("are on {}", server.base)).await;
    let root = server.base.strip_suffix(PREFIX).unwrap().to_owned();
    let http = client().redirect(reqwest::redirect::Policy::none()).build().unwrap();

    for path in ["/", "/health", "/v1/models", "/llm", "/llm/v2x/health", "/runs", "/v1/models/llm/v2/health"] {
        let response = http.get(format!("{root}{path}")).bearer_auth(KEY).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 404, "{path}");
        let expected = format!("no route exists at {path}; all routes are below {PREFIX}");
        assert!(response.text().await.unwrap().contains(&expected), "{path}");
    }
    let outside: Value = http.get(format!("{root}/v1/models")).send().await.unwrap().json().await.unwrap();
    assert_eq!(outside["error"]["type"], "not_found_error", "{outside}");
    assert_eq!(http.get(format!("{root}{PREFIX}/v1/models")).send().await.unwrap().status().as_u16(), 401);
    assert_eq!(server.get("/health").await.0, 200);
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": true});
    assert_eq!(server.stream("/v1/chat/completions", &body).await.last().unwrap(), "[DONE]");
    let (status, unknown) = server.get("/v1/nothing").await;
    assert_eq!((status, message_of(&unknown)), (404, "no route exists at /v1/nothing"));
    assert_eq!(server.get("/api/v1/openapi.json").await.1["servers"][0]["url"], PREFIX);
    assert_eq!(server.get("/api/v1/asyncapi.json").await.1["servers"]["local"]["pathname"], PREFIX);

    let run_id = {
        let body = json!({"prompt": "Once", "n_predict": 3});
        server.answer("/completion", &body).await["thunder"]["run_id"].as_str().unwrap().to_owned()
    };
    server.finished(&run_id).await;
    assert_pages_link_below_prefix(&server, http, root, &run_id).await;
    assert_sockets_and_command_line_work(server).await;
}

async fn assert_pages_link_below_prefix(server: &Server, http: Client, root: String, run_id: &str) {
    let mut browser = Browser { http, root, cookie: String::new() };
    assert_eq!(location(&browser.get(&format!("{PREFIX}/")).await), format!("{PREFIX}/login"));
    let form = browser.get(&format!("{PREFIX}/login")).await.text().await.unwrap();
    assert!(form.contains(&format!("action=\"{PREFIX}/login\"")), "{form}");
    let login = browser.http.post(format!("{}/login", server.base)).body(format!("key={KEY}"));
    let login = login.header("content-type", "application/x-www-form-urlencoded").send().await.unwrap();
    assert_eq!(location(&login), format!("{PREFIX}/"));
    let cookie = login.headers()["set-cookie"].to_str().unwrap();
    assert!(cookie.contains(&format!("Path={PREFIX};")), "{cookie}");
    browser.cookie = cookie.split(';').next().unwrap().to_owned();
    let logout = browser.http.post(format!("{}/logout", server.base)).send().await.unwrap();
    assert_eq!(location(&logout), format!("{PREFIX}/login"));
    let removed = logout.headers()["set-cookie"].to_str().unwrap();
    assert!(removed.contains(&format!("=; Path={PREFIX}; Max-Age=0;")), "{removed}");
    assert_eq!(logout.headers()["clear-site-data"], "\"cache\"", "the storage belongs to all programs of the address");

    for path in ["", "/", "/favicon.ico"] {
        let response = browser.get(&format!("{PREFIX}{path}")).await;
        assert!(location(&response).starts_with(&format!("{PREFIX}/")), "{path}: {response:?}");
    }
    let mut seen = BTreeSet::new();
    let pages = ["/runs", "/runs?q=model:none%20surface:none", "/runs?q=modle:x", "/playground", "/mods", "/nowhere"];
    let pages_of_run =
        [format!("/runs/{run_id}"), format!("/runs/{run_id}?view=text"), format!("/compare?a={run_id}&b={run_id}")];
    for path in pages.into_iter().map(str::to_owned).chain(pages_of_run) {
        let response = browser.get(&format!("{PREFIX}{path}")).await;
        let page = response.text().await.unwrap();
        assert!(page.contains(&format!("data-base=\"{PREFIX}\"")) && !page.contains("evil"), "{path}: {page}");
        seen.extend(links(&page));
    }
    assert!(seen.len() > 25, "{seen:?}");
    // A form, which only accepts POST.
    assert!(seen.remove(&format!("{PREFIX}/logout")), "{seen:?}");
    for link in &seen {
        assert!(link.starts_with(&format!("{PREFIX}/")), "{link}");
        let status = browser.get(link).await.status();
        assert!(status.is_success() || status.is_redirection(), "{link}: {status}");
    }
}

async fn assert_sockets_and_command_line_work(server: Server) {
    let clients = move || {
        let address = server.base.strip_prefix("http://").unwrap().split('/').next().unwrap().to_owned();
        let mut socket = std::net::TcpStream::connect(address).unwrap();
        let handshake = websocket_handshake(&format!("{PREFIX}/generate"), &format!("Authorization: Bearer {KEY}\r\n"));
        socket.write_all(handshake.as_bytes()).unwrap();
        let mut output = [0; 4096];
        let count = socket.read(&mut output).unwrap();
        assert!(output[..count].starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&output[..count]));
        let output =
            thunder().args(["run", "Once", "--max-tokens", "2", "--server", &server.base, "--api-key", KEY]).output();
        let output = output.unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && printed.contains(&format!("{}/runs/", server.base)), "{printed}");
    };
    tokio::task::spawn_blocking(clients).await.unwrap();
}
