//! `thunder run`, with a server and without one.

use super::harness::{ErrorTable, client_command, folder, model, output_of, server, text, thunder};
use serde_json::Value;

#[tokio::test]
async fn run_prints_answer_and_replay_address() {
    let server = server().await;
    let arguments = ["run", "Hello!", "--mod", "log-top", "--seed", "3", "-n", "8", "--system", "Be short."];
    let output = output_of(client_command(server, &arguments)).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (answer, notes) = (text(&output.stdout), text(&output.stderr));
    assert!(answer.ends_with('\n') && !answer.contains('\x1b'), "{answer:?}");
    let replay = notes.lines().find_map(|line| line.strip_prefix("replay: ")).unwrap();
    let run_id = replay.strip_prefix(&format!("{}/runs/", server.base)).unwrap();
    let run = server.finished(run_id).await;
    assert_eq!(run["run"]["surface"], "cli");
    assert_eq!(run["run"]["mods"], serde_json::json!(["log-top"]));
    assert_eq!(run["run"]["has_attention"], true);
    let repeated = output_of(client_command(server, &arguments)).await;
    assert_eq!(answer, text(&repeated.stdout), "the same seed gives another answer");
}

#[tokio::test]
async fn run_prints_json() {
    let server = server().await;
    let output = output_of(client_command(server, &["run", "Hello!", "--mod", "log-top", "-n", "4", "--json"])).await;
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let id = printed["run_id"].as_str().unwrap();
    let run = server.finished(id).await;
    let usage = &printed["usage"];
    let expected = serde_json::json!({
        "run_id": id, "text": run["run"]["output_preview"], "finish_reason": "length",
        "usage": {
            "prompt_tokens": usage["prompt_tokens"], "completion_tokens": 4,
            "total_tokens": usage["prompt_tokens"].as_u64().unwrap() + 4,
        },
        "replay": format!("{}/runs/{id}", server.base),
    });
    assert_eq!(printed, expected);
}

#[tokio::test]
async fn run_prints_end_reason() {
    let server = server().await;
    let output = output_of(client_command(server, &["run", "Hello!", "--mod", "loop_forever", "-n", "4"])).await;
    let printed = text(&output.stderr);
    assert!(
        output.status.success() && printed.contains("ended by length: the limit of 272 steps was reached"),
        "{printed}"
    );
    let output = output_of(client_command(server, &["run", "Hello!", "--mod", "quote_greets", "-n", "2"])).await;
    let printed = text(&output.stderr);
    assert!(printed.contains("ended by length: the limit of 2 tokens is reached (--max-tokens)"), "{printed}");
}

#[tokio::test]
async fn run_reports_errors() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for name in ["nope", "./missing.py"] {
        let arguments = ["run", "Hello!", "--mod", name];
        errors.add_output(&arguments, &output_of(client_command(server, &arguments)).await);
    }
    insta::assert_snapshot!("run_errors", errors);
    let mut unreachable = thunder();
    unreachable.args(["run", "Hello!", "--server", "http://127.0.0.1:1"]);
    let output = output_of(unreachable).await;
    // The cause depends on the system.
    let error = text(&output.stderr);
    assert!(error.starts_with("thunder: no server answers at http://127.0.0.1:1: "), "{error}");
}

#[tokio::test]
async fn run_works_without_server() {
    let data_dir = folder();
    let mut command = thunder();
    // Flags of the command line override these variables.
    command
        .env("THUNDER_SERVER", "http://127.0.0.1:1")
        .env("THUNDER_HF_REPO", "user/model")
        .args(["run", "Hello!", "-n", "6", "--temperature", "0", "--threads", "1", "--raw", "--data-dir"])
        .arg(&data_dir)
        .arg("-m")
        .arg(model());
    let output = output_of(command).await;
    let printed = text(&output.stderr);
    assert!(output.status.success(), "{printed}");
    let replay = printed.lines().find_map(|line| line.strip_prefix("replay: ")).unwrap();
    let run_id = replay.split("/runs/").nth(1).unwrap().split(' ').next().unwrap();
    let mut export = thunder();
    export.args(["export", run_id, "--data-dir"]).arg(&data_dir);
    let exported = output_of(export).await;
    assert!(exported.status.success(), "{}", text(&exported.stderr));
    let document: Value = serde_json::from_slice(&exported.stdout).unwrap();
    assert_eq!(document["request"]["request_id"], run_id);
    assert!(document["events"].as_array().unwrap().len() > 3 * 6);
}
