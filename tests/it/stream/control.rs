//! Control messages and feedback.

use super::{Client, assemble_text, endless, with_type};
use crate::harness::{self, ErrorTable, Server, server};
use serde_json::{Value, json};

/// Returns a client with a run in progress, and the run's id.
async fn start_run(server: &Server) -> (Client, String) {
    let mut client = Client::connect(server).await;
    client.send(&endless()).await;
    let init = client.message().await;
    (client, init["request_id"].as_str().unwrap().to_owned())
}

#[tokio::test]
async fn stop_ends_a_run_with_its_completion() {
    let server = server().await;
    let (mut client, id) = start_run(server).await;
    let mut messages = client.until(|message| message["index"] == 5).await;
    client.send(&json!({"type": "control", "action": "stop"})).await;
    messages.extend(client.until_end().await);
    let completion = messages.last().unwrap();
    assert_eq!(
        (&completion["type"], &completion["finish_reason"]),
        (&json!("completion"), &json!("stop")),
        "{completion}"
    );
    assert_eq!((&completion["stopped_by"], &completion["request_id"]), (&json!("client"), &json!(id)));
    assert_eq!(completion["generated_text"], assemble_text(&messages));
    assert!(completion["usage"]["completion_tokens"].as_u64().unwrap() < 3900);
    assert_eq!(server.finished(&id).await["run"]["status"], "cancelled");
    client.send(&json!({"type": "control", "action": "stop", "request_id": id})).await;
    let error = client.message().await;
    assert_eq!(
        error["message"],
        format!("run '{id}' has ended; send regenerate or a new config message to start another")
    );
}

#[tokio::test]
async fn stop_directly_after_config_ends_run() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    for _ in 0..8 {
        client.send(&endless()).await;
        client.send(&json!({"type": "control", "action": "stop"})).await;
        let messages = client.until_end().await;
        let completion = messages.last().unwrap();
        assert_eq!((&completion["type"], &completion["stopped_by"]), (&json!("completion"), &json!("client")));
        // If the run had already started, it is cancelled.
        for init in with_type(&messages, "init") {
            assert_eq!(init["request_id"], completion["request_id"]);
            assert_eq!(server.finished(init["request_id"].as_str().unwrap()).await["run"]["status"], "cancelled");
        }
        assert_eq!(completion["generated_text"], assemble_text(&messages));
    }
    let last = client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})).await;
    assert_eq!(last[0]["type"], "init", "a message of a stopped run: {last:?}");
}

