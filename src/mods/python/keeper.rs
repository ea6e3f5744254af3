//! The thread that keeps a mod's worker: starts it when it is first needed, hands it one call at a time, and starts
//! another when it overran a deadline or died.
//!
//! Calls wait here, not in the worker. So a deadline counts from the moment the worker got the call, and a worker
//! that is lost takes exactly one call with it: that one is answered with an exception and never tried again, since
//! the mod may have done half of it; the others go to the next worker.

use super::memory::{SharedMemory, Slot};
use super::message::{
    Ask, CallHeader, FromWorker, Handler, PROTOCOL, ToWorker, VocabularyHead, control_tokens, vocabulary_body,
};
use super::process::{Lost, Process, ending};
use super::{Limits, Source};
use crate::events::EventType;
use crate::model::Vocabulary;
use crate::mods::{Done, Exception, Log, Origin, Reply, RunView};
use serde_json::Value;
use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Log lines that one call can have.
const MOST_LOGS: usize = 10_000;
/// Pause after a worker that could not be started; doubles up to [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// What a keeper is asked to do.
pub enum Job {
    /// A run begins: have a worker ready.
    Begin,
    /// One event of a run.
    Call(Box<CallJob>),
    /// The run is over; its slots are free.
    Finished { run: Arc<RunContext>, slots: Vec<Slot> },
}

/// A call that waits for the worker.
pub struct CallJob {
    pub run: Arc<RunContext>,
    pub event: EventType,
    /// The frame's header.
    pub header: Vec<u8>,
    /// Where its logits are.
    pub logits: Option<Slot>,
    pub done: Done,
}

/// A run, as this mod knows it.
pub struct RunContext {
    /// Unique within the process.
    pub number: u64,
    pub view: Arc<RunView>,
    pub config: Value,
    /// How many of the last generated tokens the client does not get yet; a reply can change it.
    pub holdback: AtomicUsize,
}

/// What it takes to run a mod.
pub struct Recipe {
    pub python: PathBuf,
    pub limits: Limits,
    /// Whose code it is.
    pub origin: Origin,
    pub source: Arc<Source>,
    /// The function; `None` to list all.
    pub entrypoint: Option<String>,
}

/// Keeps one mod's worker.
pub struct Keeper {
    pub name: String,
    pub recipe: Recipe,
    pub memory: Arc<SharedMemory>,
    worker: Option<Process>,
    /// Runs that the present worker knows.
    told: HashSet<u64>,
    /// Index = the id that workers know.
    vocabularies: Vec<Arc<Vocabulary>>,
    failed: Option<Failed>,
}

/// A worker could not be started.
struct Failed {
    exception: Exception,
    pause: Duration,
    until: Instant,
}

impl Keeper {
    pub fn new(name: String, recipe: Recipe, memory: Arc<SharedMemory>) -> Self {
        Self { name, recipe, memory, worker: None, told: HashSet::new(), vocabularies: Vec::new(), failed: None }
    }

