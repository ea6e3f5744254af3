//! Invalid messages and frames, lost connections, and clients that do not read.

use super::client::Next;
use super::{Client, endless};
use crate::harness::{ErrorTable, Server, server, websocket_handshake};
use futures::SinkExt;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use yawc::Frame;

/// Reads until the connection closes, and returns the close code.
async fn close_code(client: &mut Client) -> Option<u16> {
    loop {
        if let Next::Closed(code) = client.next().await {
            return code;
        }
    }
}

#[tokio::test]
async fn invalid_first_message_is_explained_and_closes_connection() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for first in [
        "{\"type\":\"control\",\"action\":\"stop\"}",
        "{\"type\":\"hello\"}",
        "{\"prompt\":\"x\"}",
        "not JSON",
        "[1,2]",
        "\"config\"",
    ] {
        let mut client = Client::connect(server).await;
        client.send_text(first.to_owned()).await;
        let error = client.message().await;
        assert_eq!((&error["error"], &error["recoverable"]), (&json!("invalid_request"), &json!(false)));
        errors.add_message(first, &error);
        assert_eq!(close_code(&mut client).await, Some(1008), "{first}");
    }
    insta::assert_snapshot!("first_message_errors", errors);
}

#[tokio::test]
async fn invalid_messages_are_explained_and_connection_stays_open() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})).await;
    let mut errors = ErrorTable::default();
    for message in [
        json!({"type": "config"}),
        json!({"type": "config", "prompt": 5}),
        json!({"type": "config", "prompt": ""}),
        json!({"type": "config", "prompt": [1, 99999]}),
        json!({"type": "config", "prompt": [-1]}),
        json!({"type": "config", "prompt": "x", "parameters": []}),
        json!({"type": "config", "prompt": "x", "parameters": {"max_tokens": "many"}}),
        json!({"type": "config", "prompt": "x", "parameters": {"max_tokens": 0}}),
        json!({"type": "config", "prompt": "x", "parameters": {"temperature": -1}}),
        json!({"type": "config", "prompt": "x", "parameters": {"top_p": 1.5}}),
        json!({"type": "config", "prompt": "x", "parameters": {"repetition_penalty": 0}}),
        json!({"type": "config", "prompt": "x", "parameters": {"stop": [1]}}),
        json!({"type": "config", "prompt": "x", "parameters": {"banned_tokens": [640]}}),
        json!({"type": "config", "prompt": "x", "parameters": {"logit_bias": {"9999": 1}}}),
        json!({"type": "config", "prompt": "x", "options": {"stream": "yes"}}),
        json!({"type": "config", "prompt": "x", "model": "tiny/nobody"}),
        json!({"type": "config", "prompt": "x", "mods": ["nobody"]}),
        json!({"type": "config", "prompt": "x", "request_id": ""}),
        json!({"type": "control"}),
        json!({"type": "control", "action": "explode"}),
        json!({"type": "control", "action": "stop", "request_id": "nobody"}),
        json!({"type": "control", "action": "stop", "request_id": 7}),
        json!({"type": "nonsense"}),
        json!({"type": 5}),
        json!({"no": "type"}),
        json!({"type": "resume"}),
        json!({"type": "resume", "request_id": "x", "after": -1}),
    ] {
        client.send(&message).await;
        let error = client.message().await;
        assert_eq!(error["type"], "error", "{message}");
        assert_ne!(error["error"], "internal_error", "{message}");
        errors.add_message(message, &error);
    }
    client.socket.send(Frame::binary(&b"\x00\x01"[..])).await.unwrap();
    errors.add_message("a binary frame", &client.message().await);
    client.send_text("[".repeat(100_000)).await;
    errors.add_message("100,000 brackets", &client.message().await);
    let long = json!({"type": "config", "prompt": "word ".repeat(9000)});
    client.send(&long).await;
    let error = client.message().await;
    assert_eq!(
        (&error["error"], &error["recovery_action"]),
        (&json!("context_length_exceeded"), &json!("reduce_prompt"))
    );
    assert!(error["n_prompt_tokens"].as_u64() > error["n_ctx"].as_u64());
    let all: Vec<u32> = (0..640).collect();
    let banned = json!({"type": "config", "prompt": "x", "parameters": {"banned_tokens": all}});
    let error = client.run(&banned).await.pop().unwrap();
    errors.add_message("a ban of all tokens", &error);
    insta::assert_snapshot!("message_errors", errors);
    let last = client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})).await;
    assert_eq!(last.last().unwrap()["type"], "completion");
}