#[tokio::test]
async fn modified_temperature_takes_effect_and_is_recorded() {
    let server = server().await;
    let (mut client, id) = start_run(server).await;
    client.until(|message| message["index"] == 3).await;
    client
        .send(&json!({"type": "control", "action": "modify", "parameters": {"temperature": 0.0, "top_p": 0.95}}))
        .await;
    let status = client.until_status("modify").await.pop().unwrap();
    assert_eq!(status["parameters"], json!({"temperature": 0.0, "top_p": 0.95}), "{status}");
    let from: usize = {
        let text = status["message"].as_str().unwrap();
        text.split("from token ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
    };
    // A lower maximum ends the run soon.
    client.send(&json!({"type": "control", "action": "modify", "parameters": {"max_tokens": from + 200}})).await;
    let completion = client.until_end().await.pop().unwrap();
    assert_eq!(completion["finish_reason"], "length", "{completion}");
    let run = server.finished(&id).await;
    let events = run["events"].as_array().unwrap();
    let note =
        events.iter().find(|event| event["details"]["note"].as_str().is_some_and(|note| note.contains("temperature")));
    assert_eq!(note.expect("no note in the trace")["step"].as_u64().unwrap() as usize, from, "{note:?}");
    // Temperature 0 selects the most probable token, unless it is a banned end token. Earlier tokens are drawn.
    let ranks = |range: std::ops::Range<usize>| -> Vec<u64> {
        let sampled = events.iter().filter(|event| event["event_type"] == "Sampled");
        let steps = sampled.filter(|event| range.contains(&(event["step"].as_u64().unwrap() as usize)));
        steps.map(|event| event["details"]["tokens"][0]["rank"].as_u64().unwrap_or(0)).collect()
    };
    let ranks_after = ranks(from..from + 100);
    let most_probable = ranks_after.iter().filter(|&&rank| rank == 1).count();
    assert!(
        ranks_after.len() == 100 && most_probable >= 50 && ranks_after.iter().all(|&rank| rank <= 3),
        "{ranks_after:?}"
    );
    assert!(ranks(1..from).iter().any(|&rank| rank > 1));
}

#[tokio::test]
async fn changed_stop_strings_apply_immediately() {
    let server = server().await;
    let (mut client, _) = start_run(server).await;
    client.until(|message| message["index"] == 2).await;
    client.send(&json!({"type": "control", "action": "modify", "parameters": {"stop": ["e", "a", "o", "i"]}})).await;
    let messages = client.until_end().await;
    let completion = messages.last().unwrap();
    assert_eq!(completion["finish_reason"], "stop", "{completion}");
    assert!(completion["stop_string"].is_string());
}

#[tokio::test]
async fn changed_stop_tokens_apply_immediately() {
    let server = server().await;
    let (mut client, _) = start_run(server).await;
    client.until(|message| message["index"] == 2).await;
    let tokens: Vec<u32> = (40..300).collect();
    client.send(&json!({"type": "control", "action": "modify", "parameters": {"stop_tokens": tokens}})).await;
    let completion = client.until_end().await.pop().unwrap();
    assert_eq!(completion["finish_reason"], "stop", "{completion}");
}

#[tokio::test]
async fn unmodifiable_parameter_is_rejected_without_change() {
    let server = server().await;
    let (mut client, id) = start_run(server).await;
    let mut errors = ErrorTable::default();
    for parameters in [
        json!({"prompt": "other"}),
        json!({"temprature": 1}),
        json!({"temperature": "hot"}),
        json!({"banned_tokens": [99999]}),
        json!({}),
    ] {
        client.send(&json!({"type": "control", "action": "modify", "parameters": parameters, "request_id": id})).await;
        let error = client.until(|message| message["type"] == "error").await.pop().unwrap();
        assert_eq!(error["error"], "invalid_request");
        assert!(error.get("generated_text").is_none(), "the run continues: {error}");
        errors.add_message(parameters, &error);
    }
    insta::assert_snapshot!("modify_errors", errors);
    client.send(&json!({"type": "control", "action": "stop"})).await;
    assert_eq!(client.until_end().await.last().unwrap()["type"], "completion");
}

#[tokio::test]
async fn paused_run_releases_slot_and_resumes() {
    let server = Server::start(&["--parallel", "1", "--pause-timeout", "1"]);
    server.wait_ready().await;
    // Every message contains the text so far. That fills the buffers, so that the run cannot end before it is paused.
    let config = json!({"type": "config", "prompt": "Once upon a time",
                        "parameters": {"max_tokens": 2500, "temperature": 1.0, "seed": 11, "ignore_eos": true}});
    let mut client = Client::connect(&server).await;
    client.send(&config).await;
    let mut messages = client.until(|message| message["index"] == 3).await;
    client.send(&json!({"type": "control", "action": "pause"})).await;
    messages.extend(client.until_status("pause").await);
    let before = assemble_text(&messages);
    // After the pause timeout, the slot is released for other runs.
    let second_pause = client.until_status("pause").await;
    assert!(
        second_pause.last().unwrap()["message"].as_str().unwrap().contains("the slot was released"),
        "{second_pause:?}"
    );
    messages.extend(second_pause);
    assert_eq!(with_type(&messages, "completion").count(), 0, "the run ended before it was paused");
    let other = json!({"prompt": "An unrelated prompt", "max_tokens": 40, "ignore_eos": true});
    server.answer("/v1/generate", &other).await;
    client.send(&json!({"type": "control", "action": "resume"})).await;
    messages.extend(client.until_end().await);
    let completion = messages.last().unwrap();
    assert_eq!(completion["type"], "completion", "{completion}");
    // The run continued without a gap. A second run with the same seed could differ, because the way in which a state
    // was computed affects its last digits.
    assert_eq!(completion["generated_text"], assemble_text(&messages));
    assert!(completion["generated_text"].as_str().unwrap().starts_with(&before));
    let indices: Vec<u64> = with_type(&messages, "token").map(|token| token["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, (1..=2500).collect::<Vec<_>>());
    assert_eq!(completion["usage"]["completion_tokens"], 2500);
}

#[tokio::test]
async fn repeated_pause_reports_lost_slot_once() {
    let server = Server::start(&["--parallel", "1", "--pause-timeout", "1"]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    client.send(&endless()).await;
    client.until(|message| message["index"] == 3).await;
    for _ in 0..3 {
        client.send(&json!({"type": "control", "action": "pause"})).await;
    }
    for _ in 0..3 {
        client.until_status("pause").await;
    }
    let is_lost =
        |message: &Value| message["message"].as_str().is_some_and(|text| text.contains("the slot was released"));
    client.until(is_lost).await;
    // Other reports would arrive at about the same time.
    for _ in 0..10 {
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        client.send(&json!({"type": "ping"})).await;
        let messages = client.until_status("ping").await;
        assert!(!messages.iter().any(is_lost), "{messages:?}");
    }
}

#[tokio::test]
async fn run_continues_if_regenerate_cannot_start() {
    let models = harness::folder();
    std::fs::copy(harness::model(), models.join("apple.gguf")).unwrap();
    let flags = ["--models-dir", models.to_str().unwrap(), "--no-models-autoload", "--shutdown-grace", "120"];
    let server = Server::start(&flags);
    server.wait_ready().await;
    let apple = json!({"model": "apple"});
    assert_eq!(server.post("/models/load", &apple).await.0, 200);
    let mut client = Client::connect(&server).await;
    let mut config = endless();
    config["model"] = "apple".into();
    client.send(&config).await;
    let mut messages = client.until(|message| message["type"] == "init").await;
    let id = messages.last().unwrap()["request_id"].clone();
    messages.extend(client.until(|message| message["index"] == 3).await);
    // A model that is being unloaded accepts no new runs.
    assert_eq!(server.post("/models/unload", &apple).await.0, 200);
    client.send(&json!({"type": "control", "action": "regenerate"})).await;
    messages.extend(client.until_end().await);
    let error = messages.last().unwrap();
    assert_eq!((&error["type"], &error["request_id"]), (&json!("error"), &id), "{error}");
    assert!(error.get("generated_text").is_none(), "the run continues: {error}");
    client.send(&json!({"type": "control", "action": "stop", "request_id": id})).await;
    messages.extend(client.until_end().await);
    let completion = messages.last().unwrap();
    assert_eq!((&completion["stopped_by"], &completion["request_id"]), (&json!("client"), &id), "{completion}");
    assert_eq!(completion["generated_text"], assemble_text(&messages));
}

#[tokio::test]
async fn regenerate_replaces_run() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    client
        .send(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 3900, "ignore_eos": true}}))
        .await;
    let first = client.message().await;
    client.until(|message| message["index"] == 3).await;
    client
        .send(&json!({"type": "control", "action": "modify", "parameters": {"max_tokens": 3800, "temperature": 0}}))
        .await;
    client.until_status("modify").await;
    client.send(&json!({"type": "control", "action": "regenerate"})).await;
    let init = client.until(|message| message["type"] == "init").await.pop().unwrap();
    assert_eq!(init["replaces"], first["request_id"]);
    assert_ne!(init["request_id"], first["request_id"]);
    // The first run sends no further messages.
    let token = client.until(|message| message["index"] == 5).await;
    assert!(with_type(&token, "token").all(|token| token["request_id"] == init["request_id"]));
    client.send(&json!({"type": "control", "action": "stop"})).await;
    assert_eq!(client.until_end().await.last().unwrap()["request_id"], init["request_id"]);
    let run = server.finished(init["request_id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["temperature"], 0.0, "the modified temperature applies to the new run");
    assert_eq!(server.finished(first["request_id"].as_str().unwrap()).await["run"]["status"], "cancelled");
    // A run that has ended can be regenerated, too.
    client.send(&json!({"type": "control", "action": "regenerate"})).await;
    assert_eq!(client.message().await["replaces"], init["request_id"]);
}

#[tokio::test]
async fn many_feedback_messages_are_all_answered() {
    const COUNT: usize = 100;
    let mut client = Client::connect(server().await).await;
    client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})).await;
    // More than the server handles concurrently, sent before the first reply is read.
    for _ in 0..COUNT {
        client.send(&json!({"type": "feedback", "rating": 1})).await;
    }
    for _ in 0..COUNT {
        client.until_status("feedback").await;
    }
}

