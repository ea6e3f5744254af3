//! Images in prompts, with the demo model and a projector of random weights: answers have no meaning, but their
//! probabilities depend on the image.

mod undivided;

use super::harness::{Server, folder};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::model::params::LlamaModelParams;
use llama_cpp_2::mtmd::{MtmdBitmap, MtmdContext, MtmdContextParams, MtmdInputText};
use llama_cpp_2::token::LlamaToken;
use reqwest::Method;
use serde_json::{Value, json};
use std::num::NonZeroU32;
use std::sync::LazyLock;

pub const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/demo.gguf");
pub const PROJECTOR: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/models/tiny-mmproj.gguf");
/// Number of embeddings of each image.
pub const IMAGE_TOKENS: u64 = 64;

const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAYAAAAECAIAAAAiZtkUAAAAGElEQVR4nGNkYGjQYGBARiwMNgxogDghAHPAAgoN/kQJAAAAAElFTkSuQmCC";
const GIF: &str = "R0lGODdhBgAEAIQAAMi0gKC0gHi0gMh4gKB4gHh4gFC0gFB4gCi0gAC0gCh4gAB4gMg8gKA8gHg8gFA8gCg8gAA8gMgAgKAAgHgAgFAAgCgAgAAAgAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAACwAAAAABgAEAAAIHgAvWKhAYYKECBAeOGjAYIGCAwUIDEiAwICAAAACAgA7";

const LOG_PROMPT: &str = r#"
from thunder_mods import Prefilled, mod


@mod(events=[Prefilled])
def log_prompt(event, actions, tokenizer):
    """Logs the prompt."""
    print(event.prompt_text, event.images)
"#;

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

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
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
    let kobold = json!({"memory": halves.0, "prompt": halves.1, "images": [data], "max_length": 6, "temperature": 0,
        "bypass_eos": true, "rep_pen": 1.0});
    let kobold = server.answer("/api/v1/generate", &kobold).await;
    assert_eq!(kobold["results"][0]["text"], completion["content"], "{kobold}");
    assert_eq!(kobold["results"][0]["prompt_tokens"], completion["tokens_evaluated"], "{kobold}");

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

/// Returns the log-probabilities of the most probable tokens at each step of an answer, computed with llama.cpp's own
/// evaluation of images.
fn reference(
    (model, projector): (&str, &str),
    prompt: &str,
    image: &[u8],
    answer: &[(String, f64)],
) -> Vec<(String, f64)> {
    let backend = thunder::model::llama::backend().unwrap();
    let model = LlamaModel::load_from_file(backend, model, &LlamaModelParams::default()).unwrap();
    let params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(1024))
        .with_n_threads(1)
        .with_n_threads_batch(1)
        .with_type_k(llama_cpp_2::context::params::KvCacheType::F32)
        .with_type_v(llama_cpp_2::context::params::KvCacheType::F32)
        .with_flash_attention_policy(llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_DISABLED);
    let mut context = model.new_context(backend, params).unwrap();
    let params = MtmdContextParams { use_gpu: false, n_threads: 1, ..MtmdContextParams::default() };
    let mut projector = MtmdContext::init_from_file(projector, &model, &params).unwrap();
    let bitmap = MtmdBitmap::from_buffer(&projector, image, false).unwrap();
    let text = MtmdInputText { text: prompt.to_owned(), add_special: true, parse_special: true };
    let chunks = projector.tokenize(text, &[&bitmap]).unwrap();
    let past = chunks.eval_chunks(&mut projector, &mut context, 0, 0, 512, true).unwrap();
    let mut batch = LlamaBatch::new(1, 1);
    let mut logits = context.get_logits().to_vec();
    let mut found = Vec::new();
    // Every fourth entry is the chosen token, since the answer is greedy.
    for (position, step) in (past..).zip(answer.chunks(4)) {
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        for &token in &order[..step.len()] {
            let piece = model.vocab().token_to_piece(LlamaToken::new(token as i32), true, None);
            let logprob = f64::from(logits[token] - max) - sum.ln();
            found.push((String::from_utf8_lossy(&piece).into_owned(), logprob));
        }
        batch.clear();
        batch.add(LlamaToken::new(order[0] as i32), position, &[0], true).unwrap();
        context.decode(&mut batch).unwrap();
        logits = context.get_logits_ith(0).to_vec();
    }
    found
}

