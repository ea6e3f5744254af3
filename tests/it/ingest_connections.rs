//! Connections of `POST /ingest`: clients that wait, stall or disconnect.

use super::harness::postgres::wait_for_psql;
use super::harness::{Server, server};
use reqwest::Method;
use serde_json::Value;
use sqlx::{Connection, PgConnection};
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Size of a large body.
const LARGE_BYTES: usize = 2 << 20;

/// Returns the example of the specification with another id.
fn sample(request_id: &str) -> String {
    let mut payload: Value = serde_json::from_slice(include_bytes!("../../fixtures/sample_payload.json")).unwrap();
    payload["request"]["request_id"] = request_id.into();
    payload.to_string()
}

/// Connects and sends the header of a request.
fn send_head(server: &Server, length: usize, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(server.base.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
    let head = format!(
        "POST /ingest HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n{headers}connection: close\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream
}

/// Connects and sends the header of a request whose body the server must request.
fn send_head_expecting(server: &Server, length: usize) -> TcpStream {
    send_head(server, length, "expect: 100-continue\r\n")
}

/// Returns the first line of the answer to `Expect`.
fn continue_line(stream: &mut TcpStream) -> std::io::Result<String> {
    let mut answer = [0; 25];
    stream.read_exact(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).lines().next().unwrap().to_owned())
}

/// Sends the body and returns the first line of the response.
fn send_body(stream: &mut TcpStream, body: &str) -> String {
    stream.write_all(body.as_bytes()).unwrap();
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    rest.lines().next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn expect_continue_is_answered() {
    let server = server().await;
    let mut too_large = send_head_expecting(server, 70 << 20);
    assert!(continue_line(&mut too_large).unwrap().starts_with("HTTP/1.1 413"));
    let body = sample("expect");
    let mut stream = send_head_expecting(server, body.len());
    assert_eq!(continue_line(&mut stream).unwrap(), "HTTP/1.1 100 Continue");
    assert_eq!(send_body(&mut stream, &body), "HTTP/1.1 201 Created");
}

/// The memory for large bodies is limited. Clients that stall do not delay small documents.
#[tokio::test(flavor = "multi_thread")]
async fn fifth_large_body_is_not_read_before_another_one_ends() {
    let server = Server::start(&[]);
    server.wait_ready().await;
    let mut stalled: Vec<TcpStream> = (0..4).map(|_| send_head_expecting(&server, LARGE_BYTES)).collect();
    for stream in &mut stalled {
        assert_eq!(continue_line(stream).unwrap(), "HTTP/1.1 100 Continue");
    }
    let mut waiting = send_head_expecting(&server, LARGE_BYTES);
    let small = sample("small");
    assert_eq!(send_body(&mut send_head(&server, small.len(), ""), &small), "HTTP/1.1 201 Created");
    waiting.set_nonblocking(true).unwrap();
    let early = waiting.peek(&mut [0]);
    assert_eq!(early.unwrap_err().kind(), ErrorKind::WouldBlock, "the server must not read the fifth body");
    waiting.set_nonblocking(false).unwrap();
    stalled.pop();
    assert_eq!(continue_line(&mut waiting).unwrap(), "HTTP/1.1 100 Continue");
    let mut large = sample("large");
    large.extend(std::iter::repeat_n(' ', LARGE_BYTES - large.len()));
    assert_eq!(send_body(&mut waiting, &large), "HTTP/1.1 201 Created");
}

/// Waits until the server has counted a request whose client disconnected before the response.
async fn wait_for_disconnection(server: &Server) {
    let begun = Instant::now();
    loop {
        let metrics = server.request(Method::GET, "/metrics").send().await.unwrap().text().await.unwrap();
        if metrics.contains("thunder_http_requests_total{route=\"/ingest\",method=\"POST\",status=\"499\"} 1") {
            return;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{metrics}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn document_of_disconnected_client_is_stored() {
    let server = Server::start(&[]);
    server.wait_ready().await;
    let url = server.database_url();
    let mut blocker = PgConnection::connect(&url).await.unwrap();
    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("lock table events in access exclusive mode").execute(&mut *lock).await.unwrap();
    let body = sample("disconnected");
    let mut stream = send_head(&server, body.len(), "");
    stream.write_all(body.as_bytes()).unwrap();
    let is_waiting = "select count(*) > 0 from pg_locks where relation = 'events'::regclass and not granted";
    wait_for_psql(&url, is_waiting, "t").await;
    drop(stream);
    wait_for_disconnection(&server).await;
    lock.rollback().await.unwrap();
    assert_eq!(server.finished("disconnected").await["run"]["request_id"], "disconnected");
}