    /// Works until nobody can ask for anything any more.
    pub fn work(mut self, jobs: &mpsc::Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            match job {
                Job::Begin => {
                    // A failure shows in the first call.
                    let _ = self.ready();
                }
                Job::Call(job) => {
                    let CallJob { run, event, header, logits, done } = *job;
                    done.reply(self.call(&run, event, &header, logits.as_ref()));
                }
                Job::Finished { run, slots } => {
                    self.finished(&run);
                    for slot in slots {
                        self.memory.give(slot);
                    }
                }
            }
        }
    }

    fn call(&mut self, run: &RunContext, event: EventType, header: &[u8], logits: Option<&Slot>) -> Reply {
        if let Err(exception) = self.ready() {
            return Reply { exception: Some(exception), ..Reply::default() };
        }
        let deadline = Instant::now() + self.recipe.limits.call;
        let mut logs = Vec::new();
        let mut reply = match self.exchange(run, header, deadline, &mut logs) {
            Err(lost) => {
                let exception = self.replace(&lost, self.recipe.limits.call);
                Reply { exception: Some(exception), ..Reply::default() }
            }
            Ok((FromWorker::Reply { action, exception, elapsed_ns, holdback }, body)) => {
                if let Some(tokens) = holdback {
                    run.holdback.store(tokens, Ordering::Release);
                }
                let checked =
                    action.map(|action| action.check(&body, &run.view.vocabulary, &self.memory, logits)).transpose();
                let (action, refused) = match checked {
                    Ok(action) => (action, None),
                    Err(message) => {
                        let message = format!("InvalidActionError at {}: {message}", event.as_str());
                        (None, Some(Exception { message, traceback: None }))
                    }
                };
                Reply {
                    action,
                    exception: exception.map(Exception::from).or(refused),
                    elapsed: Duration::from_nanos(elapsed_ns),
                    ..Reply::default()
                }
            }
            Ok(_) => {
                let lost = Lost::Protocol("it answered a call with something else than a reply".into());
                Reply { exception: Some(self.replace(&lost, self.recipe.limits.call)), ..Reply::default() }
            }
        };
        reply.logs = logs;
        reply
    }

    fn finished(&mut self, run: &RunContext) {
        if !self.told.contains(&run.number) || self.worker.as_mut().is_none_or(|worker| !worker.is_alive()) {
            return;
        }
        let header = to_json(&ToWorker::Finished { run: run.number });
        let deadline = Instant::now() + self.recipe.limits.call;
        let mut logs = Vec::new();
        let answer = self.exchange(run, &header, deadline, &mut logs);
        self.told.remove(&run.number);
        for log in logs {
            tracing::info!(mod.name = self.name, run.id = %run.view.run_id, "{}", log.message);
        }
        let exception = match answer {
            Ok((FromWorker::Reply { exception, .. }, _)) => exception.map(Exception::from),
            Ok(_) => None,
            Err(lost) => Some(self.replace(&lost, self.recipe.limits.call)),
        };
        if let Some(Exception { message, .. }) = exception {
            tracing::warn!(mod.name = self.name, run.id = %run.view.run_id, "the mod's finished hook failed: {message}");
        }
    }

    /// Sends the frame and waits for the answer to it, answering the worker's own questions meanwhile.
    fn exchange(
        &mut self,
        run: &RunContext,
        header: &[u8],
        deadline: Instant,
        logs: &mut Vec<Log>,
    ) -> Result<(FromWorker, Vec<u8>), Lost> {
        let worker = self.worker.as_mut().ok_or(Lost::Gone)?;
        let vocabulary = &run.view.vocabulary;
        if self.told.insert(run.number) {
            let known = self.vocabularies.iter().position(|known| Arc::ptr_eq(known, vocabulary));
            let id = known.unwrap_or_else(|| {
                self.vocabularies.push(Arc::clone(vocabulary));
                self.vocabularies.len() - 1
            });
            worker.send(&to_json(&introduction(run, id)), &[], deadline)?;
        }
        worker.send(header, &[], deadline)?;
        loop {
            match receive(worker, deadline, logs)? {
                (FromWorker::Ask(ask), _) => {
                    let (answer, body) = match ask {
                        Ask::Encode { text, add_special } => {
                            let tokens = Some(vocabulary.encode(&text, add_special, true));
                            (ToWorker::Answer { tokens, control: None }, Vec::new())
                        }
                        Ask::Vocabulary => {
                            let control = Some(control_tokens(vocabulary));
                            (ToWorker::Answer { tokens: None, control }, vocabulary_body(vocabulary))
                        }
                    };
                    worker.send(&to_json(&answer), &body, deadline)?;
                }
                answer => return Ok(answer),
            }
        }
    }

    /// Has a worker ready that has imported the mod.
    fn ready(&mut self) -> Result<(), Exception> {
        if let Some(worker) = &mut self.worker {
            if worker.is_alive() {
                return Ok(());
            }
            let (status, last) = self.worker.take().map_or((None, String::new()), Process::kill);
            tracing::warn!(mod.name = self.name, "{} between two calls: {last}", ending(status));
        }
        self.told.clear();
        if let Some(failed) = self.failed.as_ref().filter(|failed| Instant::now() < failed.until) {
            return Err(failed.exception.clone());
        }
        match self.recipe.start(&self.memory) {
            Ok((worker, _)) => {
                self.worker = Some(worker);
                self.failed = None;
                Ok(())
            }
            Err(exception) => {
                let pause = self.failed.as_ref().map_or(PAUSE, |failed| (failed.pause * 2).min(LONGEST_PAUSE));
                self.failed = Some(Failed { exception: exception.clone(), pause, until: Instant::now() + pause });
                Err(exception)
            }
        }
    }

    /// Ends a worker that is of no more use; the next call gets another one.
    fn replace(&mut self, lost: &Lost, deadline: Duration) -> Exception {
        self.told.clear();
        let Some(worker) = self.worker.take() else {
            return Exception { message: "the worker has ended".into(), traceback: None };
        };
        let exception = end(worker, lost, deadline);
        tracing::warn!(mod.name = self.name, "{}; the next call starts another worker", exception.message);
        exception
    }
}

