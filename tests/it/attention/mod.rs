//! The attention API as its clients use it: the first version of Halo Weave over the WebSocket, and the examples. `kobold`
//! tests later versions of Halo Weave, and `exact` tests the values of rows.

mod endings;
mod errors;
mod examples;
mod formats;
mod hostile;
mod limits;
mod model;
mod pruning;
mod rest;
mod socket;

use crate::harness::{Server, with_fields};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use std::time::Duration;
use yawc::{Frame, OpCode, Options, TcpWebSocket, WebSocket};

const LAYERS: usize = 4;
const HEADS: usize = 4;
const WAIT_TIMEOUT: Duration = Duration::from_mins(1);
const PATH: &str = "/api/v1/generate/stream";

async fn tokens_of(server: &Server, text: &str) -> Vec<i64> {
    let answer = server.answer("/api/v1/tokenize", &json!({"text": text, "add_special_tokens": false})).await;
    serde_json::from_value(answer["token_ids"].clone()).unwrap()
}

async fn connect(server: &Server, path: &str, options: Options) -> TcpWebSocket {
    let url = format!("{}{path}", server.base.replace("http", "ws")).parse().unwrap();
    WebSocket::connect(url).with_options(options.with_max_payload_read(64 << 20)).await.unwrap()
}

async fn send(socket: &mut TcpWebSocket, message: &Value) {
    socket.send(Frame::text(message.to_string())).await.unwrap();
}

/// Returns the fields and the binary payload of the next message.
async fn next(socket: &mut TcpWebSocket) -> (Value, Vec<u8>) {
    loop {
        let frame = tokio::time::timeout(WAIT_TIMEOUT, socket.next())
            .await
            .expect("no message arrives")
            .expect("the socket is closed");
        match frame.opcode() {
            OpCode::Text => return (serde_json::from_str(frame.as_str()).unwrap(), Vec::new()),
            OpCode::Binary => {
                let bytes = frame.into_payload();
                let length = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
                return (serde_json::from_slice(&bytes[4..4 + length]).unwrap(), bytes[4 + length..].to_vec());
            }
            _ => {}
        }
    }
}

/// Returns the messages up to the end of a request.
async fn until_done(socket: &mut TcpWebSocket) -> Vec<(Value, Vec<u8>)> {
    let mut messages = Vec::new();
    loop {
        let message = next(socket).await;
        let is_last = message.0["type"] == "done" || message.0["type"] == "error";
        messages.push(message);
        if is_last {
            return messages;
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

fn base64_floats(attention: &Value) -> Vec<f32> {
    let data = attention["data"].as_str().unwrap_or_else(|| panic!("no data in {attention}"));
    floats(&STANDARD.decode(data).unwrap())
}

/// Returns a small deterministic request. Its `request_id` is unique to the calling test, because active runs of other tests on
/// the same server must not have it.
fn generate_request(input_ids: &[i64], fields: &Value) -> Value {
    let id = std::thread::current().name().unwrap().to_owned();
    let message = json!({
        "type": "generate", "request_id": id, "input_ids": input_ids, "max_new_tokens": 4, "temperature": 0.0,
        "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.0, "stop_tokens": [], "return_attention": true, "ignore_eos": true,
    });
    with_fields(message, fields)
}
