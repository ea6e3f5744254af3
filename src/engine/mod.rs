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
mod control;
mod conversation;
pub mod encoder;
mod host_cache;
mod journal;
mod measure;
mod overflow;
mod pipeline;
mod promise;
mod request;
mod rows;
mod run;
mod scheduler;
mod ses1;
mod sessions;
mod slots;
mod status;
mod steps;
mod thinking;

pub use crate::model::OUT_OF_MEMORY;
pub use crate::model::llama::{Attends, Captured, Sampling, Stage, Unseen};
pub use capture::AttentionCoder;
pub use control::{Activity, Control, RunOver, Standing};
pub use journal::Clock;
pub use request::{Limits, Overflow, RecordPolicy, Report, Request};
pub use ses1::Ses1Error;
pub use sessions::{NoRoom, Session, Sessions};
pub use slots::{SlotError, SlotState, SlotTokens};
pub use status::{Counts, Meter, Occupant, PromptDone, SlotView, Status, Totals};
pub use thinking::ThinkingBudget;

use crate::events::{Alternative, FinishReason, Promises, Recorder, RunEnd, RunId, RunStart, Signal, TokenMeasure};
use crate::model::chat::answer::Reading;
use crate::model::grammar::{self, Follower};
use crate::model::llama::{CacheType, ContextOptions, Layout, Sampler};
use crate::model::{Model, Vocabulary};
use crate::mods::{Chosen, RunView};
use capture::Capture;
use host_cache::HostCache;
use journal::Journal;
use pipeline::{ActiveMod, Health};
use promise::LastWill;
use run::Run;
use scheduler::{Command, Scheduler};
use serde_json::json;
use ses1::Home;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot};

/// Outputs that may wait for a client that does not read, before its run pauses.
const CLIENT_CHANNEL: usize = 256;

/// Runs that may wait for a slot.
const QUEUE: usize = 1024;

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
    /// Most bytes of sessions.
    pub session_memory_bytes: usize,
    /// Most tokens that the answer of any run may have; `None` for as many as fit.
    pub max_tokens: Option<u32>,
    /// Codes attention for storage.
    pub attention_coder: AttentionCoder,
    /// Tells the time of day.
    pub clock: Clock,
}

/// What a surface receives of its run, in order. Dropping the receiver cancels the run within a token.
#[derive(Debug, Clone)]
pub enum Output {
    /// Text was appended to the answer, and will not be taken back unless a `Retract` says so.
    Text(Delta),
    /// A mod took back more than the stream had held back: the last `chars` characters of the answer are gone.
    Retract {
        /// Unicode scalar values to remove from the end.
        chars: usize,
    },
    /// How probable the tokens of the prompt were, where it was asked for; before any text.
    Prompt(Vec<(TokenMeasure, Vec<Alternative>)>),
    /// How far the prompt is, where it was asked for.
    Progress(Progress),
    /// The run is over; always the last output.
    Ended(Arc<RunEnd>),
}

/// Text, with the tokens it came from.
#[derive(Debug, Clone, Default)]
pub struct Delta {
    /// Complete UTF-8; may be empty when a token only began a character.
    pub text: String,
    /// The tokens, with the most probable alternatives of the model for each; the list is empty for forced tokens.
    pub tokens: Vec<(TokenMeasure, Vec<Alternative>)>,
    /// The attention that each of `tokens` was drawn with, where it was asked for; `None` for a token that a mod put there
    /// without a decode of its own.
    pub rows: Vec<Option<Arc<Captured>>>,
    /// Tokens of earlier deltas that a mod took back, the newest first, where each token was asked for; they went before
    /// `tokens` came.
    pub taken_back: usize,
    /// Why the run ends with this, where that is known already.
    pub last: Option<FinishReason>,
}

/// How far a prompt is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Tokens of the prompt.
    pub total: u32,
    /// Tokens whose state was there already.
    pub cached: u32,
    /// Tokens that are there now, `cached` among them.
    pub processed: u32,
    /// Microseconds since the run got its slot.
    pub elapsed_us: u64,
}

/// A run that was accepted.
#[derive(Debug)]
pub struct Generation {
    /// Its id, known before the first token.
    pub run_id: RunId,
    /// The client's id, or ours as text.
    pub request_id: String,
    /// What becomes known of it before it ends.
    pub meter: Arc<Meter>,
    /// What happens to it.
    pub output: mpsc::Receiver<Output>,
    /// The way to it.
    pub control: Control,
}

