//! One run as a state machine: everything that happens between two decodes. It never touches the model. The scheduler
//! asks which tokens to decode and passes the logits in.

mod actions;
pub mod dispatch;
mod distribution;
pub mod finish;
mod output_text;
pub mod overflow;
mod reasoning;
pub mod request_ids;
mod steps;
pub mod token_attention;

use crate::engine::kv::checkpoints::CheckpointPlan;
use crate::engine::kv::conversation::SlotHistory;
use crate::engine::kv::removal::KvRemoval;
use crate::engine::output::{Output, PromptProgress, PromptTiming, RunMetrics};
use crate::engine::recording::durability::PanicGuard;
use crate::engine::recording::event_buffer::EventBuffer;
use crate::engine::request::Request;
use crate::engine::run::dispatch::{ActiveMod, Dispatch};
use crate::engine::run::distribution::TokenDistribution;
use crate::engine::run::output_text::OutputText;
use crate::engine::run::overflow::Evictions;
use crate::engine::run::reasoning::ReasoningTracker;
use crate::engine::run::request_ids::ActiveRequestId;
use crate::engine::run::token_attention::TokenAttention;
use crate::engine::status::{SlotProgress, SlotRun};
use crate::events::{
    Alternative, EventType, Fault, FinishReason, Measurements, PromptRecord, RunEnd, RunId, TokenId, TokenMeasurement,
};
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{AttentionRow, Candidates, CheckpointPurpose, Sampler};
use crate::mods::{Action, Call, CallEvent, ModInstance, Reply, ReplySender, RunView};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Creates the sender for the reply to one call, from the run's id and the number of the call.
pub type ReplySenderFactory<'a> = dyn Fn(RunId, u64) -> ReplySender + 'a;

/// State of a run.
#[derive(Debug)]
pub enum RunState {
    /// Not started.
    New,
    /// Tokens from [`Run::kv_len`] on must be decoded, with logits from `outputs_from` on.
    Decode { outputs_from: usize },
    /// An event is dispatched to the mods.
    Dispatching(Dispatch),
    /// The reply of a mod is awaited.
    AwaitingReply(Dispatch, usize),
    /// The run has ended.
    Ended,
}

