//! Validation of the actions that mods return.

use super::{Action, LogitEdit, ModException, Reply, tool_calls_of};
use crate::events::{EventType, TokenId};
use serde_json::Value;

impl Reply {
    /// Replaces an action that is not permitted at the event or has invalid values with an exception. The vocabulary
    /// has `vocabulary` tokens, and the context of a slot `context`. A reply with an exception has no action.
    #[must_use]
    pub fn validate_action(mut self, event: EventType, vocabulary: usize, context: usize) -> Self {
        if self.exception.is_none()
            && let Some(action) = &self.action
        {
            let error = action.event_error(event).or_else(|| check_action(action, vocabulary, context).err());
            self.exception = error.map(|message| ModException { message, traceback: None });
        }
        if self.exception.is_some() {
            self.action = None;
        }
        self
    }
}

/// Checks the values of an action, for a vocabulary of `vocabulary` tokens and a context of `context` tokens.
/// The error has the expected value and the value that the mod returned.
fn check_action(action: &Action, vocabulary: usize, context: usize) -> Result<(), String> {
    match action {
        Action::ForceTokens(tokens) if tokens.is_empty() => Err("ForceTokens needs at least one token".into()),
        Action::Backtrack { n: 0, .. } => {
            Err("Backtrack needs `n` >= 1, got 0; use ForceTokens to append without removing".into())
        }
        Action::AdjustedPrefill { tokens, .. } if tokens.is_empty() => {
            Err("AdjustedPrefill needs at least one token".into())
        }
        Action::AdjustedPrefill { tokens, .. } if tokens.len() >= context => Err(format!(
            "AdjustedPrefill has {} tokens; it must have fewer than the {context} tokens of a slot's context",
            tokens.len()
        )),
        Action::ForceTokens(tokens) | Action::ForceOutput(tokens) | Action::Backtrack { tokens, .. }
            if tokens.len() > context =>
        {
            Err(format!(
                "{} has {} tokens; it must have at most the {context} tokens of a slot's context",
                action.kind().as_str(),
                tokens.len()
            ))
        }
        Action::AdjustedPrefill { max_tokens: Some(0), .. } => Err("`max_steps` must be 1 or more, got 0".into()),
        Action::ForceTokens(tokens)
        | Action::ForceOutput(tokens)
        | Action::Backtrack { tokens, .. }
        | Action::AdjustedPrefill { tokens, .. } => check_tokens(tokens.iter().copied(), vocabulary),
        Action::AdjustedLogits { temperature: Some(t), .. } if !t.is_finite() || *t < 0.0 => {
            Err(format!("`token_temp` must be a number of 0 or more, got {t}"))
        }
        Action::AdjustedLogits { edit, .. } => check_edit(edit, vocabulary),
        Action::ToolCalls(payload) => check_tool_calls(payload),
        Action::Noop | Action::EmitError { .. } => Ok(()),
    }
}

fn check_tokens(mut tokens: impl Iterator<Item = TokenId>, vocabulary: usize) -> Result<(), String> {
    let unknown = tokens.find(|&token| usize::try_from(token).map_or(true, |token| token >= vocabulary));
    unknown.map_or(Ok(()), |token| {
        Err(format!("token {token} is not in the vocabulary; ids must be from 0 to {}", vocabulary - 1))
    })
}

fn check_edit(edit: &LogitEdit, vocabulary: usize) -> Result<(), String> {
    match edit {
        LogitEdit::Replace(values) if values.len() != vocabulary => Err(format!(
            "the logits must have {vocabulary} entries, one per token of the vocabulary, got {}",
            values.len()
        )),
        // A sum is vectorized; `any` is not.
        LogitEdit::Replace(values)
            if values.iter().map(|&value| u32::from(value.is_nan() || value == f32::INFINITY)).sum::<u32>() > 0 =>
        {
            Err("the logits must not contain NaN or +inf; use -inf to ban a token".into())
        }
        LogitEdit::Set(entries) | LogitEdit::Add(entries) => {
            if entries.iter().any(|(_, value)| value.is_nan() || *value == f32::INFINITY) {
                return Err("an edit of the logits must not be NaN or +inf; use -inf to ban a token".into());
            }
            check_tokens(entries.iter().map(|&(token, _)| token), vocabulary)
        }
        LogitEdit::Replace(_) | LogitEdit::Keep | LogitEdit::Allow(_) => Ok(()),
    }
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
