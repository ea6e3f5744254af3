//! Code shared by embeddings, reranking, classification and hidden states.

use super::fields::{invalid_value, is_null_or_empty};
use super::{Fields, parameters};
use crate::engine::encoder::{EncodeError, EncoderUnavailable};
use crate::events::TokenId;
use crate::model::llama::{EncoderOutput, Pooling};
use crate::model::{TokenizeOptions, Vocabulary};
use crate::server::{ApiError, ErrorKind, LoadedModel};
use base64::Engine as _;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;
use utoipa::ToSchema;

/// Expected form of an input, for errors.
pub(crate) const INPUT: &str = "a string, a list of token ids, {\"prompt_string\": text}, or a list of these";

/// Maximum inputs of one request.
const MAX_INPUTS: usize = 16_384;

/// Maximum tokens of all inputs of one request.
const MAX_TOKENS: usize = 16 << 20;

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

/// The field with the inputs of a request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InputField {
    name: &'static str,
    /// True if the field is a list, so that errors name an index.
    is_list: bool,
    max_input_tokens: usize,
}

impl InputField {
    pub(crate) fn new(loaded: &LoadedModel, name: &'static str, is_list: bool) -> Self {
        Self { name, is_list, max_input_tokens: loaded.encoder().max_input_tokens() }
    }

    fn path(self, index: usize) -> String {
        let Self { name, is_list, .. } = self;
        if is_list { format!("{name}[{index}]") } else { name.to_owned() }
    }

    /// Collects the tokens of the inputs.
    ///
    /// # Errors
    /// The first error of `inputs`, or status 400 for the first input that exceeds a limit. Later inputs are not
    /// tokenized.
    pub(crate) fn collect(
        self,
        inputs: impl Iterator<Item = Result<Vec<TokenId>, ApiError>>,
    ) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let mut collected = Vec::new();
        let mut total = 0;
        for (index, input) in inputs.enumerate() {
            let mut input = input?;
            if input.len() > self.max_input_tokens {
                let error = EncodeError::TooLong { index, tokens: input.len(), max: self.max_input_tokens };
                return Err(encode_error(&error, self));
            }
            total += input.len();
            if total > MAX_TOKENS {
                let detail = format!(
                    "`{}` must have at most {MAX_TOKENS} tokens in total, the first {} inputs have {total}; send several requests",
                    self.name,
                    index + 1
                );
                return Err(ApiError::invalid(self.name, detail));
            }
            // A tokenizer may reserve a token for each byte.
            input.shrink_to_fit();
            collected.push(input);
        }
        Ok(collected)
    }
}

/// Tokenizes on a blocking thread and encodes the inputs.
pub(crate) async fn encode(
    loaded: &LoadedModel,
    field: InputField,
    output: EncoderOutput,
    tokenize: impl FnOnce(&Vocabulary) -> Result<Vec<Vec<TokenId>>, ApiError> + Send + 'static,
) -> Result<EncodedInputs, ApiError> {
    let inputs = tokenize_blocking(loaded, tokenize).await?;
    encode_inputs(loaded, field, output, inputs).await
}

/// Tokenizes on a blocking thread.
pub(crate) async fn tokenize_blocking(
    loaded: &LoadedModel,
    tokenize: impl FnOnce(&Vocabulary) -> Result<Vec<Vec<TokenId>>, ApiError> + Send + 'static,
) -> Result<Vec<Vec<TokenId>>, ApiError> {
    let vocabulary = Arc::clone(loaded.vocabulary());
    let tokenized = tokio::task::spawn_blocking(move || tokenize(&vocabulary)).await;
    tokenized.map_err(|_| ApiError::internal("the tokenizer panicked"))?
}

/// Encodes the inputs of a field.
pub(crate) async fn encode_inputs(
    loaded: &LoadedModel,
    field: InputField,
    output: EncoderOutput,
    inputs: Vec<Vec<TokenId>>,
) -> Result<EncodedInputs, ApiError> {
    let prompt_tokens = inputs.iter().map(Vec::len).sum();
    let vectors = loaded.encoder().encode(inputs, output).await.map_err(|error| encode_error(&error, field))?;
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
        None => Err(invalid_value(field, "a string", value)),
    }
}

