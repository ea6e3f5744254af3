//! Detection of reasoning in an answer, in the format of the model's family.

use super::answer_text::AnswerText;
use super::sequence::SequenceDelta;
use crate::mods::Call;
use memchr::memmem;

/// State of an answer: before, within or after reasoning. Reasoning is at the beginning of an answer; in a family with
/// channels, an answer can have several reasoning parts.
#[derive(Debug)]
pub struct ReasoningState {
    open: Vec<u8>,
    close: Vec<u8>,
    channels: bool,
    /// Changes of state, in order; the first at token 0.
    changes: Vec<Change>,
    /// Length of the text that was checked.
    checked_bytes: usize,
}

#[derive(Debug, Clone, Copy)]
struct Change {
    /// Tokens of the answer at the change.
    tokens: usize,
    /// Start of the text of the new state.
    from: usize,
    /// Reasoning tokens before the change.
    reasoning_tokens: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Reasoning may begin.
    Before,
    Within,
    /// Reasoning has ended.
    After,
}

impl ReasoningState {
    /// Creates the state for a run whose answer has not begun. `markers` replace those of the model's family.
    pub fn new(call: &Call<'_>, markers: Option<(&str, &str)>) -> Self {
        let answer_format = &call.run.answer_format;
        let own = &answer_format.syntax.reasoning_markers;
        let (open, close) = markers.unwrap_or((&own.open, &own.close));
        let prompt = &call.sequence[..call.prompt_len];
        let tail = call.run.vocabulary.decode(&prompt[prompt.len().saturating_sub(open.len() + 4)..]);
        let has_begun = answer_format.thinking || (!open.is_empty() && tail.trim_end().ends_with(open));
        let state = if has_begun { State::Within } else { State::Before };
        Self {
            open: open.as_bytes().to_vec(),
            close: close.as_bytes().to_vec(),
            channels: markers.is_none() && answer_format.syntax.is_channels(),
            changes: vec![Change { tokens: 0, from: 0, reasoning_tokens: 0, state }],
            checked_bytes: 0,
        }
    }

    /// Applies a change of the answer. `answer` already includes the change. `kept` is the length of its text after the
    /// removal, without the appended tokens.
    pub fn apply(&mut self, delta: &SequenceDelta<'_>, answer: &AnswerText, kept: usize) {
        let before = answer.token_count() - delta.added.len();
        while self.changes.len() > 1 && self.last().tokens > before {
            self.changes.pop();
        }
        self.checked_bytes = self.checked_bytes.min(kept).max(self.last().from.min(kept));
        // Checked after each token, so that each change is assigned to its token.
        for tokens in before + 1..=answer.token_count() {
            self.parse(&answer.bytes()[..answer.end_of(tokens)], tokens);
        }
    }

    /// Returns true if the answer is within reasoning.
    pub fn is_within(&self) -> bool {
        self.last().state == State::Within
    }

    /// Returns true if the answer may still begin with reasoning.
    pub fn may_begin(&self) -> bool {
        self.last().state == State::Before && !self.channels
    }

    /// Returns true if the text ends with an incomplete end marker.
    pub fn may_be_closing(&self, answer: &AnswerText) -> bool {
        (1..self.close.len()).any(|length| answer.bytes().ends_with(&self.close[..length]))
    }

    /// Returns the number of reasoning tokens of an answer with `tokens` tokens.
    pub fn reasoning_tokens(&self, tokens: usize) -> usize {
        let last = self.last();
        last.reasoning_tokens + if last.state == State::Within { tokens - last.tokens } else { 0 }
    }

    /// Returns the start of the text after the reasoning: its byte, and the number of tokens before it.
    pub fn answer_from(&self) -> (usize, usize) {
        let last = self.last();
        // An answer without reasoning begins at byte 0.
        if last.state == State::After && last.from > 0 { (last.from, last.tokens) } else { (0, 0) }
    }

    fn last(&self) -> Change {
        *self.changes.last().expect("the first change stays")
    }

