//! TLS on the server's port: TLS clients, plain clients, and requirements of the files.

use super::harness::{
    ErrorTable, Server, certificate, client, client_tls, folder, output_of, read_until_closed, text, thunder,
    websocket_handshake,
};
use reqwest::Method;
use serde_json::json;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConnection, StreamOwned};

/// Maximum wait for an expected event.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);
const KEY: &str = "correct-horse-battery";

async fn start(flags: &[&str]) -> Server {
    let (chain, key) = (certificate("server.pem"), certificate("server.key"));
    let server = Server::start(&[&["--ssl-cert-file", &chain, "--ssl-key-file", &key], flags].concat());
    server.wait_ready().await;
    server
}

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.base.strip_prefix("https://").unwrap()).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    stream
}

/// Returns a TLS connection that offers these application protocols; it makes its handshake at the first use.
pub fn tls_connection(server: &Server, protocols: &[&str]) -> StreamOwned<ClientConnection, TcpStream> {
    let mut config = client_tls();
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    let name = ServerName::try_from("localhost").unwrap();
    StreamOwned::new(ClientConnection::new(Arc::new(config), name).unwrap(), connect(server))
}

#[tokio::test]
async fn everything_is_served_over_https() {
    let server = start(&["--api-key", KEY]).await;
    server.wait_for_log(&format!("are on {}", server.base)).await;
    let answer = server.answer("/completion", &json!({"prompt": "Once", "n_predict": 4, "ignore_eos": true})).await;
    assert_eq!(answer["tokens_predicted"], 4);
    let body = json!({"prompt": "Once", "max_tokens": 50, "ignore_eos": true, "stream": true});
    let events = server.stream("/v1/completions", &body).await;
    assert!(events.len() > 10 && events.last().unwrap() == "[DONE]", "{events:?}");

    // The login cookie is never sent over plain http, and a page from plain http has another origin.
    let browser = client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let login = |origin: String| {
        let form = browser.post(format!("{}/login", server.base)).header("origin", origin);
        form.header("content-type", "application/x-www-form-urlencoded").body(format!("key={KEY}")).send()
    };
    let response = login(server.base.clone()).await.unwrap();
    let cookie = response.headers()["set-cookie"].to_str().unwrap();
    assert!(cookie.contains("Secure") && cookie.contains("HttpOnly"), "{cookie}");
    assert_eq!(login(server.base.replace("https", "http")).await.unwrap().status().as_u16(), 403);
    let page = server.request(Method::GET, "/playground").send().await.unwrap().text().await.unwrap();
    assert!(page.contains(&format!("curl {}/v1/chat", server.base)), "the page names another address");

    let clients = move || {
        let mut socket = tls_connection(&server, &["h2", "http/1.1"]);
        let handshake = websocket_handshake("/generate", &format!("Authorization: Bearer {KEY}\r\n"));
        socket.write_all(handshake.as_bytes()).unwrap();
        let mut received = [0; 4096];
        let count = socket.read(&mut received).unwrap();
        assert!(received[..count].starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&received[..count]));
        assert_eq!(socket.conn.alpn_protocol(), Some(&b"http/1.1"[..]));
        // A masked text frame of two bytes, {}; any answer is accepted.
        socket.write_all(&[0x81, 0x82, 0, 0, 0, 0, b'{', b'}']).unwrap();
        assert!(socket.read(&mut received).unwrap() > 0, "the socket was closed");
        server
    };
    let server = tokio::task::spawn_blocking(clients).await.unwrap();
    assert_eq!(server.stop("TERM").await, Some(0), "{}", server.log());
}

#[tokio::test]
async fn doctor_checks_the_running_server() {
    let server = start(&["--api-prefix", "/llm"]).await;
    let (host, _) = server.base.strip_prefix("https://").unwrap().split_once('/').unwrap();
    let doctor = |listen: &str, prefix: &str| {
        let mut command = thunder();
        command.args(["doctor", "--running"]).env("THUNDER_LISTEN", listen).env("THUNDER_API_PREFIX", prefix);
        command.args(["--ssl-cert-file", &certificate("server.pem"), "--ssl-key-file", &certificate("server.key")]);
        command.arg("--data-dir").arg(folder());
        output_of(command)
    };
    let any = host.replace("127.0.0.1", "0.0.0.0");
    for (listen, prefix, expected) in [
        (host, "/llm", format!("ok       server         {} is healthy\n", server.base)),
        (host, "/other", format!("FAILED   server         https://{host}/other is not healthy: no route exists")),
        ("127.0.0.1:1", "/llm", "Connection refused".to_owned()),
    ] {
        let output = doctor(listen, prefix).await;
        let report = text(&output.stdout);
        assert!(output.status.success() == report.starts_with("ok") && report.contains(&expected), "{report}");
    }
    // All addresses include the loopback address.
    let mut command = thunder();
    command.args(["doctor", "--running", "--listen", &any, "--api-prefix", "/llm"]);
    let output = output_of(command).await;
    assert!(text(&output.stdout).contains(&format!("http://{host}/llm")), "{}", text(&output.stdout));
}

