//! `POST /api/v1/generate` with `input_ids`: the complete answer.

use crate::api::shared::attention::error::{AttentionError, out_of_memory};
use crate::api::shared::attention::event::{TokenFields, token_fields};
use crate::api::shared::attention::pruning::Prunable;
use crate::api::shared::attention::request;
use crate::api::shared::attention::request::Transport;
use crate::api::shared::attention::row_format::AttentionPayload;
use crate::api::shared::attention::stream::{AttentionEvent, AttentionStream, convert_row, run_blocking};
use crate::api::shared::generation::{self, RunClient};
use crate::api::shared::{self, Fields};
use crate::events::TokenId;
use crate::server::ApiError;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use std::time::Instant;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;

/// Media type of `MessagePack`.
const MSGPACK: &str = "application/msgpack";

/// The response to a generation request.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum GenerateAttentionResponse {
    /// One answer.
    One(Box<AttentionSample>),
    /// Several answers, with `num_samples` above 1.
    Several {
        /// The answers.
        samples: Vec<AttentionSample>,
    },
}

/// An answer.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct AttentionSample {
    generated_tokens: Vec<TokenFields>,
    generated_text: String,
    /// `stop_token`, `stop_string`, `length`, `tool_calls`, `cancelled` or `timeout`.
    finish_reason: &'static str,
    prompt_tokens: u32,
    generation_time_ms: u64,
    /// Tool calls with which a mod ended the answer.
    #[schema(value_type = Option<Vec<Object>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<Value>,
    /// One entry per token, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_data: Option<Vec<AttentionEntry>>,
    /// Sentences of the context with little attention, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pruning_suggestion: Option<Vec<Prunable>>,
}

/// The attention of a token.
#[derive(Debug, Serialize, ToSchema)]
struct AttentionEntry {
    token_id: TokenId,
    text: String,
    /// `null` for a token that a mod inserted without a decode.
    attention: Option<AttentionPayload>,
    /// Size of the attention, which counts until the token is retracted.
    #[serde(skip)]
    bytes: usize,
}

impl AttentionSample {
    /// Removes the last tokens. Returns the bytes of their attention.
    fn retract(&mut self, tokens: usize) -> usize {
        let left = self.generated_tokens.len().saturating_sub(tokens);
        self.generated_tokens.truncate(left);
        let data = self.attention_data.iter_mut().flat_map(|data| data.drain(left.min(data.len())..));
        data.map(|entry| entry.bytes).sum()
    }
}

/// Handles `POST /api/v1/generate` with `input_ids`.
pub(crate) async fn generate(client: &RunClient, body: &Value) -> Response {
    answer(client, body).await.unwrap_or_else(AttentionError::render)
}

/// Parses a body as `MessagePack` if that is its content type, otherwise as JSON.
///
/// # Errors
/// 400 with the position of the syntax error.
pub(crate) fn read_body(headers: &HeaderMap, body: &[u8]) -> Result<Value, ApiError> {
    if is_msgpack(headers, &header::CONTENT_TYPE) {
        return shared::parse_msgpack(body);
    }
    shared::parse_json(body)
}

fn is_msgpack(headers: &HeaderMap, name: &header::HeaderName) -> bool {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.is_some_and(|value| value.contains(MSGPACK) || value.contains("application/x-msgpack"))
}

async fn answer(client: &RunClient, body: &Value) -> Result<Response, ApiError> {
    let received = Instant::now();
    let fields = Fields::new(body)?;
    let msgpack = is_msgpack(&client.headers, &header::ACCEPT);
    let loaded = client.app.get_or_load(fields.text("model")?).await?;
    let transport = if msgpack { Transport::Msgpack } else { Transport::Rest };
    let request = request::parse(&client.app, &loaded, fields, transport, received).await?;
    let (runs, options) = request.submit(client, &loaded, CancellationToken::new()).await?;
    let run_id = runs.run_id();
    let answer = collect(AttentionStream::new(runs, options)).await.map_err(|error| error.in_run(run_id))?;
    Ok(generation::with_run_id(serialize(answer, msgpack).await?, run_id))
}

