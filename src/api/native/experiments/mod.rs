//! `/api/v1/experiments`: grids of runs.

pub(super) mod csv;
mod definition;
mod execution;
mod export;
pub(super) mod parquet;
mod versions;

use crate::events::{Scope, system};
use crate::mods::SelectedMod;
use crate::server::experiments::{CellPosition, ExperimentSummary, MAX_ACTIVE_EXPERIMENTS, NotAdded};
use crate::server::extract::{Json, Path, Query};
use crate::server::{ApiError, App, Caller, ErrorKind, LoadedModel, Problem};
use crate::store::{Experiment, ExperimentCell, ExperimentState, NewExperiment};
use axum::extract::State;
use axum::http::StatusCode;
pub use definition::ExperimentDefinition;
use definition::Scorer;
use execution::{CellTask, Execution};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;
use versions::{StoredDefinition, Versions, parse_stored};

/// Maximum cells of a response.
const MAX_PAGE_CELLS: i32 = 500;

/// Experiments.
#[derive(Debug, Serialize, ToSchema)]
pub struct ExperimentList {
    /// Newest first, at most 200.
    experiments: Vec<Experiment>,
}

/// Query parameters of an experiment.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct CellRange {
    /// The first cell of the response; default 0.
    #[serde(default)]
    #[param(minimum = 0)]
    from: i32,
}

/// An experiment with a part of its grid.
#[derive(Debug, Serialize, ToSchema)]
pub struct ExperimentResponse {
    #[serde(flatten)]
    experiment: Experiment,
    definition: ExperimentDefinition,
    summary: ExperimentSummary,
    /// Up to 500 cells.
    grid: Vec<GridCell>,
    /// `from` of the next part of the grid; null after the last one.
    next: Option<i32>,
}

/// A cell of the grid.
#[derive(Debug, Serialize, ToSchema)]
pub struct GridCell {
    #[serde(flatten)]
    position: CellPosition,
    #[serde(flatten)]
    cell: ExperimentCell,
}

/// Starts an experiment: a grid of recorded runs of the caller's tenant. All cells are checked before the first one
/// starts. The filter `experiment:ID` finds the runs.
#[utoipa::path(post, path = "/api/v1/experiments", operation_id = "create_experiment", tag = "experiments",
    request_body = ExperimentDefinition, responses(
    (status = 201, body = Experiment),
    (status = 400, body = Problem, description = "The definition or one of the cells is invalid"),
    (status = 403, body = Problem, description = "The key may not upload mods, which a Python scorer requires"),
    (status = 404, body = Problem, description = "Unknown model"),
    (status = 429, body = Problem, description = "The server runs the maximum number of experiments")))]
pub async fn create(
    State(app): State<App>,
    caller: Caller,
    Json(body): Json<Value>,
) -> Result<(StatusCode, axum::Json<Experiment>), ApiError> {
    let mut definition: ExperimentDefinition =
        serde_path_to_error::deserialize(&body).map_err(|error| ApiError::from_deserialization(&error))?;
    // A stored experiment of an earlier version may repeat a seed and can still be resumed.
    definition.check_seeds()?;
    let loaded = app.get_or_load(definition.model.as_deref()).await?;
    definition.check_rights(&app, &caller)?;
    // The default model may change before the experiment is resumed.
    definition.model.get_or_insert_with(|| loaded.name().to_owned());
    let (definition, mods) = check(&app, &loaded, definition).await?;
    let id = system::new_id();
    let active = ActiveExperiment::add(&app, id)?;
    let scorer = scorer(&app, &definition).await?;
    let scope = caller.scope.clone();
    let cells = definition.cells();
    let stored = StoredDefinition { definition: &definition, versions: Versions::new(&loaded, &mods) };
    let stored = serde_json::to_string(&stored).map_err(ApiError::internal)?;
    let execution =
        Execution { app: app.clone(), loaded, mods, caller, id, definition, scorer, cancelled: active.cancelled() };
    // In a task, which a disconnect of the client does not end between the insertion and the execution.
    let started = tokio::spawn(async move {
        let new = NewExperiment {
            id,
            owner: execution.caller.tenant.as_ref(),
            name: &execution.definition.name,
            definition: &stored,
            cells: i32::try_from(cells).map_err(ApiError::internal)?,
        };
        execution.app.store()?.add_experiment(&new, execution.app.now()).await?;
        active.execute();
        execution.spawn(CellTask::all(cells));
        Ok::<_, ApiError>(())
    });
    started.await.map_err(ApiError::internal)??;
    Ok((StatusCode::CREATED, axum::Json(find(&app, &scope, &id.to_string()).await?)))
}

