//! Execution of an experiment: its cells as ordinary runs, as many at a time as the model has slots.

use super::definition::{ExperimentDefinition, Scorer};
use crate::engine::{Generation, Output, SubmitError};
use crate::events::{EndCause, RunEnd, RunId, RunStatus};
use crate::mods::python::ScoredCell;
use crate::server::{ApiError, App, Caller, Loaded};
use crate::store::{CellRecord, ExperimentState};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use uuid::Uuid;

/// Time between attempts to submit a run to an engine with a full queue.
const BUSY_INTERVAL: Duration = Duration::from_millis(200);

/// An experiment to execute.
pub(super) struct Execution {
    pub(super) app: App,
    pub(super) loaded: Loaded,
    pub(super) caller: Caller,
    pub(super) id: Uuid,
    pub(super) definition: ExperimentDefinition,
    pub(super) scorer: Option<Arc<Scorer>>,
    pub(super) cancelled: watch::Receiver<bool>,
}

impl Execution {
    /// Executes the cells in the background. The experiment survives the client that started it.
    pub(super) fn spawn(self, cells: Vec<usize>) {
        tokio::spawn(async move {
            let execution = Arc::new(self);
            let outcome = execution.run(cells).await;
            let Self { app, id, .. } = &*execution;
            let store = match outcome {
                Ok(true) => app.store(),
                Ok(false) => Err(ApiError::unavailable("the server is stopping")),
                Err(error) => Err(error),
            };
            let stored = match store {
                Ok(store) => store.end_experiment(*id, ExperimentState::Done).await.map_err(Into::into),
                Err(error) => Err(error),
            };
            app.experiments().remove(*id);
            if let Err(error) = stored {
                tracing::warn!(experiment = %id, error = %error.problem().detail, "experiment interrupted");
            }
        });
    }

    /// Runs cells. Returns false if the server stopped before they had ended.
    async fn run(self: &Arc<Self>, cells: Vec<usize>) -> Result<bool, ApiError> {
        let slots = self.loaded.engine().slots().max(1) as usize;
        let mut active = JoinSet::new();
        for cell in cells {
            while active.len() >= slots {
                task_result(active.join_next().await)?;
            }
            if self.is_cancelled() {
                break;
            }
            let Some(generation) = self.start(cell).await? else { continue };
            let record = record(cell, Some(&generation));
            if !self.app.store()?.set_cell(self.id, &record).await? {
                // Another server or a client cancelled or removed the experiment. Stopping fails only if the run has
                // ended.
                let _ = generation.control.stop(EndCause::Cancel, "the experiment was cancelled").await;
                break;
            }
            active.spawn(Arc::clone(self).finish(record, generation));
        }
        while let Some(ended) = active.join_next().await {
            task_result(Some(ended))?;
        }
        Ok(self.app.ready().is_ok())
    }

    fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow() || self.app.ready().is_err()
    }

    /// Starts the run of a cell. Returns `None` after an error, which is stored.
    async fn start(&self, cell: usize) -> Result<Option<Generation>, ApiError> {
        let mut request = match self.definition.request(&self.app, &self.loaded, self.id, cell) {
            Ok(request) => request,
            Err(error) => return self.fail(cell, error).await,
        };
        self.caller.set_owner(&mut request);
        loop {
            match self.loaded.engine().submit(request.clone()).await {
                Ok(generation) => return Ok(Some(generation)),
                Err(SubmitError::Busy { .. }) if !self.is_cancelled() => tokio::time::sleep(BUSY_INTERVAL).await,
                Err(SubmitError::Stopped) => return Err(SubmitError::Stopped.into()),
                Err(error) => return self.fail(cell, error.into()).await,
            }
        }
    }

    async fn fail(&self, cell: usize, error: ApiError) -> Result<Option<Generation>, ApiError> {
        let record = CellRecord { error: Some(error.problem().detail), ended: true, ..record(cell, None) };
        self.app.store()?.set_cell(self.id, &record).await?;
        Ok(None)
    }

    /// Waits until a run has ended and is recorded, then stores its score.
    async fn finish(self: Arc<Self>, record: CellRecord, generation: Generation) -> Result<(), ApiError> {
        let Generation { run_id, mut output, control, .. } = generation;
        let mut cancelled = self.cancelled.clone();
        let end = tokio::select! {
            end = end_of(&mut output) => end,
            () = wait_for_cancel(&mut cancelled) => {
                // Stopping fails only if the run has ended.
                let _ = control.stop(EndCause::Cancel, "the experiment was cancelled").await;
                end_of(&mut output).await
            }
        };
        let end = end.map(|end| (run_id, end));
        if self.app.find_run(&self.caller.scope, &run_id.to_string()).await.is_err() {
            return Ok(());
        }
        let (score, error) = match self.score(record.cell, end).await {
            Ok(score) => (score, None),
            Err(error) => (None, Some(error)),
        };
        self.app.store()?.set_cell(self.id, &CellRecord { score, error, ended: true, ..record }).await?;
        Ok(())
    }

    /// Scores a completed run on a blocking thread.
    async fn score(&self, cell: i32, end: Option<(RunId, Arc<RunEnd>)>) -> Result<Option<f32>, String> {
        let (Some(scorer), Some((run_id, end))) = (&self.scorer, end) else { return Ok(None) };
        let scorer = Arc::clone(scorer);
        let index = usize::try_from(cell).unwrap_or_default();
        let at = self.definition.position(index);
        let (prompt, mods, parameters) = self.definition.values(at);
        let cell = ScoredCell {
            cell: index,
            run_id: run_id.to_string(),
            prompt: prompt.to_owned(),
            mods: mods.to_vec(),
            parameters: parameters.clone(),
            seed: at.seed,
            finish_reason: end.finish.reason.as_str(),
            completion_tokens: end.finish.usage.completion_tokens,
        };
        let score = tokio::task::spawn_blocking(move || scorer.score(&end.finish.text, &cell));
        score.await.map_err(|_| "the scorer ended unexpectedly".to_owned())?
    }
}

fn record(cell: usize, generation: Option<&Generation>) -> CellRecord {
    let run_id = generation.map(|generation| generation.run_id.0);
    CellRecord { cell: i32::try_from(cell).unwrap_or(i32::MAX), run_id, score: None, ended: false, error: None }
}

/// Waits until the experiment is cancelled.
async fn wait_for_cancel(cancelled: &mut watch::Receiver<bool>) {
    // The sender exists until the execution ends.
    let _ = cancelled.wait_for(|cancelled| *cancelled).await;
}

/// Returns the end of a run that ended by itself.
async fn end_of(output: &mut mpsc::Receiver<Output>) -> Option<Arc<RunEnd>> {
    while let Some(output) = output.recv().await {
        if let Output::Ended(end) = output {
            return (end.status == RunStatus::Done).then_some(end);
        }
    }
    None
}

/// Returns the result of a task.
fn task_result(ended: Option<Result<Result<(), ApiError>, tokio::task::JoinError>>) -> Result<(), ApiError> {
    ended.map_or(Ok(()), |ended| ended.map_err(ApiError::internal)?)
}
