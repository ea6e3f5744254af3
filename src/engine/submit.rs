//! Submission of requests: checks by the engine, and preparation of a run before it reaches the decode thread.

use super::control::{Generation, RunControl};
use super::error::SubmitError;
use super::fork::ForkPoint;
use super::head_rows;
use super::kv::conversation;
use super::recording::durability;
use super::recording::durability::PanicGuard;
use super::recording::event_buffer::EventBuffer;
use super::request::{Overflow, RecordPolicy, ReportOptions, Request, shortest_f64};
use super::run::dispatch::{ActiveMod, ModHealth};
use super::run::registration::Registration;
use super::run::replay::replay_mods;
use super::run::request_ids::ActiveRequestId;
use super::run::{Run, RunParts};
use super::scheduler::command::Command;
use super::status::EngineStatus;
use super::{Engine, Inner};
use crate::events::{RunId, RunStart, Signal, StoredHeads, TokenId};
use crate::model::chat::answer::AnswerFormat;
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{Sampler, SamplingParams};
use crate::model::{Model, Vocabulary};
use crate::mods::{RunView, SelectedMod};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc::{self, error::TrySendError};

/// Maximum runs that wait for a slot.
const MAX_QUEUED_RUNS: usize = 1024;

/// Maximum outputs queued for a client that does not read, before its run pauses.
const CLIENT_CHANNEL: usize = 256;

/// Maximum bytes of attention queued for a client that does not read, before its run pauses.
const MAX_WAITING_BYTES: usize = 64 << 20;