/// A generation: one recorded run.
pub struct Run {
    pub id: RunId,
    pub request: Request,
    pub view: Arc<RunView>,
    pub mods: Vec<ActiveMod>,
    pub event_buffer: EventBuffer,
    pub state: RunState,
    /// Tokens of the prompt, then generated tokens.
    pub sequence: Vec<TokenId>,
    pub prompt_len: usize,
    /// Number of tokens of the sequence that the KV cache holds and that are still valid.
    pub kv_len: usize,
    /// Positions at which the state is saved.
    pub checkpoints: CheckpointPlan,
    /// Prompt tokens whose KV state was reused.
    pub cached_tokens: usize,
    /// Attention of the decode that produced the current logits.
    pub attention: Option<Arc<AttentionRow>>,
    /// Attention to record, with the number of its event.
    pub attention_ready: Option<(i32, Arc<AttentionRow>)>,
    /// Attention rows for the client.
    pub token_attention: TokenAttention,
    /// Number of the last call to a mod. A late reply to an earlier call is recognised by it and ignored.
    pub pending_call: u64,
    pub outbox: VecDeque<Output>,
    /// Removals from the sequence that the KV cache has not applied yet.
    pub kv_removals: Vec<KvRemoval>,
    /// History of the conversation, for later requests.
    pub history: SlotHistory,
    /// Tokens and messages that were evicted because the context was full.
    pub evictions: Evictions,
    /// Prompt tokens at the start of the run.
    pub prompt_tokens: usize,
    /// True if the logits were not numbers.
    pub poisoned: bool,
    /// Party at fault for the end of the run; `None` for the engine.
    pub fault: Option<Fault>,
    pub end: Option<Arc<RunEnd>>,
    /// Metrics that the API reads before the run ends.
    pub metrics: Arc<RunMetrics>,
    /// Reports the end of the run if the decode thread panics.
    pub panic_guard: Option<PanicGuard>,
    /// Set before the client receives the end of the run.
    pub has_ended: Arc<AtomicBool>,
    pub context: usize,
    pub max_tokens: usize,
    pub step: u32,
    pub output_text: OutputText,
    pub unsent: VecDeque<(TokenMeasurement, Vec<Alternative>)>,
    pub sampler: Sampler,
    /// Matcher of the grammar constraint.
    pub constraint: Option<GrammarMatcher>,
    /// Tracks reasoning tokens; `None` without a budget.
    pub thinking: Option<ReasoningTracker>,
    /// Copy of the model's logits at the end of the sequence. Made only if the run waits for a mod or a mod changes
    /// something.
    pub saved_logits: Vec<f32>,
    /// Logits after the edits of mods.
    pub edited_logits: Option<Vec<f32>>,
    /// Distribution of the edited logits, if it was computed.
    pub edited_distribution: Option<TokenDistribution>,
    /// True if `saved_logits` belongs to the end of the sequence.
    pub saved_logits_valid: bool,
    pub draw_temperature: Option<f32>,
    pub distribution: Option<TokenDistribution>,
    pub top: Vec<Alternative>,
    pub drawn: Option<TokenMeasurement>,
    /// Number of tokens appended by the last `Added` event, and whether they were forced.
    pub last_added: (usize, bool),
    /// Log-probabilities of these tokens; filled only for runs with mods.
    pub last_added_logprobs: Vec<Option<f32>>,
    /// Forced tokens that are being decoded: their first position, and the measurements made so far.
    pub forced: Option<(usize, Vec<TokenMeasurement>)>,
    /// Step of the forced tokens.
    pub forced_step: u32,
    /// Probabilities of the prompt's tokens, collected while the prompt is decoded.
    pub prompt_measures: Vec<(TokenMeasurement, Vec<Alternative>)>,
    /// Time at which the run got its slot, in microseconds since its creation.
    pub slot_us: u64,
    pub prompt_us: Option<u64>,
    pub first_token_us: Option<u64>,
    /// Total time for which the run was paused.
    pub paused_time: Duration,
    /// Note to record with the next step.
    pub note: Option<String>,
    /// Reserves the request id until the run ends.
    pub active_id: Option<ActiveRequestId>,
    /// The engine counts its runs by the clones of this reference.
    pub run_counter: Option<Arc<()>>,
}

impl Run {
    /// Creates a run that has not started. `context` is the number of tokens that its slot holds.
    #[expect(clippy::too_many_arguments, reason = "the parts of a run, made in one place")]
    pub fn new(
        id: RunId,
        request: Request,
        view: Arc<RunView>,
        mods: Vec<ActiveMod>,
        event_buffer: EventBuffer,
        sampler: Sampler,
        constraint: Option<GrammarMatcher>,
        context: usize,
    ) -> Self {
        Self {
            id,
            sequence: request.prompt.clone(),
            prompt_len: request.prompt.len(),
            prompt_tokens: request.prompt.len(),
            kv_removals: Vec::new(),
            history: SlotHistory::default(),
            evictions: Evictions::default(),
            poisoned: false,
            fault: None,
            kv_len: 0,
            checkpoints: CheckpointPlan::default(),
            cached_tokens: 0,
            attention: None,
            attention_ready: None,
            token_attention: TokenAttention::new(request.report),
            pending_call: 0,
            outbox: VecDeque::new(),
            end: None,
            metrics: Arc::default(),
            panic_guard: None,
            has_ended: Arc::default(),
            context,
            max_tokens: request.limits.max_tokens as usize,
            step: 0,
            output_text: OutputText::new(&request.limits.stop).with_min_indent(request.limits.min_indent as usize),
            unsent: VecDeque::new(),
            sampler,
            constraint,
            thinking: request.thinking.clone().map(ReasoningTracker::new),
            saved_logits: Vec::new(),
            edited_logits: None,
            edited_distribution: None,
            saved_logits_valid: false,
            draw_temperature: None,
            distribution: None,
            top: Vec::new(),
            drawn: None,
            last_added: (0, false),
            last_added_logprobs: Vec::new(),
            forced: None,
            forced_step: 0,
            prompt_measures: Vec::new(),
            slot_us: 0,
            prompt_us: None,
            first_token_us: None,
            paused_time: Duration::ZERO,
            note: None,
            active_id: None,
            run_counter: None,
            state: RunState::New,
            request,
            view,
            mods,
            event_buffer,
        }
    }

