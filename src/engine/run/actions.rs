//! Effects of a mod's action on the parts of a run. No other module decides these.

use super::dispatch::ActionEffect;
use super::distribution::TokenDistribution;
use super::{ForcedTokens, Run, RunState};
use crate::events::{EventType, FinishReason, TokenId, TokenMeasurement};
use crate::mods::{Action, LogitEdit, Reply};
use serde_json::Value;

impl Run {
    /// Records a reply, applies an edit of prompt or logits, and keeps the first action that changes control.
    pub(super) fn apply_reply(&mut self, index: usize, reply: Reply) {
        let RunState::Dispatching(mut dispatched) = std::mem::replace(&mut self.state, RunState::Ended) else { return };
        let (vocabulary, context) = (self.view.vocabulary.len(), self.sequence.context());
        let check = |action: &Action| action_error(action, vocabulary, context);
        let recorded = self.dispatch.record_reply(&mut dispatched, index, reply, &mut self.event_buffer, check);
        let effect = self.effect(dispatched.event, &recorded.action);
        self.dispatch.record_action(&recorded, &self.view.vocabulary, &effect, &mut self.event_buffer);
        match recorded.action {
            Action::Noop => {}
            Action::AdjustedPrefill { tokens, max_steps } => {
                self.sequence.replace_prompt(tokens);
                if let Some(max_steps) = max_steps {
                    self.max_tokens = self.request.limits.capped(max_steps) as usize;
                }
            }
            Action::AdjustedLogits { edit, temperature } => {
                self.step_logits.edit(edit, temperature, effect.edit.edited);
            }
            control => dispatched.set_winner(control),
        }
        self.state = RunState::Dispatching(dispatched);
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
                let calls = if payload.is_array() { payload } else { Value::Array(vec![payload]) };
                self.finish(FinishReason::ToolCalls, None, Some(calls));
            }
            Action::EmitError { message, fault } => {
                self.fault = Some(fault);
                self.finish(FinishReason::Error, Some(message), None);
            }
            Action::Noop | Action::AdjustedPrefill { .. } | Action::AdjustedLogits { .. } => self.continue_from_end(),
        }
    }

    /// Records a forced list after its decode.
    pub(super) fn record_forced(&mut self, forced: ForcedTokens) {
        let ForcedTokens { start, step, mut measurements } = forced;
        let tokens = &self.sequence.tokens()[start..];
        measurements.extend(tokens.iter().skip(measurements.len()).map(|&token| unmeasured(token)));
        self.step = self.step.max(step);
        self.record_added(measurements, None, true, step);
    }

    /// Appends a list of tokens. One decode for the whole list also gives the probability of each token.
    pub(super) fn force(&mut self, mut tokens: Vec<TokenId>, step: u32) {
        if step > self.request.limits.max_steps {
            return self.finish_at_max_steps();
        }
        self.truncate_at_end(&mut tokens);
        // Tokens that do not fit are dropped below.
        let _ = self.sequence.make_room(tokens.len());
        let room = self.max_tokens.saturating_sub(self.sequence.generated()).min(self.sequence.room());
        let ends = tokens.last().is_some_and(|&token| self.ends_generation(token));
        // An end-of-generation token does not count as a token of the answer.
        if tokens.len() - usize::from(ends) > room {
            tokens.truncate(room);
        } else if tokens.len() > self.sequence.room() {
            tokens.pop();
        }
        if tokens.is_empty() {
            return self.finish(FinishReason::Length, None, None);
        }
        let start = self.sequence.len();
        self.attention.clear_drawn();
        let first = self.step_logits.saved().map(|saved| {
            let distribution = self.step_logits.distribution().unwrap_or_else(|| TokenDistribution::new(saved));
            self.measure(distribution, saved, tokens[0])
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

    /// Removes everything derived from `removed` tokens at the end of the answer, which had `before` tokens.
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

    /// Ends a forced list at its first end-of-generation token.
    fn truncate_at_end(&self, tokens: &mut Vec<TokenId>) {
        if let Some(end) = tokens.iter().position(|&token| self.ends_generation(token)) {
            tokens.truncate(end + 1);
        }
    }

    /// Returns how many tokens of the sequence a Backtrack removes, and whether it requested more than were generated.
    /// At `Sampled`, the sampled token counts although it is not in the sequence yet.
    fn clamp_backtrack(&self, event: EventType, n: u32) -> (usize, bool) {
        let requested = if event == EventType::Sampled { n as usize - 1 } else { n as usize };
        // If a full context evicted the whole prompt, one token stays for the model to continue from.
        let own = self.sequence.len() - self.sequence.prompt_len().max(1);
        (requested.min(own), requested > own)
    }

    fn effect(&self, event: EventType, action: &Action) -> ActionEffect {
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

fn unmeasured(token: TokenId) -> TokenMeasurement {
    TokenMeasurement { token, text: String::new(), logprob: None, rank: None, entropy: None }
}

/// Checks the values of an action. Returns what is wrong and what is expected.
fn action_error(action: &Action, vocabulary: usize, context: usize) -> Option<String> {
    let outside = |tokens: &[TokenId]| {
        tokens
            .iter()
            .find(|&&token| usize::try_from(token).map_or(true, |token| token >= vocabulary))
            .map(|token| format!("token {token} is not in the vocabulary; ids must be from 0 to {}", vocabulary - 1))
    };
    match action {
        Action::ForceTokens(tokens) if tokens.is_empty() => Some("ForceTokens needs at least one token".into()),
        Action::Backtrack { n: 0, .. } => {
            Some("Backtrack needs n >= 1, got 0; use ForceTokens to append without removing".into())
        }
        Action::AdjustedPrefill { tokens, .. } if tokens.is_empty() => {
            Some("AdjustedPrefill needs at least one token".into())
        }
        Action::AdjustedPrefill { tokens, .. } if tokens.len() >= context => Some(format!(
            "AdjustedPrefill has {} tokens; it must have fewer than the {context} tokens of a slot's context",
            tokens.len()
        )),
        Action::ForceTokens(tokens) | Action::ForceOutput(tokens) | Action::Backtrack { tokens, .. }
            if tokens.len() > context =>
        {
            Some(format!(
                "{} has {} tokens; it must have at most the {context} tokens of a slot's context",
                action.kind().as_str(),
                tokens.len()
            ))
        }
        Action::AdjustedPrefill { max_steps: Some(0), .. } => Some("max_steps must be 1 or more, got 0".into()),
        Action::ForceTokens(tokens)
        | Action::ForceOutput(tokens)
        | Action::Backtrack { tokens, .. }
        | Action::AdjustedPrefill { tokens, .. } => outside(tokens),
        Action::AdjustedLogits { temperature: Some(t), .. } if !t.is_finite() || *t < 0.0 => {
            Some(format!("token_temp must be a number of 0 or more, got {t}"))
        }
        Action::AdjustedLogits { edit: LogitEdit::Replace(values), .. } => {
            if values.len() != vocabulary {
                Some(format!(
                    "the logits must have {vocabulary} entries, one per token of the vocabulary, got {}",
                    values.len()
                ))
            } else if values.iter().map(|&value| u32::from(value.is_nan() || value == f32::INFINITY)).sum::<u32>() > 0 {
                Some("the logits must not contain NaN or +inf; use -inf to ban a token".into())
            } else {
                None
            }
        }
        Action::AdjustedLogits { edit: LogitEdit::Set(entries) | LogitEdit::Add(entries), .. } => {
            if entries.iter().any(|(_, value)| value.is_nan() || *value == f32::INFINITY) {
                Some("an edit of the logits must not be NaN or +inf; use -inf to ban a token".into())
            } else {
                outside(&entries.iter().map(|&(token, _)| token).collect::<Vec<_>>())
            }
        }
        Action::ToolCalls(payload) => tool_calls_error(payload),
        _ => None,
    }
}

/// Checks the payload of `ToolCalls`: one call, a list of calls, or a message that has calls.
fn tool_calls_error(payload: &Value) -> Option<String> {
    const SHAPE: &str = r#"{"id": …, "type": "function", "function": {"name": …, "arguments": …}}"#;
    let payload = payload.get("tool_calls").unwrap_or(payload);
    let calls = payload.as_array().map_or(std::slice::from_ref(payload), Vec::as_slice);
    if calls.is_empty() {
        return Some("ToolCalls needs at least one tool call".into());
    }
    let has_name = |call: &Value| {
        let function = call.get("function").filter(|function| function.is_object()).unwrap_or(call);
        function["name"].as_str().is_some_and(|name| !name.is_empty())
    };
    let wrong = calls.iter().position(|call| !has_name(call))?;
    Some(format!("ToolCalls: call {wrong} has no function name; a call must have the form {SHAPE}"))
}
