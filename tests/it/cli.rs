//! The command line as a person and a script use it.

use super::harness::{Server, assert_no_postgres, can_receive, folder, model, server, thunder};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

async fn output(mut command: Command) -> Output {
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn on(server: &Server, words: &[&str]) -> Command {
    let mut command = thunder();
    command.args(words).args(["--server", &server.base]);
    command
}

fn payload(request_id: &str) -> String {
    serde_json::json!({
        "request": {"request_id": request_id, "model": "elsewhere", "created_at": "2026-01-02T03:04:05Z"},
        "events": [
            {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 3, "details": {"b": 1.50, "a": null}},
            {"event_type": "Sampled", "step": 1, "sequence_order": 1, "sampled_token": 5, "token_text": " hi"},
            {"event_type": "Added", "step": 1, "sequence_order": 2, "added_tokens": [5], "forced": false},
        ],
        "mod_calls": [], "mod_logs": [], "actions": [],
    })
    .to_string()
}

/// A closed terminal sends SIGHUP.
#[test]
fn signal_to_a_command_leaves_no_postgres_behind() {
    let commands = [("HUP", &["chat"][..]), ("TERM", &["run", "hello", "-n", "2000"]), ("INT", &["chat"])];
    for (signal, words) in commands.into_iter().filter(|(signal, _)| can_receive(signal)) {
        let data_dir = folder();
        let mut command = thunder();
        command.args(words).args(["--threads", "1", "--data-dir"]).arg(&data_dir).arg("-m").arg(model());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let _open = child.stdin.take();
        let begun = Instant::now();
        let state = data_dir.join("postgres/data/postmaster.pid");
        while !std::fs::read_to_string(&state).is_ok_and(|text| text.contains("ready")) {
            assert!(begun.elapsed() < Duration::from_mins(2), "{words:?}: {:?}", child.try_wait());
            std::thread::sleep(Duration::from_millis(5));
        }
        let sent = Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
        assert!(sent.success());
        let ended = child.wait().unwrap();
        assert!(ended.code().is_some(), "{words:?}: {ended}");
        assert_no_postgres(&data_dir, signal);
    }
}

#[tokio::test]
async fn run_prints_the_answer_and_where_its_replay_is() {
    let server = server().await;
    let words = ["run", "Hello!", "--mod", "log-top", "--seed", "3", "-n", "8", "--system", "Be short."];
    let told = output(on(server, &words)).await;
    assert!(told.status.success(), "{}", text(&told.stderr));
    let (answer, rest) = (text(&told.stdout), text(&told.stderr));
    assert!(answer.ends_with('\n') && !answer.contains('\x1b'), "{answer:?}");
    let replay = rest.lines().find_map(|line| line.strip_prefix("replay: ")).unwrap();
    let run_id = replay.strip_prefix(&format!("{}/runs/", server.base)).unwrap();
    let run = server.finished(run_id).await;
    assert_eq!(run["run"]["surface"], "cli");
    assert_eq!(run["run"]["mods"], serde_json::json!(["log-top"]));
    assert_eq!(run["run"]["has_attention"], true);
    let again = output(on(server, &words)).await;
    assert_eq!(answer, text(&again.stdout), "the same seed gave another answer");
}

#[tokio::test]
async fn run_prints_why_it_ended() {
    let server = server().await;
    let told = output(on(server, &["run", "Hello!", "--mod", "loop_forever", "-n", "4"])).await;
    let said = text(&told.stderr);
    assert!(told.status.success() && said.contains("ended by length: the limit of 272 steps was reached"), "{said}");
    let told = output(on(server, &["run", "Hello!", "--mod", "quote_greets", "-n", "2"])).await;
    let said = text(&told.stderr);
    assert!(said.contains("ended by length: the limit of 2 tokens is reached (--max-tokens)"), "{said}");
}

#[tokio::test]
async fn run_says_what_is_wrong() {
    let server = server().await;
    let told = output(on(server, &["run", "Hello!", "--mod", "nope"])).await;
    assert_eq!(told.status.code(), Some(1));
    assert!(text(&told.stderr).contains("unknown mod 'nope'"), "{}", text(&told.stderr));
    let told = output(on(server, &["run", "Hello!", "--mod", "./missing.py"])).await;
    assert!(text(&told.stderr).contains("missing.py"), "{}", text(&told.stderr));
    let mut nobody = thunder();
    nobody.args(["run", "Hello!", "--server", "http://127.0.0.1:1"]);
    let told = output(nobody).await;
    assert!(text(&told.stderr).contains("no server answers at http://127.0.0.1:1"), "{}", text(&told.stderr));
}

#[tokio::test]
async fn run_needs_no_server() {
    let data_dir = folder();
    let mut command = thunder();
    command
        .args(["run", "Hello!", "-n", "6", "--temperature", "0", "--threads", "1", "--raw", "--data-dir"])
        .arg(&data_dir)
        .arg("-m")
        .arg(model());
    let told = output(command).await;
    let said = text(&told.stderr);
    assert!(told.status.success(), "{said}");
    let replay = said.lines().find_map(|line| line.strip_prefix("replay: ")).unwrap();
    let run_id = replay.split("/runs/").nth(1).unwrap().split(' ').next().unwrap();
    let mut export = thunder();
    export.args(["export", run_id, "--data-dir"]).arg(&data_dir);
    let exported = output(export).await;
    assert!(exported.status.success(), "{}", text(&exported.stderr));
    let document: Value = serde_json::from_slice(&exported.stdout).unwrap();
    assert_eq!(document["request"]["request_id"], run_id);
    assert!(document["events"].as_array().unwrap().len() > 3 * 6);
}

/// A build for GPUs finds its driver there, and starts itself again as the sandbox.
#[tokio::test]
async fn workers_look_for_libraries_where_the_program_does() {
    let data_dir = folder();
    let file = data_dir.join("look.py");
    let source = "import os\nfrom thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\n\
                  def look(event, actions, tokenizer):\n    \
                  return actions.force_output(tokenizer.encode(os.environ.get(\"LD_LIBRARY_PATH\", \"nowhere\")))\n";
    std::fs::write(&file, source).unwrap();
    for kept_in in ["off", "all"] {
        let mut command = thunder();
        command
            .env("LD_LIBRARY_PATH", "/opt/driver")
            .args(["run", "Hello!", "--mod-sandbox", kept_in, "--mod"])
            .arg(&file);
        command.arg("--data-dir").arg(&data_dir).arg("-m").arg(model());
        let told = output(command).await;
        assert_eq!(text(&told.stdout).trim(), "/opt/driver", "{kept_in}: {}", text(&told.stderr));
    }
}

/// A path from which every account can run the interpreter.
#[tokio::test]
async fn sandboxed_worker_gives_up_the_user_id_of_root() {
    const PYTHON: &str = "/usr/bin/python3";
    if !nix::unistd::geteuid().is_root() || !Path::new(PYTHON).exists() {
        return eprintln!("skipped: it needs root, and a Python of the system");
    }
    let data_dir = folder();
    let file = data_dir.join("look.py");
    let source = "import os\nfrom thunder_mods import Prefilled, mod\n\n\n@mod(events=[Prefilled])\n\
                  def look(event, actions, tokenizer):\n    \
                  return actions.force_output(tokenizer.encode(str(os.getuid() > 0 and os.getgid() > 0)))\n";
    std::fs::write(&file, source).unwrap();
    let mut command = thunder();
    command.env("THUNDER_PYTHON", PYTHON).args(["run", "Hello!", "--mod-sandbox", "all", "--mod"]).arg(&file);
    command.arg("--data-dir").arg(&data_dir).arg("-m").arg(model());
    let told = output(command).await;
    let refused = text(&told.stderr);
    assert!(text(&told.stdout).trim() == "True" || refused.contains("there is no sandbox"), "{refused}");
}

#[tokio::test]
async fn a_trace_goes_in_and_comes_out_the_same() {
    let server = server().await;
    let id = format!("cli-{}", uuid::Uuid::now_v7());
    let folder = folder();
    let (file, copy) = (folder.join("trace.json"), folder.join("copy.json"));
    std::fs::write(&file, payload(&id)).unwrap();
    let told = output(on(server, &["ingest", file.to_str().unwrap()])).await;
    assert!(told.status.success(), "{}", text(&told.stderr));
    assert_eq!(text(&told.stdout).trim(), format!("{}/runs/{id}", server.base));
    let told = output(on(server, &["export", &id, "-o", copy.to_str().unwrap()])).await;
    assert!(told.status.success(), "{}", text(&told.stderr));
    let copied = std::fs::read_to_string(&copy).unwrap();
    assert!(copied.contains("{\"b\":1.5,\"a\":null}"), "{copied}");
    // The copy is the same run, so that it goes in again.
    let told = output(on(server, &["ingest", copy.to_str().unwrap()])).await;
    assert!(told.status.success(), "{}", text(&told.stderr));
    let told = output(on(server, &["export", "no-such-run"])).await;
    assert_eq!(told.status.code(), Some(1));
    assert!(text(&told.stderr).contains("no-such-run"), "{}", text(&told.stderr));
}

#[tokio::test]
async fn ingest_names_what_is_wrong_in_which_file() {
    let folder = folder();
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let right = write("right.json", &payload("r"));
    let wrong = write("wrong.json", r#"{"request": {"request_id": "w"}, "events": [{"event_type": "Nope"}]}"#);
    let check = |files: &[&PathBuf]| {
        let mut command = thunder();
        command.args(["ingest", "--check"]).args(files);
        command
    };
    let told = output(check(&[&right])).await;
    assert!(told.status.success() && text(&told.stdout).contains("run r with 3 events"), "{}", text(&told.stdout));
    let told = output(check(&[&right, &wrong])).await;
    assert_eq!(told.status.code(), Some(1));
    let said = text(&told.stderr);
    assert!(said.contains("wrong.json") && said.contains("$.events[0]"), "{said}");
}

#[test]
fn a_wrong_word_is_a_usage_error() {
    for words in [&["frobnicate"][..], &["serve", "--frobnicate"], &["run"], &["serve", "--port", "99999"]] {
        let output = thunder().args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {}", text(&output.stderr));
    }
    let help = thunder().arg("--help").output().unwrap();
    for command in ["serve", "run", "ingest", "export"] {
        assert!(text(&help.stdout).contains(command));
    }
}
