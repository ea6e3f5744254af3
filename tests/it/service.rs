//! The server as a service: states reported to systemd, reload by SIGHUP, the example unit.

use super::harness::{Server, can_receive, certificate, folder};
use super::tls::tls_connection;
use reqwest::Method;
use serde_json::json;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Maximum wait for an expected event.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

fn send_hangup(server: &Server) {
    let sent = Command::new("kill").args(["-s", "HUP", &server.pid().to_string()]).status().unwrap();
    assert!(sent.success());
}

async fn wait_until<F: Future<Output = bool>>(server: &Server, mut condition: impl FnMut() -> F) {
    let begun = Instant::now();
    while !condition().await {
        assert!(begun.elapsed() < WAIT_TIMEOUT, "the condition is not met:\n{}", server.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Returns the status of a request with a key.
async fn status(server: &Server, key: &str) -> u16 {
    let request = server.request(Method::GET, "/api/v1/runs?limit=1").bearer_auth(key);
    request.send().await.unwrap().status().as_u16()
}

#[tokio::test]
async fn hangup_reloads_api_keys_without_ending_streams() {
    if !can_receive("HUP") {
        return;
    }
    let keys = folder().join("keys");
    std::fs::write(&keys, "first-key name=a\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_ready().await;
    assert_eq!((status(&server, "first-key").await, status(&server, "second-key").await), (200, 401));

    let body = json!({"prompt": "Once", "n_predict": 400, "ignore_eos": true, "stream": true});
    let request = server.request(Method::POST, "/completion").bearer_auth("first-key").json(&body);
    let mut stream = request.send().await.unwrap();
    assert_eq!(stream.status().as_u16(), 200);
    let mut text = String::from_utf8(stream.chunk().await.unwrap().unwrap().to_vec()).unwrap();
    std::fs::write(&keys, "second-key name=a\n").unwrap();
    send_hangup(&server);
    wait_until(&server, || async { status(&server, "second-key").await == 200 }).await;
    assert_eq!(status(&server, "first-key").await, 401);
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.contains("\"stop\":true") && text.contains("\"tokens_predicted\":400"), "{text}");

    // An invalid file does not change the keys.
    std::fs::write(&keys, "third-key unknown-word\n").unwrap();
    send_hangup(&server);
    wait_until(&server, || async { server.log().contains("cannot reload") }).await;
    assert!(server.log().contains("unknown-word"), "{}", server.log());
    assert_eq!((status(&server, "second-key").await, status(&server, "third-key").await), (200, 401));
}

#[tokio::test]
async fn reload_without_api_keys_keeps_previous_ones() {
    if !can_receive("HUP") {
        return;
    }
    let keys = folder().join("keys");
    std::fs::write(&keys, "first-key name=a\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_ready().await;
    std::fs::write(&keys, "trace-key ingest\n").unwrap();
    send_hangup(&server);
    wait_until(&server, || async { server.log().contains("contains no API key") }).await;
    assert!(server.log().contains("the previous ones stay valid"), "{}", server.log());
    assert_eq!((status(&server, "first-key").await, status(&server, "trace-key").await), (200, 401));
    let without_key = server.request(Method::GET, "/api/v1/runs?limit=1").send().await.unwrap();
    assert_eq!(without_key.status(), 401);

    // The next valid file applies.
    std::fs::write(&keys, "second-key name=a\ntrace-key ingest\n").unwrap();
    send_hangup(&server);
    wait_until(&server, || async { status(&server, "second-key").await == 200 }).await;
    assert_eq!(status(&server, "first-key").await, 401);
}

#[tokio::test]
async fn hangup_during_the_start_reloads_api_keys() {
    if !can_receive("HUP") {
        return;
    }
    let keys = folder().join("keys");
    std::fs::write(&keys, "first-key name=a\n").unwrap();
    let server = Server::start_embedded(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_for_log("creating the database").await;
    std::fs::write(&keys, "second-key name=a\n").unwrap();
    send_hangup(&server);
    wait_until(&server, || async { status(&server, "first-key").await == 401 }).await;
    server.wait_ready().await;
    assert_eq!((status(&server, "second-key").await, status(&server, "first-key").await), (200, 401));
}

#[tokio::test]
async fn hangup_reopens_the_log_file() {
    if !can_receive("HUP") {
        return;
    }
    let folder = folder();
    let (log, rotated) = (folder.join("thunder.log"), folder.join("thunder.log.1"));
    let server = Server::start(&["--log-file", log.to_str().unwrap()]);
    server.wait_ready().await;
    std::fs::rename(&log, &rotated).unwrap();
    send_hangup(&server);
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    wait_until(&server, || async { read(&log).contains("log file reopened") }).await;
    assert!(read(&rotated).contains("ready, dashboard and APIs are on"), "{}", read(&rotated));

    // A file that cannot be opened does not replace the previous one. A FIFO without a reader does not block the server.
    std::fs::rename(&log, &rotated).unwrap();
    for create in ["mkdir", "mkfifo"] {
        assert!(std::process::Command::new(create).arg(&log).status().unwrap().success());
        let failures = || read(&rotated).matches("the log continues in the previous file").count();
        let earlier = failures();
        send_hangup(&server);
        wait_until(&server, || async { failures() > earlier }).await;
        if log.is_dir() {
            std::fs::remove_dir(&log).unwrap();
        }
    }
    assert_eq!(server.stop("TERM").await, Some(0));
}

#[tokio::test]
async fn hangup_reloads_the_certificate() {
    if !can_receive("HUP") {
        return;
    }
    let files = folder();
    let (chain, key) = (files.join("chain.pem"), files.join("key.pem"));
    std::fs::copy(certificate("server.pem"), &chain).unwrap();
    std::fs::copy(certificate("server.key"), &key).unwrap();
    let server = Server::start(&["--ssl-cert-file", chain.to_str().unwrap(), "--ssl-key-file", key.to_str().unwrap()]);
    server.wait_ready().await;
    // The chain has one certificate, then two.
    let served_certificates = || {
        let mut stream = tls_connection(&server, &[]);
        while stream.conn.is_handshaking() {
            stream.conn.complete_io(&mut stream.sock).unwrap();
        }
        stream.conn.peer_certificates().unwrap().len()
    };
    assert_eq!(served_certificates(), 1);
    let both = ["server.pem", "authority.pem"].map(|name| std::fs::read_to_string(certificate(name)).unwrap());
    std::fs::write(&chain, both.concat()).unwrap();
    send_hangup(&server);
    wait_until(&server, || async { served_certificates() == 2 }).await;
}

#[tokio::test]
async fn states_are_reported_to_systemd() {
    let path = folder().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    socket.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    let server = Server::start_with_env(&[], &[("NOTIFY_SOCKET", path.to_str().unwrap())]);
    let receive = || {
        let mut buffer = [0; 256];
        let length = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..length].to_vec()).unwrap()
    };
    assert_eq!(receive().trim(), "READY=1");
    let (status, _) = server.get("/healthz").await;
    assert_eq!(status, 200);
    server.stop("TERM").await;
    assert_eq!(receive().trim(), "STOPPING=1");
}

#[test]
fn example_unit_is_valid() {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/examples/thunder.service");
    let text = std::fs::read_to_string(unit).unwrap();
    let program = "/usr/local/bin/thunder";
    assert!(text.contains(program));
    let copy = folder().join("thunder.service");
    std::fs::write(&copy, text.replace(program, env!("CARGO_BIN_EXE_thunder"))).unwrap();
    let Ok(checked) = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&copy).output() else {
        eprintln!("systemd-analyze is not installed: the example unit is not checked");
        return;
    };
    let message = String::from_utf8_lossy(&checked.stderr);
    assert!(checked.status.success() && message.trim().is_empty(), "{message}");
}
