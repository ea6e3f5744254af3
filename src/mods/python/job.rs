//! Jobs of a supervisor, and the conversion of a worker's reply to the reply of the mod.

use super::message::{ToWorker, VocabularyInfo, WorkerReply};
use super::shared_memory::{MemoryRegion, SharedMemory};
use crate::events::EventType;
use crate::mods::{ModException, Reply, ReplySender, RunView};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Job of a supervisor.
pub enum Job {
    /// A run starts and needs a worker.
    StartRun,
    /// One event of a run.
    Call(Box<CallJob>),
    /// The run has ended; its memory regions are free.
    Finished { run: Arc<RunContext>, regions: Vec<MemoryRegion> },
}

/// A call that waits for the worker.
pub struct CallJob {
    pub run: Arc<RunContext>,
    pub event: EventType,
    /// Header of the frame.
    pub header: Vec<u8>,
    /// Memory region of the logits.
    pub logits: Option<MemoryRegion>,
    /// Time at which the call was sent to the worker directly, not by the supervisor; `None` if it was not.
    pub sent_directly_at: Option<Instant>,
    pub done: ReplySender,
}

/// A run in which this mod takes part.
pub struct RunContext {
    /// Unique within the process.
    pub number: u64,
    pub view: Arc<RunView>,
    pub config: Value,
    /// Holdback that the mod declares.
    pub declared_holdback: usize,
    /// Number of last generated tokens that are held back from the client; a reply can change it.
    pub holdback: AtomicUsize,
    /// Number of the answer's first tokens that the mod will not remove, `usize::MAX` for all; a reply can change it.
    pub discard_from: AtomicUsize,
    /// Generation of the worker to which the run was introduced last; 0 for none.
    pub introduced_to: AtomicU64,
    /// Bytes logged by the mod.
    pub logged: AtomicUsize,
}

impl RunContext {
    /// Resets the holdback for a worker that does not know the run: its mod has no state of earlier calls.
    pub fn reset_holdback(&self) {
        self.holdback.store(self.declared_holdback, Ordering::Release);
        self.discard_from.store(usize::MAX, Ordering::Release);
    }

    /// Returns the message that introduces the run to a worker.
    pub fn to_message(&self, vocabulary_id: usize) -> ToWorker<'_> {
        let vocabulary = &self.view.vocabulary;
        ToWorker::Run {
            run: self.number,
            request_id: &self.view.request_id,
            model: &self.view.model,
            conversation: self.view.conversation.as_ref(),
            tools: self.view.tools.as_ref(),
            images: &self.view.images,
            parameters: &self.view.parameters,
            config: &self.config,
            seed: self.view.seed,
            layers: self.view.hidden_layers.ok(),
            vocabulary: VocabularyInfo {
                id: vocabulary_id,
                size: vocabulary.len(),
                eos: vocabulary.special().eos,
                bos: vocabulary.special().bos,
                end_of_generation: vocabulary.end_of_generation(),
            },
        }
    }
}

impl CallJob {
    /// Converts the worker's reply to the engine's. `sent_at` is the time at which the call was sent, which bounds the
    /// elapsed time that the worker reports.
    pub fn to_reply(&self, reply: WorkerReply, body: &[u8], memory: &SharedMemory, sent_at: Instant) -> Reply {
        let Self { run, event, logits, .. } = self;
        let WorkerReply { action, exception, elapsed_ns, holdback, discard_from } = reply;
        if let Some(tokens) = holdback {
            run.holdback.store(tokens, Ordering::Release);
        }
        // Each `Added` event renews the announcement, so that a mod that forgets it does not discard the rest of the answer.
        if holdback.is_some() || (*event == EventType::Added && exception.is_none()) {
            run.discard_from.store(discard_from.unwrap_or(usize::MAX), Ordering::Release);
        }
        let decoded =
            action.map(|action| action.decode(body, &run.view.vocabulary, memory, logits.as_ref())).transpose();
        let (action, refused) = match decoded {
            Ok(action) => (action, None),
            Err(problem) => (None, Some(ModException::invalid_action(*event, &problem))),
        };
        let reply = Reply {
            action,
            exception: exception.map(ModException::from).or(refused),
            elapsed: Duration::from_nanos(elapsed_ns).min(sent_at.elapsed()),
            ..Reply::default()
        };
        // Before the statistics of the mod, which count an invalid action as a failure. Only the engine knows how many
        // tokens are possible.
        reply.validate_action(*event, run.view.vocabulary.len())
    }
}
