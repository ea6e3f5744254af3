//! Control vectors per run: the field `steering`, concurrent runs, cached states, forks and reruns.

use super::architectures;
use super::exact::gguf::Writer;
use super::harness::{ErrorTable, Server, folder, message_of, model, thunder, with_fields};
use super::stream::Client;
use reqwest::Method;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

const PROMPT: &str = "Once there was a small red fox who lived under the old bridge.";

/// Number of values of a direction of the tiny model, and of the models of [`architectures`].
const WIDTH: usize = 64;

/// Writes a control vector with directions for layers 1 to 3.
fn vector(path: &Path, seed: usize) -> PathBuf {
    let values = |layer: usize| (0..WIDTH).map(move |at| ((at * 7 + layer * 5 + seed * 11) % 13) as f32 / 6.0 - 1.0);
    let layers: Vec<(String, Vec<f32>)> =
        (1..4).map(|layer| (format!("direction.{layer}"), values(layer).collect())).collect();
    let tensors: Vec<_> = layers.iter().map(|(name, values)| (name.as_str(), vec![WIDTH], &values[..])).collect();
    std::fs::write(path, Writer::default().with_tensors(&tensors)).unwrap();
    path.to_owned()
}

/// Starts a server with the vectors `calm`, `joy` and `calm-2`, a copy of `calm`. Their default scale is 1 unless a flag
/// changes it.
pub fn start(flags: &[&str]) -> Server {
    let folder = folder();
    std::fs::create_dir(folder.join("copy")).unwrap();
    let files = [("calm.gguf", 0), ("joy.gguf", 1), ("copy/calm.gguf", 0)];
    let paths = files.map(|(name, seed)| vector(&folder.join(name), seed).display().to_string());
    let paths = paths.join(",");
    Server::start(&[&["--control-vector", &paths, "--parallel", "4"], flags].concat())
}

/// Returns a server with vectors that are off by default.
async fn server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| start(&["--control-vector-init-without-apply"]));
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

fn body(steering: &Value) -> Value {
    json!({"prompt": PROMPT, "temperature": 0, "n_predict": 24, "ignore_eos": true, "return_tokens": true,
           "steering": steering})
}

async fn tokens(server: &Server, steering: &Value) -> Value {
    server.answer("/completion", &body(steering)).await["tokens"].clone()
}

/// Generates a run; returns it as recorded.
async fn generate(server: &Server, fields: Value) -> Value {
    let body = json!({"prompt": PROMPT, "max_tokens": 16, "seed": 3, "temperature": 0.7, "ignore_eos": true});
    let answer = server.answer("/v1/completions", &with_fields(body, &fields)).await;
    server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await
}

/// Forks a run; returns the new run as recorded.
async fn fork(server: &Server, run: &Value, body: Value) -> Value {
    let id = run["run"]["run_id"].as_str().unwrap();
    let (status, answer) = server.post(&format!("/api/v1/runs/{id}/forks"), &body).await;
    assert_eq!(status, 201, "{answer}");
    server.finished(answer["runs"][0]["run_id"].as_str().unwrap()).await
}

/// Returns the added tokens.
fn generated(run: &Value) -> Vec<Value> {
    let added = run["events"].as_array().unwrap().iter().filter_map(|event| event["added_tokens"].as_array());
    added.flatten().cloned().collect()
}

/// Returns the recorded prompt.
fn prompt(run: &Value) -> &Value {
    &run["events"][0]["details"]["prompt"]
}

#[tokio::test]
async fn runs_with_different_steering_are_concurrent() {
    let server = server().await;
    let settings = [
        json!([]),
        json!([{"name": "calm", "scale": 6}]),
        json!([{"name": "joy", "scale": -6, "layers": [2, 3]}]),
        json!([{"name": "joy", "scale": 6}, {"name": "calm", "scale": -4, "layers": [1, 1]}]),
    ];
    let mut alone = Vec::new();
    for steering in &settings {
        alone.push(tokens(server, steering).await);
    }
    let different: std::collections::BTreeSet<String> = alone.iter().map(Value::to_string).collect();
    assert_eq!(different.len(), settings.len(), "{alone:?}");
    for _ in 0..2 {
        let together = tokio::join!(
            tokens(server, &settings[0]),
            tokens(server, &settings[1]),
            tokens(server, &settings[2]),
            tokens(server, &settings[3]),
            tokens(server, &settings[1]),
        );
        let expected = [0, 1, 2, 3, 1].map(|at| alone[at].clone());
        assert_eq!(<[Value; 5]>::from(together), expected);
    }
    // The order of the vectors does not matter, and the parts of a scale add up.
    let parts = json!([{"name": "calm", "scale": -4, "layers": [1, 1]}, {"name": "joy", "scale": 3}, {"name": "joy", "scale": 3}]);
    assert_eq!(tokens(server, &parts).await, alone[3]);
    assert_eq!(tokens(server, &json!([{"name": "calm-2", "scale": 6}])).await, alone[1]);
    assert_eq!(tokens(server, &Value::Null).await, alone[0]);
}

