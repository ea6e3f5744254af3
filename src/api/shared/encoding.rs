//! Code shared by embeddings, reranking and classification.

use crate::api::shared;
use crate::engine::encoder::{EncodeError, EncoderUnavailable};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::model::llama::{EncoderOutput, Pooling};
use crate::server::{ApiError, ErrorKind, Loaded};
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use utoipa::ToSchema;

/// Maximum inputs of one request.
const MAX_INPUTS: usize = 16_384;

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(crate) struct EncoderUsage {
    /// Tokens of all inputs, including special tokens.
    pub(crate) prompt_tokens: usize,
    /// Same as `prompt_tokens`, because nothing is generated.
    total_tokens: usize,
}

/// The vectors of encoded inputs, with token counts.
pub(crate) struct EncodedInputs {
    pub(crate) vectors: Vec<Vec<f32>>,
    pub(crate) usage: EncoderUsage,
}

/// Tokenizes on a blocking thread and encodes the inputs. Errors name `field`, with an index only if it is a list.
pub(crate) async fn encode(
    loaded: &Loaded,
    field: &'static str,
    is_list: bool,
    output: EncoderOutput,
    tokenize: impl FnOnce(&Vocabulary) -> Result<Vec<Vec<TokenId>>, ApiError> + Send + 'static,
) -> Result<EncodedInputs, ApiError> {
    let vocabulary = Arc::clone(loaded.vocabulary());
    let tokenized = tokio::task::spawn_blocking(move || tokenize(&vocabulary)).await;
    let inputs = tokenized.map_err(|_| ApiError::internal("the tokenizer panicked"))??;
    let prompt_tokens = inputs.iter().map(Vec::len).sum();
    let field_path = |index| if is_list { format!("{field}[{index}]") } else { field.to_owned() };
    let vectors = loaded.encoder().encode(inputs, output).await.map_err(|error| encode_error(&error, &field_path))?;
    Ok(EncodedInputs { vectors, usage: EncoderUsage { prompt_tokens, total_tokens: prompt_tokens } })
}

/// Checks that a list is neither empty nor too long.
pub(crate) fn check_inputs<'a>(field: &str, list: &'a [Value]) -> Result<&'a [Value], ApiError> {
    match list.len() {
        0 => Err(ApiError::invalid(field, format!("`{field}` must not be empty"))),
        count if count > MAX_INPUTS => {
            Err(ApiError::invalid(field, format!("`{field}` must have at most {MAX_INPUTS} inputs, got {count}")))
        }
        _ => Ok(list),
    }
}

/// Returns the string in a value, which must not be empty.
pub(crate) fn non_empty_string<'a>(field: &str, value: &'a Value) -> Result<&'a str, ApiError> {
    match value.as_str() {
        Some("") => Err(ApiError::invalid(field, format!("`{field}` must not be empty"))),
        Some(text) => Ok(text),
        None => Err(shared::fields::invalid_value(field, "a string", value)),
    }
}

/// Returns the pooling type for embeddings of whole texts.
///
/// # Errors
/// 501 if the server has no embeddings; 400 if it has only embeddings of tokens.
pub(crate) fn text_pooling(loaded: &Loaded) -> Result<Pooling, ApiError> {
    let pooling = loaded.encoder().embeddings().map_err(unavailable)?;
    if pooling == Pooling::None {
        return Err(ApiError::bad_request(
            "the server runs with --pooling none, which has no embedding for a whole text; use /embeddings, or start the server \
             with --pooling mean, cls or last",
        ));
    }
    Ok(pooling)
}

/// Returns the 501 error for embeddings or scores that the model or server does not provide. Its detail states the
/// requirements.
pub(crate) fn unavailable(reason: &EncoderUnavailable) -> ApiError {
    ApiError::not_supported(reason.to_string())
}

fn encode_error(error: &EncodeError, field_path: &dyn Fn(usize) -> String) -> ApiError {
    match *error {
        EncodeError::Empty { index } => {
            ApiError::invalid(field_path(index), format!("`{}` must not be empty", field_path(index)))
        }
        EncodeError::TooLong { index, tokens, max } => {
            let field_path = field_path(index);
            let detail = format!(
                "`{field_path}` has {tokens} tokens and is too large: this model's maximum context length is {max} \
                 tokens"
            );
            ApiError::invalid(field_path, detail).exceeds_context(tokens, max)
        }
        EncodeError::UnknownToken { index, .. } => ApiError::invalid(field_path(index), error.to_string()),
        EncodeError::Busy { .. } => ApiError::new(ErrorKind::Busy, error.to_string()).retry_after(1),
        EncodeError::Stopped => ApiError::unavailable(error.to_string()),
        EncodeError::Failed(_) => ApiError::internal(error),
    }
}

/// Scales a vector to length 1 in the `norm`-norm; 0 scales the largest absolute value to 32760; a negative norm leaves
/// the vector unchanged.
pub(crate) fn normalize(vector: &mut [f32], norm: i64) {
    let size = |power: i32| vector.iter().map(|&value| f64::from(value.abs()).powi(power)).sum::<f64>();
    let length = match norm {
        ..0 => return,
        0 => vector.iter().fold(0.0, |max, &value| f64::max(max, f64::from(value.abs()))) / 32_760.0,
        2 => size(2).sqrt(),
        norm => size(norm as i32).powf(1.0 / norm as f64),
    };
    let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
    vector.iter_mut().for_each(|value| *value = (f64::from(*value) * scale) as f32);
}

#[cfg(test)]
mod tests {
    use super::normalize;

    #[test]
    fn embd_normalize_selects_norm() {
        let normalized = |norm| {
            let mut vector = [3.0, -4.0];
            normalize(&mut vector, norm);
            vector
        };
        assert_eq!(normalized(-1), [3.0, -4.0]);
        assert_eq!(normalized(0), [24_570.0, -32_760.0]);
        assert_eq!(normalized(1), [3.0 / 7.0, -4.0 / 7.0]);
        assert_eq!(normalized(2), [0.6, -0.8]);
        let mut nothing = [0.0, 0.0];
        normalize(&mut nothing, 2);
        assert_eq!(nothing, [0.0, 0.0]);
    }
}