    /// Records the first event and dispatches it to the mods. `done` creates the senders for replies that come later.
    pub fn begin(&mut self, done: &ReplySenderFactory<'_>) {
        let order = self.event_buffer.event(EventType::Prefilled, 0, |event| {
            event.prompt_length = Some(self.prompt_len as i32);
            event.tokens_so_far_len = Some(0);
            event.max_steps = Some(self.max_tokens as i32);
            event.measured = Some(Box::new(Measurements {
                position: Some(0),
                evicted: self.evictions.unreported.take(),
                prompt: Some(Box::new(PromptRecord {
                    texts: self.view.vocabulary.texts(&self.sequence),
                    tokens: self.sequence.clone(),
                    spans: self.request.spans.clone(),
                    conversation: self.request.conversation.clone(),
                    tools: self.request.tools.clone(),
                    parameters: Some(self.view.parameters.clone()),
                })),
                ..Measurements::default()
            }));
        });
        self.state = RunState::Dispatching(Dispatch::new(EventType::Prefilled, order, 0));
        self.drive(None, &mut Candidates::default(), done);
    }

    /// Processes the logits that follow `position`. The last position of the sequence begins a step; an earlier one
    /// belongs to a forced list and gives the probability of its next token.
    pub fn on_logits(
        &mut self,
        position: usize,
        logits: &[f32],
        candidates: &mut Candidates,
        done: &ReplySenderFactory<'_>,
    ) {
        if self.end.is_some() {
            return;
        }
        let distribution = TokenDistribution::new(logits);
        if !distribution.is_valid {
            // Sampling from such values is undefined, and the state that produced them must not be reused.
            self.kv_len = 0;
            self.poisoned = true;
            let message = "the model returned logits that are not numbers: its KV state or its weights are damaged; the slot's state is discarded";
            return self.abort(FinishReason::Error, message.into());
        }
        if let Some(&next) = self.sequence.get(position + 1) {
            let measure = self.measure(distribution, logits, next);
            if position + 1 < self.prompt_len {
                let top = self.alternatives(logits, distribution);
                self.prompt_measures.push((measure, top));
            } else if let Some((_, measures)) = &mut self.forced {
                measures.push(measure);
                self.token_attention.push_drawn(self.attention.take());
            }
            return;
        }
        if self.prompt_us.is_none() {
            let elapsed_us = self.elapsed_us().saturating_sub(self.slot_us);
            self.prompt_us = Some(elapsed_us);
            // A mod can backtrack into the prompt; only the first evaluation is reported.
            let _ = self.metrics.prompt.set(PromptTiming {
                tokens: self.prompt_len as u32,
                cached: self.cached_tokens as u32,
                elapsed_us,
                at: Instant::now(),
            });
            if self.request.report.prompt_probabilities {
                self.outbox.push_back(Output::Prompt(std::mem::take(&mut self.prompt_measures)));
            }
        }
        self.top = self.alternatives(logits, distribution);
        self.distribution = Some(distribution);
        self.saved_logits_valid = false;
        if let Some((start, measures)) = self.forced.take() {
            // The next step starts from these logits, after the mods have seen the forced list.
            self.save_logits(Some(logits));
            self.finish_forced(start, measures);
        } else {
            self.begin_step();
        }
        self.drive(Some(logits), candidates, done);
    }

    /// Returns the most probable tokens of a distribution.
    fn alternatives(&self, logits: &[f32], distribution: TokenDistribution) -> Vec<Alternative> {
        distribution::top(logits, self.request.alternatives)
            .into_iter()
            .map(|(token, logit)| self.alternative(token, distribution.prob(logit)))
            .collect()
    }

