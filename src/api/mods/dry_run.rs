//! Calls a mod with the events of a recorded run, without changing anything.

use super::check::{CheckProblem, validate_and_import};
use crate::mods::ModUpload;
use crate::server::extract::Json;
use crate::server::mods::{DryRunOptions, DryRunReport, dry_run, require_upload_rights, run_with_permits};
use crate::server::{ApiError, App, Caller, ErrorKind, EventPermits, LoadedModel, Problem};
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use utoipa::ToSchema;

/// Maximum time of a dry run. A run of 2000 tokens usually takes about a second.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Permits for concurrent dry runs, each of which reads a run and starts a process.
static PERMITS: Semaphore = Semaphore::const_new(2);

/// A mod, and the run whose events it receives.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DryRunRequest {
    /// The mod, as in a request to register it.
    #[serde(rename = "mod")]
    upload: ModUpload,
    /// Configuration of the mod; default is the configuration in the recorded run.
    #[serde(default)]
    #[schema(value_type = Option<Object>)]
    config: Option<Value>,
    /// `run_id` or `request_id` of the run.
    run: String,
}

/// Result of a dry run.
#[derive(Debug, Serialize, ToSchema)]
pub struct DryRunResponse {
    /// Problems of the mod; empty if it could be called.
    problems: Vec<CheckProblem>,
    /// The mod's replies; `null` if it could not be called.
    report: Option<DryRunReport>,
}

/// Calls a mod with the events of a recorded run and compares its actions with the recorded ones. Nothing is registered or
/// recorded. The mod runs in a sandbox, so the same rights are required as for its registration.
#[utoipa::path(post, path = "/api/v1/mods/dry-runs", tag = "mods",
    request_body(content = DryRunRequest, content_type = "application/json"),
    responses((status = 200, body = DryRunResponse),
              (status = 400, body = Problem, description = "The run cannot be replayed with the loaded model"),
              (status = 403, body = Problem, description = "Uploads are disabled, or the key lacks the right"),
              (status = 404, body = Problem, description = "Unknown run"),
              (status = 413, body = Problem), (status = 429, body = Problem)))]
pub async fn run(
    State(app): State<App>,
    caller: Caller,
    body: Result<Json<DryRunRequest>, ApiError>,
) -> Result<axum::Json<DryRunResponse>, ApiError> {
    require_upload_rights(&app, &caller)?;
    let Json(DryRunRequest { upload, config, run: id }) = body?;
    let run = app.find_run(&caller.scope, &id).await?;
    let busy = || ApiError::new(ErrorKind::Busy, "too many dry runs are active; try again later").retry_after(1);
    let permit = PERMITS.try_acquire().map_err(|_| busy())?;
    let model = model_of(&app, run.model.as_deref()).await?;
    let factory = match validate_and_import(&app, upload).await? {
        Ok(factory) => factory,
        Err(problem) => return Ok(axum::Json(DryRunResponse { problems: vec![problem], report: None })),
    };
    let event_permits = EventPermits::acquire(run.events).await?;
    let document = app.store()?.document(&caller.scope, run.run_id).await?;
    let document = document.ok_or_else(|| ApiError::not_found("run", &id))?;
    let deadline = Instant::now() + TIMEOUT;
    let limits = model.engine().replay_limits();
    let call = move || {
        let options = DryRunOptions { run: &id, config: config.as_ref(), limits, deadline: Some(deadline) };
        dry_run(model.model(), &*factory, &document, options)
    };
    let report = run_with_permits((permit, event_permits), call).await?;
    let report = report.map_err(|reason| ApiError::invalid("run", format!("the run cannot be replayed: {reason}")))?;
    Ok(axum::Json(DryRunResponse { problems: Vec::new(), report: Some(report) }))
}

/// Returns the loaded model with that name, or the default model, which may have the same vocabulary.
async fn model_of(app: &App, name: Option<&str>) -> Result<LoadedModel, ApiError> {
    match app.get_or_wake(name).await {
        Err(_) if name.is_some() => app.get_or_wake(None).await,
        found => found,
    }
}
