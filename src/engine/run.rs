//! One run as a state machine: what happens between two decodes. It never touches the model; the scheduler asks what
//! it wants decoded and hands it logits.

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

/// Makes the way back for the answer to one call: the run, and the number of the call.
pub(super) type DoneFactory<'a> = dyn Fn(RunId, u64) -> ReplySender + 'a;

/// Where a run stands.
#[derive(Debug)]
pub(super) enum State {
    /// Nothing has happened.
    New,
    /// Tokens from [`Run::cached`] on are to be decoded, with logits from `outputs_from` on.
    Decode { outputs_from: usize },
    /// An event is going through the mods.
    Passing(Passage),
    /// A mod's answer is awaited.
    Waiting(Passage, usize),
    /// The run is over.
    Ended,
}

/// A generation.
pub(super) struct Run {
    pub id: RunId,
    pub request: Request,
    pub view: Arc<RunView>,
    pub mods: Vec<ActiveMod>,
    pub journal: Journal,
    pub state: State,
    /// PromptRecord, then generated tokens.
    pub sequence: Vec<TokenId>,
    pub prompt_len: usize,
    /// How many tokens of the sequence may stay in the KV cache.
    pub cached: usize,
    /// Where its state is kept on the way.
    pub(super) checkpoints: Plan,
    /// Tokens of the prompt whose KV state was reused.
    pub reused: usize,
    /// Attention of the decode that led to the current logits.
    pub attention: Option<Arc<AttentionRow>>,
    /// Attention whose event is known.
    pub attention_ready: Option<(i32, Arc<AttentionRow>)>,
    /// Attention on its way to the client.
    pub(super) rows: Rows,
    /// Counts calls that were handed to a worker, so that a late answer is not taken for another.
    pub awaited_call: u64,
    pub outbox: VecDeque<Output>,
    /// What was cut out of the sequence and is still in the KV cache.
    pub cuts: Vec<Cut>,
    /// What is remembered of the sequence for later requests.
    pub(super) memory: Memory,
    /// What went because the context was full.
    pub(super) gone: Gone,
    /// Tokens of the prompt when the run began.
    pub(super) prompt_tokens: usize,
    /// Whether the model's numbers were none.
    pub(super) poisoned: bool,
    /// Whose error the end of the run is, where it is not the engine's own.
    pub(super) fault: Option<Fault>,
    pub end: Option<Arc<RunEnd>>,
    /// Shared with the surface.
    pub metrics: Arc<RunMetrics>,
    /// What is said when the thread dies on which the run lives.
    pub last_will: Option<LastWill>,
    /// Set before the client receives the end.
    pub is_over: Arc<AtomicBool>,
    pub(super) context: usize,
    pub(super) max_tokens: usize,
    pub(super) step: u32,
    pub(super) answer: Answer,
    pub(super) unsent: VecDeque<(TokenMeasurement, Vec<Alternative>)>,
    pub(super) sampler: Sampler,
    /// What the answer must be.
    pub(super) constraint: Option<GrammarMatcher>,
    /// Its thoughts, where they have a budget.
    pub(super) thinking: Option<Thinking>,
    /// Logits of the sequence's end as the model gave them; kept only when a mod has the run wait, or changes something.
    pub(super) kept: Vec<f32>,
    /// The same after mods edited them.
    pub(super) edited: Option<Vec<f32>>,
    /// Their distribution, where it was measured.
    pub(super) edited_distribution: Option<Distribution>,
    /// Whether `kept` belongs to the sequence's end.
    pub(super) kept_valid: bool,
    pub(super) draw_temperature: Option<f32>,
    pub(super) distribution: Option<Distribution>,
    pub(super) top: Vec<Alternative>,
    pub(super) drawn: Option<TokenMeasurement>,
    /// How many tokens the last `Added` appended, and whether they were forced.
    pub(super) newly: (usize, bool),
    /// Their log-probabilities, kept only for runs with mods.
    pub(super) newly_logprobs: Vec<Option<f32>>,
    /// A forced list that is being decoded: where it begins and what is known of its tokens.
    pub(super) forced: Option<(usize, Vec<TokenMeasurement>)>,
    /// The step that the forced list belongs to.
    pub(super) forced_step: u32,
    /// How probable the tokens of the prompt were, while that is being found out.
    pub(super) prompt_measures: Vec<(TokenMeasurement, Vec<Alternative>)>,
    /// When the run got its slot, in microseconds since it was made.
    pub(super) begun_us: u64,
    pub(super) prompt_us: Option<u64>,
    pub(super) first_token_us: Option<u64>,
    /// How long it has rested.
    pub(super) rested: Duration,
    /// What the trace is to tell of the next step.
    pub(super) note: Option<String>,
    /// Keeps the request id from other runs until this one has ended.
    pub(super) active_id: Option<ActiveRequestId>,
    /// The engine counts its runs by the clones of this.
    pub(super) counted: Option<Arc<()>>,
}

