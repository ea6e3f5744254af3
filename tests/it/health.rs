//! The states of a server: loading, ready, stopping.

use super::harness::{Server, assert_no_postgres, folder, model, output_of, server, text, thunder};
use std::os::unix::fs::PermissionsExt;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// Returns a server with an embedded database, for tests that do not change it.
async fn embedded_server() -> &'static Server {
    static SERVER: LazyLock<Server> = LazyLock::new(|| Server::start_embedded(&[]));
    SERVER.wait_ready().await
}

#[tokio::test]
async fn starting_server_responds_with_reason() {
    let server = Server::start_embedded(&[]);
    let begun = Instant::now();
    let mut reasons = Vec::new();
    loop {
        assert!(begun.elapsed() < Duration::from_mins(3), "{}", server.log());
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
    assert_no_postgres(&server.data_dir, &server.log());
}

#[tokio::test]
async fn signal_while_starting_also_ends_postgres() {
    for (signal, stage, code) in [("TERM", "creating the database", 143), ("INT", "starting the database", 130)] {
        let server = Server::start_embedded(&[]);
        let begun = Instant::now();
        while !server.log().contains(stage) {
            assert!(begun.elapsed() < Duration::from_mins(3), "{}", server.log());
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
    let server = embedded_server().await;
    let mut folders = vec![server.data_dir.clone()];
    let mut seen = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            if entry.file_name() == "server.log" {
                // The harness creates this file.
                continue;
            }
            // A temporary file of a run may have been removed in the meantime.
            let Ok(found) = entry.metadata() else { continue };
            let mode = found.permissions().mode() & 0o777;
            assert_eq!(mode & 0o077, 0, "{} has mode {mode:o}", entry.path().display());
            seen += 1;
            if found.is_dir() && entry.file_name() != "postgres" {
                folders.push(entry.path());
            }
        }
    }
    assert!(seen >= 4, "spool, lock, log and database must exist, but only {seen} files were found");
}

#[tokio::test]
async fn every_health_route_responds() {
    let server = server().await;
    for path in ["/health", "/healthz", "/v1/health"] {
        assert_eq!(server.get(path).await.0, 200, "{path}");
    }
}

#[tokio::test]
async fn active_answer_is_completed_within_shutdown_grace() {
    let server = Server::start(&["--shutdown-grace", "120"]);
    server.wait_ready().await;
    let body = serde_json::json!({"prompt": "Once", "max_tokens": 64, "ignore_eos": true, "stream": true});
    let mut stream = server.sse("/v1/completions", &body).await;
    stream.next().await.unwrap();
    let (events, code) = tokio::join!(stream.rest(), server.stop("TERM"));
    assert_eq!(events.last().unwrap().data, "[DONE]");
    assert_eq!(code, Some(0), "{}", server.log());
}

#[tokio::test]
async fn long_answer_is_truncated_without_shutdown_grace() {
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

#[tokio::test]
async fn host_and_port_replace_the_address_of_the_environment() {
    let server = Server::start_with_env(&["--host", "127.0.0.1", "--port", "0"], &[("THUNDER_LISTEN", "127.0.0.2:0")]);
    server.wait_ready().await;
    let addresses = server.addresses();
    assert!(addresses.len() == 1 && addresses[0].starts_with("http://127.0.0.1:"), "{addresses:?}");
}

#[test]
fn address_in_use_error_names_remedy() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = thunder().args(["serve", "--listen", &address, "--data-dir"]).arg(folder()).output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains(&address) && errors.contains("--listen"), "{errors}");
}

#[test]
fn invalid_model_error_names_file() {
    let data_dir = folder();
    let file = data_dir.join("not-a-model.gguf");
    std::fs::write(&file, "hello").unwrap();
    let mut command = thunder();
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(&data_dir).arg("-m").arg(&file);
    let output = command.output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("not-a-model.gguf") && errors.contains("GGUF"), "{errors}");
    // The database was started at the same time. It is complete, and stopped.
    assert_no_postgres(&data_dir, &errors);
    let listed = thunder().args(["db", "status", "--data-dir"]).arg(&data_dir).output().unwrap();
    assert!(listed.status.success(), "{}", text(&listed.stderr));
    assert_no_postgres(&data_dir, &errors);
}

#[test]
fn context_larger_than_memory_ends_start() {
    let mut command = thunder();
    command
        .args(["serve", "-c", "1000000000", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(folder())
        .arg("-m")
        .arg(model());
    let output = command.output().unwrap();
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("KV cache") && errors.contains("smaller --ctx-size"), "{errors}");
}

#[tokio::test]
async fn second_server_on_data_directory_is_rejected() {
    let server = embedded_server().await;
    let mut command = thunder();
    command.args(["serve", "--listen", "127.0.0.1:0", "--data-dir"]).arg(&server.data_dir).arg("-m").arg(model());
    let output = output_of(command).await;
    let errors = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    let expected = format!(
        "the data directory {} is in use by another Thunder (process {}); stop it, or choose another directory with --data-dir",
        server.data_dir.display(),
        server.pid()
    );
    assert!(errors.contains(&expected), "{errors}");
    assert_eq!(server.get("/healthz").await.0, 200);
}
