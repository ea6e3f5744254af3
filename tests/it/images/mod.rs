//! Images in prompts, with the demo model and a projector of random weights: answers have no meaning, but their
//! probabilities depend on the image.

mod invalid;
mod reference;
mod state;
mod undivided;

use crate::harness::Server;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::sync::LazyLock;

pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/demo.gguf");
pub const PROJECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/tiny-mmproj.gguf");
/// Number of embeddings of each image.
pub const IMAGE_TOKENS: u64 = 64;

const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAGElEQVR4nGNkYGjQYGBARiwMNgxogDghAHPAAgoN/kQJAAAAAElFTkSuQmCC";
const GIF: &str = "R0lGODdhBgAEAIQAAMi0gKC0gHi0gMh4gKB4gHh4gFC0gFB4gCi0gAC0gCh4gAB4gMg8gKA8gHg8gFA8gCg8gAA8gMgAgKAAgHgAgFAAgCgAgAAAgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACwAAAAABgAEAAAIHgAvWKhAYYKECBAeOGjAYIGCAwUIDEiAwICAAAACAgA7";

pub fn arguments<'a>(further: &[&'a str]) -> Vec<&'a str> {
    [&["--model", DEMO, "--mmproj", PROJECTOR, "-ctk", "f32", "-ctv", "f32"], further].concat()
}

async fn server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start(&arguments(&["--parallel", "4"])));
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

/// Returns a BMP image of a pattern.
pub fn bmp(seed: u32) -> Vec<u8> {
    sized_bmp(40, 40, seed)
}

/// Returns a BMP image of a pattern. The width must be a multiple of 4.
pub fn sized_bmp(width: u32, height: u32, seed: u32) -> Vec<u8> {
    let mut image = b"BM".to_vec();
    let size = 54 + width * height * 3;
    image.extend(
        [size, 0, 54, 40, width, height, 1 | 24 << 16, 0, width * height * 3, 2835, 2835, 0, 0]
            .map(u32::to_le_bytes)
            .concat(),
    );
    for index in 0..width * height {
        let (x, y) = (index % width, index / width);
        image.extend([(x * 6 * seed) as u8, (y * 5 + 40 * seed) as u8, ((x ^ y) * seed * 3) as u8]);
    }
    assert_eq!(image.len() as u32, size);
    image
}

fn data_url(image: &[u8]) -> String {
    format!("data:image/bmp;base64,{}", STANDARD.encode(image))
}

pub fn part(image: &[u8]) -> Value {
    json!({"type": "image_url", "image_url": {"url": data_url(image)}})
}

/// Returns the body of a chat completion about an image, with the log-probabilities of the answer's tokens.
pub fn image_request(image: &[u8], further: &Value) -> Value {
    let content = json!([{"type": "text", "text": "What is this?"}, part(image)]);
    let mut body = json!({
        "messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0, "ignore_eos": true,
        "logprobs": true, "top_logprobs": 4,
    });
    body.as_object_mut().unwrap().extend(further.as_object().cloned().unwrap_or_default());
    body
}

/// Returns the log-probabilities of an answer's tokens and their alternatives.
fn logprobs(answer: &Value) -> Vec<(String, f64)> {
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap_or_else(|| panic!("{answer}"));
    let all = entries.iter().flat_map(|entry| entry["top_logprobs"].as_array().unwrap());
    all.map(|one| (one["token"].as_str().unwrap().to_owned(), one["logprob"].as_f64().unwrap())).collect()
}

fn assert_close(found: &[(String, f64)], expected: &[(String, f64)], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.0 == expected.0 && (found.1 - expected.1).abs() < tolerance, "{found:?} instead of {expected:?}");
    }
}

