//! Execution of an experiment: its cells as ordinary runs, as many at a time as the model has slots.

use super::definition::{ExperimentDefinition, Scorer};
use crate::engine::{Generation, Output, SubmitError};
use crate::events::{EndCause, FinishReason, RunEnd, RunId, RunStatus};
use crate::mods::SelectedMod;
use crate::mods::python::ScoredCell;
use crate::server::{ApiError, App, Caller, LoadedModel};
use crate::store::{CellOutcome, CellRecord, CellState, RunSummary};
use axum::http::StatusCode;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

/// Time between attempts to submit a run to an engine with a full queue.
const BUSY_INTERVAL: Duration = Duration::from_millis(200);

/// Time between checks that this server still runs the experiment.
const OWNERSHIP_INTERVAL: Duration = Duration::from_secs(2);

/// A cell to execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CellTask {
    cell: usize,
    /// Its run, if the end of the cell is not stored. If this run is done, its stored answer is scored.
    run_id: Option<RunId>,
}

impl CellTask {
    /// Returns all cells of a new experiment.
    pub(super) fn all(cells: usize) -> Vec<Self> {
        (0..cells).map(|cell| Self { cell, run_id: None }).collect()
    }

    /// Returns the cells of a resumed experiment that have not ended by themselves, or whose end is not stored.
    pub(super) fn remaining(cells: usize, outcomes: &[CellOutcome]) -> Vec<Self> {
        let started: HashMap<usize, &CellOutcome> =
            outcomes.iter().filter_map(|outcome| Some((usize::try_from(outcome.cell).ok()?, outcome))).collect();
        let task = |cell: usize| match started.get(&cell) {
            None => Some(Self { cell, run_id: None }),
            Some(outcome) if !outcome.ended => Some(Self { cell, run_id: outcome.run_id }),
            Some(outcome) => match outcome.state {
                CellState::Done | CellState::Failed | CellState::Deleted => None,
                _ => Some(Self { cell, run_id: None }),
            },
        };
        (0..cells).filter_map(task).collect()
    }
}

/// A run that ended by itself, with its answer.
struct CompletedRun {
    run_id: RunId,
    answer: String,
    finish_reason: FinishReason,
    completion_tokens: u32,
}

/// An experiment to execute.
pub(super) struct Execution {
    pub(super) app: App,
    pub(super) loaded: LoadedModel,
    /// Mods of each list of the definition. A change of a mod does not affect the experiment.
    pub(super) mods: Vec<Vec<SelectedMod>>,
    pub(super) caller: Caller,
    pub(super) id: Uuid,
    pub(super) definition: ExperimentDefinition,
    pub(super) scorer: Option<Arc<Scorer>>,
    pub(super) cancelled: CancellationToken,
}

impl Execution {
    /// Executes the cells in the background. The experiment survives the client that started it.
    pub(super) fn spawn(self, tasks: Vec<CellTask>) {
        tokio::spawn(async move {
            let execution = Arc::new(self);
            let run = execution.run(tasks);
            tokio::pin!(run);
            let outcome = tokio::select! {
                outcome = &mut run => outcome,
                () = execution.cancel_when_lost() => run.await,
            };
            let Self { app, id, .. } = &*execution;
            let store = match outcome {
                Ok(true) => app.store(),
                Ok(false) => Err(ApiError::unavailable("the server is stopping")),
                Err(error) => Err(error),
            };
            let stored = match store {
                Ok(store) => store.complete_experiment(*id).await.map_err(Into::into),
                Err(error) => Err(error),
            };
            if let (Err(_), Ok(store)) = (&stored, app.store()) {
                // If this fails, only this server knows that the experiment is interrupted, until it stops.
                let _ = store.release_experiment(*id).await;
            }
            app.experiments().remove(*id);
            if let Err(error) = stored {
                tracing::warn!(experiment = %id, error = error.log_detail(), "experiment interrupted");
            }
        });
    }

    /// Runs cells. Returns false if the server stopped before they had ended. After an error, no further cell is started,
    /// and the ends of the active runs are still stored.
    async fn run(self: &Arc<Self>, tasks: Vec<CellTask>) -> Result<bool, ApiError> {
        let mut active = JoinSet::new();
        let mut outcome = self.start_all(tasks, &mut active).await;
        while let Some(ended) = active.join_next().await {
            outcome = outcome.and(task_result(Some(ended)));
        }
        outcome.map(|()| self.app.check_ready().is_ok())
    }

