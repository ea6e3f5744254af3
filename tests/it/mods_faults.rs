//! Mods that do what no mod should, on the real server: their runs end or go on as `mods.md` has it, other runs do not
//! notice, and the server lives. Once with the rights of the server, and once in the sandbox.

use super::harness::{Server, server};
use futures::future::join_all;
use serde_json::{Value, json};
use std::collections::HashSet;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::time::sleep;

const FAULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/mods/faults");
const TOKENS: usize = 8;

fn start(further: &[&str]) -> Server {
    // The import of a worker has its own time; a call has enough for a machine that does other things as well.
    let arguments = ["--mods-dir", FAULTS, "--mod-timeout", "5000", "--mod-memory", "256M", "--ctx-size", "2048"];
    Server::start(&[&arguments, further].concat())
}

/// Mods are files, and have the rights of the server.
async fn free() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| start(&[]));
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

/// The same mods in the sandbox, as uploaded ones always are.
async fn kept() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| start(&["--mod-sandbox", "all"]));
    tokio::task::spawn_blocking(|| LazyLock::force(&SERVER)).await.unwrap().wait_ready().await
}

/// What is recorded of a run.
struct Told {
    answer: Value,
    exceptions: Vec<String>,
    logs: Vec<String>,
}

async fn tell(server: &Server, name: &str, tokens: usize) -> Told {
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
    Told { exceptions: texts("mod_call", "exception_message"), logs: texts("mod_log", "log_message"), answer }
}

/// A run without mods, which nothing may harm.
async fn other(server: &Server) -> String {
    let body = json!({"prompt": "Once", "max_tokens": 24, "temperature": 0, "ignore_eos": true});
    let answer = server.answer("/v1/completions", &body).await;
    assert_eq!(answer["usage"]["completion_tokens"], 24, "{answer}");
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Runs the mod beside other runs, and has it run on.
async fn harmless(server: &Server, name: &str) -> Told {
    let undisturbed = other(server).await;
    let (told, beside) = tokio::join!(tell(server, name, TOKENS), async {
        let mut texts = Vec::new();
        for _ in 0..4 {
            texts.push(other(server).await);
        }
        texts
    });
    assert!(beside.iter().all(|text| *text == undisturbed), "{name} disturbs other runs");
    assert_eq!(server.get("/health").await.0, 200, "{name}");
    told
}

/// The one exception of a run.
fn exception(told: &Told) -> &str {
    assert_eq!(told.exceptions.len(), 1, "{:?}", told.exceptions);
    &told.exceptions[0]
}

async fn faults(server: &Server) {
    for (name, expected) in [
        ("endless", "deadline of 5000 ms exceeded"),
        ("bomb", "MemoryError"),
        ("segfault", "the worker was ended by signal 11 (SIGSEGV)"),
        ("exits", "the worker ended with exit code 3"),
        ("wrong_type", "InvalidActionError: a mod must return an action or None, got int"),
        ("stops", "deadline of 5000 ms exceeded"),
        ("huge_frame", "the worker violated the protocol: a frame has a header of 4294967295 bytes"),
        ("half_a_frame", "the worker ended with exit code 4"),
        ("unknown_frame", "the worker violated the protocol: it did not send a reply to a call"),
        ("no_json", "the worker violated the protocol: "),
        ("odd_body", "InvalidActionError at Added: an edit must be a list of tokens and values, got 3 bytes"),
        ("wrong_ids", "InvalidActionError at Added: token -1 is not in the vocabulary"),
    ] {
        let told = harmless(server, name).await;
        assert!(exception(&told).starts_with(expected), "{name}: {:?}", told.exceptions);
        // The worker is there again.
        let again = harmless(server, name).await;
        assert!(exception(&again).starts_with(expected), "{name}: {:?}", again.exceptions);
    }
    if cfg!(target_os = "linux") {
        let told = harmless(server, "many_threads").await;
        assert!(exception(&told).ends_with("threads; the maximum is 512"), "{:?}", told.exceptions);
    }
    // Its own run gets what it says, as it could have said it in order.
    harmless(server, "unasked").await;
    for name in ["prints", "writes_past_python"] {
        let before = resident_mib(server);
        let told = harmless(server, name).await;
        let kept: usize = told.logs.iter().map(String::len).sum();
        assert!(kept < 1 << 20, "{name}: {kept} bytes are kept");
        assert!(resident_mib(server) < before + 128, "{name} fills the server");
        if name == "prints" && told.exceptions.is_empty() {
            assert!(told.logs.last().unwrap().contains("more lines were dropped"), "{:?}", told.logs.last());
        }
    }
}

/// Memory of the server's process, in MiB; 0 where the system does not say.
fn resident_mib(server: &Server) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{}/statm", server.pid())).unwrap_or_default();
    statm.split(' ').nth(1).map_or(0, |pages| (pages.parse::<u64>().unwrap() * 4096) >> 20)
}

