//! Transitions of a run. Three calls continue it: [`Run::begin`], [`Run::on_logits`] after a decode, and
//! [`Run::on_reply`] after the reply of a mod. Each of them dispatches events to the mods until the run needs a decode,
//! waits for a mod, or has ended. Without an action of a mod, one step is:
//!
//! ```text
//! on_logits -> ForwardPass -> Sampled -> Added -> release_text -> Decode
//! ```
//!
//! [`super::steps`] enters the events, [`super::actions`] appends and removes tokens, and [`super::finish`] ends the run.

use super::actions::{clamp_backtrack, unmeasured};
use super::dispatch::DispatchedEvent;
use super::finish::EndReason;
use super::{Run, RunResources, RunState};
use crate::engine::output::{MeasuredToken, Output, PromptTiming};
use crate::events::{EndCause, EventType, FinishReason, TokenId};
use crate::model::distribution::TokenDistribution;
use crate::model::llama::Candidates;
use crate::mods::{Action, Reply, tool_calls_of};
use serde_json::Value;
use std::time::Instant;

impl Run {
    /// Records the first event and dispatches it to the mods, or continues a recorded run.
    pub fn begin(&mut self, resources: &mut RunResources) {
        if let Some(tokens) = self.fork_tokens.take() {
            return self.begin_fork(tokens);
        }
        let order = self.record_prompt();
        self.state = RunState::Dispatching(DispatchedEvent::new(EventType::Prefilled, order, 0));
        self.dispatch_events(None, resources);
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
            self.sequence.discard_kv();
            let message = "the model returned logits that are NaN or infinite: its KV state or its weights are damaged; the slot's state is discarded";
            return self.abort(EndCause::InvalidLogits, message);
        }
        if let Some(&next) = self.sequence.tokens().get(position + 1) {
            let measurement = self.measurer.measure(distribution, logits, next);
            if position + 1 < self.sequence.prompt_len() {
                let alternatives = self.measurer.top(logits, distribution);
                self.prompt_probabilities.push(MeasuredToken { measurement, alternatives, is_hidden: false });
            } else if let Some(forced) = self.forced.as_mut().filter(|forced| position + 1 >= forced.start) {
                forced.measurements.push(measurement);
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
                self.outbox.push(Output::PromptProbabilities(std::mem::take(&mut self.prompt_probabilities)));
            }
        }
        let top = self.measurer.top(logits, distribution);
        self.step_logits.set_model_logits(logits, distribution, top);
        if let Some(forced) = self.forced.take() {
            // The next step starts with these logits, after the `Added` event of the forced tokens.
            self.step_logits.save(Some(logits));
            self.enter_added_forced(forced);
        } else {
            self.enter_forward_pass();
        }
        self.dispatch_events(Some(logits), resources);
    }

    /// Processes the reply to a mod call, if the run still waits for it.
    pub fn on_reply(&mut self, call: u64, reply: Reply, resources: &mut RunResources) {
        let RunState::Dispatching(dispatched) = &mut self.state else { return };
        if let Some(reply) = self.dispatch.receive(dispatched, call, reply) {
            self.apply_reply(reply);
            self.dispatch_events(None, resources);
        }
    }

    /// Dispatches events until the run needs a decode, waits for a mod, or has ended. `new_logits` are the model's
    /// logits at the end of the sequence; `None` if they are saved.
    fn dispatch_events(&mut self, mut new_logits: Option<&[f32]>, resources: &mut RunResources) {
        loop {
            let RunState::Dispatching(dispatched) = &mut self.state else { return };
            if self.dispatch.advance_to_next_mod(dispatched) {
                if !self.call_mod(new_logits, resources) {
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

    /// Continues after an event without a winning control action.
    fn advance(&mut self, event: EventType, new_logits: Option<&[f32]>, candidates: &mut Candidates) {
        match event {
            EventType::Prefilled => {
                if !self.force_end_of_reasoning() {
                    self.continue_from_end();
                }
            }
            EventType::ForwardPass => self.sample(new_logits, candidates),
            EventType::Sampled => self.append_drawn(),
            EventType::Added => {
                self.release_text();
                match self.end_reason() {
                    Some(end_reason) => self.finish(end_reason),
                    None => self.continue_after_change(),
                }
            }
        }
    }

    /// Continues after a change of the sequence that does not end the run: ends the reasoning if it must end; otherwise
    /// samples.
    pub(super) fn continue_after_change(&mut self) {
        if self.force_end_of_reasoning() {
            return;
        }
        match self.sequence.make_room(1) {
            Ok(has_evicted) => {
                if has_evicted {
                    // The logits after forced tokens, and their attention, belong to the longer sequence.
                    self.step_logits.discard_model_logits();
                }
                self.continue_from_end();
            }
            Err(message) => self.finish(EndReason::new(FinishReason::Length, message)),
        }
    }

    /// Appends the tokens that end the reasoning, if it must end and the answer has room. Returns true if it did.
    fn force_end_of_reasoning(&mut self) -> bool {
        let Some(reasoning) = &self.reasoning else { return false };
        let Some(tokens) = reasoning.closing_tokens().map(<[TokenId]>::to_vec) else { return false };
        if self.budget.tokens_left(self.sequence.answer_len()) == 0 {
            return false;
        }
        let note = reasoning.note();
        self.force(tokens, self.budget.step() + 1, Some(note));
        true
    }

    /// Continues at the end of the sequence: immediately if its logits are saved, otherwise after a decode.
    pub(super) fn continue_from_end(&mut self) {
        if self.step_logits.saved().is_some() {
            self.enter_forward_pass();
        } else {
            let logits_from = self.last_logits_from();
            self.sequence.decode_from(logits_from);
            self.state = RunState::Decode { logits_from };
            self.sampler.prepare();
        }
    }

    /// Returns the position from which logits are needed to continue at the end of the sequence: the last one, or the
    /// first of a prompt whose probabilities the client requested.
    pub(super) fn last_logits_from(&self) -> usize {
        let whole_prompt = self.request.report.prompt_probabilities && !self.has_decoded_prompt();
        if whole_prompt { 0 } else { self.sequence.len() - 1 }
    }

    /// Applies the action that won an event.
    fn apply_action(&mut self, event: EventType, action: Action) {
        let step = self.budget.step();
        let step = if event == EventType::Added || step == 0 { step + 1 } else { step };
        match action {
            Action::ForceTokens(tokens) => {
                if event == EventType::Added {
                    self.release_text();
                }
                self.force(tokens, step, None);
            }
            Action::Backtrack { n, tokens } => {
                let (removed, _) = clamp_backtrack(event, n, &self.sequence);
                if removed > 0 {
                    self.sequence.retract(removed);
                    self.process_retraction(removed);
                }
                if tokens.is_empty() {
                    self.continue_after_change();
                } else {
                    self.force(tokens, step, None);
                }
            }
            Action::ForceOutput(mut tokens) => {
                self.truncate_at_end(&mut tokens);
                let removed = self.sequence.retract_answer();
                self.process_retraction(removed);
                self.sequence.extend(&tokens);
                self.attention.clear_drawn();
                if !tokens.is_empty() {
                    let unmeasured = tokens.iter().map(|&token| unmeasured(token)).collect();
                    self.enter_added(unmeasured, None, None, step);
                }
                self.finish_with_all_tokens(FinishReason::Stop);
            }
            Action::ToolCalls(payload) => {
                // The tool calls are the whole answer.
                self.answer.retract(0, &mut self.outbox);
                let calls = Value::Array(tool_calls_of(&payload).to_vec());
                self.finish(EndReason { tool_calls: Some(calls), ..FinishReason::ToolCalls.into() });
            }
            Action::EmitError { message, fault } => {
                self.discard_after(0);
                self.finish_with_all_tokens(EndReason {
                    fault: Some(fault),
                    ..EndReason::new(FinishReason::Error, message)
                });
            }
            Action::Noop | Action::AdjustedPrefill { .. } | Action::AdjustedLogits { .. } => self.continue_from_end(),
        }
    }
}
