//! Effects of a mod's action on sequence, KV cache, text and trace. No other module decides these.

use crate::engine::kv::conversation::SlotHistory;
use crate::engine::output::Output;
use crate::engine::run::dispatch::ActionEffect;
use crate::engine::run::distribution::TokenDistribution;
use crate::engine::run::{Run, RunState, dispatch, distribution};
use crate::events::{EventType, FinishReason, TokenId, TokenMeasurement};
use crate::mods::{Action, LogitEdit, Reply};
use serde_json::Value;

/// Maximum tokens recorded for an edit of the logits.
const MAX_SHIFTED_TOKENS: usize = 8;

impl Run {
    /// Records a reply, applies an edit of prompt or logits, and keeps the first action that changes control.
    pub fn apply_reply(&mut self, index: usize, reply: Reply) {
        let RunState::Dispatching(mut dispatch) = std::mem::replace(&mut self.state, RunState::Ended) else { return };
        let mut mods = std::mem::take(&mut self.mods);
        let (vocabulary, context) = (self.view.vocabulary.len(), self.context);
        let recorded = dispatch.record_reply(&mut mods[index], reply, &mut self.event_buffer, |action| {
            action_error(action, vocabulary, context)
        });
        let effect = self.effect(dispatch.event, &recorded.action);
        let view = std::sync::Arc::clone(&self.view);
        dispatch::record_action(&recorded, &mods[index], &view.vocabulary, &effect, &mut self.event_buffer);
        self.mods = mods;
        match recorded.action {
            Action::Noop => {}
            Action::AdjustedPrefill { tokens, max_steps } => self.adjust_prefill(tokens, max_steps),
            Action::AdjustedLogits { edit, temperature } => {
                self.edit_logits(edit);
                self.edited_distribution = effect.edited;
                self.draw_temperature = temperature.or(self.draw_temperature);
            }
            control => {
                if !recorded.superseded {
                    dispatch.winner = Some(control);
                }
            }
        }
        self.state = RunState::Dispatching(dispatch);
    }

