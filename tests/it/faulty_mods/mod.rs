//! Faulty mods on the real server: their runs end or continue as the handbook describes, and neither other runs nor the
//! server are affected. Each is tested with the rights of the server and in the sandbox.

mod sandbox;

use super::harness::{Server, server};
use futures::future::join_all;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::time::sleep;

const FAULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/mods/faults");
const TOKENS: usize = 8;

fn start(flags: &[&str]) -> Server {
    // The import of a worker has its own timeout; the timeout of a call is long enough for a busy machine.
    let arguments = ["--mods-dir", FAULTS, "--mod-timeout", "10000", "--mod-memory", "256M", "--ctx-size", "2048"];
    Server::start(&[&arguments, flags].concat())
}

/// Returns the server whose mods are local files and have the rights of the server.
async fn unrestricted_server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| start(&[]));
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

/// Returns the server with the same mods in the sandbox, like uploaded mods.
async fn sandboxed_server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| start(&["--mod-sandbox", "all"]));
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

/// Answer and recorded exceptions and logs of a run.
struct FaultyRun {
    answer: Value,
    exceptions: Vec<String>,
    logs: Vec<String>,
}

async fn run_mod(server: &Server, name: &str, tokens: usize) -> FaultyRun {
    let body = json!({"prompt": "Once", "max_tokens": tokens, "seed": 1, "ignore_eos": true, "mods": [name]});
    let answer = server.answer("/v1/completions", &body).await;
    assert_eq!(answer["usage"]["completion_tokens"], tokens, "{answer}");
    let id = answer["thunder"]["run_id"].as_str().unwrap();
    server.finished(id).await;
    let text = server.request(reqwest::Method::GET, &format!("/api/v1/runs/{id}/events")).send().await.unwrap();
    let items: Vec<Value> =
        text.text().await.unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let texts = |kind: &str, field: &str| {
        let of_kind = items.iter().filter(|item| item["kind"] == kind);
        of_kind.filter_map(|item| item[field].as_str().map(str::to_owned)).collect()
    };
    FaultyRun { exceptions: texts("mod_call", "exception_message"), logs: texts("mod_log", "log_message"), answer }
}

