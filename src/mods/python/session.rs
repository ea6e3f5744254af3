//! A Python mod as the registry and the engine see it.

use super::keeper::{CallJob, Job, Keeper, Recipe, RunContext, call_header};
use super::memory::{SharedMemory, Slot};
use super::message::{CallHeader, Handler, check_config};
use crate::events::TokenId;
use crate::mods::{Call, CallEvent, Description, Done, EventSet, Exception, Factory, Pending, Reply, RunView, Session};
use serde_json::Value;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};

/// A mod in Python; its worker starts with the first run that names it, and ends with the mod.
pub struct PythonMod {
    description: Description,
    handler: Handler,
    /// Makes the recipe of a keeper.
    recipe: Box<dyn Fn() -> Recipe + Send + Sync>,
    link: Mutex<Option<Link>>,
}

/// The way to a keeper.
#[derive(Clone)]
struct Link {
    jobs: mpsc::Sender<Job>,
    memory: Arc<SharedMemory>,
}

impl PythonMod {
    pub fn new(
        description: Description,
        handler: Handler,
        recipe: impl Fn() -> Recipe + Send + Sync + 'static,
    ) -> Self {
        Self { description, handler, recipe: Box::new(recipe), link: Mutex::default() }
    }

    /// The keeper, which is started when there is none.
    fn link(&self) -> io::Result<Link> {
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(link) = link.as_ref().filter(|link| link.jobs.send(Job::Begin).is_ok()) {
            return Ok(link.clone());
        }
        let memory = Arc::new(SharedMemory::create()?);
        let keeper = Keeper::new(self.description.name.clone(), (self.recipe)(), Arc::clone(&memory));
        let (jobs, queue) = mpsc::channel();
        std::thread::Builder::new()
            .name(format!("mod {}", self.description.name))
            .spawn(move || keeper.work(&queue))?;
        let new = Link { jobs, memory };
        let _ = new.jobs.send(Job::Begin);
        *link = Some(new.clone());
        Ok(new)
    }
}

impl Factory for PythonMod {
    fn describe(&self) -> Description {
        self.description.clone()
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn Session>, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        check_config(config, self.handler.config.as_ref())?;
        let link = self.link().map_err(|error| format!("the worker cannot be started: {error}"))?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(PythonSession {
            run: Arc::new(RunContext {
                number,
                view: Arc::clone(run),
                config: config.clone(),
                holdback: AtomicUsize::new(self.handler.holdback),
            }),
            link,
            handles: EventSet::of(&self.handler.handles),
            tokens: None,
            known: Vec::new(),
            logits: None,
            over: false,
        }))
    }
}

/// A Python mod within one run.
struct PythonSession {
    run: Arc<RunContext>,
    link: Link,
    handles: EventSet,
    /// Where the sequence is.
    tokens: Option<Slot>,
    /// What stands there.
    known: Vec<TokenId>,
    /// Where the logits are.
    logits: Option<Slot>,
    over: bool,
}

impl PythonSession {
    /// Puts what the worker may look at into the shared memory, and makes the frame's header.
    fn prepare(&mut self, call: &Call<'_>) -> io::Result<Vec<u8>> {
        let tokens = (self.share_tokens(call.sequence)?, call.sequence.len());
        let mut header = CallHeader {
            run: self.run.number,
            event: call.event_type(),
            step: call.step,
            max_steps: call.max_steps,
            prompt_len: call.prompt_len,
            tokens,
            logits: None,
            token: None,
            text: None,
            logprob: None,
            added: None,
            forced: None,
        };
        match call.event {
            CallEvent::Prefilled => {}
            CallEvent::ForwardPass { logits } => header.logits = Some((self.share_logits(logits)?, logits.len())),
            CallEvent::Sampled { token, text, logprob } => {
                header.token = Some(token);
                header.text = Some(text);
                header.logprob = Some(logprob);
            }
            CallEvent::Added { tokens, forced, .. } => {
                header.added = Some(tokens.len());
                header.forced = Some(forced);
            }
        }
        Ok(call_header(header))
    }

    /// Writes what is new in the sequence, and returns where it begins.
    fn share_tokens(&mut self, sequence: &[TokenId]) -> io::Result<u64> {
        let memory = &self.link.memory;
        let bytes = size_of_val(sequence) as u64;
        if self.tokens.as_ref().is_none_or(|slot| slot.bytes < bytes) {
            if let Some(old) = self.tokens.take() {
                memory.give(old);
            }
            self.tokens = Some(memory.take(bytes * 2)?);
            self.known.clear();
        }
        let slot = self.tokens.as_ref().ok_or(io::ErrorKind::OutOfMemory)?;
        let same = self.known.iter().zip(sequence).take_while(|(known, now)| known == now).count();
        memory.write(slot, (same * size_of::<TokenId>()) as u64, bytemuck::cast_slice(&sequence[same..]))?;
        self.known.truncate(same);
        self.known.extend_from_slice(&sequence[same..]);
        Ok(slot.offset)
    }

    fn share_logits(&mut self, logits: &[f32]) -> io::Result<u64> {
        let memory = &self.link.memory;
        let bytes = size_of_val(logits) as u64;
        if self.logits.as_ref().is_none_or(|slot| slot.bytes < bytes) {
            self.logits = Some(memory.take(bytes)?);
        }
        let slot = self.logits.as_ref().ok_or(io::ErrorKind::OutOfMemory)?;
        memory.write(slot, 0, bytemuck::cast_slice(logits))?;
        Ok(slot.offset)
    }
}

impl Session for PythonSession {
    fn handles(&self) -> EventSet {
        self.handles
    }

    fn holdback(&self) -> usize {
        self.run.holdback.load(Ordering::Acquire)
    }

    fn call(&mut self, call: &Call<'_>, done: Done) -> Result<Reply, Pending> {
        let header = match self.prepare(call) {
            Ok(header) => header,
            Err(error) => {
                done.disarm();
                return Ok(failed(format!("the memory shared with the worker cannot be written: {error}")));
            }
        };
        let logits = match call.event {
            CallEvent::ForwardPass { .. } => {
                self.logits.as_ref().map(|slot| Slot { offset: slot.offset, bytes: slot.bytes })
            }
            _ => None,
        };
        let job = CallJob { run: Arc::clone(&self.run), event: call.event_type(), header, logits, done };
        match self.link.jobs.send(Job::Call(Box::new(job))) {
            Ok(()) => Err(Pending),
            Err(mpsc::SendError(job)) => {
                if let Job::Call(job) = job {
                    job.done.disarm();
                }
                Ok(failed("the thread that keeps the worker has ended".into()))
            }
        }
    }

    fn finished(&mut self) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let slots = self.tokens.take().into_iter().chain(self.logits.take()).collect();
        let _ = self.link.jobs.send(Job::Finished { run: Arc::clone(&self.run), slots });
    }
}

impl Drop for PythonSession {
    fn drop(&mut self) {
        self.finished();
    }
}

fn failed(message: String) -> Reply {
    Reply { exception: Some(Exception { message, traceback: None }), ..Reply::default() }
}
