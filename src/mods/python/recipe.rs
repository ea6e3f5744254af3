//! Starting a worker, hearing it, and ending it.

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

/// What it takes to run a mod.
#[derive(Clone)]
pub struct Recipe {
    pub python: PathBuf,
    pub limits: WorkerLimits,
    /// Where the worker is kept in a sandbox.
    pub sandbox: Option<SandboxLauncher>,
    pub source: Arc<Source>,
    /// The function; `None` to list all.
    pub entrypoint: Option<String>,
}

impl Recipe {
    /// Starts a worker and imports the mod.
    ///
    /// # Errors
    /// What kept it from starting or raised in the import.
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
            tracing::info!(mod.file = self.source.file, "while it was imported: {}", log.message);
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

    /// The next message that is not a log line; those are kept in `logs`.
    ///
    /// # Errors
    /// [`Lost`]; the worker is of no more use.
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

/// Kills a worker and says why in words.
pub fn end(worker: Process, lost: &Lost, deadline: Duration) -> ModException {
    match lost {
        Lost::Deadline => {
            let why = if worker.is_stopped() { ": a signal has stopped the worker" } else { "" };
            let traceback = worker.whereabouts();
            worker.kill();
            ModException { message: format!("deadline of {} ms exceeded{why}", deadline.as_millis()), traceback }
        }
        Lost::Threads(threads) => {
            worker.kill();
            let message = format!("the worker had {threads} threads; at most {MOST_THREADS} are permitted");
            ModException { message, traceback: None }
        }
        Lost::Gone => {
            let (status, last) = worker.kill();
            ModException { message: ending(status), traceback: Some(last).filter(|last| !last.is_empty()) }
        }
        Lost::Protocol(error) => {
            let (_, last) = worker.kill();
            let message = format!("the worker broke the protocol: {error}");
            ModException { message, traceback: Some(last).filter(|last| !last.is_empty()) }
        }
    }
}