/// Lists experiments, newest first.
#[utoipa::path(get, path = "/api/v1/experiments", operation_id = "list_experiments", tag = "experiments", responses(
    (status = 200, body = ExperimentList)))]
pub async fn list(State(app): State<App>, scope: Scope) -> Result<axum::Json<ExperimentList>, ApiError> {
    let store = app.store()?;
    let active = app.experiments().ids();
    let mut experiments = store.experiments(&scope).await?;
    experiments
        .iter_mut()
        .for_each(|experiment| app.experiments().update_state(&active, store.server_id(), experiment));
    Ok(axum::Json(ExperimentList { experiments }))
}

/// Returns an experiment with its summary and up to 500 cells of its grid: state, run, tokens, log-probability and score
/// of each.
#[utoipa::path(get, path = "/api/v1/experiments/{id}", operation_id = "show_experiment", tag = "experiments",
    params(("id" = String, Path, description = "Id of the experiment"), CellRange), responses(
    (status = 200, body = ExperimentResponse),
    (status = 400, body = Problem, description = "The query is invalid"),
    (status = 404, body = Problem)))]
pub async fn show(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(range): Query<CellRange>,
) -> Result<axum::Json<ExperimentResponse>, ApiError> {
    let experiment = find(&app, &scope, &id).await?;
    if !(0..experiment.cells).contains(&range.from) {
        let detail = format!("`from` must be from 0 to {}, got {}", experiment.cells - 1, range.from);
        return Err(ApiError::invalid("from", detail));
    }
    let (definition, _) = parse_stored(&experiment.definition)?;
    let end = experiment.cells.min(range.from.saturating_add(MAX_PAGE_CELLS));
    let cells = app.store()?.cells(&scope, experiment.experiment_id, range.from..end).await?;
    let grid = cells.into_iter().map(|cell| {
        let position = definition.position(usize::try_from(cell.cell).unwrap_or_default());
        GridCell { position, cell }
    });
    let grid = grid.collect();
    let outcomes = app.store()?.cell_outcomes(&scope, experiment.experiment_id).await?;
    let summary = ExperimentSummary::new(definition.grid(), definition.cells(), &outcomes);
    let next = (end < experiment.cells).then_some(end);
    Ok(axum::Json(ExperimentResponse { experiment, definition, summary, grid, next }))
}

/// Cancels a running experiment. Its active runs end at once, or within seconds if another server runs them, and its other
/// cells are not started.
#[utoipa::path(post, path = "/api/v1/experiments/{id}/cancel", operation_id = "cancel_experiment", tag = "experiments",
    params(("id" = String, Path, description = "Id of the experiment")), responses(
    (status = 200, body = Experiment), (status = 404, body = Problem),
    (status = 409, body = Problem, description = "The experiment has ended")))]
pub async fn cancel(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
) -> Result<axum::Json<Experiment>, ApiError> {
    let experiment = find(&app, &scope, &id).await?;
    if !app.store()?.cancel_experiment(experiment.experiment_id).await? {
        return Err(ApiError::conflict(format!("experiment '{id}' has ended")));
    }
    app.experiments().cancel(experiment.experiment_id);
    Ok(axum::Json(find(&app, &scope, &id).await?))
}

