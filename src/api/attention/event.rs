//! The messages of a stream: what they hold, and how they are written as JSON, as `MessagePack`, or with bytes behind them.

use super::ask::Answer;
use super::error;
use super::pruning::Prunable;
use super::shape::{Attention, Data};
use super::telling::{Done, Said, Told, attention_of, beside};
use crate::api::ApiError;
use crate::api::socket::Message;
use crate::events::TokenId;
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Bytes behind a header begin at a multiple of this, so that a client can see them as numbers where they are.
const ALIGNMENT: usize = 8;

/// How messages travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::api) enum Carrier {
    /// Each is a JSON text; where numbers are bytes, a binary message of a header and the bytes.
    Json,
    /// Each is `MessagePack`.
    Packed,
}

#[derive(Debug, Serialize)]
pub(super) struct TokenFields {
    token_id: TokenId,
    pub(super) text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<TopLogprob>>,
}

#[derive(Debug, Serialize)]
struct TopLogprob {
    token_id: TokenId,
    text: String,
    logprob: f32,
}

#[derive(Debug, Serialize)]
struct TokenEvent<'a> {
    r#type: &'static str,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    token: TokenFields,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<Attention>,
}

#[derive(Debug, Serialize)]
struct DoneEvent<'a> {
    r#type: &'static str,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    finish_reason: &'static str,
    total_tokens: usize,
    prompt_tokens: u32,
    generation_time_ms: u64,
}

#[derive(Debug, Serialize)]
struct PruningEvent<'a> {
    r#type: &'static str,
    request_id: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    prunable_sentences: Vec<Prunable>,
}

/// Writes the messages of one request.
#[derive(Debug, Clone)]
pub(in crate::api) struct Writer {
    carrier: Carrier,
    request_id: Arc<str>,
    answer: Answer,
}

impl Writer {
    pub(in crate::api) fn new(carrier: Carrier, request_id: &str, answer: &Answer) -> Self {
        Self { carrier, request_id: request_id.into(), answer: answer.clone() }
    }

    /// The message of what was said.
    ///
    /// # Errors
    /// A row is not what it must be.
    pub(in crate::api) async fn write(&self, said: Said) -> Result<Message, ApiError> {
        match said {
            Said::Token(told) => {
                let (writer, row) = (self.clone(), told.row.clone());
                beside(row.as_deref(), move || writer.token(*told)).await
            }
            Said::TakenBack { sample, tokens } => self
                .pack(&json!({ "type": "retract", "request_id": self.request_id, "sample": sample, "tokens": tokens })),
            Said::Pruning { sample, sentences } => self.pack(&PruningEvent {
                r#type: "pruning_suggestion",
                request_id: &self.request_id,
                sample: self.sample(sample),
                prunable_sentences: sentences,
            }),
            Said::Done(done) => self.done(&done),
            Said::Failed { sample, error } => self.error(&error, self.sample(sample)),
        }
    }

    /// The last message of a sample.
    ///
    /// # Errors
    /// It cannot be written.
    pub(super) fn done(&self, done: &Done) -> Result<Message, ApiError> {
        self.pack(&DoneEvent {
            r#type: "done",
            request_id: &self.request_id,
            sample: self.sample(done.sample),
            finish_reason: done.finish_reason,
            total_tokens: done.total_tokens,
            prompt_tokens: done.prompt_tokens,
            generation_time_ms: done.generation_time_ms,
        })
    }

    /// An error of this request.
    ///
    /// # Errors
    /// It cannot be written.
    pub(in crate::api) fn error(&self, error: &ApiError, sample: Option<usize>) -> Result<Message, ApiError> {
        error_message(self.carrier, error, Some(&self.request_id), sample)
    }

    fn token(&self, told: Told) -> Result<Message, ApiError> {
        let mut attention = attention_of(told.row.as_deref(), self.answer.attention.as_ref(), self.answer.layers)?;
        let json = self.carrier == Carrier::Json;
        let bytes = attention.as_mut().filter(|_| json).and_then(take_bytes);
        let text = attention.as_mut().filter(|_| json).and_then(take_text);
        let event = TokenEvent {
            r#type: "token",
            request_id: &self.request_id,
            sample: self.sample(told.sample),
            token: token_fields(told, self.answer.logprobs),
            attention,
        };
        if let Some(text) = text {
            let message = serde_json::to_string(&event).map_err(ApiError::internal)?;
            return with_text(&message, &text).map(Message::Text);
        }
        let Some(bytes) = bytes else { return self.pack(&event) };
        let header = serde_json::to_vec(&event).map_err(ApiError::internal)?;
        Ok(Message::Binary(with_header(&header, &bytes).into()))
    }

