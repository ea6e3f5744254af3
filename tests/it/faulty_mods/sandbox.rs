//! The sandbox of mods: access that it denies or permits, and uploaded mods, which run in it by default.

use super::{FAULTS, TOKENS, exception, has_sandbox, run_mod, sandboxed_server, unrestricted_server};
use crate::harness::Server;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::time::sleep;

#[tokio::test]
async fn sandbox_denies_access_to_the_system() {
    if !has_sandbox().await {
        return;
    }
    let (unrestricted_server, sandboxed_server) = (unrestricted_server().await, sandboxed_server().await);
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
        let result = run_mod(unrestricted_server, name, TOKENS).await;
        assert!(
            result.logs.len() == 1 && result.logs[0].starts_with("done"),
            "{name}: {:?} {:?}",
            result.logs,
            result.exceptions
        );
        let result = run_mod(sandboxed_server, name, TOKENS).await;
        assert_eq!(result.logs, ["refused PermissionError"], "{name}: {:?}", result.exceptions);
    }
    for name in ["replaces_itself", "lifts_limits", "looks_up_names"] {
        let result = run_mod(sandboxed_server, name, TOKENS).await;
        assert!(
            result.logs.len() == 1 && result.logs[0].starts_with("refused "),
            "{name}: {:?} {:?}",
            result.logs,
            result.exceptions
        );
    }
    let has_system_call_numbers = cfg!(target_arch = "x86_64");
    for name in
        ["appends_to_memory", "own_memory", "parents_memory", "parents_folder", "parents_limits", "makes_memory"]
            .into_iter()
            .chain(["abstract_socket", "named_socket"])
            .chain(["forces_buffer", "enlarges_buffer", "poisons_memory", "merges_memory"])
            .chain(
                ["traces", "reads_processes", "io_ring", "new_user", "threads_net"]
                    .into_iter()
                    .filter(|_| has_system_call_numbers),
            )
    {
        let result = run_mod(sandboxed_server, name, TOKENS).await;
        assert_eq!(result.logs, ["refused PermissionError"], "{name}: {:?}", result.exceptions);
    }
    for (name, done) in
        [("starts_threads", "done None"), ("frees_memory", "done advised"), ("does_not_block", "done set")]
    {
        let result = run_mod(sandboxed_server, name, TOKENS).await;
        assert_eq!(result.logs, [done], "{name} must be permitted: {:?}", result.exceptions);
    }
    let limit = run_mod(sandboxed_server, "reads_thread_limit", TOKENS).await.logs.remove(0);
    let limit: i64 = limit.strip_prefix("done ").unwrap().parse().unwrap();
    assert!((1024..20_000).contains(&limit), "the kernel must limit threads: {limit}");
    assert_workers_have_no_capabilities(sandboxed_server).await;
    assert_sessions_of_workers_have_low_priority(sandboxed_server).await;
}

#[tokio::test]
async fn sandboxed_worker_inherits_no_descriptors() {
    if !has_sandbox().await {
        return;
    }
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    if hard < 4096 {
        return;
    }
    setrlimit(Resource::RLIMIT_NOFILE, soft.max(4096), hard).unwrap();
    // The server inherits this descriptor, like one that a library opens in the server.
    let file = std::fs::File::open("/dev/null").unwrap();
    let inherited = fcntl(&file, FcntlArg::F_DUPFD(2000)).unwrap();
    let server = Server::start(&["--mods-dir", FAULTS, "--mod-sandbox", "all"]);
    nix::unistd::close(inherited).unwrap();
    server.wait_ready().await;
    let has_inherited = Path::new("/proc").join(format!("{}/fd/{inherited}", server.pid())).exists();
    assert!(has_inherited, "the server must have the descriptor");
    let result = run_mod(&server, "inherits", TOKENS).await;
    assert_eq!(result.logs, ["done []"], "{:?}", result.exceptions);
}

