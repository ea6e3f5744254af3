//! The page of a mod: viewing versions, and saving one with and without scripts.

use super::harness::{Server, server};
use super::registry::{MOD_KEY, UPLOAD_FLAGS};
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use std::fmt::Write;

async fn page(server: &Server, key: &str, path: &str) -> (u16, String) {
    let request = server.request(Method::GET, path).header("accept", "text/html");
    let response = request.bearer_auth(key).send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

/// Returns the request that a browser without scripts sends for the form.
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

/// Sends the form; returns status, path and text of the final page.
async fn save(server: &Server, key: &str, path: &str, name: &str, source: &str) -> (u16, String, String) {
    let mut request = form(server, path, name, source);
    if !key.is_empty() {
        request = request.bearer_auth(key);
    }
    let response = request.send().await.unwrap();
    let final_path = response.url().path().to_owned();
    // The server may answer a body that is too large before it has read it, and close the connection.
    (response.status().as_u16(), final_path, response.text().await.unwrap_or_default())
}

async fn check(server: &Server, key: &str, body: &Value) -> (u16, Value) {
    server.send(key, Method::POST, "/api/v1/mods/check", Some(body)).await
}

/// Returns status and body of the mod that the tests save.
async fn saved_mod(server: &Server) -> (u16, Value) {
    server.send(MOD_KEY, Method::GET, "/v1/mods/edited", None).await
}

/// Returns the source of a mod that forces the output `text`.
fn forced_answer(text: &str) -> String {
    format!(
        "from thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\ndef edited(event, actions, tokenizer):\n    \
         \"\"\"Says {text} & more.\"\"\"\n    return actions.force_output(tokenizer.encode(\"{text}\"))\n"
    )
}

#[tokio::test]
async fn form_saves_version_used_by_runs() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    // Browsers send the lines of a form with CRLF.
    let (status, final_path, html) =
        save(&server, MOD_KEY, "/mods/-new", "edited", &forced_answer("one").replace('\n', "\r\n")).await;
    assert_eq!((status, final_path.as_str()), (200, "/mods/edited"), "{html}");
    assert!(html.contains("def edited(event, actions, tokenizer):\n"), "{html}");
    let (_, shown) = saved_mod(&server).await;
    let first = shown["hash"].as_str().unwrap().to_owned();
    let (status, _, html) = save(&server, MOD_KEY, "/mods/edited", "edited", &forced_answer("two")).await;
    assert_eq!(status, 200, "{html}");
    assert!(html.contains(&format!("href=\"/mods/edited?version={first}\"")), "{html}");

    let body = json!({"prompt": "Hello", "max_tokens": 4, "mods": ["edited"]});
    let (_, answer) = server.send("user-key", Method::POST, "/v1/completions", Some(&body)).await;
    assert_eq!(answer["choices"][0]["text"], "two", "{answer}");

    let (status, html) = page(&server, "user-key", &format!("/mods/edited?version={first}")).await;
    assert_eq!(status, 200);
    assert!(html.contains("earlier version") && html.contains("Says one") && !html.contains("Says two"), "{html}");
    assert!(html.contains("--mod-key"), "the page names the required key: {html}");
    assert_eq!(page(&server, MOD_KEY, "/mods/edited?version=000000").await.0, 404);
    assert_eq!(page(&server, MOD_KEY, "/mods/nobody").await.0, 404);
    let (status, html) = page(&server, MOD_KEY, "/mods/ban-phrases").await;
    assert!(status == 200 && html.contains("cannot be changed") && html.contains("max_retries"), "{html}");

    server.request(Method::DELETE, "/v1/mods/edited").bearer_auth(MOD_KEY).send().await.unwrap();
    let (status, html) = page(&server, MOD_KEY, "/mods/edited").await;
    assert!(status == 200 && html.contains("removed") && html.contains("Says two"), "{html}");
    server.stop("TERM").await;
}

/// Returns the fields that the editor sends with a source.
fn previous(html: &str) -> Value {
    let (_, rest) = html.split_once("data-previous=\"").unwrap();
    let json = rest.split_once('"').unwrap().0.replace("&#34;", "\"");
    serde_json::from_str(&json).unwrap_or_else(|error| panic!("{error}: {json}"))
}

