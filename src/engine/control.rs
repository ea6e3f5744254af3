//! Handles of a submitted run: its outputs, and requests to pause, resume, change or stop it.
//!
//! Requests are commands to the decode thread, which handles them between two decodes and therefore needs no lock.

use super::error::RunOver;
use super::output::{EndReasoningOutcome, Output, RunMetrics, RunProgress};
use super::request::Limits;
use super::run::parameter_change::ParameterChange;
use super::scheduler::command::{Command, ControlRequest};
use crate::events::{EndCause, RunId};
use crate::model::Vocabulary;
use crate::model::llama::{Sampler, SamplingParams};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

/// A run that was accepted.
#[derive(Debug)]
pub struct Generation {
    /// Id of the run.
    pub run_id: RunId,
    /// Id chosen by the client, or the run's id as text.
    pub request_id: String,
    /// Metrics that are known before the run ends.
    pub metrics: Arc<RunMetrics>,
    /// Outputs of the run.
    pub output: mpsc::Receiver<Output>,
    /// Handle that controls the run.
    pub control: RunControl,
}

/// Handle that controls an active run; cheap to clone.
#[derive(Debug, Clone)]
pub struct RunControl {
    run: RunId,
    commands: Sender<Command>,
    vocabulary: Arc<Vocabulary>,
}

impl RunControl {
    pub(super) fn new(run: RunId, commands: Sender<Command>, vocabulary: Arc<Vocabulary>) -> Self {
        Self { run, commands, vocabulary }
    }

    /// Pauses the run. It keeps its slot for `keep_slot_for`; then other runs can take the slot. Returns its progress.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn pause(&self, keep_slot_for: Duration) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Pause(keep_slot_for)).await
    }

    /// Resumes the run. A run without a slot is queued before runs that arrived later. Returns its progress.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn resume(&self) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Resume).await
    }

    /// Changes sampling parameters and limits from the next token on. The random number generator keeps its state
    /// unless the seed changes. `note` describes the change in the trace. Returns the progress of the run, which is
    /// [`RunActivity::Finished`](super::RunActivity::Finished) if the change ended the run.
    ///
    /// # Errors
    /// [`RunOver`], also if the client has not received the end of the run yet.
    pub async fn modify(
        &self,
        mut sampling: SamplingParams,
        limits: Limits,
        note: String,
    ) -> Result<RunProgress, RunOver> {
        limits.ban_end_tokens(&mut sampling, &self.vocabulary);
        let vocabulary = Arc::clone(&self.vocabulary);
        let create_change = move || {
            let sampler = Sampler::new(&sampling, &vocabulary);
            Box::new(ParameterChange { sampling, sampler, limits, note })
        };
        let change = tokio::task::spawn_blocking(create_change).await.map_err(|_| RunOver)?;
        self.request(ControlRequest::Modify(change)).await
    }

    /// Ends the run; the text so far is its answer. `message` describes the cause in the trace. Returns the
    /// progress of the run.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn stop(&self, cause: EndCause, message: impl Into<String>) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Stop(cause, message.into())).await
    }

    /// Ends the current reasoning of the run, as if its reasoning budget were used up.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn end_reasoning(&self) -> Result<EndReasoningOutcome, RunOver> {
        let (response, receiver) = oneshot::channel();
        self.request(ControlRequest::EndReasoning(response)).await?;
        receiver.await.map_err(|_| RunOver)
    }

    /// Returns the progress of the run.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn progress(&self) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Progress).await
    }

    async fn request(&self, request: ControlRequest) -> Result<RunProgress, RunOver> {
        let (response, receiver) = oneshot::channel();
        self.commands.send(Command::Control(self.run, request, response)).map_err(|_| RunOver)?;
        receiver.await.map_err(|_| RunOver)
    }
}
