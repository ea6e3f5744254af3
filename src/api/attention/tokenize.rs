//! `/api/v1/tokenize` and `/api/v1/detokenize`. The content type of the body is ignored, so that a page can
//! send JSON as text without a CORS preflight.

use super::AttentionError;
use super::request::{DetokenizeAttention, TokenizeAttention};
use crate::api::shared::attention::request::token_ids;
use crate::api::shared::{self, Fields, ModelBody, parameters};
use crate::events::TokenId;
use crate::model::TokenizeOptions;
use crate::server::{ApiError, App};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde::Serialize;
use utoipa::ToSchema;

/// A token and its text.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizedToken {
    /// Id of the token.
    token_id: TokenId,
    /// Text of the token; for a special token its literal. Empty while a character is incomplete: its bytes are part of
    /// the next token's text.
    text: String,
}

/// A tokenized text.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenizedText {
    /// Ids with their texts.
    tokens: Vec<TokenizedToken>,
    /// Ids only.
    token_ids: Vec<TokenId>,
    /// Number of tokens.
    token_count: usize,
}

/// Detokenized text.
#[derive(Debug, Serialize, ToSchema)]
pub struct DetokenizedText {
    /// The text, with special tokens as their literals, without the space that some tokenizers add before a text.
    text: String,
}

/// Tokenizes `text`. Literals of special tokens become those tokens. `add_special_tokens` (default false) adds BOS and
/// EOS if the model uses them.
#[utoipa::path(post, path = "/api/v1/tokenize", tag = "attention",
    request_body(content = TokenizeAttention, content_type = "application/json"),
    responses(
        (status = 200, body = TokenizedText),
        (status = 400, description = "A field is invalid; the message names it. `NO_MODEL`: the model is not loaded, and \
            requests do not load it"),
        (status = 503, description = "`NO_MODEL`: no model is available, or it is being unloaded or could not be loaded"),
    ))]
pub(super) async fn tokenize(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<TokenizedText>, AttentionError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let text = fields.text("text")?.ok_or_else(|| ApiError::invalid("text", "`text` is missing; send a string"))?;
    let add_special = fields.flag("add_special_tokens")?.unwrap_or(false);
    let loaded = app.get_or_load(fields.text("model")?).await?;
    let vocabulary = loaded.vocabulary();
    let token_ids = parameters::encode(vocabulary, text, TokenizeOptions { add_special, parse_special: true });
    let texts = vocabulary.texts(&token_ids);
    let tokens = token_ids.iter().zip(texts).map(|(&token_id, text)| TokenizedToken { token_id, text }).collect();
    Ok(Json(TokenizedText { tokens, token_count: token_ids.len(), token_ids }))
}

/// Returns the text of `token_ids`. A space at the start of the text is dropped if the tokenizer adds one to texts.
#[utoipa::path(post, path = "/api/v1/detokenize", tag = "attention",
    request_body(content = DetokenizeAttention, content_type = "application/json"),
    responses(
        (status = 200, body = DetokenizedText),
        (status = 400, description = "`INVALID_TOKEN`: an id is not in the vocabulary. `NO_MODEL`: the model is not \
            loaded, and requests do not load it"),
        (status = 503, description = "`NO_MODEL`: no model is available, or it is being unloaded or could not be loaded"),
    ))]
pub(super) async fn detokenize(body: Result<ModelBody, ApiError>) -> Result<Json<DetokenizedText>, AttentionError> {
    let ModelBody { body, loaded, .. } = body?;
    let fields = Fields::new(&body)?;
    let tokens = token_ids(fields, "token_ids", loaded.vocabulary())?
        .ok_or_else(|| ApiError::invalid("token_ids", "`token_ids` is missing; send a list of token ids"))?;
    Ok(Json(DetokenizedText { text: loaded.vocabulary().decode_text(&tokens) }))
}
