//! Tokenization and detokenization without a run.

use super::request::ModelParams;
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::{ModelBody, parameters};
use crate::events::TokenId;
use crate::model::TokenizeOptions;
use crate::server::extract::Query;
use crate::server::{ApiError, App};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(tokenize)).routes(routes!(detokenize)).routes(routes!(tokenizer_info))
}

/// A text to tokenize.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct TokenizeBody {
    /// A string, or a list of strings and token ids. Also `prompt`, which selects the format of vLLM.
    #[schema(value_type = Value)]
    content: Value,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
    /// Add the BOS token if the model uses one.
    #[schema(default = false)]
    add_special: Option<bool>,
    /// Recognize special tokens in the text.
    #[schema(default = true)]
    parse_special: Option<bool>,
    /// Return the text of each token.
    #[schema(default = false)]
    with_pieces: Option<bool>,
}

/// Tokens to convert to text.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct DetokenizeBody {
    /// Token ids.
    tokens: Vec<i32>,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
}

/// The tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum TokenizeResponse {
    /// vLLM's format.
    Vllm {
        /// Number of tokens.
        count: usize,
        /// Context of a slot in tokens.
        max_model_len: u32,
        /// Ids of the tokens.
        #[schema(value_type = Vec<i32>)]
        tokens: Vec<TokenId>,
    },
    /// llama-server's format.
    Ids {
        /// Ids of the tokens.
        #[schema(value_type = Vec<i32>)]
        tokens: Vec<TokenId>,
    },
    /// llama-server's format with `with_pieces`.
    Pieces {
        /// Ids and texts.
        tokens: Vec<TokenPiece>,
    },
}

/// A token with its text.
#[derive(Debug, Serialize, ToSchema)]
struct TokenPiece {
    #[schema(value_type = i32)]
    id: TokenId,
    piece: TokenText,
}

/// The text of a token, or its bytes if they are not UTF-8.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum TokenText {
    /// Text.
    Text(String),
    /// Bytes.
    Bytes(Vec<u8>),
}

/// The text of tokens.
#[derive(Debug, Serialize, ToSchema)]
struct DetokenizeResponse {
    /// The text.
    content: String,
    /// The same text under vLLM's name.
    prompt: String,
}

/// Properties of the tokenizer in vLLM's format.
#[derive(Debug, Serialize, ToSchema)]
struct TokenizerInfoResponse {
    tokenizer_class: &'static str,
    bos_token: Option<String>,
    eos_token: Option<String>,
    pad_token: Option<String>,
    add_bos_token: bool,
    /// Context of a slot in tokens.
    model_max_length: u32,
    chat_template: Option<String>,
}

/// Tokenizes `content`. `add_special` adds the special tokens around a prompt that the model uses; `parse_special`
/// (default true) parses special tokens written as text; `with_pieces` adds the text of each token. With `prompt`
/// instead of `content` the format is vLLM's: `add_special_tokens` defaults to true, and the response has a `count`.
#[utoipa::path(post, path = "/tokenize", tag = "llama-server",
    request_body(content = TokenizeBody, content_type = "application/json"),
    responses((status = 200, body = TokenizeResponse),
              (status = 400, description = "A field is invalid; the message names it")))]
async fn tokenize(body: Result<ModelBody, ApiError>) -> Result<Json<TokenizeResponse>, LlamaError> {
    let ModelBody { body, loaded, .. } = body?;
    let fields = Fields::new(&body)?;
    let vocabulary = loaded.vocabulary();
    if let (None, Some(prompt)) = (fields.get("content"), fields.get("prompt")) {
        let add_special = fields.flag("add_special_tokens")?.unwrap_or(true);
        let options = TokenizeOptions { add_special, parse_special: true };
        let tokens = parameters::encode_prompt(prompt, "prompt", vocabulary, options)?;
        let context = loaded.engine().context_per_slot();
        return Ok(Json(TokenizeResponse::Vllm { count: tokens.len(), max_model_len: context, tokens }));
    }
    let add_special = fields.flag("add_special")?.unwrap_or(false);
    let parse_special = fields.flag("parse_special")?.unwrap_or(true);
    let options = TokenizeOptions { add_special, parse_special };
    let tokens: Vec<TokenId> = match fields.get("content") {
        None => Vec::new(),
        Some(content) => parameters::encode_prompt(content, "content", vocabulary, options)?,
    };
    if !fields.flag("with_pieces")?.unwrap_or(false) {
        return Ok(Json(TokenizeResponse::Ids { tokens }));
    }
    let piece = |token| match std::str::from_utf8(vocabulary.piece(token)) {
        Ok(text) => TokenText::Text(text.to_owned()),
        Err(_) => TokenText::Bytes(vocabulary.piece(token).to_owned()),
    };
    let tokens = tokens.into_iter().map(|id| TokenPiece { id, piece: piece(id) }).collect();
    Ok(Json(TokenizeResponse::Pieces { tokens }))
}

/// Returns the text of `tokens`, under llama-server's field name and under vLLM's.
#[utoipa::path(post, path = "/detokenize", tag = "llama-server",
    request_body(content = DetokenizeBody, content_type = "application/json"),
    responses((status = 200, body = DetokenizeResponse),
              (status = 400, description = "A field is invalid; the message names it")))]
async fn detokenize(body: Result<ModelBody, ApiError>) -> Result<Json<DetokenizeResponse>, LlamaError> {
    let ModelBody { body, loaded, .. } = body?;
    let fields = Fields::new(&body)?;
    let vocabulary = loaded.vocabulary();
    let expected = format!("a list of token ids below {}", vocabulary.len());
    let tokens: Vec<TokenId> = fields
        .list("tokens")?
        .into_iter()
        .flatten()
        .map(|id| parameters::token(id, vocabulary).ok_or_else(|| invalid_value("tokens", &expected, id)))
        .collect::<Result<_, ApiError>>()?;
    let text = vocabulary.decode(&tokens);
    Ok(Json(DetokenizeResponse { content: text.clone(), prompt: text }))
}

/// Returns the properties of the tokenizer in vLLM's format, which lm-evaluation-harness requests.
#[utoipa::path(get, path = "/tokenizer_info", tag = "llama-server",
    params(("model" = Option<String>, Query, description = "Name of the model; default is the server's default model")),
    responses((status = 200, body = TokenizerInfoResponse)))]
async fn tokenizer_info(
    State(app): State<App>,
    params: Result<Query<ModelParams>, ApiError>,
) -> Result<Json<TokenizerInfoResponse>, LlamaError> {
    let Query(params) = params?;
    let loaded = app.get_or_wake(params.model.as_deref()).await?;
    let (vocabulary, card) = (loaded.vocabulary(), loaded.model().card());
    let special = vocabulary.special();
    let text =
        |token: Option<TokenId>| token.map(|token| String::from_utf8_lossy(vocabulary.piece(token)).into_owned());
    Ok(Json(TokenizerInfoResponse {
        tokenizer_class: card.tokenizer,
        bos_token: text(special.bos),
        eos_token: text(special.eos),
        pad_token: text(special.pad),
        add_bos_token: special.add_bos,
        model_max_length: loaded.engine().context_per_slot(),
        chat_template: loaded.template().ok().map(|template| template.source().to_owned()),
    }))
}
