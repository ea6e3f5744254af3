//! The thread that keeps one worker of a mod: starts it when it is first needed, hands it one call at a time, starts
//! another when it overran a deadline or died, and ends it when nobody has needed it for a while.
//!
//! Calls wait here, not in the worker. So a deadline counts from the moment the worker got the call, and a worker
//! that is lost takes exactly one call with it: that one is answered with an exception and never tried again, since
//! the mod may have done half of it; the others go to the next worker.

use super::desk::Shared;
use super::logs::Logs;
use super::memory::{SharedMemory, Slot};
use super::message::{
    About, Ask, FromWorker, LONGEST_TEXT, Said, ToWorker, VocabularyHead, control_tokens, to_json, vocabulary_body,
};
use super::process::{Lost, Process, ending};
use super::recipe::{Recipe, end};
use crate::events::EventType;
use crate::model::Vocabulary;
use crate::mods::{ModException, Reply, ReplySender, RunView};
use serde_json::Value;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Pause after a worker that could not be started, or was lost the second time in a row; doubles up to
/// [`LONGEST_PAUSE`].
const PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often a worker without calls is looked at.
const LOOK: Duration = Duration::from_secs(1);

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
    /// When the worker got it, when it has it already.
    pub sent: Option<Instant>,
    pub done: ReplySender,
}

/// A run, as this mod knows it.
pub struct RunContext {
    /// Unique within the process.
    pub number: u64,
    pub view: Arc<RunView>,
    pub config: Value,
    /// How many of the last generated tokens the client does not get yet; a reply can change it.
    pub holdback: AtomicUsize,
    /// Generation of the worker that knows the run; 0 for none.
    pub worker: AtomicU64,
    /// Bytes that the mod logged.
    pub logged: AtomicUsize,
}

/// Keeps one worker of a mod.
pub struct Keeper {
    pub name: String,
    pub recipe: Recipe,
    pub shared: Arc<Shared>,
    worker: Option<Process>,
    /// Counts the workers.
    generation: u64,
    /// Runs that the present worker knows.
    told: HashSet<u64>,
    /// Index = the id that workers know.
    vocabularies: Vec<Weak<Vocabulary>>,
    failed: Option<Failed>,
    /// Workers that were lost since the last call that went well.
    lost: u32,
    /// When the last job was done.
    idle_since: Instant,
    /// Processor time that the worker had used at the first look after that.
    cpu_then: Option<Duration>,
    /// Calls that the desk had answered at the last look.
    answered: u64,
}

/// There is no worker, and will be none for a while.
struct Failed {
    exception: ModException,
    pause: Duration,
    until: Instant,
}

impl Keeper {
    pub fn new(name: String, recipe: Recipe, shared: Arc<Shared>) -> Self {
        Self {
            name,
            recipe,
            shared,
            worker: None,
            generation: 0,
            told: HashSet::new(),
            vocabularies: Vec::new(),
            failed: None,
            lost: 0,
            idle_since: Instant::now(),
            cpu_then: None,
            answered: 0,
        }
    }

    /// Works until nobody can ask for anything any more.
    pub fn work(mut self, jobs: &Receiver<Job>) {
        while let Some(job) = self.next(jobs) {
            let answered = match job {
                Job::Begin => {
                    // A failure shows in the first call.
                    let _ = self.ready();
                    None
                }
                Job::Call(job) => {
                    let CallJob { run, event, header, logits, sent, done } = *job;
                    Some((done, self.call(&run, event, &header, logits.as_ref(), sent)))
                }
                Job::Finished { run, slots } => {
                    self.finished(&run);
                    slots.into_iter().for_each(|slot| self.shared.memory.give(slot));
                    None
                }
            };
            let worker = self.worker.as_ref();
            self.shared.job_done(worker.map_or(0, |_| self.generation), || worker?.stream().ok());
            // After that, so that the next call finds the worker free.
            if let Some((done, reply)) = answered {
                done.reply(reply);
            }
            (self.idle_since, self.cpu_then) = (Instant::now(), None);
        }
    }

    fn next(&mut self, jobs: &Receiver<Job>) -> Option<Job> {
        loop {
            if self.worker.is_none() {
                return jobs.recv().ok();
            }
            match jobs.recv_timeout(LOOK) {
                Ok(job) => return Some(job),
                Err(RecvTimeoutError::Disconnected) => return None,
                Err(RecvTimeoutError::Timeout) => self.look_after(),
            }
        }
    }