    /// Processes the reply that the run waits for.
    pub fn on_reply(&mut self, reply: Reply, candidates: &mut Candidates, done: &ReplySenderFactory<'_>) {
        if !matches!(self.state, RunState::AwaitingReply(..)) {
            return;
        }
        if let RunState::AwaitingReply(dispatch, index) = std::mem::replace(&mut self.state, RunState::Ended) {
            self.state = RunState::Dispatching(dispatch);
            self.apply_reply(index, reply);
            self.drive(None, candidates, done);
        }
    }

    /// Notes the slot that the run was given.
    pub fn assign_slot(&mut self, slot: u32) {
        self.slot_us = self.elapsed_us();
        // A run is assigned to a slot once.
        let _ = self.metrics.slot.set(slot);
    }

    /// Returns the number of prompt tokens that were decoded, without the cached ones.
    pub fn prompt_decoded(&self) -> usize {
        let known = if self.prompt_us.is_some() { self.prompt_tokens } else { self.kv_len.min(self.prompt_tokens) };
        known.saturating_sub(self.cached_tokens)
    }

    /// Reports the progress of the prompt, if the client asked for it.
    pub fn report_progress(&mut self) {
        if self.request.report.progress && self.prompt_us.is_none() && self.end.is_none() {
            self.outbox.push_back(Output::Progress(PromptProgress {
                total: self.prompt_len as u32,
                cached: self.cached_tokens as u32,
                processed: self.kv_len.min(self.prompt_len) as u32,
                elapsed_us: self.elapsed_us().saturating_sub(self.slot_us),
            }));
        }
    }

    /// Returns the maximum number of tokens for the next decode: all that are missing, or fewer if each of them needs a
    /// row of logits.
    pub fn max_decode_len(&self) -> usize {
        const MAX_LOGIT_ROWS: usize = 256;
        let missing = self.checkpoints.decode_limit(self.kv_len, self.sequence.len()) - self.kv_len;
        let rows = self.request.report.prompt_probabilities && self.prompt_us.is_none();
        if rows { missing.min(MAX_LOGIT_ROWS) } else { missing }
    }

    /// Plans the checkpoints of the state, for the prompt and for mods that remove tokens.
    pub fn plan_checkpoints(&mut self, outputs_from: usize) {
        let last_user = self.request.spans.iter().rfind(|span| span.role == "user").map(|span| span.start as usize);
        self.checkpoints = if self.request.cache_prompt || !self.mods.is_empty() {
            CheckpointPlan::for_prompt(self.kv_len, last_user, outputs_from)
        } else {
            CheckpointPlan::without_prompt(self.kv_len)
        };
    }

    /// Returns the purpose of a checkpoint after the last decode, if one is due.
    pub fn take_due_checkpoint(&mut self) -> Option<CheckpointPurpose> {
        self.checkpoints.take_due(self.kv_len, (!self.mods.is_empty()).then_some(self.prompt_len))
    }

    /// Returns the progress that the status of the slot shows.
    pub fn slot_progress(&self) -> SlotProgress {
        SlotProgress {
            prompt_tokens: self.prompt_len,
            processed: self.prompt_decoded(),
            cached: self.cached_tokens,
            generated: self.generated(),
            new_line: self.has_new_line(),
            busy: self.end.is_none(),
        }
    }

    /// Returns the parameters that the status of the slot shows.
    pub fn slot_run(&self) -> SlotRun {
        SlotRun {
            run_id: self.id,
            owner: self.request.owner.clone(),
            sampling: self.request.sampling.clone(),
            limits: self.request.limits.clone(),
            adapters: self.request.adapters.clone().unwrap_or_default(),
        }
    }

    /// Returns true if the answer has a line break.
    pub fn has_new_line(&self) -> bool {
        self.output_text.has_new_line()
    }

    pub fn elapsed_us(&self) -> u64 {
        self.event_buffer.elapsed().saturating_sub(self.paused_time).as_micros() as u64
    }

