//! Retractions by mods in the formats of `KoboldCPP`.

use super::{WAIT_TIMEOUT, events, frames};
use crate::harness::{Server, server};
use serde_json::{Value, json};
use std::time::Duration;

#[tokio::test]
async fn backtracked_text_is_retracted_from_stream() {
    let server = server().await;
    for trim_stop in [true, false] {
        let body = json!({"prompt": "The sky is", "max_length": 16, "temperature": 0, "bypass_eos": true,
                          "mods": ["replace_start"], "trim_stop": trim_stop});
        let (mut text, mut retracted) = (String::new(), 0);
        for (_, event) in events(server, &body).await {
            let chars = event.pointer("/thunder/retract/chars").and_then(Value::as_u64).unwrap_or(0);
            for _ in 0..chars {
                text.pop().unwrap();
            }
            retracted += chars;
            text.push_str(event["token"].as_str().unwrap());
        }
        assert!(retracted > 0 && text.starts_with("Instead"), "trim_stop {trim_stop}: {text:?}");
    }
}

/// Polls the text of a generation until the mod has replaced its start, and aborts it.
async fn text_after_retraction(server: &Server, genkey: &str) -> String {
    let key = json!({"genkey": genkey});
    let polled = async {
        loop {
            let check = server.answer("/api/extra/generate/check", &key).await;
            let text = check["results"][0]["text"].as_str().unwrap();
            if text.contains("Instead") {
                break text.to_owned();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let text = tokio::time::timeout(WAIT_TIMEOUT, polled).await.expect("the text has no \"Instead\"");
    server.answer("/api/extra/abort", &key).await;
    text
}

#[tokio::test]
async fn polled_text_of_token_ids_lacks_retracted_text() {
    let server = server().await;
    let genkey = |route: &str| format!("RETRACT{route}{}", std::process::id());
    let body = |genkey: &str| json!({"input_ids": [40, 41, 42], "max_length": 3000, "ignore_eos": true, "mods": ["replace_start"], "genkey": genkey});
    let (key, other_key) = (genkey("EVENTS"), genkey("FRAMES"));
    let (body, other_body) = (body(&key), body(&other_key));
    let (_, text) = tokio::join!(events(server, &body), text_after_retraction(server, &key));
    assert!(text.starts_with("Instead"), "{text:?}");
    let (_, text) = tokio::join!(frames(server, &other_body), text_after_retraction(server, &other_key));
    assert!(text.starts_with("Instead"), "{text:?}");
}
