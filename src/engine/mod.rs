//! One validated [`Request`] in, events out: scheduler, slots, sequences, sampling, stop, KV state.
//!
//! One decode thread per loaded model owns the llama context. Slots are llama sequences; every loop decodes one
//! batch of all runs that are ready, prompt chunks mixed in. A run that waits (for a mod, for a client that
//! does not read) is left out of the batch and delays nobody. Everything that happens leaves the thread through
//! bounded channels: [`crate::events::Signal`]s to the recorder, [`Output`]s to the surface that asked. Nothing
//! here waits for a database, a disk or a socket.

mod actions;
mod adapters;
mod admission;
mod answer;
mod batch;
mod capture;
mod checkpoints;
mod control;
mod conversation;
pub mod encoder;
mod ending;
mod host_cache;
mod identity;
mod journal;
mod measure;
mod output;
mod overflow;
mod pipeline;
mod promise;
mod recording;
mod request;
mod request_ids;
mod rows;
mod run;
mod scheduler;
mod ses1;
mod slots;
mod status;
mod steps;
mod submit;
mod thinking;

pub use crate::model::OUT_OF_MEMORY;
pub use crate::model::llama::{AttentionRow, AttentionSupport, SamplerStage, SamplingParams, Unsupported};
pub use capture::AttentionEncodeFn;
pub use control::{EndThinking, RunActivity, RunControl, RunOver, RunProgress};
pub use journal::Clock;
pub use output::{Generation, Output, PromptProgress, TextDelta};
pub use request::{Limits, Overflow, RecordPolicy, ReportOptions, Request};
pub use ses1::Ses1Error;
pub use slots::{SlotError, SlotSnapshot, SlotTokens};
pub use status::{EngineCounts, EngineStatus, PromptTiming, RunMetrics, SlotRun, SlotView, TokenTotals};
pub use submit::SubmitError;
pub use thinking::ThinkingBudget;

use crate::events::{DurabilityAcks, Recorder, Signal, UnstoredRuns};
use crate::model::Model;
use crate::model::llama::{CacheType, ContextOptions};
use capture::Capture;
use host_cache::HostCache;
use identity::Identification;
use scheduler::{Command, Scheduler};
use ses1::Home;
use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot};

/// Outputs that may wait for a client that does not read, before its run pauses.
const CLIENT_CHANNEL: usize = 256;
/// Of the memory for idle states, one part in so many may be used for going back in states that know only their end.
const CHECKPOINTS: usize = 8;

/// How the engine is set up.
#[derive(Debug, Clone)]
pub struct Options {
    /// Context of each slot, in tokens.
    pub ctx_size: u32,
    /// Slots: runs that decode at the same time.
    pub parallel: u32,
    /// Threads for decoding tokens.
    pub threads: i32,
    /// Threads for decoding prompts.
    pub threads_batch: i32,
    /// Most tokens in one decode.
    pub batch_size: u32,
    /// Most tokens in one physical batch.
    pub ubatch_size: u32,
    /// Whether attention can be captured; flash attention is then off.
    pub attention: bool,
    /// How keys are kept in the KV cache.
    pub cache_type_k: CacheType,
    /// How values are kept in the KV cache; a quantised type needs flash attention.
    pub cache_type_v: CacheType,
    /// A run takes the slot whose state it shares at least this part of its prompt with; 0 looks at no slot's state.
    pub slot_prompt_similarity: f32,
    /// Most bytes of states that no slot has room for; 0 keeps none.
    pub cache_ram_bytes: usize,
    /// Folder in which the hashes of models are kept.
    pub hash_cache: Option<PathBuf>,
    /// Most tokens that the answer of any run may have; `None` for as many as fit.
    pub max_tokens: Option<u32>,
    /// Codes attention for storage.
    pub encode_attention: AttentionEncodeFn,
    /// Tells the time of day.
    pub clock: Clock,
}