    /// Applies the action that won an event.
    pub fn apply_action(&mut self, event: EventType, action: Action) {
        let step = if event == EventType::Added || self.step == 0 { self.step + 1 } else { self.step };
        match action {
            Action::ForceTokens(tokens) => {
                if event == EventType::Added {
                    self.send_text();
                }
                self.drawn = None;
                self.force(tokens, step);
            }
            Action::Backtrack { n, tokens } => {
                let (removed, _) = self.clamp_backtrack(event, n);
                self.drawn = None;
                self.remove(removed);
                if tokens.is_empty() {
                    self.continue_from_end();
                } else {
                    self.force(tokens, step);
                }
            }
            Action::ForceOutput(mut tokens) => {
                self.drawn = None;
                self.truncate_at_end(&mut tokens);
                self.retract(self.sequence.len() - self.prompt_len, 0);
                self.sequence.extend_from_slice(&tokens);
                self.token_attention.clear_drawn();
                if !tokens.is_empty() {
                    let unmeasured = tokens.iter().map(|&token| unmeasured(token)).collect();
                    self.record_added(unmeasured, Vec::new(), true, step);
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
    pub fn finish_forced(&mut self, start: usize, mut measures: Vec<TokenMeasurement>) {
        for &token in &self.sequence[start + measures.len().min(self.sequence.len() - start)..] {
            measures.push(unmeasured(token));
        }
        let step = self.forced_step;
        self.step = self.step.max(step);
        self.record_added(measures, Vec::new(), true, step);
    }

    /// Appends a list of tokens. One decode for the whole list also gives the probability of each token.
    pub fn force(&mut self, mut tokens: Vec<TokenId>, step: u32) {
        if step > self.request.limits.max_steps {
            return self.finish_at_max_steps();
        }
        self.truncate_at_end(&mut tokens);
        // Tokens that do not fit are dropped below.
        let _ = self.make_room(tokens.len());
        let room =
            self.max_tokens.saturating_sub(self.generated()).min(self.context.saturating_sub(self.sequence.len()));
        let ends = tokens.last().is_some_and(|&token| self.ends_generation(token));
        // An end-of-generation token does not count as a token of the answer.
        if tokens.len() - usize::from(ends) > room {
            tokens.truncate(room);
        } else if self.sequence.len() + tokens.len() > self.context {
            tokens.pop();
        }
        if tokens.is_empty() {
            return self.finish(FinishReason::Length, None, None);
        }
        let start = self.sequence.len();
        self.token_attention.clear_drawn();
        if self.saved_logits_valid {
            self.token_attention.push_drawn(self.attention.take());
        }
        let first = self.saved_logits_valid.then(|| {
            let distribution = self.distribution.unwrap_or_else(|| TokenDistribution::new(&self.saved_logits));
            self.measure(distribution, &self.saved_logits, tokens[0])
        });
        let outputs_from = if first.is_some() { start } else { start - 1 };
        self.kv_len = self.kv_len.min(outputs_from);
        self.saved_logits_valid = false;
        self.sequence.extend_from_slice(&tokens);
        self.forced = Some((start, first.into_iter().collect()));
        self.forced_step = step;
        self.state = RunState::Decode { outputs_from };
    }

    /// Removes tokens from the end of the sequence, with everything derived from them.
    fn remove(&mut self, count: usize) {
        if count > 0 {
            self.retract(count, self.evictions.generated);
        }
    }

    /// Removes `count` tokens from the end. `evicted` is the number of evicted tokens that remain in the answer.
    fn retract(&mut self, count: usize, evicted: usize) {
        let before = self.generated();
        self.sequence.truncate(self.sequence.len() - count);
        self.evictions.generated = evicted;
        self.kv_len = self.kv_len.min(self.sequence.len());
        self.saved_logits_valid = false;
        let generated = self.generated();
        let unsent_from = before - self.unsent.len();
        self.unsent.truncate(generated.saturating_sub(unsent_from));
        self.token_attention.truncate(self.unsent.len());
        let tokens = unsent_from.saturating_sub(generated);
        self.report_retraction(tokens);
        let chars = self.output_text.truncate(generated);
        if chars > 0 || (tokens > 0 && !self.request.report.per_token) {
            self.outbox.push_back(Output::Retract { chars, tokens });
        }
        self.sampler.rewind(generated);
        if let Some(constraint) = &mut self.constraint {
            constraint.rewind(count);
        }
        if let Some(thinking) = &mut self.thinking {
            thinking.pop(count);
        }
    }

    fn adjust_prefill(&mut self, tokens: Vec<TokenId>, max_steps: Option<u32>) {
        self.prompt_len = tokens.len();
        self.prompt_tokens = tokens.len();
        self.history = SlotHistory::default();
        self.sequence = tokens;
        if let Some(max_steps) = max_steps {
            self.max_tokens = self.request.limits.capped(max_steps) as usize;
        }
        // The spans belong to the prompt that was replaced.
        self.request.spans.clear();
    }

    fn edit_logits(&mut self, edit: LogitEdit) {
        match edit {
            LogitEdit::Keep => {}
            LogitEdit::Replace(values) => self.edited_logits = Some(values),
            edit => apply_edit(self.edited_logits.get_or_insert_with(|| self.saved_logits.clone()), &edit),
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
        let own = self.sequence.len() - self.prompt_len.max(1);
        (requested.min(own), requested > own)
    }

    fn effect(&self, event: EventType, action: &Action) -> ActionEffect {
        match action {
            Action::Backtrack { n, .. } => {
                let (removed, clamped) = self.clamp_backtrack(event, *n);
                ActionEffect { removed: Some(removed as u32), clamped, ..ActionEffect::default() }
            }
            Action::AdjustedLogits { edit, .. } if self.event_buffer.is_recorded() => {
                let (shifted, edited) = self.shifted_probabilities(edit);
                ActionEffect { shifted, edited, ..ActionEffect::default() }
            }
            _ => ActionEffect::default(),
        }
    }

    /// Returns the tokens whose probability an edit changes most, as `(token, before, after)`, and the distribution
    /// after the edit.
    fn shifted_probabilities(&self, edit: &LogitEdit) -> (Vec<(TokenId, f32, f32)>, Option<TokenDistribution>) {
        let before = self.edited_logits.as_deref().unwrap_or(&self.saved_logits);
        let mut edited = Vec::new();
        let after = match edit {
            LogitEdit::Keep => return (Vec::new(), self.edited_distribution),
            LogitEdit::Replace(values) => values,
            LogitEdit::Set(_) | LogitEdit::Add(_) | LogitEdit::Allow(_) => {
                edited.extend_from_slice(before);
                apply_edit(&mut edited, edit);
                &edited
            }
        };
        let known = if self.edited_logits.is_none() { self.distribution } else { self.edited_distribution };
        let was = known.unwrap_or_else(|| TokenDistribution::new(before));
        let is = TokenDistribution::new(after);
        let shifted = distribution::top_shifts((was, before), (is, after), MAX_SHIFTED_TOKENS)
            .into_iter()
            .filter(|&(_, change)| change > 0.0)
            .map(|(token, _)| (token, was.prob(before[token as usize]), is.prob(after[token as usize])))
            .collect();
        (shifted, Some(is))
    }
}

fn unmeasured(token: TokenId) -> TokenMeasurement {
    TokenMeasurement { token, text: String::new(), logprob: None, rank: None, entropy: None }
}

fn apply_edit(logits: &mut [f32], edit: &LogitEdit) {
    match edit {
        LogitEdit::Keep => {}
        LogitEdit::Set(entries) => entries.iter().for_each(|&(token, value)| logits[token as usize] = value),
        LogitEdit::Add(entries) => {
            for &(token, value) in entries {
                let logit = &mut logits[token as usize];
                // Two large numbers can add up to infinity, which the sampler cannot handle.
                *logit = (*logit + value).min(f32::MAX);
            }
        }
        LogitEdit::Allow(mask) => {
            for (logit, &allowed) in logits.chunks_mut(32).zip(mask.as_slice()) {
                for (bit, logit) in logit.iter_mut().enumerate() {
                    if allowed >> bit & 1 == 0 {
                        *logit = f32::NEG_INFINITY;
                    }
                }
            }
        }
        LogitEdit::Replace(values) => logits.copy_from_slice(values),
    }
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
