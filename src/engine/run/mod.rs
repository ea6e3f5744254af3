//! One run as a state machine: all processing between two decodes. The run returns the tokens to decode to the
//! scheduler, which passes it the logits.
//!
//! A run connects its parts, which own their fields: [`sequence`] has the tokens and their positions, [`step_logits`]
//! the logits of the step, [`sampling`] the sampler and the grammar constraint, [`measure`] the measurements of tokens,
//! [`reasoning`] the reasoning budget, [`answer`] and [`outbox`] the text and the outputs for the client, [`dispatch`]
//! the mods, [`token_attention`] the attention rows, and [`timing`] the times. The transitions of the state machine are
//! in [`steps`], [`actions`] and [`finish`]; [`schedule`] has the methods for the scheduler, and [`restore`] those for
//! forks.

mod actions;
mod answer;
pub mod dispatch;
mod finish;
mod measure;
mod outbox;
mod output_text;
mod reasoning;
pub mod registration;
pub mod replay;
pub mod request_ids;
mod restore;
mod sampling;
pub mod schedule;
pub mod sequence;
mod step_logits;
mod steps;
mod timing;
mod token_attention;

use super::output::{Output, PromptTiming, RunMetrics};
use super::recording::event_buffer::EventBuffer;
use super::request::Request;
use crate::events::{
    Alternative, DraftUsage, EndCause, EventType, Fault, Measurements, PromptRecord, RunEnd, RunId, TokenId,
    TokenMeasurement,
};
use crate::model::distribution::TokenDistribution;
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{Candidates, Sampler};
use crate::mods::{Action, Call, CallEvent, Reply, ReplySender, RunView};
use answer::PendingAnswer;
use dispatch::{ActiveMod, Dispatch, DispatchedEvent};
use measure::TokenMeasurer;
use outbox::Outbox;
use reasoning::ReasoningTracker;
use registration::Registration;
use sampling::TokenSampler;
use sequence::Sequence;
use std::sync::Arc;
use std::time::Instant;
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
    /// The tokens that the KV cache does not hold must be decoded, with logits from position `outputs_from` on.
    Decode { outputs_from: usize },
    /// An event is dispatched to the mods.
    Dispatching(DispatchedEvent),
    /// The reply of the mod with this index is awaited.
    AwaitingReply(DispatchedEvent, usize),
    /// The run has ended.
    Ended,
}

