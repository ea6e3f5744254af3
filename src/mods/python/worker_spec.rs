//! Start of a worker, its messages, and its end.

use super::call_log::CallLog;
use super::job::RunContext;
use super::limits::MAX_THREADS;
use super::message::{FromWorker, HandlerInfo, PROTOCOL, ToWorker, to_json};
use super::process::{WorkerFailure, WorkerProcess, describe_exit};
use super::sandbox::SandboxLauncher;
use super::shared_memory::SharedMemory;
use super::{Source, WorkerLimits};
use crate::mods::{ModException, ModLogLine};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum bytes with which a worker describes its mods: names, descriptions and configurations.
const MAX_LOADED_BYTES: usize = 1 << 20;

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
    /// True if another attempt may succeed: the worker did not start, or the import exceeded its deadline.
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
            exception: ModException { message: format!("the worker cannot be started: {error}"), traceback: None },
            is_transient: true,
        })?;
        let header = to_json(&ToWorker::Load {
            protocol: PROTOCOL,
            file: &self.source.file,
            module: &self.source.module,
            entrypoint: self.entrypoint.as_deref(),
            scorer: self.is_scorer,
        });
        let deadline = Instant::now() + self.limits.import;
        let mut logs = CallLog::default();
        let reply = worker
            .send(&header, self.source.text.as_bytes(), deadline)
            .and_then(|()| self.receive(&mut worker, deadline, &mut logs, None));
        for log in logs.lines {
            // Escaped: a line break could forge a log entry of the server.
            tracing::info!(mod.file = self.source.file, "log line during import: {:?}", log.message);
        }
        match reply {
            Ok((FromWorker::Loaded { handlers }, _)) => Ok((worker, handlers)),
            Ok((FromWorker::Failed(exception), _)) => {
                Err(StartFailure { exception: exception.into(), is_transient: false })
            }
            Ok(_) => {
                let failure = WorkerFailure::Protocol("it did not answer `load`".into());
                let exception = kill_worker(worker, &failure, self.limits.import);
                Err(StartFailure { exception, is_transient: false })
            }
            Err(failure) => {
                let mut exception = kill_worker(worker, &failure, self.limits.import);
                exception.message = format!("the import failed: {}", exception.message);
                Err(StartFailure { exception, is_transient: matches!(failure, WorkerFailure::Deadline) })
            }
        }
    }

    /// Returns the next message that is not a log line; log lines are added to `logs`.
    ///
    /// # Errors
    /// [`WorkerFailure`]; the worker can no longer be used.
    pub fn receive(
        &self,
        worker: &mut WorkerProcess,
        deadline: Instant,
        logs: &mut CallLog,
        run: Option<&RunContext>,
    ) -> Result<(FromWorker, Vec<u8>), WorkerFailure> {
        loop {
            let frame = worker.receive(deadline)?;
            let message =
                serde_json::from_slice(&frame.header).map_err(|error| WorkerFailure::Protocol(error.to_string()))?;
            match message {
                FromWorker::Loaded { .. } if frame.header.len() > MAX_LOADED_BYTES => {
                    let size = frame.header.len();
                    let error = format!("its mods are described in {size} bytes; the maximum is {MAX_LOADED_BYTES}");
                    return Err(WorkerFailure::Protocol(error));
                }
                FromWorker::Log { level, message } => {
                    logs.add(ModLogLine { level, message }, run, self.limits.run_log_bytes);
                }
                other => return Ok((other, frame.body)),
            }
        }
    }
}

/// Kills a worker and describes its failure.
pub fn kill_worker(worker: WorkerProcess, failure: &WorkerFailure, deadline: Duration) -> ModException {
    match failure {
        WorkerFailure::Deadline => {
            let cause = if worker.is_stopped() { "; a signal has stopped the worker" } else { "" };
            let traceback = worker.stack_dump();
            worker.kill();
            ModException { message: format!("deadline of {} ms exceeded{cause}", deadline.as_millis()), traceback }
        }
        WorkerFailure::Threads(threads) => {
            worker.kill();
            let message = format!("the worker had {threads} threads; the maximum is {MAX_THREADS}");
            ModException { message, traceback: None }
        }
        WorkerFailure::Ended => {
            let (status, last) = worker.kill();
            ModException { message: describe_exit(status), traceback: Some(last).filter(|last| !last.is_empty()) }
        }
        WorkerFailure::Protocol(error) => {
            let (_, last) = worker.kill();
            let message = format!("the worker violated the protocol: {error}");
            ModException { message, traceback: Some(last).filter(|last| !last.is_empty()) }
        }
    }
}
