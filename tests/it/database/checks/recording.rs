//! Runs that the server records.

use crate::chat::forced_answer;
use crate::database::target::Target;
use reqwest::Method;
use serde_json::json;

pub async fn chat_is_recorded(target: &Target) {
    let run = target.generate(json!({"request_id": target.name("chat")})).await;
    assert_eq!((&run["run"]["status"], &run["run"]["completion_tokens"]), (&json!("done"), &json!(8)));
}

pub async fn chat_stream_is_recorded(target: &Target) {
    let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "ignore_eos": true,
        "stream": true, "request_id": target.name("stream")});
    let chunks = target.server.stream("/v1/chat/completions", &body).await;
    assert_eq!(chunks.last().unwrap(), "[DONE]");
    let run = target.server.finished(&target.name("stream")).await;
    assert_eq!(run["run"]["completion_tokens"], 6);
}

pub async fn completion_is_recorded(target: &Target) {
    let body = json!({"prompt": "Once", "max_tokens": 5, "ignore_eos": true, "request_id": target.name("text")});
    target.server.answer("/v1/completions", &body).await;
    assert_eq!(target.server.finished(&target.name("text")).await["run"]["completion_tokens"], 5);
}

pub async fn many_runs_at_once_are_recorded(target: &Target) {
    let generate =
        async |number: i32| target.generate(json!({"request_id": target.name(&format!("at-once{number}"))})).await;
    let runs = futures::future::join_all((0..8).map(generate)).await;
    assert!(runs.iter().all(|run| run["run"]["status"] == "done" && run["run"]["completion_tokens"] == 8), "{runs:?}");
}

pub async fn repeated_request_id_is_a_conflict(target: &Target) {
    let body = json!({
        "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2, "request_id": target.name("chat"),
    });
    // The server accepts the request if its lookup in the database takes too long.
    let mut answer = target.server.post("/v1/chat/completions", &body).await;
    for _ in 0..20 {
        if answer.0 == 409 {
            break;
        }
        answer = target.server.post("/v1/chat/completions", &body).await;
    }
    let (status, error) = answer;
    assert_eq!((status, &error["error"]["param"]), (409, &json!("request_id")), "{error}");
}

pub async fn mod_is_recorded(target: &Target) {
    let run = target
        .generate(json!({"mods": forced_answer("a tall story"), "max_tokens": 60, "request_id": target.name("mod")}))
        .await;
    assert_eq!(run["run"]["mods"], json!(["force-prefix"]));
    assert!(
        run["run"]["forced"].as_i64().unwrap() > 0 && run["run"]["actions"].as_i64().unwrap() > 0,
        "{}",
        run["run"]
    );
}

pub async fn mod_error_is_recorded(target: &Target) {
    let run = target.generate(json!({"mods": ["breaks"], "request_id": target.name("error")})).await;
    assert_eq!(run["run"]["errors"], 1, "{}", run["run"]);
}

pub async fn backtrack_is_recorded(target: &Target) {
    let mods = json!([{"name": "ban-phrases", "config": {"phrases": ["e", "a", "t", "o"]}}]);
    let run = target.generate(json!({"mods": mods, "max_tokens": 24, "request_id": target.name("back")})).await;
    assert_eq!(run["run"]["status"], "done");
    assert!(run["run"]["backtracked"].as_i64() > Some(0), "{}", run["run"]);
}

pub async fn mod_of_a_file_is_recorded(target: &Target) {
    let run = target.generate(json!({"mods": ["greets"], "request_id": target.name("greets")})).await;
    assert_eq!((&run["run"]["mods"], &run["run"]["output_preview"]), (&json!(["greets"]), &json!("hello")));
}

pub async fn attention_is_stored(target: &Target) {
    let run = target.generate(json!({"attention": true, "request_id": target.name("attention")})).await;
    let events = run["events"].as_array().unwrap();
    let last = events.iter().rev().find(|event| event["event_type"] == "ForwardPass").unwrap();
    let path =
        format!("/api/v1/runs/{}/attention?at={}", run["run"]["run_id"].as_str().unwrap(), last["sequence_order"]);
    let (status, attention) = target.server.get(&path).await;
    assert_eq!((status, &attention["attention"]["sequence_order"]), (200, &last["sequence_order"]), "{attention}");
}

/// Starts a streamed run and returns its id after its first token.
async fn start_stream(target: &Target, name: &str) -> (String, reqwest::Response) {
    let body = json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true, "request_id": target.name(name)});
    let request = target.server.request(Method::POST, "/v1/completions").json(&body);
    let mut response = request.send().await.unwrap();
    let id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    response.chunk().await.unwrap();
    (id, response)
}

pub async fn active_run_is_readable(target: &Target) {
    let (id, _response) = start_stream(target, "running").await;
    let (status, run) = target.server.get(&format!("/api/v1/runs/{id}")).await;
    assert_eq!((status, &run["run"]["request_id"]), (200, &json!(target.name("running"))));
    assert_eq!(target.runs_matching("status:running").await, [target.name("running")]);
}

pub async fn abandoned_run_is_cancelled(target: &Target) {
    // The client of this run has disconnected at the end of the previous check.
    let run = target.server.finished(&target.name("running")).await;
    assert_eq!(run["run"]["status"], "cancelled");
}

pub async fn recorder_survives_terminated_connections(target: &Target) {
    let mut connection = target.connect().await;
    let terminate = "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database()
        and pid <> pg_backend_pid() and backend_type = 'client backend'";
    sqlx::raw_sql(terminate).execute(&mut connection).await.unwrap();
    drop(connection);
    let run = target.generate(json!({"request_id": target.name("after")})).await;
    assert_eq!(run["run"]["status"], "done");
}
