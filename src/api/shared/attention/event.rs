//! The messages of a stream, encoded as JSON, as `MessagePack`, or with a binary payload.

use super::error;
use super::pruning::Prunable;
use super::request::AttentionOptions;
use super::row_format::{AttentionPayload, RowData};
use super::stream::{AttentionEvent, GeneratedToken, SampleEnd, convert_row, run_blocking};
use crate::events::TokenId;
use crate::server::ApiError;
use crate::server::socket::Message;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use utoipa::ToSchema;

/// Alignment of the binary payload, so that clients can use it as numbers without a copy.
const ALIGNMENT: usize = 8;

/// Encoding of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageFormat {
    /// Each message is JSON text, or a binary message with a JSON header if it has a binary payload.
    Json,
    /// Each message is `MessagePack`.
    Msgpack,
}

/// A generated token.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenFields {
    token_id: TokenId,
    /// Text of the token; empty while a character is incomplete.
    pub(crate) text: String,
    /// Natural logarithm of its probability according to the model: before bans, penalties, mods and temperature.
    #[serde(skip_serializing_if = "Option::is_none")]
    logprob: Option<f32>,
    /// The most probable tokens, most probable first.
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<TopLogprob>>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
struct TopLogprob {
    token_id: TokenId,
    text: String,
    logprob: f32,
}

/// A token with its attention.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AttentionTokenEvent<'a> {
    r#type: &'static str,
    /// The client's id of the request.
    request_id: &'a str,
    /// Index of the sample, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    token: TokenFields,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<AttentionPayload>,
}

/// A token whose attention follows in a binary message.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BareTokenEvent<'a> {
    r#type: &'static str,
    /// The client's id of the request.
    request_id: &'a str,
    #[serde(flatten)]
    token: TokenFields,
}

/// The end of a request or of one of its samples.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AttentionDoneEvent<'a> {
    r#type: &'static str,
    /// The client's id of the request.
    request_id: &'a str,
    /// Index of the sample, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    /// Id of the run; absent if the request was cancelled before it started. With `record: false` the run exists only
    /// while it is active.
    #[serde(skip_serializing_if = "Option::is_none")]
    run_id: Option<String>,
    /// `stop_token`, `stop_string`, `length`, `tool_calls`, `cancelled` or `timeout`.
    finish_reason: &'static str,
    /// Tokens of the answer.
    total_tokens: usize,
    /// Tokens of the prompt: `input_ids`, changed by mods that change prompts.
    prompt_tokens: u32,
    /// Milliseconds since the request arrived.
    generation_time_ms: u64,
    /// Tool calls with which a mod ended the answer.
    #[schema(value_type = Option<Vec<Object>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<&'a Value>,
}

/// The removal of the last tokens by a mod.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct AttentionRetractEvent<'a> {
    r#type: &'static str,
    /// The client's id of the request.
    request_id: &'a str,
    /// Index of the sample, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    /// Number of tokens removed from the end.
    tokens: usize,
}

/// Sentences of the context with little attention; sent before `done`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PruningSuggestionEvent<'a> {
    r#type: &'static str,
    /// The client's id of the request.
    request_id: &'a str,
    /// Index of the sample, if there are several.
    #[serde(skip_serializing_if = "Option::is_none")]
    sample: Option<usize>,
    prunable_sentences: Vec<Prunable>,
}

/// The answer to `ping`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PongMessage {
    r#type: &'static str,
}

impl PongMessage {
    pub(crate) const PONG: Self = Self { r#type: "pong" };
}

/// Writer of the messages of one request.
#[derive(Debug, Clone)]
pub(crate) struct AttentionWriter {
    format: MessageFormat,
    request_id: Arc<str>,
    pub(crate) options: AttentionOptions,
}

impl AttentionWriter {
    pub(crate) fn new(format: MessageFormat, request_id: &str, options: &AttentionOptions) -> Self {
        Self { format, request_id: request_id.into(), options: options.clone() }
    }