#[tokio::test]
async fn faulty_mods_do_not_affect_other_runs() {
    faults(free().await).await;
}

#[tokio::test]
async fn faulty_sandboxed_mods_do_not_affect_other_runs() {
    if sandboxed().await {
        faults(kept().await).await;
    }
}

/// Whether this system has a sandbox. Where it has none, that is said.
async fn sandboxed() -> bool {
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
async fn sandbox_denies_access_to_the_system() {
    if !sandboxed().await {
        return;
    }
    let (free, kept) = (free().await, kept().await);
    for name in [
        "forks",
        "spawns",
        "opens_sockets",
        "reads_files",
        "lists_folders",
        "sees_processes",
        "writes_files",
        "makes_folders",
        "signals",
        "grows_memory",
    ] {
        let told = harmless(free, name).await;
        assert!(
            told.logs.len() == 1 && told.logs[0].starts_with("done"),
            "{name}: {:?} {:?}",
            told.logs,
            told.exceptions
        );
        let told = harmless(kept, name).await;
        assert_eq!(told.logs, ["refused PermissionError"], "{name}: {:?}", told.exceptions);
    }
    for name in ["replaces_itself", "lifts_limits", "looks_up_names"] {
        let told = harmless(kept, name).await;
        assert!(
            told.logs.len() == 1 && told.logs[0].starts_with("refused "),
            "{name}: {:?} {:?}",
            told.logs,
            told.exceptions
        );
    }
    let by_number = cfg!(target_arch = "x86_64");
    for name in ["own_memory", "parents_memory", "parents_folder", "parents_limits", "makes_memory"]
        .into_iter()
        .chain(["abstract_socket", "named_socket"])
        .chain(["forces_buffer", "enlarges_buffer", "poisons_memory", "merges_memory"])
        .chain(["traces", "reads_processes", "io_ring", "new_user", "threads_net"].into_iter().filter(|_| by_number))
    {
        let told = harmless(kept, name).await;
        assert_eq!(told.logs, ["refused PermissionError"], "{name}: {:?}", told.exceptions);
    }
    for (name, done) in [("starts_threads", "done None"), ("frees_memory", "done advised")] {
        let told = harmless(kept, name).await;
        assert_eq!(told.logs, [done], "{name} is no harm: {:?}", told.exceptions);
    }
    assert_workers_have_no_capabilities(kept);
}

/// Root's workers included.
fn assert_workers_have_no_capabilities(server: &Server) {
    let parent = format!("PPid:\t{}\n", server.pid());
    let mut workers = 0;
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let read = |name| std::fs::read_to_string(process.path().join(name)).unwrap_or_default();
        let status = read("status");
        if !status.contains(&parent) || !read("cmdline").contains("bootstrap.py") {
            continue;
        }
        workers += 1;
        for line in status.lines().filter(|line| line.starts_with("Cap")) {
            let (set, held) = line.split_once(":\t").unwrap();
            // Without root the limit of what could be gained is not ours to lower, and nothing can be gained.
            if set != "CapBnd" || nix::unistd::geteuid().is_root() {
                assert_eq!(u64::from_str_radix(held, 16).unwrap(), 0, "{line}");
            }
        }
    }
    assert!(workers > 0, "no worker runs");
}

