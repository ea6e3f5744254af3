//! Experiments: grids of runs, with the run and the score of each cell.

use super::family::mean_logprobs;
use super::rows::clean;
use super::runs::{RunSummary, select_runs};
use super::scope::{owned, owners, visible};
use super::{Error, Store};
use crate::events::{FinishReason, RunId, RunStatus, Scope, Tenant};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::FromRow;
use std::collections::HashMap;
use std::ops::Range;
use utoipa::ToSchema;
use uuid::Uuid;

/// Maximum experiments of a list.
const MAX_EXPERIMENTS: i64 = 200;

/// State of an experiment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExperimentState {
    /// Cells are being run.
    Running,
    /// All cells have ended.
    Done,
    /// A client cancelled it.
    Cancelled,
    /// Its server ended before all cells had ended.
    Interrupted,
}

impl ExperimentState {
    /// All states.
    const ALL: [Self; 4] = [Self::Running, Self::Done, Self::Cancelled, Self::Interrupted];

    /// Returns the name used in the database.
    const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Done => "done",
            Self::Cancelled => "cancelled",
            Self::Interrupted => "interrupted",
        }
    }
}

impl TryFrom<String> for ExperimentState {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        let state = Self::ALL.into_iter().find(|state| state.as_str() == name);
        state.ok_or_else(|| format!("unknown state of an experiment '{name}'"))
    }
}

/// An experiment to store.
#[derive(Debug, Clone)]
pub struct NewExperiment<'a> {
    /// Its id.
    pub id: Uuid,
    /// Its owner.
    pub owner: Option<&'a Tenant>,
    /// Its name.
    pub name: &'a str,
    /// Its definition as JSON.
    pub definition: &'a str,
    /// Number of its cells.
    pub cells: i32,
}

/// A stored experiment.
#[derive(Debug, Clone, PartialEq, Serialize, FromRow, ToSchema)]
pub struct Experiment {
    /// Its id, a `UUIDv7`.
    #[schema(value_type = String)]
    pub experiment_id: Uuid,
    /// Its name.
    pub name: String,
    /// Time of its creation.
    pub created_at: DateTime<Utc>,
    /// Its state.
    #[sqlx(try_from = "String")]
    pub state: ExperimentState,
    /// Number of its cells.
    pub cells: i32,
    /// Its owner.
    #[serde(skip)]
    pub owner: Option<String>,
    /// The server that runs it.
    #[serde(skip)]
    pub server_id: Uuid,
    /// Its definition as JSON; empty in a list.
    #[serde(skip)]
    pub definition: String,
}

/// State of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CellState {
    /// Not started.
    Pending,
    /// Its run was started.
    Running,
    /// Its run ended by itself.
    Done,
    /// Its run was cancelled.
    Cancelled,
    /// Its run failed or could not be started.
    Failed,
    /// The server died during its run.
    Interrupted,
    /// Its run was deleted.
    Deleted,
}

/// A cell of the grid with its run.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ExperimentCell {
    /// Number of the cell, from 0.
    pub cell: i32,
    /// State of the cell.
    pub state: CellState,
    /// Its run.
    #[schema(value_type = Option<String>)]
    pub run_id: Option<RunId>,
    /// Finish reason of the run.
    pub finish_reason: Option<FinishReason>,
    /// Tokens of the answer.
    pub completion_tokens: i32,
    /// Mean ln p of the answer's tokens.
    pub mean_logprob: Option<f64>,
    /// Score from 0 to 1; null without a scorer and until the end of the run.
    pub score: Option<f32>,
    /// Beginning of the answer.
    pub output_preview: String,
    /// The error of a failed cell.
    pub error: Option<String>,
}

/// The row of a started cell.
#[derive(Debug, Clone, PartialEq, FromRow)]
pub struct CellRecord {
    /// Number of the cell.
    pub cell: i32,
    /// Its run.
    pub run_id: Option<Uuid>,
    /// Its score.
    pub score: Option<f32>,
    /// True if the run has ended and is stored.
    pub ended: bool,
    /// Error of a run that could not be started.
    pub error: Option<String>,
}

