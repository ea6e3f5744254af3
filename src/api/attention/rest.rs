//! `POST /api/v1/generate`: the whole answer at once. The path is `KoboldCPP`'s too; a body with a `prompt` is read as its.

use super::ask::{self, Dialect};
use super::error::{AttentionError, out_of_memory};
use super::event::{TokenFields, token_fields};
use super::pruning::Prunable;
use super::shape::Attention;
use super::telling::{Said, Telling, attention_of, beside};
use crate::api::generation::{self, Runs};
use crate::api::shared::{self, Fields};
use crate::api::{ApiError, App, Caller, kobold};
use crate::events::TokenId;
use axum::Extension;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;
use std::time::Instant;

/// The media type of `MessagePack`.
const PACKED: &str = "application/msgpack";

/// The answer to a request.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Whole {
    One(Box<Sample>),
    Several { samples: Vec<Sample> },
}

#[derive(Debug, Default, Serialize)]
struct Sample {
    generated_tokens: Vec<TokenFields>,
    generated_text: String,
    finish_reason: &'static str,
    prompt_tokens: u32,
    generation_time_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention_data: Option<Vec<OfToken>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pruning_suggestion: Option<Vec<Prunable>>,
}

#[derive(Debug, Serialize)]
struct OfToken {
    token_id: TokenId,
    text: String,
    /// Absent for a token that a mod put there without a decode of its own.
    attention: Option<Attention>,
}

/// Generates from `input_ids`; with `return_attention` each token comes with the attention it was drawn with. A body with a
/// `prompt` instead is answered as `KoboldCPP` does. `Accept: application/msgpack` gives the answer in that form, and a body of
/// that type is read.
#[utoipa::path(post, path = "/api/v1/generate", tag = "attention",
    request_body(content = Value, content_type = "application/json",
        description = "`{input_ids, max_new_tokens?, temperature?, top_p?, top_k?, repetition_penalty?, stop_tokens?, banned_tokens?, \
                       return_attention?, attention_format?: per_layer | aggregated | sparse | viz, aggregation_mode?: mean | max | \
                       last_layer | weighted_layers, layer_weights?, attention_top_k?, attention_dtype?: float32 | float16, \
                       attention_encoding?: base64 | binary | array, logprobs?, top_logprobs?, num_samples?, suggest_pruning?, \
                       prune_below?, sentences?, request_id?, seed?, stop?, mods?, record?}`"),
    responses((status = 200, description = "`{generated_tokens, generated_text, finish_reason, attention_data?, pruning_suggestion?}`; \
                                            with `num_samples` above 1 `{samples: [those]}`"),
              (status = 400, description = "`{type: error, error, error_code, field?}`: `INVALID_TOKEN`, `INVALID_REQUEST`, \
                                            `CONTEXT_LENGTH_EXCEEDED`, `ATTENTION_UNAVAILABLE`, …"),
              (status = 503, description = "`NO_MODEL`"), (status = 507, description = "`OOM`")))]
pub(super) async fn generate(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    genkeys: Extension<kobold::Genkeys>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let body = match body.map_err(ApiError::from).and_then(|body| read_body(&headers, &body)) {
        Ok(body) => body,
        Err(error) => return AttentionError(error).into_response(),
    };
    if body.get("input_ids").is_none() && body.get("prompt").is_some() {
        return kobold::generate(app, &genkeys, caller, &headers, &body).await;
    }
    match answer(app, caller, &headers, &body).await {
        Ok(response) => response,
        Err(error) => AttentionError(error).into_response(),
    }
}

fn read_body(headers: &HeaderMap, body: &[u8]) -> Result<Value, ApiError> {
    if names(headers, &header::CONTENT_TYPE) {
        return shared::parse_msgpack(body);
    }
    shared::parse_json(body)
}

fn names(headers: &HeaderMap, name: &header::HeaderName) -> bool {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.is_some_and(|value| value.contains(PACKED) || value.contains("application/x-msgpack"))
}

