//! API keys are tenants: runs and their data belong to the key that created them.

use super::harness::{Server, folder};
use reqwest::Method;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Two keys and a key for traces of the tenant `ann`, a key of the tenant `bob`, and a key of an administrator.
const KEYS: &str =
    "ann-key-1 name=ann\nann-key-2 name=ann\nbob-key name=bob\nadmin-key name=ops admin\nann-traces name=ann ingest\n";

fn key_file() -> PathBuf {
    let path = folder().join("keys");
    std::fs::write(&path, KEYS).unwrap();
    path
}

async fn start(arguments: &[&str]) -> Server {
    let file = key_file();
    let mut all = vec!["--api-key-file", file.to_str().unwrap()];
    all.extend(arguments);
    let server = Server::start(&all);
    server.wait_ready().await;
    server
}

/// Sends a request with a key; returns status and text.
async fn send(server: &Server, key: &str, method: Method, path: &str, body: Option<&Value>) -> (u16, String) {
    // Errors contain this id; the same id makes them comparable.
    let mut request = server.request(method, path).bearer_auth(key).header("x-request-id", "same");
    if let Some(body) = body {
        request = request.json(body);
    }
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.text().await.unwrap())
}

async fn get(server: &Server, key: &str, path: &str) -> (u16, Value) {
    let (status, text) = send(server, key, Method::GET, path, None).await;
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

async fn completion(server: &Server, key: &str, request_id: &str) -> (u16, Value) {
    let body = json!({"prompt": "a private prompt", "max_tokens": 3, "request_id": request_id});
    let (status, text) = send(server, key, Method::POST, "/v1/completions", Some(&body)).await;
    (status, serde_json::from_str(&text).unwrap())
}

#[tokio::test]
async fn runs_are_seen_by_their_tenant_and_admins_only() {
    let server = start(&[]).await;
    let (status, answer) = completion(&server, "ann-key-1", "ann-1").await;
    assert_eq!(status, 200, "{answer}");
    let run_id = answer["thunder"]["run_id"].as_str().unwrap();
    for id in [run_id, "ann-1"] {
        for route in ["", "/events", "/columns", "/feedback", "/alternatives", "/attention?at=1"] {
            let (_, unknown) = get(&server, "bob-key", &format!("/api/v1/runs/nobody{route}")).await;
            let (status, foreign) = get(&server, "bob-key", &format!("/api/v1/runs/{id}{route}")).await;
            assert_eq!(status, 404, "{route}");
            assert_eq!(foreign.to_string().replace(id, "nobody"), unknown.to_string());
        }
        for key in ["ann-key-1", "ann-key-2", "admin-key"] {
            assert_eq!(get(&server, key, &format!("/api/v1/runs/{id}")).await.0, 200, "{key}");
        }
        assert_eq!(send(&server, "bob-key", Method::DELETE, &format!("/api/v1/runs/{id}"), None).await.0, 404);
    }
    let listed = async |key: &str, q: &str| {
        let (_, list) = get(&server, key, &format!("/api/v1/runs?q={q}")).await;
        list["runs"].as_array().unwrap().len()
    };
    for q in ["", "private", "%22private%20prompt%22", "model:tiny", "request:ann", "tokens%3E0", "-status:failed"] {
        let counts = [listed("ann-key-2", q).await, listed("bob-key", q).await, listed("admin-key", q).await];
        assert_eq!(counts, [1, 0, 1], "{q}");
    }
    // The error about a request_id in use contains nothing about the other run.
    // The server accepts the request if its lookup in the database takes too long.
    let mut answer = completion(&server, "bob-key", "ann-1").await;
    for _ in 0..20 {
        if answer.0 == 409 {
            break;
        }
        answer = completion(&server, "bob-key", "ann-1").await;
    }
    let (status, error) = answer;
    assert_eq!(status, 409, "{error}");
    assert!(!error.to_string().contains(run_id), "{error}");
    let (status, _) = send(&server, "admin-key", Method::DELETE, "/api/v1/runs/ann-1", None).await;
    assert_eq!((status, listed("ann-key-1", "").await), (204, 0));
}

/// A word of Ann's prompts that no response to Bob may contain.
const MARK: &str = "zanzibar";

/// Ids of a tenant's data.
struct Created {
    run_id: String,
    response_id: String,
}

async fn post(server: &Server, key: &str, path: &str, body: Value) -> Value {
    let (status, text) = send(server, key, Method::POST, path, Some(&body)).await;
    assert!((200..300).contains(&status), "{path}: {status} {text}");
    serde_json::from_str(&text).unwrap_or(Value::Null)
}

/// Creates one of each resource as Ann.
async fn create_resources(server: &Server) -> Created {
    let ann = "ann-key-1";
    let prompt = format!("{MARK} is a secret");
    let body = json!({"prompt": prompt, "max_tokens": 2, "request_id": "ann-run", "id_slot": 0});
    let run = post(server, ann, "/v1/completions", body).await;
    let response = post(server, ann, "/v1/responses", json!({"input": prompt, "max_output_tokens": 2})).await;
    post(server, ann, "/v1/generate", json!({"prompt": prompt, "max_tokens": 2, "request_id": "ann-stream"})).await;
    let kobold = json!({"prompt": prompt, "max_length": 2, "genkey": "ann-genkey", "logprobs": true});
    post(server, ann, "/api/v1/generate", kobold).await;
    post(server, ann, "/api/v1/runs/ann-run/feedback", json!({"rating": 1, "text": prompt})).await;
    let body = json!({"prompt": prompt, "max_tokens": 2, "id_slot": 0});
    post(server, ann, "/completion", body).await;
    post(server, ann, "/sessions/7?action=save&slot=0", json!({})).await;
    post(server, ann, "/slots/0?action=save", json!({"filename": "ann.bin"})).await;
    let document = json!({
        "request": {"request_id": "ann-document", "model": "elsewhere"},
        "events": [{"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 1, "max_steps": 1, "input_text": prompt}],
        "mod_calls": [], "mod_logs": [], "actions": []
    });
    post(server, "ann-traces", "/ingest", document).await;
    Created {
        run_id: run["thunder"]["run_id"].as_str().unwrap().to_owned(),
        response_id: response["id"].as_str().unwrap().to_owned(),
    }
}

#[tokio::test]
async fn runs_of_other_tenants_are_hidden_on_all_routes() {
    let files = folder();
    let server = start(&["--slot-save-path", files.to_str().unwrap(), "--metrics", "--props", "--parallel", "1"]).await;
    let created = create_resources(&server).await;
    let (_, document) = get(&server, "bob-key", "/api/v1/openapi.json").await;
    let mut requests = 0;
    for (path, operations) in document["paths"].as_object().unwrap() {
        for method in operations.as_object().unwrap().keys() {
            // These streams never end; other tests check them.
            if matches!(path.as_str(), "/api/v1/runs/live" | "/models/sse") {
                continue;
            }
            let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
            for id in [created.run_id.as_str(), "ann-run", "ann-stream", "ann-document"] {
                let address = path
                    .replace("/runs/{id}", &format!("/runs/{id}"))
                    .replace("{response_id}", &created.response_id)
                    .replace("{id_session}", "7")
                    .replace("{id_slot}", "0");
                let is_foreign = address != *path;
                let queries: &[&str] = match path.as_str() {
                    "/sessions/{id_session}" => &["?action=restore&slot=0", "?action=remove"],
                    "/slots/{id_slot}" => &["?action=tokens", "?action=save-state", "?action=restore"],
                    "/api/v1/runs/{id}/attention" => &["?at=1", "?from=0&to=9"],
                    _ => &[""],
                };
                for query in queries {
                    let body = json!({
                        "request_id": id, "id": id, "genkey": "ann-genkey", "previous_response_id": created.response_id,
                        "filename": "ann.bin", "input": "b", "prompt": "b", "max_tokens": 1, "max_length": 1, "rating": 0,
                    });
                    let note = json!({"text": "b"});
                    let body = match method {
                        Method::POST => Some(&body),
                        Method::PUT => Some(&note),
                        _ => None,
                    };
                    let address = format!("{address}{query}");
                    let (status, text) = send(&server, "bob-key", method.clone(), &address, body).await;
                    requests += 1;
                    assert!(!text.contains(MARK), "{method} {address}: {status} {text}");
                    assert!(status < 500 || status == 501, "{method} {address}: {status} {text}");
                    let is_slot = path.contains("{id_slot}");
                    if is_foreign && !is_slot {
                        assert_eq!(status, 404, "{method} {address}: {text}");
                    }
                    if *query == "?action=tokens" {
                        // A run of Bob has used the slot, so its content belongs to Bob.
                        assert_eq!(status, 200, "{text}");
                    }
                    if *query == "?action=restore" {
                        assert_eq!(status, 404, "{text}");
                    }
                }
            }
        }
    }
    assert!(requests > 200, "{requests}");
    let change = json!({"runs": [created.run_id], "add": ["foreign"]});
    let (status, text) = send(&server, "bob-key", Method::POST, "/api/v1/runs/tags", Some(&change)).await;
    assert_eq!(status, 404, "{text}");
    let deletion = json!({"runs": [created.run_id]});
    let (status, text) = send(&server, "bob-key", Method::POST, "/api/v1/deletions", Some(&deletion)).await;
    assert_eq!(status, 404, "{text}");
    let page = format!("/runs/{}/export.html", created.run_id);
    let (status, text) = send(&server, "bob-key", Method::GET, &page, None).await;
    assert!(status == 404 && !text.contains(MARK), "{status} {text}");
    for (path, expected) in [
        (format!("/api/v1/runs/{}", created.run_id), 200),
        (format!("/v1/responses/{}", created.response_id), 200),
        ("/api/v1/runs/ann-document".to_owned(), 200),
        (page, 200),
    ] {
        assert_eq!(get(&server, "admin-key", &path).await.0, expected, "{path}");
    }
    let (_, sessions) = get(&server, "admin-key", "/sessions").await;
    assert_eq!(sessions[0]["id"], 7, "{sessions}");
    assert_eq!(get(&server, "bob-key", "/sessions").await.1, json!([]));
}

#[tokio::test]
async fn last_failure_of_a_mod_is_seen_by_the_tenant_of_its_run() {
    let mods = folder();
    let source = format!(
        "from thunder import Prefilled, mod\n\n@mod(events=[Prefilled])\ndef fails(event, actions):\n    \
         raise ValueError('{MARK}')\n"
    );
    std::fs::write(mods.join("fails.py"), source).unwrap();
    let server = start(&["--mods-dir", mods.to_str().unwrap()]).await;
    let run = async |key: &str| {
        let body = json!({"prompt": "Hello", "max_tokens": 1, "mods": ["fails"]});
        post(&server, key, "/v1/completions", body).await["thunder"]["run_id"].clone()
    };
    let failure = async |key: &str| get(&server, key, "/v1/mods/fails").await.1["last_failure"].clone();
    let ann_run = run("ann-key-1").await;
    assert_eq!(failure("bob-key").await, Value::Null);
    for path in ["/v1/mods", "/api/v1/mods", "/mods"] {
        for (key, is_shown) in [("ann-key-2", true), ("admin-key", true), ("bob-key", false)] {
            let (status, text) = send(&server, key, Method::GET, path, None).await;
            assert_eq!((status, text.contains(MARK)), (200, is_shown), "{path} {key}: {text}");
        }
    }
    let bob_run = run("bob-key").await;
    assert_eq!((&failure("ann-key-2").await["run_id"], &failure("bob-key").await["run_id"]), (&ann_run, &bob_run));
}

#[tokio::test]
async fn slot_of_another_tenant_looks_empty() {
    let server = start(&["--parallel", "1"]).await;
    post(&server, "ann-key-1", "/completion", json!({"prompt": MARK, "n_predict": 2})).await;
    let tokens =
        async |key: &str| post(&server, key, "/slots/0?action=tokens", json!({})).await["n_tokens"].as_u64().unwrap();
    assert_eq!(tokens("bob-key").await, 0);
    assert!(tokens("ann-key-2").await > 0 && tokens("admin-key").await > 0);
    let shown = async |key: &str| get(&server, key, "/slots").await.1[0]["thunder"]["run_id"].is_string();
    assert_eq!((shown("ann-key-1").await, shown("bob-key").await, shown("admin-key").await), (true, false, true));
}

/// A run that ends before its first decode must not take over the state of another tenant.
#[tokio::test]
async fn cancelled_run_does_not_own_the_state_of_its_slot() {
    let mods = folder();
    let source = "import time\nfrom thunder import Prefilled, mod\n\n@mod(events=[Prefilled])\ndef waits(event, actions):\n    \
                  time.sleep(3)\n";
    std::fs::write(mods.join("waits.py"), source).unwrap();
    let server = start(&["--parallel", "1", "--mods-dir", mods.to_str().unwrap()]).await;
    post(&server, "ann-key-1", "/completion", json!({"prompt": MARK, "n_predict": 2})).await;
    let slot = async |key: &str| get(&server, key, "/slots").await.1[0].clone();
    let request = server.request(Method::POST, "/completion").bearer_auth("bob-key");
    let request = request.json(&json!({"prompt": MARK, "n_predict": 2, "mods": ["waits"]})).send();
    let run = tokio::spawn(request);
    while slot("bob-key").await["is_processing"] != true {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    run.abort();
    while slot("admin-key").await["is_processing"] == true {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let tokens =
        async |key: &str| post(&server, key, "/slots/0?action=tokens", json!({})).await["n_tokens"].as_u64().unwrap();
    assert_eq!(tokens("bob-key").await, 0);
    assert!(tokens("ann-key-1").await > 0);
}

/// Reuse of the state of another tenant would disclose its prompt by the number of cached tokens, and a state that a tenant
/// restores from changed bytes would change the answers of others.
#[tokio::test]
async fn kv_state_is_reused_only_by_its_tenant() {
    for parallel in ["1", "2"] {
        let server = start(&["--parallel", parallel]).await;
        let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(8);
        let cached = async |key: &str| {
            let answer = post(&server, key, "/completion", json!({"prompt": prompt, "n_predict": 2})).await;
            answer["timings"]["cache_n"].as_u64().unwrap()
        };
        assert_eq!(cached("ann-key-1").await, 0);
        assert!(cached("ann-key-2").await > 64, "the same tenant");
        assert_eq!(cached("bob-key").await, 0);
        assert!(cached("bob-key").await > 64);
        assert!(cached("ann-key-1").await > 64, "from the other slot, or from the cache in host memory");
        assert_eq!(cached("admin-key").await, 0);
    }
}

#[tokio::test]
async fn changes_of_the_server_require_an_admin_key() {
    let server = start(&["--props"]).await;
    for (path, body) in [
        ("/models/load", json!({"model": "nothing"})),
        ("/models/unload", json!({"model": "nothing"})),
        ("/props", json!({})),
        ("/lora-adapters", json!([])),
        ("/v1/mods/force_prefix/disable", json!({})),
    ] {
        let (status, text) = send(&server, "bob-key", Method::POST, path, Some(&body)).await;
        assert_eq!(status, 403, "{path}: {text}");
        assert!(text.contains("admin"), "{text}");
        let (status, text) = send(&server, "admin-key", Method::POST, path, Some(&body)).await;
        assert!(matches!(status, 200 | 404), "{path}: {status} {text}");
    }
}

#[tokio::test]
async fn dashboard_shows_the_runs_of_the_login() {
    let server = start(&[]).await;
    completion(&server, "ann-key-1", "ann-page").await;
    // The list shows stored runs; a request for one run waits until it is stored.
    assert_eq!(get(&server, "ann-key-1", "/api/v1/runs/ann-page").await.0, 200);
    let client = crate::harness::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let page = async |key: &str, path: &str| {
        let login = client.post(format!("{}/login", server.base)).body(format!("key={key}"));
        let login = login.header("content-type", "application/x-www-form-urlencoded").send().await.unwrap();
        let cookie = login.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned();
        let request =
            client.get(format!("{}{path}", server.base)).header("cookie", cookie).header("accept", "text/html");
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.text().await.unwrap())
    };
    let (_, list) = page("ann-key-1", "/runs").await;
    assert!(list.contains("private prompt"), "{list}");
    let (_, list) = page("bob-key", "/runs").await;
    assert!(!list.contains("private prompt"), "{list}");
    for path in ["/runs/ann-page?retry=5", "/runs/ann-page?view=text&retry=5", "/compare?a=ann-page&b=ann-page"] {
        let (status, html) = page("bob-key", path).await;
        assert_eq!(status, 404, "{path}");
        assert!(!html.contains("private prompt"), "{path}");
    }
    for key in ["ann-key-2", "admin-key"] {
        let (status, html) = page(key, "/runs/ann-page").await;
        assert!(status == 200 && html.contains("private prompt"), "{key}: {status}");
    }
}
