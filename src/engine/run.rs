//! One run as a state machine: everything that happens between two decodes. It never touches the model. The scheduler
//! asks which tokens to decode and passes the logits in.

use super::answer::Answer;
use super::checkpoints::Plan;
use super::conversation::Memory;
use super::journal::Journal;
use super::measure::{self, Distribution};
use super::overflow::{Cut, Gone};
use super::pipeline::{ActiveMod, Passage};
use super::promise::LastWill;
use super::request_ids::ActiveRequestId;
use super::rows::Rows;
use super::status::{PromptTiming, RunMetrics};
use super::thinking::Thinking;
use super::{Output, PromptProgress, Request};
use crate::events::{
    Alternative, EventType, Fault, FinishReason, Measurements, PromptRecord, RunEnd, RunId, TokenId, TokenMeasurement,
};
use crate::model::grammar::GrammarMatcher;
use crate::model::llama::{AttentionRow, Candidates, Sampler};
use crate::mods::{Action, Call, CallEvent, ModInstance, Reply, ReplySender, RunView};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Creates the sender for the reply to one call, from the run's id and the number of the call.
pub(super) type DoneFactory<'a> = dyn Fn(RunId, u64) -> ReplySender + 'a;

/// State of a run.
#[derive(Debug)]
pub(super) enum State {
    /// Not started.
    New,
    /// Tokens from [`Run::kv_len`] on must be decoded, with logits from `outputs_from` on.
    Decode { outputs_from: usize },
    /// An event is dispatched to the mods.
    Passing(Passage),
    /// The reply of a mod is awaited.
    Waiting(Passage, usize),
    /// The run has ended.
    Ended,
}

/// A generation: one recorded run.
pub(super) struct Run {
    pub id: RunId,
    pub request: Request,
    pub view: Arc<RunView>,
    pub mods: Vec<ActiveMod>,
    pub journal: Journal,
    pub state: State,
    /// Tokens of the prompt, then generated tokens.
    pub sequence: Vec<TokenId>,
    pub prompt_len: usize,
    /// Number of tokens of the sequence that the KV cache holds and that are still valid.
    pub cached: usize,
    /// Positions at which the state is saved.
    pub(super) checkpoints: Plan,
    /// Prompt tokens whose KV state was reused.
    pub reused: usize,
    /// Attention of the decode that produced the current logits.
    pub attention: Option<Arc<AttentionRow>>,
    /// Attention to record, with the number of its event.
    pub attention_ready: Option<(i32, Arc<AttentionRow>)>,
    /// Attention rows for the client.
    pub(super) rows: Rows,
    /// Number of the last call to a mod. A late reply to an earlier call is recognised by it and ignored.
    pub awaited_call: u64,
    pub outbox: VecDeque<Output>,
    /// Removals from the sequence that the KV cache has not applied yet.
    pub cuts: Vec<Cut>,
    /// History of the conversation, for later requests.
    pub(super) memory: Memory,
    /// Tokens and messages that were evicted because the context was full.
    pub(super) gone: Gone,
    /// Prompt tokens at the start of the run.
    pub(super) prompt_tokens: usize,
    /// True if the logits were not numbers.
    pub(super) poisoned: bool,
    /// Party at fault for the end of the run; `None` for the engine.
    pub(super) fault: Option<Fault>,
    pub end: Option<Arc<RunEnd>>,
    /// Metrics that the API reads before the run ends.
    pub metrics: Arc<RunMetrics>,
    /// Reports the end of the run if the decode thread panics.
    pub last_will: Option<LastWill>,
    /// Set before the client receives the end of the run.
    pub is_over: Arc<AtomicBool>,
    pub(super) context: usize,
    pub(super) max_tokens: usize,
    pub(super) step: u32,
    pub(super) answer: Answer,
    pub(super) unsent: VecDeque<(TokenMeasurement, Vec<Alternative>)>,
    pub(super) sampler: Sampler,
    /// Matcher of the grammar constraint.
    pub(super) constraint: Option<GrammarMatcher>,
    /// Tracks reasoning tokens; `None` without a budget.
    pub(super) thinking: Option<Thinking>,
    /// Copy of the model's logits at the end of the sequence. Made only if the run waits for a mod or a mod changes
    /// something.
    pub(super) kept: Vec<f32>,
    /// Logits after the edits of mods.
    pub(super) edited: Option<Vec<f32>>,
    /// Distribution of the edited logits, if it was computed.
    pub(super) edited_distribution: Option<Distribution>,
    /// True if `saved_logits` belongs to the end of the sequence.
    pub(super) kept_valid: bool,
    pub(super) draw_temperature: Option<f32>,
    pub(super) distribution: Option<Distribution>,
    pub(super) top: Vec<Alternative>,
    pub(super) drawn: Option<TokenMeasurement>,
    /// Number of tokens appended by the last `Added` event, and whether they were forced.
    pub(super) newly: (usize, bool),
    /// Log-probabilities of these tokens; filled only for runs with mods.
    pub(super) newly_logprobs: Vec<Option<f32>>,
    /// Forced tokens that are being decoded: their first position, and the measurements made so far.
    pub(super) forced: Option<(usize, Vec<TokenMeasurement>)>,
    /// Step of the forced tokens.
    pub(super) forced_step: u32,
    /// Probabilities of the prompt's tokens, collected while the prompt is decoded.
    pub(super) prompt_measures: Vec<(TokenMeasurement, Vec<Alternative>)>,
    /// Time at which the run got its slot, in microseconds since its creation.
    pub(super) begun_us: u64,
    pub(super) prompt_us: Option<u64>,
    pub(super) first_token_us: Option<u64>,
    /// Total time for which the run was paused.
    pub(super) rested: Duration,
    /// Note to record with the next step.
    pub(super) note: Option<String>,
    /// Reserves the request id until the run ends.
    pub(super) active_id: Option<ActiveRequestId>,
    /// The engine counts its runs by the clones of this reference.
    pub(super) counted: Option<Arc<()>>,
}