#[tokio::test]
async fn steering_of_a_request_replaces_the_default() {
    let unsteered = server().await;
    let steered = start(&["--control-vector-layer-range", "2", "3"]);
    steered.wait_ready().await;
    let all = json!(["calm", "joy", "calm-2"].map(|name| json!({"name": name, "layers": [2, 3]})));
    let expected = tokens(unsteered, &all).await;
    assert_eq!(tokens(&steered, &Value::Null).await, expected);
    assert_eq!(tokens(&steered, &json!([])).await, tokens(unsteered, &json!([])).await);
    let calm = json!([{"name": "calm", "scale": 6, "layers": [1, 3]}]);
    assert_eq!(tokens(&steered, &calm).await, tokens(unsteered, &calm).await);
    let answer = steered.answer("/completion", &body(&Value::Null)).await;
    let active = &answer["generation_settings"]["steering"];
    assert_eq!((active.as_array().unwrap().len(), &active[1]["name"]), (3, &json!("joy")), "{active}");
    assert_eq!((&active[0]["scale"], &active[0]["layers"]), (&json!(1.0), &json!([2, 3])));
    let (status, listed) = steered.get("/api/v1/control-vectors").await;
    assert_eq!((status, &listed["layers"]), (200, &json!(4)), "{listed}");
    let vectors = listed["control_vectors"].as_array().unwrap();
    let summary: Vec<Value> = vectors.iter().map(|v| json!([v["name"], v["scale"], v["layers"]])).collect();
    assert_eq!(json!(summary), json!([["calm", 1.0, [2, 3]], ["joy", 1.0, [2, 3]], ["calm-2", 1.0, [2, 3]]]));
    assert_eq!(vectors[0]["fingerprint"], vectors[2]["fingerprint"]);
    assert_ne!(vectors[0]["fingerprint"], vectors[1]["fingerprint"]);
    let listed = unsteered.get("/api/v1/control-vectors").await.1;
    assert_eq!(listed["control_vectors"][0]["scale"], 0.0);
}

#[tokio::test]
async fn states_of_other_steering_are_not_reused() {
    let server = start(&["--control-vector-init-without-apply"]);
    server.wait_ready().await;
    let cached = async |steering: Value| {
        let request = with_fields(body(&steering), &json!({"id_slot": 0, "prompt": PROMPT.repeat(6)}));
        server.answer("/completion", &request).await["timings"]["cache_n"].as_u64().unwrap()
    };
    let calm = |scale: f64| json!([{"name": "calm", "scale": scale}]);
    assert_eq!(cached(json!([])).await, 0);
    assert_eq!(cached(calm(2.0)).await, 0);
    assert!(cached(calm(2.0)).await > 5);
    assert_eq!(cached(calm(3.0)).await, 0);
    assert_eq!(cached(json!([{"name": "calm", "scale": 3, "layers": [1, 2]}])).await, 0);
    // The prompt cache keeps the state of every steering.
    assert!(cached(json!([])).await > 5);
    assert!(cached(calm(3.0)).await > 5);
}

#[tokio::test]
async fn saved_state_identifies_its_steering() {
    let server = start(&["--control-vector-init-without-apply"]);
    server.wait_ready().await;
    let slot = |steering: Value| with_fields(body(&steering), &json!({"id_slot": 1}));
    let calm = slot(json!([{"name": "calm", "scale": 2}]));
    server.answer("/completion", &calm).await;
    let saved = server.answer("/slots/1?action=save-state", &json!({})).await;
    server.answer("/completion", &slot(json!([]))).await;
    let restore = json!({"state": saved["state"]});
    assert_eq!(server.answer("/slots/1?action=restore-state", &restore).await["success"], true);
    let other = server.answer("/completion", &slot(json!([{"name": "joy", "scale": 2}]))).await;
    assert_eq!(other["timings"]["cache_n"], 0);
    server.answer("/slots/1?action=restore-state", &restore).await;
    let same = server.answer("/completion", &calm).await;
    assert!(same["timings"]["cache_n"].as_u64().unwrap() > 5, "{same}");
    let plain = super::harness::server().await;
    let (status, answer) = plain.post("/slots/3?action=restore-state", &restore).await;
    assert_eq!(
        (status, message_of(&answer)),
        (400, "the state was computed with a control vector that this server has not loaded")
    );
}

