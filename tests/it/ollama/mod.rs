//! Ollama's API with a real model and with the clients of Ollama and `LiteLLM`. The weights of the model are random, so
//! a mod forces the answers that tests depend on.

use super::chat::forced_answer;
use super::harness::{ErrorTable, Server, folder, model, server};
use super::images::{DEMO, PROJECTOR};
use reqwest::Method;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Returns the objects of a streamed answer.
async fn lines(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let request = server.request(Method::POST, path).header("accept-encoding", "gzip");
    let response = request.json(body).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    // Compression would delay lines.
    assert_eq!(response.headers().get("content-encoding"), None);
    let text = response.text().await.unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn streamed_and_complete_answers_are_equal() {
    let server = server().await;
    let options = json!({"seed": 5, "num_predict": 12, "ignore_eos": true, "temperature": 0.7});
    let messages = json!([{"role": "user", "content": "Hello!"}]);
    let chat = json!({"model": "tiny", "messages": messages, "options": options, "logprobs": true, "top_logprobs": 2});
    let generate = json!({"model": "tiny", "prompt": "Once", "raw": true, "options": options, "logprobs": true,
                          "top_logprobs": 2});
    for (path, field, body) in [("/api/chat", "/message/content", chat), ("/api/generate", "/response", generate)] {
        let mut complete = body.clone();
        complete["stream"] = false.into();
        let complete = server.answer(path, &complete).await;
        let lines = lines(server, path, &body).await;
        let text = |line: &Value| line.pointer(field).and_then(Value::as_str).unwrap().to_owned();
        let (last, parts) = lines.split_last().unwrap();
        assert_eq!(parts.iter().map(text).collect::<String>(), text(&complete), "{path}");
        assert!(!text(&complete).is_empty() && text(last).is_empty() && parts.iter().all(|part| part["done"] == false));
        for end in [last, &complete] {
            let counts = (&end["done"], &end["done_reason"], &end["eval_count"]);
            assert_eq!(counts, (&json!(true), &json!("length"), &json!(12)), "{end}");
            let nanoseconds = |name: &str| end[name].as_u64().unwrap();
            let parts =
                nanoseconds("load_duration") + nanoseconds("prompt_eval_duration") + nanoseconds("eval_duration");
            assert!(nanoseconds("total_duration") >= parts && nanoseconds("eval_duration") > 0, "{end}");
        }
        assert_eq!(last["prompt_eval_count"], complete["prompt_eval_count"]);
        let entries = |line: &Value| line["logprobs"].as_array().cloned().unwrap_or_default();
        let (streamed, together): (Vec<Value>, _) = (lines.iter().flat_map(entries).collect(), entries(&complete));
        assert_eq!((streamed.len(), together.len()), (12, 12), "{complete}");
        for (one, other) in streamed.iter().zip(&together) {
            assert_eq!((&one["token"], &one["bytes"]), (&other["token"], &other["bytes"]));
            assert!(one["logprob"].is_f64() && one["top_logprobs"].as_array().unwrap().len() == 2, "{one}");
        }
    }
}

#[tokio::test]
async fn context_continues_a_conversation() {
    let server = server().await;
    let body = |prompt: &str, text: &str, context: &Value| {
        json!({"model": "tiny", "prompt": prompt, "context": context, "stream": false,
               "options": {"num_predict": 20, "mods": forced_answer(text)}})
    };
    let first = server.answer("/api/generate", &body("One?", "Two.", &Value::Null)).await;
    let second = server.answer("/api/generate", &body("Three?", "Four.", &first["context"])).await;
    let tokens = |answer: &Value| answer["context"].as_array().unwrap().clone();
    assert!(tokens(&second).starts_with(&tokens(&first)));
    let count = |name: &str| usize::try_from(second[name].as_u64().unwrap()).unwrap();
    // The token that ends the answer is not counted.
    let counted = count("prompt_eval_count") + count("eval_count");
    assert!((counted..=counted + 1).contains(&tokens(&second).len()), "{second}");
    let text = server.answer("/detokenize", &json!({"tokens": second["context"]})).await;
    let text = text["content"].as_str().unwrap();
    let found: Vec<_> = ["One?", "Two.", "Three?", "Four."].iter().map(|part| text.find(part)).collect();
    assert!(found.is_sorted() && found[0].is_some(), "{text}");
}

#[tokio::test]
async fn unknown_tokens_and_multiple_answers_are_rejected() {
    let server = server().await;
    let body = |context: i32, n: u32| {
        json!({"model": "tiny", "prompt": "Hello!", "stream": false, "context": [context],
               "options": {"num_predict": 1, "n": n}})
    };
    let mut errors = ErrorTable::default();
    for (context, n) in [(999_999, 1), (5, 2)] {
        let body = body(context, n);
        errors.add(&body, &server.post("/api/generate", &body).await);
    }
    let wrong_option = json!({"model": "tiny", "prompt": "a", "options": {"temperature": "hot"}});
    errors.add(&wrong_option, &server.post("/api/generate", &wrong_option).await);
    insta::assert_snapshot!("ollama_errors", errors);
    assert_eq!(server.post("/api/generate", &body(5, 1)).await.0, 200);
}

#[tokio::test]
async fn format_constrains_the_answer() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
                        "additionalProperties": false});
    for raw in [false, true] {
        let body = json!({"model": "tiny", "prompt": "Once", "raw": raw, "format": schema, "stream": false, "think": false,
                          "options": {"num_predict": 60, "temperature": 0}});
        let answer = server.answer("/api/generate", &body).await;
        let value: Value = serde_json::from_str(answer["response"].as_str().unwrap()).unwrap();
        assert!(value == json!({"n": 1}) || value == json!({"n": 2}), "{answer}");
    }
}