/// Returns the text of a run without mods.
async fn text_without_mods(server: &Server) -> String {
    let body = json!({"prompt": "Once", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let answer = server.answer("/v1/completions", &body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 24, "{answer}");
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Runs the mod at the same time as other runs, and asserts that these have the expected text.
async fn run_with_others(server: &Server, name: &str, expected_text: &str) -> FaultyRun {
    let (result, ()) = tokio::join!(run_mod(server, name, TOKENS), async {
        for _ in 0..2 {
            assert_eq!(text_without_mods(server).await, expected_text, "{name} affects other runs");
        }
    });
    assert_eq!(server.get("/health").await.0, 200, "{name}");
    result
}

/// Returns the only exception of a run.
fn exception(result: &FaultyRun) -> &str {
    assert_eq!(result.exceptions.len(), 1, "{:?}", result.exceptions);
    &result.exceptions[0]
}

async fn assert_faults_are_contained(server: &Server) {
    let assert_timed_out = |result: &FaultyRun| {
        assert!(exception(result).starts_with("deadline of 10000 ms exceeded"), "{:?}", result.exceptions);
    };
    let text = text_without_mods(server).await;
    let (endless, stops) =
        tokio::join!(run_with_others(server, "endless", &text), run_with_others(server, "stops", &text));
    assert_timed_out(&endless);
    assert_timed_out(&stops);
    // The worker was restarted.
    assert_timed_out(&run_mod(server, "stops", TOKENS).await);
    for (name, expected) in [
        ("memory_bomb", "MemoryError"),
        ("segfault", "the worker was ended by signal 11 (SIGSEGV)"),
        ("exits", "the worker ended with exit code 3"),
        ("wrong_type", "InvalidActionError: a mod must return an action or None, got int"),
        ("huge_frame", "the worker violated the protocol: a frame has a header of 4294967295 bytes"),
        ("half_a_frame", "the worker ended with exit code 4"),
        ("unknown_frame", "the worker violated the protocol: it did not send a reply to a call"),
        ("no_json", "the worker violated the protocol: "),
        ("odd_body", "InvalidActionError at Added: an edit must be a list of tokens and values, got 3 bytes"),
        ("wrong_ids", "InvalidActionError at Added: token -1 is not in the vocabulary"),
        ("forces_too_many", "InvalidActionError at Added: ForceTokens has 100000 tokens; it must have at most the "),
        ("outputs_too_many", "InvalidActionError at Added: ForceOutput has 100000 tokens; it must have at most the "),
        ("calls_too_long", "InvalidActionError at Added: tool calls must have at most 1048576 bytes, got 1048"),
        ("edits_too_many", "InvalidActionError at Added: an edit must have at most one entry per token"),
    ] {
        let result = run_with_others(server, name, &text).await;
        assert!(exception(&result).starts_with(expected), "{name}: {:?}", result.exceptions);
        // The worker was restarted.
        let again = run_mod(server, name, TOKENS).await;
        assert!(exception(&again).starts_with(expected), "{name}: {:?}", again.exceptions);
    }
    if cfg!(target_os = "linux") {
        for name in ["many_threads", "many_threads_log"] {
            // On a busy machine, Python may fail to start a thread first, or be too slow. The limit must be reached in one of the runs.
            let mut reached = false;
            for _ in 0..5 {
                let result = run_with_others(server, name, &text).await;
                reached = result.exceptions.iter().any(|exception| exception.ends_with("threads; the maximum is 512"));
                if reached {
                    break;
                }
                let other = exception(&result);
                let is_busy = other.ends_with("can't start new thread") || other.starts_with("deadline of 10000 ms");
                assert!(is_busy, "{name}: {:?}", result.exceptions);
            }
            assert!(reached, "{name} never reaches the limit of threads");
        }
    }
    // A worker that sends replies before their calls affects only its own run.
    run_with_others(server, "replies_early", &text).await;
    for name in ["prints", "writes_past_python"] {
        let before = resident_mib(server);
        let result = run_with_others(server, name, &text).await;
        let log_bytes: usize = result.logs.iter().map(String::len).sum();
        assert!(log_bytes < 1 << 20, "{name}: {log_bytes} bytes of logs");
        assert!(resident_mib(server) < before + 128, "{name} fills the server's memory");
    }
}

/// Returns the memory of the server's process, in MiB; 0 if the system does not report it.
fn resident_mib(server: &Server) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", server.pid())).unwrap_or_default();
    statm.split(' ').nth(1).map_or(0, |pages| (pages.parse::<u64>().unwrap() * 4096) >> 20)
}

#[tokio::test]
async fn faulty_mods_do_not_affect_other_runs() {
    assert_faults_are_contained(unrestricted_server().await).await;
}

#[tokio::test]
async fn faulty_sandboxed_mods_do_not_affect_other_runs() {
    if has_sandbox().await {
        assert_faults_are_contained(sandboxed_server().await).await;
    }
}

/// Returns true if this system has a sandbox; otherwise prints the reason.
async fn has_sandbox() -> bool {
    let (_, props) = server().await.get("/props").await;
    let sandbox = &props["mod_sandbox"];
    assert_eq!(sandbox["policy"], "uploaded", "{props}");
    if sandbox["available"] == true {
        assert!(sandbox["how"].as_str().unwrap().contains("seccomp"), "{sandbox}");
        return true;
    }
    assert!(sandbox["reason"].as_str().is_some_and(|reason| !reason.is_empty()), "{sandbox}");
    eprintln!("skipped: {sandbox}");
    false
}

#[tokio::test]
async fn repeatedly_failing_mod_is_disabled_and_reported() {
    let result = run_mod(unrestricted_server().await, "always_raises", TOKENS).await;
    let count = result.exceptions.len();
    assert!((5..=15).contains(&count) && result.exceptions.iter().all(|text| text == "ValueError: never"), "{count}");
    let message = "the mod 'always_raises' was disabled at step 5 for the rest of this run: 5 consecutive calls for ForwardPass failed; last failure: ValueError: never";
    assert_eq!(result.logs, [message]);
    assert_eq!(result.answer["timings"]["message"], message, "{}", result.answer);
    let (_, run) = unrestricted_server()
        .await
        .get(&format!("/api/v1/runs/{}", result.answer["thunder"]["run_id"].as_str().unwrap()))
        .await;
    assert_eq!((&run["run"]["message"], &run["run"]["status"]), (&json!(message), &json!("done")));
    unrestricted_server().await.wait_for_log(message).await;
}

#[tokio::test]
async fn hanging_mod_recovers_for_other_runs() {
    let server = unrestricted_server().await;
    let (hanging, good) = tokio::join!(run_mod(server, "hangs_for_some", 2), run_mod(server, "hangs_for_some", TOKENS));
    assert!(
        hanging.exceptions.iter().any(|text| text.starts_with("deadline of 10000 ms exceeded")),
        "{:?}",
        hanging.exceptions
    );
    // Calls of the second run wait for the deadline of the hanging call and are then answered. While the restart of a worker
    // is delayed, calls fail at once.
    assert!(good.logs.len() + good.exceptions.len() >= TOKENS && !good.logs.is_empty(), "{:?}", good.exceptions);
}

#[tokio::test]
async fn slow_mod_delays_only_its_own_run() {
    let server = unrestricted_server().await;
    let slow = run_mod(server, "sleeps", 40);
    // These runs have 48 tokens. If each waited for the mod, the slow run would end first.
    let others = async {
        for _ in 0..2 {
            text_without_mods(server).await;
        }
    };
    tokio::select! {
        biased;
        result = slow => panic!("the slow run ended first: {:?}", result.exceptions),
        () = others => {}
    }
}

#[tokio::test]
async fn worker_using_cpu_or_threads_without_a_call_is_ended() {
    let server = Server::start(&["--mods-dir", FAULTS, "--mod-timeout", "20000"]);
    server.wait_ready().await;
    run_mod(&server, "computes_between_calls", TOKENS).await;
    server.wait_for_log("worker ended: it used ").await;
    run_mod(&server, "many_threads_later", TOKENS).await;
    server.wait_for_log("threads without a call; the maximum is 512").await;
}

#[tokio::test]
async fn configured_number_of_workers_serves_one_mod() {
    let server = Server::start(&["--mods-dir", FAULTS, "--mod-workers", "3", "--parallel", "4", "--mod-idle", "2"]);
    server.wait_ready().await;
    let run = |tokens| run_mod(&server, "prints_process_id", tokens);
    let results = join_all([run(200), run(200), run(200), run(200)]).await;
    let mut processes = HashSet::new();
    for run in &results {
        assert_eq!(run.logs.len(), 200, "{:?}", run.exceptions);
        let own: HashSet<&str> = run.logs.iter().map(String::as_str).collect();
        assert_eq!(own.len(), 1, "one worker receives all calls of a run");
        processes.extend(own);
    }
    assert!((2..=3).contains(&processes.len()), "{processes:?}");
    // Idle workers end.
    let pids: Vec<&str> = processes.iter().map(|line| line.split(' ').next().unwrap()).collect();
    for _ in 0..1200 {
        if pids.iter().all(|pid| !std::path::Path::new("/proc").join(pid).exists()) {
            break;
        }
        sleep(Duration::from_millis(50)).await;
    }
    assert!(pids.iter().all(|pid| !std::path::Path::new("/proc").join(pid).exists()), "idle workers were not ended");
    assert_eq!(run_mod(&server, "prints_process_id", 4).await.logs.len(), 4, "a new worker is started");
}

#[tokio::test]
async fn thousand_runs_leak_no_memory() {
    // Runs of other tests would change the memory of a shared server.
    let server = start(&[]);
    server.wait_ready().await;
    let server = &server;
    let mut sizes = Vec::new();
    for round in 0..10 {
        for _ in 0..25 {
            join_all((0..4).map(|_| async {
                let body = json!({"prompt": "Once", "max_tokens": 2, "ignore_eos": true, "mods": ["remembers"]});
                assert_eq!(server.answer("/v1/completions", &body).await["usage"]["completion_tokens"], 2);
            }))
            .await;
        }
        let result = run_mod(server, "remembers", 2).await;
        assert_eq!(result.exceptions, Vec::<String>::new());
        let (retained, kib) = result.logs[0].split_once(' ').unwrap();
        assert_eq!(retained, "1", "round {round}: the worker holds state of ended runs");
        sizes.push((kib.parse::<u64>().unwrap() >> 10, resident_mib(server)));
    }
    let (early, late) = (sizes[2], sizes[9]);
    assert!(late.0 <= early.0 + 8, "the worker grows: {sizes:?}");
    assert!(late.1 <= early.1 + 48, "the server grows: {sizes:?}");
}
