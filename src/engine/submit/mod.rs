//! Submission of requests: creates a run from a request, and sends it to the decode thread.

mod images;
mod parts;
pub mod recorded_parameters;
mod validate;

use super::control::Generation;
use super::error::SubmitError;
use super::fork::ForkPoint;
use super::output::Output;
use super::recording::durability;
use super::recording::event_buffer::EventBuffer;
use super::request::{RecordPolicy, ReportOptions, Request};
use super::run::dispatch::ActiveMod;
use super::run::registration::{PanicGuard, Registration};
use super::run::request_ids::ActiveRequestId;
use super::run::{Run, RunParts};
use super::scheduler::command::Command;
use super::scheduler::queue_place::QueuePlace;
use super::{Engine, Inner};
use crate::events::{RunEnd, RunId, RunStart, Usage, shortest_f64};
use crate::model::Model;
use crate::model::chat::answer::AnswerFormat;
use crate::mods::{PromptImage, RunView};
use crate::recording::Signal;
use parts::PreparedParts;
use recorded_parameters::record_parameters;
use std::sync::Arc;
use tokio::sync::mpsc::{self, error::TrySendError};

/// Maximum outputs queued for a client that does not read. Its run is not decoded while the queue is full.
const MAX_QUEUED_OUTPUTS: usize = 256;

/// Maximum bytes of attention queued for a client that does not read, in all runs of its request.
const MAX_QUEUED_BYTES: usize = 64 << 20;

/// A run that was not sent to the decode thread yet.
struct NewRun {
    run: Box<Run>,
    /// Sender of its outputs.
    client: mpsc::Sender<Output>,
    /// Signal that the run has started.
    start: Signal,
    /// `None` if the run is not recorded.
    recorder: Option<mpsc::Sender<Signal>>,
}

impl Engine {
    /// Submits a request to the decode thread. Returns the outputs of its run, and a handle that controls the run.
    ///
    /// # Errors
    /// [`SubmitError`]; no run is created.
    pub async fn submit(&self, mut request: Request) -> Result<Generation, SubmitError> {
        let Inner { model, queue_places, .. } = &*self.inner;
        self.validate(&mut request)?;
        let place = QueuePlace::reserve(queue_places)?;
        self.encode_images(&request.images).await?;
        let fork = complete_request(&mut request, model);
        let id = RunId::now();
        // Before mods start, so that a request whose id is in use has no effect.
        let (request_id, active_id) = reserve_request_id(&mut request, id)?;
        let view = Arc::new(self.run_view(&request, fork.as_deref(), id, &request_id));
        let parts = self.prepare_parts(&request, &view, fork.as_deref()).await?;
        let (new_run, output) = self.create_run(request, view, parts, active_id, fork).await?;
        let metrics = Arc::clone(new_run.run.metrics());
        self.send(new_run, place, &request_id)?;
        Ok(Generation { run_id: id, request_id, metrics, output, control: self.control(id) })
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

    /// Creates the run and the channels to its client and to the recorder. Returns the outputs for the client, too.
    async fn create_run(
        &self,
        request: Request,
        view: Arc<RunView>,
        parts: PreparedParts,
        active_id: ActiveRequestId,
        fork: Option<Box<ForkPoint>>,
    ) -> Result<(NewRun, mpsc::Receiver<Output>), SubmitError> {
        let Inner { options, durability_acks, recorder, run_counter, .. } = &*self.inner;
        let PreparedParts { constraint, mods, sampler } = parts;
        let id = view.run_id;
        let event_buffer = EventBuffer::new(request.record != RecordPolicy::Off, options.clock);
        let start = Signal::Started(Arc::new(run_start(&request, &view, &mods, fork.as_deref(), &event_buffer)));
        let capacity = output_capacity(request.report, self.attention_row_bytes());
        // One place is reserved for the end of the run.
        let (client, mut output) = mpsc::channel(capacity + 1);
        if let Some(acks) = durability_acks
            && request.record == RecordPolicy::Required
        {
            output = durability::hold_end(output, acks.request(id), self.control(id));
        }
        let recorder = recorder.upgrade().filter(|_| event_buffer.is_recorded());
        let usage = Usage { prompt_tokens: request.prompt.len() as u32, ..Usage::default() };
        let unfinished = RunEnd::empty(event_buffer.now(), usage);
        let panic_guard = PanicGuard::new(id, client.clone(), recorder.clone(), unfinished);
        let registration = Registration::new(active_id, panic_guard, Arc::clone(run_counter));
        let parts = RunParts { mods, event_buffer, sampler, constraint, registration };
        let mut run = Box::new(Run::new(id, request, view, parts, options.ctx_size as usize));
        if let Some(fork) = fork {
            run = restore(run, fork).await?;
        }
        Ok((NewRun { run, client, start, recorder }, output))
    }

    /// Returns the maximum bytes of an attention row.
    fn attention_row_bytes(&self) -> usize {
        let Inner { model, options, .. } = &*self.inner;
        let (layers, heads) = (model.card().layers as usize, model.card().heads as usize);
        size_of::<f32>() * layers * heads * options.ctx_size as usize
    }

    /// Sends the start of a run to the recorder, and the run to the decode thread.
    fn send(&self, new_run: NewRun, place: QueuePlace, request_id: &str) -> Result<(), SubmitError> {
        let NewRun { run, client, start, recorder } = new_run;
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
        if commands.send(Command::Submit { run, client, unsent_start, place }).is_err() {
            unstored.inspect(|unstored| unstored.remove(id));
            return Err(SubmitError::Stopped);
        }
        Ok(())
    }
}

/// Completes the settings of a request that depend on the model. Returns the step from which its run continues.
fn complete_request(request: &mut Request, model: &Model) -> Option<Box<ForkPoint>> {
    let mut fork = request.fork.take();
    request.limits.ban_end_tokens(&mut request.sampling, model.vocabulary());
    for (_, sampling) in fork.iter_mut().flat_map(|fork| &mut fork.sampling) {
        request.limits.ban_end_tokens(sampling, model.vocabulary());
    }
    request.adapters.get_or_insert_with(|| model.adapters().default_set());
    fork
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
