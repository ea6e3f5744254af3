//! `/api/v1/runs/{id}/family`: the runs that descend from the same run.

use super::forks;
use crate::events::{FinishReason, RunId, RunParent, RunStatus, Scope, TraceItem};
use crate::server::extract::Path;
use crate::server::{ApiError, App, Problem};
use crate::store::FamilyRun;
use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;

/// The runs that descend from the same run.
#[derive(Debug, Serialize, ToSchema)]
pub struct FamilyResponse {
    /// The first run, then its forks, then their forks; each generation oldest first. Up to 128 runs.
    runs: Vec<FamilyMember>,
    /// True if the family has more runs.
    truncated: bool,
    /// Reason why the requested run cannot be forked; `null` if it can.
    not_forkable: Option<String>,
}

/// A run of a family.
#[derive(Debug, Serialize, ToSchema)]
pub struct FamilyMember {
    /// Id of the run.
    #[schema(value_type = String)]
    run_id: RunId,
    /// Start of the run.
    created_at: DateTime<Utc>,
    /// Status of the run.
    #[schema(value_type = String)]
    status: RunStatus,
    /// Finish reason; `null` while the run is running.
    #[schema(value_type = Option<String>)]
    finish_reason: Option<FinishReason>,
    /// Names of the mods.
    mods: Vec<String>,
    /// Seed of the random generator.
    seed: Option<u32>,
    /// Tokens of the prompt.
    prompt_tokens: i32,
    /// Tokens of the answer.
    completion_tokens: i32,
    /// Mean natural log-probability of the added tokens according to the model, including tokens that were removed
    /// later. Only the first 8,192 events are read.
    mean_logprob: Option<f64>,
    /// Beginning of the answer.
    output_preview: String,
    /// True if attention was recorded.
    has_attention: bool,
    /// The run that it was forked from, the step, and the change; absent for the first run.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    parent: Option<RunParent>,
}

impl From<FamilyRun> for FamilyMember {
    fn from(FamilyRun { run, mean_logprob }: FamilyRun) -> Self {
        Self {
            run_id: run.run_id,
            created_at: run.created_at,
            status: run.status,
            finish_reason: run.finish_reason,
            mods: run.mods,
            seed: run.seed,
            prompt_tokens: run.prompt_tokens,
            completion_tokens: run.completion_tokens,
            mean_logprob,
            output_preview: run.output_preview,
            has_attention: run.has_attention,
            parent: run.parent,
        }
    }
}

/// Returns the family of a run: the run that it descends from, and all forks below that one.
#[utoipa::path(get, path = "/api/v1/runs/{id}/family", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`")), responses(
    (status = 200, body = FamilyResponse), (status = 404, body = Problem)))]
pub async fn show(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
) -> Result<Json<FamilyResponse>, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    let store = app.store()?;
    let first = store.items(&scope, run.run_id, 0..1).await?;
    let prompt = first.iter().find_map(|item| match item {
        TraceItem::Event(event) => event.measured.as_ref()?.prompt.as_deref(),
        _ => None,
    });
    let unknown_model = || {
        let name = prompt?.parameters.as_ref()?["model"]["name"].as_str()?;
        app.models().named(name).err().map(|error| error.problem().detail)
    };
    let not_forkable = forks::missing_for_fork(prompt).map(str::to_owned).or_else(unknown_model);
    let family = store.family(&scope, run).await?;
    Ok(Json(FamilyResponse {
        runs: family.runs.into_iter().map(FamilyMember::from).collect(),
        truncated: family.truncated,
        not_forkable,
    }))
}
