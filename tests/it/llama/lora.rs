//! LoRA adapters: their effect compared with llama.cpp, and separate states for each set of adapters.

use super::reference;
use crate::harness::{ErrorTable, Server, folder, thunder, with_fields};
use serde_json::{Value, json};
use std::path::PathBuf;

fn adapter() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/tiny-lora.gguf"))
}

/// Starts a server that has the adapter twice: with scale 1, and with 0.
fn start() -> Server {
    let path = adapter().display().to_string();
    Server::start(&["--lora", &path, "--lora-scaled", &format!("{path}:0"), "-np", "2"])
}

const PROMPT: &str = "Once there was a small red fox who lived under the old bridge.";

fn body(lora: &Value) -> Value {
    json!({"prompt": PROMPT, "temperature": 0, "n_predict": 24, "ignore_eos": true, "return_tokens": true, "lora": lora})
}

fn tokens(answer: &Value) -> Vec<i32> {
    serde_json::from_value(answer["tokens"].clone()).unwrap()
}

/// Returns llama.cpp's answers with the adapter at each of these scales.
async fn expected(server: &Server, scales: &[f32]) -> Vec<Vec<i32>> {
    let answer = server.answer("/tokenize", &json!({"content": PROMPT, "add_special": true})).await;
    let prompt: Vec<i32> = serde_json::from_value(answer["tokens"].clone()).unwrap();
    // The end tokens, because the requests ignore them.
    let banned = [0, 2];
    scales.iter().map(|&scale| reference::greedy_with(&prompt, 24, Some((&adapter(), scale)), &banned)).collect()
}

#[tokio::test]
async fn answer_with_adapter_equals_llama_cpp() {
    let server = start();
    server.wait_ready().await;
    let references = expected(&server, &[0.0, 1.0, 0.5]).await;
    assert!(references[0] != references[1] && references[1] != references[2], "the adapter must change the answer");
    // The second round fails if a request reuses the state of another set of adapters.
    for _ in 0..2 {
        let server = &server;
        let answer_with = |lora: Value| async move { tokens(&server.answer("/completion", &body(&lora)).await) };
        assert_eq!(answer_with(json!([])).await, references[0]);
        assert_eq!(
            answer_with(Value::Null).await,
            references[1],
            "the server's scale applies to requests without scales"
        );
        assert_eq!(answer_with(json!([{"id": 0, "scale": 0.5}])).await, references[2]);
        // The effects of two equal adapters add up.
        assert_eq!(answer_with(json!([{"id": 0, "scale": 0.25}, {"id": 1, "scale": 0.25}])).await, references[2]);
    }
    let first = server.answer("/completion", &body(&json!([{"id": 0, "scale": 0.5}]))).await;
    let second = server.answer("/completion", &body(&json!([{"scale": 0.5, "id": 0}]))).await;
    assert!(second["timings"]["cache_n"].as_u64().unwrap() > 5, "{first} {second}");
    assert_eq!(second["generation_settings"]["lora"], json!([{"id": 0, "scale": 0.5}]));
    for (path, prompt) in [
        ("/v1/completions", json!({"prompt": PROMPT})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]})),
    ] {
        let sent = json!({"lora": [{"id": 0, "scale": 0.5}], "n_keep": 5, "max_tokens": 1, "verbose": true});
        let settings =
            server.answer(path, &with_fields(prompt, &sent)).await["__verbose"]["generation_settings"].clone();
        assert_eq!((&settings["lora"], &settings["n_keep"]), (&sent["lora"], &sent["n_keep"]), "{path}");
    }
    let slots = server.get("/slots").await.1;
    let lora = |slot: &Value| slot["params"]["lora"].clone();
    assert!(slots.as_array().unwrap().iter().any(|slot| lora(slot) == json!([{"id": 0, "scale": 0.5}])), "{slots}");
}

