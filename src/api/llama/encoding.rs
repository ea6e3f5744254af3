//! What embeddings, ranking and classification have in common.

use crate::api::shared::Fields;
use crate::api::{ApiError, App, ErrorKind, Loaded, shared};
use crate::engine::encoder::{EncodeError, EncoderUnavailable};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::model::llama::EncoderOutput;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use utoipa::ToSchema;

/// Most inputs of one request.
const MOST_INPUTS: usize = 16_384;

/// Tokens that a request took.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct Usage {
    /// Tokens of all inputs, special ones included.
    prompt_tokens: usize,
    /// The same: nothing is generated.
    total_tokens: usize,
}

/// Texts as tokens, and their vectors.
pub(super) struct Encoded {
    pub vectors: Vec<Vec<f32>>,
    pub usage: Usage,
}

/// The body, and the model that it names.
pub(super) async fn request(app: &App, body: &[u8]) -> Result<(Value, Loaded), ApiError> {
    let body = shared::parse_json(body)?;
    let name = Fields::new(&body)?.text("model")?;
    let loaded = app.loaded(name).await?;
    Ok((body, loaded))
}

/// Tokenizes away from the async threads, and encodes. `field` is what errors name; a single input has no place.
pub(super) async fn encode(
    loaded: &Loaded,
    field: &'static str,
    is_list: bool,
    wanted: EncoderOutput,
    tokenize: impl FnOnce(&Vocabulary) -> Result<Vec<Vec<TokenId>>, ApiError> + Send + 'static,
) -> Result<Encoded, ApiError> {
    let vocabulary = Arc::clone(loaded.vocabulary());
    let tokenized = tokio::task::spawn_blocking(move || tokenize(&vocabulary)).await;
    let inputs = tokenized.map_err(|_| ApiError::internal("the tokenizer panicked"))??;
    let prompt_tokens = inputs.iter().map(Vec::len).sum();
    let place = |index| if is_list { format!("{field}[{index}]") } else { field.to_owned() };
    let vectors = loaded.encoder().encode(inputs, wanted).await.map_err(|error| refused(&error, &place))?;
    Ok(Encoded { vectors, usage: Usage { prompt_tokens, total_tokens: prompt_tokens } })
}

/// A list that has inputs, but not too many.
pub(super) fn bounded<'a>(field: &str, list: &'a [Value]) -> Result<&'a [Value], ApiError> {
    match list.len() {
        0 => Err(ApiError::invalid(field, format!("{field} must not be empty"))),
        count if count > MOST_INPUTS => {
            Err(ApiError::invalid(field, format!("{field} must have at most {MOST_INPUTS} inputs, got {count}")))
        }
        _ => Ok(list),
    }
}

/// A text that is not empty.
pub(super) fn text<'a>(field: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    match value.as_str() {
        Some("") => Err(ApiError::invalid(field, format!("{field} must not be empty"))),
        Some(text) => Ok(text),
        None => Err(shared::fields::invalid_value(field, "a text", value)),
    }
}

/// 501 with what would be needed.
pub(super) fn off(reason: &EncoderUnavailable) -> ApiError {
    ApiError::not_supported(reason.to_string())
}

fn refused(error: &EncodeError, place: &dyn Fn(usize) -> String) -> ApiError {
    match *error {
        EncodeError::Empty { index } => ApiError::invalid(place(index), format!("{} must not be empty", place(index))),
        EncodeError::TooLong { index, tokens, longest } => {
            let place = place(index);
            let detail = format!(
                "{place} has {tokens} tokens and is too large: this model's maximum context length is {longest} tokens"
            );
            ApiError::invalid(place, detail).exceeds_context(tokens, longest)
        }
        EncodeError::UnknownToken { index, .. } => ApiError::invalid(place(index), error.to_string()),
        EncodeError::Busy { .. } => ApiError::new(ErrorKind::Busy, error.to_string()).retry_after(1),
        EncodeError::Stopped => ApiError::unavailable(error.to_string()),
        EncodeError::Failed(_) => ApiError::internal(error),
    }
}
