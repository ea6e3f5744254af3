//! `/api/extra/tokencount` and `/api/extra/detokenize`.

use super::error::KoboldError;
use crate::api::shared::attention;
use crate::api::shared::{self, Fields};
use crate::server::{ApiError, App};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde_json::{Value, json};

/// Tokenizes `prompt`. `special` (default true) adds the BOS token if the model uses one.
#[utoipa::path(post, path = "/api/extra/tokencount", tag = "KoboldCPP",
    request_body(content = Value, content_type = "application/json", description = "`{prompt, special?}`"),
    responses((status = 200, description = "`{value: number of tokens, ids: [token ids]}`"),
              (status = 400, description = "A field is invalid; the message names it")))]
pub(super) async fn count(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, KoboldError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let text =
        fields.text("prompt")?.ok_or_else(|| ApiError::invalid("prompt", "`prompt` is missing; send a string"))?;
    let special = fields.flag("special")?.unwrap_or(true);
    let loaded = app.loaded(fields.text("model")?).await?;
    let ids = loaded.vocabulary().encode(text, special, true);
    Ok(Json(json!({ "value": ids.len(), "ids": ids })))
}

/// Returns the text of `ids`.
#[utoipa::path(post, path = "/api/extra/detokenize", tag = "KoboldCPP",
    request_body(content = Value, content_type = "application/json", description = "`{ids}`"),
    responses((status = 200, description = "`{result: text, success: true}`"),
              (status = 400, description = "A field is invalid; the message names it")))]
pub(super) async fn text(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, KoboldError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let ids = attention::token_ids(fields, "ids", loaded.vocabulary())?
        .ok_or_else(|| ApiError::invalid("ids", "`ids` is missing; send a list of token ids"))?;
    Ok(Json(json!({ "result": loaded.vocabulary().decode(&ids), "success": true })))
}
