//! Experiments that are cancelled, interrupted or resumed, and limits on their number and access.

use super::{ROUTE, action, column, grid, resume, start, wait_for_state};
use crate::harness::{Server, folder};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::time::Duration;

#[tokio::test]
async fn cancelled_experiment_ends_at_once_and_can_be_resumed() {
    let server = Server::start(&["--parallel", "2"]);
    server.wait_ready().await;
    let mut definition = grid();
    definition["mods"] = json!([[]]);
    definition["parameters"] = json!([{"max_tokens": 400, "ignore_eos": true}]);
    definition["seeds"] = json!([1, 2, 3, 4]);
    let id = start(&server, &definition).await;
    let (status, cancelled) = action(&server, &id, "cancel").await;
    assert_eq!((status, &cancelled["state"]), (200, &json!("cancelled")), "{cancelled}");
    // An execution that is still ending cannot be resumed.
    let resumed = resume(&server, &id).await;
    assert_eq!(resumed["state"], "running", "{resumed}");
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), [&json!("done"); 8]);
    assert_eq!(column(&done, "completion_tokens"), [&json!(400); 8]);
}

#[tokio::test]
async fn experiment_of_killed_server_is_interrupted_and_can_be_resumed() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let mut definition = grid();
    definition["parameters"] = json!([{"max_tokens": 300, "ignore_eos": true}]);
    let id = start(&server, &definition).await;
    let first = loop {
        let (_, experiment) = server.get(&format!("{ROUTE}/{id}")).await;
        if experiment["grid"][0]["state"] == "done" && experiment["grid"][0]["score"].is_number() {
            break experiment["grid"][0].clone();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    server.stop("KILL").await;
    let server = server.start_again(&["--parallel", "1"]);
    server.wait_ready().await;
    let interrupted = wait_for_state(&server, &id, "interrupted").await;
    assert!(column(&interrupted, "state").contains(&&json!("pending")), "{interrupted}");
    assert_eq!(action(&server, &id, "resume").await.0, 200);
    let done = wait_for_state(&server, &id, "done").await;
    assert_eq!(column(&done, "state"), [&json!("done"); 8]);
    assert_eq!(done["grid"][0], first, "a run that had ended is kept");
    let ids: HashSet<&str> = column(&done, "run_id").into_iter().map(|id| id.as_str().unwrap()).collect();
    assert_eq!(ids.len(), 8);
}

#[tokio::test]
async fn server_runs_a_limited_number_of_experiments() {
    let process = Server::start(&["--parallel", "1", "--mod-key", "boss", "--allow-mod-upload"]);
    let server = Server::external(process.wait_ready().await.base.clone(), Some("boss"));
    let mut definition = grid();
    definition["parameters"] = json!([{"max_tokens": 1000, "ignore_eos": true}]);
    // An experiment with an invalid scorer does not count.
    let mut invalid = definition.clone();
    invalid["score"] = json!({"regex": "("});
    for _ in 0..9 {
        assert_eq!(server.post(ROUTE, &invalid).await.0, 400);
    }
    definition["seeds"] = json!((0..100).collect::<Vec<_>>());
    let mut ids = Vec::new();
    for _ in 0..8 {
        ids.push(start(&server, &definition).await);
    }
    let (status, problem) = server.post(ROUTE, &definition).await;
    assert!(status == 429 && problem["detail"].as_str().unwrap().contains("runs 8 experiments already"), "{problem}");
    // The limit is checked before a worker imports the scorer, so the error in this scorer is not found.
    invalid["score"] = json!({"python": "1 / 0"});
    assert_eq!(server.post(ROUTE, &invalid).await.0, 429);
    // Other clients are served meanwhile.
    server.answer("/v1/completions", &json!({"prompt": "Hello", "max_tokens": 2})).await;
    assert_eq!(action(&server, &ids[0], "cancel").await.0, 200);
    loop {
        let (status, problem) = server.post(ROUTE, &definition).await;
        if status == 201 {
            break;
        }
        assert_eq!(status, 429, "{problem}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn experiment_belongs_to_its_tenant() {
    let keys = folder().join("keys.txt");
    std::fs::write(&keys, "ann-key name=ann\nbob-key name=bob\nadmin-key name=ops admin\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_ready().await;
    let send = async |key: &str, method: Method, path: &str, body: Option<&Value>| {
        let mut request = server.request(method, path).bearer_auth(key);
        if let Some(body) = body {
            request = request.json(body);
        }
        let response = request.send().await.unwrap();
        (response.status().as_u16(), response.json::<Value>().await.unwrap_or_default())
    };
    let (status, experiment) = send("ann-key", Method::POST, ROUTE, Some(&grid())).await;
    assert_eq!(status, 201, "{experiment}");
    let path = format!("{ROUTE}/{}", experiment["experiment_id"].as_str().unwrap());
    for (method, path) in [
        (Method::GET, path.clone()),
        (Method::DELETE, path.clone()),
        (Method::POST, format!("{path}/cancel")),
        (Method::POST, format!("{path}/resume")),
    ] {
        assert_eq!(send("bob-key", method.clone(), &path, None).await.0, 404, "{method} {path}");
    }
    for (key, count) in [("ann-key", 1), ("bob-key", 0), ("admin-key", 1)] {
        let (_, list) = send(key, Method::GET, ROUTE, None).await;
        assert_eq!(list["experiments"].as_array().unwrap().len(), count, "{key}");
    }
    assert_eq!(send("admin-key", Method::GET, &path, None).await.0, 200);
}
