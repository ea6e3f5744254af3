//! Actions on a slot: list its tokens and messages, save and restore snapshots, remove tokens. Requests wait while the
//! slot is busy.

use super::files;
use super::request::{OCTET_STREAM, accepts, parse_small_body, read_snapshot, slot_number, unknown_action};
use super::require_slots;
use super::response::{SlotActionResponse, SlotInfoResponse, SlotMessageRange, SlotRestoreTimings, SlotSaveTimings};
use crate::api::llama::request::ModelParams;
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::Fields;
use crate::engine::{Ses1Error, SlotError, SlotSnapshot, SlotTokens};
use crate::events::{Scope, TokenId};
use crate::server::extract::{Path, Query};
use crate::server::models::InsufficientMemory;
use crate::server::{ApiError, App, Caller, ErrorKind};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;
use std::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(slot_action)).routes(routes!(info))
}

/// Query parameters: the action and the model.
#[derive(Debug, Deserialize)]
pub(super) struct SlotActionParams {
    action: Option<String>,
    model: Option<String>,
}

/// Executes an `?action=` on a slot. `save-state` returns a snapshot (binary with `Accept: application/octet-stream`,
/// otherwise base64 in JSON); `restore-state` accepts one (binary or `{state}`). `tokens` lists the slot's tokens.
/// `context-shift` takes `{n_keep, n_discard}` and removes tokens from the middle. `save`, `restore` and `erase` take
/// `{filename}` below `--slot-save-path`. Waits while the slot is busy. A snapshot that does not fit leaves the slot
/// unchanged.
#[utoipa::path(post, path = "/slots/{id_slot}", tag = "llama-server",
    params(("id_slot" = u32, Path, description = "Index of the slot, from 0"),
           ("action" = String, Query, description = "save-state, restore-state, tokens, context-shift, save, restore or erase")),
    responses((status = 200, body = SlotActionResponse,
                  description = "Result of the action; `save-state` with `Accept: application/octet-stream` returns the snapshot"),
              (status = 400, description = "The slot, a field or the snapshot is invalid; the message names it"),
              (status = 404, description = "Unknown file"),
              (status = 501, description = "The server was started with --no-slots or without --slot-save-path, or this model's state cannot be saved or \
                                            shifted; the message gives the reason")))]
async fn slot_action(
    State(app): State<App>,
    caller: Caller,
    id: Result<Path<String>, ApiError>,
    query: Result<Query<SlotActionParams>, ApiError>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, LlamaError> {
    let query = query?.0;
    if let Some("save-state" | "restore-state" | "tokens" | "context-shift") = query.action.as_deref() {
        require_slots(&app)?;
    }
    let loaded = app.get_or_load(query.model.as_deref()).await?;
    let slot = slot_number("id_slot", &id?.0)?;
    let engine = loaded.engine();
    let scope = &caller.scope;
    let started = Instant::now();
    let ms = move || started.elapsed().as_secs_f64() * 1e3;
    let answer = match query.action.as_deref() {
        Some("save-state") => {
            let SlotSnapshot { tokens, block } = engine.save_slot(scope, slot).await?;
            if accepts(&headers, OCTET_STREAM) {
                return Ok(([(header::CONTENT_TYPE, OCTET_STREAM)], block).into_response());
            }
            let bytes = block.len();
            let text = tokio::task::spawn_blocking(move || STANDARD.encode(&block)).await;
            let text = text.map_err(ApiError::internal)?;
            SlotActionResponse::SaveState { id_slot: slot, n_tokens: tokens, n_bytes: bytes, t_ms: ms(), state: text }
        }
        Some("restore-state") => {
            let block = read_snapshot(engine, &headers, body).await?;
            let bytes = block.len();
            engine.restore_slot(caller.tenant, slot, block).await?;
            SlotActionResponse::RestoreState { id_slot: slot, n_bytes_read: bytes, success: true, t_ms: ms() }
        }
        Some("tokens") => {
            let SlotTokens { tokens, processed } = engine.slot_tokens(scope, slot).await?;
            SlotActionResponse::Tokens {
                id_slot: slot,
                n_tokens: tokens.len(),
                tokens,
                n_prompt_tokens_processed: processed,
            }
        }
        Some("context-shift") => {
            let body = parse_small_body(body).await?;
            let fields = Fields::new(&body)?;
            let number = |name: &str, min: i64| {
                let missing =
                    || ApiError::invalid(name, format!("`{name}` is missing; send an integer of {min} or more"));
                fields.integer(name, min..=i64::from(u32::MAX))?.ok_or_else(missing).map(|number| number as usize)
            };
            let left = engine.shift_slot(scope, slot, number("n_keep", 0)?, number("n_discard", 1)?).await?;
            SlotActionResponse::ContextShift { success: true, new_n_tokens: left }
        }
        Some("save") => {
            let (name, path) = named_file(&app, scope, &parse_small_body(body).await?)?;
            let SlotSnapshot { tokens, block } = engine.save_slot(scope, slot).await?;
            let bytes = block.len();
            files::write(path, block).await?;
            let timings = SlotSaveTimings { save_ms: ms() };
            SlotActionResponse::Save { id_slot: slot, filename: name, n_saved: tokens, n_written: bytes, timings }
        }
        Some("restore") => {
            let (name, path) = named_file(&app, scope, &parse_small_body(body).await?)?;
            let block = files::read(path, scope, &name, engine.max_snapshot_bytes()?).await?;
            let bytes = block.len();
            let tokens = engine.restore_slot(caller.tenant, slot, block).await?;
            let timings = SlotRestoreTimings { restore_ms: ms() };
            SlotActionResponse::Restore { id_slot: slot, filename: name, n_restored: tokens, n_read: bytes, timings }
        }
        Some("erase") => {
            // As in llama-server, the action requires `--slot-save-path`, like the actions on files.
            files::path(&app, scope, "filename", "any")?;
            SlotActionResponse::Erase { id_slot: slot, n_erased: engine.erase_slot(scope, slot).await? }
        }
        other => {
            let expected = "save-state, restore-state, tokens, context-shift, save, restore or erase";
            return Err(unknown_action(other, expected).into());
        }
    };
    Ok(Json(answer).into_response())
}

/// Lists the messages of a slot, split after each end-of-turn token.
#[utoipa::path(get, path = "/v1/slots/{id_slot}/info", tag = "llama-server",
    params(("id_slot" = u32, Path, description = "Index of the slot, from 0")),
    responses((status = 200, body = SlotInfoResponse),
              (status = 400, description = "Unknown slot"),
              (status = 501, description = "The server was started with --no-slots")))]