    /// Returns the message for an event.
    ///
    /// # Errors
    /// An attention row is invalid.
    pub(crate) async fn write(&self, event: AttentionEvent) -> Result<Message, ApiError> {
        match event {
            AttentionEvent::Token(token) => {
                let (writer, row) = (self.clone(), token.row.clone());
                run_blocking(row.as_deref(), move || writer.token(*token)).await
            }
            AttentionEvent::Retract { sample, tokens, .. } => self.encode(&AttentionRetractEvent {
                r#type: "retract",
                request_id: &self.request_id,
                sample: self.sample(sample),
                tokens,
            }),
            AttentionEvent::Pruning { sample, sentences } => self.encode(&PruningSuggestionEvent {
                r#type: "pruning_suggestion",
                request_id: &self.request_id,
                sample: self.sample(sample),
                prunable_sentences: sentences,
            }),
            AttentionEvent::Done(done) => self.done(&done),
            AttentionEvent::Failed { sample, error } => self.error(&error, self.sample(sample)),
        }
    }

    /// Returns the last message of a sample.
    ///
    /// # Errors
    /// Serialization failed.
    pub(crate) fn done(&self, done: &SampleEnd) -> Result<Message, ApiError> {
        done_message(self.format, &self.request_id, self.options.samples, done)
    }

    /// Returns an error message of this request.
    ///
    /// # Errors
    /// Serialization failed.
    pub(crate) fn error(&self, error: &ApiError, sample: Option<usize>) -> Result<Message, ApiError> {
        error_message(self.format, error, Some(&self.request_id), sample)
    }

    /// Checks that the attention of a token does not exceed the server's limit for a message.
    fn check_size(&self, token: &GeneratedToken) -> Result<(), ApiError> {
        match (&self.options.attention, token.row.as_deref()) {
            (Some(format), Some(row)) if format.bytes(row) > self.options.max_bytes => {
                Err(error::out_of_memory("this token", self.options.max_bytes, Some(row)))
            }
            _ => Ok(()),
        }
    }

    fn token(&self, token: GeneratedToken) -> Result<Message, ApiError> {
        self.check_size(&token)?;
        let mut attention = convert_row(token.row.as_deref(), self.options.attention.as_ref(), self.options.layers)?;
        let json = self.format == MessageFormat::Json;
        let bytes = attention.as_mut().filter(|_| json).and_then(take_bytes);
        let text = attention.as_mut().filter(|_| json).and_then(take_text);
        let event = AttentionTokenEvent {
            r#type: "token",
            request_id: &self.request_id,
            sample: self.sample(token.sample),
            token: token_fields(token, self.options.logprobs),
            attention,
        };
        if let Some(text) = text {
            let message = serde_json::to_string(&event).map_err(ApiError::internal)?;
            return with_text(&message, &text).map(Message::Text);
        }
        let Some(bytes) = bytes else { return self.encode(&event) };
        let header = serde_json::to_vec(&event).map_err(ApiError::internal)?;
        Ok(Message::Binary(with_header(&header, &bytes).into()))
    }

    /// Returns a token as two messages: its fields as text, and its attention row as bytes if attention was requested.
    /// The bytes are empty for a token without a row.
    ///
    /// # Errors
    /// An attention row is invalid or exceeds the server's limit for a message.
    pub(crate) async fn write_split(&self, token: GeneratedToken) -> Result<(Message, Option<Message>), ApiError> {
        self.check_size(&token)?;
        let (writer, row) = (self.clone(), token.row.clone());
        let converted = run_blocking(row.as_deref(), move || {
            let options = &writer.options;
            convert_row(token.row.as_deref(), options.attention.as_ref(), options.layers)
                .map(|attention| (attention.and_then(|mut attention| take_bytes(&mut attention)), token))
        });
        let (bytes, token) = converted.await?;
        let event = BareTokenEvent {
            r#type: "token",
            request_id: &self.request_id,
            token: token_fields(token, self.options.logprobs),
        };
        let row = self.options.attention.is_some().then(|| Message::Binary(bytes.unwrap_or_default().into()));
        Ok((self.encode(&event)?, row))
    }

