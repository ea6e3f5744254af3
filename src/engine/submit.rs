//! Submission of requests: creates a run from a request, and sends it to the decode thread.

use super::control::{Generation, RunControl};
use super::error::SubmitError;
use super::fork::ForkPoint;
use super::output::Output;
use super::queue_place::QueuePlace;
use super::recorded_parameters::record_parameters;
use super::recording::durability;
use super::recording::event_buffer::EventBuffer;
use super::request::{RecordPolicy, ReportOptions, Request};
use super::run::dispatch::{ActiveMod, ModHealth};
use super::run::registration::{PanicGuard, Registration};
use super::run::replay::replay_mods;
use super::run::request_ids::ActiveRequestId;
use super::run::{Run, RunParts};
use super::scheduler::command::Command;
use super::status::EngineStatus;
use super::{Engine, Inner};
use crate::events::{RunId, RunStart, Signal, shortest_f64};
use crate::model::chat::answer::AnswerFormat;
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{Sampler, SamplingParams};
use crate::model::{Model, Vocabulary};
use crate::mods::{PromptImage, ReplayLimits, RunView, SelectedMod};
use std::sync::Arc;
use tokio::sync::mpsc::{self, error::TrySendError};

/// Maximum outputs queued for a client that does not read. Its run is not decoded while the queue is full.
const MAX_QUEUED_OUTPUTS: usize = 256;

/// Maximum bytes of attention queued for a client that does not read, in all runs of its request.
const MAX_QUEUED_BYTES: usize = 64 << 20;

impl Engine {
    /// Submits a request to the decode thread. Returns the outputs of its run, and a handle that controls the run.
    ///
    /// # Errors
    /// [`SubmitError`]; no run is created.
    pub async fn submit(&self, mut request: Request) -> Result<Generation, SubmitError> {
        let Inner { model, options, commands, durability_acks, recorder, .. } = &*self.inner;
        self.validate(&mut request)?;
        let place = QueuePlace::reserve(&self.inner.waiting)?;
        self.encode_images(&request.images).await?;
        let mut fork = request.fork.take();
        request.limits.ban_end_tokens(&mut request.sampling, model.vocabulary());
        for (_, sampling) in fork.iter_mut().flat_map(|fork| &mut fork.sampling) {
            request.limits.ban_end_tokens(sampling, model.vocabulary());
        }
        request.adapters.get_or_insert_with(|| model.adapters().default_set());
        let id = RunId::now();
        let (request_id, active_id) = reserve_request_id(&mut request, id)?;
        let view = Arc::new(self.run_view(&request, fork.as_deref(), id, &request_id));
        let constraint = compile_constraint(&request, model).await?;
        let mods = start_mods(&request, &view, fork.as_deref(), &self.inner.status, self.replay_limits()).await?;
        let sampler = create_sampler(&request.sampling, model.vocabulary()).await?;
        let event_buffer = EventBuffer::new(request.record != RecordPolicy::Off, options.clock);
        let start = Signal::Started(Arc::new(run_start(&request, &view, &mods, fork.as_deref(), &event_buffer)));
        let (layers, heads) = (model.card().layers as usize, model.card().heads as usize);
        let row_bytes = size_of::<f32>() * layers * heads * options.ctx_size as usize;
        let output_capacity = output_capacity(request.report, row_bytes);
        // One place is reserved for the end of the run.
        let (client, output) = mpsc::channel(output_capacity + 1);
        let unfinished = durability::unfinished_end(event_buffer.now(), request.prompt.len());
        let is_required = request.record == RecordPolicy::Required;
        let ack = durability_acks.as_ref().filter(|_| is_required).map(|acks| acks.request(id));
        let recorder = recorder.upgrade().filter(|_| event_buffer.is_recorded());
        let panic_guard = PanicGuard::new(id, client.clone(), recorder.clone(), unfinished.clone());
        let registration = Registration::new(active_id, panic_guard, Arc::clone(&self.inner.run_counter));
        let parts = RunParts { mods, event_buffer, sampler, constraint, registration };
        let mut run = Box::new(Run::new(id, request, view, parts, options.ctx_size as usize));
        if let Some(fork) = fork {
            run = restore(run, fork).await?;
        }
        let metrics = Arc::clone(run.metrics());
        self.send(run, place, &request_id, client, start, recorder.as_ref())?;
        let output = match ack {
            Some(ack) => durability::hold_end(output, ack, unfinished, output_capacity),
            None => output,
        };
        let control = RunControl::new(id, commands.clone(), Arc::clone(model.vocabulary()));
        Ok(Generation { run_id: id, request_id, metrics, output, control })
    }