    /// Only where there are several does a message say which.
    fn sample(&self, sample: usize) -> Option<usize> {
        (self.answer.samples > 1).then_some(sample)
    }

    fn pack(&self, event: &impl Serialize) -> Result<Message, ApiError> {
        pack(self.carrier, event)
    }
}

/// An error, of a request or of none.
///
/// # Errors
/// It cannot be written.
pub(super) fn error_message(
    carrier: Carrier,
    error: &ApiError,
    request_id: Option<&str>,
    sample: Option<usize>,
) -> Result<Message, ApiError> {
    let mut fields = error::fields(error);
    if let Some(request_id) = request_id {
        fields.insert("request_id".into(), request_id.into());
    }
    if let Some(sample) = sample {
        fields.insert("sample".into(), sample.into());
    }
    pack(carrier, &Value::Object(fields))
}

/// A message of these fields.
///
/// # Errors
/// They cannot be written.
pub(super) fn pack(carrier: Carrier, event: &impl Serialize) -> Result<Message, ApiError> {
    match carrier {
        Carrier::Json => serde_json::to_string(event).map(Message::Text).map_err(ApiError::internal),
        Carrier::Packed => {
            rmp_serde::to_vec_named(event).map(|bytes| Message::Binary(bytes.into())).map_err(ApiError::internal)
        }
    }
}

/// A token as a message has it. `logprobs` is how many alternatives it shows.
pub(super) fn token_fields(told: Told, logprobs: Option<usize>) -> TokenFields {
    let alternatives = |count: usize| {
        let top = told.top.iter().take(count);
        top.map(|one| TopLogprob {
            token_id: one.token,
            text: one.text.clone(),
            logprob: one.prob.max(f32::MIN_POSITIVE).ln(),
        })
        .collect::<Vec<_>>()
    };
    TokenFields {
        token_id: told.measure.token,
        logprob: logprobs.and(told.measure.logprob),
        top_logprobs: logprobs.filter(|&count| count > 0).map(alternatives),
        text: told.measure.text,
    }
}

/// Takes the bytes out of a message that cannot hold them.
fn take_bytes(attention: &mut Attention) -> Option<Vec<u8>> {
    match attention.data.take() {
        Some(Data::Bytes(bytes)) => {
            attention.byte_length = Some(bytes.len());
            Some(bytes)
        }
        other => {
            attention.data = other;
            None
        }
    }
}

/// Takes the text out of a message and leaves an empty one in its place.
fn take_text(attention: &mut Attention) -> Option<String> {
    match &mut attention.data {
        Some(Data::Text(text)) => Some(std::mem::take(text)),
        _ => None,
    }
}

/// The message with `text`, which has nothing to escape, in its last field. A writer of JSON would look at every character of
/// what may be megabytes.
fn with_text(message: &str, text: &str) -> Result<String, ApiError> {
    const END: &str = "\"}}";
    let begin = message.strip_suffix(END).ok_or_else(|| ApiError::internal("a token's data is not its last field"))?;
    let mut whole = String::with_capacity(message.len() + text.len());
    whole.push_str(begin);
    whole.push_str(text);
    whole.push_str(END);
    Ok(whole)
}

/// `u32` length of the header, little-endian; the header, filled up with spaces; the bytes, at a multiple of 8.
fn with_header(header: &[u8], bytes: &[u8]) -> Vec<u8> {
    let padded = (4 + header.len()).next_multiple_of(ALIGNMENT) - 4;
    let mut message = Vec::with_capacity(4 + padded + bytes.len());
    message.extend((padded as u32).to_le_bytes());
    message.extend(header);
    message.resize(4 + padded, b' ');
    message.extend(bytes);
    message
}

#[cfg(test)]
mod tests {
    use super::with_header;

    #[test]
    fn bytes_begin_where_numbers_can() {
        for len in 0..20 {
            let header = vec![b'x'; len];
            let message = with_header(&header, &[1, 2, 3]);
            let header_len = u32::from_le_bytes(message[..4].try_into().unwrap()) as usize;
            assert_eq!((4 + header_len) % 8, 0);
            assert_eq!(message[4 + header_len..], [1, 2, 3]);
            assert_eq!(message[4..4 + len], header);
            assert!(message[4 + len..4 + header_len].iter().all(|&byte| byte == b' '));
        }
    }
}
