//! `thunder run`, with a server and without one.

use super::harness::{ErrorTable, client_command, folder, model, output_of, server, text, thunder};
use serde_json::{Value, json};
use thunder::events::system;

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
        "mod_failures": [], "replay": format!("{}/runs/{id}", server.base),
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
    let output = output_of(client_command(server, &["run", "Hello!", "--mod", "shorten", "-n", "9"])).await;
    let printed = text(&output.stderr);
    assert!(printed.contains("ended by length: a mod has set the limit of 3 tokens, which is reached"), "{printed}");
}

#[tokio::test]
async fn run_reports_failed_calls_of_mods() {
    let server = server().await;
    let message = "InvalidActionError: adjust_prefill takes token ids, not text; use tokenizer.encode(text)";
    let arguments = ["run", "Hello!", "--mod", "text_as_prompt", "-n", "2", "--json"];
    let output = output_of(client_command(server, &arguments[..6])).await;
    let printed = text(&output.stderr);
    assert!(printed.contains(&format!("text_as_prompt: 1 of 1 calls failed: {message}\n")), "{printed}");
    let output = output_of(client_command(server, &arguments)).await;
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    let expected = json!([{"mod": "text_as_prompt", "calls": 1, "failed": 1, "message": message}]);
    assert_eq!(printed["mod_failures"], expected);
    let run_id = printed["run_id"].as_str().unwrap();
    server.finished(run_id).await;
    let page = server.request(reqwest::Method::GET, &format!("/runs/{run_id}")).send().await.unwrap();
    assert!(page.text().await.unwrap().contains("1 call of a mod failed"));
}

#[tokio::test]
async fn run_reports_errors() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for name in ["nope", "./missing.py"] {
        let arguments = ["run", "Hello!", "--mod", name];
        errors.add_output(&arguments, &output_of(client_command(server, &arguments)).await);
    }
    for number in [["--temperature", "nan"], ["--top-p", "inf"], ["-n", "-2"], ["--temperature", "-1"]] {
        let arguments = ["run", "Hello!", number[0], number[1]];
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
async fn runs_lists_matching_runs() {
    let server = server().await;
    let session = system::new_id().to_string();
    let mut ids = Vec::new();
    for _ in 0..3 {
        let body = json!({"prompt": "Once upon", "max_tokens": 2, "metadata": {"list": session}});
        let answer = server.answer("/v1/completions", &body).await;
        ids.push(answer["thunder"]["run_id"].as_str().unwrap().to_owned());
        server.finished(&ids[ids.len() - 1]).await;
    }
    let filter = format!("metadata.list:{session}");
    let (_, list) = server.get(&format!("/api/v1/runs?q={filter}")).await;
    let output = output_of(client_command(server, &["runs", &filter, "--json"])).await;
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), list["runs"], "{}", text(&output.stderr));
    let output = output_of(client_command(server, &["runs", &filter, "-n", "2"])).await;
    let table = text(&output.stdout);
    let listed: Vec<&str> = table.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(listed, ["RUN", &ids[2], &ids[1]], "{table}");
    assert!(table.lines().skip(1).all(|line| line.ends_with("Once upon")), "{table}");
    let mut errors = ErrorTable::default();
    for filter in ["parent:nc-1", "modle:qwen"] {
        let arguments = ["runs", filter];
        errors.add_output(&arguments, &output_of(client_command(server, &arguments)).await);
    }
    insta::assert_snapshot!("runs_errors", errors);
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
    let note = format!(
        "thunder: --model selects this process instead of the server at http://127.0.0.1:1; the runs are recorded in the \
         data directory {}\n",
        data_dir.display()
    );
    assert!(printed.contains(&note), "{printed}");
    let replay = printed.lines().find_map(|line| line.strip_prefix("replay: ")).unwrap();
    let (run_id, hint) = replay.split("/runs/").nth(1).unwrap().split_once(' ').unwrap();
    assert_eq!(hint, format!("(while `thunder serve --data-dir {}` runs)", data_dir.display()));
    let mut export = thunder();
    export.args(["export", run_id, "--data-dir"]).arg(&data_dir);
    let exported = output_of(export).await;
    assert!(exported.status.success(), "{}", text(&exported.stderr));
    let document: Value = serde_json::from_slice(&exported.stdout).unwrap();
    assert_eq!(document["request"]["request_id"], run_id);
    assert!(document["events"].as_array().unwrap().len() > 3 * 6);
    let mut runs = thunder();
    runs.args(["runs", "tokens:6", "--json", "--data-dir"]).arg(&data_dir);
    let listed = output_of(runs).await;
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((listed.as_array().unwrap().len(), listed[0]["run_id"].as_str()), (1, Some(run_id)));

    let package = folder().join("pack");
    std::fs::create_dir_all(&package).unwrap();
    std::fs::write(package.join("words.py"), "WORD = \"Yes.\"\n").unwrap();
    let source = "from thunder_mods import Prefilled, mod\nfrom .words import WORD\n\n\n@mod(events=[Prefilled])\n\
                  def packed(event, actions, tokenizer):\n    return actions.force_output(tokenizer.encode(WORD))\n";
    std::fs::write(package.join("answers.py"), source).unwrap();
    let mut with_package = thunder();
    with_package.args(["run", "Hello!", "--json", "--threads", "1", "--mod"]).arg(&package);
    with_package.arg("--data-dir").arg(&data_dir).arg("-m").arg(model());
    let output = output_of(with_package).await;
    assert!(output.status.success(), "{}", text(&output.stderr));
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(run["text"], "Yes.", "{run}");
    // The stored version has the module of the mod.
    let mut verify = thunder();
    verify.args(["replay", "--verify", run["run_id"].as_str().unwrap(), "--threads", "1", "--mod-sandbox", "off"]);
    verify.arg("--data-dir").arg(&data_dir).arg("-m").arg(model());
    let output = output_of(verify).await;
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}
