//! Connections of malicious or careless clients: plain sockets without a client library.

use super::harness::{Server, read_until_closed, websocket_handshake};
use serde_json::json;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Maximum wait for an expected event.
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

fn connect(server: &Server) -> TcpStream {
    let stream = TcpStream::connect(server.base.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(WAIT_TIMEOUT)).unwrap();
    stream
}

#[tokio::test]
async fn time_limit_of_headers_does_not_apply_to_bodies_and_answers() {
    let server = Server::start(&["--header-timeout", "3", "-c", "2048", "-np", "2"]);
    server.wait_ready().await;
    let clients = move || {
        let head = |body: &str| {
            format!(
                "POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
                body.len()
            )
        };
        // A stream that its client does not read yet, and a request whose body is not sent yet.
        let body = json!({"prompt": "Once", "n_predict": 1500, "ignore_eos": true, "stream": true}).to_string();
        let mut stream = connect(&server);
        write!(stream, "{}{body}", head(&body)).unwrap();
        let body = json!({"prompt": "Once", "n_predict": 3, "ignore_eos": true}).to_string();
        let mut waiting = connect(&server);
        write!(waiting, "{}", head(&body)).unwrap();
        // A client that sends nothing, and one that sends its headers slowly. Both are disconnected.
        let silent = connect(&server);
        let mut slow = connect(&server);
        slow.write_all(b"POST /completion HTTP/1.1\r\nHost: localhost\r\n").unwrap();
        let begun = Instant::now();
        // Writing to a connection that the other side has closed fails the second time at the latest.
        while slow.write_all(b"x: y\r\n").is_ok() {
            assert!(begun.elapsed() < WAIT_TIMEOUT, "headers have no time limit");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(read_until_closed(silent), "");
        // The limit does not apply to the connections whose headers were complete.
        waiting.write_all(body.as_bytes()).unwrap();
        let answer = read_until_closed(waiting);
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"tokens_predicted\":3"), "{answer}");
        let answer = read_until_closed(stream);
        assert!(answer.contains("\"stop\":true"), "{}", &answer[answer.len().saturating_sub(300)..]);
    };
    tokio::task::spawn_blocking(clients).await.unwrap();
}

#[tokio::test]
async fn headers_above_their_maximum_size_are_rejected() {
    let server = super::harness::server().await;
    let clients = move || {
        let mut stream = connect(server);
        let head = "GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: ";
        // The maximum, so that the server reads all bytes. A close with unread bytes could discard the answer.
        write!(stream, "{head}{}", "a".repeat((128 << 10) - head.len())).unwrap();
        let answer = read_until_closed(stream);
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
        let mut stream = connect(server);
        write!(
            stream,
            "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Long: {}\r\n\r\n",
            "a".repeat(16_000)
        )
        .unwrap();
        assert!(read_until_closed(stream).starts_with("HTTP/1.1 200"));
    };
    tokio::task::spawn_blocking(clients).await.unwrap();
}

#[tokio::test]
async fn connection_is_reused_and_socket_outlives_header_timeout() {
    let server = Server::start(&["--header-timeout", "3"]);
    server.wait_ready().await;
    let clients = move || {
        let mut reused = connect(&server);
        for _ in 0..3 {
            reused.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
            let mut output = [0; 4096];
            let count = reused.read(&mut output).unwrap();
            assert!(output[..count].starts_with(b"HTTP/1.1 200"));
        }
        let mut socket = connect(&server);
        socket.write_all(websocket_handshake("/generate", "").as_bytes()).unwrap();
        let mut output = [0; 4096];
        let count = socket.read(&mut output).unwrap();
        assert!(output[..count].starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&output[..count]));
        // A connection that was opened later reaches the time limit.
        assert_eq!(read_until_closed(connect(&server)), "");
        // A masked text frame of two bytes, {}; any answer is accepted.
        socket.write_all(&[0x81, 0x82, 0, 0, 0, 0, b'{', b'}']).unwrap();
        assert!(socket.read(&mut output).unwrap() > 0, "the socket was closed");
    };
    tokio::task::spawn_blocking(clients).await.unwrap();
}
