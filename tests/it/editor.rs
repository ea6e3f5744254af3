//! The page of a mod: viewing versions, and saving one with and without scripts.

use super::harness::{Server, server};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use std::fmt::Write;

const BOSS: &str = "boss-key";

fn with_uploads() -> [&'static str; 4] {
    ["--api-key=user-key", "--mod-key", BOSS, "--allow-mod-upload"]
}

async fn page(server: &Server, key: &str, path: &str) -> (u16, String) {
    let request = server.request(Method::GET, path).header("accept", "text/html");
    let response = request.bearer_auth(key).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

/// Returns the form fields of a browser without scripts.
fn form(server: &Server, path: &str, name: &str, source: &str) -> RequestBuilder {
    let mut body = format!("name={name}&source=");
    for byte in source.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => body.push(char::from(byte)),
            _ => write!(body, "%{byte:02X}").unwrap(),
        }
    }
    let request = server.request(Method::POST, path);
    request.header("content-type", "application/x-www-form-urlencoded").body(body)
}

/// Sends the form and returns the final address.
async fn save(server: &Server, key: &str, path: &str, name: &str, source: &str) -> (u16, String, String) {
    let mut request = form(server, path, name, source);
    if !key.is_empty() {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.unwrap();
    let at = response.url().path().to_owned();
    // A too large body is answered before it has arrived completely, and the connection is closed.
    (response.status().as_u16(), at, response.text().await.unwrap_or_default())
}

async fn check(server: &Server, key: &str, body: &Value) -> (u16, Value) {
    let request = server.request(Method::POST, "/api/v1/mods/check").bearer_auth(key).json(body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// Returns a mod whose answer is `text`.
fn forced_answer(text: &str) -> String {
    format!(
        "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef edited(event, actions, tokenizer):\n    \
         \"\"\"Says {text} & more.\"\"\"\n    return actions.force_output(tokenizer.encode(\"{text}\"))\n"
    )
}

#[tokio::test]
async fn form_saves_version_used_by_runs() {
    let server = Server::start(&with_uploads());
    server.wait_ready().await;
    // A form's lines end in CRLF.
    let (status, at, html) =
        save(&server, BOSS, "/mods/-new", "edited", &forced_answer("one").replace('\n', "\r\n")).await;
    assert_eq!((status, at.as_str()), (200, "/mods/edited"), "{html}");
    assert!(html.contains("def edited(event, actions, tokenizer):\n"), "{html}");
    let (_, shown) = check_version(&server).await;
    let first = shown["hash"].as_str().unwrap().to_owned();
    let (status, _, html) = save(&server, BOSS, "/mods/edited", "edited", &forced_answer("two")).await;
    assert_eq!(status, 200, "{html}");
    assert!(html.contains(&format!("href=\"/mods/edited?version={first}\"")), "{html}");

    let run = server.request(Method::POST, "/v1/completions").bearer_auth("user-key");
    let run = run.json(&json!({"prompt": "Hello", "max_tokens": 4, "mods": ["edited"]})).send().await.unwrap();
    let answer: Value = run.json().await.unwrap();
    assert_eq!(answer["choices"][0]["text"], "two", "{answer}");

    let (status, html) = page(&server, "user-key", &format!("/mods/edited?version={first}")).await;
    assert_eq!(status, 200);
    assert!(html.contains("earlier version") && html.contains("Says one") && !html.contains("Says two"), "{html}");
    assert!(html.contains("--mod-key"), "the page names the required key: {html}");
    assert_eq!(page(&server, BOSS, "/mods/edited?version=000000").await.0, 404);
    assert_eq!(page(&server, BOSS, "/mods/nobody").await.0, 404);
    let (status, html) = page(&server, BOSS, "/mods/ban-phrases").await;
    assert!(status == 200 && html.contains("cannot be changed") && html.contains("max_retries"), "{html}");

    server.request(Method::DELETE, "/v1/mods/edited").bearer_auth(BOSS).send().await.unwrap();
    let (status, html) = page(&server, BOSS, "/mods/edited").await;
    assert!(status == 200 && html.contains("removed") && html.contains("Says two"), "{html}");
    server.stop("TERM").await;
}

async fn check_version(server: &Server) -> (u16, Value) {
    let response = server.request(Method::GET, "/v1/mods/edited").bearer_auth(BOSS).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn save_and_check_require_upload_right() {
    let server = Server::start(&with_uploads());
    server.wait_ready().await;
    let source = forced_answer("it");
    assert_eq!(save(&server, "", "/mods/-new", "edited", &source).await.0, 401);
    let (status, _, html) = save(&server, "user-key", "/mods/-new", "edited", &source).await;
    assert!(status == 403 && html.contains("--mod-key"), "{status} {html}");
    let body = json!({"name": "edited", "source": source});
    assert_eq!(check(&server, "user-key", &body).await.0, 403);
    let foreign =
        form(&server, "/mods/-new", "edited", &source).bearer_auth(BOSS).header("origin", "https://example.org");
    let refused = foreign.send().await.unwrap();
    assert_eq!(refused.status(), 403, "a page of another origin");
    assert_eq!(check_version(&server).await.0, 404, "nothing was registered");

    // The error is shown, and the input is kept.
    let (status, _, html) = save(&server, BOSS, "/mods/-new", "edited", "raise KeyError('x')\n").await;
    assert!(status == 400 && html.contains("KeyError") && html.contains("raise KeyError"), "{status} {html}");
    let (status, _, html) = save(&server, BOSS, "/mods/-new", "edited", &"#".repeat((1 << 20) + 1)).await;
    assert!(status == 400 && html.contains("maximum is 1048576"), "{status} {}", &html[..2000.min(html.len())]);
    assert_eq!(save(&server, BOSS, "/mods/-new", "edited", &"a".repeat(9 << 20)).await.0, 413);
    assert_eq!(save(&server, BOSS, "/mods/-new", "ban-phrases", &source).await.0, 409);
    assert_eq!(check_version(&server).await.0, 404);
    server.stop("TERM").await;
}

#[tokio::test]
async fn check_reports_lines_and_registers_nothing() {
    let server = Server::start(&with_uploads());
    server.wait_ready().await;
    let found = async |source: &str| {
        let (status, checked) = check(&server, BOSS, &json!({"name": "edited", "source": source})).await;
        assert_eq!(status, 200, "{checked}");
        checked
    };
    let fine = found(&forced_answer("it")).await;
    assert_eq!(fine, json!({"problems": [], "description": "Says it & more."}));
    let syntax = found("from thunder_mods import mod\ndef x(:\n").await;
    assert_eq!(syntax["problems"][0]["line"], 2, "{syntax}");
    assert!(syntax["problems"][0]["message"].as_str().unwrap().contains("SyntaxError"), "{syntax}");
    let raised = found("import thunder_mods\n\n\ndef f():\n    raise KeyError('x')\n\n\nf()\n").await;
    assert_eq!(raised["problems"][0]["line"], 5, "the error names its line: {raised}");
    let nothing = found("x = 1\n").await;
    assert_eq!(nothing["problems"][0]["line"], Value::Null, "{nothing}");
    let files = json!({"a.py": "from thunder_mods import mod\nimport b\n", "b.py": "\n\n1 / 0\n"});
    let package = json!({"name": "edited", "module": "a", "source": files});
    let (_, package) = check(&server, BOSS, &package).await;
    assert_eq!(
        (&package["problems"][0]["file"], &package["problems"][0]["line"]),
        (&json!("b.py"), &json!(3)),
        "{package}"
    );
    let (_, taken) = check(&server, BOSS, &json!({"name": "ban-phrases", "source": forced_answer("it")})).await;
    assert_eq!(taken["problems"][0]["pointer"], "name", "{taken}");
    assert_eq!(check_version(&server).await.0, 404);
    server.stop("TERM").await;
}

#[tokio::test]
async fn rejected_upload_names_required_flags() {
    let server = server().await;
    let (status, html) = page(server, "", "/mods/-new").await;
    assert!(status == 200 && html.contains("--allow-mod-upload") && html.contains(" disabled"), "{html}");
    let (status, _, html) = save(server, "", "/mods/-new", "edited", &forced_answer("it")).await;
    assert!(status == 403 && html.contains("Says it"), "{status} {html}");
}