/// Runs the cells of a cancelled or interrupted experiment whose runs have not ended by themselves, with the same versions
/// of the model and the mods. Scores the stored answers of runs that are done and were not scored.
#[utoipa::path(post, path = "/api/v1/experiments/{id}/resume", operation_id = "resume_experiment", tag = "experiments",
    params(("id" = String, Path, description = "Id of the experiment")), responses(
    (status = 200, body = Experiment),
    (status = 400, body = Problem, description = "A cell is no longer valid"),
    (status = 403, body = Problem, description = "The key may not upload mods, which a Python scorer requires"),
    (status = 404, body = Problem),
    (status = 409, body = Problem, description = "The experiment is running or done, or its model or a mod has changed"),
    (status = 429, body = Problem, description = "The server runs the maximum number of experiments")))]
pub async fn resume(
    State(app): State<App>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<axum::Json<Experiment>, ApiError> {
    let scope = caller.scope.clone();
    let experiment = find(&app, &scope, &id).await?;
    let conflict = |why: &str| ApiError::conflict(format!("experiment '{id}' {why}"));
    match experiment.state {
        ExperimentState::Running => return Err(conflict("is running")),
        ExperimentState::Done => return Err(conflict("is done")),
        ExperimentState::Cancelled | ExperimentState::Interrupted => {}
    }
    let (definition, versions) = parse_stored(&experiment.definition)?;
    let loaded = app.get_or_load(definition.model.as_deref()).await?;
    definition.check_rights(&app, &caller)?;
    let (definition, mods) = check(&app, &loaded, definition).await?;
    if let Some(difference) = versions.and_then(|created| created.difference(&Versions::new(&loaded, &mods))) {
        return Err(conflict(&format!("cannot be resumed: {difference}")));
    }
    let experiment_id = experiment.experiment_id;
    let active = ActiveExperiment::add(&app, experiment_id)?;
    let scorer = scorer(&app, &definition).await?;
    // The runs belong to the owner of the experiment, also if an administrator resumes it.
    let caller = Caller { tenant: experiment.owner.clone().map(Into::into), ..caller };
    let cancelled = active.cancelled();
    let execution =
        Execution { app: app.clone(), loaded, mods, caller, id: experiment_id, definition, scorer, cancelled };
    let read_scope = scope.clone();
    // In a task, which a disconnect of the client does not end between the resumption and the execution.
    let resumed = tokio::spawn(async move {
        let store = execution.app.store()?.clone();
        if !store.resume_experiment(&experiment).await? {
            return Ok(false);
        }
        // Read last: from now on, no other server stores cells.
        let outcomes = store.cell_outcomes(&read_scope, experiment_id).await?;
        let tasks = CellTask::remaining(execution.definition.cells(), &outcomes);
        active.execute();
        execution.spawn(tasks);
        Ok::<_, ApiError>(true)
    });
    if !resumed.await.map_err(ApiError::internal)?? {
        return Err(conflict("was resumed or removed by another request"));
    }
    Ok(axum::Json(find(&app, &scope, &id).await?))
}

/// Removes an experiment, which is cancelled if it is running. Its runs remain.
#[utoipa::path(delete, path = "/api/v1/experiments/{id}", operation_id = "remove_experiment", tag = "experiments",
    params(("id" = String, Path, description = "Id of the experiment")), responses(
    (status = 204), (status = 404, body = Problem)))]
pub async fn remove(State(app): State<App>, scope: Scope, Path(id): Path<String>) -> Result<StatusCode, ApiError> {
    let experiment = find(&app, &scope, &id).await?;
    app.store()?.remove_experiment(experiment.experiment_id).await?;
    app.experiments().cancel(experiment.experiment_id);
    Ok(StatusCode::NO_CONTENT)
}

/// A change of a cell.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CellChange {
    /// Score from 0 to 1; null removes it.
    #[schema(minimum = 0, maximum = 1)]
    score: Option<f32>,
}

/// Sets the score of a cell that has ended, in place of the scorer's.
#[utoipa::path(put, path = "/api/v1/experiments/{id}/cells/{cell}", operation_id = "score_cell", tag = "experiments",
    params(("id" = String, Path, description = "Id of the experiment"), ("cell" = i32, Path, description = "Number of the cell")),
    request_body = CellChange, responses(
    (status = 204),
    (status = 400, body = Problem, description = "The score is not from 0 to 1"),
    (status = 404, body = Problem),
    (status = 409, body = Problem, description = "The cell has not ended")))]
