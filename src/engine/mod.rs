//! Generation engine: turns a [`Request`] into a run, which generates text and records events.
//!
//! One decode thread per loaded model owns the llama context. A slot is a sequence of that context. Each iteration of
//! the thread decodes one batch with all runs that are ready; prompt chunks share the batch with generated tokens. A
//! run that waits for a mod, or for a client that does not read, is left out of the batch and does not delay other
//! runs. Results leave the thread through bounded channels: [`crate::recording::Signal`]s to the recorder, [`Output`]s to
//! the API that submitted the run. The decode thread never waits for a database, socket or mod; it reads a file only for
//! the logit lens.

mod captures;
mod control;
mod decode_thread;
pub mod encoder;
mod error;
mod fork;
mod head_rows;
mod kv;
mod latencies;
mod options;
mod output;
mod recording;
mod request;
mod run;
mod scheduler;
mod slot_operations;
mod speculation;
mod status;
mod submit;

pub use crate::model::llama::{
    AttentionCapture, AttentionRow, AttentionSupport, NoHiddenStates, SamplerStage, SamplingParams,
    UnsupportedAttention, UnsupportedLens,
};
pub use control::{Generation, RunControl};
pub use error::{RunOver, SubmitError};
pub use fork::ForkPoint;
pub use kv::error::SlotError;
pub use kv::ses1::Ses1Error;
pub use kv::snapshot::{SlotSnapshot, SlotTokens};
pub use latencies::{Latencies, ModCalls};
pub use options::{
    AttentionEncodeFn, Clock, DraftLimits, DraftModel, DrafterKind, EngineOptions, MAX_UNREAD_TIME, SpeculationOptions,
};
pub use output::{
    EndReasoningOutcome, MeasuredToken, Output, PromptProgress, PromptTiming, RunActivity, RunMetrics, RunProgress,
    TextDelta,
};
pub use request::{Limits, Overflow, ReasoningBudget, RecordPolicy, ReportOptions, Request};
pub use run::mod_health::ModHealth;
pub use status::{EngineCounts, EngineStatus, SlotRun, SlotView, TokenTotals};
pub use submit::recorded_parameters::recorded_parameter;

use crate::model::llama::ContextCapabilities;
use crate::model::{Model, ModelError};
use crate::mods::ReplayLimits;
use crate::recording::{DurabilityAcks, RecorderHandle, Signal, UnstoredRuns};
use decode_thread::{ContextProperties, DecodeThread, log_start};
use kv::identity::IdentityWatch;
use kv::ses1::SnapshotFormat;
use scheduler::command::Command;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::mpsc;

