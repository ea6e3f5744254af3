//! Specification and start of a worker.

use super::call_log::CallLog;
use super::message::{FromWorker, HandlerInfo, ToWorker, to_json};
use super::process::{WorkerFailure, WorkerProcess};
use super::sandbox::SandboxLauncher;
use super::shared_memory::SharedMemory;
use super::{Source, WorkerLimits};
use crate::mods::ModException;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Specification of a worker.
#[derive(Clone)]
pub struct WorkerSpec {
    pub python: PathBuf,
    pub limits: WorkerLimits,
    /// Launcher of the sandbox; `None` without one.
    pub sandbox: Option<SandboxLauncher>,
    pub source: Arc<Source>,
    /// Function to serve; `None` to list all.
    pub entrypoint: Option<String>,
    /// True for the scorer of an experiment.
    pub is_scorer: bool,
}

/// Failed start of a worker.
pub struct StartFailure {
    pub exception: ModException,
    /// True if another attempt may succeed: shared memory could not be created, the worker could not be started, or the
    /// import exceeded its deadline.
    pub is_transient: bool,
}

impl From<StartFailure> for ModException {
    fn from(failure: StartFailure) -> Self {
        failure.exception
    }
}

impl WorkerSpec {
    /// Starts a worker and imports the mod.
    ///
    /// # Errors
    /// The worker could not start, or the import failed.
    pub fn start(&self, memory: &SharedMemory) -> Result<(WorkerProcess, Vec<HandlerInfo>), StartFailure> {
        let started = WorkerProcess::start(&self.python, &self.limits, self.sandbox.as_ref(), memory);
        let mut worker = started.map_err(|error| StartFailure {
            exception: ModException::new(format!("the worker cannot be started: {error}")),
            is_transient: true,
        })?;
        let header = to_json(&ToWorker::Load {
            file: &self.source.file,
            module: &self.source.module,
            entrypoint: self.entrypoint.as_deref(),
            scorer: self.is_scorer,
        });
        let deadline = Instant::now() + self.limits.import;
        let mut logs = CallLog::default();
        let reply = worker
            .send(&header, self.source.text.as_bytes(), deadline)
            .and_then(|()| worker.receive_message(deadline, &mut logs, None));
        for log in logs.lines {
            tracing::info!(mod.file = self.source.file, "log line during import: {}", log.escaped());
        }
        match reply {
            Ok((FromWorker::Loaded { handlers }, _)) => Ok((worker, handlers)),
            Ok((FromWorker::Failed(exception), _)) => {
                Err(StartFailure { exception: exception.into(), is_transient: false })
            }
            Ok(_) => {
                let failure = WorkerFailure::Protocol("it did not answer `load`".into());
                let exception = worker.fail(&failure, self.limits.import);
                Err(StartFailure { exception, is_transient: false })
            }
            Err(failure) => {
                let mut exception = worker.fail(&failure, self.limits.import);
                exception.message = format!("the import failed: {}", exception.message);
                Err(StartFailure { exception, is_transient: matches!(failure, WorkerFailure::Deadline) })
            }
        }
    }
}
