//! Budget of reasoning tokens: counts them, and ends the reasoning when the budget is used up.

use crate::engine::request::ReasoningBudget;
use crate::events::TokenId;

/// Reasoning of one run.
#[derive(Debug)]
pub struct ReasoningTracker {
    budget: ReasoningBudget,
    /// Text of the answer so far, including control tokens.
    text: Vec<u8>,
    /// State after each token.
    steps: Vec<TokenState>,
    /// Reasoning tokens so far.
    spent: usize,
    /// True if the client requested the end of the current reasoning.
    ended: bool,
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
        Self { budget, text: Vec::new(), steps: Vec::new(), spent: 0, ended: false }
    }

    /// Processes an appended token.
    pub fn push(&mut self, piece: &[u8]) {
        let (was, start) = (self.is_reasoning(), self.text.len());
        let marker = if was { &self.budget.close } else { &self.budget.open };
        self.text.extend_from_slice(piece);
        // A marker may have begun in earlier tokens, but not before the last change of state.
        let first = start.saturating_sub(marker.len().saturating_sub(1));
        let mut recent = self.steps.iter().rev().take_while(|step| step.start > first);
        let window = recent.find(|step| step.is_reasoning != was).map_or(first, |step| step.start);
        let switched = !marker.is_empty() && find(&self.text[window..], marker.as_bytes());
        let counts = was && !switched;
        self.spent += usize::from(counts);
        self.steps.push(TokenState { start, is_reasoning: was != switched, counts });
        self.ended &= !switched;
    }

    /// Removes the last `count` tokens.
    pub fn pop(&mut self, count: usize) {
        let removed = self.steps.split_off(self.steps.len().saturating_sub(count));
        self.spent -= removed.iter().filter(|step| step.counts).count();
        if let Some(first) = removed.first() {
            self.text.truncate(first.start);
        }
    }

    /// Ends the current reasoning, as if the budget were used up. Returns `false` if there is none.
    pub fn request_end(&mut self) -> bool {
        self.ended = self.is_reasoning();
        self.ended
    }

    /// Returns the tokens to append if the budget is used up, or if the client ended the reasoning.
    pub fn closing_tokens(&self) -> Option<&[TokenId]> {
        let over = self.is_reasoning() && (self.ended || self.spent >= self.budget.tokens as usize);
        (over && !self.budget.closing_tokens.is_empty()).then_some(&self.budget.closing_tokens)
    }

    /// Returns a note for the trace.
    pub fn note(&self) -> String {
        if self.ended {
            return "the client ended the reasoning".into();
        }
        format!("the budget of {} reasoning tokens is used up", self.budget.tokens)
    }

    fn is_reasoning(&self) -> bool {
        self.steps.last().map_or(self.budget.begun, |step| step.is_reasoning)
    }
}

fn find(text: &[u8], marker: &[u8]) -> bool {
    text.windows(marker.len()).any(|window| window == marker)
}

#[cfg(test)]
mod tests {
    use super::{ReasoningBudget, ReasoningTracker};

    fn with_budget(tokens: u32, begun: bool) -> ReasoningTracker {
        let (open, close) = ("<think>".into(), "</think>".into());
        ReasoningTracker::new(ReasoningBudget { tokens, open, close, closing_tokens: vec![7], begun })
    }

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
    fn reasoning_ends_when_budget_is_spent() {
        let mut tracker = with_budget(2, false);
        assert_eq!(pushed(&mut tracker, &["a", "<th", "ink>", "b", "c"]), [false, false, false, false, true]);
        assert_eq!(pushed(&mut tracker, &["</think>", "d", "e"]), [false; 3]);
        let again = pushed(&mut tracker, &["<think>"]);
        assert_eq!(again, [true], "all reasoning shares one budget");
    }

    #[test]
    fn reasoning_open_at_start_can_end_by_itself() {
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