impl Engine {
    /// Submits a request to the decode thread.
    ///
    /// # Errors
    /// [`SubmitError`]; no run is created.
    pub async fn submit(&self, mut request: Request) -> Result<Generation, SubmitError> {
        let Inner { model, options, commands, waiting, durability_acks, unstored, recorder, .. } = &*self.inner;
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
        let vocabulary = model.vocabulary().len();
        let is_known = |token: TokenId| usize::try_from(token).is_ok_and(|token| token < vocabulary);
        if let Some(&token) = request.prompt.iter().find(|&&token| !is_known(token)) {
            return Err(SubmitError::UnknownToken { token, vocabulary });
        }
        if let Some(slot) = request.slot.filter(|&slot| slot >= options.parallel) {
            return Err(SubmitError::NoSuchSlot { slot, slots: options.parallel });
        }
        let prompt_tokens = request.prompt.len();
        if prompt_tokens >= context && !request.context_limit(context).is_filled_by(prompt_tokens) {
            if request.overflow != Overflow::Evict {
                return Err(SubmitError::PromptTooLong { prompt_tokens, context });
            }
            let parts = conversation::droppable_parts(&request.prompt, &request.spans, model.vocabulary());
            if conversation::select_parts(parts, prompt_tokens, context - 1, 0).is_none() {
                return Err(SubmitError::NothingToDrop { prompt_tokens, context });
            }
        }
        if request.attention {
            match self.attention() {
                Ok(support) => head_rows::check(&request, support, context)?,
                // A request that only records attention runs without it.
                Err(SubmitError::AttentionUnsupported { .. }) if !request.report.attention_rows => {
                    request.attention = false;
                }
                Err(refused) => return Err(refused),
            }
        }
        request.limits.apply_server_limit(options.max_tokens)?;
        let queued = waiting.load(Ordering::Acquire);
        if queued >= MAX_QUEUED_RUNS {
            return Err(SubmitError::Busy { waiting: queued });
        }
        request.limits.ban_end_tokens(&mut request.sampling, model.vocabulary());
        let adapters = request.adapters.get_or_insert_with(|| model.adapters().default_scales()).clone();
        let id = RunId::now();
        let (request_id, active_id) = reserve_request_id(&mut request, id)?;
        let mut parameters = json!({
            "sampling": request.sampling,
            "constraint": request.constraint,
            "limits": request.limits,
            "mods": request.mods.iter().map(SelectedMod::to_record).collect::<Vec<_>>(),
            "attention": request.attention,
            "visible": request.visible,
            "overflow": request.overflow,
            "alternatives": request.alternatives,
            "model": { "name": model.name(), "fingerprint": format!("{:032x}", model.fingerprint()) },
            "release": env!("CARGO_PKG_VERSION"),
        });
        if !request.answer_fields.is_empty() {
            parameters["request"] = json!(request.answer_fields);
        }
        if let Some(answer_format) = &request.answer_format {
            parameters["reading"] = answer_format.to_recording();
        }
        if let Some(budget) = &request.reasoning_budget {
            parameters["thinking"] = json!(budget);
        }
        if request.stored_heads != StoredHeads::None {
            parameters["attention_heads"] = json!(request.stored_heads);
        }
        if !adapters.is_empty() {
            parameters["lora"] = json!(adapters);
        }
        let mut fork = request.fork.take();
        if let Some(fork) = &mut fork {
            parameters["fork"] = fork.earlier.clone();
            for (_, sampling) in &mut fork.sampling {
                request.limits.ban_end_tokens(sampling, model.vocabulary());
            }
        }
        let view = Arc::new(RunView {
            run_id: id,
            request_id: request_id.clone(),
            model: model.name().to_owned(),
            vocabulary: Arc::clone(model.vocabulary()),
            conversation: request.conversation.clone(),
            tools: request.tools.clone(),
            answer_format: request.answer_format.clone().unwrap_or_else(|| {
                Arc::new(AnswerFormat::plain(model.card().chat_template.as_deref().unwrap_or_default()))
            }),
            parameters,
            // Mods keep the seed that they began with.
            seed: fork
                .as_ref()
                .and_then(|fork| fork.sampling.first())
                .map_or(request.sampling.seed, |first| first.1.seed),
            grammars: Arc::clone(model.grammars()),
        });
        let constraint = compile_constraint(&request, model).await?;
        let mods = start_mods(&request, &view, fork.as_deref(), &self.inner.status).await?;
        let sampler = make_sampler(&request.sampling, model.vocabulary()).await?;
        let event_buffer = EventBuffer::new(request.record != RecordPolicy::Off, options.clock);
        let started = Signal::Started(Arc::new(RunStart {
            run_id: id,
            request_id: request_id.clone(),
            created_at: event_buffer.now(),
            surface: request.surface,
            model: model.name().to_owned(),
            owner: request.owner.clone(),
            user_label: request.user_label.clone(),
            metadata: request.metadata.clone(),
            max_tokens: Some(request.limits.max_tokens as i32),
            temperature: Some(shortest_f64(request.sampling.temperature)),
            seed: Some(request.sampling.seed),
            mods: mods.iter().map(|active| active.name.clone()).collect(),
            prompt_preview: request.prompt_preview.clone(),
            parent: fork.as_ref().map(|fork| fork.parent.clone()),
        }));
        let output_capacity = output_capacity(request.report, model, options.ctx_size);
        let (client, output) = mpsc::channel(output_capacity);
        let unfinished = durability::unfinished_end(event_buffer.now(), request.prompt.len());
        let required = request.record == RecordPolicy::Required;
        let ack = durability_acks.as_ref().filter(|_| required).map(|durability_acks| durability_acks.request(id));
        let recorder = recorder.upgrade().filter(|_| event_buffer.is_recorded());
        let panic_guard = PanicGuard::new(id, client.clone(), recorder.clone(), unfinished.clone());
        let registration = Registration::new(active_id, panic_guard, Arc::clone(&self.inner.run_counter));
        let owner = request.owner.clone();
        let parts = RunParts { mods, event_buffer, sampler, constraint, registration };
        let mut run = Box::new(Run::new(id, request, view, parts, context));
        if let Some(fork) = fork {
            let restore = move || match run.restore(&fork) {
                Ok(()) => Ok(run),
                Err(refused) => {
                    run.discard();
                    Err(refused)
                }
            };
            run = tokio::task::spawn_blocking(restore).await.map_err(|_| SubmitError::Stopped)??;
        }
        let metrics = Arc::clone(run.metrics());
        let unstored = unstored.as_ref().filter(|_| recorder.is_some());
        if let Some(unstored) = unstored {
            unstored.insert(id, request_id.clone(), owner, run.ended_flag());
        }
        // Sent immediately, since the decode thread may be busy for long. The decode thread sends it if the recorder
        // has no room now.
        let started = recorder.and_then(|recorder| match recorder.try_send(started) {
            Err(TrySendError::Full(started)) => Some(started),
            Ok(()) | Err(TrySendError::Closed(_)) => None,
        });
        waiting.fetch_add(1, Ordering::AcqRel);
        if commands.send(Command::Submit(run, client, started)).is_err() {
            unstored.inspect(|unstored| unstored.remove(id));
            return Err(SubmitError::Stopped);
        }
        let output = match ack {
            Some(ack) => durability::hold_end(output, ack, unfinished, output_capacity),
            None => output,
        };
        let control = RunControl::new(id, commands.clone(), Arc::clone(model.vocabulary()));
        Ok(Generation { run_id: id, request_id, metrics, output, control })
    }
}

