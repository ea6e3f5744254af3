//! Images in the KV cache, in recorded runs and in saved slots.

use super::{IMAGE_TOKENS, arguments, assert_close, bmp, image_request, logprobs, part, server};
use crate::harness::{Server, folder, message_of};
use reqwest::Method;
use serde_json::{Value, json};

const LOG_PROMPT: &str = r#"
from thunder_mods import Prefilled, mod


@mod(events=[Prefilled])
def log_prompt(event, actions, tokenizer):
    """Logs the prompt."""
    print(event.prompt_text, event.images)
"#;

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn cached_tokens_belong_to_the_same_image() {
    let server = server().await;
    let body = image_request(&bmp(7), &json!({"id_slot": 0}));
    let first = server.answer("/v1/chat/completions", &body).await;
    let again = server.answer("/v1/chat/completions", &body).await;
    assert_eq!(cached(&again), first["usage"]["prompt_tokens"].as_u64().unwrap() - 1);
    assert_close(&logprobs(&again), &logprobs(&first), 1e-4);
    let other = server.answer("/v1/chat/completions", &image_request(&bmp(8), &json!({"id_slot": 0}))).await;
    let text_before_image = 30;
    assert!(cached(&other) < text_before_image, "{other}");
    // A second image after the first one.
    let mut both = body.clone();
    both["messages"][0]["content"].as_array_mut().unwrap().push(part(&bmp(8)));
    server.answer("/v1/chat/completions", &body).await;
    let both = server.answer("/v1/chat/completions", &both).await;
    assert!(cached(&both) >= IMAGE_TOKENS, "{both}");
    assert_eq!(
        both["usage"]["prompt_tokens"].as_u64(),
        first["usage"]["prompt_tokens"].as_u64().map(|tokens| tokens + IMAGE_TOKENS)
    );
}

#[tokio::test]
async fn full_context_drops_images_with_their_messages() {
    let server = server().await;
    let turn = |number: u32| {
        let parts = json!([part(&bmp(30 + number % 5)), {"type": "text", "text": format!("Number {number}?")}]);
        [json!({"role": "user", "content": parts}), json!({"role": "assistant", "content": "Yes."})]
    };
    let mut messages: Vec<Value> = (0..30).flat_map(turn).collect();
    messages.push(json!({"role": "user", "content": "And now?"}));
    for policy in ["evict", "shift"] {
        let keep = if policy == "evict" { 61 } else { 21 };
        let body = json!({"messages": messages[61 - keep..], "max_tokens": 1500, "temperature": 0, "ignore_eos": true,
            "context_policy": policy, "n_keep": 40});
        let answer = server.answer("/v1/chat/completions", &body).await;
        assert_eq!(answer["usage"]["completion_tokens"], 1500, "{policy}: {answer}");
        assert!(answer["timings"]["evicted_n"].as_u64() > Some(IMAGE_TOKENS), "{policy}: {answer}");
    }
}

#[tokio::test]
async fn recorded_run_with_an_image_can_be_read_and_forked() {
    let mods = folder();
    std::fs::write(mods.join("log_prompt.py"), LOG_PROMPT).unwrap();
    let server = Server::start(&arguments(&["--mods-dir", mods.to_str().unwrap(), "--parallel", "1"]));
    server.wait_ready().await;
    let further =
        json!({"repeat_penalty": 1.2, "dry_multiplier": 0.5, "mods": ["log-top", "stop-on-repetition", "log_prompt"]});
    let answer = server.answer("/v1/chat/completions", &image_request(&bmp(11), &further)).await;
    let id = answer["thunder"]["run_id"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
    let run = server.finished(&id).await;
    assert_eq!(run["run"]["status"], "done", "{run}");
    let prefilled = &run["events"][0]["details"]["prompt"];
    let tokens = prefilled["tokens"].as_array().unwrap();
    assert_eq!(tokens.iter().filter(|token| token.as_i64() < Some(-1)).count() as u64, IMAGE_TOKENS);
    let texts: String = prefilled["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
    assert!(texts.contains("What is this?<image><|im_end|>"), "{texts}");
    let url = prefilled["conversation"][0]["content"][1]["image_url"]["url"].as_str().unwrap();
    assert!(url.starts_with("sha256:") && url.len() == 71, "{url}");
    let image = &prefilled["images"][0];
    assert_eq!((&image["sha256"], &image["width"], &image["recorded"]), (&json!(url[7..]), &json!(40), &json!(false)));
    let missing = server.get(&format!("/api/v1/runs/{id}/images/{}", &url[7..])).await;
    assert_eq!(missing.0, 404, "{}", missing.1);
    for path in [format!("/runs/{id}"), format!("/runs/{id}/export.html"), format!("/api/v1/runs/{id}")] {
        let response = server.request(Method::GET, &path).send().await.unwrap();
        assert_eq!(response.status(), 200, "{path}");
    }
    let logs = run["mod_logs"].to_string();
    assert!(
        logs.contains("What is this?<image>")
            && logs.contains(&format!(
                "{{'start': 8, 'length': 64, 'sha256': '{}', 'width': 40, 'height': 40}}",
                &url[7..]
            )),
        "{logs}"
    );
    let (status, fork) = server.post(&format!("/api/v1/runs/{id}/forks"), &json!({"at": {"step": 3}})).await;
    assert_eq!(status, 201, "{fork}");
    let forked = fork["runs"][0]["run_id"].as_str().unwrap();
    assert_eq!(server.finished(forked).await["run"]["status"], "done");
    let rerun = server.answer("/api/v1/reruns", &json!({"prompt": prefilled})).await;
    assert!(rerun["run_id"].is_string(), "{rerun}");
    // After a restart, the image is no longer known.
    assert_eq!(server.stop("TERM").await, Some(0));
    let server = server.start_again(&arguments(&["--parallel", "1"]));
    server.wait_ready().await;
    let (status, answer) = server.post("/api/v1/reruns", &json!({"prompt": prefilled})).await;
    assert_eq!(
        (status, message_of(&answer)),
        (
            400,
            "the prompt contains an image that is neither cached nor recorded; send the conversation with the image again, or start the server with --record-images"
        )
    );
}

#[tokio::test]
async fn saved_slot_keeps_an_image() {
    let saved = folder();
    let saved = saved.to_str().unwrap();
    let further = ["--slot-save-path", saved, "--parallel", "1", "--cache-ram", "0"];
    let server = Server::start(&arguments(&further));
    server.wait_ready().await;
    let body = image_request(&bmp(12), &Value::Null);
    let first = server.answer("/v1/chat/completions", &body).await;
    server.answer("/slots/0?action=save", &json!({"filename": "a.bin"})).await;
    server.answer("/v1/chat/completions", &image_request(&bmp(13), &Value::Null)).await;
    server.answer("/slots/0?action=restore", &json!({"filename": "a.bin"})).await;
    let again = server.answer("/v1/chat/completions", &body).await;
    assert_eq!(cached(&again), first["usage"]["prompt_tokens"].as_u64().unwrap() - 1);
    assert_close(&logprobs(&again), &logprobs(&first), 1e-4);
}
