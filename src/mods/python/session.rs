//! Python mods as factories and instances.

use super::desk::Desk;
use super::keeper::{CallJob, Job, Keeper, RunContext};
use super::memory::{SharedMemory, Slot};
use super::message::{CallHeader, Handler, ToWorker, to_json};
use super::recipe::Recipe;
use crate::events::TokenId;
use crate::model::common_prefix;
use crate::mods::{
    Call, CallEvent, EventSet, ModDescription, ModException, ModFactory, ModInstance, Pending, Reply, ReplySender,
    RunView,
};
use serde_json::Value;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum workers of one mod.
const MOST_WORKERS: usize = 64;

/// A Python mod; its workers start with the runs that name it, and end with the mod.
pub struct PythonMod {
    description: ModDescription,
    handler: Handler,
    recipe: Recipe,
    desks: Mutex<Vec<Arc<Desk>>>,
}

impl PythonMod {
    pub fn new(description: ModDescription, handler: Handler, recipe: Recipe) -> Self {
        Self { description, handler, recipe, desks: Mutex::default() }
    }

    /// Returns the handle of the worker with the fewest runs, for one more run. Starts another worker if all are busy
    /// and the maximum is not reached.
    fn desk(&self) -> io::Result<Arc<Desk>> {
        let mut desks = self.desks.lock().unwrap_or_else(PoisonError::into_inner);
        // A supervisor that panicked is not used again.
        desks.retain(|desk| desk.is_open());
        let runs = |desk: &Arc<Desk>| desk.shared.runs.load(Ordering::Relaxed);
        let most = self.handler.workers.unwrap_or(self.recipe.limits.workers).clamp(1, MOST_WORKERS);
        let least = desks.iter().min_by_key(|desk| runs(desk)).cloned();
        let desk = match least {
            Some(desk) if runs(&desk) == 0 || desks.len() >= most => desk,
            _ => {
                let desk = self.open()?;
                desks.push(Arc::clone(&desk));
                desk
            }
        };
        desk.shared.runs.fetch_add(1, Ordering::Relaxed);
        // Starts a worker if none is running.
        let _ = desk.hand_in(Job::Begin);
        Ok(desk)
    }

    fn open(&self) -> io::Result<Arc<Desk>> {
        let (desk, jobs) = Desk::new(SharedMemory::create()?);
        let keeper = Keeper::new(self.description.name.clone(), self.recipe.clone(), Arc::clone(&desk.shared));
        std::thread::Builder::new().name(format!("mod {}", self.description.name)).spawn(move || keeper.work(&jobs))?;
        Ok(Arc::new(desk))
    }
}

impl ModFactory for PythonMod {
    fn describe(&self) -> ModDescription {
        self.description.clone()
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        self.handler.check_config(config)?;
        let desk = self.desk().map_err(|error| format!("the worker cannot be started: {error}"))?;
        Ok(Box::new(PythonSession {
            run: Arc::new(RunContext {
                number: NEXT.fetch_add(1, Ordering::Relaxed),
                view: Arc::clone(run),
                config: config.clone(),
                holdback: AtomicUsize::new(self.handler.holdback),
                worker: AtomicU64::new(0),
                logged: AtomicUsize::new(0),
            }),
            desk,
            handles: EventSet::of(&self.handler.handles),
            tokens: None,
            known: Vec::new(),
            logits: None,
            over: false,
        }))
    }
}

/// State of a Python mod for one run.
struct PythonSession {
    run: Arc<RunContext>,
    desk: Arc<Desk>,
    handles: EventSet,
    /// Region of the sequence.
    tokens: Option<Slot>,
    /// Tokens in that region.
    known: Vec<TokenId>,
    /// Region of the logits.
    logits: Option<Slot>,
    over: bool,
}

impl PythonSession {
    /// Writes the data of a call to the shared memory and creates the frame's header.
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
        Ok(to_json(&ToWorker::Call(header)))
    }

    /// Writes the changed end of the sequence. Returns the offset of the region.
    fn share_tokens(&mut self, sequence: &[TokenId]) -> io::Result<u64> {
        let memory = &self.desk.shared.memory;
        let bytes = size_of_val(sequence) as u64;
        if self.tokens.as_ref().is_none_or(|slot| slot.bytes < bytes) {
            if let Some(old) = self.tokens.take() {
                memory.give(old);
            }
            // Few different sizes, so that runs reuse freed regions.
            self.tokens = Some(memory.take((bytes * 2).next_power_of_two())?);
            self.known.clear();
        }
        let slot = self.tokens.as_ref().ok_or(io::ErrorKind::OutOfMemory)?;
        let same = common_prefix(&self.known, sequence);
        memory.write(slot, (same * size_of::<TokenId>()) as u64, bytemuck::cast_slice(&sequence[same..]))?;
        self.known.truncate(same);
        self.known.extend_from_slice(&sequence[same..]);
        Ok(slot.offset)
    }

    fn share_logits(&mut self, logits: &[f32]) -> io::Result<u64> {
        let memory = &self.desk.shared.memory;
        let bytes = size_of_val(logits) as u64;
        if self.logits.as_ref().is_none_or(|slot| slot.bytes < bytes) {
            self.logits = Some(memory.take(bytes)?);
        }
        let slot = self.logits.as_ref().ok_or(io::ErrorKind::OutOfMemory)?;
        memory.write(slot, 0, bytemuck::cast_slice(logits))?;
        Ok(slot.offset)
    }
}

impl ModInstance for PythonSession {
    fn handles(&self) -> EventSet {
        self.handles
    }

    fn holdback(&self) -> usize {
        self.run.holdback.load(Ordering::Acquire)
    }

    fn call(&mut self, call: &Call<'_>, done: ReplySender) -> Result<Reply, Pending> {
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
        let job = CallJob { run: Arc::clone(&self.run), event: call.event_type(), header, logits, sent: None, done };
        match self.desk.hand_in(Job::Call(Box::new(job))) {
            Ok(()) => Err(Pending),
            Err(job) => {
                if let Job::Call(job) = job {
                    job.done.disarm();
                }
                Ok(failed("the supervisor of the worker has ended".into()))
            }
        }
    }

    fn poll_reply(&mut self) {
        self.desk.look(self.run.number);
    }

    fn stop_polling(&mut self) {
        self.desk.stop_polling(self.run.number);
    }

    fn finished(&mut self) {
        if std::mem::replace(&mut self.over, true) {
            return;
        }
        let slots = self.tokens.take().into_iter().chain(self.logits.take()).collect();
        let _ = self.desk.hand_in(Job::Finished { run: Arc::clone(&self.run), slots });
        self.desk.shared.runs.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for PythonSession {
    fn drop(&mut self) {
        self.finished();
    }
}

fn failed(message: String) -> Reply {
    Reply { exception: Some(ModException { message, traceback: None }), ..Reply::default() }
}
