//! `/props`, and responses of disabled routes.

use crate::harness::{Server, server};
use serde_json::json;

#[tokio::test]
async fn props_describe_server() {
    let server = server().await;
    let (status, props) = server.get("/props").await;
    assert_eq!(status, 200);
    assert_eq!((&props["total_slots"], &props["model_alias"]), (&json!(4), &json!("tiny")));
    let params = &props["default_generation_settings"]["params"];
    assert_eq!((&params["temperature"], &params["top_k"], &params["min_p"]), (&json!(0.8), &json!(40), &json!(0.05)));
    // `Server::start` sets the seed.
    assert_eq!(
        (&params["repeat_penalty"], &params["seed"], &params["n_predict"]),
        (&json!(1.0), &json!(42), &json!(-1))
    );
    assert!(props["default_generation_settings"]["n_ctx"].as_u64().unwrap() >= 16);
    assert!(props["model_path"].as_str().unwrap().ends_with("tiny.gguf"));
    assert!(props["chat_template"].as_str().unwrap().contains("messages"));
    let caps = props["chat_template_caps"].as_object().unwrap();
    assert_eq!(caps.len(), 9);
    assert!(caps["supports_string_content"] == true && caps["supports_system_role"] == true, "{caps:?}");
    assert_eq!(props["eos_token"], "<|im_end|>");
    let attention = props["attention"].as_str().unwrap();
    assert!(["flash", "on"].contains(&attention), "the default depends on the processor: {attention}");
    assert_eq!(
        (&props["endpoint_slots"], &props["endpoint_metrics"], &props["endpoint_props"]),
        (&json!(true), &json!(true), &json!(false))
    );
}

#[tokio::test]
async fn server_without_adapters_lists_none() {
    let server = server().await;
    assert_eq!(server.get("/lora-adapters").await, (200, json!([])));
    assert_eq!(server.answer("/lora-adapters", &json!([])).await, json!({"success": true}));
}

#[tokio::test]
async fn flags_enable_and_disable_routes() {
    let server = Server::start(&[
        "--props",
        "--no-slots",
        "--no-webui",
        "--chat-template-kwargs",
        "{\"mark\": \"!\"}",
        "--chat-template",
        "{{ messages[0].content }}{{ mark }}",
    ]);
    server.wait_ready().await;
    assert_eq!(server.answer("/props", &json!({})).await, json!({"success": true}));
    let disabled = (501, json!("not_supported_error"));
    for path in ["/slots", "/v1/slots/0/info", "/sessions"] {
        let (status, answer) = server.get(path).await;
        assert_eq!((status, answer["error"]["type"].clone()), disabled, "{path}");
    }
    for action in ["save-state", "restore-state", "tokens", "context-shift"] {
        let (status, answer) = server.post(&format!("/slots/0?action={action}"), &json!({})).await;
        assert_eq!((status, answer["error"]["type"].clone()), disabled, "{action}");
    }
    let (status, answer) = server.post("/sessions/1?action=save&slot=0", &json!({})).await;
    assert_eq!((status, answer["error"]["type"].clone()), disabled);
    assert_eq!(server.get("/").await.0, 404, "there is no dashboard");
    let prompt = server.answer("/apply-template", &json!({"messages": [{"role": "user", "content": "Hi"}]})).await;
    assert_eq!(prompt["prompt"], "Hi!");
    let request = json!({"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"mark": "?"}});
    assert_eq!(server.answer("/apply-template", &request).await["prompt"], "Hi?");
}
