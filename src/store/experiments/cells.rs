//! The cells of an experiment, with their runs.

use super::super::family::mean_logprobs;
use super::super::runs::{RunSummary, select_runs};
use super::super::scope::{owners, visible};
use super::super::text::clean;
use super::super::{Error, Store};
use crate::events::{FinishReason, RunId, RunStatus, Scope};
use serde::Serialize;
use sqlx::FromRow;
use std::collections::HashMap;
use std::ops::Range;
use utoipa::ToSchema;
use uuid::Uuid;

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
    /// Tokens of the answer; null for a cell without a run, and if the run was deleted.
    pub completion_tokens: Option<i32>,
    /// Mean ln p of the added tokens, computed like `mean_logprob` in the family of a run.
    pub mean_logprob: Option<f64>,
    /// Score from 0 to 1; null without a scorer and until the end of the run.
    pub score: Option<f32>,
    /// Beginning of the answer.
    pub output_preview: String,
    /// The error of a failed cell.
    pub error: Option<String>,
    /// The error of the scorer, for a cell without a score.
    pub score_error: Option<String>,
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
    /// Error of a run that could not be started, or of the scorer if there is a run.
    pub error: Option<String>,
}

/// The result of a started cell.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CellOutcome {
    /// Number of the cell.
    pub cell: i32,
    /// Its run, if the scope covers it.
    pub run_id: Option<RunId>,
    /// State of the cell.
    pub state: CellState,
    /// True if the end of the cell is stored, with the score.
    pub ended: bool,
    /// Its score.
    pub score: Option<f32>,
    /// Tokens of the answer.
    pub completion_tokens: i32,
}

impl Store {
    /// Stores the current run of a cell. Returns false if the experiment was removed, if another server runs it, or if it is
    /// no longer running and the cell has not ended.
    ///
    /// # Errors
    /// The database failed.
    pub async fn set_cell(&self, experiment: Uuid, cell: &CellRecord) -> Result<bool, Error> {
        let set = sqlx::query(
            "insert into experiment_cells (experiment_id, cell, run_id, score, ended, error)
            select experiment_id, $2, $3, $4, $5, $6 from experiments
            where experiment_id = $1 and server_id = $7 and (state = 'running' or $5) for share
            on conflict (experiment_id, cell) do update set run_id = excluded.run_id, score = excluded.score,
                ended = excluded.ended, error = excluded.error",
        )
        .bind(experiment)
        .bind(cell.cell)
        .bind(cell.run_id)
        .bind(cell.score)
        .bind(cell.ended)
        .bind(cell.error.as_deref().map(clean))
        .bind(self.inner.server_id)
        .execute(&self.inner.pool)
        .await?;
        Ok(set.rows_affected() > 0)
    }

    /// Sets or removes the score of a cell that has ended. Returns false if the cell has not ended.
    ///
    /// # Errors
    /// The database failed.
    pub async fn set_score(&self, experiment: Uuid, cell: i32, score: Option<f32>) -> Result<bool, Error> {
        let set = "update experiment_cells set score = $3, error = case when run_id is null then error end
            where experiment_id = $1 and cell = $2 and ended";
        let set = sqlx::query(set).bind(experiment).bind(cell).bind(score).execute(&self.inner.pool).await?;
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
        let means = mean_logprobs(&mut connection, runs.keys().map(|run_id| run_id.0).collect()).await?;
        let mut started: HashMap<i32, CellRecord> = started.into_iter().map(|cell| (cell.cell, cell)).collect();
        let cells = range.map(|number| {
            let record = started.remove(&number);
            let run_id = record.as_ref().and_then(|record| record.run_id).map(RunId);
            let run = run_id.and_then(|id| runs.get(&id));
            let state = state(record.as_ref(), run.map(|run| run.status));
            let score = record.as_ref().and_then(|record| record.score);
            let (score_error, error) = record
                .and_then(|record| record.error)
                .map_or((None, None), |error| if run_id.is_some() { (Some(error), None) } else { (None, Some(error)) });
            ExperimentCell {
                cell: number,
                state,
                run_id,
                finish_reason: run.and_then(|run| run.finish_reason),
                completion_tokens: run.map(|run| run.completion_tokens),
                mean_logprob: run_id.and_then(|id| means.get(&id).copied().flatten()),
                score,
                output_preview: run.map(|run| run.output_preview.clone()).unwrap_or_default(),
                error,
                score_error,
            }
        });
        Ok(cells.collect())
    }

    /// Returns the results of all started cells.
    ///
    /// # Errors
    /// The database failed.
    pub async fn cell_outcomes(&self, scope: &Scope, experiment: Uuid) -> Result<Vec<CellOutcome>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        let started: Vec<CellRecord> = sqlx::query_as(
            "select cell, run_id, score, ended, error from experiment_cells where experiment_id = $1 order by cell",
        )
        .bind(experiment)
        .fetch_all(&mut connection)
        .await?;
        let ids: Vec<Uuid> = started.iter().filter_map(|cell| cell.run_id).collect();
        let read =
            concat!("select run_id, status, completion_tokens from runs where run_id = any($1) and ", visible!(2));
        let runs: Vec<(Uuid, String, i32)> =
            sqlx::query_as(read).bind(&ids).bind(owners(scope)).fetch_all(&mut connection).await?;
        let runs: HashMap<Uuid, (Option<RunStatus>, i32)> =
            runs.into_iter().map(|(id, status, tokens)| (id, (RunStatus::from_name(&status), tokens))).collect();
        let outcome = |record: CellRecord| {
            let run = record.run_id.and_then(|id| runs.get(&id));
            CellOutcome {
                cell: record.cell,
                run_id: run.and(record.run_id).map(RunId),
                state: state(Some(&record), run.and_then(|(status, _)| *status)),
                ended: record.ended,
                score: record.score,
                completion_tokens: run.map_or(0, |(_, tokens)| *tokens),
            }
        };
        Ok(started.into_iter().map(outcome).collect())
    }
}

/// Returns the state of a cell. The rows of a run may be stored after the one of its cell.
fn state(record: Option<&CellRecord>, status: Option<RunStatus>) -> CellState {
    match (record, status) {
        (None, _) => CellState::Pending,
        (Some(CellRecord { run_id: None, .. }), _) => CellState::Failed,
        (Some(record), None) => {
            if record.ended {
                CellState::Deleted
            } else {
                CellState::Running
            }
        }
        (Some(_), Some(status)) => match status {
            RunStatus::Running => CellState::Running,
            RunStatus::Done => CellState::Done,
            RunStatus::Cancelled => CellState::Cancelled,
            RunStatus::Failed => CellState::Failed,
            RunStatus::Interrupted => CellState::Interrupted,
        },
    }
}