/// Tokens that a mod or the reasoning budget appends. They are measured in one decode.
struct ForcedTokens {
    /// Position of the first token.
    start: usize,
    step: u32,
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
    /// Maximum tokens in the answer; a mod may change it.
    max_tokens: usize,
    /// Maximum steps; higher if a mod has raised the maximum of tokens.
    max_steps: u32,
    step: u32,
    /// Maximum tokens that the answer has had, and the first step with that many.
    longest: (usize, u32),
    added: AddedTokens,
    /// Forced tokens that are being decoded.
    forced: Option<ForcedTokens>,
    /// Probabilities of the prompt's tokens, collected while the prompt is decoded.
    prompt_probabilities: Vec<(TokenMeasurement, Vec<Alternative>)>,
    /// Counts of drafts and drafted tokens.
    drafts: DraftUsage,
    /// Note to record with the next step.
    note: Option<String>,
    /// True if the model returned logits that were NaN or infinite.
    invalid_logits: bool,
    /// Origin of an error of the run; `None` for the engine.
    fault: Option<Fault>,
    /// Cause of an abort.
    cause: Option<EndCause>,
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
            max_tokens: request.limits.max_tokens as usize,
            max_steps: request.limits.max_steps,
            step: 0,
            longest: (0, 0),
            added: AddedTokens::default(),
            forced: None,
            prompt_probabilities: Vec::new(),
            drafts: DraftUsage::default(),
            note: None,
            invalid_logits: false,
            fault: None,
            cause: None,
            end: None,
            request,
            view,
        }
    }

    /// Returns the number of prompt tokens that were decoded, without the cached ones.
    fn prompt_decoded(&self) -> usize {
        self.sequence.prompt_decoded(self.has_decoded_prompt())
    }

    /// Records the first event and dispatches it to the mods, or continues a recorded run.
    pub fn begin(&mut self, resources: &mut RunResources) {
        if let Some(tokens) = self.fork_tokens.take() {
            return self.begin_fork(tokens);
        }
        let order = self.record_prompt();
        self.state = RunState::Dispatching(DispatchedEvent::new(EventType::Prefilled, order, 0));
        self.dispatch_events(None, resources);
    }

    /// Records the `Prefilled` event and returns its number.
    fn record_prompt(&mut self) -> i32 {
        let Self { event_buffer, sequence, view, request, max_tokens, .. } = self;
        event_buffer.event(EventType::Prefilled, 0, |event| {
            event.prompt_length = Some(sequence.prompt_len() as i32);
            event.tokens_so_far_len = Some(0);
            event.max_steps = Some(*max_tokens as i32);
            event.measured = Some(Box::new(Measurements {
                position: Some(0),
                evicted: sequence.take_unreported_eviction(),
                prompt: Some(Box::new(PromptRecord {
                    texts: view.vocabulary.storable_texts(sequence.tokens()),
                    tokens: sequence.tokens().to_vec(),
                    spans: sequence.spans().to_vec(),
                    images: request.describe_images(sequence.tokens()),
                    conversation: request.conversation.clone(),
                    tools: request.tools.clone(),
                    parameters: Some(view.parameters.clone()),
                })),
                ..Measurements::default()
            }));
        })
    }

    /// Processes the logits after `position`. Those after the last position begin a step; those after an earlier
    /// position give the probability of the next token, which is forced or part of the prompt.
    pub fn on_logits(&mut self, position: usize, logits: &[f32], resources: &mut RunResources) {
        if self.end.is_some() {
            return;
        }
        let distribution = TokenDistribution::new(logits);
        if !distribution.is_valid {
            // The KV state that gave such logits must not be reused.
            self.sequence.set_kv_len(0);
            self.invalid_logits = true;
            let message = "the model returned logits that are NaN or infinite: its KV state or its weights are damaged; the slot's state is discarded";
            return self.abort(EndCause::InvalidLogits, message);
        }
        if let Some(&next) = self.sequence.tokens().get(position + 1) {
            let measured = self.measurer.measure(distribution, logits, next);
            if position + 1 < self.sequence.prompt_len() {
                let top = self.measurer.top(logits, distribution);
                self.prompt_probabilities.push((measured, top));
            } else if let Some(forced) = &mut self.forced {
                forced.measurements.push(measured);
                self.attention.push_drawn();
            }
            return;
        }
        if let Some(elapsed_us) = self.timing.mark_prompt_end() {
            // `set` cannot fail: the prompt ends only once.
            let _ = self.metrics.prompt.set(PromptTiming {
                tokens: self.sequence.prompt_len() as u32,
                cached: self.sequence.cached_tokens() as u32,
                elapsed_us,
                at: Instant::now(),
            });
            if self.request.report.prompt_probabilities {
                self.outbox.push(Output::Prompt(std::mem::take(&mut self.prompt_probabilities)));
            }
        }
        let top = self.measurer.top(logits, distribution);
        self.step_logits.set_logits(logits, distribution, top);
        if let Some(forced) = self.forced.take() {
            // The next step starts with these logits, after the `Added` event of the forced tokens.
            self.step_logits.save(Some(logits));
            self.record_forced(forced);
        } else {
            self.begin_step();
        }
        self.dispatch_events(Some(logits), resources);
    }

    /// Processes the reply to a mod call, if the run still waits for it.
    pub fn on_reply(&mut self, call: u64, reply: Reply, resources: &mut RunResources) {
        if !matches!(self.state, RunState::AwaitingReply(..)) || !self.dispatch.is_last_call(call) {
            return;
        }
        if let RunState::AwaitingReply(event, index) = std::mem::replace(&mut self.state, RunState::Ended) {
            self.state = RunState::Dispatching(event);
            self.apply_reply(index, reply);
            self.dispatch_events(None, resources);
        }
    }

    /// Dispatches events until the run needs a decode, waits for a mod, or has ended. `new_logits` are the model's
    /// logits at the end of the sequence; `None` if they are saved.
    fn dispatch_events(&mut self, mut new_logits: Option<&[f32]>, resources: &mut RunResources) {
        loop {
            let RunState::Dispatching(dispatched) = &mut self.state else { return };
            if let Some(index) = self.dispatch.next_mod(dispatched) {
                if !self.call_mod(index, new_logits, resources) {
                    return;
                }
                continue;
            }
            let (event, winner) = (dispatched.event, dispatched.take_winner());
            match winner {
                Some(action) => {
                    self.step_logits.save(new_logits);
                    self.apply_action(event, action);
                }
                None => self.advance(event, new_logits, &mut resources.candidates),
            }
            // `Added` changes the end of the sequence, and the logits are not needed after `Sampled`.
            if event != EventType::ForwardPass {
                new_logits = None;
            }
        }
    }

    /// Calls a mod with the current event. Returns `false` if the reply comes later.
    fn call_mod(&mut self, index: usize, new_logits: Option<&[f32]>, resources: &RunResources) -> bool {
        let RunState::Dispatching(mut dispatched) = std::mem::replace(&mut self.state, RunState::Ended) else {
            return false;
        };
        let tokens = self.sequence.tokens();
        let event = match dispatched.event {
            EventType::Prefilled => CallEvent::Prefilled,
            EventType::ForwardPass => CallEvent::ForwardPass {
                logits: self.step_logits.logits(new_logits),
                hidden_states: self.step_logits.hidden_states(),
            },
            EventType::Sampled => {
                let drawn = self.step_logits.drawn();
                CallEvent::Sampled {
                    token: drawn.map_or(0, |drawn| drawn.token),
                    text: drawn.map_or("", |drawn| drawn.text.as_str()),
                    logprob: drawn.and_then(|drawn| drawn.logprob).unwrap_or(0.0),
                }
            }
            EventType::Added => {
                let AddedTokens { count, forced, logprobs } = &self.added;
                CallEvent::Added { tokens: &tokens[tokens.len() - count..], logprobs, forced: *forced }
            }
        };
        let call = Call {
            run: &self.view,
            step: dispatched.step,
            sequence: tokens,
            prompt_len: self.sequence.prompt_len(),
            evicted: self.sequence.evicted_generated(),
            max_steps: self.max_tokens as u32,
            event,
        };
        let id = self.id;
        let reply = self.dispatch.call(&mut dispatched, index, &call, |number| (resources.reply_sender)(id, number));
        if reply.as_ref().is_none_or(|reply| matches!(reply.action, Some(Action::AdjustedLogits { .. }))) {
            self.step_logits.save(new_logits);
        }
        if let Some(reply) = reply {
            self.state = RunState::Dispatching(dispatched);
            self.apply_reply(index, reply);
            true
        } else {
            self.state = RunState::AwaitingReply(dispatched, index);
            false
        }
    }
}