impl Run {
    /// A run that has not begun. `context` is how many tokens its slot holds.
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

    /// Writes the first event and takes it to the mods. `done` makes the way back for an answer that comes later.
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

    /// Takes the logits that follow `position`. The last position of the sequence begins a step; an earlier one belongs
    /// to a forced list and says how probable its next token was.
    pub fn on_logits(&mut self, position: usize, logits: &[f32], candidates: &mut Candidates, done: &DoneFactory<'_>) {
        if self.end.is_some() {
            return;
        }
        let distribution = Distribution::of(logits);
        if !distribution.sound {
            // Drawing from such numbers is undefined, and the state that led to them must not be used again.
            self.cached = 0;
            self.poisoned = true;
            let message = "the model's probabilities are not numbers: its KV state or its weights are damaged; the slot's state is thrown away";
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
            // The first of several prompts, when a mod goes back to it.
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
            // The next step begins with them, when the mods have seen the list.
            self.keep(Some(logits));
            self.added_forced(start, measures);
        } else {
            self.begin_step();
        }
        self.drive(Some(logits), candidates, done);
    }

    /// The most probable tokens that these logits tell of.
    fn alternatives(&self, logits: &[f32], distribution: Distribution) -> Vec<Alternative> {
        measure::top(logits, self.request.alternatives)
            .into_iter()
            .map(|(token, logit)| self.alternative(token, distribution.prob(logit)))
            .collect()
    }

    /// Takes the answer that a mod owed.
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

    /// The run has a slot.
    pub fn placed_in(&mut self, slot: u32) {
        self.begun_us = self.elapsed_us();
        // A run is placed once.
        let _ = self.metrics.slot.set(slot);
    }

    /// Tokens of the prompt that were decoded, not found.
    pub(super) fn prompt_decoded(&self) -> usize {
        let known = if self.prompt_us.is_some() { self.prompt_tokens } else { self.cached.min(self.prompt_tokens) };
        known.saturating_sub(self.reused)
    }

    /// Tells the client how far the prompt is, where it asked for that.
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

    /// How many tokens the next decode may take: all that are missing, unless each of them gives a row of logits.
    pub fn next_decode(&self) -> usize {
        const MOST_ROWS: usize = 256;
        let missing = self.checkpoints.upto(self.cached, self.sequence.len()) - self.cached;
        let rows = self.request.report.prompt_probabilities && self.prompt_us.is_none();
        if rows { missing.min(MOST_ROWS) } else { missing }
    }

    /// Whether the answer has a line break.
    pub fn has_new_line(&self) -> bool {
        self.answer.has_new_line()
    }

    pub(super) fn elapsed_us(&self) -> u64 {
        self.journal.elapsed().saturating_sub(self.rested).as_micros() as u64
    }

    /// Whether the run wants a decode.
    pub fn wants_decode(&self) -> Option<usize> {
        match self.state {
            State::Decode { outputs_from } => Some(outputs_from),
            _ => None,
        }
    }

    /// Keeps the logits of the sequence's end, which the model overwrites with its next ones.
    fn keep(&mut self, fresh: Option<&[f32]>) {
        if let Some(fresh) = fresh.filter(|_| !self.kept_valid) {
            self.kept.clear();
            self.kept.extend_from_slice(fresh);
            self.kept_valid = true;
        }
    }

    /// Goes on until the run needs the model, a mod's answer, or nothing any more. `fresh` are the logits of the sequence's
    /// end, where they are not kept.
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
            // From the draw on the sequence has another end.
            if event != EventType::ForwardPass {
                fresh = None;
            }
        }
    }

    /// The mod whose answer the run waits for.
    pub(super) fn awaited(&mut self) -> Option<&mut dyn ModInstance> {
        let State::Waiting(_, index) = self.state else { return None };
        Some(self.mods.get_mut(index)?.session.as_mut())
    }

    /// Calls a mod with the event under way. `false` when its answer will come later.
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