#[tokio::test]
async fn log_probabilities_equal_those_of_llama_cpp() {
    let server = server().await;
    let body = image_request(&bmp(5), &json!({"ignore_eos": false}));
    let prompt = server.answer("/apply-template", &body).await["prompt"].as_str().unwrap().to_owned();
    let found = logprobs(&server.answer("/v1/chat/completions", &body).await);
    let expected = tokio::task::spawn_blocking({
        let found = found.clone();
        move || reference((DEMO, PROJECTOR), &prompt, &bmp(5), &found)
    });
    assert_close(&found, &expected.await.unwrap(), 1e-3);
    let other =
        logprobs(&server.answer("/v1/chat/completions", &image_request(&bmp(6), &json!({"ignore_eos": false}))).await);
    assert!(found.iter().zip(&other).any(|(one, other)| one.0 != other.0 || (one.1 - other.1).abs() > 0.01));
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
async fn image_is_split_over_small_batches() {
    let small = Server::start(&arguments(&["-b", "24", "-ub", "16", "--parallel", "2"]));
    small.wait_ready().await;
    let body = image_request(&bmp(9), &Value::Null);
    let found = logprobs(&small.answer("/v1/chat/completions", &body).await);
    let expected = logprobs(&server().await.answer("/v1/chat/completions", &body).await);
    assert_close(&found, &expected, 1e-3);
}

#[tokio::test]
async fn other_runs_are_not_affected() {
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
    let (beside, images) = tokio::join!(server.answer("/v1/chat/completions", &text), images);
    assert_close(&logprobs(&beside), &logprobs(&alone), 1e-3);
    for (seed, found) in (20..26).zip(images) {
        let expected =
            server.answer("/v1/chat/completions", &image_request(&bmp(seed), &json!({"cache_prompt": false}))).await;
        assert_close(&logprobs(&found), &logprobs(&expected), 1e-3);
    }
}

#[tokio::test]
async fn invalid_images_are_rejected() {
    let server = server().await;
    let bomb =
        [b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".as_slice(), &60_000u32.to_be_bytes(), &60_000u32.to_be_bytes()].concat();
    let png = STANDARD.decode(PNG).unwrap();
    for (url, expected) in [
        (data_url(&bomb), "60000 × 60000 pixels"),
        (data_url(&png[..50]), "cannot be decoded"),
        (data_url(b"RIFF\0\0\0\0WEBPVP8 "), "WebP images are not supported, because llama.cpp's decoder (stb_image)"),
        (data_url(b"hello"), "not an image in a supported format"),
        (data_url(b"ID3\0\0\0\0\0\0\0\0\0\0\0"), "not an image in a supported format"),
        (data_url(b""), "not an image in a supported format"),
        ("data:image/png;base64,?".into(), "is not base64"),
        (
            "https://example.org/a.png".into(),
            "start it with --allow-image-urls, or send the image itself as a data URL",
        ),
        ("file:///etc/passwd".into(), "send the image itself as a data URL"),
        ("/etc/passwd".into(), "send the image itself as a data URL"),
    ] {
        let content = json!([{"type": "image_url", "image_url": {"url": url}}]);
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1});
        let (status, answer) = server.post("/v1/chat/completions", &body).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains(expected), "{url}: {answer}");
    }
    let many = vec![part(&bmp(1)); 65];
    let (status, answer) =
        server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": many}]})).await;
    assert!(status == 400 && answer.to_string().contains("up to 64 images"), "{answer}");
    let many = vec![part(&bmp(1)); 40];
    let (status, answer) =
        server.post("/v1/chat/completions", &json!({"messages": [{"role": "user", "content": many}]})).await;
    assert!(status == 400 && answer["error"]["code"] == "context_length_exceeded", "{answer}");
    let prompt = |text: &str, data: Value| json!({"prompt": {"prompt_string": text, "multimodal_data": data}});
    for (body, expected) in [
        (
            prompt("no marker", json!([PNG])),
            "must have one marker <__media__> for each image of multimodal_data; it has 0",
        ),
        (prompt("<__media__><__media__>", json!([PNG])), "it has 2 markers for 1 images"),
        (prompt("<__media__>", json!([5])), "`prompt.multimodal_data` must be a list of images in base64"),
        (prompt("<__media__>", json!(["aGk="])), "`prompt.multimodal_data[0]`: the data is not an image"),
    ] {
        let (status, answer) = server.post("/completion", &body).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.contains(expected), "{answer}");
    }
}

#[tokio::test]
async fn model_without_projector_rejects_images() {
    let server = super::harness::server().await;
    let image = part(&bmp(1));
    let source = json!({"type": "base64", "media_type": "image/bmp", "data": PNG});
    let content = |part: Value| json!([{"role": "user", "content": [part]}]);
    let input_image = json!({"type": "input_image", "image_url": data_url(&bmp(1))});
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": content(image)})),
        ("/v1/messages", json!({"messages": content(json!({"type": "image", "source": source})), "max_tokens": 1})),
        ("/v1/responses", json!({"input": content(input_image)})),
        ("/api/chat", json!({"messages": [{"role": "user", "content": "?", "images": [PNG]}]})),
        ("/api/generate", json!({"prompt": "?", "images": [PNG]})),
        ("/api/v1/generate", json!({"prompt": "?", "images": [PNG]})),
        ("/completion", json!({"prompt": {"prompt_string": "<__media__>", "multimodal_data": [PNG]}})),
    ] {
        let (status, answer) = server.post(path, &body).await;
        let text = answer.to_string();
        assert!(status == 400 && text.contains("see images") && text.contains("--mmproj"), "{path}: {answer}");
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
    assert!(status == 400 && answer.to_string().contains("neither cached nor recorded"), "{answer}");
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

#[tokio::test]
async fn unsuitable_projector_is_rejected() {
    for (model, projector, expected) in [
        (super::harness::model().display().to_string(), PROJECTOR, "mismatch between text model"),
        (DEMO.to_owned(), DEMO, "cannot load the projector"),
        (DEMO.to_owned(), concat!(env!("CARGO_MANIFEST_DIR"), "/README.md"), "cannot load the projector"),
    ] {
        let server = Server::start(&["--model", &model, "--mmproj", projector]);
        let code = server.exited().await;
        assert!(code != Some(0) && server.log().contains(expected), "{code:?}: {}", server.log());
    }
}