    fn parse(&mut self, text: &[u8], tokens: usize) {
        loop {
            let Change { from, state, .. } = self.last();
            let marker = if state == State::Within { &self.close } else { &self.open };
            let found = match state {
                State::After if !self.channels => None,
                State::Before if !self.channels => {
                    let rest = text.trim_ascii_start();
                    let has_begun = rest.starts_with(marker);
                    let end = text.len() - rest.len() + marker.len();
                    if !has_begun && !marker.starts_with(rest) {
                        self.change(tokens, 0, State::After);
                    }
                    has_begun.then_some(end)
                }
                _ => {
                    let start = from.max((self.checked_bytes + 1).saturating_sub(marker.len()));
                    memmem::find(&text[start..], marker).map(|at| start + at + marker.len())
                }
            };
            let Some(end) = found else { break };
            self.checked_bytes = end;
            self.change(tokens, end, if state == State::Within { State::After } else { State::Within });
        }
        self.checked_bytes = text.len();
    }

    fn change(&mut self, tokens: usize, from: usize, state: State) {
        let reasoning_tokens = self.reasoning_tokens(tokens);
        self.changes.push(Change { tokens, from, reasoning_tokens, state });
    }
}

#[cfg(test)]
mod tests {
    use super::ReasoningState;
    use crate::events::TokenId;
    use crate::model::chat::family::ModelFamily;
    use crate::mods::builtin::support::answer_text::AnswerText;
    use crate::mods::builtin::support::sequence::SequenceDelta;
    use crate::mods::builtin::testing::{run, run_of};
    use crate::mods::{Call, CallEvent, RunView};
    use proptest::prelude::*;
    use std::sync::Arc;

    fn begin(run: &Arc<RunView>) -> (ReasoningState, AnswerText) {
        let sequence = run.vocabulary.encode_plain("> ");
        let call = Call {
            run,
            step: 1,
            sequence: &sequence,
            prompt_len: sequence.len(),
            evicted: 0,
            evictions_end: 0,
            max_tokens: 100,
            event: CallEvent::ForwardPass { logits: &[], hidden_states: None },
        };
        (ReasoningState::new(&call, None), AnswerText::new(run))
    }

    fn apply(reasoning: &mut ReasoningState, answer: &mut AnswerText, run: &RunView, removed: usize, text: &str) {
        let added: Vec<TokenId> = text.bytes().map(TokenId::from).collect();
        let logprobs = vec![None; added.len()];
        let delta = SequenceDelta { removed, added: &added, logprobs: &logprobs };
        let kept = answer.apply(&delta, &run.vocabulary);
        reasoning.apply(&delta, answer, kept);
    }

    fn state(reasoning: &ReasoningState, answer: &AnswerText) -> (bool, bool, usize, (usize, usize)) {
        (
            reasoning.may_begin(),
            reasoning.is_within(),
            reasoning.reasoning_tokens(answer.token_count()),
            reasoning.answer_from(),
        )
    }

    #[test]
    fn answer_with_channels_has_several_reasoning_parts() {
        let run = run_of(ModelFamily::Harmony);
        let (mut reasoning, mut answer) = begin(&run);
        apply(&mut reasoning, &mut answer, &run, 0, "<|channel|>analysis<|message|>abc");
        assert_eq!((reasoning.is_within(), reasoning.reasoning_tokens(answer.token_count())), (true, 3));
        apply(&mut reasoning, &mut answer, &run, 0, "<|end|>x<|channel|>analysis<|message|>de");
        assert_eq!((reasoning.is_within(), reasoning.reasoning_tokens(answer.token_count())), (true, 3 + 7 + 2));
    }

    proptest! {
        /// After removals, the state equals that of a new instance with the remaining text.
        #[test]
        fn backtrack_restores_reasoning_state(
            pieces in proptest::collection::vec(("(<think>|</think>|<th|ink>|a| ){0,4}", 0usize..12), 1..8)
        ) {
            let run = run();
            let (mut reasoning, mut answer) = begin(&run);
            let mut text = String::new();
            for (piece, back) in pieces {
                let back = back.min(text.len());
                text.truncate(text.len() - back);
                text.push_str(&piece);
                apply(&mut reasoning, &mut answer, &run, back, &piece);
                let (mut fresh, mut whole) = begin(&run);
                apply(&mut fresh, &mut whole, &run, 0, &text);
                prop_assert_eq!(state(&reasoning, &answer), state(&fresh, &whole), "{}", text);
            }
        }
    }
}
