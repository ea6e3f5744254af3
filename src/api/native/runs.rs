//! `/api/v1/runs`: lists runs, returns a run, deletes a run.

use crate::events::{RunId, Scope};
use crate::server::extract::{Path, Query};
use crate::server::{ApiError, App, ErrorKind, Problem};
use crate::store::{MAX_PAGE_RUNS, RunQuery, RunSummary};
use crate::trace::document::DocumentWire;
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::time::Duration;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use utoipa::{IntoParams, ToSchema};

/// Maximum events of the long runs that are read and serialized at the same time, except for a single longer run. These
/// events take up to 2 GiB of memory.
const MAX_READ_EVENTS: u32 = 500_000;
/// Permits to read long runs, one per event.
static EVENT_PERMITS: Semaphore = Semaphore::const_new(MAX_READ_EVENTS as usize);
/// Runs with fewer events are read without permits, so that they never wait for long ones.
const MIN_PERMITS: u32 = 10_000;
/// Maximum time to wait for permits.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Query parameters of the list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListRunsParams {
    /// A filter: free words, `"quoted text"`, `field:value`, `field>number`, `field<number`, each optionally negated
    /// with a leading `-`.
    #[serde(default)]
    q: String,
    /// Only runs older than the one with this `run_id`.
    #[param(value_type = Option<String>)]
    before: Option<RunId>,
    /// Maximum runs per page, 1 to 500; default 50.
    limit: Option<u32>,
}

/// A page of runs, newest first.
#[derive(Debug, Serialize, ToSchema)]
pub struct RunList {
    /// The runs of the page.
    runs: Vec<RunSummary>,
    /// Link to the next page.
    meta: PageMeta,
}

/// Link to the next page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub struct PageMeta {
    /// The query string of the next page, with its question mark; `null` on the last page. With a filter, a page can
    /// have fewer runs than `limit` although older runs match; follow `next` until it is `null`.
    next: Option<String>,
}

/// Lists runs, newest first.
#[utoipa::path(get, path = "/api/v1/runs", tag = "runs", params(ListRunsParams), responses(
    (status = 200, body = RunList), (status = 400, body = Problem, description = "The filter or the query is invalid")))]
pub async fn list(
    State(app): State<App>,
    scope: Scope,
    Query(query): Query<ListRunsParams>,
) -> Result<Json<RunList>, ApiError> {
    if let Some(limit) = query.limit.filter(|limit| !(1..=MAX_PAGE_RUNS).contains(limit)) {
        let detail = format!("`limit` must be an integer between 1 and {MAX_PAGE_RUNS}, got {limit}");
        return Err(ApiError::invalid("limit", detail));
    }
    let limit = query.limit.unwrap_or(0);
    let page = app.store()?.runs(&scope, &RunQuery { q: query.q.clone(), before: query.before, limit }).await?;
    let next = page.next.map(|before| {
        let mut next = String::from("?");
        if !query.q.is_empty() {
            let _ = write!(next, "q={}&", percent_encode(&query.q));
        }
        let _ = write!(next, "before={before}");
        if limit > 0 {
            let _ = write!(next, "&limit={limit}");
        }
        next
    });
    Ok(Json(RunList { runs: page.runs, meta: PageMeta { next } }))
}

/// Percent-encodes a text for a query string.
fn percent_encode(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(byte.into()),
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    out
}

/// A run's summary with notes about its ingested document.
#[derive(Serialize, ToSchema)]
struct NotedRun<'a> {
    #[serde(flatten)]
    run: &'a RunSummary,
    /// Differences from the ingested document.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    notes: Vec<String>,
}

/// A complete run.
#[derive(ToSchema)]
#[expect(dead_code, reason = "the body is written as bytes; this describes it")]
struct RunDocument<'a> {
    run: NotedRun<'a>,
    #[schema(inline)]
    #[serde(flatten)]
    document: DocumentWire,
}

/// Returns a complete run: its summary as `run`, and the sections of an `/ingest` document. `run.notes` lists
/// differences from the ingested document: replaced characters, and events whose text differs from `final_text`.
#[utoipa::path(get, path = "/api/v1/runs/{id}", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), responses(
    (status = 200, body = RunDocument),
    (status = 404, body = Problem),
    (status = 429, body = Problem, description = "Other long runs are being read")))]
pub async fn show(State(app): State<App>, scope: Scope, Path(id): Path<String>) -> Result<impl IntoResponse, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    let permits = event_permits(run.events).await?;
    let document = app.store()?.document(&scope, run.run_id).await?.ok_or_else(|| ApiError::not_found("run", &id))?;
    let notes = app.store()?.reported(&scope, run.run_id).await?.remarks();
    let write = move || {
        let _permits = permits;
        let mut head = br#"{"run":"#.to_vec();
        serde_json::to_writer(&mut head, &NotedRun { run: &run, notes }).map_err(ApiError::internal)?;
        head.push(b',');
        // The document is an object whose opening brace is replaced.
        let mut json = document.write();
        json.splice(..1, head);
        Ok::<_, ApiError>(json)
    };
    let json = tokio::task::spawn_blocking(write).await.map_err(ApiError::internal)??;
    Ok(([(header::CONTENT_TYPE, "application/json")], json))
}

/// Waits for the permits to read a run with that many events; `None` for a short run.
///
/// # Errors
/// Other long runs are being read.
async fn event_permits(events: i32) -> Result<Option<SemaphorePermit<'static>>, ApiError> {
    let events = events.unsigned_abs();
    if events < MIN_PERMITS {
        return Ok(None);
    }
    let acquired = timeout(PERMIT_TIMEOUT, EVENT_PERMITS.acquire_many(events.min(MAX_READ_EVENTS))).await;
    let busy = |_| ApiError::new(ErrorKind::Busy, "other long runs are being read; try again later").retry_after(5);
    acquired.map_err(busy)?.map(Some).map_err(ApiError::internal)
}

/// Deletes a run and everything recorded about it.
#[utoipa::path(delete, path = "/api/v1/runs/{id}", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), responses(
    (status = 204), (status = 404, body = Problem),
    (status = 409, body = Problem, description = "The run is active")))]
pub async fn delete(State(app): State<App>, scope: Scope, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    if app.store()?.delete(&scope, run.run_id).await? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(ApiError::not_found("run", id))
    }
}

#[cfg(test)]
mod tests {
    use super::event_permits;
    use std::time::Duration;
    use tokio::time::timeout;

    #[tokio::test]
    async fn long_runs_are_read_alone() {
        let first = event_permits(400_000).await.unwrap();
        assert!(first.is_some());
        let second = timeout(Duration::ZERO, event_permits(400_000)).await;
        assert!(second.is_err(), "the second run waits for the first one");
        assert!(event_permits(9_999).await.unwrap().is_none(), "short runs do not wait");
        drop(first);
        assert!(event_permits(i32::MAX).await.unwrap().is_some(), "the longest run can be read");
    }

    #[test]
    fn filter_round_trips_through_query_string() {
        assert_eq!(super::percent_encode("model:a b&c=\"ü\""), "model%3Aa%20b%26c%3D%22%C3%BC%22");
    }
}