async fn info(
    State(app): State<App>,
    scope: Scope,
    id: Result<Path<String>, ApiError>,
    query: Result<Query<ModelParams>, ApiError>,
) -> Result<Json<SlotInfoResponse>, LlamaError> {
    require_slots(&app)?;
    let loaded = app.get_or_wake(query?.0.model.as_deref()).await?;
    let slot = slot_number("id_slot", &id?.0)?;
    let tokens = loaded.engine().slot_tokens(&scope, slot).await?.tokens;
    let eot = loaded.vocabulary().special().end_of_turn();
    let messages = messages(&tokens, eot).enumerate();
    let messages: Vec<_> = messages.map(|(index, (start, end))| SlotMessageRange { index, start, end }).collect();
    Ok(Json(SlotInfoResponse {
        n_tokens: tokens.len(),
        boundary_eot: eot.unwrap_or(-1),
        n_messages: messages.len(),
        messages,
    }))
}

/// Returns the first and last token index of each message.
fn messages(tokens: &[TokenId], eot: Option<TokenId>) -> impl Iterator<Item = (usize, usize)> {
    let mut start = 0;
    tokens.split_inclusive(move |&token| Some(token) == eot).map(move |message| {
        let own = (start, start + message.len() - 1);
        start += message.len();
        own
    })
}

fn named_file(app: &App, scope: &Scope, body: &Value) -> Result<(String, std::path::PathBuf), ApiError> {
    // A missing `--slot-save-path` is reported before a missing name.
    files::path(app, scope, "filename", "any")?;
    let name = Fields::new(body)?.text("filename")?;
    let name = name.ok_or_else(|| ApiError::invalid("filename", "`filename` is missing; send the name of a file"))?;
    Ok((name.to_owned(), files::path(app, scope, "filename", name)?))
}

impl From<SlotError> for ApiError {
    fn from(error: SlotError) -> Self {
        let message = error.to_string();
        match error {
            SlotError::NoSuchSlot { .. } => Self::invalid("id_slot", message),
            SlotError::State(Ses1Error::NoLayout) | SlotError::NotRemovable(_) | SlotError::NoSlots => {
                Self::not_supported(message)
            }
            SlotError::State(_) | SlotError::Rejected => Self::invalid("state", message),
            SlotError::Range { .. } => Self::invalid("n_discard", message),
            SlotError::NotSaved | SlotError::Failed(_) => Self::internal(message),
            SlotError::Hashing { retry_after_s, .. } => Self::unavailable(message).retry_after(retry_after_s),
            SlotError::Unidentified(_) | SlotError::Stopped => Self::unavailable(message),
        }
    }
}

impl From<InsufficientMemory> for ApiError {
    fn from(error: InsufficientMemory) -> Self {
        Self::new(ErrorKind::NoRoom, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::messages;

    #[test]
    fn messages_end_with_their_end_of_turn_token() {
        let of = |tokens: &[i32]| messages(tokens, Some(9)).collect::<Vec<_>>();
        assert_eq!(of(&[1, 2, 9, 3, 9, 4, 5]), [(0, 2), (3, 4), (5, 6)]);
        assert_eq!(of(&[1, 9]), [(0, 1)]);
        assert_eq!(of(&[]), []);
        assert_eq!(messages(&[1, 2], None).collect::<Vec<_>>(), [(0, 1)]);
    }
}