#[tokio::test]
async fn save_keeps_the_fields_of_the_displayed_version() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let two = format!("{}\n\n@mod\ndef other(event, actions): pass\n", forced_answer("two"));
    let package = json!({"name": "edited", "module": "p.main", "description": "A package.", "source": {"p/main.py": forced_answer("one")}});
    let text = json!({"name": "edited", "entrypoint": "edited", "description": "A text.", "source": two});
    let mut hashes = Vec::new();
    for body in [&package, &text] {
        let (status, saved) = server.send(MOD_KEY, Method::POST, "/v1/mods", Some(body)).await;
        assert_eq!(status, 200, "{saved}");
        hashes.push(saved["hash"].as_str().unwrap().to_owned());
    }
    let (_, html) = page(&server, MOD_KEY, &format!("/mods/edited?version={}", hashes[0])).await;
    assert_eq!((&previous(&html)["module"], &previous(&html)["description"]), (&json!("p.main"), &json!("A package.")));
    assert_eq!(server.send(MOD_KEY, Method::DELETE, "/v1/mods/edited", None).await.0, 204);
    let (_, html) = page(&server, MOD_KEY, "/mods/edited").await;
    assert_eq!(
        (&previous(&html)["entrypoint"], &previous(&html)["description"]),
        (&json!("edited"), &json!("A text."))
    );
    assert!(html.contains(&format!("name=\"version\" value=\"{}\"", hashes[1])), "{html}");
    let restored = form(&server, "/mods/edited", &format!("edited&version={}", hashes[1]), &two);
    assert_eq!(restored.bearer_auth(MOD_KEY).send().await.unwrap().status(), 200);
    assert_eq!(saved_mod(&server).await.1["description"], "A text.");
    // The page of a failed save still has the displayed version, here an earlier one.
    let newest = json!({"name": "edited", "source": forced_answer("three")});
    assert_eq!(server.send(MOD_KEY, Method::POST, "/v1/mods", Some(&newest)).await.0, 200);
    let broken = form(&server, "/mods/edited", &format!("edited&version={}", hashes[1]), "def edited(:\n");
    let response = broken.bearer_auth(MOD_KEY).send().await.unwrap();
    assert_eq!(response.status(), 400);
    let html = response.text().await.unwrap();
    assert!(
        html.contains("Not saved") && html.contains(&format!("name=\"version\" value=\"{}\"", hashes[1])),
        "{html}"
    );
    server.stop("TERM").await;
}

#[tokio::test]
async fn save_and_check_require_upload_right() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let source = forced_answer("it");
    assert_eq!(save(&server, "", "/mods/-new", "edited", &source).await.0, 401);
    let (status, _, html) = save(&server, "user-key", "/mods/-new", "edited", &source).await;
    assert!(status == 403 && html.contains("--mod-key"), "{status} {html}");
    let body = json!({"name": "edited", "source": source});
    assert_eq!(check(&server, "user-key", &body).await.0, 403);
    let foreign =
        form(&server, "/mods/-new", "edited", &source).bearer_auth(MOD_KEY).header("origin", "https://example.org");
    let rejected = foreign.send().await.unwrap();
    assert_eq!(rejected.status(), 403, "a page of another origin");
    assert_eq!(saved_mod(&server).await.0, 404, "nothing was registered");

    // The error is shown, and the input is kept.
    let (status, _, html) = save(&server, MOD_KEY, "/mods/-new", "edited", "raise KeyError('x')\n").await;
    assert!(status == 400 && html.contains("KeyError") && html.contains("raise KeyError"), "{status} {html}");
    let (status, _, html) = save(&server, MOD_KEY, "/mods/-new", "edited", &"#".repeat((1 << 20) + 1)).await;
    assert!(
        status == 400 && html.contains("at most 1048576 bytes, got 1048577"),
        "{status} {}",
        &html[..2000.min(html.len())]
    );
    assert_eq!(save(&server, MOD_KEY, "/mods/-new", "edited", &"a".repeat(9 << 20)).await.0, 413);
    assert_eq!(save(&server, MOD_KEY, "/mods/-new", "ban-phrases", &source).await.0, 409);
    assert_eq!(saved_mod(&server).await.0, 404);
    server.stop("TERM").await;
}

#[tokio::test]
async fn check_reports_lines_and_registers_nothing() {
    let server = Server::start(&UPLOAD_FLAGS);
    server.wait_ready().await;
    let check_source = async |source: &str| {
        let (status, checked) = check(&server, MOD_KEY, &json!({"name": "edited", "source": source})).await;
        assert_eq!(status, 200, "{checked}");
        checked
    };
    let valid = check_source(&forced_answer("it")).await;
    assert_eq!(valid, json!({"problems": [], "description": "Says it & more."}));
    let syntax = check_source("from thunder_mods import mod\ndef x(:\n").await;
    assert_eq!(syntax["problems"][0]["line"], 2, "{syntax}");
    assert!(syntax["problems"][0]["message"].as_str().unwrap().contains("SyntaxError"), "{syntax}");
    let raised = check_source("import thunder_mods\n\n\ndef f():\n    raise KeyError('x')\n\n\nf()\n").await;
    assert_eq!(raised["problems"][0]["line"], 5, "the error names its line: {raised}");
    let without_mod = check_source("x = 1\n").await;
    assert_eq!(without_mod["problems"][0]["line"], Value::Null, "{without_mod}");
    let files = json!({"a.py": "from thunder_mods import mod\nimport b\n", "b.py": "\n\n1 / 0\n"});
    let package = json!({"name": "edited", "module": "a", "source": files});
    let (_, package) = check(&server, MOD_KEY, &package).await;
    assert_eq!(
        (&package["problems"][0]["file"], &package["problems"][0]["line"]),
        (&json!("b.py"), &json!(3)),
        "{package}"
    );
    let (_, taken) = check(&server, MOD_KEY, &json!({"name": "ban-phrases", "source": forced_answer("it")})).await;
    assert_eq!(taken["problems"][0]["pointer"], "name", "{taken}");
    assert_eq!(saved_mod(&server).await.0, 404);
    server.stop("TERM").await;
}

#[tokio::test]
async fn pages_without_upload_right_name_required_flags() {
    let server = server().await;
    let (status, html) = page(server, "", "/mods/-new").await;
    assert!(status == 200 && html.contains("--allow-mod-upload") && html.contains(" disabled"), "{html}");
    let (status, _, html) = save(server, "", "/mods/-new", "edited", &forced_answer("it")).await;
    assert!(status == 403 && html.contains("Says it"), "{status} {html}");
}
