//! Reasoning budget of a run: counts reasoning tokens, and returns the tokens that end the reasoning when the budget is
//! used up.

use crate::engine::request::ReasoningBudget;
use crate::events::TokenId;
use memchr::memmem;

/// Reasoning tokens of one run, counted against its budget.
#[derive(Debug)]
pub struct ReasoningTracker {
    budget: ReasoningBudget,
    /// Text of the answer so far, including control tokens.
    text: Vec<u8>,
    /// State after each token.
    tokens: Vec<TokenState>,
    /// Reasoning tokens so far.
    used: usize,
    /// Number of tokens when the client requested the end of the reasoning. The request applies to the reasoning at that
    /// position, and again if a mod removes the tokens that ended it.
    end_requested_at: Option<usize>,
}

#[derive(Debug, Clone, Copy)]
struct TokenState {
    /// Start of the token's text.
    start: usize,
    /// True if the text after the token is reasoning.
    is_reasoning: bool,
    /// True if the token counts as a reasoning token.
    counts: bool,
}

impl ReasoningTracker {
    pub fn new(budget: ReasoningBudget) -> Self {
        Self { budget, text: Vec::new(), tokens: Vec::new(), used: 0, end_requested_at: None }
    }

    /// Processes an appended token.
    pub fn push(&mut self, piece: &[u8]) {
        let (was_reasoning, start) = (self.is_reasoning(), self.text.len());
        let marker = if was_reasoning { &self.budget.close } else { &self.budget.open };
        self.text.extend_from_slice(piece);
        // The marker may start in earlier tokens, but not before the token that ended the previous marker.
        let first = start.saturating_sub(marker.len().saturating_sub(1));
        let mut recent = self.tokens.iter().rev().take_while(|token| token.start > first);
        let search_from = recent.find(|token| token.is_reasoning != was_reasoning).map_or(first, |token| token.start);
        let ends_marker = !marker.is_empty() && memmem::find(&self.text[search_from..], marker.as_bytes()).is_some();
        let counts = was_reasoning && !ends_marker;
        self.used += usize::from(counts);
        self.tokens.push(TokenState { start, is_reasoning: was_reasoning != ends_marker, counts });
    }

    /// Removes the last `count` tokens.
    pub fn pop(&mut self, count: usize) {
        let removed = self.tokens.split_off(self.tokens.len().saturating_sub(count));
        self.used -= removed.iter().filter(|token| token.counts).count();
        if let Some(first) = removed.first() {
            self.text.truncate(first.start);
        }
        let is_reasoning = self.is_reasoning();
        self.end_requested_at = match self.end_requested_at {
            Some(at) if at > self.tokens.len() => is_reasoning.then_some(self.tokens.len()),
            at => at,
        };
    }

    /// Ends the current reasoning, as if the budget were used up. Returns `false` if the run is not reasoning.
    pub fn request_end(&mut self) -> bool {
        let is_reasoning = self.is_reasoning();
        self.end_requested_at = is_reasoning.then_some(self.tokens.len());
        is_reasoning
    }

    /// Returns the tokens to append if the reasoning must end: the budget is used up, or the client requested the end.
    pub fn closing_tokens(&self) -> Option<&[TokenId]> {
        let must_end = self.is_reasoning() && (self.is_end_requested() || self.used >= self.budget.tokens as usize);
        (must_end && !self.budget.closing_tokens.is_empty()).then_some(&self.budget.closing_tokens)
    }

    /// Returns the reason for the end of the reasoning, for the trace.
    pub fn note(&self) -> String {
        if self.is_end_requested() {
            return "the client ended the reasoning".into();
        }
        format!("the budget of {} reasoning tokens is used up", self.budget.tokens)
    }

    /// Returns true if the client requested the end of the current reasoning.
    fn is_end_requested(&self) -> bool {
        self.end_requested_at.is_some_and(|at| self.tokens[at..].iter().all(|token| token.is_reasoning))
    }

    fn is_reasoning(&self) -> bool {
        self.tokens.last().map_or(self.budget.starts_in_reasoning, |token| token.is_reasoning)
    }
}

#[cfg(test)]
mod tests {
    use super::{ReasoningBudget, ReasoningTracker};

    fn with_budget(tokens: u32, starts_in_reasoning: bool) -> ReasoningTracker {
        let (open, close) = ("<think>".into(), "</think>".into());
        ReasoningTracker::new(ReasoningBudget { tokens, open, close, closing_tokens: vec![7], starts_in_reasoning })
    }

    /// Pushes tokens. Returns for each whether the reasoning must end after it.
    fn pushed(tracker: &mut ReasoningTracker, pieces: &[&str]) -> Vec<bool> {
        pieces
            .iter()
            .map(|piece| {
                tracker.push(piece.as_bytes());
                tracker.closing_tokens().is_some()
            })
            .collect()
    }

    #[test]
    fn reasoning_ends_when_budget_is_used_up() {
        let mut tracker = with_budget(2, false);
        assert_eq!(pushed(&mut tracker, &["a", "<th", "ink>", "b", "c"]), [false, false, false, false, true]);
        assert_eq!(pushed(&mut tracker, &["</think>", "d", "e"]), [false; 3]);
        let again = pushed(&mut tracker, &["<think>"]);
        assert_eq!(again, [true], "all reasoning shares one budget");
    }

    #[test]
    fn reasoning_that_starts_in_prompt_counts() {
        let mut tracker = with_budget(3, true);
        assert_eq!(
            pushed(&mut tracker, &["a", "b", "</thi", "nk>", "c", "d"]),
            [false, false, true, false, false, false]
        );
        let mut none = with_budget(0, true);
        assert!(none.closing_tokens().is_some());
        none.push(b"x</think>");
        assert!(none.closing_tokens().is_none());
    }

    #[test]
    fn client_can_end_reasoning() {
        let mut tracker = with_budget(u32::MAX, false);
        assert!(!tracker.request_end(), "no reasoning to end");
        assert_eq!(pushed(&mut tracker, &["<think>", "a"]), [false; 2]);
        assert!(tracker.request_end());
        assert!(tracker.closing_tokens().is_some() && tracker.note().contains("client"));
        assert_eq!(pushed(&mut tracker, &["</think>", "b", "<think>", "c"]), [false; 4]);
    }

    #[test]
    fn requested_end_applies_again_after_pop() {
        let mut tracker = with_budget(u32::MAX, false);
        pushed(&mut tracker, &["<think>", "a", "b"]);
        assert!(tracker.request_end());
        assert_eq!(pushed(&mut tracker, &["</think>"]), [false]);
        tracker.pop(1);
        assert!(tracker.closing_tokens().is_some() && tracker.note().contains("client"));
        tracker.pop(1);
        assert_eq!(pushed(&mut tracker, &["c"]), [true], "the same reasoning");
        tracker.pop(3);
        assert_eq!(pushed(&mut tracker, &["<think>", "a"]), [false; 2], "other reasoning");
    }

    #[test]
    fn pop_restores_budget() {
        let mut tracker = with_budget(2, true);
        assert_eq!(pushed(&mut tracker, &["a", "b"]), [false, true]);
        tracker.pop(1);
        assert!(tracker.closing_tokens().is_none());
        assert_eq!(pushed(&mut tracker, &["</think>"]), [false]);
        tracker.pop(9);
        assert_eq!(pushed(&mut tracker, &["x", "y"]), [false, true]);
    }
}
