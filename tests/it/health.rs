//! The life of a server: loading, ready, stopping.

use super::harness::{Server, assert_no_postgres, can_receive, folder, model, server, thunder};
use std::os::unix::fs::PermissionsExt;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A server with an embedded database, for tests that do not change it.
async fn embedded() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start_embedded(&[]));
    SERVER.wait_ready().await
}

#[tokio::test]
async fn a_server_answers_at_once_and_says_what_it_waits_for() {
    let server = Server::start_embedded(&[]);
    let begun = Instant::now();
    let mut reasons = Vec::new();
    loop {
        assert!(begun.elapsed() < Duration::from_mins(1), "{}", server.log());
        let Ok(response) = server.request(reqwest::Method::GET, "/health").send().await else {
            tokio::time::sleep(Duration::from_millis(2)).await;
            continue;
        };
        let status = response.status().as_u16();
        let health: serde_json::Value = response.json().await.unwrap();
        assert_eq!(health["server"], "thunder");
        if status == 200 {
            assert_eq!(health["status"], "ok");
            break;
        }
        assert_eq!((status, health["status"].as_str()), (503, Some("loading")));
        reasons.push(health["reason"].as_str().unwrap().to_owned());
        let (status, error) = server.post("/v1/chat/completions", &serde_json::json!({})).await;
        if status == 503 {
            assert_eq!(error["error"]["type"], "unavailable_error");
        }
    }
    assert!(!reasons.is_empty(), "the server was never seen loading");
    assert_eq!(server.stop("TERM").await, Some(0), "{}", server.log());
    let leftover = std::fs::read_dir(&server.data_dir).unwrap().flatten().map(|entry| entry.path());
    for path in leftover.filter(|path| path.is_dir()) {
        assert!(!path.join("postmaster.pid").exists(), "PostgreSQL was left behind in {}", path.display());
    }
}

#[tokio::test]
async fn signal_while_starting_leaves_no_postgres_behind() {
    for (signal, stage, code) in [
        ("TERM", "creating the database", 143),
        ("INT", "starting the database", 130),
        ("HUP", "allocating the context", 129),
    ]
    .into_iter()
    .filter(|(signal, ..)| can_receive(signal))
    {
        let server = Server::start_embedded(&[]);
        let begun = Instant::now();
        while !server.log().contains(stage) {
            assert!(begun.elapsed() < Duration::from_mins(2), "{}", server.log());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let ended = server.stop(signal).await;
        // It may have been ready already.
        assert!(ended == Some(code) || ended == Some(0), "{signal}: {ended:?}, {}", server.log());
        assert_no_postgres(&server.data_dir, &server.log());
    }
}

#[tokio::test]
async fn data_directory_is_readable_by_its_owner_only() {
    let server = embedded().await;
    let mut folders = vec![server.data_dir.clone()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            // The first is the tests' own, and files of runs come and go.
            let Ok(found) = entry.metadata() else { continue };
            if entry.file_name() == "server.log" {
                continue;
            }
            let mode = found.permissions().mode() & 0o777;
            assert_eq!(mode & 0o077, 0, "{} has mode {mode:o}", entry.path().display());
            seen += 1;
            if found.is_dir() && entry.file_name() != "postgres" {
                folders.push(entry.path());
            }
        }
    }
    assert!(seen >= 4, "spool, lock, log and database are there");
}

#[tokio::test]
async fn every_health_address_is_the_same() {
    let server = server().await;
    for path in ["/health", "/healthz", "/v1/health"] {
        assert_eq!(server.get(path).await.0, 200, "{path}");
    }
}

#[tokio::test]
async fn a_running_answer_is_finished_before_the_server_stops() {
    let server = Server::start(&["--shutdown-grace", "30"]);
    server.wait_ready().await;
    let body = serde_json::json!({"prompt": "Once", "max_tokens": 64, "ignore_eos": true, "stream": true});
    let mut stream = server.sse("/v1/completions", &body).await;
    stream.next().await.unwrap();
    let (events, code) = tokio::join!(stream.rest(), server.stop("TERM"));
    assert_eq!(events.last().unwrap().data, "[DONE]");
    assert_eq!(code, Some(0), "{}", server.log());
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_cut_off() {
    let server = Server::start(&["--shutdown-grace", "0"]);
    server.wait_ready().await;
    let body = serde_json::json!({"prompt": "Once", "max_tokens": 4000, "ignore_eos": true, "stream": true});
    let mut stream = server.sse("/v1/completions", &body).await;
    stream.next().await.unwrap();
    let (events, code) = tokio::join!(stream.rest(), server.stop("INT"));
    let last = &events.last().unwrap().data;
    assert!(last == "[DONE]" || last.contains("stopping"), "{last}");
    assert_eq!(code, Some(0), "{}", server.log());
}

#[test]
fn an_address_in_use_is_an_error_with_a_way_out() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = thunder().args(["serve", "--listen", &address, "--data-dir"]).arg(folder()).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains(&address) && said.contains("--listen"), "{said}");
}

#[test]
fn what_is_not_a_model_is_an_error_that_names_the_file() {
    let data_dir = folder();
    let file = data_dir.join("not-a-model.gguf");
    std::fs::write(&file, "hello").unwrap();
    let mut command = thunder();
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(&data_dir).arg("-m").arg(&file);
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("not-a-model.gguf") && said.contains("GGUF"), "{said}");
}

#[test]
fn context_larger_than_the_machine_is_refused_at_once() {
    let mut command = thunder();
    command
        .args(["serve", "-c", "1000000000", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(folder())
        .arg("-m")
        .arg(model());
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("KV cache") && said.contains("smaller --ctx-size"), "{said}");
}

#[tokio::test]
async fn two_servers_on_one_folder_are_refused() {
    let server = embedded().await;
    let mut command = thunder();
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(&server.data_dir).arg("-m").arg(model());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(said.contains("in use"), "{said}");
    assert_eq!(server.get("/healthz").await.0, 200);
}
