//! Text to tokens and back, without a run.

use crate::api::wire::fields::{Fields, wrong};
use crate::api::wire::{self, parameters};
use crate::api::{ApiError, App, LlamaError};
use crate::events::TokenId;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(tokenize)).routes(routes!(detokenize))
}

/// The tokens of a text: `content`, with `add_special` the tokens that the model puts around a prompt, with
/// `parse_special` (which is the default) literals of special tokens read as those, and with `with_pieces` the text of each.
#[utoipa::path(post, path = "/tokenize", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{tokens: [id, …]}`, or with `with_pieces` `[{id, piece}, …]`, where a piece \
                                            that is not UTF-8 is a list of bytes"),
              (status = 400, description = "A field is wrong; the message names it")))]
async fn tokenize(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, LlamaError> {
    let body = wire::json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let vocabulary = loaded.vocabulary();
    let add_special = fields.flag("add_special")?.unwrap_or(false);
    let parse_special = fields.flag("parse_special")?.unwrap_or(true);
    let tokens: Vec<TokenId> = match fields.get("content") {
        None => Vec::new(),
        Some(content) => parameters::text_or_tokens(content, "content", vocabulary, add_special, parse_special)?,
    };
    if !fields.flag("with_pieces")?.unwrap_or(false) {
        return Ok(Json(json!({ "tokens": tokens })));
    }
    let piece = |token| match std::str::from_utf8(vocabulary.piece(token)) {
        Ok(text) => Value::from(text),
        Err(_) => Value::from(vocabulary.piece(token)),
    };
    let pieces: Vec<Value> = tokens.iter().map(|&id| json!({ "id": id, "piece": piece(id) })).collect();
    Ok(Json(json!({ "tokens": pieces })))
}

/// The text of a list of `tokens`.
#[utoipa::path(post, path = "/detokenize", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{content: text}`"),
              (status = 400, description = "A field is wrong; the message names it")))]
async fn detokenize(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, LlamaError> {
    let body = wire::json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let vocabulary = loaded.vocabulary();
    let expected = format!("a list of token ids below {}", vocabulary.len());
    let tokens: Vec<TokenId> = fields
        .list("tokens")?
        .into_iter()
        .flatten()
        .map(|id| parameters::token(id, vocabulary).ok_or_else(|| wrong("tokens", &expected, id)))
        .collect::<Result<_, ApiError>>()?;
    Ok(Json(json!({ "content": vocabulary.decode(&tokens) })))
}
