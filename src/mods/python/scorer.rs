//! Scorers of experiments. A scorer has one worker, with the limits and the sandbox of a mod's worker.

use super::call_log::CallLog;
use super::line_in;
use super::message::{FromWorker, ScoredCell, ToWorker, to_json};
use super::process::{WorkerFailure, WorkerProcess};
use super::shared_memory::SharedMemory;
use super::worker_spec::{WorkerSpec, kill_worker};
use crate::mods::ModException;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A loaded scorer: a Python function that scores answers.
pub struct PythonScorer {
    spec: WorkerSpec,
    memory: SharedMemory,
    /// `None` after a failure, until the next call.
    worker: Mutex<Option<WorkerProcess>>,
}

impl std::fmt::Debug for PythonScorer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PythonScorer").finish_non_exhaustive()
    }
}

impl PythonScorer {
    /// Starts a worker and imports the scorer.
    ///
    /// # Errors
    /// The worker could not start, or the import failed.
    pub(super) fn start(spec: WorkerSpec) -> Result<Self, ModException> {
        let memory = SharedMemory::create().map_err(|error| ModException {
            message: format!("shared memory cannot be created: {error}"),
            traceback: None,
        })?;
        let (worker, _) = spec.start(&memory)?;
        Ok(Self { spec, memory, worker: Mutex::new(Some(worker)) })
    }

    /// Returns the score of an answer; `None` if the function returns `None`. Blocks until the worker has scored
    /// earlier answers. After a failure of the worker, the next call starts another one.
    ///
    /// # Errors
    /// The message of the exception, with its line if known.
    pub fn score(&self, answer: &str, cell: &ScoredCell) -> Result<Option<f32>, String> {
        self.call(answer, cell).map_err(|exception| {
            let line = exception.traceback.and_then(|traceback| line_in(&self.spec.source.file, &traceback));
            match line {
                Some(line) => format!("{} (line {line})", exception.message),
                None => exception.message,
            }
        })
    }

    fn call(&self, answer: &str, cell: &ScoredCell) -> Result<Option<f32>, ModException> {
        let mut current = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        let mut worker = match current.take() {
            Some(worker) => worker,
            None => self.spec.start(&self.memory)?.0,
        };
        let deadline = Instant::now() + self.spec.limits.call;
        let mut logs = CallLog::default();
        let reply = worker
            .send(&to_json(&ToWorker::Score { cell }), answer.as_bytes(), deadline)
            .and_then(|()| self.spec.receive(&mut worker, deadline, &mut logs, None));
        for log in logs.lines {
            // Escaped: a line break could forge a log entry of the server.
            tracing::info!(run.id = cell.run_id, scorer.message = ?log.message, "scorer log");
        }
        let failure = match reply {
            Ok((FromWorker::Scored { score }, _)) if score.is_none_or(|score| (0.0..=1.0).contains(&score)) => {
                *current = Some(worker);
                return Ok(score);
            }
            Ok((FromWorker::Failed(exception), _)) => {
                *current = Some(worker);
                return Err(exception.into());
            }
            Ok(_) => WorkerFailure::Protocol("it did not reply to `score` with a score between 0 and 1".into()),
            Err(failure) => failure,
        };
        Err(kill_worker(worker, &failure, self.spec.limits.call))
    }
}

impl Drop for PythonScorer {
    fn drop(&mut self) {
        // Kills the worker instead of waiting for it to exit, because experiments end on threads that serve clients.
        if let Some(worker) = self.worker.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            worker.kill();
        }
    }
}