/// Returns the pooling type for embeddings of whole texts.
///
/// # Errors
/// 501 if the server has no embeddings; 400 if it has only embeddings of tokens.
pub(crate) fn text_pooling(loaded: &LoadedModel) -> Result<Pooling, ApiError> {
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

fn encode_error(error: &EncodeError, field: InputField) -> ApiError {
    match *error {
        EncodeError::Empty { index } => {
            ApiError::invalid(field.path(index), format!("`{}` must not be empty", field.path(index)))
        }
        EncodeError::TooLong { index, tokens, max } => {
            let field_path = field.path(index);
            let detail = format!(
                "`{field_path}` has {tokens} tokens and is too large: this model's maximum context length is {max} \
                 tokens"
            );
            ApiError::invalid(field_path, detail).exceeds_context(tokens, max)
        }
        EncodeError::UnknownToken { index, .. } => ApiError::invalid(field.path(index), error.to_string()),
        EncodeError::Busy { .. } => ApiError::new(ErrorKind::Busy, error.to_string()).retry_after(1),
        EncodeError::HiddenStates(_) => ApiError::not_supported(error.to_string()),
        EncodeError::Stopped => ApiError::unavailable(error.to_string()),
        EncodeError::Failed(_) => ApiError::internal(error),
    }
}

/// Returns true if the field `encoding_format` is `base64`, and false if it is `float` or absent.
pub(crate) fn is_base64(fields: Fields<'_>) -> Result<bool, ApiError> {
    match fields.text("encoding_format")? {
        None | Some("float") => Ok(false),
        Some("base64") => Ok(true),
        Some(other) => Err(invalid_value("encoding_format", "\"float\" or \"base64\"", &other.into())),
    }
}

/// Returns true if a value contains several inputs. A list that contains a token id is one input.
pub(crate) fn is_list(value: &Value) -> bool {
    value.as_array().is_some_and(|list| !list.iter().any(Value::is_number))
}

/// Tokenizes the inputs in a field: a string, a list of token ids, an object with `prompt_string`, or a list of these.
pub(crate) fn inputs(value: &Value, field: InputField, vocabulary: &Vocabulary) -> Result<Vec<Vec<TokenId>>, ApiError> {
    match value {
        Value::Array(list) if field.is_list => {
            let inputs = check_inputs(field.name, list)?.iter().enumerate();
            field.collect(inputs.map(|(index, value)| input(value, &field.path(index), vocabulary)))
        }
        value => field.collect(std::iter::once_with(|| input(value, field.name, vocabulary))),
    }
}

fn input(value: &Value, field: &str, vocabulary: &Vocabulary) -> Result<Vec<TokenId>, ApiError> {
    match value {
        Value::String(text) => Ok(parameters::or_start_token(vocabulary.encode_prompt(text), vocabulary)),
        Value::Array(_) => parameters::encode_prompt(value, field, vocabulary, TokenizeOptions::PROMPT),
        Value::Object(object) => match (object.get("prompt_string"), object.get("content")) {
            (Some(text), _) if object.get("multimodal_data").is_none_or(is_null_or_empty) => {
                let text =
                    text.as_str().ok_or_else(|| invalid_value(&format!("{field}.prompt_string"), "a string", text))?;
                input(&text.into(), field, vocabulary)
            }
            (None, Some(Value::Array(parts))) => {
                let texts = parts.iter().map(|part| part["text"].as_str());
                let text: Option<String> = texts.collect();
                let text = text.ok_or_else(|| invalid_value(field, "text without images or sound", value))?;
                input(&text.into(), field, vocabulary)
            }
            _ => Err(invalid_value(field, INPUT, value)),
        },
        other => Err(invalid_value(field, INPUT, other)),
    }
}

/// Returns the base64 of the little-endian numbers.
pub(crate) fn to_base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    base64::engine::general_purpose::STANDARD.encode(bytes)
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
    use super::{ApiError, InputField, MAX_TOKENS, TokenId, normalize};

    const DOCUMENTS: InputField = InputField { name: "documents", is_list: true, max_input_tokens: 1 << 20 };

    /// Collects inputs with these lengths. Returns the result and the number of inputs that were tokenized.
    fn collect(field: InputField, lengths: &[usize]) -> (Result<Vec<Vec<TokenId>>, ApiError>, usize) {
        let mut tokenized = 0;
        let inputs = lengths.iter().map(|&length| {
            tokenized += 1;
            Ok(vec![0; length])
        });
        let collected = field.collect(inputs);
        (collected, tokenized)
    }

    #[test]
    fn inputs_are_tokenized_up_to_the_first_that_is_too_long() {
        let field = InputField { max_input_tokens: 8, ..DOCUMENTS };
        let (collected, tokenized) = collect(field, &[8, 9, 9]);
        assert_eq!(
            collected.unwrap_err().public_detail(),
            "`documents[1]` has 9 tokens and is too large: this model's maximum context length is 8 tokens"
        );
        assert_eq!(tokenized, 2);
        let (collected, _) = collect(field, &[8, 0, 3]);
        assert_eq!(collected.unwrap().iter().map(Vec::len).collect::<Vec<_>>(), [8, 0, 3]);
    }

    #[test]
    fn total_of_tokens_is_limited_before_all_inputs_are_tokenized() {
        let full = MAX_TOKENS / DOCUMENTS.max_input_tokens;
        let mut lengths = vec![DOCUMENTS.max_input_tokens; full];
        assert!(collect(DOCUMENTS, &lengths).0.is_ok());
        lengths.extend([1, 1]);
        let (collected, tokenized) = collect(DOCUMENTS, &lengths);
        assert_eq!(
            collected.unwrap_err().public_detail(),
            "`documents` must have at most 16777216 tokens in total, the first 17 inputs have 16777217; send several requests"
        );
        assert_eq!(tokenized, full + 1);
    }

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