#[tokio::test]
async fn every_api_answers_about_an_image() {
    let server = server().await;
    let data = STANDARD.encode(bmp(3));
    let sampling = json!({"max_tokens": 6, "temperature": 0, "ignore_eos": true});
    let with_sampling = |mut body: Value| {
        body.as_object_mut().unwrap().extend(sampling.as_object().unwrap().clone());
        body
    };
    let chat = server.answer("/v1/chat/completions", &image_request(&bmp(3), &Value::Null)).await;
    let text = chat["choices"][0]["message"]["content"].as_str().unwrap();
    let prompt_tokens = chat["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(!text.is_empty() && prompt_tokens > IMAGE_TOKENS, "{chat}");

    let source = json!({"type": "base64", "media_type": "image/bmp", "data": data});
    let blocks = json!([{"type": "text", "text": "What is this?"}, {"type": "image", "source": source}]);
    let body = with_sampling(json!({"messages": [{"role": "user", "content": blocks}]}));
    let message = server.answer("/v1/messages", &body).await;
    assert_eq!(message["content"][0]["text"], text, "{message}");
    let counted = server.answer("/v1/messages/count_tokens", &body).await;
    assert_eq!(counted["input_tokens"], prompt_tokens);

    let parts = json!([{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": data_url(&bmp(3))}]);
    let body = with_sampling(json!({"input": [{"role": "user", "content": parts}], "max_output_tokens": 6}));
    let response = server.answer("/v1/responses", &body).await;
    assert_eq!(response["output"][0]["content"][0]["text"], text, "{response}");
    // The stored response keeps the image.
    let next = json!({"previous_response_id": response["id"], "input": "And now?", "max_output_tokens": 2});
    let next = server.answer("/v1/responses", &next).await;
    assert!(next["usage"]["input_tokens"].as_u64().unwrap() > prompt_tokens, "{next}");

    // Ollama puts images before the text.
    let options = json!({"num_predict": 6, "temperature": 0, "ignore_eos": true});
    let first = json!([part(&bmp(3)), {"type": "text", "text": "What is this?"}]);
    let chat = with_sampling(json!({"messages": [{"role": "user", "content": first}]}));
    let chat = server.answer("/v1/chat/completions", &chat).await;
    let text = &chat["choices"][0]["message"]["content"];
    let messages = json!([{"role": "user", "content": "What is this?", "images": [data]}]);
    let body = json!({"messages": messages, "stream": false, "options": options});
    let ollama = server.answer("/api/chat", &body).await;
    assert_eq!(&ollama["message"]["content"], text, "{ollama}");
    let body = json!({"prompt": "What is this?", "images": [data], "stream": false, "options": options});
    let generated = server.answer("/api/generate", &body).await;
    assert_eq!(&generated["response"], text, "{generated}");
    assert_eq!(generated["prompt_eval_count"].as_u64().unwrap(), chat["usage"]["prompt_tokens"].as_u64().unwrap());
    let body = json!({"prompt": "Sure?", "context": generated["context"], "stream": false, "options": options});
    let continued = server.answer("/api/generate", &body).await;
    assert!(continued["prompt_eval_count"].as_u64() > generated["prompt_eval_count"].as_u64(), "{continued}");

    // llama-server's completion, with the prompt that its template route returns.
    let rendered = server.answer("/apply-template", &image_request(&bmp(3), &Value::Null)).await;
    let prompt = json!({"prompt_string": rendered["prompt"], "multimodal_data": [data]});
    let chat = server.answer("/v1/chat/completions", &image_request(&bmp(3), &Value::Null)).await;
    let completion = with_sampling(json!({"prompt": prompt, "n_predict": 6}));
    let completion = server.answer("/completion", &completion).await;
    assert_eq!(completion["content"], chat["choices"][0]["message"]["content"], "{completion}");
    assert_eq!(completion["tokens_evaluated"], chat["usage"]["prompt_tokens"], "{completion}");
    let two = json!({"prompt": ["Hello!", prompt], "n_predict": 6, "temperature": 0, "ignore_eos": true});
    assert_eq!(server.answer("/completion", &two).await[1]["content"], completion["content"]);

    // KoboldCPP puts images between the memory and the prompt.
    let halves = rendered["prompt"].as_str().unwrap().split_once("<__media__>").unwrap();
    let mut request = json!({"memory": halves.0, "prompt": halves.1, "images": [data], "max_length": 6, "temperature": 0,
        "bypass_eos": true, "rep_pen": 1.0});
    let kobold = server.answer("/api/v1/generate", &request).await;
    assert_eq!(kobold["results"][0]["text"], completion["content"], "{kobold}");
    assert_eq!(kobold["results"][0]["prompt_tokens"], completion["tokens_evaluated"], "{kobold}");
    request["max_context_length"] = 3.into();
    let (status, error) = server.post("/api/v1/generate", &request).await;
    assert_eq!(status, 400, "{error}");
    assert!(error["detail"]["msg"].as_str().unwrap().starts_with("`max_context_length` must be at least"), "{error}");

    for image in [PNG, GIF] {
        let content = json!([{"type": "image_url", "image_url": {"url": format!("data:;base64,{image}")}}]);
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
        server.answer("/v1/chat/completions", &body).await;
    }
}

#[tokio::test]
async fn capabilities_name_images() {
    let server = server().await;
    let (_, props) = server.get("/props").await;
    assert_eq!(props["modalities"], json!({"vision": true, "audio": false, "video": false}));
    let (_, models) = server.get("/v1/models").await;
    assert!(models["data"][0]["capabilities"].as_array().unwrap().contains(&json!("vision")), "{models}");
    let shown = server.answer("/api/show", &json!({"model": "demo"})).await;
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("vision")), "{shown}");
    assert_eq!(server.get("/api/extra/version").await.1["vision"], true);
    let body = image_request(&bmp(1), &Value::Null);
    let rendered = server.answer("/apply-template", &body).await;
    assert!(rendered["prompt"].as_str().unwrap().contains("What is this?<__media__>"), "{rendered}");
    let mut text = body;
    text["messages"][0]["content"] = json!("What is this?");
    let tokens = |body: Value| async move {
        server.answer("/v1/chat/completions/input_tokens", &body).await["input_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(image_request(&bmp(1), &Value::Null)).await, tokens(text).await + IMAGE_TOKENS);
}

#[tokio::test]
async fn image_is_split_over_small_batches() {
    let small = Server::start(&arguments(&["-b", "24", "-ub", "16", "--parallel", "2"]));
    small.wait_ready().await;
    let body = image_request(&bmp(9), &Value::Null);
    let found = logprobs(&small.answer("/v1/chat/completions", &body).await);
    let expected = logprobs(&server().await.answer("/v1/chat/completions", &body).await);
    assert_close(&found, &expected, 1e-3);
}

#[tokio::test]
async fn images_do_not_affect_other_runs() {
    let server = Server::start(&arguments(&["--parallel", "3"]));
    server.wait_ready().await;
    let text = json!({"messages": [{"role": "user", "content": "Count to nine."}], "max_tokens": 60, "temperature": 0,
        "ignore_eos": true, "logprobs": true, "top_logprobs": 2, "cache_prompt": false});
    let alone = server.answer("/v1/chat/completions", &text).await;
    let images = async {
        let mut answers = Vec::new();
        for seed in 20..26 {
            answers.push(
                server
                    .answer("/v1/chat/completions", &image_request(&bmp(seed), &json!({"cache_prompt": false})))
                    .await,
            );
        }
        answers
    };
    let (concurrent, images) = tokio::join!(server.answer("/v1/chat/completions", &text), images);
    assert_close(&logprobs(&concurrent), &logprobs(&alone), 1e-3);
    for (seed, found) in (20..26).zip(images) {
        let expected =
            server.answer("/v1/chat/completions", &image_request(&bmp(seed), &json!({"cache_prompt": false}))).await;
        assert_close(&logprobs(&found), &logprobs(&expected), 1e-3);
    }
}
