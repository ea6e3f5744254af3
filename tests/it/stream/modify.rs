//! The action `modify`: aliases, and the seed.

use super::{Client, endless, with_type};
use crate::harness::{Server, server, with_fields};
use serde_json::{Value, json};

/// Pauses the newest run. Returns the messages up to the status, and the number of tokens that the run has generated.
async fn pause(client: &mut Client) -> (Vec<Value>, usize) {
    client.send(&json!({"type": "control", "action": "pause"})).await;
    let messages = client.until_status("pause").await;
    let text = messages.last().unwrap()["message"].as_str().unwrap();
    let generated = text.split("paused after ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    (messages, generated)
}

/// Changes parameters of the newest run, which is paused, and resumes it. Returns the messages up to the last status.
async fn modify_and_resume(client: &mut Client, parameters: &Value) -> Vec<Value> {
    client.send(&json!({"type": "control", "action": "modify", "parameters": parameters})).await;
    let mut messages = client.until_status("modify").await;
    client.send(&json!({"type": "control", "action": "resume"})).await;
    messages.extend(client.until_status("resume").await);
    messages
}

#[tokio::test]
async fn modified_maximum_applies_under_every_name() {
    let server = server().await;
    let names = ["n_predict", "max_completion_tokens", "max_tokens"];
    for (name, changed) in [(names[0], names[2]), (names[1], names[2]), (names[2], names[0]), (names[1], names[1])] {
        let mut client = Client::connect(server).await;
        let parameters = json!({name: 3900, "temperature": 1.0, "ignore_eos": true});
        client.send(&with_fields(endless(), &json!({"parameters": parameters}))).await;
        client.until(|message| message["index"] == 3).await;
        let (_, generated) = pause(&mut client).await;
        modify_and_resume(&mut client, &json!({changed: generated + 20})).await;
        let completion = client.until_end().await.pop().unwrap();
        assert_eq!(completion["finish_reason"], "length", "{name} {changed}: {completion}");
        assert_eq!(completion["usage"]["completion_tokens"], generated + 20, "{name} {changed}");
    }
}

#[tokio::test]
async fn maximum_below_the_generated_tokens_is_acknowledged_before_the_end() {
    let mut client = Client::connect(server().await).await;
    client.send(&endless()).await;
    client.until(|message| message["index"] == 3).await;
    let (_, generated) = pause(&mut client).await;
    client.send(&json!({"type": "control", "action": "modify", "parameters": {"max_tokens": 2}})).await;
    let messages = client.until_status("modify").await;
    assert_eq!(with_type(&messages, "completion").count(), 0, "{messages:?}");
    let status = messages.last().unwrap();
    let text = status["message"].as_str().unwrap();
    assert_eq!(text, format!("max_tokens=2; the run ends after {generated} tokens"), "{status}");
    let completion = client.until_end().await.pop().unwrap();
    assert_eq!((&completion["type"], &completion["finish_reason"]), (&json!("completion"), &json!("length")));
    client.send(&json!({"type": "control", "action": "modify", "parameters": {"max_tokens": 1}})).await;
    assert_eq!(client.until_end().await.pop().unwrap()["type"], "error");
}

#[tokio::test]
async fn every_sampling_parameter_can_be_modified() {
    let mut client = Client::connect(server().await).await;
    client.send(&endless()).await;
    client.until(|message| message["index"] == 3).await;
    let parameters = json!({"xtc_probability": 0.5, "xtc_threshold": 0.1, "t_max_predict_ms": 60_000});
    client.send(&json!({"type": "control", "action": "modify", "parameters": parameters})).await;
    let status = client.until_status("modify").await.pop().unwrap();
    assert_eq!(status["parameters"], parameters, "{status}");
    client.send(&json!({"type": "control", "action": "stop"})).await;
    assert_eq!(client.until_end().await.last().unwrap()["type"], "completion");
}

#[tokio::test]
async fn random_seed_is_kept_by_modify() {
    const TOKENS: usize = 40;
    let server = Server::start(&["--parallel", "1", "--seed", "-1"]);
    server.wait_ready().await;
    // The state of the prompt must be computed in the same way for every run.
    let config = |seed: Value| {
        let parameters =
            json!({"max_tokens": 3900, "temperature": 1.0, "ignore_eos": true, "cache_prompt": false, "seed": seed});
        with_fields(endless(), &json!({"parameters": parameters}))
    };
    let token_ids = |messages: &[Value]| -> Vec<i64> {
        with_type(messages, "token").map(|token| token["token_id"].as_i64().unwrap()).collect()
    };
    // The second run uses the seed of the server's flag.
    for seed in [json!(-1), Value::Null] {
        let mut client = Client::connect(&server).await;
        client.send(&config(seed)).await;
        let mut messages = client.until(|message| message["index"] == 3).await;
        let id = messages[0]["request_id"].as_str().unwrap().to_owned();
        let (until_pause, generated) = pause(&mut client).await;
        messages.extend(until_pause);
        messages.extend(modify_and_resume(&mut client, &json!({"top_k": 40})).await);
        let total = generated + TOKENS;
        if with_type(&messages, "token").count() < total {
            messages.extend(client.until(|message| message["index"] == total).await);
        }
        client.send(&json!({"type": "control", "action": "stop"})).await;
        client.until_end().await;
        let seed = server.finished(&id).await["run"]["seed"].clone();

        client.send(&config(seed)).await;
        let same_seed = client.until(|message| message["index"] == total).await;
        client.send(&json!({"type": "control", "action": "stop"})).await;
        client.until_end().await;
        assert_eq!(token_ids(&messages)[..total], token_ids(&same_seed)[..total], "modified after {generated} tokens");
    }
}