    /// Ends a worker that nobody needs, or that computes although nobody asked it to.
    fn look_after(&mut self) {
        if self.desk_answered() {
            (self.idle_since, self.cpu_then) = (Instant::now(), None);
            return;
        }
        let Some(worker) = &self.worker else { return };
        let limits = &self.recipe.limits;
        let cpu = worker.cpu_time();
        let used = cpu.zip(self.cpu_then).map_or(Duration::ZERO, |(now, then)| now.saturating_sub(then));
        self.cpu_then = self.cpu_then.or(cpu);
        let busy = !limits.idle_cpu.is_zero() && used > limits.idle_cpu;
        let unused = self.told.is_empty() && !limits.idle.is_zero() && self.idle_since.elapsed() > limits.idle;
        if !(busy || unused) || !self.shared.take_line() {
            return;
        }
        let Some(worker) = self.worker.take() else { return };
        self.told.clear();
        if busy {
            worker.kill();
            let (used, most) = (used.as_millis(), limits.idle_cpu.as_millis());
            tracing::warn!(mod.name = self.name, "the worker is ended: it computed for {used} ms without a call; {most} ms are allowed");
        } else {
            tracing::debug!(mod.name = self.name, "the worker is ended: no run needs it");
        }
    }

    /// Whether the desk has answered calls since this was asked last.
    fn desk_answered(&mut self) -> bool {
        let answered = self.shared.answered();
        std::mem::replace(&mut self.answered, answered) != answered
    }

    fn call(
        &mut self,
        run: &RunContext,
        event: EventType,
        header: &[u8],
        logits: Option<&Slot>,
        sent: Option<Instant>,
    ) -> Reply {
        if sent.is_none()
            && let Err(exception) = self.ready()
        {
            return Reply { exception: Some(exception), ..Reply::default() };
        }
        let asked = sent.unwrap_or_else(Instant::now);
        let deadline = asked + self.recipe.limits.call;
        let mut logs = Logs::default();
        let frame = sent.is_none().then_some(header);
        let mut reply = match self.exchange(run, frame, deadline, &mut logs) {
            Err(lost) => Reply { exception: Some(self.replace(&lost, self.recipe.limits.call)), ..Reply::default() },
            Ok((FromWorker::Reply(said), body)) => {
                self.lost = 0;
                reply_of(said, &body, run, event, &self.shared.memory, logits, asked)
            }
            Ok(_) => {
                let lost = Lost::Protocol("it answered a call with something else than a reply".into());
                Reply { exception: Some(self.replace(&lost, self.recipe.limits.call)), ..Reply::default() }
            }
        };
        reply.logs = logs.lines;
        reply
    }

    fn finished(&mut self, run: &RunContext) {
        if !self.told.contains(&run.number) || self.worker.as_mut().is_none_or(|worker| !worker.is_alive()) {
            return;
        }
        let header = to_json(&ToWorker::Finished { run: run.number });
        let deadline = Instant::now() + self.recipe.limits.call;
        let mut logs = Logs::default();
        let answer = self.exchange(run, Some(&header), deadline, &mut logs);
        self.told.remove(&run.number);
        for log in logs.lines {
            tracing::info!(mod.name = self.name, run.id = %run.view.run_id, "{}", log.message);
        }
        let exception = match answer {
            Ok((FromWorker::Reply(said), _)) => said.exception.map(ModException::from),
            Ok(_) => None,
            Err(lost) => Some(self.replace(&lost, self.recipe.limits.call)),
        };
        if let Some(ModException { message, .. }) = exception {
            tracing::warn!(mod.name = self.name, run.id = %run.view.run_id, "the mod's finished hook failed: {message}");
        }
    }

    /// Sends the frame, if the worker has not got it already, and waits for the answer to it, answering the worker's own
    /// questions meanwhile.
    fn exchange(
        &mut self,
        run: &RunContext,
        header: Option<&[u8]>,
        deadline: Instant,
        logs: &mut Logs,
    ) -> Result<(FromWorker, Vec<u8>), Lost> {
        let worker = self.worker.as_mut().ok_or(Lost::Gone)?;
        let vocabulary = &run.view.vocabulary;
        if self.told.insert(run.number) {
            let id = known(&mut self.vocabularies, vocabulary);
            worker.send(&to_json(&introduction(run, id)), &[], deadline)?;
            run.worker.store(self.generation, Ordering::Release);
        }
        if let Some(header) = header {
            worker.send(header, &[], deadline)?;
        }
        loop {
            match self.recipe.receive(worker, deadline, logs, Some(run))? {
                (FromWorker::Ask(ask), _) => {
                    let (answer, body) = answer(ask, &self.vocabularies)?;
                    worker.send(&to_json(&answer), &body, deadline)?;
                }
                answer => return Ok(answer),
            }
        }
    }