#[tokio::test]
async fn unchanged_forks_and_reruns_of_steered_runs_repeat_them() {
    let server = server().await;
    let run = generate(server, json!({"steering": [{"name": "calm", "scale": 4, "layers": [1, 2]}]})).await;
    let plain = generate(server, json!({})).await;
    assert_ne!(generated(&run), generated(&plain));
    let recorded = &prompt(&run)["parameters"]["steering"];
    assert_eq!(
        (&recorded[0]["name"], &recorded[0]["scale"], &recorded[0]["layers"]),
        (&json!("calm"), &json!(4.0), &json!([1, 2]))
    );
    assert_eq!(prompt(&plain)["parameters"]["steering"], json!([]));
    for step in [1, 7, 16] {
        let again = fork(server, &run, json!({"at": {"step": step}})).await;
        assert_eq!(generated(&again), generated(&run), "step {step}");
        assert_eq!(prompt(&again)["parameters"]["steering"], *recorded);
        assert_eq!(again["run"]["parent"]["change"], json!({}));
    }
    let answer = server.answer("/api/v1/reruns", &json!({"prompt": prompt(&run)})).await;
    let again = server.finished(answer["run_id"].as_str().unwrap()).await;
    assert_eq!(generated(&again), generated(&run));
    // A vector with other directions under the same name is not used.
    let mut other = prompt(&run).clone();
    other["parameters"]["steering"][0]["fingerprint"] = json!("00");
    let (status, problem) = server.post("/api/v1/reruns", &json!({"prompt": other})).await;
    assert_eq!((status, &problem["pointer"]), (409, &json!("steering[0].fingerprint")), "{problem}");
}

#[tokio::test]
async fn steering_of_a_fork_applies_to_the_kept_tokens_too() {
    let server = server().await;
    let run = generate(server, json!({"temperature": 0})).await;
    let steering = json!([{"name": "joy", "scale": 6}]);
    let forked = fork(server, &run, json!({"at": {"step": 6}, "steering": steering})).await;
    assert_eq!((&generated(&forked)[..5], generated(&forked).len()), (&generated(&run)[..5], 16));
    assert_ne!(generated(&forked), generated(&run));
    assert_eq!(forked["run"]["parent"]["change"], json!({"steering": steering}));
    // The fork continues like a run whose prompt contains the kept tokens.
    let mut kept = prompt(&run)["tokens"].as_array().unwrap().clone();
    kept.extend_from_slice(&generated(&run)[..5]);
    let continued = with_fields(body(&steering), &json!({"prompt": kept, "n_predict": 11}));
    let continued = server.answer("/completion", &continued).await;
    assert_eq!(continued["tokens"], json!(generated(&forked)[5..]));
    // A fork of the fork keeps the steering, and can remove it.
    let again = fork(server, &forked, json!({"at": {"step": 9}})).await;
    assert_eq!(generated(&again), generated(&forked));
    let removed = fork(server, &forked, json!({"at": {"step": 6}, "steering": []})).await;
    assert_eq!(generated(&removed), generated(&run));
    let id = forked["run"]["run_id"].as_str().unwrap();
    let page = server.request(Method::GET, &format!("/runs/{id}")).send().await.unwrap().text().await.unwrap();
    assert!(page.contains("step 6: steering joy 6"), "{page}");
    let mut command = thunder();
    command.args(["fork", run["run"]["run_id"].as_str().unwrap(), "--server", &server.base, "--json"]);
    let output = command.args(["--at", "6", "--steering", "joy:6:1-3"]).output().unwrap();
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    let from_command = server.finished(shown["runs"][0]["run_id"].as_str().unwrap()).await;
    assert_eq!(generated(&from_command), generated(&forked));
}

/// Starts a run on the streaming protocol and waits for its end or an error.
async fn stream(server: &Server, config: &Value) -> Value {
    let mut client = Client::connect(server).await;
    client.send(config).await;
    let messages = client.until(|message| message["type"] == "completion" || message["type"] == "error").await;
    messages.last().unwrap().clone()
}