/// A running engine; cheap to clone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    model: Arc<Model>,
    options: Options,
    commands: std::sync::mpsc::Sender<Command>,
    waiting: Arc<AtomicUsize>,
    home: Arc<Home>,
    identification: Identification,
    /// `None` without capture.
    attends: Option<Result<AttentionSupport, Unsupported>>,
    status: Arc<EngineStatus>,
    /// Cloned into every run.
    counted: Arc<()>,
    durability_acks: Option<DurabilityAcks>,
    unstored: Option<UnstoredRuns>,
    /// Weak: when the decode thread has ended, so has the recorder's last sender.
    recorder: mpsc::WeakSender<Signal>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// The way to a run of this engine; what is said to one that is not under way comes back as [`RunOver`].
    #[must_use]
    pub fn control(&self, run: crate::events::RunId) -> RunControl {
        RunControl::new(run, self.inner.commands.clone(), Arc::clone(self.inner.model.vocabulary()))
    }

    /// Starts the decode thread. `recorder` receives every signal of every recorded run; a plain channel is one. For a
    /// model that generates no text there is no thread, and every request is refused.
    ///
    /// # Errors
    /// llama.cpp refused the context, e.g. because its memory could not be had.
    pub async fn start(
        model: Arc<Model>,
        options: Options,
        recorder: impl Into<Recorder>,
    ) -> Result<Self, crate::model::ModelError> {
        let Recorder { signals: recorder, durability_acks, unstored } = recorder.into();
        let weak = recorder.downgrade();
        let (commands, inbox) = std::sync::mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let status = Arc::new(EngineStatus::new(options.parallel));
        let home = |model: &Model, layout| Home { vocabulary: model.vocabulary().len(), layout };
        if !model.generates() {
            let inner = Inner {
                home: Arc::new(home(&model, None)),
                identification: Identification::start(&model, options.hash_cache.clone()),
                attends: None,
                model,
                options,
                commands,
                waiting,
                status,
                counted: Arc::new(()),
                durability_acks,
                unstored,
                recorder: weak,
                thread: Mutex::default(),
            };
            return Ok(Self { inner: Arc::new(inner) });
        }
        let (ready, started) = oneshot::channel();
        let thread = {
            let (model, options, commands, waiting, status) =
                (Arc::clone(&model), options.clone(), commands.clone(), Arc::clone(&waiting), Arc::clone(&status));
            move || {
                let context = ContextOptions {
                    context_per_sequence: options.ctx_size,
                    sequences: options.parallel,
                    batch_size: options.batch_size,
                    ubatch_size: options.ubatch_size,
                    threads: options.threads,
                    threads_batch: options.threads_batch,
                    attention: options.attention,
                    cache_type_k: options.cache_type_k,
                    cache_type_v: options.cache_type_v,
                    checkpoint_bytes: options.cache_ram_bytes / CHECKPOINTS,
                };
                let made = model.context(&context).and_then(|mut context| {
                    let layout = context.learn_layout()?;
                    let capture = options
                        .attention
                        .then(|| Capture::start(options.encode_attention, recorder.clone()))
                        .transpose()
                        .map_err(|error| crate::model::ModelError::Decode(error.to_string()))?;
                    Ok((context, capture, layout))
                });
                match made {
                    Ok((context, capture, layout)) => {
                        let sizes =
                            layout.as_ref().map_or((0, 0), |layout| (layout.fixed_bytes(), layout.bytes_per_token()));
                        if ready.send(Ok((layout, context.attends().cloned()))).is_ok() {
                            let beginnings = context.keeps_beginnings();
                            let idle = HostCache::new(options.cache_ram_bytes, sizes, beginnings);
                            Scheduler::new(context, options, inbox, commands, recorder, capture, waiting, status, idle)
                                .run();
                        }
                    }
                    // Nobody listens only when the start was given up.
                    Err(error) => drop(ready.send(Err(error))),
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("thunder-decode".into())
            .spawn(thread)
            .map_err(|error| crate::model::ModelError::Decode(error.to_string()))?;
        let started = started.await;
        let (layout, attends) =
            started.map_err(|_| crate::model::ModelError::Decode("the decode thread died while starting".into()))??;
        let home = Arc::new(home(&model, layout));
        let identification = Identification::start(&model, options.hash_cache.clone());
        let thread = Mutex::new(Some(thread));
        let inner = Inner {
            model,
            options,
            commands,
            waiting,
            home,
            identification,
            attends,
            status,
            counted: Arc::new(()),
            durability_acks,
            unstored,
            recorder: weak,
            thread,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The model it runs.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.inner.model
    }

    /// Tokens that one run can hold, prompt and answer together.
    #[must_use]
    pub fn context_per_slot(&self) -> u32 {
        self.inner.options.ctx_size
    }

    /// Runs that decode at the same time.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.inner.options.parallel
    }

    /// Runs that wait, decode, or have a client that has not read everything.
    #[must_use]
    pub fn runs(&self) -> usize {
        Arc::strong_count(&self.inner.counted) - 1
    }

    /// What the decode thread is doing.
    #[must_use]
    pub fn status(&self) -> &Arc<EngineStatus> {
        &self.inner.status
    }

    /// What can be captured of the model's attention.
    ///
    /// # Errors
    /// What a run that asks for attention is refused with.
    pub fn attention(&self) -> Result<&AttentionSupport, SubmitError> {
        match &self.inner.attends {
            None => Err(SubmitError::AttentionOff),
            Some(Ok(attends)) => Ok(attends),
            Some(Err(why)) => {
                Err(SubmitError::AttentionUnsupported { model: self.inner.model.name().to_owned(), why: *why })
            }
        }
    }

    /// Whether the decode thread runs. It does not after [`Engine::stop`], nor when it has died of a panic; a model that
    /// generates no text needs none.
    #[must_use]
    pub fn is_running(&self) -> bool {
        if !self.inner.model.generates() {
            return true;
        }
        let thread = self.inner.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Ends all runs and waits for the decode thread; what was recorded is with the recorder then.
    pub async fn stop(&self) {
        // A closed channel says that the thread has ended already.
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