impl Run {
    /// Creates a run that has not started. `context` is the number of tokens that its slot holds.
    #[expect(clippy::too_many_arguments, reason = "the parts of a run, made in one place")]
    pub fn new(
        id: RunId,
        request: Request,
        view: Arc<RunView>,
        mods: Vec<ActiveMod>,
        journal: Journal,
        sampler: Sampler,
        constraint: Option<GrammarMatcher>,
        context: usize,
    ) -> Self {
        Self {
            id,
            sequence: request.prompt.clone(),
            prompt_len: request.prompt.len(),
            prompt_tokens: request.prompt.len(),
            cuts: Vec::new(),
            memory: Memory::default(),
            gone: Gone::default(),
            poisoned: false,
            fault: None,
            cached: 0,
            checkpoints: Plan::default(),
            reused: 0,
            attention: None,
            attention_ready: None,
            rows: Rows::new(request.report),
            awaited_call: 0,
            outbox: VecDeque::new(),
            end: None,
            metrics: Arc::default(),
            last_will: None,
            is_over: Arc::default(),
            context,
            max_tokens: request.limits.max_tokens as usize,
            step: 0,
            answer: Answer::new(&request.limits.stop).indented(request.limits.min_indent as usize),
            unsent: VecDeque::new(),
            sampler,
            constraint,
            thinking: request.thinking.clone().map(Thinking::new),
            kept: Vec::new(),
            edited: None,
            edited_distribution: None,
            kept_valid: false,
            draw_temperature: None,
            distribution: None,
            top: Vec::new(),
            drawn: None,
            newly: (0, false),
            newly_logprobs: Vec::new(),
            forced: None,
            forced_step: 0,
            prompt_measures: Vec::new(),
            begun_us: 0,
            prompt_us: None,
            first_token_us: None,
            rested: Duration::ZERO,
            note: None,
            active_id: None,
            counted: None,
            state: State::New,
            request,
            view,
            mods,
            journal,
        }
    }