    /// Has a worker ready that has imported the mod.
    fn ready(&mut self) -> Result<(), ModException> {
        if let Some(worker) = &mut self.worker {
            if worker.is_alive() {
                return Ok(());
            }
            let (status, last) = self.worker.take().map_or((None, String::new()), Process::kill);
            tracing::warn!(mod.name = self.name, "{} between two calls: {last}", ending(status));
        }
        self.told.clear();
        if let Some(failed) = &self.failed
            && let Some(left) = failed.until.checked_duration_since(Instant::now())
        {
            let ModException { message, traceback } = failed.exception.clone();
            let message = format!("{message}; the next try is in {} ms", left.as_millis() + 1);
            return Err(ModException { message, traceback });
        }
        match self.recipe.start(&self.shared.memory) {
            Ok((worker, _)) => {
                self.worker = Some(worker);
                self.generation += 1;
                // Kept until a call goes well, so that the pause goes on doubling.
                if self.lost == 0 {
                    self.failed = None;
                }
                Ok(())
            }
            Err(exception) => {
                self.pause(exception.clone());
                Err(exception)
            }
        }
    }

    fn pause(&mut self, exception: ModException) {
        let pause = self.failed.as_ref().map_or(PAUSE, |failed| (failed.pause * 2).min(LONGEST_PAUSE));
        self.failed = Some(Failed { exception, pause, until: Instant::now() + pause });
    }

    /// Ends a worker that is of no more use; the next call gets another one, after a pause when that happens again and
    /// again.
    fn replace(&mut self, lost: &Lost, deadline: Duration) -> ModException {
        self.told.clear();
        let Some(worker) = self.worker.take() else {
            return ModException { message: "the worker has ended".into(), traceback: None };
        };
        let exception = end(worker, lost, deadline);
        if self.desk_answered() {
            self.lost = 0;
        }
        self.lost += 1;
        if self.lost == 1 {
            self.failed = None;
        } else {
            self.pause(exception.clone());
        }
        tracing::warn!(mod.name = self.name, "{}; another worker is started when it is needed", exception.message);
        exception
    }
}

/// What a mod said, as the engine takes it. `logits` is where those of the call are, and `asked` when the worker got it: no
/// mod has taken longer than since then, whatever it says.
pub fn reply_of(
    said: Said,
    body: &[u8],
    run: &RunContext,
    event: EventType,
    memory: &SharedMemory,
    logits: Option<&Slot>,
    asked: Instant,
) -> Reply {
    let Said { action, exception, elapsed_ns, holdback } = said;
    if let Some(tokens) = holdback {
        run.holdback.store(tokens, Ordering::Release);
    }
    let checked = action.map(|action| action.check(body, &run.view.vocabulary, memory, logits)).transpose();
    let (action, refused) = match checked {
        Ok(action) => (action, None),
        Err(message) => {
            let message = format!("InvalidActionError at {}: {message}", event.as_str());
            (None, Some(ModException { message, traceback: None }))
        }
    };
    Reply {
        action,
        exception: exception.map(ModException::from).or(refused),
        elapsed: Duration::from_nanos(elapsed_ns).min(asked.elapsed()),
        ..Reply::default()
    }
}

/// The answer to a question, with its body.
fn answer(ask: Ask, vocabularies: &[Weak<Vocabulary>]) -> Result<(ToWorker<'static>, Vec<u8>), Lost> {
    let (mut tokens, mut control, mut body) = (None, None, Vec::new());
    let vocabulary = vocabularies.get(ask.vocabulary).and_then(Weak::upgrade);
    let gone = vocabulary.is_none();
    match (ask.about, vocabulary) {
        (About::Encode { text, .. }, _) if text.len() > LONGEST_TEXT => {
            return Err(Lost::Protocol(format!("it wants {} bytes encoded at once", text.len())));
        }
        (About::Encode { text, add_special }, Some(known)) => tokens = Some(known.encode(&text, add_special, true)),
        (About::Vocabulary, Some(known)) => {
            control = Some(control_tokens(&known));
            body = vocabulary_body(&known);
        }
        (_, None) => {}
    }
    Ok((ToWorker::Answer { tokens, control, gone }, body))
}

/// The id by which workers know a vocabulary. Those of models that are gone make room.
fn known(vocabularies: &mut Vec<Weak<Vocabulary>>, vocabulary: &Arc<Vocabulary>) -> usize {
    let own = Arc::downgrade(vocabulary);
    vocabularies.iter().position(|known| known.ptr_eq(&own)).unwrap_or_else(|| {
        vocabularies.push(own);
        vocabularies.len() - 1
    })
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