pub async fn score(
    State(app): State<App>,
    scope: Scope,
    Path((id, cell)): Path<(String, i32)>,
    Json(change): Json<CellChange>,
) -> Result<StatusCode, ApiError> {
    if let Some(score) = change.score.filter(|score| !(0.0..=1.0).contains(score)) {
        return Err(ApiError::invalid("score", format!("`score` must be a number from 0 to 1 or null, got {score}")));
    }
    let experiment = find(&app, &scope, &id).await?;
    if !(0..experiment.cells).contains(&cell) {
        return Err(ApiError::not_found("cell", cell));
    }
    if !app.store()?.set_score(experiment.experiment_id, cell, change.score).await? {
        return Err(ApiError::conflict(format!("cell {cell} of experiment '{id}' has not ended")));
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the experiment with an id.
async fn find(app: &App, scope: &Scope, id: &str) -> Result<Experiment, ApiError> {
    let unknown = || ApiError::not_found("experiment", id);
    let experiment_id: Uuid = id.parse().map_err(|_| unknown())?;
    let active = app.experiments().ids();
    let mut experiment = app.store()?.experiment(scope, experiment_id).await?.ok_or_else(unknown)?;
    app.experiments().update_state(&active, app.store()?.server_id(), &mut experiment);
    Ok(experiment)
}

/// Checks a definition on a blocking thread: checking thousands of cells takes long. Returns it with the mods of each list.
async fn check(
    app: &App,
    loaded: &LoadedModel,
    definition: ExperimentDefinition,
) -> Result<(ExperimentDefinition, Vec<Vec<SelectedMod>>), ApiError> {
    let (app, loaded) = (app.clone(), loaded.clone());
    let check = move || definition.check(&app, &loaded).map(|mods| (definition, mods));
    tokio::task::spawn_blocking(check).await.map_err(ApiError::internal)?
}

/// Creates the scorer of a definition. The import of Python code takes a while.
async fn scorer(app: &App, definition: &ExperimentDefinition) -> Result<Option<Arc<Scorer>>, ApiError> {
    let (app, definition) = (app.clone(), definition.clone());
    let create = move || definition.scorer(&app).map(|scorer| scorer.map(Arc::new));
    tokio::task::spawn_blocking(create).await.map_err(ApiError::internal)?
}

/// An experiment that counts as active. Dropping it ends that, unless it is executed.
struct ActiveExperiment {
    app: App,
    id: Uuid,
    cancelled: CancellationToken,
    is_executed: bool,
}

impl ActiveExperiment {
    /// Adds an experiment to the active ones.
    ///
    /// # Errors
    /// It is active already, or the server runs the maximum number of experiments.
    fn add(app: &App, id: Uuid) -> Result<Self, ApiError> {
        let cancelled = app.experiments().add(id).map_err(|reason| not_added(id, reason))?;
        Ok(Self { app: app.clone(), id, cancelled, is_executed: false })
    }

    /// Returns the token that cancels the experiment.
    fn cancelled(&self) -> CancellationToken {
        self.cancelled.clone()
    }

    /// Leaves the removal to the execution.
    fn execute(mut self) {
        self.is_executed = true;
    }
}

impl Drop for ActiveExperiment {
    fn drop(&mut self) {
        if !self.is_executed {
            self.app.experiments().remove(self.id);
        }
    }
}

/// Returns the error of an experiment that this server cannot run.
fn not_added(id: Uuid, reason: NotAdded) -> ApiError {
    match reason {
        NotAdded::Active => {
            ApiError::conflict(format!("experiment '{id}' is still being cancelled, or another request resumes it"))
        }
        NotAdded::TooMany => {
            let detail = format!(
                "this server runs {MAX_ACTIVE_EXPERIMENTS} experiments already; try again when one of them has ended"
            );
            ApiError::new(ErrorKind::Busy, detail)
        }
    }
}
