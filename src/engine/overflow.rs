//! What a run does when its context is full: it ends, lets tokens go, or lets whole messages go.

use super::conversation::{self, Aligned, Memory, cut_spans, moved};
use super::request::Overflow;
use super::run::Run;
use crate::events::{EvictedMessage, Eviction};
use std::ops::Range;

/// Tokens that are out of a sequence, and not out of the KV cache yet.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Tokens of the sequence, before the cut, that the cache held.
    pub cached: usize,
    /// What was cut, in order, within `cached`.
    pub ranges: Vec<Range<usize>>,
}

/// What went because the context was full.
#[derive(Debug, Default)]
pub(super) struct Gone {
    /// Whether the context was full.
    pub truncated: bool,
    /// Tokens of the answer among it.
    pub generated: usize,
    pub tokens: usize,
    pub messages: Vec<EvictedMessage>,
    /// What no event has told yet.
    pub untold: Option<Box<Eviction>>,
}

impl Run {
    /// Takes a slot's view of the prompt, where it fits, and lets messages go where the prompt does not fit.
    pub fn settle_in(&mut self, aligned: Option<Aligned>, memory: Memory) {
        let original = (self.sequence.clone(), self.request.spans.clone());
        if let Some(aligned) = aligned {
            let left_out = aligned.left_out;
            if !left_out.is_empty() {
                let messages = conversation::said(&original.0, &original.1, &left_out, &self.view.vocabulary);
                self.note_gone(&left_out, messages);
            }
            self.sequence = aligned.tokens;
            self.request.spans = aligned.spans;
        }
        self.memory = memory;
        self.prompt_len = self.sequence.len();
        let len = self.sequence.len();
        if len >= self.context && !self.request.fills_context(len, self.context) && self.make_room(1).is_err() {
            // Thinking that came back may be what is too much.
            (self.sequence, self.request.spans) = original;
            self.memory = Memory::default();
            self.gone = Gone::default();
            self.prompt_len = self.sequence.len();
            // The engine takes no prompt that cannot be made to fit.
            let _ = self.make_room(1);
        }
        self.prompt_tokens = self.prompt_len;
    }

    /// Lets go what must go, so that `more` tokens can follow the sequence. An error says why that cannot be.
    pub(super) fn make_room(&mut self, more: usize) -> Result<(), String> {
        let len = self.sequence.len();
        if len + more <= self.context {
            return Ok(());
        }
        let most = self.context.saturating_sub(more);
        self.gone.truncated = true;
        match self.request.overflow {
            Overflow::Stop => Err(format!("the context of {} tokens is full", self.context)),
            Overflow::Shift { keep, discard } => {
                let special = self.view.vocabulary.special();
                let bos = usize::from(special.add_bos && self.sequence.first().copied() == special.bos);
                let keep = keep
                    .map_or(self.prompt_len, |keep| keep.saturating_add(bos))
                    .min(self.context.saturating_sub(4))
                    .min(len - 1);
                let left = len - keep;
                let discard = if discard == 0 { left / 2 } else { discard }.max(len - most);
                if discard >= left {
                    return Err(format!(
                        "the context of {} tokens is full, and {keep} of them are to be kept",
                        self.context
                    ));
                }
                let ranges = vec![keep..keep + discard];
                self.memory.cut(&ranges);
                self.cut_out(&ranges, Vec::new());
                Ok(())
            }
            Overflow::Evict => {
                let prompt = &self.sequence[..self.prompt_len];
                let parts = conversation::droppable(prompt, &self.request.spans, &self.view.vocabulary);
                let goal = conversation::low_water(self.context).min(most);
                let Some(parts) = conversation::pick(parts, len, most, goal) else {
                    return Err(format!(
                        "the context of {} tokens is full, and no message is left that may be dropped: system messages, the last user message and the last answer stay",
                        self.context
                    ));
                };
                let messages = parts.iter().flat_map(|part| part.told(prompt, &self.view.vocabulary)).collect();
                let ranges: Vec<Range<usize>> = parts.into_iter().map(|part| part.range).collect();
                self.memory.dropped(&self.sequence, &self.request.spans, &ranges, &self.view.vocabulary);
                self.cut_out(&ranges, messages);
                Ok(())
            }
        }
    }

    /// Takes ranges, in order, out of the sequence, and notes them for the KV cache.
    fn cut_out(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>) {
        self.note_gone(ranges, messages);
        let cached = self.cached;
        let held: Vec<Range<usize>> = ranges
            .iter()
            .filter(|range| range.start < cached)
            .map(|range| range.start..range.end.min(cached))
            .collect();
        if !held.is_empty() {
            self.cuts.push(Cut { cached, ranges: held });
        }
        self.cached = moved(cached, ranges);
        let prompt_len = moved(self.prompt_len, ranges);
        let total: usize = ranges.iter().map(Range::len).sum();
        self.gone.generated += total - (self.prompt_len - prompt_len);
        self.prompt_len = prompt_len;
        for range in ranges.iter().rev() {
            self.sequence.drain(range.clone());
        }
        self.request.spans = cut_spans(&self.request.spans, ranges);
    }

    fn note_gone(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>) {
        self.gone.truncated = true;
        self.gone.tokens += ranges.iter().map(Range::len).sum::<usize>();
        self.gone.messages.extend(messages.iter().cloned());
        let untold = self.gone.untold.get_or_insert_default();
        untold.ranges.extend(ranges.iter().map(|range| (range.start as u32, range.end as u32)));
        untold.messages.extend(messages);
    }

    /// What a later request of the same conversation must know.
    pub fn remember(&mut self) -> Memory {
        if self.gone.generated == 0 && !self.request.spans.is_empty() {
            self.memory.answered(self.prompt_len, &self.sequence[self.prompt_len..], &self.view.vocabulary);
        }
        std::mem::take(&mut self.memory)
    }
}
