//! `/api/v1/hidden-states`: the hidden states of texts after the layers of a model.

use crate::api::shared::encoding::{self, EncodedInputs, EncoderUsage, InputField, is_list, to_base64};
use crate::api::shared::fields::invalid_value;
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::model::llama::{EncoderOutput, LayerSet};
use crate::server::extract::Json;
use crate::server::{ApiError, App, LoadedModel, Problem};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Maximum values of a response: 16 MiB of 32-bit floats.
const MAX_VALUES: usize = 4 << 20;

/// Texts, and the layers whose hidden states are returned.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HiddenStatesRequest {
    /// A string, token ids, `{prompt_string}`, or a list of these.
    input: Value,
    /// Name of the model; default is the default model.
    model: Option<String>,
    /// Layers, from 0; negative numbers count from the last layer, which is -1.
    #[serde(default = "last_layer")]
    #[schema(default = json!([-1]), min_items = 1)]
    layers: Vec<i64>,
    /// Tokens whose states are returned.
    #[serde(default)]
    tokens: SelectedTokens,
    /// Encoding of the states.
    #[serde(default)]
    encoding_format: EncodingFormat,
}

/// Tokens whose states are returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum SelectedTokens {
    /// All tokens of the input.
    #[default]
    All,
    /// Only the last token.
    Last,
}

/// Encoding of numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum EncodingFormat {
    /// Nested lists of numbers.
    #[default]
    Float,
    /// Base64 of little-endian 32-bit floats.
    Base64,
}

/// Hidden states of texts.
#[derive(Debug, Serialize, ToSchema)]
pub struct HiddenStatesResponse {
    /// Name of the model.
    model: String,
    /// The layers, from 0, in ascending order.
    layers: Vec<u16>,
    /// Number of values of a state.
    width: usize,
    /// One entry for each input.
    inputs: Vec<InputStates>,
    usage: EncoderUsage,
}

/// Hidden states of one input.
#[derive(Debug, Serialize, ToSchema)]
struct InputStates {
    /// Token ids of the input, including those that the tokenizer adds.
    tokens: Vec<TokenId>,
    /// Extents of `states`: tokens, layers, width.
    shape: [usize; 3],
    /// The states, as `[token][layer][value]`.
    states: States,
}

/// Numbers as `[token][layer][value]`, or base64 of little-endian 32-bit floats in this order.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum States {
    Float(Vec<Vec<Vec<f32>>>),
    Base64(String),
}

fn last_layer() -> Vec<i64> {
    vec![-1]
}

/// Returns the hidden states of texts: for each token and layer, the vector that the next layer reads. The default LoRA
/// adapters and control vectors of the server are applied. Nothing is generated or recorded.
#[utoipa::path(post, path = "/api/v1/hidden-states", tag = "runs", request_body = HiddenStatesRequest, responses(
    (status = 200, body = HiddenStatesResponse),
    (status = 400, body = Problem, description = "A field is invalid, an input is too long, or the response would be too large"),
    (status = 404, body = Problem, description = "Unknown model"),
    (status = 501, body = Problem, description = "The server was started without `--embedding`, or the model has no hidden states")))]
pub async fn compute(State(app): State<App>, Json(request): Json<HiddenStatesRequest>) -> Result<Response, ApiError> {
    let HiddenStatesRequest { input, model, layers, tokens: selected, encoding_format } = request;
    let loaded = app.get_or_load(model.as_deref()).await?;
    loaded.encoder().embeddings().map_err(encoding::unavailable)?;
    let layers = resolve_layers(&layers, &loaded)?;
    let set: LayerSet = layers.iter().copied().collect();
    let layers: Vec<u16> = (0..u16::MAX).filter(|&layer| set.contains(layer)).collect();
    let width = loaded.model().card().embedding as usize;
    let field = InputField::new(&loaded, "input", is_list(&input));
    let tokenize = move |vocabulary: &Vocabulary| encoding::inputs(&input, field, vocabulary);
    let inputs = encoding::tokenize_blocking(&loaded, tokenize).await?;
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    let values = tokens.saturating_mul(layers.len() * width);
    if values > MAX_VALUES {
        let detail = format!(
            "`input` and `layers` must give at most {MAX_VALUES} values, got {tokens} tokens x {} layers x {width} = {values}; send fewer texts or layers",
            layers.len()
        );
        return Err(ApiError::invalid("input", detail));
    }
    let output = EncoderOutput::HiddenStates(set);
    let encoded = encoding::encode_inputs(&loaded, field, output, inputs.clone()).await?;
    let EncodedInputs { vectors, usage } = encoded;
    let model = loaded.name().to_owned();
    // Millions of numbers would delay the other requests of an asynchronous thread.
    let write = move || {
        let to_states =
            |(tokens, values)| InputStates::new(tokens, values, [layers.len(), width], selected, encoding_format);
        let inputs = inputs.into_iter().zip(vectors).map(to_states).collect();
        serde_json::to_vec(&HiddenStatesResponse { model, layers, width, inputs, usage }).map_err(ApiError::internal)
    };
    let body = tokio::task::spawn_blocking(write).await.map_err(ApiError::internal)??;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

impl InputStates {
    /// Creates the states of an input from all its `values`, which have these numbers of layers and of values per state.
    fn new(
        tokens: Vec<TokenId>,
        mut values: Vec<f32>,
        [layers, width]: [usize; 2],
        selected: SelectedTokens,
        encoding_format: EncodingFormat,
    ) -> Self {
        let of_token = layers * width;
        if selected == SelectedTokens::Last {
            values.drain(..values.len().saturating_sub(of_token));
        }
        let shape = [values.len() / of_token, layers, width];
        let rows = |values: &[f32]| values.chunks_exact(width).map(<[f32]>::to_vec).collect();
        let states = match encoding_format {
            EncodingFormat::Float => States::Float(values.chunks_exact(of_token).map(rows).collect()),
            EncodingFormat::Base64 => States::Base64(to_base64(&values)),
        };
        Self { tokens, shape, states }
    }
}

/// Returns the layers counted from 0.
fn resolve_layers(layers: &[i64], loaded: &LoadedModel) -> Result<Vec<u16>, ApiError> {
    let count = i64::from(loaded.model().card().layers);
    let resolve = |(index, &layer): (usize, &i64)| {
        let from_start = if layer < 0 { layer + count } else { layer };
        u16::try_from(from_start).ok().filter(|_| from_start < count).ok_or_else(|| {
            let expected = format!("a layer of the model: 0 to {}, or -{count} to -1", count - 1);
            invalid_value(&format!("layers[{index}]"), &expected, &layer.into())
        })
    };
    if layers.is_empty() {
        return Err(ApiError::invalid("layers", "`layers` must not be empty"));
    }
    layers.iter().enumerate().map(resolve).collect()
}