#[tokio::test]
async fn runs_with_different_adapters_are_concurrent() {
    let server = start();
    server.wait_ready().await;
    let references = expected(&server, &[0.0, 1.0]).await;
    let (none, one) = (body(&json!([])), body(&json!([{"id": 0, "scale": 1}])));
    let (first, second, third) = tokio::join!(
        server.answer("/completion", &none),
        server.answer("/completion", &one),
        server.answer("/completion", &none)
    );
    assert_eq!(
        [tokens(&first), tokens(&second), tokens(&third)],
        [references[0].clone(), references[1].clone(), references[0].clone()]
    );
}

#[tokio::test]
async fn saved_state_identifies_its_adapters() {
    let server = start();
    server.wait_ready().await;
    let mut one = body(&json!([{"id": 0, "scale": 1}]));
    one["id_slot"] = json!(1);
    let answer = server.answer("/completion", &one).await;
    let saved = server.answer("/slots/1?action=save-state", &json!({})).await;
    let mut other = body(&json!([]));
    other["id_slot"] = json!(1);
    server.answer("/completion", &other).await;
    let restored = server.answer("/slots/1?action=restore-state", &json!({"state": saved["state"]})).await;
    assert_eq!(restored["success"], true);
    one["prompt"] = json!(format!("{PROMPT}{}", answer["content"].as_str().unwrap()));
    let next = server.answer("/completion", &one).await;
    assert!(next["timings"]["cache_n"].as_u64().unwrap() > 10, "{next}");
    // A server without the adapter rejects a state that was saved with it.
    let plain = crate::harness::server().await;
    let message =
        super::rejection(&plain.post("/slots/3?action=restore-state", &json!({"state": saved["state"]})).await, 400);
    assert_eq!(message, "the state was computed with a LoRA adapter that this server has not loaded");
}

#[tokio::test]
async fn scales_are_listed_and_set() {
    let path = adapter().display().to_string();
    let server = Server::start(&["--lora", &path, "--lora-init-without-apply"]);
    server.wait_ready().await;
    let references = expected(&server, &[0.0, 1.0]).await;
    let list = |scale: f64| json!([{"id": 0, "path": path, "scale": scale, "task_name": "test", "prompt_prefix": ""}]);
    assert_eq!(server.get("/lora-adapters").await, (200, list(0.0)));
    assert_eq!(tokens(&server.answer("/completion", &body(&Value::Null)).await), references[0]);
    assert_eq!(server.answer("/lora-adapters", &json!([{"id": 0, "scale": 1}])).await, json!({"success": true}));
    assert_eq!(server.get("/lora-adapters").await, (200, list(1.0)));
    assert_eq!(tokens(&server.answer("/completion", &body(&Value::Null)).await), references[1]);
    server.answer("/lora-adapters", &json!([])).await;
    assert_eq!(server.get("/lora-adapters").await, (200, list(0.0)));
    let mut errors = ErrorTable::default();
    for invalid in [json!([{"id": 1, "scale": 1}]), json!([{"id": 0, "scale": "much"}]), json!([0]), json!({"id": 0})] {
        errors.add(format!("/lora-adapters {invalid}"), &server.post("/lora-adapters", &invalid).await);
        errors.add(format!("/completion {invalid}"), &server.post("/completion", &body(&invalid)).await);
    }
    insta::assert_snapshot!("adapter_errors", errors);
    let (status, answer) = server
        .post(
            "/v1/chat/completions",
            &json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "lora": [{"id": 7, "scale": 1}]}),
        )
        .await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("lora[0]")));
}

#[test]
fn incompatible_adapter_is_rejected_with_reason() {
    let start_error = |arguments: &[&str]| {
        let mut command = thunder();
        command.args(["serve", "--model"]).arg(crate::harness::model());
        command.arg("--data-dir").arg(folder()).args(["--listen", "127.0.0.1:0"]).args(arguments);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let mut errors = ErrorTable::default();
    for flags in [["--lora", "/nowhere.gguf"], ["--lora-scaled", "x.gguf"]] {
        errors.add_text(flags.join(" "), &start_error(&flags));
    }
    insta::assert_snapshot!("adapter_start_errors", errors);
}
