//! State of a slot: lists its tokens and messages, saves and restores snapshots, removes tokens. Requests wait while
//! the slot is busy.

use super::props::ModelParams;
use super::slot_files;
use super::slot_response::{
    SlotActionResponse, SlotInfoResponse, SlotMessageRange, SlotRestoreTimings, SlotSaveTimings,
};
use crate::api::shared;
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::Fields;
use crate::engine::{Engine, Ses1Error, SlotError, SlotSnapshot, SlotTokens};
use crate::events::{Scope, TokenId};
use crate::server::models::InsufficientMemory;
use crate::server::{ApiError, App, Caller, ErrorKind};
use axum::Json;
use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::time::Instant;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Content type of binary bodies.
const OCTET_STREAM: &str = "application/octet-stream";
/// Maximum bytes of JSON around a snapshot.
const MAX_JSON_OVERHEAD: usize = 4096;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(act)).routes(routes!(info))
}

/// Query parameters: the action and the model.
#[derive(Debug, Deserialize)]
pub(super) struct SlotActionParams {
    action: Option<String>,
    model: Option<String>,
}

/// Executes an `?action=` on a slot. `save-state` returns a snapshot (binary with `Accept: application/octet-stream`,
/// else base64 in JSON); `restore-state` accepts one (binary or `{state}`). `tokens` lists the slot's tokens.
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
              (status = 501, description = "The server was started without --slot-save-path, or this model's state cannot be saved or \
                                            shifted; the message gives the reason")))]
async fn act(
    State(app): State<App>,
    caller: Caller,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<SlotActionParams>, QueryRejection>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, LlamaError> {
    let query = query?.0;
    let loaded = app.loaded(query.model.as_deref()).await?;
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
            slot_files::write(path, block).await?;
            let timings = SlotSaveTimings { save_ms: ms() };
            SlotActionResponse::Save { id_slot: slot, filename: name, n_saved: tokens, n_written: bytes, timings }
        }
        Some("restore") => {
            let (name, path) = named_file(&app, scope, &parse_small_body(body).await?)?;
            let block = slot_files::read(path, &name, engine.max_snapshot_bytes()?).await?;
            let bytes = block.len();
            let tokens = engine.restore_slot(caller.tenant, slot, block).await?;
            let timings = SlotRestoreTimings { restore_ms: ms() };
            SlotActionResponse::Restore { id_slot: slot, filename: name, n_restored: tokens, n_read: bytes, timings }
        }
        Some("erase") => {
            // llama-server treats this as an action on files.
            slot_files::path(&app, scope, "filename", "any")?;
            SlotActionResponse::Erase { id_slot: slot, n_erased: engine.erase_slot(scope, slot).await? }
        }
        other => {
            let what = other.map_or_else(|| "is missing".to_owned(), |other| format!("'{other}' is unknown"));
            let known = "save-state, restore-state, tokens, context-shift, save, restore or erase";
            return Err(ApiError::invalid("action", format!("`action` {what}; expected {known}")).into());
        }
    };
    Ok(Json(answer).into_response())
}

/// Lists the messages of a slot, split after each end-of-turn token.
#[utoipa::path(get, path = "/v1/slots/{id_slot}/info", tag = "llama-server",
    params(("id_slot" = u32, Path, description = "Index of the slot, from 0")),
    responses((status = 200, body = SlotInfoResponse),
              (status = 400, description = "Unknown slot")))]
