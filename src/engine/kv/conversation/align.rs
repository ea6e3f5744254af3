//! Alignment of a prompt with the history of a slot.
//!
//! A client sends the whole conversation each time, and its template renders past answers without their reasoning. The
//! model has seen them with it. [`align`] restores the tokens as they were generated, if the client's text is the text
//! that it received. Messages that were dropped before are omitted again.

#[cfg(test)]
mod tests;

use super::history::{DroppedGap, PastAnswer, SlotHistory, hash, message_hash, without_reasoning};
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use std::ops::Range;

/// Maximum tokens before a generated answer that belong to it: the template's beginning of an answer, possibly with
/// empty reasoning.
const OPENING: usize = 16;

/// A prompt aligned with a history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alignment {
    pub tokens: Vec<TokenId>,
    pub spans: Vec<Span>,
    /// Omitted ranges, as indices of the prompt.
    pub omitted: Vec<Range<usize>>,
}

/// Aligns a prompt with a slot's state. `forget` also omits messages that were dropped before. Returns `None` if
/// nothing changes.
pub fn align(
    prompt: &[TokenId],
    spans: &[Span],
    held: &[TokenId],
    history: &SlotHistory,
    vocabulary: &Vocabulary,
    forget: bool,
) -> Option<Alignment> {
    if spans.is_empty() || history.is_empty() {
        return None;
    }
    let mut aligner = Aligner { prompt, spans, vocabulary, tokens: Vec::new(), edits: Vec::new(), at: 0 };
    let mut gaps = history.gaps.iter().filter(|_| forget).peekable();
    let mut omitted = Vec::new();
    loop {
        while let Some(gap) = gaps.next_if(|gap| gap.at <= aligner.tokens.len()) {
            if gap.at == aligner.tokens.len()
                && let Some(end) = aligner.end_of(gap)
            {
                omitted.push(aligner.at..end);
                aligner.replace(end, &[]);
            }
        }
        if aligner.at == prompt.len() {
            break;
        }
        let here = aligner.tokens.len();
        if held.get(here) == Some(&prompt[aligner.at]) {
            aligner.copy(1);
            continue;
        }
        let answer = history.answers.iter().rfind(|answer| {
            (answer.start.saturating_sub(OPENING)..=answer.start + answer.tokens.len()).contains(&here)
        });
        let Some((back, end, tokens)) = answer.and_then(|answer| aligner.answer(answer, held)) else { break };
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
    let spans = aligner.spans_now();
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
    fn end_of(&self, gap: &DroppedGap) -> Option<usize> {
        let end = self.at + gap.len;
        if self.prompt.get(self.at..end).is_some_and(|tokens| hash(tokens) == gap.hash) {
            return Some(end);
        }
        // Answers may be tokenized differently than they were generated. Then messages are compared by text.
        let mut spoken = self.spans.iter().filter(|span| span.role != "template" && span.start as usize >= self.at);
        if gap.messages.is_empty() || spoken.clone().next()?.start as usize != self.at {
            return None;
        }
        for &message in &gap.messages {
            if message_hash(spoken.next()?, self.prompt, self.vocabulary) != message {
                return None;
            }
        }
        let next = spoken.next()?;
        (next.role == "user").then_some(next.start as usize)
    }

    /// Returns how many tokens back the answer begins, where it ends in the prompt, and its tokens as they were
    /// generated.
    fn answer(&self, answer: &PastAnswer, held: &[TokenId]) -> Option<(usize, usize, Vec<TokenId>)> {
        // The client's text may match the beginning of the reasoning by chance.
        let back = self.tokens.len().saturating_sub(answer.start);
        let (here, at) = (self.tokens.len() - back, self.at.checked_sub(back)?);
        if self.edits.last().is_some_and(|(range, _)| range.end > at) {
            return None;
        }
        let spoken = self.spans.iter().find(|span| span.role != "template" && span.end as usize > at)?;
        if spoken.role != "assistant" || spoken.start as usize > at + OPENING {
            return None;
        }
        let rest = &self.prompt[at..];
        let ends = |&token: &TokenId| self.vocabulary.is_end_of_generation(token);
        let behind = spoken.end as usize - at;
        let end = rest.iter().skip(behind).take(OPENING).position(ends).map_or(behind, |more| behind + more);
        let mut ours = held.get(here..answer.start)?.to_vec();
        ours.extend_from_slice(&answer.tokens);
        let (ours_text, theirs) = (self.vocabulary.decode(&ours), self.vocabulary.decode(&rest[..end]));
        let same = without_reasoning(&ours_text).trim() == without_reasoning(&theirs).trim();
        same.then_some((back, at + end, ours))
    }

    fn spans_now(&self) -> Vec<Span> {
        let now = |index: u32| {
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
            let (start, end) = (now(span.start), now(span.end));
            match spans.last_mut() {
                _ if start >= end => {}
                Some(last) if last.role == "template" && span.role == "template" => last.end = end,
                _ => spans.push(Span { role: span.role.clone(), start, end }),
            }
        }
        spans
    }
}
