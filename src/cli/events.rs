//! Server-sent events of a response.

use anyhow::Context;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use reqwest::Response;
use serde_json::Value;

/// The events of a response, one JSON value each.
pub struct Events {
    bytes: BoxStream<'static, reqwest::Result<Vec<u8>>>,
    pending: Vec<u8>,
}

impl Events {
    /// Creates a reader of a response's events.
    pub fn new(response: Response) -> Self {
        Self { bytes: response.bytes_stream().map_ok(|bytes| bytes.to_vec()).boxed(), pending: Vec::new() }
    }

    /// Returns the next event; `None` at `[DONE]`. Cancel-safe: no event is lost if the future is dropped.
    pub async fn next(&mut self) -> anyhow::Result<Option<Value>> {
        loop {
            while let Some(end) = self.pending.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.pending.drain(..=end).collect();
                let Some(data) = line.strip_prefix(b"data: ").map(<[u8]>::trim_ascii_end) else { continue };
                if data == b"[DONE]" {
                    return Ok(None);
                }
                return serde_json::from_slice(data).map(Some).context("the server sent an event that is not JSON");
            }
            // The message omits the cause, which does not help a user.
            let chunk = self
                .bytes
                .next()
                .await
                .and_then(Result::ok)
                .context("the connection to the server was lost during the answer")?;
            self.pending.extend_from_slice(&chunk);
        }
    }
}