/// Handle of a running engine; cheap to clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    model: Arc<Model>,
    options: EngineOptions,
    commands: std::sync::mpsc::Sender<Command>,
    /// Number of places in the queue: those of queued runs, and of requests whose run is being created.
    queue_places: Arc<AtomicUsize>,
    snapshot_format: Arc<SnapshotFormat>,
    identity_watch: IdentityWatch,
    capabilities: ContextCapabilities,
    status: Arc<EngineStatus>,
    /// True if runs draft tokens.
    speculates: bool,
    /// Every run holds a clone; see [`Engine::unfinished_runs`].
    run_counter: Arc<()>,
    durability_acks: Option<DurabilityAcks>,
    unstored: Option<UnstoredRuns>,
    /// Weak, so that the recorder's channel closes when the decode thread ends.
    recorder: mpsc::WeakSender<Signal>,
    /// Held while an image is encoded.
    image_encoding: Arc<tokio::sync::Mutex<()>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Returns a handle that controls a run of this engine. Requests for a run that is not active return [`RunOver`].
    #[must_use]
    pub fn control(&self, run: crate::events::RunId) -> RunControl {
        RunControl::new(run, self.inner.commands.clone(), Arc::clone(self.inner.model.vocabulary()))
    }

    /// Starts the decode thread. `recorder` receives every signal of every recorded run. A model that generates no text
    /// gets no thread, and every request is rejected.
    ///
    /// # Errors
    /// llama.cpp could not create the context, e.g. for lack of memory.
    pub async fn start(
        model: Arc<Model>,
        mut options: EngineOptions,
        recorder: impl Into<RecorderHandle>,
    ) -> Result<Self, ModelError> {
        // With less than one token for each slot, the last runs would get no tokens until others end.
        options.batch_size = options.batch_size.max(options.parallel);
        let recorder = recorder.into();
        let (commands, inbox) = std::sync::mpsc::channel();
        let queue_places = Arc::new(AtomicUsize::new(0));
        let status = Arc::new(EngineStatus::new(options.parallel));
        let (properties, thread) = if model.generates() {
            let thread = DecodeThread {
                model: Arc::clone(&model),
                options: options.clone(),
                inbox,
                commands: commands.clone(),
                recorder: recorder.signals.clone(),
                queue_places: Arc::clone(&queue_places),
                status: Arc::clone(&status),
            };
            let (properties, handle) = thread.spawn().await?;
            log_start(&model, &options, &properties);
            (properties, Some(handle))
        } else {
            (ContextProperties::default(), None)
        };
        let ContextProperties { mut capabilities, speculates } = properties;
        let layout = capabilities.layout.take();
        Ok(Self {
            inner: Arc::new(Inner {
                snapshot_format: Arc::new(SnapshotFormat { vocabulary: model.vocabulary().len(), layout }),
                identity_watch: IdentityWatch::start(&model, options.hash_cache.clone()),
                capabilities,
                model,
                options,
                commands,
                queue_places,
                status,
                speculates,
                run_counter: Arc::new(()),
                durability_acks: recorder.durability_acks,
                unstored: recorder.unstored,
                recorder: recorder.signals.downgrade(),
                image_encoding: Arc::default(),
                thread: Mutex::new(thread),
            }),
        })
    }

    /// Returns the model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.inner.model
    }

    /// Returns the number of tokens that one run can hold, prompt and answer together.
    #[must_use]
    pub fn context_per_slot(&self) -> u32 {
        self.inner.options.ctx_size
    }

    /// Returns the limits on the actions of mods in a replay.
    #[must_use]
    pub fn replay_limits(&self) -> ReplayLimits {
        let EngineOptions { ctx_size, max_tokens, .. } = self.inner.options;
        ReplayLimits { context: ctx_size as usize, max_tokens }
    }

    /// Returns true if runs draft tokens.
    #[must_use]
    pub fn speculates(&self) -> bool {
        self.inner.speculates
    }

    /// Returns the number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.inner.options.parallel
    }

    /// Returns the number of runs that are queued, are being decoded, or have outputs that their client has not read.
    #[must_use]
    pub fn unfinished_runs(&self) -> usize {
        Arc::strong_count(&self.inner.run_counter) - 1
    }

    /// Returns counters and slot states of the decode thread.
    #[must_use]
    pub fn status(&self) -> &Arc<EngineStatus> {
        &self.inner.status
    }

    /// Returns the capture setting that takes effect; never [`AttentionCapture::Auto`].
    #[must_use]
    pub fn attention_capture(&self) -> AttentionCapture {
        self.inner.capabilities.attention_capture
    }

    /// Returns the attention that can be captured from the model.
    ///
    /// # Errors
    /// The error that a request for attention gets.
    pub fn attention(&self) -> Result<&AttentionSupport, SubmitError> {
        match &self.inner.capabilities.attention_support {
            None => Err(SubmitError::AttentionOff),
            Some(Ok(attention_support)) => Ok(attention_support),
            Some(Err(reason)) => {
                Err(SubmitError::AttentionUnsupported { model: self.inner.model.name().to_owned(), reason: *reason })
            }
        }
    }

    /// Checks that the model has a logit lens.
    ///
    /// # Errors
    /// The error that a request with `lens` gets.
    pub fn check_lens(&self) -> Result<(), SubmitError> {
        match &self.inner.capabilities.lens_support {
            None => Err(SubmitError::LensOff),
            Some(Ok(())) => Ok(()),
            Some(Err(reason)) => {
                Err(SubmitError::LensUnsupported { model: self.inner.model.name().to_owned(), reason: reason.clone() })
            }
        }
    }

    /// Returns true while the decode thread runs: until [`Engine::stop`] or a panic of the thread. Always returns true
    /// for a model that generates no text, which needs no thread.
    #[must_use]
    pub fn is_running(&self) -> bool {
        if !self.inner.model.generates() {
            return true;
        }
        let thread = self.inner.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Announces [`Engine::stop`]: runs whose clients disconnect from now on end because of the shutdown, because the
    /// server closes the connections itself.
    pub fn announce_stop(&self) {
        self.inner.status.set_stopping();
    }

    /// Ends all runs and waits for the decode thread. When this returns, the recorder has received every signal.
    pub async fn stop(&self) {
        // A closed channel means that the thread has already ended.
        let _ = self.inner.commands.send(Command::Stop);
        let thread = self.inner.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let joined = tokio::task::spawn_blocking(move || thread.join()).await;
            if !matches!(joined, Ok(Ok(()))) {
                tracing::error!("the decode thread panicked");
            }
        }
    }
}