#[tokio::test]
async fn repeatedly_failing_mod_is_disabled_and_reported() {
    let told = harmless(free().await, "always_raises").await;
    let count = told.exceptions.len();
    assert!((5..=15).contains(&count) && told.exceptions.iter().all(|text| text == "ValueError: never"), "{count}");
    let said = "the mod 'always_raises' is switched off for the rest of this run, at step 5: 5 consecutive calls for ForwardPass failed; last failure: ValueError: never";
    assert_eq!(told.logs, [said]);
    assert_eq!(told.answer["timings"]["message"], said, "{}", told.answer);
    let (_, run) =
        free().await.get(&format!("/api/v1/runs/{}", told.answer["thunder"]["run_id"].as_str().unwrap())).await;
    assert_eq!((&run["run"]["message"], &run["run"]["status"]), (&json!(said), &json!("done")));
    assert!(free().await.log().contains(said));
}

#[tokio::test]
async fn hanging_mod_recovers_for_other_runs() {
    let server = free().await;
    let (hanging, good) = tokio::join!(tell(server, "hangs_for_some", 2), tell(server, "hangs_for_some", TOKENS));
    assert!(
        hanging.exceptions.iter().any(|text| text.starts_with("deadline of 5000 ms exceeded")),
        "{:?}",
        hanging.exceptions
    );
    // Its calls wait for the hanging one's deadline, and are answered; what falls into the pause between two lost
    // workers fails at once.
    assert!(good.logs.len() + good.exceptions.len() >= TOKENS && !good.logs.is_empty(), "{:?}", good.exceptions);
}

#[tokio::test]
async fn slow_mod_delays_only_its_own_run() {
    let server = free().await;
    let slow = tell(server, "naps", TOKENS);
    // Three times as many tokens: were the others to wait for the mod, they would be the last.
    let others = async {
        for _ in 0..2 {
            other(server).await;
        }
    };
    tokio::select! {
        biased;
        told = slow => panic!("the slow one was first: {:?}", told.exceptions),
        () = others => {}
    }
}

#[tokio::test]
async fn worker_using_cpu_without_a_call_is_ended() {
    let server = Server::start(&["--mods-dir", FAULTS, "--mod-timeout", "20000"]);
    server.wait_ready().await;
    tell(&server, "computes_between_calls", TOKENS).await;
    for _ in 0..600 {
        if server.log().contains("worker ended: it used ") {
            return;
        }
        sleep(Duration::from_millis(100)).await;
    }
    panic!("it goes on computing:\n{}", server.log());
}

#[tokio::test]
async fn configured_number_of_workers_serves_one_mod() {
    let server = Server::start(&["--mods-dir", FAULTS, "--mod-workers", "3", "--parallel", "4", "--mod-idle", "2"]);
    server.wait_ready().await;
    let ask = |tokens| tell(&server, "who", tokens);
    let told = join_all([ask(200), ask(200), ask(200), ask(200)]).await;
    let mut processes = HashSet::new();
    for run in &told {
        assert_eq!(run.logs.len(), 200, "{:?}", run.exceptions);
        let own: HashSet<&str> = run.logs.iter().map(String::as_str).collect();
        assert_eq!(own.len(), 1, "a run stays with its worker");
        processes.extend(own);
    }
    assert!((2..=3).contains(&processes.len()), "{processes:?}");
    // Nobody needs them any more.
    let pids: Vec<&str> = processes.iter().map(|line| line.split(' ').next().unwrap()).collect();
    for _ in 0..300 {
        if pids.iter().all(|pid| !std::path::Path::new("/proc").join(pid).exists()) {
            break;
        }
        sleep(Duration::from_millis(100)).await;
    }
    assert!(pids.iter().all(|pid| !std::path::Path::new("/proc").join(pid).exists()), "they stay");
    assert_eq!(tell(&server, "who", 4).await.logs.len(), 4, "another one is started");
}

