//! `/api/v1/runs/{id}/notes`: notes of users on a run and on tokens of its answer.

use crate::events::Scope;
use crate::server::extract::{Json, Path};
use crate::server::{ApiError, App, Caller, Problem};
use crate::store::Note;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum length of a note in characters.
const MAX_TEXT_CHARS: usize = 10_000;

/// A note to write.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NoteRequest {
    /// Index in the answer of the token that the note is about, from 0; null for the whole run.
    #[serde(default)]
    position: Option<u32>,
    /// The text, up to 10,000 characters. An empty text removes the note.
    #[schema(max_length = 10_000)]
    text: String,
}

/// The notes of a run.
#[derive(Debug, Serialize, ToSchema)]
pub struct NoteList {
    /// The note on the run, then those on tokens in their order.
    notes: Vec<Note>,
}

/// Lists the notes of a run.
#[utoipa::path(get, path = "/api/v1/runs/{id}/notes", operation_id = "list_notes", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), responses(
    (status = 200, body = NoteList), (status = 404, body = Problem)))]
pub async fn list(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
) -> Result<axum::Json<NoteList>, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    let notes = app.store()?.notes(&scope, run.run_id).await?;
    Ok(axum::Json(NoteList { notes: notes.ok_or_else(|| ApiError::not_found("run", id))? }))
}

/// Writes or removes the note on a run or on a token of its answer. The filters `note:run` and `note:token` find runs with
/// notes.
#[utoipa::path(put, path = "/api/v1/runs/{id}/notes", operation_id = "set_note", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), request_body = NoteRequest, responses(
    (status = 200, body = NoteList),
    (status = 400, body = Problem, description = "The text is too long, or the run would have more than 200 notes"),
    (status = 404, body = Problem)))]
pub async fn set(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
    Json(note): Json<NoteRequest>,
) -> Result<axum::Json<NoteList>, ApiError> {
    let chars = note.text.chars().count();
    if chars > MAX_TEXT_CHARS {
        let detail = format!("`text` must have at most {MAX_TEXT_CHARS} characters, got {chars}");
        return Err(ApiError::invalid("text", detail));
    }
    if note.position.is_some_and(|position| i32::try_from(position).is_err()) {
        return Err(ApiError::invalid("position", format!("`position` must be at most {}", i32::MAX)));
    }
    let run = app.find_run(&caller.scope, &id).await?;
    let (text, label) = (note.text.trim(), caller.label.as_deref());
    let stored = app.store()?.set_note(&caller.scope, run.run_id, note.position, text, label, app.now()).await?;
    Ok(axum::Json(NoteList { notes: stored.ok_or_else(|| ApiError::not_found("run", id))? }))
}
