//! Python mods as factories and instances.

use super::handle::SupervisorHandle;
use super::job::{CallJob, Job, RunContext};
use super::message::{CallHeader, HandlerInfo, ToWorker, to_json};
use super::shared_memory::{MemoryRegion, SharedMemory};
use super::supervisor::Supervisor;
use super::worker_spec::WorkerSpec;
use crate::events::{EventType, TokenId};
use crate::model::common_prefix;
use crate::model::llama::HiddenStates;
use crate::mods::{
    Call, CallEvent, EventSet, ModDescription, ModException, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde_json::Value;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum workers of one mod.
const MAX_WORKERS: usize = 64;

/// A Python mod. Its workers start with runs that name the mod. They end after an idle period or when the mod is
/// removed.
pub struct PythonMod {
    description: ModDescription,
    handler: HandlerInfo,
    spec: WorkerSpec,
    /// Handles of the supervisors, one per worker.
    supervisors: Mutex<Vec<Arc<SupervisorHandle>>>,
}

impl PythonMod {
    pub fn new(description: ModDescription, handler: HandlerInfo, spec: WorkerSpec) -> Self {
        Self { description, handler, spec, supervisors: Mutex::default() }
    }

    /// Returns the handle of the worker for a new run: the worker with the fewest runs, or a new worker if all have
    /// runs and the maximum is not reached.
    fn handle_for_run(&self) -> io::Result<Arc<SupervisorHandle>> {
        let mut supervisors = self.supervisors.lock().unwrap_or_else(PoisonError::into_inner);
        // A supervisor that panicked is not used again.
        supervisors.retain(|handle| handle.is_open());
        let runs = |handle: &Arc<SupervisorHandle>| handle.shared.runs.load(Ordering::Relaxed);
        let max = self.handler.workers.unwrap_or(self.spec.limits.workers).clamp(1, MAX_WORKERS);
        let least_busy = supervisors.iter().min_by_key(|handle| runs(handle)).cloned();
        let handle = match least_busy {
            Some(handle) if runs(&handle) == 0 || supervisors.len() >= max => handle,
            _ => {
                let handle = self.start_supervisor()?;
                supervisors.push(Arc::clone(&handle));
                handle
            }
        };
        handle.shared.runs.fetch_add(1, Ordering::Relaxed);
        // Starts a worker if none is running.
        let _ = handle.submit(Job::StartRun);
        Ok(handle)
    }

    fn start_supervisor(&self) -> io::Result<Arc<SupervisorHandle>> {
        let (handle, jobs) = SupervisorHandle::new(SharedMemory::create()?);
        let supervisor = Supervisor::new(self.description.name.clone(), self.spec.clone(), Arc::clone(&handle.shared));
        std::thread::Builder::new()
            .name(format!("mod {}", self.description.name))
            .spawn(move || supervisor.run(&jobs))?;
        Ok(Arc::new(handle))
    }
}

impl ModFactory for PythonMod {
    fn describe(&self) -> ModDescription {
        self.description.clone()
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        self.handler.check_config(config)?;
        let hidden_layers = self.handler.hidden_layers(run.hidden_layers)?;
        let handle = self.handle_for_run().map_err(|error| format!("the worker cannot be started: {error}"))?;
        Ok(Box::new(PythonInstance {
            run: Arc::new(RunContext {
                number: NEXT.fetch_add(1, Ordering::Relaxed),
                view: Arc::clone(run),
                config: config.clone(),
                declared_holdback: self.handler.holdback,
                holdback: AtomicUsize::new(self.handler.holdback),
                discard_from: AtomicUsize::new(usize::MAX),
                introduced_to: AtomicU64::new(0),
                logged: AtomicUsize::new(0),
            }),
            handle,
            handles: EventSet::new(&self.handler.handles),
            hidden_layers,
            tokens: None,
            shared_tokens: Vec::new(),
            logits: None,
            hidden_states: None,
            is_finished: false,
        }))
    }
}

/// State of a Python mod for one run.
struct PythonInstance {
    run: Arc<RunContext>,
    handle: Arc<SupervisorHandle>,
    handles: EventSet,
    /// Layers whose hidden states the mod reads.
    hidden_layers: Vec<u16>,
    /// Region of the shared memory that holds the sequence.
    tokens: Option<MemoryRegion>,
    /// Tokens in that region.
    shared_tokens: Vec<TokenId>,
    /// Region that holds the logits.
    logits: Option<MemoryRegion>,
    /// Region that holds the hidden states.
    hidden_states: Option<MemoryRegion>,
    /// True if the worker was notified of the end of the run.
    is_finished: bool,
}

impl PythonInstance {
    /// Writes the data of a call to the shared memory and creates the frame's header.
    fn prepare(&mut self, call: &Call<'_>) -> io::Result<Vec<u8>> {
        let tokens = (self.share_tokens(call.sequence)?, call.sequence.len());
        let mut header = CallHeader {
            run: self.run.number,
            event: call.event_type(),
            step: call.step,
            max_steps: call.max_tokens,
            prompt_len: call.prompt_len,
            evicted: call.evicted,
            evictions_end: call.evictions_end,
            tokens,
            logits: None,
            hidden_states: None,
            token: None,
            text: None,
            logprob: None,
            added: None,
            forced: None,
        };
        match call.event {
            CallEvent::Prefilled => {}
            CallEvent::ForwardPass { logits, hidden_states } => {
                header.logits = Some((self.share_logits(logits)?, logits.len()));
                header.hidden_states =
                    hidden_states.map(|states| self.share_hidden_states(states)).transpose()?.flatten();
            }
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
        let memory = &self.handle.shared.memory;
        let bytes = size_of_val(sequence) as u64;
        if self.tokens.as_ref().is_none_or(|region| region.bytes < bytes) {
            if let Some(old) = self.tokens.take() {
                memory.free(old);
            }
            // Rounded up to a power of two, so that other runs can reuse the region once it is freed.
            self.tokens = Some(memory.allocate((bytes * 2).next_power_of_two())?);
            self.shared_tokens.clear();
        }
        let region = self.tokens.as_ref().ok_or(io::ErrorKind::OutOfMemory)?;
        let same = common_prefix(&self.shared_tokens, sequence);
        memory.write(region, (same * size_of::<TokenId>()) as u64, bytemuck::cast_slice(&sequence[same..]))?;
        self.shared_tokens.truncate(same);
        self.shared_tokens.extend_from_slice(&sequence[same..]);
        Ok(region.offset)
    }

    fn share_logits(&mut self, logits: &[f32]) -> io::Result<u64> {
        share(&self.handle.shared.memory, &mut self.logits, logits)
    }

    /// Writes the hidden states of the layers that the mod reads. Returns the offset of the region and the number of
    /// values; `None` if the mod reads no layers, or if one was not captured.
    fn share_hidden_states(&mut self, states: &HiddenStates) -> io::Result<Option<(u64, usize)>> {
        let layers: Option<Vec<&[f32]>> = self.hidden_layers.iter().map(|&layer| states.state(layer)).collect();
        let values = layers.unwrap_or_default().concat();
        if values.is_empty() {
            return Ok(None);
        }
        let offset = share(&self.handle.shared.memory, &mut self.hidden_states, &values)?;
        Ok(Some((offset, values.len())))
    }
}

impl ModInstance for PythonInstance {
    fn handles(&self) -> EventSet {
        self.handles
    }

    fn hidden_layers(&self) -> &[u16] {
        &self.hidden_layers
    }

    fn holdback(&self) -> usize {
        self.run.holdback.load(Ordering::Acquire)
    }

    fn discard_from(&self) -> Option<usize> {
        Some(self.run.discard_from.load(Ordering::Acquire)).filter(|&tokens| tokens != usize::MAX)
    }

    fn retracted(&mut self, generated: usize) {
        if generated <= self.run.discard_from.load(Ordering::Acquire) {
            self.run.discard_from.store(usize::MAX, Ordering::Release);
        }
    }

    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let header = match self.prepare(call) {
            Ok(header) => header,
            Err(error) => {
                return Some(Reply::failed(ModException::new(format!(
                    "the memory shared with the worker cannot be written: {error}"
                ))));
            }
        };
        let event = call.event_type();
        let logits = self.logits.clone().filter(|_| event == EventType::ForwardPass);
        let (run, done) = (Arc::clone(&self.run), new_sender());
        let job = CallJob { run, event, header, logits, sent_directly_at: None, done };
        if let Err(Job::Call(job)) = self.handle.submit(Job::Call(Box::new(job))) {
            job.done.reply(Reply::failed(ModException::new("the supervisor of the worker has ended")));
        }
        None
    }

    fn poll_reply(&mut self) {
        self.handle.poll_reply(self.run.number);
    }

    fn stop_polling(&mut self) {
        self.handle.stop_polling(self.run.number);
    }

    fn finished(&mut self) {
        if std::mem::replace(&mut self.is_finished, true) {
            return;
        }
        let regions = [self.tokens.take(), self.logits.take(), self.hidden_states.take()];
        let regions = regions.into_iter().flatten().collect();
        let _ = self.handle.submit(Job::Finished { run: Arc::clone(&self.run), regions });
        self.handle.shared.runs.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for PythonInstance {
    fn drop(&mut self) {
        self.finished();
    }
}

/// Writes values to a region, which is allocated on first use. Returns its offset.
fn share(memory: &SharedMemory, region: &mut Option<MemoryRegion>, values: &[f32]) -> io::Result<u64> {
    let bytes = size_of_val(values) as u64;
    if region.as_ref().is_none_or(|region| region.bytes < bytes) {
        *region = Some(memory.allocate(bytes)?);
    }
    let region = region.as_ref().ok_or(io::ErrorKind::OutOfMemory)?;
    memory.write(region, 0, bytemuck::cast_slice(values))?;
    Ok(region.offset)
}
