//! Scorers of experiments. A scorer has one worker, with the limits and the sandbox of a mod's worker. Between two calls it
//! is suspended, because a thread of the scorer would otherwise compute until the end of the experiment.

use super::call_log::CallLog;
use super::line_in;
use super::message::{FromWorker, ScoredCell, ToWorker, to_json};
use super::process::{WorkerFailure, WorkerProcess};
use super::shared_memory::SharedMemory;
use super::worker_spec::{WorkerSpec, kill_worker};
use crate::mods::ModException;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Maximum log lines of a scorer.
const MAX_LOG_LINES: usize = 1000;
/// Maximum log bytes of a scorer.
const MAX_LOG_BYTES: usize = 1 << 20;

/// A loaded scorer: a Python function that scores answers.
pub struct PythonScorer {
    spec: WorkerSpec,
    memory: SharedMemory,
    state: Mutex<ScorerState>,
}

struct ScorerState {
    /// `None` after a failure, until the next call.
    worker: Option<WorkerProcess>,
    /// Lines and bytes of the log so far.
    logged: (usize, usize),
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
        worker.suspend();
        Ok(Self { spec, memory, state: Mutex::new(ScorerState { worker: Some(worker), logged: (0, 0) }) })
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
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut worker = match state.worker.take() {
            Some(worker) => worker,
            None => self.spec.start(&self.memory)?.0,
        };
        worker.resume();
        let deadline = Instant::now() + self.spec.limits.call;
        let mut logs = CallLog::default();
        let reply = worker
            .send(&to_json(&ToWorker::Score { cell }), answer.as_bytes(), deadline)
            .and_then(|()| self.spec.receive(&mut worker, deadline, &mut logs, None));
        for log in logs.lines {
            if !state.has_room(log.message.len()) {
                continue;
            }
            // Escaped: a line break could forge a log entry of the server.
            tracing::info!(run.id = cell.run_id, scorer.message = ?log.message, "scorer log");
        }
        let failure = match reply {
            Ok((FromWorker::Scored { score }, _)) if score.is_none_or(|score| (0.0..=1.0).contains(&score)) => {
                worker.suspend();
                state.worker = Some(worker);
                return Ok(score);
            }
            Ok((FromWorker::Failed(exception), _)) => {
                worker.suspend();
                state.worker = Some(worker);
                return Err(exception.into());
            }
            Ok(_) => WorkerFailure::Protocol("it did not reply to `score` with a score between 0 and 1".into()),
            Err(failure) => failure,
        };
        Err(kill_worker(worker, &failure, self.spec.limits.call))
    }
}

impl ScorerState {
    /// Counts a line of the log. Returns true if there is room for it. The first line without room is reported.
    fn has_room(&mut self, bytes: usize) -> bool {
        let is_full = |(lines, bytes)| lines >= MAX_LOG_LINES || bytes >= MAX_LOG_BYTES;
        if is_full(self.logged) {
            return false;
        }
        self.logged = (self.logged.0 + 1, self.logged.1 + bytes);
        if is_full(self.logged) {
            tracing::warn!(
                max_lines = MAX_LOG_LINES,
                max_bytes = MAX_LOG_BYTES,
                "the log of this scorer is full; its further lines in this experiment are dropped"
            );
            return false;
        }
        true
    }
}

impl Drop for PythonScorer {
    fn drop(&mut self) {
        // Kills the worker instead of waiting for it to exit, because experiments end on threads that serve clients.
        if let Some(worker) = self.state.get_mut().unwrap_or_else(PoisonError::into_inner).worker.take() {
            worker.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mods::python::PythonMods;
    use std::time::Duration;

    fn cell() -> ScoredCell {
        ScoredCell {
            cell: 0,
            run_id: "r".into(),
            prompt: "p".into(),
            mods: Vec::new(),
            parameters: serde_json::Map::new(),
            seed: 1,
            finish_reason: "stop",
            completion_tokens: 1,
        }
    }

    #[test]
    fn threads_of_a_scorer_compute_only_during_calls() {
        let source = "import threading\ndef spin():\n    while True: pass\n\
                      threading.Thread(target=spin, daemon=True).start()\ndef score(text): return len(text) / 4\n";
        let scorer = PythonMods::default().load_scorer(source).unwrap();
        let cpu_time = || scorer.state.lock().unwrap().worker.as_ref().unwrap().cpu_time().unwrap();
        for text in ["", "ab"] {
            assert_eq!(scorer.score(text, &cell()), Ok(Some(text.len() as f32 / 4.0)));
            // The signal may take a moment to reach all threads.
            // The signal to stop arrives within this time.
            std::thread::sleep(Duration::from_millis(20));
            let before = cpu_time();
            std::thread::sleep(Duration::from_millis(50));
            assert_eq!(cpu_time(), before);
        }
    }

    #[test]
    fn log_of_a_scorer_is_limited_in_lines_and_bytes() {
        let room = |bytes: usize| {
            let mut state = ScorerState { worker: None, logged: (0, 0) };
            (0..2 * MAX_LOG_LINES).filter(|_| state.has_room(bytes)).count()
        };
        assert_eq!(room(10), MAX_LOG_LINES - 1);
        assert_eq!(room(MAX_LOG_BYTES / 4), 3);
    }
}