/// Returns the capacity of the output channel of a run.
fn output_capacity(report: ReportOptions, model: &Model, context: u32) -> usize {
    if !report.attention_rows {
        return CLIENT_CHANNEL;
    }
    let card = model.card();
    let row_bytes = size_of::<f32>() * card.layers as usize * card.heads as usize * context as usize;
    (MAX_WAITING_BYTES / row_bytes.max(1)).clamp(2, CLIENT_CHANNEL)
}

/// Reserves the id of the run for its client and its mods: the client's, or the run's own.
fn reserve_request_id(request: &mut Request, run: RunId) -> Result<(String, ActiveRequestId), SubmitError> {
    let own = run.to_string();
    let wanted = request.request_id.take().unwrap_or_else(|| own.clone());
    match ActiveRequestId::reserve(&wanted) {
        Some(active) => return Ok((wanted, active)),
        None if !request.may_drop_request_id => return Err(SubmitError::RequestIdInUse { request_id: wanted }),
        None => {}
    }
    let active =
        ActiveRequestId::reserve(&own).ok_or_else(|| SubmitError::RequestIdInUse { request_id: own.clone() })?;
    Ok((own, active))
}

/// Creates the sampler. DRY searches the whole vocabulary for its sequence breakers, so that case runs on a blocking
/// thread.
async fn make_sampler(sampling: &SamplingParams, vocabulary: &Arc<Vocabulary>) -> Result<Sampler, SubmitError> {
    if sampling.dry_multiplier == 0.0 {
        return Ok(Sampler::new(sampling, vocabulary));
    }
    let (sampling, vocabulary) = (sampling.clone(), Arc::clone(vocabulary));
    let make = move || Sampler::new(&sampling, &vocabulary);
    tokio::task::spawn_blocking(make).await.map_err(|_| SubmitError::Stopped)
}

/// Starts the run's mods on a blocking thread: a mod may have to start a process. Those of a fork see the recorded events.
async fn start_mods(
    request: &Request,
    view: &Arc<RunView>,
    fork: Option<&ForkPoint>,
    status: &Arc<EngineStatus>,
) -> Result<Vec<ActiveMod>, SubmitError> {
    if request.mods.is_empty() {
        return Ok(Vec::new());
    }
    let (chosen, view, fork) = (request.mods.clone(), Arc::clone(view), fork.cloned());
    let status = Arc::clone(status);
    let start = move || {
        let mut mods = chosen
            .into_iter()
            .map(|chosen| {
                let name = chosen.mod_ref.name;
                let described = chosen.factory.describe();
                match chosen.factory.start(&chosen.mod_ref.config, &view) {
                    Ok(instance) => Ok(ActiveMod {
                        calls: status.latencies().calls_of(&name),
                        name,
                        version: described.version,
                        records_noop: described.language != "rust",
                        instance,
                        health: ModHealth::default(),
                    }),
                    Err(message) => Err(SubmitError::ModConfig { name, message }),
                }
            })
            .collect::<Result<Vec<_>, _>>()?;
        match fork.map_or(Ok(()), |fork| replay_mods(&fork, &mut mods, &view)) {
            Ok(()) => Ok(mods),
            Err(refused) => {
                mods.iter_mut().for_each(|active| active.instance.finished());
                Err(refused)
            }
        }
    };
    tokio::task::spawn_blocking(start).await.map_err(|_| SubmitError::Stopped)?
}

/// Compiles the request's constraint on a blocking thread.
async fn compile_constraint(request: &Request, model: &Arc<Model>) -> Result<Option<GrammarMatcher>, SubmitError> {
    let Some(constraint) = request.constraint.clone() else { return Ok(None) };
    let grammars = Arc::clone(model.grammars());
    let compile = move || {
        let follower = grammars.follow(&constraint);
        follower.map_err(|error| SubmitError::Constraint { field: constraint.field, error })
    };
    tokio::task::spawn_blocking(compile).await.map_err(|_| SubmitError::Stopped)?.map(Some)
}
