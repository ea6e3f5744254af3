//! Alignment of a prompt with the history of a slot.
//!
//! A client sends the whole conversation with each request, and chat templates render past answers without their
//! reasoning, but the slot's state contains the reasoning. [`align`] restores the generated tokens of an answer if the
//! client sends back the text that it received. It also omits messages that were dropped earlier because the context
//! was full.

#[cfg(test)]
mod tests;

use super::history::{DroppedGap, PastAnswer, SlotHistory, hash_tokens, message_hash, without_reasoning};
use super::spans::map_spans;
use crate::events::{Span, TokenId, is_image_token};
use crate::model::Vocabulary;
use std::ops::Range;

/// Maximum tokens of the header that a template puts before an answer, possibly with empty reasoning.
const MAX_HEADER_TOKENS: usize = 16;

/// A prompt aligned with a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alignment {
    pub tokens: Vec<TokenId>,
    pub spans: Vec<Span>,
    /// Omitted ranges of the prompt.
    pub omitted: Vec<Range<usize>>,
}

/// Aligns a prompt with the `cached` tokens and the history of a slot. With `omit_dropped`, messages that the history
/// lists as dropped are omitted. Returns `None` if nothing changes.
pub fn align(
    prompt: &[TokenId],
    spans: &[Span],
    cached: &[TokenId],
    history: &SlotHistory,
    vocabulary: &Vocabulary,
    omit_dropped: bool,
) -> Option<Alignment> {
    if spans.is_empty() || history.is_empty() {
        return None;
    }
    let mut aligner = Aligner { prompt, spans, vocabulary, tokens: Vec::new(), edits: Vec::new(), at: 0 };
    let mut gaps = history.gaps.iter().filter(|_| omit_dropped).peekable();
    let mut omitted = Vec::new();
    loop {
        while let Some(gap) = gaps.next_if(|gap| gap.at <= aligner.tokens.len()) {
            if gap.at == aligner.tokens.len()
                && let Some(end) = aligner.dropped_end(gap)
            {
                omitted.push(aligner.at..end);
                aligner.replace(end, &[]);
            }
        }
        if aligner.at == prompt.len() {
            break;
        }
        let here = aligner.tokens.len();
        if cached.get(here) == Some(&prompt[aligner.at]) {
            aligner.copy(1);
            continue;
        }
        let answer = history.answers.iter().rfind(|answer| {
            (answer.start.saturating_sub(MAX_HEADER_TOKENS)..=answer.start + answer.tokens.len()).contains(&here)
        });
        let Some((back, end, tokens)) = answer.and_then(|answer| aligner.match_answer(answer, cached)) else { break };
        aligner.tokens.truncate(here - back);
        aligner.at -= back;
        aligner.replace(end, &tokens);
        // Without progress, the next iteration would try the same position.
        if aligner.tokens.len() == here {
            break;
        }
    }
    aligner.copy(prompt.len() - aligner.at);
    if aligner.tokens == prompt {
        return None;
    }
    let spans = aligner.aligned_spans();
    Some(Alignment { tokens: aligner.tokens, spans, omitted })
}

struct Aligner<'a> {
    prompt: &'a [TokenId],
    spans: &'a [Span],
    vocabulary: &'a Vocabulary,
    /// Aligned tokens for the prompt before `at`.
    tokens: Vec<TokenId>,
    /// Replaced ranges of the prompt, each with the number of tokens that replace it.
    edits: Vec<(Range<usize>, usize)>,
    /// Position in the prompt.
    at: usize,
}

impl Aligner<'_> {
    fn copy(&mut self, count: usize) {
        self.tokens.extend_from_slice(&self.prompt[self.at..self.at + count]);
        self.at += count;
    }

    /// Replaces the prompt up to `end` with `tokens`.
    fn replace(&mut self, end: usize, tokens: &[TokenId]) {
        self.edits.push((self.at..end, tokens.len()));
        self.tokens.extend_from_slice(tokens);
        self.at = end;
    }

    /// Returns the end of the dropped messages in the prompt if they are at the current position.
    fn dropped_end(&self, gap: &DroppedGap) -> Option<usize> {
        let end = self.at + gap.len;
        if self.prompt.get(self.at..end).is_some_and(|tokens| hash_tokens(tokens) == gap.hash) {
            return Some(end);
        }
        // The template's text of an answer may be tokenized differently from the generated answer, so texts are
        // compared.
        let mut message_spans =
            self.spans.iter().filter(|span| span.role != "template" && span.start as usize >= self.at);
        if gap.messages.is_empty() || message_spans.clone().next()?.start as usize != self.at {
            return None;
        }
        for &message in &gap.messages {
            if message_hash(message_spans.next()?, self.prompt, self.vocabulary) != message {
                return None;
            }
        }
        let next = message_spans.next()?;
        (next.role == "user").then_some(next.start as usize)
    }

    /// Compares the prompt near the current position with a generated answer. If the texts match, returns the number of
    /// copied tokens that belong to the answer, the end of the answer in the prompt, and its generated tokens.
    fn match_answer(&self, answer: &PastAnswer, cached: &[TokenId]) -> Option<(usize, usize, Vec<TokenId>)> {
        // The first tokens of the answer may already have been copied because they happened to match those of the
        // reasoning.
        let back = self.tokens.len().saturating_sub(answer.start);
        let (here, at) = (self.tokens.len() - back, self.at.checked_sub(back)?);
        if self.edits.last().is_some_and(|(range, _)| range.end > at) {
            return None;
        }
        let answer_span = self.spans.iter().find(|span| span.role != "template" && span.end as usize > at)?;
        if answer_span.role != "assistant" || answer_span.start as usize > at + MAX_HEADER_TOKENS {
            return None;
        }
        let rest = &self.prompt[at..];
        let ends = |&token: &TokenId| self.vocabulary.is_end_of_generation(token);
        let content_end = answer_span.end as usize - at;
        let end = rest
            .iter()
            .skip(content_end)
            .take(MAX_HEADER_TOKENS)
            .position(ends)
            .map_or(content_end, |more| content_end + more);
        if rest[..end].iter().any(|&token| is_image_token(token)) {
            return None;
        }
        let mut generated = cached.get(here..answer.start)?.to_vec();
        generated.extend_from_slice(&answer.tokens);
        let (generated_text, received) = (self.vocabulary.decode(&generated), self.vocabulary.decode(&rest[..end]));
        let is_same = without_reasoning(&generated_text).trim() == without_reasoning(&received).trim();
        is_same.then_some((back, at + end, generated))
    }

    fn aligned_spans(&self) -> Vec<Span> {
        map_spans(self.spans, |index| {
            let mut shift = 0isize;
            for (range, len) in &self.edits {
                if index >= range.end {
                    shift += *len as isize - range.len() as isize;
                } else if index > range.start {
                    // Within a replaced range, an index is limited to the length of the replacement.
                    return (range.start as isize + shift) as usize + (index - range.start).min(*len);
                }
            }
            (index as isize + shift) as usize
        })
    }
}
