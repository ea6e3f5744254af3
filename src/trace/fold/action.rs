//! Effects of an action on the rows.

use super::{Fold, MarkKind, flags};
use crate::events::{ActionRecord, ActionType, EventType, RawJson, TokenId, from_object};
use serde::Deserialize;

/// The part of an action's `details` that the fold needs; other details parse as empty.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Details {
    /// Tokens that the action inserts.
    pub tokens: Vec<TokenId>,
    texts: Vec<String>,
    removed: Option<u32>,
    superseded: bool,
    /// Quote writes this field and those below; see [`super::quote`].
    pub backtrack_steps: Option<i32>,
    pub token_count: Option<i64>,
    pub tokens_as_text: Vec<String>,
    pub tool_calls: Option<RawJson>,
}

impl Fold {
    pub(super) fn apply_action(&mut self, action: &ActionRecord) {
        let kind = action.action_type;
        if kind == ActionType::Noop {
            return;
        }
        let details: Details =
            action.details.as_ref().and_then(|details| from_object(details.get()).ok()).unwrap_or_default();
        self.counters.actions += 1;
        let suffix = if details.superseded { " (superseded)" } else { "" };
        let label = format!("{}{suffix}", label(action, &details));
        self.push_mark(MarkKind::Action, &label, action.mod_call_sequence as u32);
        if details.superseded || self.newest.is_none() {
            return;
        }
        if !self.has_specified_actions && details.is_quote(kind) {
            return self.apply_quote_action(kind, &details);
        }
        let after = self.event_count();
        match kind {
            ActionType::Noop | ActionType::ForceTokens => {}
            ActionType::AdjustedLogits => self.step.pending |= flags::TOUCHED,
            ActionType::Backtrack => {
                let requested = action.backtrack_steps.unwrap_or(0).max(0) as u32;
                // `requested` counts a token that was sampled but not appended; it has no row.
                let unappended = u32::from(self.newest == Some(EventType::Sampled));
                let removed = details.removed.unwrap_or_else(|| requested.saturating_sub(unappended)) as usize;
                let removed = removed.min(self.alive.len() - self.prompt_rows);
                self.end_rows(removed, after);
                self.counters.backtracked += removed as u32;
            }
            ActionType::ForceOutput | ActionType::ToolCalls => {
                self.end_rows(self.alive.len() - self.prompt_rows, after);
            }
            ActionType::AdjustedPrefill => self.adjust_prefill(action, &details, after),
            ActionType::EmitError => {
                self.counters.errors += 1;
                self.flag_last_token(flags::TOUCHED | flags::ERROR);
            }
        }
    }

    fn adjust_prefill(&mut self, action: &ActionRecord, details: &Details, after: u32) {
        if !details.tokens.is_empty() {
            return self.replace_prompt(&details.tokens, &details.texts, after, flags::TOUCHED);
        }
        let length = action.new_length.unwrap_or_else(|| i32::from(action.new_prompt.is_some())).max(0) as u32;
        if let Some(count) = self.reserve_placeholders(length) {
            let mut texts = vec![String::new(); count as usize];
            if let Some(first) = texts.first_mut() {
                *first = action.new_prompt.clone().unwrap_or_default();
            }
            self.replace_prompt(&vec![-1; count as usize], &texts, after, flags::TOUCHED);
        } else {
            self.replace_prompt(&[], &[], after, 0);
            self.base = length;
        }
    }

    /// Sets flags of the last visible generated token.
    fn flag_last_token(&mut self, bits: u8) {
        if let Some(&row) = self.alive[self.prompt_rows..].last() {
            self.rows[row as usize].flags |= bits;
        }
    }
}

fn label(action: &ActionRecord, details: &Details) -> String {
    let name = action.action_type.as_str();
    let count = match action.action_type {
        ActionType::Backtrack => {
            action.backtrack_steps.or(details.backtrack_steps).or_else(|| details.removed.map(|removed| removed as i32))
        }
        ActionType::ForceTokens | ActionType::ForceOutput => action.token_count.or(Some(details.tokens.len() as i32)),
        ActionType::AdjustedPrefill => action.new_length.or(Some(details.tokens.len() as i32)),
        _ => None,
    };
    match (count, &action.error_message) {
        (Some(count), _) => format!("{name} {count}"),
        (None, Some(message)) => format!("{name}: {message}"),
        (None, None) => name.to_owned(),
    }
}
