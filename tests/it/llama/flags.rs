//! A command line and an environment written for llama-server.

use crate::harness::{ErrorTable, Server, folder, server, thunder};
use serde_json::{Value, json};

#[tokio::test]
async fn defaults_of_requests_come_from_flags() {
    let server = Server::start(&[
        "-np",
        "2",
        "--temp",
        "0.25",
        "--top-k",
        "7",
        "-n",
        "5",
        "-s",
        "42",
        "--repeat-penalty",
        "1.25",
        "-fa",
        "on",
        "--keep",
        "4",
        "--parameter",
        "stop=[\"xyzzy\"]",
        "--jinja",
        "--no-warmup",
        "--reasoning",
        "off",
        "--no-prefill-assistant",
        "--slot-save-path",
        "/tmp",
    ]);
    server.wait_ready().await;
    let (_, props) = server.get("/props").await;
    let params = &props["default_generation_settings"]["params"];
    assert_eq!((&params["temperature"], &params["top_k"], &params["n_predict"]), (&json!(0.25), &json!(7), &json!(5)));
    assert_eq!((&params["seed"], &params["repeat_penalty"], &params["n_keep"]), (&json!(42), &json!(1.25), &json!(4)));
    assert_eq!((&params["stop"], &props["total_slots"]), (&json!(["xyzzy"]), &json!(2)));
    let answer = server.answer("/completion", &json!({"prompt": "Once", "ignore_eos": true})).await;
    assert_eq!((&answer["tokens_predicted"], &answer["generation_settings"]["seed"]), (&json!(5), &json!(42)));
    let body = json!({"prompt": "Once", "ignore_eos": true, "temperature": 0.5, "n_predict": 3});
    let overridden = server.answer("/completion", &body).await;
    assert_eq!(
        (&overridden["tokens_predicted"], &overridden["generation_settings"]["temperature"]),
        (&json!(3), &json!(0.5))
    );
    let messages = [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b"})];
    let prompt = server.answer("/apply-template", &json!({"messages": messages})).await;
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(prompt.ends_with("b<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{prompt}");
    let openai = server.answer("/v1/completions", &json!({"prompt": "Once", "ignore_eos": true})).await;
    assert_eq!(openai["usage"]["completion_tokens"], 5);
}

/// Returns the error output of a server that does not start.
fn start_error(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = thunder();
    command.args(["serve", "--data-dir"]).arg(folder()).args(arguments).envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn invalid_flags_are_rejected_with_the_valid_values() {
    let mut errors = ErrorTable::default();
    for arguments in [
        &["--metrisc"][..],
        &["--slot-save-path", "/nowhere"],
        &["-fa", "on", "--attention", "on"],
        &["-ctv", "q8_0", "--attention", "on"],
        &["-ctk", "q3"],
        &["--strict-model-names", "--any-model-name"],
        &["-sps", "2"],
        &["--chat-template", "llama33"],
        &["--chat-template-file", "/nowhere"],
        &["--parameter", "xtc"],
        &["-dr", "someone/model"],
        &["--ssl-key-file", "x"],
        &["--api-prefix", "llm"],
        &["--api-prefix", "/llm/../x"],
        &["--api-prefix", "/a//b"],
        &["-ot", "ffn"],
        &["--control-vector", "/nowhere.gguf"],
        &["--control-vector-layer-range", "3", "1"],
        &["-mm", "/nowhere.gguf"],
        &["--image-min-tokens", "9", "--image-max-tokens", "8"],
        &["--override-kv", "a=b"],
        &["--rope-scale", "0"],
        &["--rope-scale", "2", "--rope-freq-scale", "0.5"],
        &["--cpu-mask", "xyz"],
        &["--poll", "101"],
        &["-l", "5"],
        &["--log-file", "/nowhere/log"],
        &["-md", "/nowhere.gguf"],
        &["--spec-type", "draft-simple"],
        &["--draft-p-min", "2"],
        &["-ctkd", "q3"],
        &["-ngld", "most"],
        &["--temp", "hot"],
        &["--parameter", "xtc_probability=\"high\""],
        &["--parameter", "response_format={\"type\": \"xml\"}"],
        &["--grammar", "root ::= ["],
    ] {
        errors.add_text(arguments.join(" "), &start_error(arguments, &[]));
    }
    insta::assert_snapshot!("flag_errors", errors);
}

#[test]
fn llama_server_variables_are_read_after_thunder_variables() {
    let mut errors = ErrorTable::default();
    for variables in [
        &[("LLAMA_ARG_N_PARALLEL", "0")][..],
        &[("LLAMA_ARG_N_PARALLEL", "4"), ("THUNDER_PARALLEL", "0")],
        &[("LLAMA_ARG_MODEL", "/nowhere.gguf"), ("LLAMA_ARG_ENDPOINT_METRICS", "1")],
        &[("LLAMA_ARG_CTX_SIZE", "abc")],
        &[("THUNDER_REPEAT_LAST_N", "all")],
        &[("LLAMA_ARG_MODEL", "a.gguf"), ("THUNDER_HF_REPO", "user/model")],
    ] {
        let shown = variables.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ");
        errors.add_text(shown, &start_error(&[], variables));
    }
    insta::assert_snapshot!("variable_errors", errors);
}

#[test]
fn empty_variables_count_as_unset() {
    let mut command = thunder();
    command.args(["serve", "--list-devices"]).env("LLAMA_ARG_MODEL", "a.gguf").env("THUNDER_PORT", "");
    for variable in ["MMPROJ", "MODELS_DIR", "SSL_KEY_FILE", "HF_REPO", "CTX_SIZE", "NO_SUCH_VARIABLE"] {
        command.env(format!("LLAMA_ARG_{variable}"), "");
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && !errors.contains("LLAMA_ARG_"), "{errors}");
}

#[test]
fn empty_variables_of_keys_and_certificate_are_errors() {
    for variable in [
        "THUNDER_API_KEY",
        "THUNDER_API_KEY_FILE",
        "THUNDER_ADMIN_KEY",
        "THUNDER_MOD_KEY",
        "THUNDER_INGEST_KEY",
        "THUNDER_SSL_CERT_FILE",
        "LLAMA_API_KEY",
        "LLAMA_ARG_API_KEY_FILE",
        "LLAMA_ARG_SSL_CERT_FILE",
    ] {
        let error = start_error(&["--allow-unauthenticated"], &[(variable, "")]);
        let is_named = error.contains("an API key must not be empty") || error.contains(variable);
        assert!(is_named, "{variable}: {error}");
    }
    let mut client = thunder();
    client.args(["runs", "--server", "http://127.0.0.1:1"]).env("THUNDER_API_KEY", "");
    let error = String::from_utf8(client.output().unwrap().stderr).unwrap();
    assert!(error.contains("no server answers"), "a client needs no key: {error}");
    let error = start_error(&["--ssl-cert-file", "a.pem"], &[("LLAMA_ARG_SSL_KEY_FILE", "")]);
    assert!(error.contains("--ssl-cert-file needs --ssl-key-file"), "{error}");
}

/// Returns the most probable answer to a prompt.
async fn greedy(server: &Server) -> Value {
    let prompt = "the old fox and the young owl went to the river ".repeat(4);
    let body = json!({"prompt": prompt, "n_predict": 24, "temperature": 0, "ignore_eos": true, "cache_prompt": false});
    server.answer("/completion", &body).await["content"].clone()
}

#[tokio::test]
async fn flags_without_effect_are_logged_and_change_no_answer() {
    // llama-server clamps or ignores these values, too.
    let accepted = ["--temp", "-1", "--top-p", "1.5", "--top-k", "-5", "--keep", "-7", "-n", "-2", "-l", "99999+5"];
    let flags = [
        "--poll",
        "0",
        "--prio",
        "0",
        "--cpu-mask",
        "1",
        "--cpu-strict",
        "1",
        "--no-repack",
        "--check-tensors",
        "--no-kv-offload",
        "-lm",
        "none",
        "--draft-p-split",
        "0.5",
        "--reuse-port",
        "--no-cont-batching",
        "-l",
        "7+0",
        "--embd-normalize",
        "-1",
        "--embedding",
        "--tags",
        "small,random",
        "--samplers",
        "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature;foo",
    ];
    let tuned = Server::start(&[&flags[..], &accepted].concat());
    tuned.wait_ready().await;
    assert_eq!(greedy(&tuned).await, greedy(server().await).await);
    let log = tuned.log();
    for note in [
        "--draft-p-split has no effect: speculative decoding drafts from the text of the run",
        "--reuse-port has no effect",
        "--no-cont-batching has no effect",
        "the stage \"foo\" of the default `samplers` is ignored",
        "the default -2 of `n_predict` has the effect of -1",
        "the default `logit_bias` of token 99999 is ignored",
    ] {
        assert_eq!(log.matches(note).count(), 1, "{log}");
    }
    let chat = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2});
    tuned.answer("/v1/chat/completions", &chat).await;
    let models = tuned.get("/v1/models").await.1;
    assert_eq!(models["data"][0]["tags"], json!(["small", "random"]));
    let vector = tuned.answer("/v1/embeddings", &json!({"input": "owl"})).await["data"][0]["embedding"].clone();
    let length: f64 = vector.as_array().unwrap().iter().map(|x| x.as_f64().unwrap().powi(2)).sum();
    assert!((length - 1.0).abs() > 0.01, "the vector must not be normalized: {length}");
}

#[tokio::test]
async fn rope_flags_and_metadata_overrides_take_effect() {
    let default = greedy(server().await).await;
    for flags in [&["--rope-freq-base", "100"][..], &["--rope-scaling", "linear", "--rope-scale", "8"]] {
        let scaled = Server::start(flags);
        scaled.wait_ready().await;
        assert_ne!(greedy(&scaled).await, default, "{flags:?}");
    }
    let before = server().await.get("/v1/models").await.1["data"][0]["meta"]["n_ctx_train"].clone();
    let overridden =
        Server::start(&["--override-kv", "qwen2.context_length=int:77,llama.context_length=int:77,general.name=str:x"]);
    overridden.wait_ready().await;
    let meta = overridden.get("/v1/models").await.1["data"][0]["meta"].clone();
    assert_eq!(meta["n_ctx_train"], 77, "{before}: {meta}");
    let state = server().await.answer("/slots/0?action=save-state", &json!({})).await;
    let (status, error) = overridden.post("/slots/0?action=restore-state", &json!({"state": state["state"]})).await;
    assert_eq!(status, 400, "a state with other settings must be rejected: {error}");
}

#[tokio::test]
async fn log_file_contains_warnings_about_unused_variables() {
    let folder = folder();
    let log = folder.join("thunder.log");
    let mut command = thunder();
    command.args(["serve", "--model", "/nowhere.gguf", "--log-file"]).arg(&log).arg("--data-dir").arg(&folder);
    command.envs([("LLAMA_ARG_SPEC_TYPE", "draft-mtp"), ("LLAMA_ARG_SPEC_DRAFT_HF_REPO", "x/y")]);
    command.envs([("LLAMA_ARG_NEW", "1"), ("LLAMA_ARG_NO_KV_OFFLOAD", "1")]);
    assert!(!command.output().unwrap().status.success());
    let log = std::fs::read_to_string(log).unwrap();
    for note in [
        "draft layers in --spec-type have no effect: drafts come from the text of the run",
        "LLAMA_ARG_SPEC_DRAFT_HF_REPO has no effect: draft models are not downloaded; set --spec-draft-model",
        "LLAMA_ARG_NEW has no effect: unknown variable",
        "use LLAMA_ARG_KV_OFFLOAD=0",
    ] {
        assert!(log.contains(note), "{log}");
    }
    assert!(!log.contains('\x1b'), "a log file must have no colors: {log}");
}

#[tokio::test]
async fn drafts_are_counted_and_change_no_answer() {
    let drafting = Server::start(&["-np", "1", "--metrics", "--spec-type", "ngram-simple", "--draft-max", "8"]);
    drafting.wait_ready().await;
    let body = json!({
        "prompt": "abcabcabc", "temperature": 0.0, "n_predict": 64, "n_probs": 2,
        "grammar": format!("root ::= {:?}", "abc".repeat(60))
    });
    let drafted = drafting.answer("/completion", &body).await;
    let plain = server().await.answer("/completion", &body).await;
    assert_eq!((&drafted["content"], &drafted["tokens_predicted"]), (&plain["content"], &json!(64)));
    let (count, accepted) = (&drafted["timings"]["draft_n"], &drafted["timings"]["draft_n_accepted"]);
    assert!(accepted.as_u64().unwrap() > 0 && accepted.as_u64() <= count.as_u64(), "{}", drafted["timings"]);
    assert_eq!(plain["timings"]["draft_n"], Value::Null);
    let settings = &drafted["generation_settings"];
    assert_eq!((&settings["speculative.types"], &settings["speculative.n_max"]), (&json!("ngram-simple"), &json!(8)));
    let mut without = body.clone();
    without["speculative.n_max"] = json!(0);
    let without = drafting.answer("/completion", &without).await;
    assert_eq!((&without["content"], &without["timings"]["draft_n"]), (&plain["content"], &Value::Null));
    assert_eq!(drafting.get("/slots").await.1[0]["speculative"], true);
    let metrics = drafting.request(reqwest::Method::GET, "/metrics").send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains(&format!("spec_decode_num_draft_tokens_total {count}\n")), "{metrics}");
    assert!(metrics.contains(&format!("spec_decode_num_accepted_tokens_total {accepted}\n")), "{metrics}");
}
