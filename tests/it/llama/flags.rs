//! A command line and an environment written for llama-server.

use super::super::harness::{Server, folder, thunder};
use serde_json::json;

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
    assert_eq!((&params["seed"], &params["repeat_penalty"]), (&json!(42), &json!(1.25)));
    assert_eq!((&params["stop"], &props["total_slots"]), (&json!(["xyzzy"]), &json!(2)));
    let answer = server.answer("/completion", &json!({"prompt": "Once", "ignore_eos": true})).await;
    assert_eq!((&answer["tokens_predicted"], &answer["generation_settings"]["seed"]), (&json!(5), &json!(42)));
    let said = json!({"prompt": "Once", "ignore_eos": true, "temperature": 0.5, "n_predict": 3});
    let said = server.answer("/completion", &said).await;
    assert_eq!((&said["tokens_predicted"], &said["generation_settings"]["temperature"]), (&json!(3), &json!(0.5)));
    let ends = [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b"})];
    let prompt = server.answer("/apply-template", &json!({"messages": ends})).await;
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(prompt.ends_with("b<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"), "{prompt}");
    let openai = server.answer("/v1/completions", &json!({"prompt": "Once", "ignore_eos": true})).await;
    assert_eq!(openai["usage"]["completion_tokens"], 5);
}

fn refused(arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let mut command = thunder();
    command.args(["serve", "--data-dir"]).arg(folder()).args(arguments).envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn wrong_flags_are_refused_with_what_would_be_right() {
    for (arguments, expected) in [
        (&["--metrisc"][..], "--metrics"),
        (&["--slot-save-path", "/nowhere"], "--slot-save-path takes a folder"),
        (&["-fa", "on", "--attention", "on"], "exclude each other"),
        (&["-ctv", "q8_0"], "--attention off"),
        (&["-ctk", "q3"], "is no type of the KV cache"),
        (&["-kvu"], "--kv-unified is not supported"),
        (&["-sps", "2"], "--slot-prompt-similarity must be between 0 and 1"),
        (&["--chat-template", "llama3"], "--chat-template-file"),
        (&["--chat-template-file", "/nowhere"], "cannot read /nowhere"),
        (&["--parameter", "xtc"], "behind a name"),
        (&["--no-cont-batching"], "unexpected argument"),
    ] {
        let said = refused(arguments, &[]);
        assert!(said.contains(expected), "{arguments:?}: {said}");
    }
}

#[test]
fn their_variables_are_read_and_ours_go_first() {
    let said = refused(&[], &[("LLAMA_ARG_N_PARALLEL", "0")]);
    assert!(said.contains("--parallel must be between 1 and 256, got 0"), "{said}");
    let said = refused(&[], &[("LLAMA_ARG_N_PARALLEL", "4"), ("THUNDER_PARALLEL", "0")]);
    assert!(said.contains("got 0"), "{said}");
    let said = refused(&[], &[("LLAMA_ARG_MODEL", "/nowhere.gguf"), ("LLAMA_ARG_ENDPOINT_METRICS", "1")]);
    assert!(said.contains("/nowhere.gguf"), "{said}");
}
