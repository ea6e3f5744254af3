//! `/api/v1/runs`: lists runs, returns a run, deletes a run.

use crate::events::{RunId, Scope};
use crate::server::extract::{Path, Query};
use crate::server::{ApiError, App, EventPermits, Problem, encode_component};
use crate::store::{MAX_PAGE_RUNS, RunQuery, RunSummary};
use crate::trace::document::DocumentWire;
use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use utoipa::{IntoParams, ToSchema};

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
            let _ = write!(next, "q={}&", encode_component(&query.q));
        }
        let _ = write!(next, "before={before}");
        if limit > 0 {
            let _ = write!(next, "&limit={limit}");
        }
        next
    });
    Ok(Json(RunList { runs: page.runs, meta: PageMeta { next } }))
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
    let permits = EventPermits::acquire(run.events).await?;
    let document = app.store()?.document(&scope, run.run_id).await?.ok_or_else(|| ApiError::not_found("run", &id))?;
    let notes = app.store()?.reported(&scope, run.run_id).await?.remarks();
    let write = move || {
        let mut head = br#"{"run":"#.to_vec();
        serde_json::to_writer(&mut head, &NotedRun { run: &run, notes }).map_err(ApiError::internal)?;
        head.push(b',');
        // The document is an object whose opening brace is replaced.
        let mut json = document.write();
        json.splice(..1, head);
        drop(document);
        Ok::<_, ApiError>(permits.into_body(json))
    };
    let json = tokio::task::spawn_blocking(write).await.map_err(ApiError::internal)??;
    Ok(([(header::CONTENT_TYPE, "application/json")], json))
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
