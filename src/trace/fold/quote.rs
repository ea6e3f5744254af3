//! Actions of Quote's traces, which have their fields in `details`. Another engine may store its whole actions there, with
//! the same names, but it also has the specified fields next to `details`; see [`Fold::set_has_specified_actions`].
//!
//! Quote keeps a queue of tokens for each step. `ForceTokens` and `Backtrack` fill it; the next `Added` event of the
//! same step lists it. Tokens that an action at `Added` queues become part of the answer without an event. The number
//! of tokens that a `Backtrack` removes depends on the event and on whether other tokens replace them:
//!
//! | event | with tokens | without |
//! |---|---|---|
//! | `ForwardPass` | n + 1 | n |
//! | `Sampled` | n | n − 1 |
//! | `Added` | n, at least the added token | n − 1 |
//! | `Added`, queue not empty | n − 1 before the queued tokens | the same |
//!
//! Quote calls mods with `Prefilled` before every step, but records only the first as an event; the other calls refer
//! to the event before them.

use super::action::Details;
use super::row::{placeholder_text, special_flag};
use super::{Fold, MAX_LABEL_CHARS, NEVER, TokenRow, flags};
use crate::events::{ActionType, Event, EventType, TokenId};

/// Returns the tokens of an event. If a `Backtrack` queues tokens after a forced `Added`, Quote appends them to the
/// list of that event without counting them; they are left out here.
pub(super) fn listed_tokens(event: &Event) -> Option<&[TokenId]> {
    let tokens = event.added_tokens.as_deref()?;
    let counted = event.added_token_count.and_then(|count| usize::try_from(count).ok());
    let counted = counted.filter(|&count| event.forced == Some(true) && (1..tokens.len()).contains(&count));
    Some(&tokens[..counted.unwrap_or(tokens.len())])
}

impl Details {
    /// Returns true if the action has Quote's form.
    pub fn is_quote(&self, kind: ActionType) -> bool {
        match kind {
            ActionType::Backtrack => self.backtrack_steps.is_some(),
            ActionType::ToolCalls => self.tool_calls.as_ref().is_some_and(|calls| calls.get().starts_with('"')),
            ActionType::AdjustedPrefill | ActionType::ForceTokens | ActionType::ForceOutput => {
                self.token_count.is_some() || !self.tokens_as_text.is_empty()
            }
            ActionType::Noop | ActionType::AdjustedLogits | ActionType::EmitError => false,
        }
    }
}

impl Fold {
    pub(super) fn apply_quote_action(&mut self, kind: ActionType, details: &Details) {
        for (&token, text) in details.tokens.iter().zip(&details.tokens_as_text) {
            if text.chars().nth(MAX_LABEL_CHARS).is_none() {
                self.texts.insert(token, text.as_str().into());
            }
        }
        let after = self.event_count();
        let at_prefilled = self.call_event_type == Some(EventType::Prefilled);
        match kind {
            ActionType::AdjustedPrefill if self.newest == Some(EventType::Prefilled) => {
                self.replace_prompt(&details.tokens, &details.tokens_as_text, after, flags::TOUCHED);
            }
            ActionType::ForceTokens if !at_prefilled && !self.step.forced => {
                self.step.forced = true;
                if self.at_added() {
                    self.force_after_added(details, after);
                }
            }
            ActionType::Backtrack if !at_prefilled => self.apply_quote_backtrack(details, after),
            ActionType::ForceOutput => self.replace_answer(&details.tokens, &details.tokens_as_text, after),
            ActionType::ToolCalls => {
                let text = details.tool_calls.as_ref().and_then(|calls| serde_json::from_str(calls.get()).ok());
                self.replace_answer(&[-1], &[text.unwrap_or_default()], after);
            }
            _ => {}
        }
    }

    fn at_added(&self) -> bool {
        self.call_event_type == Some(EventType::Added) && self.newest == Some(EventType::Added)
    }

    /// Returns the indexes of the visible rows since the newest `Added`.
    fn added_rows(&self) -> &[u32] {
        let from = self.alive.partition_point(|&row| (row as usize) < self.added_from);
        &self.alive[from.max(self.prompt_rows)..]
    }

    /// Appends the tokens that a `ForceTokens` at `Added` forces. Quote lists the added tokens before them.
    fn force_after_added(&mut self, details: &Details, after: u32) {
        let added = self.added_rows();
        let listed = details.tokens.len() >= added.len()
            && added.iter().zip(&details.tokens).all(|(&row, &token)| self.rows[row as usize].token == token);
        let from = if listed { added.len() } else { 0 };
        self.append_forced(&details.tokens[from..], details.tokens_as_text.get(from..).unwrap_or_default(), after);
        self.queued = true;
    }

    fn apply_quote_backtrack(&mut self, details: &Details, after: u32) {
        let steps = details.backtrack_steps.unwrap_or(0).max(0) as usize;
        let replaces = !details.tokens.is_empty();
        if !self.at_added() {
            let sampled = self.call_event_type == Some(EventType::Sampled);
            let removed = if replaces { steps + usize::from(!sampled) } else { steps.saturating_sub(sampled.into()) };
            return self.remove_generated(removed, after);
        }
        let before = steps.saturating_sub(1);
        if self.queued {
            self.remove_before_queued(before, after);
        } else {
            self.remove_generated(before + usize::from(replaces), after);
        }
        if replaces {
            self.append_forced(&details.tokens, &details.tokens_as_text, after);
        }
        self.queued |= replaces;
    }

    /// Ends the last `count` generated rows.
    fn remove_generated(&mut self, count: usize, after: u32) {
        let removed = count.min(self.alive.len() - self.prompt_rows);
        self.end_rows(removed, after);
        self.counters.backtracked += removed as u32;
    }

    /// Ends the last `count` generated rows before the rows of the newest `Added`. The rows of the newest `Added` end
    /// too and are appended again. A hostile trace may repeat this without limit, so the appended rows count towards
    /// the limit of placeholder rows.
    fn remove_before_queued(&mut self, count: usize, after: u32) {
        let queued = self.added_rows().len();
        let removed = count.min(self.alive.len() - self.prompt_rows - queued);
        if removed == 0 || self.reserve_placeholders(queued as u32).is_none() {
            return;
        }
        let moved: Vec<TokenRow> = self.added_rows().iter().map(|&row| self.rows[row as usize].clone()).collect();
        self.end_rows(removed + queued, after);
        for row in moved {
            self.append(TokenRow { added_at: after, ..row });
        }
        self.counters.backtracked += removed as u32;
    }

    fn replace_answer(&mut self, tokens: &[TokenId], texts: &[String], after: u32) {
        self.end_rows(self.alive.len() - self.prompt_rows, after);
        self.append_forced(tokens, texts, after);
    }

    fn append_forced(&mut self, tokens: &[TokenId], texts: &[String], after: u32) {
        for (index, &token) in tokens.iter().enumerate() {
            let text = texts.get(index).map_or_else(|| placeholder_text(token), |text| text.as_str().into());
            self.append(TokenRow {
                token,
                pos: 0,
                added_at: after,
                removed_at: NEVER,
                logprob: None,
                rank: None,
                entropy: None,
                flags: flags::FORCED | flags::TOUCHED | special_flag(&text),
                dt_us: 0,
                text,
            });
        }
        self.counters.forced += tokens.len() as u32;
        self.assume_end();
    }
}