impl Recipe {
    /// Starts a worker and imports the mod.
    ///
    /// # Errors
    /// What kept it from starting or raised in the import.
    pub fn start(&self, memory: &SharedMemory) -> Result<(Process, Vec<Handler>), Exception> {
        let mut worker = Process::start(&self.python, &self.limits, memory).map_err(|error| Exception {
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
        let mut logs = Vec::new();
        let answer = worker
            .send(&header, self.source.text.as_bytes(), deadline)
            .and_then(|()| receive(&mut worker, deadline, &mut logs));
        for log in logs {
            let origin = self.origin.as_str();
            tracing::info!(mod.file = self.source.file, mod.origin = origin, "while it was imported: {}", log.message);
        }
        match answer {
            Ok((FromWorker::Loaded { handlers }, _)) => Ok((worker, handlers)),
            Ok((FromWorker::Failed { message, traceback }, _)) => Err(Exception { message, traceback }),
            Ok(_) => Err(end(worker, &Lost::Protocol("it did not answer `load`".into()), self.limits.import)),
            Err(lost) => {
                let mut exception = end(worker, &lost, self.limits.import);
                exception.message = format!("the import failed: {}", exception.message);
                Err(exception)
            }
        }
    }
}

fn introduction(run: &RunContext, vocabulary_id: usize) -> ToWorker<'_> {
    let vocabulary = &run.view.vocabulary;
    ToWorker::Run {
        run: run.number,
        request_id: &run.view.request_id,
        model: &run.view.model,
        conversation: run.view.conversation.as_ref(),
        tools: run.view.tools.as_ref(),
        parameters: &run.view.parameters,
        config: &run.config,
        seed: run.view.seed,
        vocabulary: VocabularyHead {
            id: vocabulary_id,
            size: vocabulary.len(),
            eos: vocabulary.special().eos,
            bos: vocabulary.special().bos,
            end_of_generation: vocabulary.end_of_generation(),
        },
    }
}

/// The next message that is not a log line.
fn receive(worker: &mut Process, deadline: Instant, logs: &mut Vec<Log>) -> Result<(FromWorker, Vec<u8>), Lost> {
    loop {
        let frame = worker.receive(deadline)?;
        let message = serde_json::from_slice(&frame.header).map_err(|error| Lost::Protocol(error.to_string()))?;
        match message {
            FromWorker::Log { level, message } if logs.len() < MOST_LOGS => logs.push(Log { level, message }),
            FromWorker::Log { .. } => {}
            other => return Ok((other, frame.body)),
        }
    }
}

/// Kills a worker and says why in words.
fn end(worker: Process, lost: &Lost, deadline: Duration) -> Exception {
    match lost {
        Lost::Deadline => {
            let traceback = worker.whereabouts();
            worker.kill();
            Exception { message: format!("deadline of {} ms exceeded", deadline.as_millis()), traceback }
        }
        Lost::Gone => {
            let (status, last) = worker.kill();
            Exception { message: ending(status), traceback: Some(last).filter(|last| !last.is_empty()) }
        }
        Lost::Protocol(error) => {
            let (_, last) = worker.kill();
            let message = format!("the worker broke the protocol: {error}");
            Exception { message, traceback: Some(last).filter(|last| !last.is_empty()) }
        }
    }
}

/// Headers of ours always are JSON.
pub fn to_json(message: &ToWorker<'_>) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_default()
}

/// A call's header.
pub fn call_header(header: CallHeader<'_>) -> Vec<u8> {
    to_json(&ToWorker::Call(header))
}