#[tokio::test]
async fn feedback_is_stored_and_shown() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let config = json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 5}});
    let init = client.run(&config).await.remove(0);
    client.send(&json!({"type": "feedback", "rating": 1, "text": "Great response!", "position": 120})).await;
    let status = client.until_status("feedback").await.pop().unwrap();
    assert_eq!(status["request_id"], init["request_id"]);
    let run_id = init["run_id"].as_str().unwrap();
    let feedback = |response: Value| response["feedback"].clone();
    let (_, stored) = server.get(&format!("/api/v1/runs/{run_id}/feedback")).await;
    let stored = feedback(stored);
    assert_eq!(
        (&stored[0]["rating"], &stored[0]["text"], &stored[0]["position"]),
        (&json!(1.0), &json!("Great response!"), &json!(120))
    );
    // Feedback is also accepted on another connection and over HTTP.
    let mut other = Client::connect(server).await;
    other.send(&json!({"type": "feedback", "rating": -0.5, "request_id": init["request_id"]})).await;
    other.until_status("feedback").await;
    let (status, _) = server.post(&format!("/api/v1/runs/{run_id}/feedback"), &json!({"rating": 0})).await;
    assert_eq!(status, 201);
    let (_, stored) = server.get(&format!("/api/v1/runs/{run_id}/feedback")).await;
    assert_eq!(feedback(stored).as_array().unwrap().len(), 3);
    let page = server.request(reqwest::Method::GET, &format!("/runs/{run_id}")).header("accept", "text/html");
    let page = page.send().await.unwrap().text().await.unwrap();
    assert!(page.contains("Great response!") && page.contains("at token 121"), "{page}");
    let mut errors = ErrorTable::default();
    for feedback in [
        json!({"type": "feedback", "rating": 2}),
        json!({"type": "feedback"}),
        json!({"type": "feedback", "rating": 1, "position": -1}),
        json!({"type": "feedback", "rating": 1, "request_id": "nobody"}),
    ] {
        client.send(&feedback).await;
        errors.add_message(feedback, &client.message().await);
    }
    insta::assert_snapshot!("feedback_errors", errors);
    // A run with feedback can be deleted.
    server.finished(run_id).await;
    let deleted = server.request(reqwest::Method::DELETE, &format!("/api/v1/runs/{run_id}")).send().await.unwrap();
    assert_eq!(deleted.status(), 204);
}
