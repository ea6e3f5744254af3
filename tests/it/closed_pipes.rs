//! Commands whose output nobody reads, like those before `head`.

use super::harness::{assert_no_postgres, folder, model, server, text, thunder};
use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Maximum wait for the end of a command.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Runs a command whose standard output is closed; returns its exit code and standard error.
async fn unread(mut command: Command) -> (Option<i32>, String) {
    let run = move || {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let Output { status, stderr, .. } = child.wait_with_output().unwrap();
        (status.code(), text(&stderr))
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}

#[tokio::test]
async fn command_with_closed_output_ends_silently() {
    for arguments in [&["completions", "bash"][..], &["config"]] {
        let mut command = thunder();
        command.args(arguments);
        assert_eq!(unread(command).await, (Some(0), String::new()), "{arguments:?}");
    }
    let mut command = thunder();
    command.args(["models", "list"]).env("HF_HUB_CACHE", folder()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(0), "a message on a closed standard error");
}

#[tokio::test]
async fn command_with_closed_output_records_its_run() {
    let data_dir = folder();
    let local = |arguments: &[&str]| {
        let mut command = thunder();
        command.args(arguments).args(["--threads", "1", "--data-dir"]).arg(&data_dir).arg("-m").arg(model());
        command
    };
    // The address of a replay of an engine in this process.
    let run_id = |errors: &str| {
        let replay = errors.lines().find_map(|line| line.strip_prefix("replay: http://127.0.0.1:6767/runs/"));
        let run_id = replay.and_then(|replay| replay.split_once(" (while `thunder serve --data-dir "));
        run_id.unwrap_or_else(|| panic!("{errors}")).0.to_owned()
    };
    let (code, errors) = unread(local(&["run", "Hello!", "--raw", "-n", "6", "--temperature", "0"])).await;
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("tokens/s, ended by"), "{errors}");
    let (code, errors) = unread(local(&["fork", &run_id(&errors), "--at", "2", "-n", "2"])).await;
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(errors.matches("replay: ").count(), 2, "{errors}");
    run_id(&errors);
    assert_no_postgres(&data_dir, "fork");
}

#[tokio::test]
async fn chat_ends_when_its_output_is_closed() {
    let server = server().await;
    let mut command = thunder();
    command.args(["chat", "-n", "2", "--server", &server.base]).env("THUNDER_DATA_DIR", folder());
    let session = move || {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        drop(child.stdout.take());
        let (mut lines, begun) = (child.stdin.take().unwrap(), Instant::now());
        while child.try_wait().unwrap().is_none() && begun.elapsed() < WAIT_TIMEOUT {
            // Fails once the program has ended.
            let _ = lines.write_all(b"Hello!\n");
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = child.kill();
        child.wait().unwrap().code()
    };
    assert_eq!(tokio::task::spawn_blocking(session).await.unwrap(), Some(0));
}
