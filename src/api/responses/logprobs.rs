//! Log-probabilities of the text of a response. Tokens of reasoning, of calls and of markers are not part of it.

use crate::api::shared::chat::{ChatDelta, ChatStream, ChatUpdate};
use crate::api::shared::generation::{CollectedTokens, OPENAI_NO_LOGPROB, ProbabilityFormatter, TokenProbabilities};
use crate::engine::MeasuredToken;
use std::ops::Range;

/// The tokens of an answer, divided into those of the text and others. Empty unless log-probabilities are requested.
#[derive(Debug, Default)]
pub(super) struct TextTokens {
    tokens: CollectedTokens,
    /// For each assigned token, true if it belongs to the text.
    in_text: Vec<bool>,
}

impl TextTokens {
    /// Adds the tokens of an update, and removes those that it retracts. Its deltas then assign them.
    pub(super) fn add(&mut self, chat: &ChatStream, update: &mut ChatUpdate) {
        if chat.options.logprobs.is_some() {
            self.update(update.retracted_tokens, std::mem::take(&mut update.tokens));
        }
    }

    fn update(&mut self, retracted: usize, added: Vec<MeasuredToken>) {
        self.in_text.truncate(self.tokens.len().saturating_sub(retracted));
        self.tokens.update(retracted, added);
    }

    /// Assigns the tokens of a delta, and returns those of its text.
    pub(super) fn assign(&mut self, delta: &ChatDelta) -> Range<usize> {
        match delta {
            ChatDelta::Content(text) => self.assign_text(text, true),
            ChatDelta::Reasoning(text) => self.assign_text(text, false),
            _ => self.assigned()..self.assigned(),
        }
    }

    /// Returns the number of assigned tokens.
    pub(super) fn assigned(&self) -> usize {
        self.in_text.len()
    }

    /// Assigns the tokens of a text, which is close to the end of the answer so far. Tokens before it, such as markers,
    /// belong to no text; tokens after it stay unassigned.
    fn assign_text(&mut self, text: &str, in_text: bool) -> Range<usize> {
        let first = self.assigned();
        if text.is_empty() {
            return first..first;
        }
        let unassigned = &self.tokens[first..];
        let joined: String = unassigned.iter().map(|token| token.measurement.text.as_str()).collect();
        // A text that a mod changed may differ from its tokens.
        let start = joined.rfind(text).unwrap_or(0);
        let end = if joined[start..].starts_with(text) { start + text.len() } else { joined.len() };
        let (mut at, mut before, mut within) = (0, 0, 0);
        for token in unassigned {
            let next = at + token.measurement.text.len();
            if at >= end {
                break;
            }
            // The text of a token that ends inside of a character is empty.
            if next > start || at == start {
                within += 1;
            } else {
                before += 1;
            }
            at = next;
        }
        self.in_text.extend(std::iter::repeat_n(false, before));
        self.in_text.extend(std::iter::repeat_n(in_text, within));
        first + before..self.assigned()
    }

    /// Returns the log-probabilities of those tokens in a range that belong to the text.
    pub(super) fn logprobs(&self, chat: &ChatStream, range: Range<usize>) -> Vec<TokenProbabilities> {
        let Some(top) = chat.options.logprobs else { return Vec::new() };
        let formatter = ProbabilityFormatter {
            vocabulary: &chat.vocabulary,
            top,
            after_sampler: chat.options.after_sampler,
            no_logprob: OPENAI_NO_LOGPROB,
        };
        let range = range.start.min(self.assigned())..range.end.min(self.assigned());
        let tokens = self.tokens[range.clone()].iter().zip(&self.in_text[range]).filter(|(_, in_text)| **in_text);
        tokens.map(|(token, _)| formatter.sampled_token(token)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::TokenMeasurement;

    fn tokens(texts: &[&str]) -> Vec<MeasuredToken> {
        let token = |text: &&str| {
            let text = (*text).to_owned();
            let measurement = TokenMeasurement { token: 0, text, logprob: None, rank: None, entropy: None };
            MeasuredToken { measurement, alternatives: Vec::new(), is_hidden: false }
        };
        texts.iter().map(token).collect()
    }

    fn text_of(answer: &TextTokens, range: Range<usize>) -> Vec<&str> {
        answer.tokens[range].iter().map(|token| token.measurement.text.as_str()).collect()
    }

    #[test]
    fn only_tokens_of_the_text_are_assigned_to_it() {
        let mut answer = TextTokens::default();
        answer.update(0, tokens(&["<think>", "hm", "</think>", "\n\n", "Good", " da", "y", "<tool"]));
        assert_eq!(answer.assign(&ChatDelta::Reasoning("hm".into())), 1..2);
        let range = answer.assign(&ChatDelta::Content("Good day".into()));
        assert_eq!(text_of(&answer, range), ["Good", " da", "y"]);
        answer.update(0, tokens(&["!"]));
        let range = answer.assign(&ChatDelta::Content("<tool!".into()));
        assert_eq!(text_of(&answer, range), ["<tool", "!"]);
        assert_eq!(answer.in_text, [false, false, false, false, true, true, true, true, true]);
    }

    #[test]
    fn incomplete_characters_belong_to_their_text() {
        let mut answer = TextTokens::default();
        answer.update(0, tokens(&["</think>", "", "é", ""]));
        let range = answer.assign(&ChatDelta::Content("é".into()));
        assert_eq!(range, 1..3);
        answer.update(2, tokens(&["x"]));
        assert_eq!(answer.in_text, [false, true]);
    }

    #[test]
    fn text_without_its_tokens_takes_all_of_them() {
        let mut answer = TextTokens::default();
        answer.update(0, tokens(&["a", "b"]));
        assert_eq!(answer.assign(&ChatDelta::Content("c".into())), 0..2);
        assert_eq!(answer.assign(&ChatDelta::Content("c".into())), 2..2);
    }
}