    /// Returns the sample's index if the request has several samples.
    fn sample(&self, sample: usize) -> Option<usize> {
        (self.options.samples > 1).then_some(sample)
    }

    fn encode(&self, event: &impl Serialize) -> Result<Message, ApiError> {
        encode(self.format, event)
    }
}

/// Returns the last message of one of `samples` samples.
///
/// # Errors
/// Serialization failed.
pub(crate) fn done_message(
    format: MessageFormat,
    request_id: &str,
    samples: usize,
    done: &SampleEnd,
) -> Result<Message, ApiError> {
    let event = AttentionDoneEvent {
        r#type: "done",
        request_id,
        sample: (samples > 1).then_some(done.sample),
        run_id: done.run_id.map(|id| id.to_string()),
        finish_reason: done.finish_reason,
        total_tokens: done.total_tokens,
        prompt_tokens: done.prompt_tokens,
        generation_time_ms: done.generation_time_ms,
        tool_calls: done.tool_calls.as_ref(),
    };
    encode(format, &event)
}

/// Returns an error message, with or without a request id.
///
/// # Errors
/// Serialization failed.
pub(crate) fn error_message(
    format: MessageFormat,
    error: &ApiError,
    request_id: Option<&str>,
    sample: Option<usize>,
) -> Result<Message, ApiError> {
    let mut message = error.attention();
    (message.request_id, message.sample) = (request_id.map(str::to_owned), sample);
    encode(format, &message)
}

/// Encodes the fields of a message.
///
/// # Errors
/// Serialization failed.
pub(crate) fn encode(format: MessageFormat, event: &impl Serialize) -> Result<Message, ApiError> {
    match format {
        MessageFormat::Json => serde_json::to_string(event).map(Message::Text).map_err(ApiError::internal),
        MessageFormat::Msgpack => {
            rmp_serde::to_vec_named(event).map(|bytes| Message::Binary(bytes.into())).map_err(ApiError::internal)
        }
    }
}

/// Returns the fields of a token with up to `logprobs` alternatives.
pub(crate) fn token_fields(token: GeneratedToken, logprobs: Option<usize>) -> TokenFields {
    let alternatives = |count: usize| {
        let top = token.top.iter().take(count);
        top.map(|other| TopLogprob {
            token_id: other.token,
            text: other.text.clone(),
            logprob: other.prob.max(f32::MIN_POSITIVE).ln(),
        })
        .collect::<Vec<_>>()
    };
    TokenFields {
        token_id: token.measurement.token,
        logprob: logprobs.and(token.measurement.logprob),
        top_logprobs: logprobs.filter(|&count| count > 0).map(alternatives),
        text: token.measurement.text,
    }
}

/// Takes the bytes out of a message in JSON, which cannot contain them, and sets their length.
fn take_bytes(attention: &mut AttentionPayload) -> Option<Vec<u8>> {
    match attention.data.take() {
        Some(RowData::Bytes(bytes)) => {
            attention.byte_length = Some(bytes.len());
            Some(bytes)
        }
        other => {
            attention.data = other;
            None
        }
    }
}

/// Takes the text out of a message and leaves an empty text.
fn take_text(attention: &mut AttentionPayload) -> Option<String> {
    match &mut attention.data {
        Some(RowData::Text(text)) => Some(std::mem::take(text)),
        _ => None,
    }
}

/// Inserts `text` into the last field of a serialized message. The text contains nothing to escape; a JSON serializer
/// would check every character of several megabytes.
fn with_text(message: &str, text: &str) -> Result<String, ApiError> {
    const END: &str = "\"}}";
    let begin = message.strip_suffix(END).ok_or_else(|| ApiError::internal("a token's data is not its last field"))?;
    let mut whole = String::with_capacity(message.len() + text.len());
    whole.push_str(begin);
    whole.push_str(text);
    whole.push_str(END);
    Ok(whole)
}

/// Returns the little-endian `u32` length of the header, the header padded with spaces, and the bytes aligned to 8.
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
    fn binary_payload_is_aligned() {
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
