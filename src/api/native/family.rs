//! `/api/v1/runs/{id}/family`: the runs that descend from the same run.

use super::forks;
use crate::events::{FinishReason, RunId, RunParent, RunStatus, Scope, TraceItem};
use crate::server::extract::{Path, Query};
use crate::server::{ApiError, App, Problem};
use crate::store::FamilyRun;
use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use utoipa::{IntoParams, ToSchema};

/// Query parameters of a family.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct FamilyParams {
    /// Ids of the runs whose `mean_logprob` is computed, separated by commas; default: all. Polling clients omit those of
    /// ended runs, which do not change.
    mean_of: Option<String>,
}

impl FamilyParams {
    fn mean_of(&self) -> Result<Option<HashSet<RunId>>, ApiError> {
        let Some(text) = &self.mean_of else { return Ok(None) };
        let ids = text.split(',').filter(|id| !id.is_empty()).map(str::parse);
        ids.collect::<Result<_, _>>().map(Some).map_err(|_| {
            ApiError::invalid("mean_of", format!("`mean_of` must be run ids separated by commas, got {text:?}"))
        })
    }
}

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
    /// later. Of tokens that were added together, for example forced ones, only the first counts. Only the first 8,192
    /// events are read. `null` if `mean_of` does not name the run.
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
    params(("id" = String, Path, description = "`run_id` or `request_id`"), FamilyParams), responses(
    (status = 200, body = FamilyResponse), (status = 400, body = Problem, description = "The query is invalid"),
    (status = 404, body = Problem)))]
pub async fn show(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(params): Query<FamilyParams>,
) -> Result<Json<FamilyResponse>, ApiError> {
    let mean_of = params.mean_of()?;
    let run = app.find_run(&scope, &id).await?;
    let store = app.store()?;
    let first = store.items(&scope, run.run_id, 0..1).await?;
    let prompt = first.iter().find_map(|item| match item {
        TraceItem::Event(event) => event.measured.as_ref()?.prompt.as_deref(),
        _ => None,
    });
    let unknown_model = || {
        let name = prompt?.parameters.as_ref()?["model"]["name"].as_str()?;
        app.models().entry_by_name(name).err().map(|error| error.problem().detail)
    };
    let not_forkable = forks::missing_for_fork(prompt).map(str::to_owned).or_else(unknown_model);
    let family = store.family(&scope, run, mean_of.as_ref()).await?;
    Ok(Json(FamilyResponse {
        runs: family.runs.into_iter().map(FamilyMember::from).collect(),
        truncated: family.truncated,
        not_forkable,
    }))
}