    /// Returns the properties of the run that mods can read.
    fn run_view(&self, request: &Request, fork: Option<&ForkPoint>, id: RunId, request_id: &str) -> RunView {
        let Inner { model, capabilities, .. } = &*self.inner;
        // The mods of a fork keep the seed with which the recorded run started.
        let sampling = fork.and_then(|fork| fork.sampling.first()).map_or(&request.sampling, |(_, first)| first);
        RunView {
            run_id: id,
            owner: request.owner.clone(),
            request_id: request_id.to_owned(),
            model: model.name().to_owned(),
            vocabulary: Arc::clone(model.vocabulary()),
            conversation: request.conversation.clone(),
            tools: request.tools.clone(),
            images: PromptImage::from_records(&request.describe_images(&request.prompt), &request.prompt),
            answer_format: request.answer_format.clone().unwrap_or_else(|| {
                Arc::new(AnswerFormat::plain(model.card().chat_template.as_deref().unwrap_or_default()))
            }),
            parameters: record_parameters(request, fork, model),
            stop_tokens: request.limits.stop_tokens.clone(),
            seed: sampling.seed,
            grammars: Arc::clone(model.grammars()),
            hidden_layers: capabilities.hidden_layers,
        }
    }

    /// Sends the start of a run to the recorder, and the run to the decode thread.
    fn send(
        &self,
        run: Box<Run>,
        place: QueuePlace<'_>,
        request_id: &str,
        client: mpsc::Sender<Output>,
        start: Signal,
        recorder: Option<&mpsc::Sender<Signal>>,
    ) -> Result<(), SubmitError> {
        let Inner { commands, unstored, .. } = &*self.inner;
        let id = run.id();
        let unstored = unstored.as_ref().filter(|_| recorder.is_some());
        if let Some(unstored) = unstored {
            unstored.insert(id, request_id.to_owned(), run.request().owner.clone(), run.ended_flag());
        }
        // Sent here because the decode thread may be busy; the decode thread sends it only if the recorder's channel is
        // full.
        let unsent_start = recorder.and_then(|recorder| match recorder.try_send(start) {
            Err(TrySendError::Full(start)) => Some(start),
            Ok(()) | Err(TrySendError::Closed(_)) => None,
        });
        if commands.send(Command::Submit(run, client, unsent_start)).is_err() {
            unstored.inspect(|unstored| unstored.remove(id));
            return Err(SubmitError::Stopped);
        }
        place.hand_over();
        Ok(())
    }
}

/// Returns the start of the run, for the recorder.
fn run_start(
    request: &Request,
    view: &RunView,
    mods: &[ActiveMod],
    fork: Option<&ForkPoint>,
    event_buffer: &EventBuffer,
) -> RunStart {
    RunStart {
        run_id: view.run_id,
        request_id: view.request_id.clone(),
        created_at: event_buffer.now(),
        surface: request.surface,
        model: view.model.clone(),
        owner: request.owner.clone(),
        user_label: request.user_label.clone(),
        metadata: request.metadata.clone(),
        max_tokens: Some(request.limits.max_tokens as i32),
        temperature: Some(shortest_f64(request.sampling.temperature)),
        seed: Some(request.sampling.seed),
        mods: mods.iter().map(|active| active.name.clone()).collect(),
        prompt_preview: request.prompt_preview.clone(),
        parent: fork.map(|fork| fork.parent.clone()),
        images: request.image_files.clone(),
    }
}

/// Gives the run of a fork the state of the recorded run, on a blocking thread.
async fn restore(mut run: Box<Run>, fork: Box<ForkPoint>) -> Result<Box<Run>, SubmitError> {
    let restore = move || match run.restore(&fork) {
        Ok(()) => Ok(run),
        Err(error) => {
            run.discard();
            Err(error)
        }
    };
    tokio::task::spawn_blocking(restore).await.map_err(|_| SubmitError::Stopped)?
}