/// Why a request was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SubmitError {
    /// The prompt does not fit.
    #[error("the prompt has {prompt_tokens} tokens, the context of a slot holds {context}")]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt_tokens: usize,
        /// Tokens a slot holds.
        context: usize,
    },
    /// More tokens were asked for than the server lets any run have.
    #[error(
        "max_tokens is {asked}, and an answer of this server may have at most {limit} tokens; ask for fewer, or leave it out"
    )]
    TooManyTokens {
        /// Asked for.
        asked: u32,
        /// The server's limit.
        limit: u32,
    },
    /// The prompt does not fit, whatever goes.
    #[error(
        "the prompt has {prompt_tokens} tokens, and without all messages that may be dropped it still does not fit into the {context} tokens of a slot: system messages, the last user message and the last answer stay"
    )]
    NothingToDrop {
        /// Tokens in the prompt.
        prompt_tokens: usize,
        /// Tokens a slot holds.
        context: usize,
    },
    /// There is no such slot.
    #[error("there is no slot {slot}; the slots are 0 to {}", slots - 1)]
    NoSuchSlot {
        /// Asked for.
        slot: u32,
        /// Number of slots.
        slots: u32,
    },
    /// There is nothing to continue from.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// The server was started without attention.
    #[error("attention was asked for, but the server runs with flash attention; start it with --attention on")]
    AttentionOff,
    /// The model's attention cannot be captured.
    #[error("attention was asked for, but that of the model '{model}' cannot be captured: {why}")]
    AttentionUnseen {
        /// Its name.
        model: String,
        /// Why.
        why: Unseen,
    },
    /// A mod refused its configuration.
    #[error("mod '{name}': {message}")]
    ModConfig {
        /// The mod.
        name: String,
        /// What it said.
        message: String,
    },
    /// The constraint cannot be used.
    #[error("{field}: {error}")]
    Constraint {
        /// The request's field that it came from.
        field: String,
        /// Why.
        error: grammar::Error,
    },
    /// The model is an encoder.
    #[error("the model '{model}' generates no text: it is an encoder, for embeddings and scores")]
    NoGeneration {
        /// Its name.
        model: String,
    },
    /// Too many runs wait already.
    #[error("{waiting} runs wait already; try again later")]
    Busy {
        /// Runs in the queue.
        waiting: usize,
    },
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
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
    /// `None` without capture.
    attends: Option<Result<Attends, Unseen>>,
    sessions: Sessions,
    status: Arc<Status>,
    /// Cloned into every run.
    counted: Arc<()>,
    promises: Option<Promises>,
    /// Weak: when the decode thread has ended, so has the recorder's last sender.
    recorder: mpsc::WeakSender<Signal>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Engine {
    /// Starts the decode thread. `recorder` receives every signal of every recorded run; a plain channel is one. For a
    /// model that generates no text there is no thread, and every request is refused.
    ///
    /// # Errors
    /// llama.cpp refused the context, e.g. because its memory could not be had.
    pub async fn start(
        model: Arc<Model>,
        options: Options,
        recorder: impl Into<Recorder>,
    ) -> Result<Self, crate::model::Error> {
        let Recorder { signals: recorder, promises } = recorder.into();
        let weak = recorder.downgrade();
        let (commands, inbox) = std::sync::mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let status = Arc::new(Status::new(options.parallel));
        let sessions = Sessions::new(options.session_memory_bytes);
        let home = |model: &Model, layout| Home {
            fingerprint: model.fingerprint(),
            adapters: model.adapters().list().iter().map(|adapter| adapter.fingerprint).collect(),
            vocabulary: model.vocabulary().len(),
            layout,
        };
        if !model.generates() {
            let inner = Inner {
                home: Arc::new(home(&model, None)),
                attends: None,
                model,
                options,
                commands,
                waiting,
                sessions,
                status,
                counted: Arc::new(()),
                promises,
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
                };
                let made = model.context(&context).and_then(|mut context| {
                    let layout = context.learn_layout()?;
                    let capture = options
                        .attention
                        .then(|| Capture::start(options.attention_coder, recorder.clone()))
                        .transpose()
                        .map_err(|error| crate::model::Error::Decode(error.to_string()))?;
                    Ok((context, capture, layout))
                });
                match made {
                    Ok((context, capture, layout)) => {
                        let bytes_per_token = layout.as_ref().map_or(0, Layout::bytes_per_token);
                        if ready.send(Ok((layout, context.attends().cloned()))).is_ok() {
                            let beginnings = context.keeps_beginnings();
                            let idle = HostCache::new(options.cache_ram_bytes, bytes_per_token, beginnings);
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
            .map_err(|error| crate::model::Error::Decode(error.to_string()))?;
        let started = started.await;
        let (layout, attends) =
            started.map_err(|_| crate::model::Error::Decode("the decode thread died while starting".into()))??;
        let home = Arc::new(home(&model, layout));
        let thread = Mutex::new(Some(thread));
        let inner = Inner {
            model,
            options,
            commands,
            waiting,
            home,
            attends,
            sessions,
            status,
            counted: Arc::new(()),
            promises,
            recorder: weak,
            thread,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Hands a request to the decode thread.
    ///
    /// # Errors
    /// [`SubmitError`]; the run then does not exist.
    pub async fn submit(&self, mut request: Request) -> Result<Generation, SubmitError> {
        let Inner { model, options, commands, waiting, promises, recorder, .. } = &*self.inner;
        if !model.generates() {
            return Err(SubmitError::NoGeneration { model: model.name().to_owned() });
        }
        if !self.is_running() {
            return Err(SubmitError::Stopped);
        }
        let context = options.ctx_size as usize;
        if request.prompt.is_empty() {
            return Err(SubmitError::EmptyPrompt);
        }
        if let Some(slot) = request.slot.filter(|&slot| slot >= options.parallel) {
            return Err(SubmitError::NoSuchSlot { slot, slots: options.parallel });
        }
        let prompt_tokens = request.prompt.len();
        if prompt_tokens >= context {
            if request.overflow != Overflow::Evict {
                return Err(SubmitError::PromptTooLong { prompt_tokens, context });
            }
            let parts = conversation::droppable(&request.prompt, &request.spans, model.vocabulary());
            if conversation::pick(parts, prompt_tokens, context - 1, 0).is_none() {
                return Err(SubmitError::NothingToDrop { prompt_tokens, context });
            }
        }
        if request.attention {
            match self.attention() {
                Ok(_) => {}
                // Who only wants it recorded gets the run without.
                Err(SubmitError::AttentionUnseen { .. }) if !request.report.attention_rows => request.attention = false,
                Err(refused) => return Err(refused),
            }
        }
        request.limits.hold_to(options.max_tokens)?;
        let queued = waiting.load(Ordering::Acquire);
        if queued >= QUEUE {
            return Err(SubmitError::Busy { waiting: queued });
        }
        ban_ends(&mut request.sampling, &request.limits, model.vocabulary());
        let adapters = request.adapters.get_or_insert_with(|| model.adapters().usual()).clone();
        let id = RunId::now();
        let request_id = request.request_id.clone().unwrap_or_else(|| id.to_string());
        let mut parameters = json!({
            "sampling": request.sampling,
            "constraint": request.constraint,
            "limits": request.limits,
            "mods": request.mods.iter().map(Chosen::recorded).collect::<Vec<_>>(),
            "attention": request.attention,
            "visible": request.visible,
            "overflow": request.overflow,
            "alternatives": request.alternatives,
            "model": { "name": model.name(), "fingerprint": format!("{:032x}", model.fingerprint()) },
            "release": env!("CARGO_PKG_VERSION"),
        });
        if let Some(reading) = &request.reading {
            parameters["reading"] = reading.recorded();
        }
        if let Some(budget) = &request.thinking {
            parameters["thinking"] = json!(budget);
        }
        if !adapters.is_empty() {
            parameters["lora"] = json!(adapters);
        }
        let view = Arc::new(RunView {
            run_id: id,
            request_id: request_id.clone(),
            model: model.name().to_owned(),
            vocabulary: Arc::clone(model.vocabulary()),
            conversation: request.conversation.clone(),
            tools: request.tools.clone(),
            reading: request
                .reading
                .clone()
                .unwrap_or_else(|| Arc::new(Reading::plain(model.card().chat_template.as_deref().unwrap_or_default()))),
            parameters,
            seed: request.sampling.seed,
            grammars: Arc::clone(model.grammars()),
        });
        let constraint = compile(&request, model).await?;
        let mods = start_mods(&request, &view).await?;
        let sampler = Sampler::new(&request.sampling, model.vocabulary());
        let journal = Journal::new(request.record != RecordPolicy::Off, options.clock);
        let started = Signal::Started(Arc::new(RunStart {
            run_id: id,
            request_id: request_id.clone(),
            created_at: journal.now(),
            surface: request.surface,
            model: model.name().to_owned(),
            user_label: request.user_label.clone(),
            max_tokens: Some(request.limits.max_tokens as i32),
            temperature: Some(shortest(request.sampling.temperature)),
            seed: Some(request.sampling.seed),
            mods: mods.iter().map(|active| active.name.clone()).collect(),
            prompt_preview: request.prompt_preview.clone(),
        }));
        let places = rows::places(request.report, model, options.ctx_size);
        let (client, output) = mpsc::channel(places);
        let blank = promise::blank(journal.now(), request.prompt.len());
        let required = request.record == RecordPolicy::Required;
        let promise = promises.as_ref().filter(|_| required).map(|promises| promises.make(id));
        let last_will = LastWill {
            run_id: id,
            client: client.clone(),
            recorder: recorder.upgrade().filter(|_| journal.recorded()),
            blank: blank.clone(),
        };
        let mut run = Box::new(Run::new(id, request, view, mods, journal, sampler, constraint, context));
        run.last_will = Some(last_will);
        run.counted = Some(Arc::clone(&self.inner.counted));
        let meter = Arc::clone(&run.meter);
        waiting.fetch_add(1, Ordering::AcqRel);
        commands.send(Command::Submit(run, client, started)).map_err(|_| SubmitError::Stopped)?;
        let output = match promise {
            Some(promise) => promise::keep(output, promise, blank, places),
            None => output,
        };
        let control = Control::new(id, commands.clone(), Arc::clone(model.vocabulary()));
        Ok(Generation { run_id: id, request_id, meter, output, control })
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

    /// States of slots that clients keep here.
    #[must_use]
    pub fn sessions(&self) -> &Sessions {
        &self.inner.sessions
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
    pub fn status(&self) -> &Status {
        &self.inner.status
    }

    /// What can be captured of the model's attention.
    ///
    /// # Errors
    /// What a run that asks for attention is refused with.
    pub fn attention(&self) -> Result<&Attends, SubmitError> {
        match &self.inner.attends {
            None => Err(SubmitError::AttentionOff),
            Some(Ok(attends)) => Ok(attends),
            Some(Err(why)) => {
                Err(SubmitError::AttentionUnseen { model: self.inner.model.name().to_owned(), why: *why })
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

/// Where end-of-generation tokens are not to end the run, they are never drawn.
fn ban_ends(sampling: &mut Sampling, limits: &Limits, vocabulary: &Vocabulary) {
    if limits.ignore_eos {
        let bans = vocabulary.end_of_generation().iter().map(|&token| (token, f32::NEG_INFINITY));
        sampling.logit_bias.extend(bans);
    }
}

/// The double that is written like the float: 0.8, not 0.800000011920929.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

/// Begins the run's mods, away from the async threads: a mod may have to start a process.
async fn start_mods(request: &Request, view: &Arc<RunView>) -> Result<Vec<ActiveMod>, SubmitError> {
    if request.mods.is_empty() {
        return Ok(Vec::new());
    }
    let (chosen, view) = (request.mods.clone(), Arc::clone(view));
    let start = move || {
        chosen
            .into_iter()
            .map(|chosen| {
                let name = chosen.mod_ref.name;
                let described = chosen.factory.describe();
                match chosen.factory.start(&chosen.mod_ref.config, &view) {
                    Ok(session) => Ok(ActiveMod {
                        name,
                        version: described.version,
                        records_noop: described.language != "rust",
                        session,
                        health: Health::default(),
                    }),
                    Err(message) => Err(SubmitError::ModConfig { name, message }),
                }
            })
            .collect()
    };
    tokio::task::spawn_blocking(start).await.map_err(|_| SubmitError::Stopped)?
}

/// Compiles the request's constraint, away from the async threads.
async fn compile(request: &Request, model: &Arc<Model>) -> Result<Option<Follower>, SubmitError> {
    let Some(constraint) = request.constraint.clone() else { return Ok(None) };
    let grammars = Arc::clone(model.grammars());
    let compile = move || {
        let follower = grammars.follow(&constraint);
        follower.map_err(|error| SubmitError::Constraint { field: constraint.field, error })
    };
    tokio::task::spawn_blocking(compile).await.map_err(|_| SubmitError::Stopped)?.map(Some)
}
