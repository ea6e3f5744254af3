//! `/infill` on a model that cannot.

use super::super::harness::server;
use serde_json::json;

#[tokio::test]
async fn a_model_without_its_tokens_says_so() {
    let body = json!({"input_prefix": "def main():\n", "input_suffix": "\n\nmain()", "n_predict": 4});
    let (status, answer) = server().await.post("/infill", &body).await;
    assert_eq!(
        (status, &answer["error"]["type"], &answer["error"]["code"]),
        (501, &json!("not_supported_error"), &json!(501))
    );
    assert!(answer["error"]["message"].as_str().unwrap().contains("prefix, suffix and middle"), "{answer}");
}
