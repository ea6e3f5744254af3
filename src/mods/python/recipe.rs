//! Start of a worker, its messages, and its end.

use super::keeper::RunContext;
use super::logs::Logs;
use super::memory::SharedMemory;
use super::message::{FromWorker, Handler, PROTOCOL, ToWorker, to_json};
use super::process::{Lost, MOST_THREADS, Process, ending};
use super::sandbox::SandboxLauncher;
use super::{Source, WorkerLimits};
use crate::mods::{ModException, ModLogLine};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Specification of a worker.
#[derive(Clone)]
pub struct Recipe {
    pub python: PathBuf,
    pub limits: WorkerLimits,
    /// Launcher of the sandbox; `None` without one.
    pub sandbox: Option<SandboxLauncher>,
    pub source: Arc<Source>,
    /// Function to serve; `None` to list all.
    pub entrypoint: Option<String>,
}

impl Recipe {
    /// Starts a worker and imports the mod.
    ///
    /// # Errors
    /// The worker could not start, or the import failed.
    pub fn start(&self, memory: &SharedMemory) -> Result<(Process, Vec<Handler>), ModException> {
        let started = Process::start(&self.python, &self.limits, self.sandbox.as_ref(), memory);
        let mut worker = started.map_err(|error| ModException {
            message: format!("the worker cannot be started: {error}"),
            traceback: None,
        })?;
        let header = to_json(&ToWorker::Load {
            protocol: PROTOCOL,
            file: &self.source.file,
            module: &self.source.module,
            entrypoint: self.entrypoint.as_deref(),
        });
        let deadline = Instant::now() + self.limits.import;
        let mut logs = Logs::default();
        let answer = worker
            .send(&header, self.source.text.as_bytes(), deadline)
            .and_then(|()| self.receive(&mut worker, deadline, &mut logs, None));
        for log in logs.lines {
            tracing::info!(mod.file = self.source.file, "log line during import: {}", log.message);
        }
        match answer {
            Ok((FromWorker::Loaded { handlers }, _)) => Ok((worker, handlers)),
            Ok((FromWorker::Failed { message, traceback }, _)) => Err(ModException { message, traceback }),
            Ok(_) => Err(end(worker, &Lost::Protocol("it did not answer `load`".into()), self.limits.import)),
            Err(lost) => {
                let mut exception = end(worker, &lost, self.limits.import);
                exception.message = format!("the import failed: {}", exception.message);
                Err(exception)
            }
        }
    }

    /// Returns the next message that is not a log line; log lines are added to `logs`.
    ///
    /// # Errors
    /// [`WorkerFailure`]; the worker can no longer be used.
    pub fn receive(
        &self,
        worker: &mut Process,
        deadline: Instant,
        logs: &mut Logs,
        run: Option<&RunContext>,
    ) -> Result<(FromWorker, Vec<u8>), Lost> {
        loop {
            let frame = worker.receive(deadline)?;
            let message = serde_json::from_slice(&frame.header).map_err(|error| Lost::Protocol(error.to_string()))?;
            match message {
                FromWorker::Log { level, message } => {
                    logs.add(ModLogLine { level, message }, run, self.limits.run_log_bytes);
                }
                other => return Ok((other, frame.body)),
            }
        }
    }
}

/// Kills a worker and describes its failure.
pub fn end(worker: Process, lost: &Lost, deadline: Duration) -> ModException {
    match lost {
        Lost::Deadline => {
            let why = if worker.is_stopped() { "; a signal has stopped the worker" } else { "" };
            let traceback = worker.whereabouts();
            worker.kill();
            ModException { message: format!("deadline of {} ms exceeded{why}", deadline.as_millis()), traceback }
        }
        Lost::Threads(threads) => {
            worker.kill();
            let message = format!("the worker had {threads} threads; the maximum is {MOST_THREADS}");
            ModException { message, traceback: None }
        }
        Lost::Gone => {
            let (status, last) = worker.kill();
            ModException { message: ending(status), traceback: Some(last).filter(|last| !last.is_empty()) }
        }
        Lost::Protocol(error) => {
            let (_, last) = worker.kill();
            let message = format!("the worker violated the protocol: {error}");
            ModException { message, traceback: Some(last).filter(|last| !last.is_empty()) }
        }
    }
}