    /// Returns the position from which the run needs logits, if it needs a decode.
    pub fn wants_decode(&self) -> Option<usize> {
        match self.state {
            RunState::Decode { outputs_from } => Some(outputs_from),
            _ => None,
        }
    }

    /// Copies the logits at the end of the sequence before the model overwrites them.
    fn save_logits(&mut self, fresh: Option<&[f32]>) {
        if let Some(fresh) = fresh.filter(|_| !self.saved_logits_valid) {
            self.saved_logits.clear();
            self.saved_logits.extend_from_slice(fresh);
            self.saved_logits_valid = true;
        }
    }

    /// Dispatches events until the run needs a decode, waits for a mod, or has ended. `fresh` are the logits at the end
    /// of the sequence, unless they were saved.
    fn drive(&mut self, mut fresh: Option<&[f32]>, candidates: &mut Candidates, done: &ReplySenderFactory<'_>) {
        loop {
            let RunState::Dispatching(dispatch) = &mut self.state else { return };
            if let Some(index) = dispatch.next_mod(&self.mods) {
                if !self.call_mod(index, fresh, done) {
                    return;
                }
                continue;
            }
            let (event, winner) = (dispatch.event, dispatch.winner.take());
            match winner {
                Some(action) => {
                    self.save_logits(fresh);
                    self.apply_action(event, action);
                }
                None => self.advance(event, fresh, candidates),
            }
            // After sampling, the sequence has another end.
            if event != EventType::ForwardPass {
                fresh = None;
            }
        }
    }

    /// Returns the mod whose reply the run waits for.
    pub fn awaited_mod(&mut self) -> Option<&mut dyn ModInstance> {
        let RunState::AwaitingReply(_, index) = self.state else { return None };
        Some(self.mods.get_mut(index)?.instance.as_mut())
    }

    /// Calls a mod with the current event. Returns `false` if the reply comes later.
    fn call_mod(&mut self, index: usize, fresh: Option<&[f32]>, done: &ReplySenderFactory<'_>) -> bool {
        let RunState::Dispatching(mut dispatch) = std::mem::replace(&mut self.state, RunState::Ended) else {
            return false;
        };
        let mut mods = std::mem::take(&mut self.mods);
        self.pending_call += 1;
        let drawn_text = self.drawn.as_ref().map(|drawn| drawn.text.clone()).unwrap_or_default();
        let event = match dispatch.event {
            EventType::Prefilled => CallEvent::Prefilled,
            EventType::ForwardPass => {
                let raw = fresh.filter(|_| !self.saved_logits_valid).unwrap_or(self.saved_logits.as_slice());
                CallEvent::ForwardPass { logits: self.edited_logits.as_deref().unwrap_or(raw) }
            }
            EventType::Sampled => {
                let drawn = self.drawn.as_ref();
                CallEvent::Sampled {
                    token: drawn.map_or(0, |drawn| drawn.token),
                    text: &drawn_text,
                    logprob: drawn.and_then(|drawn| drawn.logprob).unwrap_or(0.0),
                }
            }
            EventType::Added => {
                let (count, forced) = self.last_added;
                let tokens = &self.sequence[self.sequence.len() - count..];
                CallEvent::Added { tokens, logprobs: &self.last_added_logprobs, forced }
            }
        };
        let call = Call {
            run: &self.view,
            step: dispatch.step,
            sequence: &self.sequence,
            prompt_len: self.prompt_len,
            evicted: self.evictions.generated,
            max_steps: self.max_tokens as u32,
            event,
        };
        let reply = dispatch.call(mods[index].instance.as_mut(), &call, done(self.id, self.pending_call));
        self.mods = mods;
        if reply.as_ref().is_none_or(|reply| matches!(reply.action, Some(Action::AdjustedLogits { .. }))) {
            self.save_logits(fresh);
        }
        if let Some(reply) = reply {
            self.state = RunState::Dispatching(dispatch);
            self.apply_reply(index, reply);
            true
        } else {
            self.state = RunState::AwaitingReply(dispatch, index);
            false
        }
    }
}
