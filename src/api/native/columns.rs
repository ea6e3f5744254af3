//! `/api/v1/runs/{id}/columns`: the data with which a replay is first rendered, in binary form.

use crate::events::Scope;
use crate::server::extract::Path;
use crate::server::{ApiError, App, Problem};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

/// Returns the token instances, marks and timeline of a run as binary columns (`trace::columns`).
#[utoipa::path(get, path = "/api/v1/runs/{id}/columns", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), responses(
    (status = 200, description = "Columns, magic `RUNC`", content_type = "application/octet-stream"),
    (status = 304, description = "The version in If-None-Match is current"),
    (status = 404, body = Problem)))]
pub async fn show(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    let etag = format!("\"{}-{}\"", run.run_id, run.version);
    // Browsers ask again, because the run may have been deleted, or another key may have logged in.
    let head = [(header::ETAG, etag.clone()), (header::CACHE_CONTROL, "private, no-cache".to_owned())];
    if is_current(&headers, &etag) {
        return Ok((StatusCode::NOT_MODIFIED, head).into_response());
    }
    let columns = app.store()?.columns(&scope, run.run_id).await?.ok_or_else(|| ApiError::not_found("run", &id))?;
    Ok((head, [(header::CONTENT_TYPE, "application/octet-stream")], columns).into_response())
}

/// Returns true if If-None-Match contains the tag, which a compressing proxy may have made weak.
fn is_current(headers: &HeaderMap, etag: &str) -> bool {
    let lists = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).map(str::trim).any(|tag| tag == "*" || tag.trim_start_matches("W/") == etag)
}