/// Returns the capacity of the output channel of a run. `row_bytes` is the size of an attention row.
fn output_capacity(report: ReportOptions, row_bytes: usize) -> usize {
    if !report.attention_rows {
        return MAX_QUEUED_OUTPUTS;
    }
    let max_bytes = MAX_QUEUED_BYTES / (1 + report.siblings as usize);
    (max_bytes / row_bytes.max(1)).clamp(2, MAX_QUEUED_OUTPUTS)
}

/// Reserves the client's request id. Reserves the run's id if the client sent none, or if another run has the client's
/// id and the request permits a new one.
fn reserve_request_id(request: &mut Request, run: RunId) -> Result<(String, ActiveRequestId), SubmitError> {
    let reserve = |id: String| match ActiveRequestId::reserve(&id) {
        Some(active) => Ok((id, active)),
        None => Err(SubmitError::RequestIdInUse { request_id: id }),
    };
    match request.request_id.take().map(reserve) {
        Some(Err(_)) if request.may_drop_request_id => reserve(run.to_string()),
        Some(reserved) => reserved,
        None => reserve(run.to_string()),
    }
}

/// Creates the sampler. A sampler with DRY is created on a blocking thread, since it searches the whole vocabulary for
/// its sequence breakers.
async fn create_sampler(sampling: &SamplingParams, vocabulary: &Arc<Vocabulary>) -> Result<Sampler, SubmitError> {
    if sampling.dry_multiplier == 0.0 {
        return Ok(Sampler::new(sampling, vocabulary));
    }
    let (sampling, vocabulary) = (sampling.clone(), Arc::clone(vocabulary));
    let create = move || Sampler::new(&sampling, &vocabulary);
    tokio::task::spawn_blocking(create).await.map_err(|_| SubmitError::Stopped)
}

/// Starts the run's mods on a blocking thread, since a mod may have to start a process. The mods of a fork receive the
/// recorded events.
async fn start_mods(
    request: &Request,
    view: &Arc<RunView>,
    fork: Option<&ForkPoint>,
    status: &Arc<EngineStatus>,
    limits: ReplayLimits,
) -> Result<Vec<ActiveMod>, SubmitError> {
    if request.mods.is_empty() {
        return Ok(Vec::new());
    }
    let (selected, view, fork) = (request.mods.clone(), Arc::clone(view), fork.cloned());
    let status = Arc::clone(status);
    let start = move || {
        let start_one = |selected: SelectedMod| start_mod(selected, &view, &status);
        let mut mods = selected.into_iter().map(start_one).collect::<Result<Vec<_>, _>>()?;
        if let Some(fork) = fork
            && let Err(error) = replay_mods(&fork, &mut mods, &view, limits)
        {
            mods.iter_mut().for_each(|active| active.instance.finished());
            return Err(error);
        }
        Ok(mods)
    };
    tokio::task::spawn_blocking(start).await.map_err(|_| SubmitError::Stopped)?
}

fn start_mod(selected: SelectedMod, view: &Arc<RunView>, status: &EngineStatus) -> Result<ActiveMod, SubmitError> {
    let name = selected.mod_ref.name;
    let described = selected.factory.describe();
    match selected.factory.start(&selected.mod_ref.config, view) {
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
}

/// Compiles the request's constraint on a blocking thread.
async fn compile_constraint(request: &Request, model: &Arc<Model>) -> Result<Option<GrammarMatcher>, SubmitError> {
    let Some(constraint) = request.constraint.clone() else { return Ok(None) };
    let grammars = Arc::clone(model.grammars());
    let compile = move || {
        let matcher = grammars.start_matcher(&constraint);
        matcher.map_err(|error| {
            let (field, error) = constraint.locate_error(error);
            SubmitError::Constraint { field: field.to_owned(), error }
        })
    };
    tokio::task::spawn_blocking(compile).await.map_err(|_| SubmitError::Stopped)?.map(Some)
}

#[cfg(test)]
mod tests {
    use super::{MAX_QUEUED_OUTPUTS, ReportOptions, output_capacity};

    #[test]
    fn runs_of_a_request_share_the_bytes_of_queued_attention() {
        let capacity = |attention_rows, siblings| {
            output_capacity(ReportOptions { attention_rows, siblings, ..ReportOptions::default() }, 1 << 20)
        };
        assert_eq!((capacity(true, 0), capacity(true, 3), capacity(true, 63)), (64, 16, 2));
        assert_eq!(capacity(false, 63), MAX_QUEUED_OUTPUTS);
    }
}