    /// Records the first event and dispatches it to the mods. `done` creates the senders for replies that come later.
    pub fn begin(&mut self, done: &DoneFactory<'_>) {
        let order = self.journal.event(EventType::Prefilled, 0, |event| {
            event.prompt_length = Some(self.prompt_len as i32);
            event.tokens_so_far_len = Some(0);
            event.max_steps = Some(self.max_tokens as i32);
            event.measured = Some(Box::new(Measurements {
                position: Some(0),
                evicted: self.gone.untold.take(),
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
        self.state = State::Passing(Passage::new(EventType::Prefilled, order, 0));
        self.drive(None, &mut Candidates::default(), done);
    }

    /// Processes the logits that follow `position`. The last position of the sequence begins a step; an earlier one
    /// belongs to a forced list and gives the probability of its next token.
    pub fn on_logits(&mut self, position: usize, logits: &[f32], candidates: &mut Candidates, done: &DoneFactory<'_>) {
        if self.end.is_some() {
            return;
        }
        let distribution = Distribution::of(logits);
        if !distribution.sound {
            // Sampling from such values is undefined, and the state that produced them must not be reused.
            self.cached = 0;
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
                self.rows.drawn_with(self.attention.take());
            }
            return;
        }
        if self.prompt_us.is_none() {
            let elapsed_us = self.elapsed_us().saturating_sub(self.begun_us);
            self.prompt_us = Some(elapsed_us);
            // A mod can backtrack into the prompt; only the first evaluation is reported.
            let _ = self.metrics.prompt.set(PromptTiming {
                tokens: self.prompt_len as u32,
                cached: self.reused as u32,
                elapsed_us,
                at: Instant::now(),
            });
            if self.request.report.prompt_probabilities {
                self.outbox.push_back(Output::Prompt(std::mem::take(&mut self.prompt_measures)));
            }
        }
        self.top = self.alternatives(logits, distribution);
        self.distribution = Some(distribution);
        self.kept_valid = false;
        if let Some((start, measures)) = self.forced.take() {
            // The next step starts from these logits, after the mods have seen the forced list.
            self.keep(Some(logits));
            self.added_forced(start, measures);
        } else {
            self.begin_step();
        }
        self.drive(Some(logits), candidates, done);
    }

    /// Returns the most probable tokens of a distribution.
    fn alternatives(&self, logits: &[f32], distribution: Distribution) -> Vec<Alternative> {
        measure::top(logits, self.request.alternatives)
            .into_iter()
            .map(|(token, logit)| self.alternative(token, distribution.prob(logit)))
            .collect()
    }

    /// Processes the reply that the run waits for.
    pub fn on_reply(&mut self, reply: Reply, candidates: &mut Candidates, done: &DoneFactory<'_>) {
        if !matches!(self.state, State::Waiting(..)) {
            return;
        }
        if let State::Waiting(passage, index) = std::mem::replace(&mut self.state, State::Ended) {
            self.state = State::Passing(passage);
            self.settle(index, reply);
            self.drive(None, candidates, done);
        }
    }

    /// Notes the slot that the run was given.
    pub fn placed_in(&mut self, slot: u32) {
        self.begun_us = self.elapsed_us();
        // A run is assigned to a slot once.
        let _ = self.metrics.slot.set(slot);
    }

    /// Returns the number of prompt tokens that were decoded, without the cached ones.
    pub(super) fn prompt_decoded(&self) -> usize {
        let known = if self.prompt_us.is_some() { self.prompt_tokens } else { self.cached.min(self.prompt_tokens) };
        known.saturating_sub(self.reused)
    }

    /// Reports the progress of the prompt, if the client asked for it.
    pub fn tell_progress(&mut self) {
        if self.request.report.progress && self.prompt_us.is_none() && self.end.is_none() {
            self.outbox.push_back(Output::Progress(PromptProgress {
                total: self.prompt_len as u32,
                cached: self.reused as u32,
                processed: self.cached.min(self.prompt_len) as u32,
                elapsed_us: self.elapsed_us().saturating_sub(self.begun_us),
            }));
        }
    }

    /// Returns the maximum number of tokens for the next decode: all that are missing, or fewer if each of them needs a
    /// row of logits.
    pub fn next_decode(&self) -> usize {
        const MOST_ROWS: usize = 256;
        let missing = self.checkpoints.upto(self.cached, self.sequence.len()) - self.cached;
        let rows = self.request.report.prompt_probabilities && self.prompt_us.is_none();
        if rows { missing.min(MOST_ROWS) } else { missing }
    }

    /// Returns true if the answer has a line break.
    pub fn has_new_line(&self) -> bool {
        self.answer.has_new_line()
    }

    pub(super) fn elapsed_us(&self) -> u64 {
        self.journal.elapsed().saturating_sub(self.rested).as_micros() as u64
    }

    /// Returns the position from which the run needs logits, if it needs a decode.
    pub fn wants_decode(&self) -> Option<usize> {
        match self.state {
            State::Decode { outputs_from } => Some(outputs_from),
            _ => None,
        }
    }

    /// Copies the logits at the end of the sequence before the model overwrites them.
    fn keep(&mut self, fresh: Option<&[f32]>) {
        if let Some(fresh) = fresh.filter(|_| !self.kept_valid) {
            self.kept.clear();
            self.kept.extend_from_slice(fresh);
            self.kept_valid = true;
        }
    }

    /// Dispatches events until the run needs a decode, waits for a mod, or has ended. `fresh` are the logits at the end
    /// of the sequence, unless they were saved.
    fn drive(&mut self, mut fresh: Option<&[f32]>, candidates: &mut Candidates, done: &DoneFactory<'_>) {
        loop {
            let State::Passing(passage) = &mut self.state else { return };
            if let Some(index) = passage.next_mod(&self.mods) {
                if !self.call_mod(index, fresh, done) {
                    return;
                }
                continue;
            }
            let (event, winner) = (passage.event, passage.winner.take());
            match winner {
                Some(action) => {
                    self.keep(fresh);
                    self.act(event, action);
                }
                None => self.go_on(event, fresh, candidates),
            }
            // After the draw the sequence has another end.
            if event != EventType::ForwardPass {
                fresh = None;
            }
        }
    }

    /// Returns the mod whose reply the run waits for.
    pub(super) fn awaited(&mut self) -> Option<&mut dyn ModInstance> {
        let State::Waiting(_, index) = self.state else { return None };
        Some(self.mods.get_mut(index)?.session.as_mut())
    }

    /// Calls a mod with the current event. Returns `false` if the reply comes later.
    fn call_mod(&mut self, index: usize, fresh: Option<&[f32]>, done: &DoneFactory<'_>) -> bool {
        let State::Passing(mut passage) = std::mem::replace(&mut self.state, State::Ended) else { return false };
        let mut mods = std::mem::take(&mut self.mods);
        self.awaited_call += 1;
        let drawn_text = self.drawn.as_ref().map(|drawn| drawn.text.clone()).unwrap_or_default();
        let event = match passage.event {
            EventType::Prefilled => CallEvent::Prefilled,
            EventType::ForwardPass => {
                let raw = fresh.filter(|_| !self.kept_valid).unwrap_or(self.kept.as_slice());
                CallEvent::ForwardPass { logits: self.edited.as_deref().unwrap_or(raw) }
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
                let (count, forced) = self.newly;
                let tokens = &self.sequence[self.sequence.len() - count..];
                CallEvent::Added { tokens, logprobs: &self.newly_logprobs, forced }
            }
        };
        let call = Call {
            run: &self.view,
            step: passage.step,
            sequence: &self.sequence,
            prompt_len: self.prompt_len,
            evicted: self.gone.generated,
            max_steps: self.max_tokens as u32,
            event,
        };
        let reply = passage.call(mods[index].session.as_mut(), &call, done(self.id, self.awaited_call));
        self.mods = mods;
        if reply.as_ref().is_none_or(|reply| matches!(reply.action, Some(Action::AdjustedLogits { .. }))) {
            self.keep(fresh);
        }
        if let Some(reply) = reply {
            self.state = State::Passing(passage);
            self.settle(index, reply);
            true
        } else {
            self.state = State::Waiting(passage, index);
            false
        }
    }
}