    /// Starts cells until the experiment is cancelled.
    async fn start_all(
        self: &Arc<Self>,
        tasks: Vec<CellTask>,
        active: &mut JoinSet<Result<(), ApiError>>,
    ) -> Result<(), ApiError> {
        let slots = self.loaded.engine().slots().max(1) as usize;
        for CellTask { cell, run_id } in tasks {
            while active.len() >= slots {
                task_result(active.join_next().await)?;
            }
            if self.is_cancelled() {
                break;
            }
            if let Some(run) = self.completed_run(run_id).await? {
                active.spawn(Arc::clone(self).score_stored(cell, run));
                continue;
            }
            let Some(generation) = self.start(cell).await? else { continue };
            let record = record(cell, Some(generation.run_id));
            if !self.store_cell(&record).await? {
                // Stopping fails only if the run has ended.
                let _ = generation.control.stop(EndCause::Cancel, "the experiment was cancelled").await;
                break;
            }
            active.spawn(Arc::clone(self).finish(record, generation));
        }
        Ok(())
    }

    fn is_cancelled(&self) -> bool {
        self.cancelled.is_cancelled() || self.app.check_ready().is_err()
    }

    /// Waits until the experiment is cancelled through another server, resumed on it, or removed, then cancels the
    /// execution. While the database is unavailable, the execution continues.
    async fn cancel_when_lost(&self) {
        loop {
            tokio::time::sleep(OWNERSHIP_INTERVAL).await;
            if let Ok(store) = self.app.store()
                && matches!(store.is_executor(self.id).await, Ok(false))
            {
                return self.app.experiments().cancel(self.id);
            }
        }
    }

    /// Stores a cell. Returns false if the experiment was cancelled, resumed on another server or removed. This cancels
    /// the execution, so that the other active runs end, too.
    async fn store_cell(&self, record: &CellRecord) -> Result<bool, ApiError> {
        let stored = self.app.store()?.set_cell(self.id, record).await?;
        if !stored {
            self.app.experiments().cancel(self.id);
        }
        Ok(stored)
    }

    /// Starts the run of a cell. Returns `None` if the execution was cancelled, or if the run cannot be started, e.g. because
    /// of the configuration of a mod; the cell has ended then.
    ///
    /// # Errors
    /// A mod was disabled or removed, the engine has stopped, or the database failed. The next cells would fail, too.
    async fn start(&self, cell: usize) -> Result<Option<Generation>, ApiError> {
        let request = self.definition.request(&self.app, &self.loaded, &self.mods, self.id, cell);
        let mut request = match request {
            Ok(request) => request,
            Err(error) => {
                // The cell has not ended, so a resumed experiment starts it again.
                self.store_error(cell, &error, false).await?;
                return Err(error);
            }
        };
        self.caller.set_owner(&mut request);
        loop {
            match self.loaded.engine().submit(request.clone()).await {
                Ok(generation) => return Ok(Some(generation)),
                Err(SubmitError::Busy { .. }) if self.is_cancelled() => return Ok(None),
                Err(SubmitError::Busy { .. }) => tokio::time::sleep(BUSY_INTERVAL).await,
                Err(SubmitError::Stopped) => return Err(SubmitError::Stopped.into()),
                Err(error) => {
                    self.store_error(cell, &error.into(), true).await?;
                    return Ok(None);
                }
            }
        }
    }

    /// Stores the error of a cell that could not be started, unless the end of the server may have caused it.
    async fn store_error(&self, cell: usize, error: &ApiError, ended: bool) -> Result<(), ApiError> {
        self.app.check_ready()?;
        let error = Some(error.problem().detail);
        self.store_cell(&CellRecord { ended, error, ..record(cell, None) }).await?;
        Ok(())
    }

    /// Waits until a run has ended and is recorded, then stores its score.
    ///
    /// # Errors
    /// The engine or the server stopped during the run, the database failed, or the recorder lags behind. The cell has not
    /// ended then.
    async fn finish(self: Arc<Self>, record: CellRecord, generation: Generation) -> Result<(), ApiError> {
        let Generation { run_id, mut output, control, .. } = generation;
        let end = tokio::select! {
            end = end_of(&mut output) => end,
            () = self.cancelled.cancelled() => {
                // Stopping fails only if the run has ended.
                let _ = control.stop(EndCause::Cancel, "the experiment was cancelled").await;
                end_of(&mut output).await
            }
        };
        let Some(end) = end else { return Err(SubmitError::Stopped.into()) };
        if matches!(end.finish.cause, Some(EndCause::EngineStopped | EndCause::Shutdown)) {
            return Err(SubmitError::Stopped.into());
        }
        // A run that was deleted meanwhile has ended, too.
        if let Err(error) = self.app.find_run(&self.caller.scope, &run_id.to_string()).await
            && error.status() != StatusCode::NOT_FOUND
        {
            return Err(error);
        }
        let completed = (end.status == RunStatus::Done).then(|| CompletedRun {
            run_id,
            answer: end.finish.text.clone(),
            finish_reason: end.finish.reason,
            completion_tokens: end.finish.usage.completion_tokens,
        });
        self.end_cell(record, completed).await
    }

