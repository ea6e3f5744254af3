//! One run as a state machine: all processing between two decodes. The run returns the tokens to decode to the
//! scheduler, which passes it the logits.
//!
//! A run connects its parts, which own their fields: [`sequence`] has the tokens and their positions, [`step_logits`]
//! the logits of the step, [`sampling`] the sampler and the grammar constraint, [`measure`] the measurements of tokens,
//! [`reasoning`] the reasoning budget, [`answer`] and [`outbox`] the text and the outputs for the client, [`dispatch`]
//! the mods, [`token_attention`] the attention rows, [`budget`] the limits of tokens and steps, and [`timing`] the times.
//! [`state_machine`] has the transitions, with [`steps`], [`mod_calls`], [`actions`] and [`finish`]. The scheduler uses
//! [`slot_state`], [`next_decode`], [`parameter_change`] and [`record`]; [`restore`] starts forks.

mod actions;
mod answer;
mod budget;
pub mod dispatch;
mod evictions;
mod finish;
mod measure;
mod mod_calls;
pub mod mod_health;
mod next_decode;
mod outbox;
mod output_text;
pub mod parameter_change;
mod reasoning;
mod record;
pub mod registration;
pub mod replay;
pub mod request_ids;
mod restore;
mod sampling;
pub mod sequence;
mod slot_state;
mod state_machine;
mod step_logits;
mod steps;
mod timing;
mod token_attention;

use super::output::{MeasuredToken, RunMetrics};
use super::recording::event_buffer::EventBuffer;
use super::request::Request;
use crate::events::{DraftUsage, RunEnd, RunId, TokenId, TokenMeasurement};
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{Candidates, Sampler};
use crate::mods::{ModInstance, ReplySender, RunView};
use answer::PendingAnswer;
use budget::StepBudget;
use dispatch::{ActiveMod, Dispatch, DispatchedEvent};
use measure::TokenMeasurer;
use outbox::Outbox;
use reasoning::ReasoningTracker;
use registration::Registration;
use sampling::TokenSampler;
use sequence::Sequence;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use step_logits::StepLogits;
use timing::Timing;
use token_attention::TokenAttention;

/// Resources of the decode thread that its runs share.
pub struct RunResources {
    /// Buffer of the sampler.
    candidates: Candidates,
    reply_sender: Box<dyn Fn(RunId, u64) -> ReplySender>,
}

impl RunResources {
    /// Creates the resources. `reply_sender` creates the sender for the reply to a mod call, from the run's id and the
    /// number of the call.
    pub fn new(reply_sender: impl Fn(RunId, u64) -> ReplySender + 'static) -> Self {
        Self { candidates: Candidates::default(), reply_sender: Box::new(reply_sender) }
    }
}

/// State of a run.
#[derive(Debug)]
enum RunState {
    /// Not started.
    New,
    /// The tokens that the KV cache does not hold must be decoded, with logits from position `logits_from` on.
    Decode { logits_from: usize },
    /// An event is dispatched to the mods; the reply of a mod may be awaited.
    Dispatching(DispatchedEvent),
    /// The run has ended.
    Ended,
}

/// Tokens that a mod or the reasoning budget appends. They are measured in one decode.
struct ForcedTokens {
    /// Position of the first token.
    start: usize,
    step: u32,
    /// Note to record with the tokens.
    note: Option<String>,
    /// Measurements of the first tokens; the rest is not measured yet.
    measurements: Vec<TokenMeasurement>,
}

/// Tokens appended by the last `Added` event.
#[derive(Default)]
struct AddedTokens {
    count: usize,
    forced: bool,
    /// Log-probabilities; filled only for runs with mods.
    logprobs: Vec<Option<f32>>,
}

/// Parts of a new run.
pub struct RunParts {
    /// Mods, in the order in which they are called.
    pub mods: Vec<ActiveMod>,
    /// Buffer of the run's events.
    pub event_buffer: EventBuffer,
    /// Sampler of the request.
    pub sampler: Sampler,
    /// Matcher of the grammar constraint.
    pub constraint: Option<GrammarMatcher>,
    /// Registration until the run ends.
    pub registration: Registration,
}