#[tokio::test]
async fn mod_in_the_model_name_is_recorded() {
    let server = server().await;
    let body = json!({"model": "tiny/log-top:latest", "stream": false, "options": {"num_predict": 3},
                      "messages": [{"role": "user", "content": "Hello!"}]});
    let answer = server.answer("/api/chat", &body).await;
    assert_eq!(answer["model"], "tiny");
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["mods"], json!(["log-top"]));
}

#[tokio::test]
async fn tool_results_are_rendered() {
    let server = server().await;
    let call = |name: &str| json!({"function": {"name": name, "arguments": {"a": 2}}});
    let body = json!({"model": "tiny", "stream": false, "options": {"num_predict": 20, "mods": forced_answer("Both.")}, "messages": [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call("add"), call("sum")]},
        {"role": "tool", "tool_name": "sum", "content": "result-of-sum"},
        {"role": "tool", "tool_name": "add", "content": "result-of-add"},
    ]});
    let answer = server.answer("/api/chat", &body).await;
    assert_eq!(answer["message"]["content"], "Both.");
    let run_id = answer["thunder"]["run_id"].as_str().unwrap();
    server.finished(run_id).await;
    let (_, events) = server.get(&format!("/api/v1/runs/{run_id}/events")).await;
    let events = events.to_string();
    let found: Vec<_> = ["Add.", "result-of-sum", "result-of-add"].iter().map(|text| events.find(text)).collect();
    assert!(found.is_sorted() && found[0].is_some(), "{events}");
}

#[tokio::test]
async fn embeddings_are_normalized_and_long_inputs_are_truncated() {
    let server = Server::start(&["--embedding", "--pooling", "mean"]);
    server.wait_ready().await;
    let embedded = server.answer("/api/embed", &json!({"model": "tiny", "input": ["Hello!", "Once upon"]})).await;
    let vectors = embedded["embeddings"].as_array().unwrap();
    assert_eq!(vectors.len(), 2);
    let length = |vector: &Value| {
        vector.as_array().unwrap().iter().map(|value| value.as_f64().unwrap().powi(2)).sum::<f64>().sqrt()
    };
    assert!(vectors.iter().all(|vector| (length(vector) - 1.0).abs() < 1e-5), "{embedded}");
    let short = server.answer("/api/embed", &json!({"input": "Hello!", "dimensions": 3})).await;
    assert_eq!((short["embeddings"][0].as_array().unwrap().len(), &short["model"]), (3, &json!("tiny")));
    for empty in [json!({}), json!({"input": []}), json!({"input": ""})] {
        assert_eq!(server.answer("/api/embed", &empty).await["embeddings"], json!([]), "{empty}");
    }
    let single = server.answer("/api/embeddings", &json!({"model": "tiny", "prompt": "Hello!"})).await;
    let scale = length(&single["embedding"]);
    let (first, same) = (single["embedding"][0].as_f64().unwrap() / scale, vectors[0][0].as_f64().unwrap());
    assert!((first - same).abs() < 1e-5, "{first} {same}");
    let long = json!({"model": "tiny", "input": "a ".repeat(20_000)});
    let truncated = server.answer("/api/embed", &long).await;
    assert!(truncated["prompt_eval_count"].as_u64().unwrap() < 20_000);
    let mut untruncated = long.clone();
    untruncated["truncate"] = false.into();
    let mut errors = ErrorTable::default();
    errors.add("20,000 words without truncation", &server.post("/api/embed", &untruncated).await);
    insta::assert_snapshot!("ollama_embedding_errors", errors);
}

