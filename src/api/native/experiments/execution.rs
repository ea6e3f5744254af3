//! Execution of an experiment: its cells as ordinary runs, as many at a time as the model has slots.

use super::definition::{ExperimentDefinition, Scorer};
use crate::engine::{Generation, Output, SubmitError};
use crate::events::{EndCause, RunStatus};
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
    pub(super) scorer: Option<Scorer>,
    pub(super) cancelled: watch::Receiver<bool>,
}

impl Execution {
    /// Executes the cells in the background. The experiment survives the client that started it.
    pub(super) fn spawn(self, cells: Vec<usize>) {
        tokio::spawn(async move {
            let execution = Arc::new(self);
            let outcome = execution.run(cells).await;
            let Self { app, id, .. } = &*execution;
            let ended = match outcome {
                Ok(true) => app.store(),
                Ok(false) => Err(ApiError::unavailable("the server is stopping")),
                Err(error) => Err(error),
            };
            let stored = match ended {
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
                joined(active.join_next().await)?;
            }
            if self.is_cancelled() {
                break;
            }
            let Some(generation) = self.start(cell).await? else { continue };
            let record = record(cell, Some(&generation));
            if !self.app.store()?.set_cell(self.id, &record).await? {
                // Another server or a client cancelled or removed the experiment. Stopping fails only if the run has ended.
                let _ = generation.control.stop(EndCause::Cancel, "the experiment was cancelled").await;
                break;
            }
            active.spawn(Arc::clone(self).finish(record, generation));
        }
        while let Some(ended) = active.join_next().await {
            joined(Some(ended))?;
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

    /// Waits for the end of a run, and stores its score after the run.
    async fn finish(self: Arc<Self>, record: CellRecord, generation: Generation) -> Result<(), ApiError> {
        let Generation { run_id, mut output, control, .. } = generation;
        let mut cancelled = self.cancelled.clone();
        let answer = tokio::select! {
            answer = answer(&mut output) => answer,
            () = wait_for_cancel(&mut cancelled) => {
                // Stopping fails only if the run has ended.
                let _ = control.stop(EndCause::Cancel, "the experiment was cancelled").await;
                answer(&mut output).await
            }
        };
        if self.app.find_run(&self.caller.scope, &run_id.to_string()).await.is_err() {
            return Ok(());
        }
        let score = self.scorer.as_ref().zip(answer).map(|(scorer, answer)| scorer.score(&answer));
        self.app.store()?.set_cell(self.id, &CellRecord { score, ended: true, ..record }).await?;
        Ok(())
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

/// Returns the answer of a run that ended by itself.
async fn answer(output: &mut mpsc::Receiver<Output>) -> Option<String> {
    while let Some(output) = output.recv().await {
        if let Output::Ended(end) = output {
            return (end.status == RunStatus::Done).then_some(end.finish.text.clone());
        }
    }
    None
}

/// Returns the result of a task.
fn joined(ended: Option<Result<Result<(), ApiError>, tokio::task::JoinError>>) -> Result<(), ApiError> {
    ended.map_or(Ok(()), |ended| ended.map_err(ApiError::internal)?)
}
