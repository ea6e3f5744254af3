//! How much attention a server gives at once.

use super::{PATH, asking, connect, send, tokens_of, until_done};
use crate::harness::Server;
use serde_json::{Value, json};
use yawc::Options;

/// Bytes of a row as base64, per position.
const ROW_BYTES: usize = super::LAYERS * super::HEADS * 4 * 4 / 3;

#[tokio::test]
async fn attention_beyond_the_limit_is_out_of_memory_and_ends_its_run() {
    let server = Server::start(&["--max-attention", "16K"]);
    server.wait_ready().await;
    let prompt = tokens_of(&server, "The sky is").await;
    let out_of_memory = |error: &Value| -> usize {
        assert_eq!((&error["type"], &error["error_code"]), (&json!("error"), &json!("OOM")), "{error}");
        assert!(error["error"].as_str().unwrap().contains("--max-attention"), "{error}");
        error["context_length"].as_u64().unwrap() as usize
    };
    // Over HTTP the whole answer counts.
    let body = asking(&prompt, &json!({"request_id": "whole", "max_new_tokens": 300}));
    let (status, error) = server.post("/api/v1/generate", &body).await;
    assert_eq!(status, 507, "{error}");
    let context = out_of_memory(&error);
    let sent: usize = (prompt.len()..=context).map(|row_len| row_len * ROW_BYTES).sum();
    assert!(context > prompt.len() && sent > 15 << 10 && sent < 20 << 10, "{context}");
    assert_eq!(server.finished("whole").await["run"]["status"], "cancelled");
    // On the WebSocket each token counts for itself.
    let mut socket = connect(&server, PATH, Options::default()).await;
    send(&mut socket, &asking(&prompt, &json!({"request_id": "tokens", "max_new_tokens": 300}))).await;
    let messages = until_done(&mut socket).await;
    let context = out_of_memory(&messages.last().unwrap().0);
    assert!(context * ROW_BYTES > 15 << 10 && messages.len() == context - prompt.len() + 1, "{context}");
    assert_eq!(server.finished("tokens").await["run"]["status"], "cancelled");
    // What is smaller goes on as far as it likes.
    for more in [json!({"return_attention": false}), json!({"attention_format": "aggregated"})] {
        let mut asked = asking(&prompt, &json!({"max_new_tokens": 300, "attention_encoding": "base64"}));
        asked.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        send(&mut socket, &asked).await;
        let messages = until_done(&mut socket).await;
        assert_eq!((messages.len(), &messages[300].0["finish_reason"]), (301, &json!("length")));
    }
}
