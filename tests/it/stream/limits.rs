//! Keys and origins, limits (tokens, sizes, times, rates), status messages, and the stop of the server.

use super::Client;
use super::client::Next;
use crate::harness::postgres::SilentDatabase;
use crate::harness::{self, Server};
use serde_json::{Value, json};

/// Returns the configuration of a run of two tokens.
fn short_run() -> Value {
    json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})
}

#[tokio::test]
async fn key_is_accepted_in_header_or_first_message() {
    let server = Server::start(&["--api-key", "secret", "--cors-origin", "https://app.example"]);
    server.wait_ready().await;
    let mut client = Client::connect_with(&server, &[("authorization", "Bearer secret")]).await.unwrap();
    assert_eq!(client.run(&short_run()).await.last().unwrap()["type"], "completion");
    assert!(Client::connect_with(&server, &[("authorization", "Bearer wrong")]).await.is_err());

    let mut client = Client::connect(&server).await;
    client.send(&json!({"type": "auth", "api_key": "secret"})).await;
    let messages = client.run(&short_run()).await;
    let run = server.finished(messages[0]["run_id"].as_str().unwrap()).await;
    assert!(run["run"]["user_label"].as_str().unwrap().starts_with("key-"), "{}", run["run"]);

    let mut config = short_run();
    config["api_key"] = "secret".into();
    let mut client = Client::connect(&server).await;
    assert_eq!(client.run(&config).await.last().unwrap()["type"], "completion");

    for first in [short_run(), json!({"type": "auth", "api_key": "wrong"})] {
        let mut client = Client::connect(&server).await;
        client.send(&first).await;
        let error = client.message().await;
        assert_eq!((&error["error"], &error["recovery_action"]), (&json!("unauthorized"), &json!("authenticate")));
        assert!(matches!(client.next().await, Next::Closed(Some(1008))));
    }
    let (received, code) = crate::kobold::frames(&server, &json!({"prompt": "Once"})).await;
    let [Ok(error)] = &received[..] else { panic!("{received:?}") };
    assert_eq!((&error["type"], &error["error_code"]), (&json!("error"), &json!("UNAUTHORIZED")), "{error}");
    assert_eq!(code, Some(1008));
    // An `Upgrade` header does not make other paths public, and a key in the URL is ignored.
    let with_upgrade = harness::http().get(format!("{}/api/v1/runs", server.base)).header("upgrade", "websocket");
    assert_eq!(with_upgrade.send().await.unwrap().status(), 401);
    let key_in_url = harness::http().get(format!("{}/generate?api_key=secret", server.base));
    assert_eq!(key_in_url.send().await.unwrap().status(), 401);

    let origin = |origin| [("authorization", "Bearer secret"), ("origin", origin)];
    assert!(Client::connect_with(&server, &origin("https://evil.example")).await.is_err());
    assert!(Client::connect_with(&server, &origin("https://app.example")).await.is_ok());
}

#[tokio::test]
async fn key_is_accepted_when_none_is_required() {
    let server = harness::server().await;
    let mut client = Client::connect(server).await;
    client.send(&json!({"type": "auth", "api_key": "not needed"})).await;
    assert_eq!(client.run(&short_run()).await[0]["type"], "init");
}