/// Reads experiments. The servers remove the rows of dead ones, so that their experiments are interrupted.
macro_rules! select_experiments {
    ($definition:literal, $rest:literal) => {
        concat!(
            "select experiment_id, name, created_at, cells, owner, server_id, ",
            $definition,
            " as definition,
                case when state = 'running' and not exists
                    (select 1 from servers where servers.server_id = experiments.server_id)
                then 'interrupted' else state end as state
            from experiments where ",
            owned!(1),
            $rest
        )
    };
}

impl Store {
    /// Stores an experiment that this server runs.
    ///
    /// # Errors
    /// The database failed.
    pub async fn add_experiment(&self, new: &NewExperiment<'_>, now: DateTime<Utc>) -> Result<(), Error> {
        sqlx::query(
            "insert into experiments (experiment_id, created_at, owner, name, definition, cells, server_id, state)
            values ($1, $2, $3, $4, $5::json, $6, $7, 'running')",
        )
        .bind(new.id)
        .bind(now)
        .bind(new.owner.map(Tenant::as_str))
        .bind(clean(new.name))
        .bind(new.definition)
        .bind(new.cells)
        .bind(self.inner.server_id)
        .execute(&self.inner.pool)
        .await?;
        Ok(())
    }

    /// Returns the newest experiments in the scope, newest first.
    ///
    /// # Errors
    /// The database failed.
    pub async fn experiments(&self, scope: &Scope) -> Result<Vec<Experiment>, Error> {
        let read = select_experiments!("''", " order by experiment_id desc limit $2");
        Ok(sqlx::query_as(read).bind(owners(scope)).bind(MAX_EXPERIMENTS).fetch_all(&self.inner.pool).await?)
    }

    /// Returns an experiment in the scope.
    ///
    /// # Errors
    /// The database failed.
    pub async fn experiment(&self, scope: &Scope, id: Uuid) -> Result<Option<Experiment>, Error> {
        let read = select_experiments!("definition::text", " and experiment_id = $2");
        Ok(sqlx::query_as(read).bind(owners(scope)).bind(id).fetch_optional(&self.inner.pool).await?)
    }

    /// Changes the state of a running experiment. Returns false if it is not running or does not exist.
    ///
    /// # Errors
    /// The database failed.
    pub async fn end_experiment(&self, id: Uuid, state: ExperimentState) -> Result<bool, Error> {
        let end = "update experiments set state = $2 where experiment_id = $1 and state = 'running'";
        let ended = sqlx::query(end).bind(id).bind(state.as_str()).execute(&self.inner.pool).await?;
        Ok(ended.rows_affected() > 0)
    }

    /// Makes this server run an experiment again. Returns false if another server resumed or removed it since it was read.
    ///
    /// # Errors
    /// The database failed.
    pub async fn resume_experiment(&self, read: &Experiment) -> Result<bool, Error> {
        // The stored state of an interrupted experiment is still `running`.
        let stored = match read.state {
            ExperimentState::Interrupted => ExperimentState::Running,
            state => state,
        };
        let resume = sqlx::query(
            "update experiments set state = 'running', server_id = $2
            where experiment_id = $1 and server_id = $3 and state = $4",
        );
        let resume = resume.bind(read.experiment_id).bind(self.inner.server_id).bind(read.server_id);
        let resumed = resume.bind(stored.as_str()).execute(&self.inner.pool).await?;
        Ok(resumed.rows_affected() > 0)
    }

    /// Removes an experiment. Its runs remain.
    ///
    /// # Errors
    /// The database failed.
    pub async fn remove_experiment(&self, id: Uuid) -> Result<(), Error> {
        let remove = sqlx::query("delete from experiments where experiment_id = $1");
        remove.bind(id).execute(&self.inner.pool).await?;
        Ok(())
    }