#[tokio::test]
async fn plain_client_does_not_affect_tls_listener() {
    let server = start(&["--header-timeout", "4"]).await;
    let clients = move || {
        // Each client stays connected while the others connect.
        let silent = connect(&server);
        let mut halfway = connect(&server);
        halfway.write_all(&[22, 3, 1, 2, 0, 1]).unwrap();
        let mut other = connect(&server);
        other.write_all(b"\0\0\0 something else").unwrap();
        let mut plain = connect(&server);
        let body = json!({"prompt": "Once", "n_predict": 1}).to_string();
        let head = "POST /completion HTTP/1.1\r\nHost: localhost\r\nContent-Length";
        write!(plain, "{head}: {}\r\n\r\n{body}", body.len()).unwrap();
        let response = read_until_closed(plain);
        assert!(response.starts_with("HTTP/1.1 400") && response.contains("https://"), "{response}");
        let mut good = tls_connection(&server, &[]);
        good.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
        let answer = read_until_closed(good);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(read_until_closed(silent), "");
        read_until_closed(halfway);
        read_until_closed(other);
        // After the handshake the same time limit applies to headers.
        let mut idle = tls_connection(&server, &[]);
        idle.conn.complete_io(&mut idle.sock).unwrap();
        let ended = idle.read(&mut [0; 64]).map_err(|error| error.kind());
        assert!(matches!(ended, Ok(0) | Err(ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset)), "{ended:?}");
        server
    };
    let server = tokio::task::spawn_blocking(clients).await.unwrap();
    assert_eq!(server.get("/health").await.0, 200);
    let pending = connect(&server);
    assert_eq!(server.stop("TERM").await, Some(0), "{}", server.log());
    drop(pending);
}

#[test]
fn invalid_certificate_files_end_start() {
    let folder = folder();
    let none = folder.join("none.pem").display().to_string();
    let broken = folder.join("broken.pem").display().to_string();
    std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\nnot base64!\n-----END CERTIFICATE-----\n").unwrap();
    let [chain, authority, key, encrypted] =
        ["server.pem", "authority.pem", "server.key", "encrypted.key"].map(certificate);
    let pair =
        |chain: &str, key: &str| vec!["--ssl-cert-file".into(), chain.to_owned(), "--ssl-key-file".into(), key.into()];
    let mut errors = ErrorTable::default();
    for flags in [
        pair(&chain, &key)[..2].to_vec(),
        pair(&chain, &key)[2..].to_vec(),
        pair(&none, &key),
        pair(&chain, &none),
        pair(&key, &key),
        pair(&chain, &chain),
        pair(&broken, &key),
        pair(&chain, &encrypted),
        pair(&authority, &key),
    ] {
        let output = thunder().args(["serve", "--port", "0", "--data-dir"]).arg(&folder).args(&flags).output().unwrap();
        let printed = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{flags:?}: {printed}");
        errors.add_text(flags.join(" "), &printed);
    }
    insta::assert_snapshot!("certificate_errors", errors);
}

#[tokio::test]
async fn command_line_client_connects_over_https() {
    let server = start(&[]).await;
    let localhost = server.base.replace("127.0.0.1", "localhost");
    let run = |base: String, trusted: Option<&str>| {
        let mut command = thunder();
        command.args(["run", "Once", "--max-tokens", "3", "--server", &base]);
        command.args(trusted.iter().flat_map(|name| ["--server-ca".to_owned(), certificate(name)]));
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    for (base, trusted) in [(&server.base, "authority.pem"), (&localhost, "server.pem")] {
        let (code, printed) = run(base.clone(), Some(trusted));
        assert_eq!(code, Some(0), "{trusted}: {printed}");
        assert!(printed.contains(&format!("{base}/runs/")), "{printed}");
    }
    for (trusted, word) in [(None, "--server-ca FILE"), (Some("server.key"), "contains no certificate")] {
        let (code, printed) = run(server.base.clone(), trusted);
        assert_eq!(code, Some(1), "{trusted:?}: {printed}");
        assert!(printed.contains(word), "{trusted:?}: {printed}");
    }
    let (code, printed) = run(server.base.replace("https", "http"), None);
    assert!(code == Some(1) && printed.contains("https"), "{printed}");
}

#[tokio::test]
async fn llama_server_variables_set_certificate_files() {
    let (chain, key) = (certificate("server.pem"), certificate("server.key"));
    let env = [("LLAMA_ARG_SSL_CERT_FILE", chain.as_str()), ("LLAMA_ARG_SSL_KEY_FILE", key.as_str())];
    let server = Server::start_with_env(&[], &env);
    assert!(server.base.starts_with("https://"), "{}", server.base);
    let health = client().build().unwrap().get(format!("{}/healthz", server.base)).send().await.unwrap();
    assert!(health.text().await.unwrap().contains("thunder"));
}