async fn answer(
    app: App,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: &Value,
) -> Result<Response, ApiError> {
    let taken = Instant::now();
    let fields = Fields::new(body)?;
    let packed = names(headers, &header::ACCEPT);
    let loaded = app.loaded(fields.text("model")?).await?;
    let dialect = if packed { Dialect::Packed } else { Dialect::Rest };
    let mut asked = ask::read(&app, &loaded, fields, dialect, taken)?;
    for request in &mut asked.requests {
        generation::set_client(request, headers, caller.clone());
    }
    ask::free_ids(&app, &mut asked.requests).await?;
    let runs = Runs::start(app, &loaded, asked.requests).await?;
    let telling = Telling::new(runs, asked.answer);
    let run_id = telling.run_id();
    let response = match whole(telling).await {
        Ok(whole) => written(whole, packed).await?,
        Err(error) => AttentionError(error).into_response(),
    };
    Ok(match run_id {
        Some(run_id) => generation::with_run_id(response, run_id),
        None => response,
    })
}

async fn whole(mut telling: Telling) -> Result<Whole, ApiError> {
    let answer = telling.answer.clone();
    let mut samples: Vec<Sample> = (0..answer.samples).map(|_| Sample::default()).collect();
    let mut bytes = 0;
    while let Some(said) = telling.next().await? {
        match said {
            Said::Token(told) => {
                let sample = &mut samples[told.sample];
                if let Some(shape) = answer.attention.clone() {
                    bytes += told.row.as_deref().map_or(0, |row| shape.bytes(row));
                    if bytes > answer.most_bytes {
                        return Err(out_of_memory("this answer", answer.most_bytes, told.row.as_deref()));
                    }
                    let (row, layers) = (told.row.clone(), answer.layers);
                    let shaped =
                        beside(told.row.as_deref(), move || attention_of(row.as_deref(), Some(&shape), layers));
                    let attention = shaped.await?;
                    let (token_id, text) = (told.measure.token, told.measure.text.clone());
                    sample.attention_data.get_or_insert_default().push(OfToken { token_id, text, attention });
                }
                sample.generated_tokens.push(token_fields(*told, answer.logprobs));
            }
            Said::TakenBack { sample, tokens } => {
                let sample = &mut samples[sample];
                let left = sample.generated_tokens.len().saturating_sub(tokens);
                sample.generated_tokens.truncate(left);
                if let Some(data) = &mut sample.attention_data {
                    data.truncate(left);
                }
            }
            Said::Pruning { sample, sentences } => samples[sample].pruning_suggestion = Some(sentences),
            Said::Done(done) => {
                let sample = &mut samples[done.sample];
                sample.generated_text = sample.generated_tokens.iter().map(|token| token.text.as_str()).collect();
                sample.finish_reason = done.finish_reason;
                sample.prompt_tokens = done.prompt_tokens;
                sample.generation_time_ms = done.generation_time_ms;
                if answer.attention.is_some() {
                    sample.attention_data.get_or_insert_default();
                }
            }
            Said::Failed { error, .. } => return Err(error),
        }
    }
    Ok(match samples.len() {
        1 => Whole::One(Box::new(samples.remove(0))),
        _ => Whole::Several { samples },
    })
}

/// Writes the answer, away from the async threads: it may be large.
async fn written(whole: Whole, packed: bool) -> Result<Response, ApiError> {
    let write = move || {
        if packed {
            rmp_serde::to_vec_named(&whole).map_err(ApiError::internal)
        } else {
            serde_json::to_vec(&whole).map_err(ApiError::internal)
        }
    };
    let bytes = tokio::task::spawn_blocking(write).await.map_err(ApiError::internal)??;
    let media_type = if packed { PACKED } else { "application/json" };
    Ok(([(header::CONTENT_TYPE, media_type)], bytes).into_response())
}