    /// Returns the stored run of an earlier execution if it is done.
    async fn completed_run(&self, run_id: Option<RunId>) -> Result<Option<RunSummary>, ApiError> {
        let Some(run_id) = run_id else { return Ok(None) };
        match self.app.find_run(&self.caller.scope, &run_id.to_string()).await {
            Ok(run) => Ok(Some(run).filter(|run| run.status == RunStatus::Done)),
            Err(error) if error.status() == StatusCode::NOT_FOUND => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Scores the stored answer of a run, and stores the score.
    async fn score_stored(self: Arc<Self>, cell: usize, run: RunSummary) -> Result<(), ApiError> {
        let completed = if self.scorer.is_some() { self.read_answer(&run).await? } else { None };
        self.end_cell(record(cell, Some(run.run_id)), completed).await
    }

    /// Returns a stored run with its answer; `None` if it was deleted.
    async fn read_answer(&self, run: &RunSummary) -> Result<Option<CompletedRun>, ApiError> {
        let answer = self.app.store()?.answer(&self.caller.scope, run.run_id).await?;
        let Some(answer) = answer else { return Ok(None) };
        let finish_reason = run.finish_reason.unwrap_or(FinishReason::Stop);
        let completion_tokens = run.completion_tokens.max(0).cast_unsigned();
        Ok(Some(CompletedRun { run_id: run.run_id, answer, finish_reason, completion_tokens }))
    }

    /// Stores the end of a cell, with the score of a completed run.
    async fn end_cell(&self, record: CellRecord, run: Option<CompletedRun>) -> Result<(), ApiError> {
        let (score, error) = match self.score(record.cell, run).await {
            Ok(score) => (score, None),
            Err(error) => (None, Some(error)),
        };
        self.store_cell(&CellRecord { score, error, ended: true, ..record }).await?;
        Ok(())
    }

    /// Scores a completed run on a blocking thread.
    async fn score(&self, cell: i32, run: Option<CompletedRun>) -> Result<Option<f32>, String> {
        let (Some(scorer), Some(run)) = (&self.scorer, run) else { return Ok(None) };
        let scorer = Arc::clone(scorer);
        let index = usize::try_from(cell).unwrap_or_default();
        let at = self.definition.position(index);
        let (prompt, mods, parameters) = self.definition.values(at);
        let cell = ScoredCell {
            cell: index,
            run_id: run.run_id.to_string(),
            prompt: prompt.to_owned(),
            mods: mods.to_vec(),
            parameters: parameters.clone(),
            seed: at.seed,
            finish_reason: run.finish_reason.as_str(),
            completion_tokens: run.completion_tokens,
        };
        let score = tokio::task::spawn_blocking(move || scorer.score(&run.answer, &cell));
        score.await.map_err(|_| "the scorer ended unexpectedly".to_owned())?
    }
}

fn record(cell: usize, run_id: Option<RunId>) -> CellRecord {
    let run_id = run_id.map(|run_id| run_id.0);
    CellRecord { cell: i32::try_from(cell).unwrap_or(i32::MAX), run_id, score: None, ended: false, error: None }
}

/// Returns the end of a run; `None` if the engine stopped without reporting it.
async fn end_of(output: &mut mpsc::Receiver<Output>) -> Option<Arc<RunEnd>> {
    while let Some(output) = output.recv().await {
        if let Output::Ended(end) = output {
            return Some(end);
        }
    }
    None
}

/// Returns the result of a task.
fn task_result(ended: Option<Result<Result<(), ApiError>, tokio::task::JoinError>>) -> Result<(), ApiError> {
    ended.map_or(Ok(()), |ended| ended.map_err(ApiError::internal)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_remains_until_its_end_is_stored() {
        let run_id = Some(RunId(Uuid::from_u128(7)));
        let outcome =
            |cell, state, ended| CellOutcome { cell, run_id, state, ended, score: None, completion_tokens: 1 };
        let outcomes = [
            outcome(0, CellState::Done, true),
            outcome(1, CellState::Done, false),
            outcome(2, CellState::Cancelled, true),
            outcome(3, CellState::Failed, true),
            outcome(4, CellState::Failed, false),
            outcome(5, CellState::Deleted, true),
        ];
        let remaining: Vec<_> =
            CellTask::remaining(7, &outcomes).into_iter().map(|task| (task.cell, task.run_id)).collect();
        assert_eq!(remaining, [(1, run_id), (2, None), (4, run_id), (6, None)]);
    }
}