async fn info(
    State(app): State<App>,
    scope: Scope,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<ModelParams>, QueryRejection>,
) -> Result<Json<SlotInfoResponse>, LlamaError> {
    let loaded = app.loaded_now(query?.0.model.as_deref()).await?;
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

/// Parses a slot number in a path or query.
pub(super) fn slot_number(name: &str, text: &str) -> Result<u32, ApiError> {
    text.parse()
        .map_err(|_| ApiError::invalid(name, format!("`{name}` must be the index of a slot, from 0, got '{text}'")))
}

/// Parses a small JSON body; an empty body is an empty object.
pub(super) async fn parse_small_body(body: Body) -> Result<Value, ApiError> {
    const MAX_BYTES: usize = 64 << 10;
    let bytes = read_body(body, MAX_BYTES)
        .await?
        .ok_or_else(|| ApiError::new(ErrorKind::TooLarge, format!("the body must have at most {MAX_BYTES} bytes")))?;
    if bytes.is_empty() { Ok(Value::Object(Map::new())) } else { shared::parse_json(&bytes) }
}

/// Reads a body of up to `max_bytes` bytes; returns `None` for a longer one.
async fn read_body(body: Body, max_bytes: usize) -> Result<Option<Bytes>, ApiError> {
    /// Maximum bytes of a too long body that are read, so that the client receives the response before the connection
    /// closes.
    const MAX_DISCARDED_BYTES: usize = 64 << 20;
    let mut pieces = body.into_data_stream();
    let mut whole = BytesMut::new();
    let mut read = 0;
    while read <= max_bytes.saturating_add(MAX_DISCARDED_BYTES)
        && let Some(piece) = pieces.next().await
    {
        let piece = piece.map_err(|error| ApiError::bad_request(format!("the body could not be read: {error}")))?;
        read += piece.len();
        if read <= max_bytes {
            whole.extend_from_slice(&piece);
        } else {
            whole = BytesMut::new();
        }
    }
    Ok((read <= max_bytes).then(|| whole.freeze()))
}

fn named_file(app: &App, scope: &Scope, body: &Value) -> Result<(String, std::path::PathBuf), ApiError> {
    // Reports a missing directory before a missing name.
    slot_files::path(app, scope, "filename", "any")?;
    let name = Fields::new(body)?.text("filename")?;
    let name = name.ok_or_else(|| ApiError::invalid("filename", "`filename` is missing; send the name of a file"))?;
    Ok((name.to_owned(), slot_files::path(app, scope, "filename", name)?))
}

/// Reads the snapshot in a body: binary, or base64 in JSON.
async fn read_snapshot(engine: &Engine, headers: &HeaderMap, body: Body) -> Result<Bytes, ApiError> {
    let max_bytes = engine.max_snapshot_bytes()?;
    let too_long = || {
        let detail =
            format!("the snapshot is too large: snapshots of this server's slots have at most {max_bytes} bytes");
        ApiError::invalid("state", detail)
    };
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if kind.trim_start().to_ascii_lowercase().starts_with(OCTET_STREAM) {
        return read_body(body, max_bytes).await?.ok_or_else(too_long);
    }
    // Base64 may contain line breaks.
    let body = read_body(body, max_bytes / 3 * 4 + max_bytes / 16 + MAX_JSON_OVERHEAD).await?.ok_or_else(too_long)?;
    let decode = move || {
        let body = shared::parse_json(&body)?;
        let text = Fields::new(&body)?.text("state")?;
        let text = text.ok_or_else(|| {
            ApiError::invalid(
                "state",
                format!("`state` is missing; send the snapshot in base64, or as a body of type {OCTET_STREAM}"),
            )
        })?;
        let lines: Vec<&str> = text.split_ascii_whitespace().collect();
        STANDARD
            .decode(lines.concat())
            .map_err(|error| ApiError::invalid("state", format!("`state` is not base64: {error}")))
            .map(Bytes::from)
    };
    tokio::task::spawn_blocking(decode).await.map_err(ApiError::internal)?
}

/// Returns true if the client accepts the content type and does not prefer JSON.
fn accepts(headers: &HeaderMap, kind: &str) -> bool {
    let lines = headers.get_all(header::ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
    let ranges: Vec<(String, f32)> = lines.flat_map(|line| line.split(',')).map(parse_accept_range).collect();
    let weight =
        |named: &str| ranges.iter().find(|(range, _)| range.eq_ignore_ascii_case(named)).map(|(_, weight)| *weight);
    weight(kind).is_some_and(|binary| binary > 0.0 && weight("application/json").is_none_or(|json| json <= binary))
}

/// Parses a range of `Accept` and its weight; the default weight is 1.
fn parse_accept_range(range: &str) -> (String, f32) {
    let mut parts = range.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default().to_owned();
    let weight = parts.filter_map(|part| part.split_once('=')).find(|(key, _)| key.trim().eq_ignore_ascii_case("q"));
    (name, weight.and_then(|(_, weight)| weight.trim().parse().ok()).unwrap_or(1.0))
}

impl From<SlotError> for ApiError {
    fn from(error: SlotError) -> Self {
        let message = error.to_string();
        match error {
            SlotError::NoSuchSlot { .. } => Self::invalid("id_slot", message),
            SlotError::State(Ses1Error::NoLayout) | SlotError::Fixed(_) | SlotError::NoSlots => {
                Self::not_supported(message)
            }
            SlotError::State(_) | SlotError::Rejected => Self::invalid("state", message),
            SlotError::Range { .. } => Self::invalid("n_discard", message),
            SlotError::Failed(_) => Self::internal(message),
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
    use super::{OCTET_STREAM, accepts, messages};
    use axum::http::{HeaderMap, HeaderValue, header};

    #[test]
    fn accept_header_selects_binary() {
        let wanted = |accept: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for one in accept {
                headers.append(header::ACCEPT, HeaderValue::from_static(one));
            }
            accepts(&headers, OCTET_STREAM)
        };
        for binary in [
            &["application/octet-stream"][..],
            &["text/html, Application/Octet-Stream;q=0.5"],
            &["*/*", "application/octet-stream"],
            &["application/json;q=0.5, application/octet-stream"],
        ] {
            assert!(wanted(binary), "{binary:?}");
        }
        for json in [
            &[][..],
            &["*/*"],
            &["application/octet-stream;q=0"],
            &["application/octet-stream; Q=0.0, */*"],
            &["application/json", "application/octet-stream;q=0.5"],
        ] {
            assert!(!wanted(json), "{json:?}");
        }
    }

    #[test]
    fn messages_end_with_their_end_of_turn_token() {
        let of = |tokens: &[i32]| messages(tokens, Some(9)).collect::<Vec<_>>();
        assert_eq!(of(&[1, 2, 9, 3, 9, 4, 5]), [(0, 2), (3, 4), (5, 6)]);
        assert_eq!(of(&[1, 9]), [(0, 1)]);
        assert_eq!(of(&[]), []);
        assert_eq!(messages(&[1, 2], None).collect::<Vec<_>>(), [(0, 1)]);
    }
}
