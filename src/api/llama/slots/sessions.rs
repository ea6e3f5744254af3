//! Slot snapshots stored on the server by number.

use super::request::{parse_small_body, slot_number, unknown_action};
use super::response::SessionActionResponse;
use super::{files, require_slots};
use crate::api::llama::request::ModelParams;
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::Fields;
use crate::events::Scope;
use crate::server::extract::{Path, Query};
use crate::server::models::SessionClient;
use crate::server::{ApiError, App, Caller};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use std::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(session_action)).routes(routes!(list))
}

/// Query parameters: the action, the slot and the model.
#[derive(Debug, Deserialize)]
struct SessionActionParams {
    action: Option<String>,
    slot: Option<String>,
    model: Option<String>,
}

/// Executes an `?action=` on a stored session: `save` stores a snapshot of `&slot=N` under the number. `restore` loads
/// the snapshot into a slot; with `{file}`, it loads that file below `--slot-save-path` instead. `remove` deletes the
/// snapshot; with `{file}`, it first writes the snapshot to that file. Stored sessions belong to the model they were
/// saved with. They are kept until they are removed or the server stops, even while their model is unloaded.
#[utoipa::path(post, path = "/sessions/{id_session}", tag = "llama-server",
    params(("id_session" = i64, Path, description = "Number of the session"),
           ("action" = String, Query, description = "save, restore or remove"),
           ("slot" = Option<u32>, Query, description = "Index of the slot to save or to restore to, from 0")),
    responses((status = 200, body = SessionActionResponse),
              (status = 400, description = "The slot, the file or the snapshot is invalid; the message names it"),
              (status = 404, description = "Unknown session or file"),
              (status = 501, description = "The server was started with --no-slots or without --slot-save-path"),
              (status = 507, description = "Storage for sessions is full")))]
async fn session_action(
    State(app): State<App>,
    caller: Caller,
    id: Result<Path<String>, ApiError>,
    query: Result<Query<SessionActionParams>, ApiError>,
    body: Body,
) -> Result<Json<SessionActionResponse>, LlamaError> {
    let query = query?.0;
    require_slots(&app)?;
    app.check_ready()?;
    let sessions = app.models().sessions();
    let client = SessionClient { tenant: caller.tenant.as_ref(), scope: &caller.scope };
    let model = app.models().entry_for_request(query.model.as_deref())?.name;
    let text = id?.0;
    let id: i64 = text
        .parse()
        .map_err(|_| ApiError::invalid("id_session", format!("`id_session` must be an integer, got '{text}'")))?;
    let body = parse_small_body(body).await?;
    let file = Fields::new(&body)?.text("file")?;
    let started = Instant::now();
    let ms = || started.elapsed().as_secs_f64() * 1e3;
    let slot = || match &query.slot {
        Some(slot) => slot_number("slot", slot),
        None => Err(ApiError::invalid("slot", "`slot` is missing; add &slot=N to the query")),
    };
    let answer = match query.action.as_deref() {
        Some("save") => {
            let slot = slot()?;
            let snapshot =
                app.get_or_load(query.model.as_deref()).await?.engine().save_slot(client.scope, slot).await?;
            let bytes = snapshot.block.len();
            sessions.put(client.tenant, &model, id, snapshot.block, app.now())?;
            let n_tokens = snapshot.tokens;
            SessionActionResponse::Save { id_session: id, id_slot: slot, n_tokens, n_bytes: bytes, t_ms: ms() }
        }
        Some("restore") => {
            let slot = slot()?;
            let loaded = app.get_or_load(query.model.as_deref()).await?;
            let engine = loaded.engine();
            let block = match file {
                Some(file) => {
                    let path = files::path(&app, client.scope, "file", file)?;
                    files::read(path, client.scope, file, engine.max_snapshot_bytes()?).await?
                }
                None => sessions.get(client, &model, id).ok_or_else(|| ApiError::not_found("session", id))?.block,
            };
            let bytes = block.len();
            engine.restore_slot(caller.tenant.clone(), slot, block).await?;
            let t_ms = ms();
            SessionActionResponse::Restore { id_session: id, id_slot: slot, n_bytes_read: bytes, success: true, t_ms }
        }
        Some("remove") => remove(&app, client, &model, id, file).await?,
        other => return Err(unknown_action(other, "save, restore or remove").into()),
    };
    Ok(Json(answer))
}

async fn remove(
    app: &App,
    client: SessionClient<'_>,
    model: &str,
    id: i64,
    file: Option<&str>,
) -> Result<SessionActionResponse, ApiError> {
    let sessions = app.models().sessions();
    let missing = || ApiError::not_found("session", id);
    let Some(file) = file else {
        sessions.remove(client, model, id).ok_or_else(missing)?;
        return Ok(SessionActionResponse::Remove { id_session: id, removed: true, file: None, n_bytes: None });
    };
    let path = files::path(app, client.scope, "file", file)?;
    // The session is removed only after it was written, so that a full disk loses nothing. If it changed
    // meanwhile, it is written again.
    let bytes = loop {
        let session = sessions.get(client, model, id).ok_or_else(missing)?;
        files::write(path.clone(), session.block.clone()).await?;
        if sessions.remove_unchanged(client, model, id, &session) {
            break session.block.len();
        }
    };
    let (file, n_bytes) = (Some(file.to_owned()), Some(bytes));
    Ok(SessionActionResponse::Remove { id_session: id, removed: true, file, n_bytes })
}

/// A stored session.
#[derive(Debug, Serialize, ToSchema)]
struct StoredSessionResponse {
    /// Number of the session.
    id: i64,
    /// Size in bytes.
    size: usize,
    /// Seconds since 1970.
    created_at: i64,
    /// Seconds since 1970.
    updated_at: i64,
}

/// Lists all stored sessions of a model by number.
#[utoipa::path(get, path = "/sessions", tag = "llama-server",
    responses((status = 200, body = Vec<StoredSessionResponse>),
              (status = 501, description = "The server was started with --no-slots")))]
async fn list(
    State(app): State<App>,
    scope: Scope,
    query: Result<Query<ModelParams>, ApiError>,
) -> Result<Json<Vec<StoredSessionResponse>>, LlamaError> {
    require_slots(&app)?;
    app.check_ready()?;
    let model = app.models().entry_for_request(query?.0.model.as_deref())?.name;
    let sessions = app.models().sessions().list(&scope, &model);
    let shown = sessions.iter().map(|(id, session)| StoredSessionResponse {
        id: *id,
        size: session.block.len(),
        created_at: session.created_at.timestamp(),
        updated_at: session.updated_at.timestamp(),
    });
    Ok(Json(shown.collect()))
}
