//! Application of the mods' actions to a run.

use super::dispatch::ActionEffect;
use super::{ForcedTokens, Run, RunState};
use crate::events::{EventType, FinishReason, TokenId, TokenMeasurement};
use crate::model::distribution::TokenDistribution;
use crate::mods::{Action, Reply, tool_calls_of};
use serde_json::Value;

impl Run {
    /// Records the reply of a mod. Applies an edit of the prompt or the logits immediately; a control action is applied
    /// after the dispatch, if it wins the event.
    pub(super) fn apply_reply(&mut self, index: usize, reply: Reply) {
        let RunState::Dispatching(mut dispatched) = std::mem::replace(&mut self.state, RunState::Ended) else { return };
        let reply = reply.validate_action(dispatched.event, self.view.vocabulary.len(), self.sequence.context());
        let recorded = self.dispatch.record_reply(&mut dispatched, index, reply, &mut self.event_buffer);
        let effect = self.compute_effect(dispatched.event, &recorded.action);
        self.dispatch.record_action(&recorded, &self.view.vocabulary, &effect, &mut self.event_buffer);
        match recorded.action {
            Action::Noop => {}
            Action::AdjustedPrefill { tokens, max_steps } => {
                self.sequence.replace_prompt(tokens);
                if let Some(max_steps) = max_steps {
                    self.adjust_max_tokens(max_steps);
                }
            }
            Action::AdjustedLogits { edit, temperature } => {
                self.step_logits.edit(edit, temperature, effect.edit.edited);
            }
            control => dispatched.set_winner(control),
        }
        self.state = RunState::Dispatching(dispatched);
    }

    /// Sets the maximum answer length that a mod requests with `AdjustedPrefill`.
    pub(super) fn adjust_max_tokens(&mut self, max_tokens: u32) {
        let limits = &self.request.limits;
        let max_tokens = limits.capped(max_tokens);
        self.max_steps = self.max_steps.max(limits.max_steps_for(max_tokens));
        self.max_tokens = max_tokens as usize;
    }

    /// Applies the action that won an event.
    pub(super) fn apply_action(&mut self, event: EventType, action: Action) {
        let step = if event == EventType::Added || self.step == 0 { self.step + 1 } else { self.step };
        match action {
            Action::ForceTokens(tokens) => {
                if event == EventType::Added {
                    self.send_text();
                }
                self.step_logits.take_drawn();
                self.force(tokens, step);
            }
            Action::Backtrack { n, tokens } => {
                let (removed, _) = self.clamp_backtrack(event, n);
                self.step_logits.take_drawn();
                if removed > 0 {
                    let before = self.sequence.generated();
                    self.sequence.retract(removed);
                    self.process_retraction(before, removed);
                }
                if tokens.is_empty() {
                    self.continue_from_end();
                } else {
                    self.force(tokens, step);
                }
            }
            Action::ForceOutput(mut tokens) => {
                self.step_logits.take_drawn();
                self.truncate_at_end(&mut tokens);
                let before = self.sequence.generated();
                let removed = self.sequence.retract_answer();
                self.process_retraction(before, removed);
                self.sequence.extend(&tokens);
                self.attention.clear_drawn();
                if !tokens.is_empty() {
                    let unmeasured = tokens.iter().map(|&token| unmeasured(token)).collect();
                    self.record_added(unmeasured, None, true, step);
                }
                self.finish(FinishReason::Stop, None, None);
            }
            Action::ToolCalls(payload) => {
                self.discard_unsent();
                let calls = Value::Array(tool_calls_of(&payload).to_vec());
                self.finish(FinishReason::ToolCalls, None, Some(calls));
            }
            Action::EmitError { message, fault } => {
                self.discard_unsent();
                self.fault = Some(fault);
                self.finish(FinishReason::Error, Some(message), None);
            }
            Action::Noop | Action::AdjustedPrefill { .. } | Action::AdjustedLogits { .. } => self.continue_from_end(),
        }
    }