    /// Stores the current run of a cell. Returns false if the experiment was removed, or if the run has not ended and the
    /// experiment is not running any more.
    ///
    /// # Errors
    /// The database failed.
    pub async fn set_cell(&self, experiment: Uuid, cell: &CellRecord) -> Result<bool, Error> {
        let set = sqlx::query(
            "insert into experiment_cells (experiment_id, cell, run_id, score, ended, error)
            select experiment_id, $2, $3, $4, $5, $6 from experiments where experiment_id = $1 and (state = 'running' or $5)
            on conflict (experiment_id, cell) do update set run_id = excluded.run_id, score = excluded.score,
                ended = excluded.ended, error = excluded.error",
        )
        .bind(experiment)
        .bind(cell.cell)
        .bind(cell.run_id)
        .bind(cell.score)
        .bind(cell.ended)
        .bind(cell.error.as_deref().map(clean))
        .execute(&self.inner.pool)
        .await?;
        Ok(set.rows_affected() > 0)
    }

    /// Returns cells of an experiment, pending ones included, with their runs as far as the scope covers them.
    ///
    /// # Errors
    /// The database failed.
    pub async fn cells(
        &self,
        scope: &Scope,
        experiment: Uuid,
        range: Range<i32>,
    ) -> Result<Vec<ExperimentCell>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        let started: Vec<CellRecord> = sqlx::query_as(
            "select cell, run_id, score, ended, error from experiment_cells
            where experiment_id = $1 and cell >= $2 and cell < $3 order by cell",
        )
        .bind(experiment)
        .bind(range.start)
        .bind(range.end)
        .fetch_all(&mut connection)
        .await?;
        let ids: Vec<Uuid> = started.iter().filter_map(|cell| cell.run_id).collect();
        let read = concat!(select_runs!("null::text", "where run_id = any($1) and "), visible!(2));
        let runs: Vec<RunSummary> =
            sqlx::query_as(read).bind(&ids).bind(owners(scope)).fetch_all(&mut connection).await?;
        let runs: HashMap<RunId, RunSummary> = runs.into_iter().map(|run| (run.run_id, run)).collect();
        let means = mean_logprobs(&mut connection, ids).await?;
        let mut started: HashMap<i32, CellRecord> = started.into_iter().map(|cell| (cell.cell, cell)).collect();
        let cells = range.map(|number| {
            let record = started.remove(&number);
            let run_id = record.as_ref().and_then(|record| record.run_id).map(RunId);
            let run = run_id.and_then(|id| runs.get(&id));
            ExperimentCell {
                cell: number,
                state: state(record.as_ref(), run),
                run_id,
                finish_reason: run.and_then(|run| run.finish_reason),
                completion_tokens: run.map_or(0, |run| run.completion_tokens),
                mean_logprob: run_id.and_then(|id| means.get(&id).copied().flatten()),
                score: record.as_ref().and_then(|record| record.score),
                output_preview: run.map(|run| run.output_preview.clone()).unwrap_or_default(),
                error: record.and_then(|record| record.error),
            }
        });
        Ok(cells.collect())
    }
}

/// Returns the state of a cell. The rows of a run may be stored after the one of its cell.
fn state(record: Option<&CellRecord>, run: Option<&RunSummary>) -> CellState {
    match (record, run) {
        (None, _) => CellState::Pending,
        (Some(CellRecord { run_id: None, .. }), _) => CellState::Failed,
        (Some(record), None) => {
            if record.ended {
                CellState::Deleted
            } else {
                CellState::Running
            }
        }
        (Some(_), Some(run)) => match run.status {
            RunStatus::Running => CellState::Running,
            RunStatus::Done => CellState::Done,
            RunStatus::Cancelled => CellState::Cancelled,
            RunStatus::Failed => CellState::Failed,
            RunStatus::Interrupted => CellState::Interrupted,
        },
    }
}
