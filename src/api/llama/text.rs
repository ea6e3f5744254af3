//! Tokenization and detokenization without a run.

use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::{self, parameters};
use crate::events::TokenId;
use crate::server::{ApiError, App};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Query, State};
use serde::Deserialize;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The query parameter that selects a model.
#[derive(Debug, Deserialize)]
struct ModelParams {
    model: Option<String>,
}

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(tokenize)).routes(routes!(detokenize)).routes(routes!(tokenizer_info))
}

/// Tokenizes `content`. `add_special` adds the tokens that the model puts around a prompt; `parse_special` (default
/// true) parses special tokens written as text; `with_pieces` adds the text of each token. With `prompt` instead of
/// `content` the format is vLLM's: `add_special_tokens` defaults to true, and the response has a `count`.
#[utoipa::path(post, path = "/tokenize", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{tokens: [id, …]}`, or with `with_pieces` `[{id, piece}, …]`, where a piece \
                                            that is not UTF-8 is a list of bytes"),
              (status = 400, description = "A field is invalid; the message names it")))]
async fn tokenize(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, LlamaError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let vocabulary = loaded.vocabulary();
    if let (None, Some(prompt)) = (fields.get("content"), fields.get("prompt")) {
        let add_special = fields.flag("add_special_tokens")?.unwrap_or(true);
        let tokens = parameters::encode_prompt(prompt, "prompt", vocabulary, add_special, true)?;
        let context = loaded.engine().context_per_slot();
        return Ok(Json(json!({ "count": tokens.len(), "max_model_len": context, "tokens": tokens })));
    }
    let add_special = fields.flag("add_special")?.unwrap_or(false);
    let parse_special = fields.flag("parse_special")?.unwrap_or(true);
    let tokens: Vec<TokenId> = match fields.get("content") {
        None => Vec::new(),
        Some(content) => parameters::encode_prompt(content, "content", vocabulary, add_special, parse_special)?,
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

/// Returns the text of `tokens`, under llama-server's field name and under vLLM's.
#[utoipa::path(post, path = "/detokenize", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{content: text, prompt: text}`"),
              (status = 400, description = "A field is invalid; the message names it")))]
async fn detokenize(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, LlamaError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let vocabulary = loaded.vocabulary();
    let expected = format!("a list of token ids below {}", vocabulary.len());
    let tokens: Vec<TokenId> = fields
        .list("tokens")?
        .into_iter()
        .flatten()
        .map(|id| parameters::token(id, vocabulary).ok_or_else(|| invalid_value("tokens", &expected, id)))
        .collect::<Result<_, ApiError>>()?;
    let text = vocabulary.decode(&tokens);
    Ok(Json(json!({ "content": text, "prompt": text })))
}

/// Returns tokenizer properties in vLLM's format; lm-evaluation-harness requests them.
#[utoipa::path(get, path = "/tokenizer_info", tag = "llama-server",
    params(("model" = Option<String>, Query, description = "Name of the model; default is the server's default model")),
    responses((status = 200, description = "`{tokenizer_class, bos_token, eos_token, pad_token, add_bos_token, model_max_length, \
                                            chat_template}`")))]
async fn tokenizer_info(State(app): State<App>, Query(params): Query<ModelParams>) -> Result<Json<Value>, LlamaError> {
    let loaded = app.loaded_now(params.model.as_deref()).await?;
    let (vocabulary, card) = (loaded.vocabulary(), loaded.model().card());
    let special = vocabulary.special();
    let text =
        |token: Option<TokenId>| token.map(|token| String::from_utf8_lossy(vocabulary.piece(token)).into_owned());
    Ok(Json(json!({
        "tokenizer_class": card.tokenizer,
        "bos_token": text(special.bos),
        "eos_token": text(special.eos),
        "pad_token": text(special.pad),
        "add_bos_token": special.add_bos,
        "model_max_length": loaded.engine().context_per_slot(),
        "chat_template": loaded.template().ok().map(crate::model::chat::ChatTemplate::source),
    })))
}
