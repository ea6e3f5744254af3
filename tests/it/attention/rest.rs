//! Complete answers over HTTP.

use super::{HEADS, LAYERS, PATH, connect, generate_request, send, tokens_of, until_done};
use crate::harness::server;
use serde_json::json;
use yawc::Options;

#[tokio::test]
async fn complete_response_has_all_fields() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is").await;
    let body = generate_request(&prompt, &json!({"request_id": null, "logprobs": true}));
    let answer = server.answer("/api/v1/generate", &body).await;
    let (tokens, data) = (answer["generated_tokens"].as_array().unwrap(), answer["attention_data"].as_array().unwrap());
    assert_eq!((tokens.len(), data.len(), &answer["finish_reason"]), (4, 4, &json!("length")));
    assert_eq!(data[3]["attention"]["shape"], json!([LAYERS, HEADS, prompt.len() + 3]));
    assert_eq!(data[3]["token_id"], tokens[3]["token_id"]);
    assert!(tokens[0]["logprob"].as_f64().unwrap() <= 0.0);
    let text: String = tokens.iter().map(|token| token["text"].as_str().unwrap()).collect();
    assert_eq!(answer["generated_text"], text);
    // A stop token is not part of the answer; a banned token is never sampled.
    let second = &tokens[1]["token_id"];
    let stopped = server
        .answer("/api/v1/generate", &generate_request(&prompt, &json!({"request_id": null, "stop_tokens": [second]})))
        .await;
    let expected = usize::from(tokens[0]["token_id"] != *second);
    assert_eq!(
        (stopped["generated_tokens"].as_array().unwrap().len(), &stopped["finish_reason"]),
        (expected, &json!("stop_token"))
    );
    let banned = server
        .answer("/api/v1/generate", &generate_request(&prompt, &json!({"request_id": null, "banned_tokens": [second]})))
        .await;
    assert!(banned["generated_tokens"].as_array().unwrap().iter().all(|token| token["token_id"] != *second));
    let plain = server.answer("/api/v1/generate", &json!({"input_ids": prompt, "max_new_tokens": 2})).await;
    assert!(plain.get("attention_data").is_none(), "attention was not requested");
    // This client does not decompress responses by itself.
    let uncompressed = crate::harness::client().no_gzip().no_zstd().build().unwrap();
    let gzipped = uncompressed
        .post(format!("{}/api/v1/generate", server.base))
        .header("accept-encoding", "gzip")
        .json(&body)
        .send()
        .await;
    assert_eq!(gzipped.unwrap().headers()["content-encoding"], "gzip");
}

#[tokio::test]
async fn tool_calls_of_a_mod_are_in_the_answer() {
    let server = server().await;
    let calls = json!([{"name": "get_weather", "arguments": {"city": "Oakford"}}]);
    let body = generate_request(&[40, 41], &json!({"mods": ["call_tool"]}));
    let answer = server.answer("/api/v1/generate", &body).await;
    assert_eq!((&answer["finish_reason"], &answer["tool_calls"]), (&json!("tool_calls"), &calls), "{answer}");
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &body).await;
    let done = until_done(&mut socket).await.pop().unwrap().0;
    assert_eq!((&done["finish_reason"], &done["tool_calls"]), (&json!("tool_calls"), &calls), "{done}");
    send(&mut socket, &generate_request(&[40, 41], &json!({}))).await;
    assert_eq!(until_done(&mut socket).await.pop().unwrap().0.get("tool_calls"), None);
}