/// A generation: one recorded run.
pub struct Run {
    id: RunId,
    request: Request,
    view: Arc<RunView>,
    measurer: TokenMeasurer,
    state: RunState,
    sequence: Sequence,
    step_logits: StepLogits,
    sampler: TokenSampler,
    /// `None` without a reasoning budget.
    reasoning: Option<ReasoningTracker>,
    dispatch: Dispatch,
    answer: PendingAnswer,
    outbox: Outbox,
    attention: TokenAttention,
    event_buffer: EventBuffer,
    timing: Timing,
    /// Metrics that the API reads before the run ends.
    metrics: Arc<RunMetrics>,
    registration: Registration,
    /// Tokens to append before the first step of a fork; `None` for a run that is no fork or has started.
    fork_tokens: Option<Vec<TokenId>>,
    budget: StepBudget,
    added: AddedTokens,
    /// Forced tokens that are being decoded.
    forced: Option<ForcedTokens>,
    /// Probabilities of the prompt's tokens, collected while the prompt is decoded.
    prompt_probabilities: Vec<MeasuredToken>,
    /// Counts of drafts and drafted tokens.
    drafts: DraftUsage,
    /// Note to record with the next step.
    note: Option<String>,
    /// Number of changes of the parameters by the client.
    parameter_changes: u32,
    end: Option<Arc<RunEnd>>,
}

impl Run {
    /// Creates a run that has not started. `context` is the context size of its slot, in tokens.
    pub fn new(id: RunId, mut request: Request, view: Arc<RunView>, parts: RunParts, context: usize) -> Self {
        let RunParts { mods, event_buffer, sampler, constraint, registration } = parts;
        Self {
            id,
            measurer: TokenMeasurer::new(Arc::clone(&view.vocabulary), request.alternatives),
            state: RunState::New,
            sequence: Sequence::new(&mut request, Arc::clone(&view.vocabulary), context),
            step_logits: StepLogits::default(),
            sampler: TokenSampler::new(sampler, constraint),
            reasoning: request.reasoning_budget.clone().map(ReasoningTracker::new),
            dispatch: Dispatch::new(mods),
            answer: PendingAnswer::new(&request.limits, request.report),
            outbox: Outbox::default(),
            attention: TokenAttention::new(&request),
            timing: Timing::new(event_buffer.started()),
            event_buffer,
            metrics: Arc::default(),
            registration,
            fork_tokens: None,
            budget: StepBudget::new(&request.limits, context),
            added: AddedTokens::default(),
            forced: None,
            prompt_probabilities: Vec::new(),
            drafts: DraftUsage::default(),
            note: None,
            parameter_changes: 0,
            end: None,
            request,
            view,
        }
    }

    /// Returns the id.
    pub fn id(&self) -> RunId {
        self.id
    }

    /// Returns the request. Its prompt and spans were moved to [`Run::sequence`].
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Returns the sequence.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Returns the sequence, for updates of its KV state.
    pub fn sequence_mut(&mut self) -> &mut Sequence {
        &mut self.sequence
    }

    /// Returns the outputs for the client.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// Returns true if the outbox has outputs.
    pub fn has_outputs(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Returns the flag that is set before the client receives the end of the run.
    pub fn ended_flag(&self) -> Arc<AtomicBool> {
        self.outbox.ended_flag()
    }

    /// Returns the metrics that are known before the run ends.
    pub fn metrics(&self) -> &Arc<RunMetrics> {
        &self.metrics
    }

    /// Returns the end of the run, once it has ended.
    pub fn end(&self) -> Option<&Arc<RunEnd>> {
        self.end.as_ref()
    }

    /// Returns true after the prompt was decoded.
    pub fn has_decoded_prompt(&self) -> bool {
        self.timing.prompt_us().is_some()
    }

    /// Returns true if the run is a fork that has not started.
    pub fn is_fork(&self) -> bool {
        self.fork_tokens.is_some()
    }

    /// Returns the mod whose reply the run waits for.
    pub fn awaited_mod(&mut self) -> Option<&mut dyn ModInstance> {
        let RunState::Dispatching(dispatched) = &self.state else { return None };
        self.dispatch.awaited_mod(dispatched)
    }

    /// Returns the number of prompt tokens that were decoded, without the cached ones.
    fn prompt_decoded(&self) -> usize {
        self.sequence.prompt_decoded(self.has_decoded_prompt())
    }
}