#[tokio::test]
async fn request_without_prompt_loads_and_unloads_the_model() {
    let server = Server::start(&[]);
    server.wait_ready().await;
    let load = json!({"model": "tiny"});
    let unload = json!({"model": "tiny", "keep_alive": 0});
    assert_eq!(server.answer("/api/generate", &unload).await["done_reason"], "unload");
    let begun = Instant::now();
    while server.get("/api/ps").await.1["models"] != json!([]) {
        assert!(begun.elapsed() < Duration::from_mins(1), "{}", server.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(server.answer("/api/chat", &unload).await["done_reason"], "unload");
    // The memory of the unloaded model may not be free yet.
    let loaded = loop {
        let (status, answer) = server.post("/api/generate", &load).await;
        if status != 503 {
            break answer;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{answer}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert_eq!(loaded["done_reason"], "load", "{loaded}");
    assert_eq!(server.get("/api/ps").await.1["models"][0]["name"], "tiny:latest");
}

#[tokio::test]
async fn model_that_is_not_loaded_is_described() {
    let folder = folder();
    std::fs::copy(model(), folder.join("other.gguf")).unwrap();
    let server = Server::start(&["--models-dir", folder.to_str().unwrap()]);
    server.wait_ready().await;
    let (_, tags) = server.get("/api/tags").await;
    let fields = |name: &str| -> Vec<String> {
        tags["models"].as_array().unwrap().iter().map(|tag| tag[name].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!((fields("name"), fields("model")), (fields("model"), vec!["tiny:latest".into(), "other:latest".into()]));
    let digests = fields("digest");
    let is_hex = |digest: &String| digest.len() == 64 && digest.bytes().all(|digit| digit.is_ascii_hexdigit());
    assert!(digests.iter().all(is_hex) && digests[0] != digests[1], "{tags}");
    let show = async |name: &str| server.answer("/api/show", &json!({"model": name})).await;
    let (loaded, other) = (show("tiny:latest").await, show("other:latest").await);
    for field in ["template", "details", "model_info", "capabilities"] {
        assert_eq!(loaded[field], other[field], "{field}");
    }
    assert_eq!(other["modelfile"], "FROM other\n");
    assert_eq!(server.get("/api/ps").await.1["models"].as_array().unwrap().len(), 1, "the description loads no model");
}

#[tokio::test]
async fn key_is_required() {
    let server = Server::start(&["--api-key", "secret"]);
    server.wait_ready().await;
    let anonymous = Server::external(server.base.clone(), None);
    let (status, error) = anonymous.get("/api/tags").await;
    assert_eq!(
        (status, error),
        (
            401,
            json!({"error": "an API key is required, sent as 'Authorization: Bearer KEY', 'X-Api-Key: KEY' or 'X-User-Api-Key: KEY'"})
        )
    );
    assert_eq!(server.get("/api/tags").await.0, 200);
}

#[tokio::test]
async fn official_clients_work() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ollama-clients");
    std::fs::create_dir_all(&folder).unwrap();
    let server = Server::start(&["--embedding", "--pooling", "mean"]);
    server.wait_ready().await;
    let image_server = Server::start(&["--model", DEMO, "--mmproj", PROJECTOR]);
    image_server.wait_ready().await;
    let base = server.base.clone();
    let clients = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/ollama");
    let run = tokio::task::spawn_blocking(move || {
        let python = install_python(&folder);
        let node = install_node(&folder);
        let run_client = |program: &Path, file: &str, base: &str| {
            let output = Command::new(program).arg(clients.join(file)).arg(base).current_dir(&folder).output().unwrap();
            assert!(output.status.success(), "{file}: {}", printed_text(&output));
        };
        if let Some(python) = python {
            run_client(&python, "client.py", &base);
            run_client(&python, "litellm_client.py", &base);
            run_client(&python, "image_client.py", &image_server.base);
        }
        if let Some(node) = node {
            std::fs::copy(clients.join("client.mjs"), folder.join("client.mjs")).unwrap();
            let output = Command::new(node).arg("client.mjs").arg(&base).current_dir(&folder).output().unwrap();
            assert!(output.status.success(), "client.mjs: {}", printed_text(&output));
        }
    });
    run.await.unwrap();
}

/// Returns the interpreter of an environment with the Python clients; `None` if they cannot be installed.
fn install_python(folder: &Path) -> Option<PathBuf> {
    let python = folder.join("python/bin/python");
    // Importing them takes seconds.
    let find =
        "import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, ['ollama', 'litellm', 'anthropic'])))";
    let are_installed = || {
        let output = Command::new(&python).args(["-c", find]).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !are_installed() {
        let _ = Command::new("python3").args(["-m", "venv"]).arg(folder.join("python")).output();
        let _ = Command::new(&python)
            .args(["-m", "pip", "install", "--quiet", "ollama==0.6.3", "litellm==1.110.2", "anthropic==2.14.0"])
            .output();
    }
    are_installed().then_some(python).or_else(|| report_skipped("the Python packages ollama, litellm and anthropic"))
}

/// Returns node if its client is installed; `None` if it cannot be.
fn install_node(folder: &Path) -> Option<PathBuf> {
    let installed = || folder.join("node_modules/ollama/package.json").is_file();
    if !installed() {
        let arguments = ["install", "--no-audit", "--no-fund", "--no-save", "--ignore-scripts", "ollama@0.6.4"];
        let _ = Command::new("npm").args(arguments).current_dir(folder).output();
    }
    installed().then(|| "node".into()).or_else(|| report_skipped("node and the package ollama of npm"))
}

fn printed_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Writes directly to standard error, because the test runner hides the output of `eprintln` in passing tests.
fn report_skipped(missing: &str) -> Option<PathBuf> {
    let mut stderr = std::io::stderr();
    writeln!(stderr, "SKIPPED: clients of Ollama's API, which need {missing}").unwrap();
    None
}
