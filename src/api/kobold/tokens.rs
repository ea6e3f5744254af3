//! `/api/extra/tokencount` and `/api/extra/detokenize`.

use super::error::KoboldError;
use super::request::{KoboldDetokenizeRequest, KoboldTokenCountRequest};
use crate::api::shared::attention;
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

/// The tokens of a text.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldTokensResponse {
    /// Number of tokens.
    value: usize,
    /// Ids of the tokens.
    #[schema(value_type = Vec<i32>)]
    ids: Vec<TokenId>,
}

/// The text of tokens.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct KoboldTextResponse {
    /// The text.
    result: String,
    /// Always true.
    success: bool,
}

/// Tokenizes `prompt`. `special` (default true) adds the BOS token if the model uses one.
#[utoipa::path(post, path = "/api/extra/tokencount", tag = "KoboldCPP",
    request_body(content = KoboldTokenCountRequest, content_type = "application/json"),
    responses((status = 200, body = KoboldTokensResponse),
              (status = 400, description = "A field is invalid; the message names it")))]
pub(super) async fn count(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<KoboldTokensResponse>, KoboldError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let text =
        fields.text("prompt")?.ok_or_else(|| ApiError::invalid("prompt", "`prompt` is missing; send a string"))?;
    let special = fields.flag("special")?.unwrap_or(true);
    let loaded = app.get_or_load(fields.text("model")?).await?;
    let ids =
        parameters::encode(loaded.vocabulary(), text, TokenizeOptions { add_special: special, parse_special: true });
    Ok(Json(KoboldTokensResponse { value: ids.len(), ids }))
}

/// Returns the text of `ids`.
#[utoipa::path(post, path = "/api/extra/detokenize", tag = "KoboldCPP",
    request_body(content = KoboldDetokenizeRequest, content_type = "application/json"),
    responses((status = 200, body = KoboldTextResponse),
              (status = 400, description = "A field is invalid; the message names it")))]
pub(super) async fn text(body: Result<ModelBody, ApiError>) -> Result<Json<KoboldTextResponse>, KoboldError> {
    let ModelBody { body, loaded, .. } = body?;
    let fields = Fields::new(&body)?;
    let ids = attention::token_ids(fields, "ids", loaded.vocabulary())?
        .ok_or_else(|| ApiError::invalid("ids", "`ids` is missing; send a list of token ids"))?;
    Ok(Json(KoboldTextResponse { result: loaded.vocabulary().decode(&ids), success: true }))
}
