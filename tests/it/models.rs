//! Several models on one server: found by name, loaded and unloaded at run time.

use super::harness::{Server, SseReader, folder, message_of, model};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Returns a folder with copies of the tiny model under these names.
fn models(names: &[&str]) -> PathBuf {
    let folder = folder();
    for name in names {
        std::fs::copy(model(), folder.join(format!("{name}.gguf"))).unwrap();
    }
    folder
}

async fn start(dir: &Path, flags: &[&str]) -> Server {
    let arguments: Vec<&str> =
        ["--models-dir", dir.to_str().unwrap()].into_iter().chain(flags.iter().copied()).collect();
    let server = Server::start(&arguments);
    server.wait_ready().await;
    server
}

async fn status(server: &Server, name: &str) -> Value {
    let (code, model) = server.get(&format!("/v1/models/{name}")).await;
    assert_eq!(code, 200, "{model}");
    model["status"].clone()
}

async fn wait_for_status(server: &Server, name: &str, value: &str) -> Value {
    let begun = Instant::now();
    loop {
        let status = status(server, name).await;
        if status["value"] == value {
            return status;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{name} is {status}, not {value}:\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn completion_request(model: &str) -> Value {
    json!({"model": model, "prompt": "Once", "max_tokens": 4, "seed": 1})
}

#[tokio::test]
async fn request_replaces_least_recently_used_model() {
    let dir = models(&["apple", "pear"]);
    let server = start(&dir, &["--models-max", "2"]).await;
    let (_, list) = server.get("/v1/models").await;
    let names: Vec<&str> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny", "apple", "pear"]);
    assert_eq!(list["data"][1]["status"]["value"], "unloaded");
    assert_eq!(list["models"][2]["name"], "pear");
    assert!(list["data"][0]["meta"]["ftype"].as_str().is_some_and(|name| !name.is_empty()), "{list}");

    let answer = server.answer("/v1/completions", &completion_request("apple")).await;
    assert_eq!(answer["model"], "apple");
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["model"], "apple", "the run records its model");
    assert_eq!(status(&server, "apple").await["value"], "loaded");

    assert_eq!(server.answer("/v1/completions", &completion_request("pear")).await["model"], "pear");
    assert_eq!(status(&server, "apple").await["value"], "unloaded");
    assert_eq!(status(&server, "tiny").await["value"], "loaded", "the default model is unloaded last");
    // Only one more model fits beside tiny, so these two requests run one after the other.
    let (apple, pear) = (completion_request("apple"), completion_request("pear"));
    let (apple, pear) = tokio::join!(server.answer("/v1/completions", &apple), server.answer("/v1/completions", &pear));
    assert_eq!((apple["model"].as_str(), pear["model"].as_str()), (Some("apple"), Some("pear")));
    assert_eq!(apple["choices"][0]["text"], pear["choices"][0]["text"], "the same weights and seed");

    // A file that was added later is found by its name. A path finds no model.
    std::fs::copy(model(), dir.join("plum.gguf")).unwrap();
    assert_eq!(server.answer("/v1/completions", &completion_request("plum/log-top")).await["model"], "plum");
    let path = dir.join("plum.gguf");
    for invalid in ["../../tiny", path.to_str().unwrap(), "plum.gguf", "quince"] {
        let (code, error) = server.post("/v1/completions", &completion_request(invalid)).await;
        assert_eq!((code, error["error"]["code"].as_str()), (404, Some("model_not_found")), "{invalid}: {error}");
        let known = "tiny, apple, pear, plum";
        let expected =
            format!("unknown model '{invalid}'; known models: {known}; without \"model\" a request uses tiny");
        assert_eq!(message_of(&error), expected);
        let (code, _) = server.post("/models/load", &json!({"model": invalid})).await;
        assert_eq!(code, 404, "{invalid}");
    }
}

#[tokio::test]
async fn playground_and_metrics_need_no_default_model() {
    let dir = models(&["apple"]);
    let server = start(&dir, &["--models-max", "2"]).await;
    server.answer("/v1/completions", &completion_request("apple")).await;
    for (name, warns) in [("tiny", false), ("apple", true)] {
        server.answer("/models/unload", &json!({"model": name})).await;
        wait_for_status(&server, name, "unloaded").await;
        let page = server.request(reqwest::Method::GET, "/playground").send().await.unwrap().text().await.unwrap();
        assert_eq!(page.contains("The default model is not loaded"), warns, "without {name}: {page}");
        assert!(page.contains("&#34;model&#34;: &#34;tiny&#34;"), "{page}");
        let metrics = server.request(reqwest::Method::GET, "/metrics").send().await.unwrap();
        assert_eq!(metrics.status(), 200, "without {name}");
        assert!(metrics.text().await.unwrap().contains("thunder_http_requests_total"));
    }
}

/// Returns a folder with two models that differ in one bit of a weight, so that only a checksum of the whole file can
/// tell them apart.
fn models_with_one_different_bit() -> PathBuf {
    let folder = folder();
    let mut bytes = std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/demo.gguf")).unwrap();
    std::fs::write(folder.join("one.gguf"), &bytes).unwrap();
    let at = bytes.len() * 83 / 100;
    bytes[at] ^= 1;
    std::fs::write(folder.join("two.gguf"), &bytes).unwrap();
    folder
}

#[tokio::test]
async fn states_and_sessions_belong_to_the_model_they_were_saved_with() {
    let dir = models_with_one_different_bit();
    let one = dir.join("one.gguf");
    let flags = ["--models-max", "1", "--model", one.to_str().unwrap(), "-np", "1"];
    let server = start(&dir, &flags).await;
    server.answer("/completion", &json!({"prompt": "Once upon a time", "n_predict": 4, "id_slot": 0})).await;
    let saved = server.answer("/slots/0?action=save-state", &json!({})).await;
    server.answer("/sessions/7?action=save&slot=0", &json!({})).await;
    // Read-only requests load nothing, and loaded models stay loaded.
    assert_eq!(server.get("/sessions?model=two").await, (200, json!([])));
    for path in ["/props", "/slots", "/lora-adapters", "/tokenizer_info", "/v1/slots/0/info"] {
        let (code, answer) = server.get(&format!("{path}?model=two")).await;
        assert_eq!(code, 400, "{path}: {answer}");
    }
    assert_eq!(status(&server, "one").await["value"], "loaded");
    assert_eq!(status(&server, "two").await["value"], "unloaded");

    let body = json!({"state": saved["state"]});
    let (code, answer) = server.post("/slots/0?action=restore-state&model=two", &body).await;
    assert_eq!((code, message_of(&answer)), (400, "the state was saved with another model"));
    assert_eq!(status(&server, "one").await["value"], "unloaded", "at most one model is loaded");
    assert_eq!(server.get("/sessions?model=one").await.1[0]["id"], 7, "its stored sessions remain");
    assert_eq!(status(&server, "one").await["value"], "unloaded");
    let (code, answer) = server.post("/sessions/7?action=restore&slot=0&model=two", &json!({})).await;
    assert_eq!(code, 404, "{answer}");
    let restored = server.answer("/sessions/7?action=restore&slot=0&model=one", &json!({})).await;
    assert_eq!(restored["success"], true, "{restored}");
}

#[tokio::test]
async fn models_are_loaded_and_unloaded_on_request() {
    let dir = models(&["apple"]);
    let server = start(&dir, &["--no-models-autoload"]).await;
    let (code, error) = server.post("/v1/completions", &completion_request("apple")).await;
    assert_eq!((code, error["error"]["code"].as_str()), (400, Some("model_not_loaded")), "{error}");
    let apple = json!({"model": "apple"});
    assert_eq!(server.post("/models/unload", &apple).await.0, 400);
    assert_eq!(server.post("/models/load", &apple).await, (200, json!({"success": true})));
    wait_for_status(&server, "apple", "loaded").await;
    assert_eq!(server.post("/models/load", &apple).await.0, 400);
    assert_eq!(server.answer("/v1/completions", &completion_request("apple")).await["model"], "apple");
    assert_eq!(server.post("/models/unload", &apple).await, (200, json!({"success": true})));
    wait_for_status(&server, "apple", "unloaded").await;
    assert_eq!(server.post("/v1/completions", &completion_request("apple")).await.0, 400);
    // Files are neither downloaded nor deleted, and a body without a name is a client error.
    assert_eq!(server.post("/models", &apple).await.0, 400);
    assert_eq!(server.send("", reqwest::Method::DELETE, "/models?model=apple", None).await.0, 400);
    assert!(dir.join("apple.gguf").exists());
    for body in [json!({}), json!({"model": 3}), json!([])] {
        assert_eq!(server.post("/models/load", &body).await.0, 400, "{body}");
    }
}

#[tokio::test]
async fn model_is_unloaded_after_its_runs() {
    let dir = models(&["apple"]);
    let server = start(&dir, &["--shutdown-grace", "120"]).await;
    server.answer("/v1/completions", &completion_request("apple")).await;
    let body = json!({"model": "apple", "prompt": "Once", "max_tokens": 300, "ignore_eos": true, "stream": true});
    let mut stream = server.sse("/v1/completions", &body).await;
    stream.next().await.unwrap();
    assert_eq!(server.post("/models/unload", &json!({"model": "apple"})).await.0, 200);
    assert_eq!(stream.rest().await.last().unwrap().data, "[DONE]");
    wait_for_status(&server, "apple", "unloaded").await;
    assert_eq!(
        server.answer("/v1/completions", &completion_request("apple")).await["model"],
        "apple",
        "the model is loaded again"
    );
    // A run can be cancelled during that time. Its client does not read, and its answer of more than 100 MB does not fit
    // in the buffers of the connection, so it does not end before.
    let body = json!({"model": "apple", "prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true,
                      "logprobs": 1000});
    let response = server.request(reqwest::Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let run = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    assert_eq!(server.post("/models/unload", &json!({"model": "apple"})).await.0, 200);
    let (code, answer) = server.post(&format!("/api/v1/runs/{run}/cancel"), &json!({})).await;
    assert_eq!(code, 202, "{answer}");
    drop(response);
    wait_for_status(&server, "apple", "unloaded").await;
}

#[tokio::test]
async fn idle_model_is_replaced_without_grace_period() {
    let dir = models(&["apple"]);
    let server = start(&dir, &["--models-max", "1", "--shutdown-grace", "0"]).await;
    let begun = Instant::now();
    // The previous model may be in use for a moment after its response.
    for name in ["apple", "tiny"] {
        loop {
            let (code, answer) = server.post("/v1/completions", &completion_request(name)).await;
            if code == 200 {
                assert_eq!(answer["model"], name);
                break;
            }
            assert!(code == 429 && begun.elapsed() < Duration::from_mins(1), "{name}: {answer}");
        }
    }
}

#[tokio::test]
async fn sleeping_model_whose_load_failed_is_loaded_by_the_next_request() {
    let dir = models(&["apple"]);
    let (file, elsewhere) = (dir.join("apple.gguf"), dir.join("apple.gguf.moved"));
    let flags = ["--model", file.to_str().unwrap(), "--no-models-autoload", "--sleep-idle-seconds", "1"];
    let server = Server::start(&flags);
    server.wait_ready().await;
    wait_for_status(&server, "apple", "sleeping").await;
    std::fs::rename(&file, &elsewhere).unwrap();
    for _ in 0..2 {
        let (code, error) = server.post("/v1/completions", &completion_request("apple")).await;
        assert_eq!(code, 503, "{error}");
        assert!(message_of(&error).contains("could not be loaded"), "{error}");
    }
    assert_eq!(status(&server, "apple").await["failed"], true);
    std::fs::rename(&elsewhere, &file).unwrap();
    assert_eq!(server.answer("/v1/completions", &completion_request("apple")).await["model"], "apple");
}

#[tokio::test]
async fn long_runs_end_when_their_model_is_unloaded() {
    let dir = models(&["apple"]);
    let server = start(&dir, &["--shutdown-grace", "0"]).await;
    server.answer("/v1/completions", &completion_request("apple")).await;
    let body = json!({"model": "apple", "prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true});
    let mut stream = server.sse("/v1/completions", &body).await;
    stream.next().await.unwrap();
    assert_eq!(server.post("/models/unload", &json!({"model": "apple"})).await.0, 200);
    let events = stream.rest().await;
    assert!(events.len() < 3999, "{} events", events.len());
    wait_for_status(&server, "apple", "unloaded").await;
    assert_eq!(server.answer("/v1/completions", &completion_request("tiny")).await["model"], "tiny");
}

/// Returns the model with one token of its vocabulary replaced by a copy of another.
fn with_duplicate_token(whole: &[u8]) -> Vec<u8> {
    const KEY: &[u8] = b"tokenizer.ggml.tokens";
    let number = |at: usize| u64::from_le_bytes(whole[at..at + 8].try_into().unwrap()) as usize;
    let array = whole.windows(KEY.len()).position(|bytes| bytes == KEY).unwrap() + KEY.len();
    let mut bytes = whole.to_vec();
    let mut at = array + 16;
    for index in 0..number(array + 8) {
        let (length, next) = (number(at), at + 8 + number(at));
        if index > 300 && number(next) == length {
            bytes[next + 8..next + 8 + length].copy_from_slice(&whole[at + 8..next]);
            return bytes;
        }
        at = next;
    }
    panic!("the vocabulary has no two tokens of the same length");
}

#[tokio::test]
async fn damaged_file_fails_only_its_model() {
    let dir = models(&["apple"]);
    let whole = std::fs::read(model()).unwrap();
    std::fs::write(dir.join("cut.gguf"), &whole[..whole.len() / 2]).unwrap();
    std::fs::write(dir.join("other.gguf"), "hello").unwrap();
    std::fs::write(dir.join("nothing.gguf"), &whole[..24]).unwrap();
    std::fs::write(dir.join("twice.gguf"), with_duplicate_token(&whole)).unwrap();
    let server = start(&dir, &[]).await;
    let reasons = [
        ("cut", "incomplete"),
        ("other", "does not begin with 'GGUF'"),
        ("nothing", "incomplete"),
        // llama.cpp aborts its process when it loads this file.
        ("twice", "GGML_ASSERT"),
    ];
    for (name, reason) in reasons {
        let (code, error) = server.post("/v1/completions", &completion_request(name)).await;
        assert_eq!(code, 503, "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(reason), "{error}");
        let status = status(&server, name).await;
        assert_eq!(status["failed"], true);
        assert!(status["reason"].as_str().unwrap().contains(reason), "{status}");
    }
    assert_eq!(server.get("/healthz").await.0, 200);
    // A repaired file is loaded by the next request.
    std::fs::write(dir.join("cut.gguf"), &whole).unwrap();
    assert_eq!(server.answer("/v1/completions", &completion_request("cut")).await["model"], "cut");
    std::fs::write(dir.join("other.gguf"), &whole).unwrap();
    assert_eq!(server.post("/models/load", &json!({"model": "other"})).await.0, 200);
    wait_for_status(&server, "other", "loaded").await;
}

#[tokio::test]
async fn model_changes_are_streamed() {
    let dir = models(&["apple"]);
    let server = start(&dir, &[]).await;
    let mut changes = SseReader::get(&server, "/models/sse").await;
    let body = completion_request("apple");
    let answer = server.answer("/v1/completions", &body);
    let is_status = |data: &Value, status: &str| {
        *data == json!({"model": "apple", "event": "model_status", "data": {"status": status}})
    };
    let watch = async {
        changes.until(|_, data| is_status(data, "unloaded")).await;
        changes.until(|_, data| is_status(data, "loaded")).await;
    };
    tokio::join!(watch, answer);
}

#[tokio::test]
async fn unloading_frees_the_memory() {
    let dir = folder();
    let demo = model().with_file_name("demo.gguf");
    let names = ["a", "b", "c", "d", "e", "f"];
    for name in names {
        std::fs::copy(&demo, dir.join(format!("{name}.gguf"))).unwrap();
    }
    let server = start(&dir, &["--models-max", "0", "-c", "16384"]).await;
    let resident = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or_default().to_owned();
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).map(|kib| kib / 1024)
    };
    server.answer("/v1/completions", &completion_request("a")).await;
    server.post("/models/unload", &json!({"model": "a"})).await;
    wait_for_status(&server, "a", "unloaded").await;
    let Some(before) = resident() else { return };
    for name in names {
        server.answer("/v1/completions", &completion_request(name)).await;
    }
    let loaded = resident().unwrap();
    for name in names {
        assert_eq!(server.post("/models/unload", &json!({"model": name})).await.0, 200);
    }
    for name in names {
        wait_for_status(&server, name, "unloaded").await;
    }
    let after = resident().unwrap();
    eprintln!("MiB: {before} before, {loaded} with six models, {after} after");
    assert!(loaded > before + 60, "{before} -> {loaded}");
    assert!(after < before + (loaded - before) / 5, "{before} -> {loaded} -> {after} MiB");
}

/// Returns the tiny model with some bytes changed, most of them in its header. For some seeds it is also truncated. The
/// same seed always gives the same file.
fn damaged(whole: &[u8], seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut random = |limit: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % limit
    };
    let mut bytes = whole.to_vec();
    let changeable = if seed.is_multiple_of(4) { bytes.len() } else { 2_000 };
    for _ in 0..=random(3) {
        let at = random(changeable);
        bytes[at] = [0, 255, 1, 128, random(256) as u8][random(5)];
    }
    if seed.is_multiple_of(5) {
        bytes.truncate(random(whole.len()));
    }
    bytes
}

#[tokio::test]
async fn damaged_files_never_end_the_server() {
    let number = |name, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (first, rounds): (u64, u64) = (number("THUNDER_FUZZ_FIRST", 1), number("THUNDER_FUZZ_ROUNDS", 40));
    let whole = std::fs::read(model()).unwrap();
    let dir = folder();
    let server = start(&dir, &["--models-max", "0", "-c", "512", "--parallel", "1"]).await;
    for seed in first..first + rounds {
        let name = format!("damaged-{seed}");
        let file = dir.join(format!("{name}.gguf"));
        std::fs::write(&file, damaged(&whole, seed)).unwrap();
        let sent =
            server.request(reqwest::Method::POST, "/v1/completions").json(&completion_request(&name)).send().await;
        let Ok(response) = sent else { panic!("seed {seed} ended the server:\n{}", server.log()) };
        // A change of a weight does not prevent loading: the request succeeds, or fails when the model computes NaN.
        let code = response.status().as_u16();
        assert!(matches!(code, 200 | 400 | 422 | 503), "seed {seed}: {code} {}", response.text().await.unwrap());
        if code == 200 {
            server.post("/models/unload", &json!({"model": name})).await;
        }
        std::fs::remove_file(&file).unwrap();
    }
    assert_eq!(server.answer("/v1/completions", &completion_request("tiny")).await["model"], "tiny");
}
