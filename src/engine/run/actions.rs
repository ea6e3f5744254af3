//! Effects of actions: appends forced tokens, and updates the run after tokens were removed.

use super::dispatch::ActionEffect;
use super::finish::EndReason;
use super::sequence::Sequence;
use super::step_logits::StepLogits;
use super::{ForcedTokens, Run, RunState};
use crate::events::{EventType, FinishReason, TokenId, TokenMeasurement};
use crate::model::distribution::TokenDistribution;
use crate::mods::Action;

impl Run {
    /// Enters the `Added` event of forced tokens after their decode.
    pub(super) fn enter_added_forced(&mut self, forced: ForcedTokens) {
        let ForcedTokens { start, step, note, mut measurements } = forced;
        let tokens = &self.sequence.tokens()[start..];
        measurements.extend(tokens.iter().skip(measurements.len()).map(|&token| unmeasured(token)));
        self.budget.advance_to(step);
        self.enter_added(measurements, None, note, step);
    }

    /// Appends tokens, which are then decoded together. The decode also gives the probability of each token. `note` is
    /// recorded with them.
    pub(super) fn force(&mut self, mut tokens: Vec<TokenId>, step: u32, note: Option<String>) {
        if !self.budget.permits(step) {
            if self.ends_with_end_token() {
                return self.finish(FinishReason::Stop);
            }
            return self.finish_at_last_step();
        }
        self.truncate_at_end(&mut tokens);
        let ends = tokens.last().is_some_and(|&token| self.view.ends_answer(token));
        let left = self.budget.tokens_left(self.sequence.answer_len());
        // An end-of-generation token does not count as a token of the answer.
        if tokens.len() - usize::from(ends) > left {
            tokens.truncate(left);
        }
        let made_room = self.sequence.make_room(tokens.len());
        tokens.truncate(self.sequence.room());
        if tokens.is_empty() {
            return self.finish(match made_room {
                _ if self.ends_with_end_token() => FinishReason::Stop.into(),
                Ok(_) => self.max_tokens_reason(),
                Err(full) => EndReason::new(FinishReason::Length, full),
            });
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
        let logits_from = if first.is_some() { start } else { self.last_logits_from() };
        self.sequence.decode_from(logits_from);
        self.step_logits.discard_model_logits();
        self.sequence.extend(&tokens);
        self.forced = Some(ForcedTokens { start, step, note, measurements: first.into_iter().collect() });
        self.state = RunState::Decode { logits_from };
    }

    /// Returns true if the last token of the answer ends the generation.
    fn ends_with_end_token(&self) -> bool {
        self.sequence.generated_in_context() > 0
            && self.sequence.last().is_some_and(|token| self.view.ends_answer(token))
    }

    /// Updates the parts of the run after the last `removed` tokens were removed from the sequence.
    pub(super) fn process_retraction(&mut self, removed: usize) {
        let generated = self.sequence.answer_len();
        self.step_logits.discard_model_logits();
        self.answer.retract(generated, &mut self.outbox);
        self.attention.truncate(self.answer.unreleased());
        self.dispatch.retracted(generated);
        self.sampler.rewind(generated, removed);
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.pop(removed);
        }
    }

    /// Truncates forced tokens after the first end-of-generation token.
    pub(super) fn truncate_at_end(&self, tokens: &mut Vec<TokenId>) {
        if let Some(end) = tokens.iter().position(|&token| self.view.ends_answer(token)) {
            tokens.truncate(end + 1);
        }
    }
}

/// Returns the number of tokens of the sequence that a Backtrack of `n` tokens removes, and true if it requested more
/// than it can remove. At `Sampled`, `n` includes the sampled token, which is not in the sequence yet.
pub(super) fn clamp_backtrack(event: EventType, n: u32, sequence: &Sequence) -> (usize, bool) {
    let requested = if event == EventType::Sampled { n as usize - 1 } else { n as usize };
    let max = sequence.removable();
    (requested.min(max), requested > max)
}

/// Computes the effect of an action before it is applied.
pub(super) fn effect_of(
    action: &Action,
    event: EventType,
    sequence: &Sequence,
    step_logits: &StepLogits,
    is_recorded: bool,
) -> ActionEffect {
    match action {
        Action::Backtrack { n, .. } => {
            let (removed, clamped) = clamp_backtrack(event, *n, sequence);
            ActionEffect { removed: Some(removed as u32), clamped, ..ActionEffect::default() }
        }
        Action::AdjustedLogits { edit, .. } if is_recorded => {
            ActionEffect { edit: step_logits.effect_of(edit), ..ActionEffect::default() }
        }
        _ => ActionEffect::default(),
    }
}

/// Creates the measurement of a token that was appended without logits.
pub(super) fn unmeasured(token: TokenId) -> TokenMeasurement {
    TokenMeasurement { token, text: String::new(), logprob: None, rank: None, entropy: None }
}
