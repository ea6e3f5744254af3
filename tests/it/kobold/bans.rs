//! Bans and sampling fields that clients of `KoboldCPP` send.

use crate::harness::{message_of, server, with_fields};
use serde_json::{Value, json};

const PATH: &str = "/api/v1/generate";

/// Returns a request for the most probable answer.
fn greedy(fields: &Value) -> Value {
    let body =
        json!({"prompt": "The sky is", "max_length": 12, "temperature": 0, "bypass_eos": true, "logprobs": true});
    with_fields(body, fields)
}

async fn result(fields: Value) -> Value {
    server().await.answer(PATH, &greedy(&fields)).await["results"][0].clone()
}

#[tokio::test]
async fn banned_phrases_are_removed_in_any_case() {
    let text = result(json!({})).await["text"].as_str().unwrap().to_owned();
    let phrase: String = text.chars().skip(2).take(6).collect();
    for name in ["banned_tokens", "banned_strings"] {
        for sent in [phrase.clone(), phrase.to_ascii_uppercase()] {
            let banned = result(json!({name: [sent, "shivers down"]})).await["text"].as_str().unwrap().to_owned();
            assert!(!banned.to_lowercase().contains(&phrase.to_lowercase()), "{phrase:?} is in {banned:?}");
        }
    }
}

#[tokio::test]
async fn banned_token_ids_are_not_sampled() {
    let free = result(json!({})).await;
    let first = free["logprobs"]["token_ids"][0].clone();
    for fields in [json!({"custom_token_bans": format!("{first}, 5")}), json!({"banned_tokens": [first]})] {
        let banned = result(fields.clone()).await["logprobs"]["token_ids"].clone();
        assert!(!banned.as_array().unwrap().contains(&first), "{fields}: {banned}");
    }
    let (status, error) = server().await.post(PATH, &greedy(&json!({"custom_token_bans": "5,x"}))).await;
    let message = "`custom_token_bans` must be token ids below 640, separated by commas, got \"x\"";
    assert_eq!((status, message_of(&error)), (400, message));
}

#[tokio::test]
async fn nsigma_limits_the_candidates() {
    let free = result(json!({})).await;
    let body = json!({"temperature": 5, "top_k": 0, "nsigma": 0.001, "sampler_seed": 3});
    // Later tokens may depend on the other runs of a decode.
    assert_eq!(result(body).await["logprobs"]["token_ids"][0], free["logprobs"]["token_ids"][0]);
}

#[tokio::test]
async fn routes_of_koboldai_respond() {
    let server = server().await;
    let newest = server.answer("/api/latest/generate", &greedy(&json!({}))).await;
    assert!(newest["results"][0]["text"].is_string(), "{newest}");
    let (status, error) = server.post("/api/latest/generate", &json!({"max_length": 1})).await;
    assert_eq!((status, &error["detail"]["type"]), (400, &json!("bad_input")));
    for version in ["v1", "latest"] {
        let config = async |name: &str| server.get(&format!("/api/{version}/config/{name}")).await;
        assert_eq!(config("soft_prompts_list").await, (200, json!({"values": []})));
        assert_eq!(config("soft_prompt").await, (200, json!({"value": ""})));
    }
    let (status, check) = server.get("/api/extra/generate/check").await;
    assert!(status == 200 && check["results"][0]["text"].is_string(), "{check}");
}