async fn collect(mut stream: AttentionStream) -> Result<GenerateAttentionResponse, ApiError> {
    let options = stream.options.clone();
    let mut samples: Vec<AttentionSample> = (0..options.samples).map(|_| AttentionSample::default()).collect();
    let mut bytes = 0;
    while let Some(event) = stream.next().await? {
        match event {
            AttentionEvent::Token(token) => {
                let sample = &mut samples[token.sample];
                if let Some(format) = options.attention.clone() {
                    let row_bytes = token.row.as_deref().map_or(0, |row| format.bytes(row));
                    bytes += row_bytes;
                    if bytes > options.max_bytes {
                        return Err(out_of_memory("this answer", options.max_bytes, token.row.as_deref()));
                    }
                    let (row, layers) = (token.row.clone(), options.layers);
                    let converted =
                        run_blocking(token.row.as_deref(), move || convert_row(row.as_deref(), Some(&format), layers));
                    let attention = converted.await?;
                    let (token_id, text) = (token.measurement.token, token.measurement.text.clone());
                    let entry = AttentionEntry { token_id, text, attention, bytes: row_bytes };
                    sample.attention_data.get_or_insert_default().push(entry);
                }
                sample.generated_tokens.push(token_fields(*token, options.logprobs));
            }
            AttentionEvent::Retract { sample, tokens, .. } => bytes -= samples[sample].retract(tokens),
            AttentionEvent::Pruning { sample, sentences } => samples[sample].pruning_suggestion = Some(sentences),
            AttentionEvent::Done(done) => {
                let sample = &mut samples[done.sample];
                sample.generated_text = sample.generated_tokens.iter().map(|token| token.text.as_str()).collect();
                sample.finish_reason = done.finish_reason;
                sample.prompt_tokens = done.prompt_tokens;
                sample.generation_time_ms = done.generation_time_ms;
                sample.tool_calls = done.tool_calls;
                if options.attention.is_some() {
                    sample.attention_data.get_or_insert_default();
                }
            }
            AttentionEvent::Failed { error, .. } => return Err(error),
        }
    }
    Ok(match samples.len() {
        1 => GenerateAttentionResponse::One(Box::new(samples.remove(0))),
        _ => GenerateAttentionResponse::Several { samples },
    })
}

/// Serializes the response on a blocking thread because it can be large.
async fn serialize(response: GenerateAttentionResponse, msgpack: bool) -> Result<Response, ApiError> {
    let write = move || {
        if msgpack {
            rmp_serde::to_vec_named(&response).map_err(ApiError::internal)
        } else {
            serde_json::to_vec(&response).map_err(ApiError::internal)
        }
    };
    let bytes = tokio::task::spawn_blocking(write).await.map_err(ApiError::internal)??;
    let media_type = if msgpack { MSGPACK } else { "application/json" };
    Ok(([(header::CONTENT_TYPE, media_type)], bytes).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::shared::attention::stream::GeneratedToken;
    use crate::events::TokenMeasurement;
    use serde_json::json;

    #[test]
    fn retracted_attention_does_not_count() {
        let entry = |bytes| AttentionEntry { token_id: 1, text: "a".to_owned(), attention: None, bytes };
        let mut sample =
            AttentionSample { attention_data: Some([10, 20, 30].map(entry).into()), ..AttentionSample::default() };
        assert_eq!(serde_json::to_value(&sample).unwrap()["attention_data"][0].get("bytes"), None);
        let measurement = TokenMeasurement { token: 1, text: "a".to_owned(), logprob: None, rank: None, entropy: None };
        let token = || GeneratedToken { sample: 0, measurement: measurement.clone(), top: Vec::new(), row: None };
        sample.generated_tokens = (0..3).map(|_| token_fields(token(), None)).collect();
        assert_eq!(sample.retract(2), 50);
        assert_eq!(sample.attention_data.as_ref().map(Vec::len), Some(1));
        assert_eq!(sample.retract(5), 10);
        assert_eq!(serde_json::to_value(&sample).unwrap()["generated_tokens"], json!([]));
    }
}