#[tokio::test]
async fn error_has_request_id_of_its_message() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    client.send(&json!({"type": "hello", "request_id": "h-1"})).await;
    assert_eq!(client.message().await["request_id"], "h-1");
    let mut client = Client::connect(server).await;
    client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})).await;
    for message in [
        json!({"type": "config", "prompt": "x", "parameters": [], "request_id": "c-1"}),
        json!({"type": "config", "prompt": "x", "options": {"stream": "yes"}, "request_id": "c-2"}),
        json!({"type": "control", "action": "stop", "request_id": "c-3"}),
        json!({"type": "resume", "after": -1, "request_id": "r-1"}),
        json!({"type": "nonsense", "request_id": "n-1"}),
    ] {
        client.send(&message).await;
        let error = client.message().await;
        assert_eq!((&error["type"], &error["request_id"]), (&json!("error"), &message["request_id"]), "{error}");
    }
    for id in [json!(7), json!(""), json!("x".repeat(257))] {
        client.send(&json!({"type": "nonsense", "request_id": id})).await;
        let error = client.message().await;
        assert!(
            error["type"] == "error" && error.get("request_id").is_none(),
            "an invalid id is not repeated: {error}"
        );
    }
}

/// Returns a connection on which the test writes the bytes of the frames.
async fn tcp_connection(server: &Server) -> TcpStream {
    let mut stream = TcpStream::connect(server.base.trim_start_matches("http://")).await.unwrap();
    stream.write_all(websocket_handshake("/generate", "").as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
    assert!(String::from_utf8_lossy(&head).contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
    stream
}

#[tokio::test]
async fn invalid_frames_close_connection() {
    let server = server().await;
    let masked = |first: u8, payload: &[u8]| {
        let mut frame = vec![first, 0x80 | payload.len() as u8, 0, 0, 0, 0];
        frame.extend_from_slice(payload);
        frame
    };
    for (name, bytes, code) in [
        ("not masked", vec![0x81, 0x02, b'h', b'i'], Some(1002)),
        ("a reserved bit", masked(0xa1, b"x"), Some(1002)),
        ("an unknown opcode", masked(0x83, b"x"), Some(1003)),
        ("a continuation without a first frame", masked(0x80, b"x"), Some(1002)),
        ("a fragmented ping", masked(0x09, b"x"), Some(1002)),
        ("invalid UTF-8", masked(0x81, b"\xff\xfe"), Some(1007)),
        ("a frame of 2^62 bytes", vec![0x81, 0xff, 0x40, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], Some(1009)),
        ("a close frame of one byte", masked(0x88, b"x"), Some(1002)),
    ] {
        let mut stream = tcp_connection(server).await;
        stream.write_all(&bytes).await.unwrap();
        let mut response = Vec::new();
        let read = tokio::time::timeout(Duration::from_mins(1), stream.read_to_end(&mut response)).await;
        let at = response.iter().rposition(|&byte| byte == 0x88);
        let close_code = at.and_then(|at| Some(u16::from_be_bytes([*response.get(at + 2)?, *response.get(at + 3)?])));
        assert!(read.is_ok(), "{name}: the connection stays open");
        assert_eq!(close_code, code, "{name}: {response:?}");
    }
    // Random bytes may be rejected while they are sent.
    let mut stream = tcp_connection(server).await;
    let random: Vec<u8> = (0..4000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let _ = stream.write_all(&random).await;
    drop(stream);
    // A message may be split into frames of one byte.
    let mut stream = tcp_connection(server).await;
    let config = br#"{"type":"config","prompt":"Once","parameters":{"max_tokens":2}}"#;
    for (index, byte) in config.iter().enumerate() {
        let opcode = u8::from(index == 0);
        let fin = if index + 1 == config.len() { 0x80 } else { 0 };
        stream.write_all(&masked(fin | opcode, &[*byte])).await.unwrap();
    }
    let mut first = [0; 40];
    stream.read_exact(&mut first).await.unwrap();
    assert!(String::from_utf8_lossy(&first).contains("\"type\":\"init\""));
}

#[tokio::test]
async fn disconnect_during_request_does_not_affect_others() {
    let server = Server::start(&["--stream-keep", "0", "--parallel", "1"]);
    server.wait_ready().await;
    for _ in 0..3 {
        let mut client = Client::connect(&server).await;
        client.send(&endless()).await;
        client.until(|message| message["index"] == 2).await;
        // Closes the connection without a close frame.
        drop(client);
    }
    // The only slot is free again.
    let response = server.answer("/v1/generate", &json!({"prompt": "Once", "max_tokens": 3})).await;
    assert!(response["usage"]["completion_tokens"].as_u64().unwrap() > 0);
}

const LARGE_RUN_TOKENS: u32 = 1500;

/// Returns the configuration of a run whose messages fill every buffer long before its end.
fn large_run() -> Value {
    let mut config = endless();
    config["parameters"]["max_tokens"] = LARGE_RUN_TOKENS.into();
    config["options"] = json!({"include_logprobs": true, "top_logprobs": 100});
    config
}

#[tokio::test]
async fn client_that_does_not_read_pauses_only_its_run() {
    let server = Server::start(&["--parallel", "2"]);
    server.wait_ready().await;
    let mut slow = Client::connect(&server).await;
    slow.send(&large_run()).await;
    let id = slow.message().await["request_id"].as_str().unwrap().to_owned();
    let generated = async || {
        server
            .get("/slots")
            .await
            .1
            .as_array()
            .unwrap()
            .iter()
            .map(|slot| slot["next_token"][0]["n_decoded"].as_u64().unwrap_or(0))
            .max()
            .unwrap()
    };
    let mut before = 0;
    let mut unchanged = 0;
    while unchanged < 20 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let current = generated().await;
        assert!(current >= before, "the run ended after {before} tokens, although the client does not read");
        unchanged = if current == before && current > 0 { unchanged + 1 } else { 0 };
        before = current;
    }
    assert!(
        before < u64::from(LARGE_RUN_TOKENS),
        "all {before} tokens were generated, although the client does not read"
    );
    let other = server.answer("/v1/generate", &json!({"prompt": "Other", "max_tokens": 20, "ignore_eos": true})).await;
    assert_eq!(other["usage"]["completion_tokens"], 20);
    // The run continues at its position.
    let end = slow.until_end().await.pop().unwrap();
    assert_eq!((&end["type"], &end["request_id"]), (&json!("completion"), &json!(id)), "{end}");
    assert_eq!(end["usage"]["completion_tokens"], LARGE_RUN_TOKENS);
}

#[tokio::test]
async fn slot_of_unread_run_is_given_to_waiting_run() {
    let server = Server::start(&["--parallel", "1"]);
    server.wait_ready().await;
    let mut slow = Client::connect(&server).await;
    slow.send(&large_run()).await;
    let mut messages = vec![slow.message().await];
    // The unread messages fill all buffers, so that the run waits in the only slot.
    let other = json!({"prompt": "Another prompt", "max_tokens": 20, "ignore_eos": true});
    assert_eq!(server.answer("/v1/generate", &other).await["usage"]["completion_tokens"], 20);
    messages.extend(slow.until_end().await);
    let end = messages.last().unwrap();
    assert_eq!(
        (&end["type"], &end["usage"]["completion_tokens"]),
        (&json!("completion"), &json!(LARGE_RUN_TOKENS)),
        "{end}"
    );
    assert_eq!(end["generated_text"], super::assemble_text(&messages));
}

#[tokio::test]
async fn idle_connection_uses_less_than_40_kib() {
    let server = Server::start(&[]);
    server.wait_ready().await;
    let resident = || -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    };
    let mut active = Client::connect(&server).await;
    active.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})).await;
    let before = resident();
    let mut idle = Vec::new();
    for _ in 0..1000 {
        // TCP connections are used, so that limits of the client library do not apply.
        idle.push(tcp_connection(&server).await);
    }
    let kibibytes = resident().saturating_sub(before) as f64 / 1000.0;
    assert!(kibibytes < 40.0, "an idle connection takes {kibibytes:.1} KiB");
    let last = active.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 2}})).await;
    assert_eq!(last.last().unwrap()["type"], "completion");
}
