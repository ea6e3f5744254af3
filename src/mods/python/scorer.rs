//! Scorers of experiments. A scorer has one worker, with the limits and the sandbox of a mod's worker. Between two calls it
//! is suspended, because a thread of the scorer would otherwise compute until the end of the experiment.
//!
//! A thread that lives as long as the scorer starts and calls the worker: the kernel kills a worker when the thread that
//! started it ends, and scorers are loaded and called on threads of a pool, which end when they are idle.

use super::call_log::CallLog;
use super::line_in;
use super::message::{FromWorker, ScoredCell, ToWorker, to_json};
use super::process::{WorkerFailure, WorkerProcess};
use super::shared_memory::SharedMemory;
use super::worker_spec::WorkerSpec;
use crate::mods::ModException;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Instant;

/// Maximum log lines of a scorer.
const MAX_LOG_LINES: usize = 1000;
/// Maximum log bytes of a scorer.
const MAX_LOG_BYTES: usize = 1 << 20;

/// A loaded scorer: a Python function that scores answers.
pub struct PythonScorer {
    /// Name of the source in tracebacks.
    file: String,
    /// Sender to the thread; `None` while the scorer is dropped.
    jobs: Option<mpsc::Sender<ScoreJob>>,
    thread: Option<JoinHandle<()>>,
}