#[tokio::test]
async fn maximum_of_server_limits_tokens_on_every_route() {
    let server = Server::start(&["--max-tokens-limit", "12", "--predict", "100", "--mods-dir", harness::MODS]);
    server.wait_ready().await;
    let messages = json!([{"role": "user", "content": "Once"}]);
    let request_body = |path: &str, field: &str| {
        let mut body = match path {
            "/v1/chat/completions" | "/v1/messages" => json!({"messages": messages}),
            "/v1/responses" => json!({"input": "Once"}),
            "/api/v1/generate" if field == "max_new_tokens" => json!({"input_ids": [3, 4, 5]}),
            _ => json!({"prompt": "Once"}),
        };
        body["ignore_eos"] = true.into();
        body
    };
    for (path, field) in [
        ("/v1/generate", "max_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/completion", "n_predict"),
        ("/v1/messages", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/api/v1/generate", "max_length"),
        ("/api/v1/generate", "max_new_tokens"),
    ] {
        let mut body = request_body(path, field);
        body[field] = 13.into();
        let (status, error) = server.post(path, &body).await;
        assert_eq!(status, 400, "{path}: {error}");
        let named = if path == "/v1/responses" || field == "max_new_tokens" { field } else { "max_tokens" };
        assert_eq!(
            harness::message_of(&error),
            format!("`{named}` is 13, but the maximum of this server is 12; send a lower value or omit it"),
            "{path}"
        );
        body[field] = 12.into();
        let (status, answer) = server.post(path, &body).await;
        assert_eq!(status, 200, "{path}: {answer}");
    }
    let tokens = |answer: &Value| answer["usage"]["completion_tokens"].clone();
    let without_max_tokens = server.answer("/v1/generate", &json!({"prompt": "Once", "ignore_eos": true})).await;
    assert_eq!((tokens(&without_max_tokens), &without_max_tokens["finish_reason"]), (json!(12), &json!("length")));
    let kobold = server.answer("/api/v1/generate", &json!({"prompt": "Once", "bypass_eos": true})).await;
    assert!(kobold["results"][0]["text"].is_string(), "{kobold}");
    assert_eq!(server.get("/api/v1/config/max_length").await.1["value"], 12);
}

#[tokio::test]
async fn too_large_message_is_rejected_with_reason() {
    let server = Server::start(&["--max-message", "4K"]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    client.run(&short_run()).await;
    client.send(&json!({"type": "config", "prompt": "x".repeat(5000)})).await;
    let error = client.message().await;
    assert_eq!(error["message"], "a message may have at most 4096 bytes; see --max-message");
    assert!(matches!(client.next().await, Next::Closed(Some(1009))));
}

#[tokio::test]
async fn only_idle_connections_are_closed() {
    let server = Server::start(&["--socket-idle", "5"]);
    server.wait_ready().await;
    let mut generating = Client::connect(&server).await;
    generating.send(&super::endless()).await;
    generating.until(|message| message["index"] == 1).await;
    generating.send(&json!({"type": "control", "action": "pause"})).await;
    generating.until_status("pause").await;
    let mut idle = Client::connect(&server).await;
    idle.run(&short_run()).await;
    assert!(matches!(idle.next().await, Next::Closed(Some(1001))));
    generating.send(&json!({"type": "control", "action": "resume"})).await;
    generating.until_status("resume").await;
    generating.send(&json!({"type": "control", "action": "stop"})).await;
    assert_eq!(generating.until_end().await.last().unwrap()["stopped_by"], "client");
    assert!(matches!(generating.next().await, Next::Closed(Some(1001))));
}

#[tokio::test]
async fn run_rate_is_limited_on_every_route() {
    let server = Server::start(&["--api-key", "one,two", "--rate-limit", "1", "--rate-burst", "4"]);
    server.wait_ready().await;
    let post = async |path: &str, key: &str, body: Value| {
        let request = harness::http().post(format!("{}{path}", server.base)).bearer_auth(key).json(&body);
        request.send().await.unwrap()
    };
    let mut client = Client::connect_with(&server, &[("x-api-key", "one")]).await.unwrap();
    client.run(&short_run()).await;
    let body = json!({"prompt": "Once", "max_tokens": 1});
    for path in ["/v1/generate", "/v1/completions", "/completion"] {
        assert_eq!(post(path, "one", body.clone()).await.status(), 200, "{path}");
    }
    let error = client.run(&short_run()).await.pop().unwrap();
    assert_eq!((&error["error"], &error["recoverable"]), (&json!("rate_limited"), &json!(true)), "{error}");
    assert!(error["retry_after_seconds"].as_u64().unwrap() > 0);
    for path in [
        "/v1/generate",
        "/v1/completions",
        "/v1/chat/completions",
        "/completion",
        "/v1/messages",
        "/v1/responses",
        "/api/v1/reruns",
    ] {
        let rejected = post(path, "one", body.clone()).await;
        assert_eq!(rejected.status(), 429, "{path}");
        let wait: u64 = rejected.headers()["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=60).contains(&wait), "{path}");
    }
    assert_eq!(post("/v1/generate", "two", body).await.status(), 200, "the limit applies to each key separately");
}

#[tokio::test]
async fn loading_model_reports_status() {
    let database = SilentDatabase::new().await;
    let server = Server::start(&["--database-url", &database.url]);
    let mut client = Client::connect(&server).await;
    client.send(&short_run()).await;
    let mut messages = vec![client.message().await];
    database.answer();
    messages.extend(client.until_end().await);
    assert_eq!(messages.last().unwrap()["type"], "completion", "{messages:?}");
    for status in messages.iter().filter(|message| message["type"] == "status") {
        assert_eq!(status["operation"], "model_loading");
        assert!(status["progress"].as_u64().unwrap() <= 100 && status["message"].is_string(), "{status}");
    }
    assert_eq!(messages[0]["type"], "status", "{messages:?}");
}

#[tokio::test]
async fn long_prompt_reports_progress() {
    let mut client = Client::connect(harness::server().await).await;
    let mut config = short_run();
    config["prompt"] = "the old fox and the young owl ".repeat(200).into();
    let messages = client.run(&config).await;
    let percentages: Vec<u64> = messages
        .iter()
        .filter(|message| message["operation"] == "prompt_processing")
        .map(|status| status["progress"].as_u64().unwrap())
        .collect();
    assert!(
        !percentages.is_empty() && percentages.is_sorted() && percentages.iter().all(|&percent| percent < 100),
        "{messages:?}"
    );
    let position_of = |kind: &str| messages.iter().position(|message| message["type"] == kind).unwrap();
    assert!(
        position_of("init") < position_of("status") && position_of("status") < position_of("token"),
        "{messages:?}"
    );
}

#[tokio::test]
async fn config_loads_another_model_or_fails_for_a_damaged_one() {
    let models = harness::folder();
    std::fs::copy(harness::model(), models.join("other.gguf")).unwrap();
    std::fs::write(models.join("broken.gguf"), b"GGUF, but nothing else").unwrap();
    let server = Server::start(&["--models-dir", models.to_str().unwrap()]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    let mut config = short_run();
    config["model"] = "other".into();
    let messages = client.run(&config).await;
    let init = messages.iter().find(|message| message["type"] == "init").expect("no init message");
    assert_eq!(init["model"], "other");
    assert_eq!(messages.last().unwrap()["type"], "completion");
    config["model"] = "broken".into();
    config["request_id"] = "repeated".into();
    let error = client.run(&config).await.pop().unwrap();
    assert_eq!(error["error"], "model_loading_error", "{error}");
    config["model"] = "other".into();
    assert_eq!(client.run(&config).await.last().unwrap()["type"], "completion", "the run that did not start has no id");
}

#[tokio::test]
async fn stopping_server_completes_runs_and_closes_sockets() {
    let server = Server::start(&["--shutdown-grace", "120"]);
    server.wait_ready().await;
    let (mut generating, mut idle) = (Client::connect(&server).await, Client::connect(&server).await);
    idle.run(&short_run()).await;
    generating
        .send(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 800, "ignore_eos": true},
                      "options": {"generated_text": "delta"}}))
        .await;
    generating.until(|message| message["index"] == 1).await;
    let stopped = server.stop("TERM");
    let received = async {
        assert!(matches!(idle.next().await, Next::Closed(Some(1001))));
        assert_eq!(generating.until_end().await.last().unwrap()["usage"]["completion_tokens"], 800);
        assert!(matches!(generating.next().await, Next::Closed(Some(1001))));
    };
    let (code, ()) = tokio::join!(stopped, received);
    assert_eq!(code, Some(0), "{}", server.log());
}

#[tokio::test]
async fn interrupted_run_of_stopping_server_returns_partial_text() {
    let server = Server::start(&["--shutdown-grace", "1"]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    client.send(&super::endless()).await;
    let mut messages = client.until(|message| message["index"] == 3).await;
    client.send(&json!({"type": "control", "action": "pause"})).await;
    messages.extend(client.until_status("pause").await);
    let received = async {
        messages.extend(client.until_end().await);
        let error = messages.last().unwrap();
        assert_eq!((&error["error"], &error["recovery_action"]), (&json!("unavailable"), &json!("retry")), "{error}");
        assert_eq!(error["generated_text"], super::assemble_text(&messages));
        assert!(matches!(client.next().await, Next::Closed(Some(1001))));
    };
    let (code, ()) = tokio::join!(server.stop("TERM"), received);
    assert_eq!(code, Some(0), "{}", server.log());
}