#[tokio::test]
async fn every_protocol_takes_steering_and_lora() {
    let server = server().await;
    let steering = json!([{"name": "calm", "scale": 6, "layers": [1, 3]}]);
    let expected = tokens(server, &steering).await;
    assert_ne!(expected, tokens(server, &json!([])).await);
    let ids = server.answer("/tokenize", &json!({"content": PROMPT, "add_special": true})).await["tokens"].clone();
    let common = json!({"temperature": 0, "ignore_eos": true, "output_attentions": false});
    let text = with_fields(common.clone(), &json!({"prompt": PROMPT, "max_length": 24}));
    let input = with_fields(common, &json!({"input_ids": ids, "max_new_tokens": 24, "max_length": 24}));
    let config = json!({"type": "config", "prompt": PROMPT, "parameters": {"temperature": 0, "max_tokens": 24, "ignore_eos": true}});
    let routes = [
        ("/api/v1/generate", &text),
        ("/api/v1/generate", &input),
        ("/api/extra/generate/stream", &text),
        ("/api/extra/generate/stream", &input),
        ("/generate", &config),
    ];
    for (number, (path, body)) in routes.into_iter().enumerate() {
        let id = format!("steering-{number}");
        let steered = with_fields(body.clone(), &json!({"steering": steering, "request_id": id}));
        let unknown = with_fields(body.clone(), &json!({"steering": [{"name": "angry"}]}));
        let adapter = with_fields(body.clone(), &json!({"lora": [{"id": 7, "scale": 1}]}));
        let rejections = if path == "/generate" {
            assert_eq!(stream(server, &steered).await["type"], "completion");
            [stream(server, &unknown).await, stream(server, &adapter).await]
        } else {
            let response = server.request(Method::POST, path).json(&steered).send().await.unwrap();
            assert_eq!(response.status(), 200, "{path}");
            response.bytes().await.unwrap();
            let (unknown, adapter) = (server.post(path, &unknown).await, server.post(path, &adapter).await);
            assert_eq!((unknown.0, adapter.0), (400, 400), "{path}");
            [unknown.1, adapter.1]
        };
        let run = server.finished(&id).await;
        assert_eq!(json!(generated(&run)), expected, "{path} {body}");
        assert_eq!(prompt(&run)["parameters"]["steering"][0]["scale"], 6.0, "{path} {body}");
        let [unknown, adapter] = rejections.map(|answer| answer.to_string());
        assert!(unknown.contains("known names: calm, joy, calm-2"), "{path}: {unknown}");
        assert!(adapter.contains("the server has no LoRA adapters"), "{path}: {adapter}");
    }
}

#[tokio::test]
async fn invalid_steering_is_rejected() {
    let server = server().await;
    let run = generate(server, json!({"max_tokens": 2})).await;
    let forks = format!("/api/v1/runs/{}/forks", run["run"]["run_id"].as_str().unwrap());
    let mut errors = ErrorTable::default();
    for steering in [
        json!({"calm": 1}),
        json!(["calm"]),
        json!([{"scale": 1}]),
        json!([{"name": "angry"}]),
        json!([{"name": "calm", "scale": "much"}]),
        json!([{"name": "calm", "scale": 1001}]),
        json!([{"name": "calm", "layers": [2]}]),
        json!([{"name": "calm", "layers": [3, 2]}]),
        json!([{"name": "calm", "layers": [0, 4]}]),
        json!([{"name": "calm", "layer": 1}]),
        json!(vec![json!({"name": "calm"}); 65]),
    ] {
        let response = server.post("/v1/completions", &json!({"prompt": "a", "steering": steering})).await;
        errors.add(&steering, &response);
        let (status, problem) = server.post(&forks, &json!({"at": {"step": 1}, "steering": steering})).await;
        assert_eq!((status, &problem["detail"]), (response.0, &response.1["error"]["message"]));
    }
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "steering": [{"name": "angry"}]});
    let (status, answer) = server.post("/v1/chat/completions", &chat).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("steering[0].name")), "{answer}");
    let plain = super::harness::server().await;
    errors.add("without control vectors", &plain.post("/completion", &body(&json!([{"name": "calm"}]))).await);
    assert_eq!(plain.get("/api/v1/control-vectors").await, (200, json!({"control_vectors": [], "layers": 4})));
    insta::assert_snapshot!("steering_errors", errors);
}

#[test]
fn architecture_without_control_vectors_is_rejected_at_start() {
    let folder = folder();
    let path = folder.join("model.gguf");
    std::fs::write(&path, architectures::small_model("plamo2")).unwrap();
    let calm = vector(&folder.join("calm.gguf"), 0);
    let start_error = |model: &Path, arguments: &[&str]| {
        let mut command = thunder();
        command.args(["serve", "--listen", "127.0.0.1:0", "-c", "128", "--data-dir"]).arg(super::harness::folder());
        command.arg("--model").arg(model).arg("--control-vector").arg(&calm).args(arguments);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let mut errors = ErrorTable::default();
    errors.add_text("plamo2", start_error(&path, &[]).lines().last().unwrap());
    let flags = ["--control-vector-layer-range", "4", "9"];
    errors.add_text(flags.join(" "), start_error(&model(), &flags).lines().last().unwrap());
    insta::assert_snapshot!("control_vector_start_errors", errors);
}