/// An answer to score.
struct ScoreJob {
    /// Header of the frame.
    header: Vec<u8>,
    answer: String,
    run_id: String,
    reply: mpsc::Sender<Result<Option<f32>, ModException>>,
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
        let file = spec.source.file.clone();
        let (jobs, queue) = mpsc::channel::<ScoreJob>();
        let (started, result) = mpsc::channel();
        let serve = move || {
            let (worker, result) = match ScorerWorker::start(spec) {
                Ok(worker) => (Some(worker), Ok(())),
                Err(exception) => (None, Err(exception)),
            };
            // The receivers of replies wait for them.
            let _ = started.send(result);
            let Some(mut worker) = worker else { return };
            for job in queue {
                let result = worker.score(&job);
                let _ = job.reply.send(result);
            }
        };
        let thread = thread::Builder::new().name("scorer".into()).spawn(serve);
        let thread =
            thread.map_err(|error| ModException::new(format!("the scorer's thread cannot be started: {error}")))?;
        result.recv().unwrap_or_else(|_| Err(thread_ended()))?;
        Ok(Self { file, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Returns the score of an answer; `None` if the function returns `None`. Blocks until the worker has scored
    /// earlier answers. After a failure of the worker, the next call starts another one.
    ///
    /// # Errors
    /// The message of the exception, with its line if known.
    pub fn score(&self, answer: &str, cell: &ScoredCell) -> Result<Option<f32>, String> {
        self.call(answer, cell).map_err(|exception| {
            let line = exception.traceback.and_then(|traceback| line_in(&self.file, &traceback));
            match line {
                Some(line) => format!("{} (line {line})", exception.message),
                None => exception.message,
            }
        })
    }

    fn call(&self, answer: &str, cell: &ScoredCell) -> Result<Option<f32>, ModException> {
        let (reply, result) = mpsc::channel();
        let header = to_json(&ToWorker::Score { cell });
        let job = ScoreJob { header, answer: answer.to_owned(), run_id: cell.run_id.clone(), reply };
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok());
        if sent { result.recv().unwrap_or_else(|_| Err(thread_ended())) } else { Err(thread_ended()) }
    }
}

impl Drop for PythonScorer {
    fn drop(&mut self) {
        self.jobs = None;
        // Nothing waits for a score, so the thread only kills the worker.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The worker of a scorer.
struct ScorerWorker {
    spec: WorkerSpec,
    memory: SharedMemory,
    /// `None` after a failure, until the next call.
    worker: Option<WorkerProcess>,
    logged: LoggedSize,
}

impl ScorerWorker {
    /// Starts a worker, imports the scorer and suspends the worker.
    fn start(spec: WorkerSpec) -> Result<Self, ModException> {
        let memory = SharedMemory::create()
            .map_err(|error| ModException::new(format!("shared memory cannot be created: {error}")))?;
        let (worker, _) = spec.start(&memory)?;
        worker.suspend();
        Ok(Self { spec, memory, worker: Some(worker), logged: LoggedSize::default() })
    }

    fn score(&mut self, job: &ScoreJob) -> Result<Option<f32>, ModException> {
        let mut worker = match self.worker.take().map(WorkerProcess::if_alive) {
            Some(Ok(worker)) => worker,
            ended => {
                if let Some(Err(end)) = ended {
                    tracing::warn!("scorer: {end}");
                }
                self.spec.start(&self.memory)?.0
            }
        };
        worker.resume();
        let deadline = Instant::now() + self.spec.limits.call;
        let mut logs = CallLog::default();
        let reply = worker
            .send(&job.header, job.answer.as_bytes(), deadline)
            .and_then(|()| worker.receive_message(deadline, &mut logs, None));
        for log in logs.lines {
            if !self.logged.add_line(log.message.len()) {
                continue;
            }
            tracing::info!(run.id = job.run_id, scorer.message = %log.escaped(), "scorer log");
        }
        let failure = match reply {
            Ok((FromWorker::Scored { score }, _)) if score.is_none_or(|score| (0.0..=1.0).contains(&score)) => {
                worker.suspend();
                self.worker = Some(worker);
                return Ok(score);
            }
            Ok((FromWorker::Failed(exception), _)) => {
                worker.suspend();
                self.worker = Some(worker);
                return Err(exception.into());
            }
            Ok(_) => WorkerFailure::Protocol("it did not reply to `score` with a score between 0 and 1".into()),
            Err(failure) => failure,
        };
        Err(worker.fail(&failure, self.spec.limits.call))
    }
}

impl Drop for ScorerWorker {
    fn drop(&mut self) {
        // A suspended worker cannot exit by itself.
        if let Some(worker) = self.worker.take() {
            worker.kill();
        }
    }
}

/// Size of the log of a scorer.
#[derive(Default)]
struct LoggedSize {
    lines: usize,
    bytes: usize,
}

impl LoggedSize {
    /// Counts a line. Returns true if there is room for it. Logs a warning for the first line without room.
    fn add_line(&mut self, bytes: usize) -> bool {
        let was_exceeded = self.is_exceeded();
        self.lines += 1;
        self.bytes += bytes;
        if self.is_exceeded() && !was_exceeded {
            tracing::warn!(
                max_lines = MAX_LOG_LINES,
                max_bytes = MAX_LOG_BYTES,
                "the log of this scorer is full; its further lines in this experiment are dropped"
            );
        }
        !self.is_exceeded()
    }

    fn is_exceeded(&self) -> bool {
        self.lines > MAX_LOG_LINES || self.bytes > MAX_LOG_BYTES
    }
}

fn thread_ended() -> ModException {
    ModException::new("the thread of the scorer has ended")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mods::python::PythonMods;
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::time::Duration;

    /// Factor of a process id in a score: a power of two, so that the score is exact.
    const PID_SCALE: f32 = 4_194_304.0;

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

    /// Returns mods whose calls may take long, as on a busy machine.
    fn patient_mods() -> PythonMods {
        let mut mods = PythonMods::default();
        mods.limits.call = Duration::from_secs(30);
        mods
    }

    fn job(answer: &str) -> ScoreJob {
        let header = to_json(&ToWorker::Score { cell: &cell() });
        ScoreJob { header, answer: answer.into(), run_id: "r".into(), reply: mpsc::channel().0 }
    }

    #[test]
    fn threads_of_a_scorer_compute_only_during_calls() {
        let source = "import threading\ndef spin():\n    while True: pass\n\
                      threading.Thread(target=spin, daemon=True).start()\ndef score(text): return len(text) / 4\n";
        let mut scorer = ScorerWorker::start(patient_mods().scorer_spec(source).unwrap()).unwrap();
        for text in ["", "ab"] {
            assert_eq!(scorer.score(&job(text)).unwrap(), Some(text.len() as f32 / 4.0));
            let cpu_time = || scorer.worker.as_ref().unwrap().cpu_time();
            if cfg!(not(target_os = "linux")) {
                return;
            }
            let mut before = cpu_time().unwrap();
            // On a busy machine, the signal to stop may reach the threads late.
            let is_stopped = (0..100).any(|_| {
                std::thread::sleep(Duration::from_millis(50));
                let now = cpu_time().unwrap();
                now.saturating_sub(std::mem::replace(&mut before, now)) < Duration::from_millis(1)
            });
            assert!(is_stopped, "the threads of the scorer compute without a call");
        }
    }

    #[test]
    fn worker_outlives_the_thread_that_loads_the_scorer() {
        let source = "def score(text): return len(text) / 4\n";
        let load = move || patient_mods().load_scorer(source);
        let scorer = std::thread::spawn(load).join().unwrap().unwrap();
        std::thread::sleep(Duration::from_millis(100));
        for text in ["", "ab"] {
            assert_eq!(scorer.score(text, &cell()), Ok(Some(text.len() as f32 / 4.0)));
        }
    }

    #[test]
    fn dead_worker_of_a_scorer_is_replaced_before_the_next_call() {
        let source = "import os\ndef score(text): return os.getpid() / 4194304\n";
        let scorer = patient_mods().load_scorer(source).unwrap();
        let pid = || (scorer.score("", &cell()).unwrap().unwrap() * PID_SCALE) as i32;
        let first = pid();
        assert_eq!(pid(), first);
        kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
        // A stopped process of low priority may end late. It stays a zombie until the scorer waits for it.
        let stat = format!("/proc/{first}/stat");
        let has_ended = || std::fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
        let ended = (0..600).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            has_ended()
        });
        assert!(ended, "the worker has not ended");
        assert_ne!(pid(), first);
    }

    #[test]
    fn log_of_a_scorer_is_limited_in_lines_and_bytes() {
        let room = |bytes: usize| {
            let mut logged = LoggedSize::default();
            (0..2 * MAX_LOG_LINES).filter(|_| logged.add_line(bytes)).count()
        };
        assert_eq!(room(10), MAX_LOG_LINES);
        assert_eq!(room(MAX_LOG_BYTES / 4), 4);
    }
}
