//! Alignment of a prompt with the history of a slot.
//!
//! A client sends the whole conversation each time, and its template renders past answers without their reasoning. The
//! model has seen them with it. [`align`] restores the tokens as they were generated, if the client's text is the text
//! that it received. Messages that were dropped before are omitted again.

#[cfg(test)]
mod tests;

use super::history::{DroppedGap, PastAnswer, SlotHistory, hash_tokens, message_hash, without_reasoning};
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use std::ops::Range;

/// Maximum tokens before a generated answer that belong to it: the template's beginning of an answer, possibly with
/// empty reasoning.
const MAX_HEADER_TOKENS: usize = 16;

/// A prompt aligned with a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alignment {
    pub tokens: Vec<TokenId>,
    pub spans: Vec<Span>,
    /// Omitted ranges of the prompt.
    pub omitted: Vec<Range<usize>>,
}

/// Aligns a prompt with a slot's state. `omit_dropped` also omits messages that were dropped before. Returns `None` if
/// nothing changes.
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
        let Some((back, end, tokens)) = answer.and_then(|answer| aligner.past_answer(answer, cached)) else { break };
        aligner.tokens.truncate(here - back);
        aligner.at -= back;
        aligner.replace(end, &tokens);
        // The same position must not be tried twice.
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
    /// Aligned prompt up to `at`.
    tokens: Vec<TokenId>,
    /// Replaced ranges of the prompt, with their new length in tokens.
    edits: Vec<(Range<usize>, usize)>,
    at: usize,
}

impl Aligner<'_> {
    fn copy(&mut self, count: usize) {
        self.tokens.extend_from_slice(&self.prompt[self.at..self.at + count]);
        self.at += count;
    }

    fn replace(&mut self, end: usize, tokens: &[TokenId]) {
        self.edits.push((self.at..end, tokens.len()));
        self.tokens.extend_from_slice(tokens);
        self.at = end;
    }

    /// Returns the end of the dropped messages if they appear at the current position.
    fn dropped_end(&self, gap: &DroppedGap) -> Option<usize> {
        let end = self.at + gap.len;
        if self.prompt.get(self.at..end).is_some_and(|tokens| hash_tokens(tokens) == gap.hash) {
            return Some(end);
        }
        // Answers may be tokenized differently than they were generated. Then messages are compared by text.
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

    /// Returns how many tokens back the answer begins, where it ends in the prompt, and its tokens as they were
    /// generated.
    fn past_answer(&self, answer: &PastAnswer, cached: &[TokenId]) -> Option<(usize, usize, Vec<TokenId>)> {
        // The client's text may match the beginning of the reasoning by chance.
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
        let mut generated = cached.get(here..answer.start)?.to_vec();
        generated.extend_from_slice(&answer.tokens);
        let (generated_text, received) = (self.vocabulary.decode(&generated), self.vocabulary.decode(&rest[..end]));
        let same = without_reasoning(&generated_text).trim() == without_reasoning(&received).trim();
        same.then_some((back, at + end, generated))
    }

    fn aligned_spans(&self) -> Vec<Span> {
        let shifted = |index: u32| {
            let index = index as usize;
            let mut shift = 0isize;
            for (range, len) in &self.edits {
                if index >= range.end {
                    shift += *len as isize - range.len() as isize;
                } else if index > range.start {
                    // Within a replaced range: limited to its new length.
                    return ((range.start as isize + shift) as usize + (index - range.start).min(*len)) as u32;
                }
            }
            (index as isize + shift) as u32
        };
        let mut spans: Vec<Span> = Vec::with_capacity(self.spans.len());
        for span in self.spans {
            let (start, end) = (shifted(span.start), shifted(span.end));
            match spans.last_mut() {
                _ if start >= end => {}
                Some(last) if last.role == "template" && span.role == "template" => last.end = end,
                _ => spans.push(Span { role: span.role.clone(), start, end }),
            }
        }
        spans
    }
}
