//! Start of the decode thread. The thread creates and owns the llama context, and reports the context's properties.

use super::kv::host_cache::{HostCache, StateSize};
use super::kv::slots::KvSlots;
use super::options::EngineOptions;
use super::recording::Recording;
use super::recording::attention_encoder::{AttentionEncoderThread, Encoders};
use super::scheduler::Scheduler;
use super::scheduler::command::Command;
use super::speculation::draft_context::{DraftContext, MainContextSettings};
use super::status::EngineStatus;
use crate::model::llama::{Context, ContextCapabilities, ContextOptions, LlamaUse};
use crate::model::{Model, ModelError};
use crate::recording::Signal;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, Sender};
use std::thread::JoinHandle;
use tokio::sync::{mpsc, oneshot};

/// Checkpoints may use `cache_ram_bytes` divided by this number.
const CHECKPOINT_MEMORY_DIVISOR: usize = 8;

/// Initial data of the decode thread.
pub struct DecodeThread {
    pub model: Arc<Model>,
    pub options: EngineOptions,
    pub inbox: Receiver<Command>,
    pub commands: Sender<Command>,
    pub recorder: mpsc::Sender<Signal>,
    /// Counter of the places in the queue of runs.
    pub queue_places: Arc<AtomicUsize>,
    pub status: Arc<EngineStatus>,
}

/// Properties of a llama context. The default describes a model without a context.
#[derive(Default)]
pub struct ContextProperties {
    pub capabilities: ContextCapabilities,
    /// True if runs draft tokens.
    pub speculates: bool,
}

impl DecodeThread {
    /// Starts the thread. Returns the properties of its context.
    ///
    /// # Errors
    /// llama.cpp could not create the context, or a thread could not be started.
    pub async fn spawn(self) -> Result<(ContextProperties, JoinHandle<()>), ModelError> {
        let (ready, started) = oneshot::channel();
        let starting = LlamaUse::begin();
        let thread = std::thread::Builder::new()
            .name("thunder-decode".into())
            .spawn(move || self.run(ready, starting))
            .map_err(|error| ModelError::Decode(error.to_string()))?;
        let started = started.await;
        let properties =
            started.map_err(|_| ModelError::Decode("the decode thread panicked during start-up".into()))??;
        Ok((properties, thread))
    }

    fn run(self, ready: oneshot::Sender<Result<ContextProperties, ModelError>>, starting: LlamaUse) {
        let Self { model, options, inbox, commands, recorder, queue_places, status } = self;
        let (context, attention_encoder, capabilities) = match create_context(&model, &options, &recorder) {
            Ok(created) => created,
            // The receiver is dropped only if the start was cancelled.
            Err(error) => return drop(ready.send(Err(error))),
        };
        let layout = capabilities.layout.as_ref();
        let state_size = layout
            .map(|layout| StateSize { fixed: layout.fixed_bytes(), per_token: layout.bytes_per_token() })
            .unwrap_or_default();
        let prefixes_usable = context.are_all_prefixes_usable();
        let draft_context = match create_draft_context(&model, &options, &context) {
            Ok(created) => created,
            Err(error) => return drop(ready.send(Err(error))),
        };
        let properties =
            ContextProperties { capabilities, speculates: options.speculation.is_enabled() && prefixes_usable };
        if ready.send(Ok(properties)).is_ok() {
            drop(starting);
            let host_cache = HostCache::new(options.cache_ram_bytes, state_size, prefixes_usable);
            let kv = KvSlots::new(context, options.parallel, options.ctx_size, host_cache);
            let recording = Recording::new(recorder, attention_encoder);
            let channel = (commands, inbox);
            Scheduler::new(kv, draft_context, options.clone(), channel, recording, queue_places, status).run();
        }
    }
}

fn create_context<'model>(
    model: &'model Model,
    options: &EngineOptions,
    recorder: &mpsc::Sender<Signal>,
) -> Result<(Context<'model>, Option<AttentionEncoderThread>, ContextCapabilities), ModelError> {
    let context_options = ContextOptions {
        context_per_sequence: options.ctx_size,
        sequences: options.parallel,
        batch_size: options.batch_size,
        ubatch_size: options.ubatch_size,
        threads: options.threads,
        threads_batch: options.threads_batch,
        attention: options.attention,
        cache_type_k: options.cache_type_k,
        cache_type_v: options.cache_type_v,
        checkpoint_bytes: options.cache_ram_bytes / CHECKPOINT_MEMORY_DIVISOR,
    };
    let mut context = model.context(&context_options, None)?;
    let capabilities = context.probe_capabilities()?;
    context.check_control_vectors()?;
    let encoders = Encoders { tiers: options.encode_attention, heads: options.encode_heads };
    let start_encoder = || AttentionEncoderThread::start(encoders, recorder.clone());
    let attention_encoder = options
        .attention
        .is_enabled()
        .then(start_encoder)
        .transpose()
        .map_err(|error| ModelError::Decode(error.to_string()))?;
    Ok((context, attention_encoder, capabilities))
}

/// Creates the context of the draft model, if runs use one.
fn create_draft_context<'model>(
    model: &Model,
    options: &'model EngineOptions,
    context: &Context<'_>,
) -> Result<Option<DraftContext<'model>>, ModelError> {
    let can_draft = options.speculation.is_enabled() && context.are_all_prefixes_usable();
    let uses_model = options.speculation.drafter.uses_model() && can_draft;
    let Some(draft) = options.draft_model.as_ref().filter(|_| uses_model) else { return Ok(None) };
    let settings = MainContextSettings {
        ctx_size: options.ctx_size,
        parallel: options.parallel,
        ubatch_size: options.ubatch_size.min(options.batch_size),
        threads: options.threads,
        threads_batch: options.threads_batch,
    };
    DraftContext::new(draft, model, settings, context).map(Some)
}

/// Logs the properties of a new context.
pub fn log_start(model: &Model, options: &EngineOptions, properties: &ContextProperties) {
    let ContextProperties { capabilities, speculates } = properties;
    let draft_model = options.draft_model.as_ref().map(|draft| draft.model.name());
    tracing::info!(
        model = model.name(),
        attention = capabilities.attention_capture.as_str(),
        speculates,
        draft_model,
        "context created"
    );
    if options.speculation.is_enabled() && !speculates {
        tracing::warn!(
            model = model.name(),
            "speculative decoding disabled: the model's state cannot be truncated after a rejected draft"
        );
    }
}