#[tokio::test]
async fn thousand_runs_leak_no_resources() {
    let server = free().await;
    let mut seen = Vec::new();
    for round in 0..10 {
        for _ in 0..25 {
            join_all((0..4).map(|_| async {
                let body = json!({"prompt": "Once", "max_tokens": 2, "ignore_eos": true, "mods": ["remembers"]});
                assert_eq!(server.answer("/v1/completions", &body).await["usage"]["completion_tokens"], 2);
            }))
            .await;
        }
        let told = tell(server, "remembers", 2).await;
        assert_eq!(told.exceptions, Vec::<String>::new());
        let (kept, kib) = told.logs[0].split_once(' ').unwrap();
        assert_eq!(kept, "1", "round {round}: requests that are over are still remembered");
        seen.push((kib.parse::<u64>().unwrap() >> 10, resident_mib(server)));
    }
    let (early, late) = (seen[2], seen[9]);
    assert!(late.0 <= early.0 + 8, "the worker grows: {seen:?}");
    assert!(late.1 <= early.1 + 48, "the server grows: {seen:?}");
}

/// A request with the key that may change mods.
fn as_boss(server: &Server, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
    reqwest::Client::new().request(method, format!("{}{path}", server.base)).bearer_auth("boss")
}

/// A server that takes uploads, and one mod uploaded to it: `faults.py`, `entrypoint` of it.
async fn uploaded(server: &Server, entrypoint: &str) {
    let source = std::fs::read_to_string(std::path::Path::new(FAULTS).join("faults.py")).unwrap();
    let body = json!({"name": entrypoint, "language": "python", "entrypoint": entrypoint, "source": source});
    let answer = as_boss(server, reqwest::Method::POST, "/v1/mods").json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
}

#[tokio::test]
async fn uploaded_mod_is_sandboxed_and_its_run_survives_removal() {
    if !sandboxed().await {
        return;
    }
    let server = Server::start(&["--api-key", "user", "--mod-key", "boss", "--allow-mod-upload"]);
    server.wait_ready().await;
    for name in ["opens_sockets", "reads_files", "writes_files", "forks", "signals"] {
        uploaded(&server, name).await;
        assert_eq!(harmless(&server, name).await.logs, ["refused PermissionError"], "{name}");
    }
    uploaded(&server, "naps").await;
    let slow = tell(&server, "naps", TOKENS);
    let remove = async {
        // The run has begun when its worker has.
        while server.get("/slots").await.1.as_array().unwrap().iter().all(|slot| slot["is_processing"] == false) {
            sleep(Duration::from_millis(10)).await;
        }
        let request = as_boss(&server, reqwest::Method::DELETE, "/v1/mods/naps");
        assert!(request.send().await.unwrap().status().is_success());
    };
    let (told, ()) = tokio::join!(slow, remove);
    assert!(
        exception(&told).starts_with("the mod 'naps' was removed while the run was going on"),
        "{:?}",
        told.exceptions
    );
    let body = json!({"prompt": "Once", "mods": ["naps"]});
    assert_eq!(server.post("/v1/completions", &body).await.0, 400, "nobody can name it any more");
}

#[tokio::test]
async fn uploads_without_a_sandbox_require_a_flag() {
    let body = json!({"name": "calm", "entrypoint": "calm",
        "source": "from thunder_mods import mod\n@mod\ndef calm(event, actions):\n    import socket\n    socket.socket()\n    open('/etc/passwd')\n"});
    let off = ["--api-key", "user", "--mod-key", "boss", "--allow-mod-upload", "--mod-sandbox", "off"];
    let server = Server::start(&off);
    server.wait_ready().await;
    let answer = as_boss(&server, reqwest::Method::POST, "/v1/mods").json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(tell(&server, "calm", 2).await.exceptions, Vec::<String>::new());
    assert!(server.log().contains("run with the rights of the server"), "{}", server.log());
    assert_eq!(server.get("/props").await.1["mod_sandbox"]["policy"], "off");
}