    /// Records forced tokens after their decode.
    pub(super) fn record_forced(&mut self, forced: ForcedTokens) {
        let ForcedTokens { start, step, mut measurements } = forced;
        let tokens = &self.sequence.tokens()[start..];
        measurements.extend(tokens.iter().skip(measurements.len()).map(|&token| unmeasured(token)));
        self.step = self.step.max(step);
        self.record_added(measurements, None, true, step);
    }

    /// Appends tokens, which are then decoded together. The decode also gives the probability of each token.
    pub(super) fn force(&mut self, mut tokens: Vec<TokenId>, step: u32) {
        if step > self.last_step() {
            return self.finish_at_last_step();
        }
        self.truncate_at_end(&mut tokens);
        let ends = tokens.last().is_some_and(|&token| self.ends_generation(token));
        let left = self.max_tokens.saturating_sub(self.sequence.generated());
        // An end-of-generation token does not count as a token of the answer.
        if tokens.len() - usize::from(ends) > left {
            tokens.truncate(left);
        }
        // If there is no room, the tokens are truncated below.
        let _ = self.sequence.make_room(tokens.len());
        tokens.truncate(self.sequence.room());
        if tokens.is_empty() {
            return self.finish(FinishReason::Length, None, None);
        }
        let start = self.sequence.len();
        self.attention.clear_drawn();
        let first = self.step_logits.saved().map(|saved| {
            let distribution = self.step_logits.distribution().unwrap_or_else(|| TokenDistribution::new(saved));
            self.measurer.measure(distribution, saved, tokens[0])
        });
        if first.is_some() {
            self.attention.push_drawn();
        }
        let outputs_from = if first.is_some() { start } else { start - 1 };
        self.sequence.decode_from(outputs_from);
        self.step_logits.discard_saved();
        self.sequence.extend(&tokens);
        self.forced = Some(ForcedTokens { start, step, measurements: first.into_iter().collect() });
        self.state = RunState::Decode { outputs_from };
    }

    /// Updates the parts of the run after the last `removed` tokens were removed from the sequence, which had `before`
    /// generated tokens.
    pub(super) fn process_retraction(&mut self, before: usize, removed: usize) {
        let generated = self.sequence.generated();
        self.step_logits.discard_saved();
        self.answer.retract(before, generated, &mut self.outbox);
        self.attention.truncate(self.answer.unsent());
        self.sampler.rewind(generated, removed);
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.pop(removed);
        }
    }

    /// Truncates forced tokens after the first end-of-generation token.
    fn truncate_at_end(&self, tokens: &mut Vec<TokenId>) {
        if let Some(end) = tokens.iter().position(|&token| self.ends_generation(token)) {
            tokens.truncate(end + 1);
        }
    }

    /// Returns the number of tokens of the sequence that a Backtrack of `n` tokens removes, and true if it requested
    /// more than it can remove. At `Sampled`, `n` includes the sampled token, which is not in the sequence yet.
    fn clamp_backtrack(&self, event: EventType, n: u32) -> (usize, bool) {
        let requested = if event == EventType::Sampled { n as usize - 1 } else { n as usize };
        let max = self.sequence.removable();
        (requested.min(max), requested > max)
    }

    /// Computes the effect of an action before it is applied.
    fn compute_effect(&self, event: EventType, action: &Action) -> ActionEffect {
        match action {
            Action::Backtrack { n, .. } => {
                let (removed, clamped) = self.clamp_backtrack(event, *n);
                ActionEffect { removed: Some(removed as u32), clamped, ..ActionEffect::default() }
            }
            Action::AdjustedLogits { edit, .. } if self.event_buffer.is_recorded() => {
                ActionEffect { edit: self.step_logits.effect_of(edit), ..ActionEffect::default() }
            }
            _ => ActionEffect::default(),
        }
    }
}

/// Creates the measurement of a token that was appended without logits.
fn unmeasured(token: TokenId) -> TokenMeasurement {
    TokenMeasurement { token, text: String::new(), logprob: None, rank: None, entropy: None }
}