/// Asserts that workers have no capabilities, even if the server runs as root. A worker that starts drops them after a moment.
async fn assert_workers_have_no_capabilities(server: &Server) {
    let begun = Instant::now();
    loop {
        let workers = capabilities_of_workers(server);
        if !workers.is_empty() && workers.values().all(Vec::is_empty) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "capabilities of each worker: {workers:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Asserts that a worker gets less processor time than the server, whatever its number of threads. Without root, the kernel
/// limits changes of this priority. A worker that starts lowers it after a moment.
async fn assert_sessions_of_workers_have_low_priority(server: &Server) {
    let session = |folder: &Path| std::fs::read_to_string(folder.join("autogroup")).unwrap_or_default();
    let nice = |text: &str| text.trim_end().rsplit_once("nice ").map(|(_, nice)| nice.parse::<i32>().unwrap());
    let Some(servers) = nice(&session(&Path::new("/proc").join(server.pid().to_string()))) else { return };
    let begun = Instant::now();
    while nix::unistd::geteuid().is_root() {
        let workers: Vec<_> = workers(server).iter().filter_map(|(folder, _)| nice(&session(folder))).collect();
        if !workers.is_empty() && workers.iter().all(|worker| *worker == servers + 5) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{servers} {workers:?}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the folder in `/proc` and the status of each worker.
fn workers(server: &Server) -> Vec<(PathBuf, String)> {
    let parent = format!("PPid:\t{}\n", server.pid());
    let folders = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let read = |folder: &Path, name| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    let with_status = folders.map(|folder| (read(&folder, "status"), folder));
    with_status
        .filter(|(status, folder)| status.contains(&parent) && read(folder, "cmdline").contains("bootstrap.py"))
        .map(|(status, folder)| (folder, status))
        .collect()
}

/// Returns the non-empty sets of capabilities of each worker.
fn capabilities_of_workers(server: &Server) -> HashMap<PathBuf, Vec<String>> {
    let sets = |(folder, status): (PathBuf, String)| {
        let sets = status.lines().filter(|line| {
            // Without root the bounding set cannot be lowered, but no capability can be gained either.
            let is_dropped = !line.starts_with("CapBnd") || nix::unistd::geteuid().is_root();
            line.starts_with("Cap") && is_dropped && !line.ends_with("\t0000000000000000")
        });
        (folder, sets.map(str::to_owned).collect())
    };
    workers(server).into_iter().map(sets).collect()
}

/// Returns a request with the mod key.
fn with_mod_key(server: &Server, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
    crate::harness::http().request(method, format!("{}{path}", server.base)).bearer_auth("boss")
}

/// Uploads the mod `entrypoint` of `faults.py`.
async fn upload(server: &Server, entrypoint: &str) {
    let source = std::fs::read_to_string(std::path::Path::new(FAULTS).join("faults.py")).unwrap();
    let body = json!({"name": entrypoint, "language": "python", "entrypoint": entrypoint, "source": source});
    let answer = with_mod_key(server, reqwest::Method::POST, "/v1/mods").json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
}

#[tokio::test]
async fn uploaded_mod_is_sandboxed_and_its_run_survives_removal() {
    if !has_sandbox().await {
        return;
    }
    let server = Server::start(&["--api-key", "user", "--mod-key", "boss", "--allow-mod-upload"]);
    server.wait_ready().await;
    for name in ["opens_sockets", "reads_files", "writes_files", "forks", "signals"] {
        upload(&server, name).await;
        assert_eq!(run_mod(&server, name, TOKENS).await.logs, ["refused PermissionError"], "{name}");
    }
    upload(&server, "sleeps").await;
    let slow = run_mod(&server, "sleeps", TOKENS);
    let remove = async {
        // The worker of the mod is ready when the run occupies a slot.
        while server.get("/slots").await.1.as_array().unwrap().iter().all(|slot| slot["is_processing"] == false) {
            sleep(Duration::from_millis(10)).await;
        }
        let request = with_mod_key(&server, reqwest::Method::DELETE, "/v1/mods/sleeps");
        assert!(request.send().await.unwrap().status().is_success());
    };
    let (result, ()) = tokio::join!(slow, remove);
    assert!(exception(&result).starts_with("the mod 'sleeps' was removed during the run"), "{:?}", result.exceptions);
    let body = json!({"prompt": "Once", "mods": ["sleeps"]});
    assert_eq!(server.post("/v1/completions", &body).await.0, 400, "the removed mod is unknown");
}

#[tokio::test]
async fn uploaded_mod_cannot_forge_log_entries_or_send_large_messages() {
    if !has_sandbox().await {
        return;
    }
    let server = Server::start(&["--api-key", "user", "--mod-key", "boss", "--allow-mod-upload"]);
    server.wait_ready().await;
    let upload = async |source: &str| {
        let body = json!({"name": "forges", "source": source});
        let answer = with_mod_key(&server, reqwest::Method::POST, "/v1/mods").json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let mod_with = |statement: &str| {
        format!("from thunder_mods import mod\n{statement}\n@mod\ndef forges(event, actions):\n    ...\n")
    };
    assert_eq!(upload(&mod_with(r#"print("first line\nERROR forged")"#)).await.0, 200);
    server.wait_for_log(r#"log line during import: "first line\nERROR forged""#).await;
    let (status, text) = upload(&mod_with(
        r#"forged = "x" * (2 << 20)
import gc
channel = next(found for found in gc.get_objects() if type(found).__name__ == "Channel")
channel.send({"kind": "loaded", "handlers": [], "padding": forged})"#,
    ))
    .await;
    assert!(status == 400 && text.contains("the maximum is 1048576"), "{text}");
    let (status, text) = upload("raise ValueError('x' * 100_000)").await;
    assert!(status == 400 && text.len() < 200_000, "{} bytes", text.len());
    let (status, text) = upload(
        r#"import gc
channel = next(found for found in gc.get_objects() if type(found).__name__ == "Channel")
channel.send({"kind": "failed", "message": "x" * 100_000, "traceback": None})"#,
    )
    .await;
    assert!(status == 400 && text.len() < 20_000, "{} bytes", text.len());
}

#[tokio::test]
async fn uploads_without_a_sandbox_require_a_flag() {
    let body = json!({"name": "calm", "entrypoint": "calm",
        "source": "from thunder_mods import mod\n@mod\ndef calm(event, actions):\n    import socket\n    socket.socket()\n    open('/etc/passwd')\n"});
    let flags = ["--api-key", "user", "--mod-key", "boss", "--allow-mod-upload", "--mod-sandbox", "off"];
    let server = Server::start(&flags);
    server.wait_ready().await;
    let answer = with_mod_key(&server, reqwest::Method::POST, "/v1/mods").json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(run_mod(&server, "calm", 2).await.exceptions, Vec::<String>::new());
    server.wait_for_log("run with the rights of the server").await;
    assert_eq!(server.get("/props").await.1["mod_sandbox"]["policy"], "off");
}
