//! Embeddings in Ollama's format.

use super::error::OllamaError;
use super::request;
use super::response::nanoseconds;
use crate::api::shared::encoding::{self, EncodedInputs, InputField};
use crate::api::shared::fields::invalid_value;
use crate::api::shared::{self, Fields, parameters};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::model::llama::EncoderOutput;
use crate::server::{ApiError, App, LoadedModel};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(embed)).routes(routes!(embeddings))
}

/// The body of an embedding request.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct OllamaEmbedBody {
    /// Name of the model.
    model: String,
    /// A text or a list of texts; an empty text or list has no embeddings.
    #[schema(value_type = Value)]
    input: Value,
    /// Shorten inputs that do not fit into the model's context; false rejects them.
    #[schema(default = true)]
    truncate: Option<bool>,
    /// Number of values of each embedding. The first values are returned, scaled to length 1 again.
    dimensions: Option<u32>,
}

/// Embeddings of length 1.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaEmbedResponse {
    /// Name of the model.
    model: String,
    /// One embedding for each input.
    embeddings: Vec<Vec<f32>>,
    /// Duration of the request in nanoseconds.
    total_duration: u64,
    /// Time spent loading the model in nanoseconds.
    load_duration: u64,
    /// Tokens of all inputs.
    prompt_eval_count: usize,
}

/// The body of a request for one embedding.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct OllamaEmbeddingsBody {
    /// Name of the model.
    model: String,
    /// The text.
    prompt: String,
}

/// An embedding, not scaled.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaEmbeddingsResponse {
    embedding: Vec<f32>,
}

/// Embeds a text or a list of texts.
#[utoipa::path(post, path = "/api/embed", tag = "ollama",
    request_body(content = OllamaEmbedBody, content_type = "application/json"),
    responses((status = 200, body = OllamaEmbedResponse),
              (status = 400, body = super::error::OllamaErrorResponse, description = "A field is invalid; the message names it"),
              (status = 501, body = super::error::OllamaErrorResponse, description = "The server was started without `--embedding`")))]
async fn embed(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<OllamaEmbedResponse>, OllamaError> {
    let started = Instant::now();
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.get_or_load(request::model(fields)?).await?;
    let load = started.elapsed();
    let input = fields.get("input").unwrap_or(&Value::Null);
    let text = |value: &Value| {
        value.as_str().map(str::to_owned).ok_or_else(|| invalid_value("input", "a string or a list of strings", value))
    };
    let (texts, is_list) = match input {
        Value::Array(list) if !list.is_empty() => {
            (encoding::check_inputs("input", list)?.iter().map(text).collect::<Result<_, _>>()?, true)
        }
        Value::Null | Value::Array(_) => (Vec::new(), false),
        Value::String(empty) if empty.is_empty() => (Vec::new(), false),
        one => (vec![text(one)?], false),
    };
    let dimensions = fields.integer("dimensions", 1..=1 << 20)?.map(|count| count as usize);
    let truncates = fields.flag("truncate")?.unwrap_or(true);
    let (mut vectors, prompt_tokens) = if texts.is_empty() {
        (Vec::new(), 0)
    } else {
        let EncodedInputs { vectors, usage } = encode(&loaded, "input", is_list, texts, truncates).await?;
        (vectors, usage.prompt_tokens)
    };
    for vector in &mut vectors {
        vector.truncate(dimensions.unwrap_or(usize::MAX));
        encoding::normalize(vector, 2);
    }
    Ok(Json(OllamaEmbedResponse {
        model: loaded.name().to_owned(),
        embeddings: vectors,
        total_duration: nanoseconds(started.elapsed()),
        load_duration: nanoseconds(load),
        prompt_eval_count: prompt_tokens,
    }))
}

/// Embeds one text. Ollama has replaced this route with `/api/embed`.
#[utoipa::path(post, path = "/api/embeddings", tag = "ollama",
    request_body(content = OllamaEmbeddingsBody, content_type = "application/json"),
    responses((status = 200, body = OllamaEmbeddingsResponse),
              (status = 400, body = super::error::OllamaErrorResponse, description = "A field is invalid; the message names it"),
              (status = 501, body = super::error::OllamaErrorResponse, description = "The server was started without `--embedding`")))]
async fn embeddings(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<OllamaEmbeddingsResponse>, OllamaError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.get_or_load(request::model(fields)?).await?;
    let prompt =
        fields.text("prompt")?.ok_or_else(|| ApiError::invalid("prompt", "`prompt` is missing; send a string"))?;
    let EncodedInputs { vectors, .. } = encode(&loaded, "prompt", false, vec![prompt.to_owned()], true).await?;
    Ok(Json(OllamaEmbeddingsResponse { embedding: vectors.into_iter().next().unwrap_or_default() }))
}

/// Embeds texts. If `truncates` is true, texts that do not fit are shortened.
async fn encode(
    loaded: &LoadedModel,
    field: &'static str,
    is_list: bool,
    texts: Vec<String>,
    truncates: bool,
) -> Result<EncodedInputs, ApiError> {
    let pooling = encoding::text_pooling(loaded)?;
    let field = InputField::new(loaded, field, is_list);
    let max_tokens = if truncates { loaded.encoder().max_input_tokens() } else { usize::MAX };
    let tokenize = move |vocabulary: &Vocabulary| {
        let tokens = |text: &String| {
            let tokens = parameters::or_start_token(vocabulary.encode_prompt(text), vocabulary);
            Ok(shorten(tokens, max_tokens, vocabulary))
        };
        field.collect(texts.iter().map(tokens))
    };
    encoding::encode(loaded, field, EncoderOutput::Embedding(pooling), tokenize).await
}

/// Removes tokens from the end, but keeps a control token that ends the text.
fn shorten(mut tokens: Vec<TokenId>, max: usize, vocabulary: &Vocabulary) -> Vec<TokenId> {
    if tokens.len() <= max {
        return tokens;
    }
    let last = tokens.last().copied().filter(|token| vocabulary.is_control(*token));
    tokens.truncate(max);
    if let (Some(last), Some(end)) = (last, tokens.last_mut()) {
        *end = last;
    }
    tokens
}
