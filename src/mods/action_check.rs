//! Validation of the actions that mods return.

use super::{Action, LogitEdit, ModException, Reply, tool_calls_of};
use crate::events::{EventType, TokenId};
use serde_json::Value;

impl Reply {
    /// Replaces an action that is not permitted at the event or has invalid values with an exception. The vocabulary
    /// has `vocabulary` tokens. A reply with an exception has no action. Another call has no effect, because the check may
    /// read all logits.
    #[must_use]
    pub fn validate_action(self, event: EventType, vocabulary: usize) -> Self {
        if self.is_validated {
            return self;
        }
        Self { is_validated: true, ..self.reject_action(event, |action| check_action(action, event, vocabulary)) }
    }

    /// Replaces an action with more tokens than fit into the context of a slot, of `context` tokens, with an exception.
    #[must_use]
    pub fn limit_tokens(self, event: EventType, context: usize) -> Self {
        self.reject_action(event, |action| check_token_count(action, context))
    }

    /// Replaces an action for which the check fails with an exception.
    fn reject_action(mut self, event: EventType, check: impl FnOnce(&Action) -> Result<(), String>) -> Self {
        if self.exception.is_none()
            && let Some(action) = &self.action
        {
            let error = check(action).err();
            self.exception = error.map(|problem| ModException::invalid_action(event, &problem));
        }
        if self.exception.is_some() {
            self.action = None;
        }
        self
    }
}

/// Checks an action, for a vocabulary of `vocabulary` tokens. The error has the expected value and the value that the mod
/// returned.
fn check_action(action: &Action, event: EventType, vocabulary: usize) -> Result<(), String> {
    let name = action.kind().as_str();
    if !action.permitted_on(event) {
        return Err(format!("{name} is not permitted at this event"));
    }
    match action {
        Action::ForceTokens(tokens) | Action::AdjustedPrefill { tokens, .. } if tokens.is_empty() => {
            Err(format!("{name} needs at least one token"))
        }
        Action::Backtrack { n: 0, .. } => {
            Err("Backtrack needs `n` >= 1, got 0; use ForceTokens to append without removing".into())
        }
        Action::AdjustedPrefill { max_tokens: Some(0), .. } => Err("`max_tokens` must be 1 or more, got 0".into()),
        Action::ForceTokens(tokens)
        | Action::ForceOutput(tokens)
        | Action::Backtrack { tokens, .. }
        | Action::AdjustedPrefill { tokens, .. } => tokens.iter().try_for_each(|&token| check_token(token, vocabulary)),
        Action::AdjustedLogits { temperature: Some(t), .. } if !t.is_finite() || *t < 0.0 => {
            Err(format!("`token_temp` must be a number of 0 or more, got {t}"))
        }
        Action::AdjustedLogits { edit, .. } => check_edit(edit, vocabulary),
        Action::ToolCalls(payload) => check_tool_calls(payload),
        Action::Noop | Action::EmitError { .. } => Ok(()),
    }
}

/// Checks the number of tokens of an action, for a context of `context` tokens.
fn check_token_count(action: &Action, context: usize) -> Result<(), String> {
    let (tokens, max, limit) = match action {
        Action::AdjustedPrefill { tokens, .. } => (tokens, context.saturating_sub(1), "fewer than"),
        Action::ForceTokens(tokens) | Action::ForceOutput(tokens) | Action::Backtrack { tokens, .. } => {
            (tokens, context, "at most")
        }
        _ => return Ok(()),
    };
    if tokens.len() <= max {
        return Ok(());
    }
    let (name, count) = (action.kind().as_str(), tokens.len());
    Err(format!("{name} has {count} tokens; it must have {limit} the {context} tokens of a slot's context"))
}

fn check_token(token: TokenId, vocabulary: usize) -> Result<(), String> {
    if usize::try_from(token).is_ok_and(|token| token < vocabulary) {
        return Ok(());
    }
    Err(format!("token {token} is not in the vocabulary; ids must be from 0 to {}", vocabulary - 1))
}

fn check_edit(edit: &LogitEdit, vocabulary: usize) -> Result<(), String> {
    match edit {
        LogitEdit::Replace(values) => {
            if values.len() != vocabulary {
                let count = values.len();
                return Err(format!(
                    "the logits must have {vocabulary} entries, one per token of the vocabulary, got {count}"
                ));
            }
            // Without an early exit, so that the compiler vectorizes the loop.
            let (unusable, possible) = values.iter().fold((0, 0), |(unusable, possible): (u32, u32), &value| {
                (unusable + u32::from(!is_usable(value)), possible + u32::from(value > f32::NEG_INFINITY))
            });
            if let (1.., Some(token)) = (unusable, values.iter().position(|&value| !is_usable(value))) {
                return Err(unusable_logit(token, values[token]));
            }
            if possible == 0 {
                return Err("all tokens are banned: every logit is -inf".into());
            }
            Ok(())
        }
        LogitEdit::Set(entries) | LogitEdit::Add(entries) => entries.iter().try_for_each(|&(token, value)| {
            check_token(token, vocabulary)?;
            if is_usable(value) { Ok(()) } else { Err(unusable_logit(token, value)) }
        }),
        LogitEdit::Keep | LogitEdit::Allow(_) => Ok(()),
    }
}

/// Returns true if the sampler can handle the logit; -inf bans a token.
fn is_usable(logit: f32) -> bool {
    !logit.is_nan() && logit < f32::INFINITY
}

fn unusable_logit(token: impl std::fmt::Display, value: f32) -> String {
    format!("the logit of token {token} must not be {value}; use -inf to ban a token")
}

/// Checks the payload of `ToolCalls`.
fn check_tool_calls(payload: &Value) -> Result<(), String> {
    const SHAPE: &str = r#"{"id": …, "type": "function", "function": {"name": …, "arguments": …}}"#;
    let calls = tool_calls_of(payload);
    if calls.is_empty() {
        return Err("ToolCalls needs at least one tool call".into());
    }
    let has_name = |call: &Value| {
        let function = call.get("function").filter(|function| function.is_object()).unwrap_or(call);
        function["name"].as_str().is_some_and(|name| !name.is_empty())
    };
    match calls.iter().position(|call| !has_name(call)) {
        None => Ok(()),
        Some(wrong) => Err(format!("ToolCalls: call {wrong} has no function name; a call must have the form {SHAPE}")),
    }
}
