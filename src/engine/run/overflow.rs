//! Behaviour of a run whose context is full: it ends, drops tokens, or drops whole messages.

use crate::engine::kv::conversation;
use crate::engine::kv::conversation::spans::{cut_spans, shifted_index};
use crate::engine::kv::conversation::{Alignment, SlotHistory};
use crate::engine::kv::removal::KvRemoval;
use crate::engine::request::Overflow;
use crate::engine::run::Run;
use crate::events::{EvictedMessage, Eviction};
use std::ops::Range;

/// Tokens and messages evicted because the context was full.
#[derive(Debug, Default)]
pub struct Evictions {
    /// True if the context was full.
    pub truncated: bool,
    /// Evicted tokens of the answer.
    pub generated: usize,
    pub tokens: usize,
    pub messages: Vec<EvictedMessage>,
    /// Evictions that no event has recorded yet.
    pub unreported: Option<Box<Eviction>>,
}

impl Run {
    /// Replaces the prompt by its alignment with the slot's history, if there is one, and evicts messages if the prompt
    /// does not fit.
    pub fn fit_prompt(&mut self, aligned: Option<Alignment>, history: SlotHistory) {
        let original = (self.sequence.clone(), self.request.spans.clone());
        if let Some(aligned) = aligned {
            let omitted = aligned.omitted;
            if !omitted.is_empty() {
                let messages =
                    conversation::evicted_messages(&original.0, &original.1, &omitted, &self.view.vocabulary);
                self.record_eviction(&omitted, messages);
            }
            self.sequence = aligned.tokens;
            self.request.spans = aligned.spans;
        }
        self.history = history;
        self.prompt_len = self.sequence.len();
        let len = self.sequence.len();
        if len >= self.context && !self.request.fills_context(len, self.context) && self.make_room(1).is_err() {
            // The restored reasoning may be what makes the prompt too long.
            (self.sequence, self.request.spans) = original;
            self.history = SlotHistory::default();
            self.evictions = Evictions::default();
            self.prompt_len = self.sequence.len();
            // The engine accepts only prompts that can be made to fit.
            let _ = self.make_room(1);
        }
        self.prompt_tokens = self.prompt_len;
    }

    /// Evicts tokens so that `more` tokens can follow the sequence. Returns an error with the reason if that is
    /// impossible.
    pub fn make_room(&mut self, more: usize) -> Result<(), String> {
        let len = self.sequence.len();
        if len + more <= self.context {
            return Ok(());
        }
        let most = self.context.saturating_sub(more);
        self.evictions.truncated = true;
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
                        "the context of {} tokens is full, and {keep} of them must be kept",
                        self.context
                    ));
                }
                let ranges = vec![keep..keep + discard];
                self.history.remove_ranges(&ranges);
                self.remove_ranges(&ranges, Vec::new());
                Ok(())
            }
            Overflow::Evict => {
                let prompt = &self.sequence[..self.prompt_len];
                let parts = conversation::droppable_parts(prompt, &self.request.spans, &self.view.vocabulary);
                let goal = conversation::eviction_target(self.context).min(most);
                let Some(parts) = conversation::choose_parts(parts, len, most, goal) else {
                    return Err(format!(
                        "the context of {} tokens is full, and no message is left that can be dropped: system messages, the last user message and the last answer are kept",
                        self.context
                    ));
                };
                let messages =
                    parts.iter().flat_map(|part| part.evicted_messages(prompt, &self.view.vocabulary)).collect();
                let ranges: Vec<Range<usize>> = parts.into_iter().map(|part| part.range).collect();
                self.history.record_dropped(&self.sequence, &self.request.spans, &ranges, &self.view.vocabulary);
                self.remove_ranges(&ranges, messages);
                Ok(())
            }
        }
    }

    /// Removes ordered ranges from the sequence and queues their removal from the KV cache.
    fn remove_ranges(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>) {
        self.record_eviction(ranges, messages);
        let kv_len = self.kv_len;
        let held: Vec<Range<usize>> = ranges
            .iter()
            .filter(|range| range.start < kv_len)
            .map(|range| range.start..range.end.min(kv_len))
            .collect();
        if !held.is_empty() {
            self.kv_removals.push(KvRemoval { kv_len, ranges: held });
        }
        self.kv_len = shifted_index(kv_len, ranges);
        let prompt_len = shifted_index(self.prompt_len, ranges);
        let total: usize = ranges.iter().map(Range::len).sum();
        self.evictions.generated += total - (self.prompt_len - prompt_len);
        self.prompt_len = prompt_len;
        for range in ranges.iter().rev() {
            self.sequence.drain(range.clone());
        }
        self.request.spans = cut_spans(&self.request.spans, ranges);
    }

    fn record_eviction(&mut self, ranges: &[Range<usize>], messages: Vec<EvictedMessage>) {
        self.evictions.truncated = true;
        self.evictions.tokens += ranges.iter().map(Range::len).sum::<usize>();
        self.evictions.messages.extend(messages.iter().cloned());
        let unreported = self.evictions.unreported.get_or_insert_default();
        unreported.ranges.extend(ranges.iter().map(|range| (range.start as u32, range.end as u32)));
        unreported.messages.extend(messages);
    }

    /// Returns the history that later requests of the same conversation need.
    pub fn take_history(&mut self) -> SlotHistory {
        if self.evictions.generated == 0 && !self.request.spans.is_empty() {
            self.history.record_answer(self.prompt_len, &self.sequence[self.prompt_len..], &self.view.vocabulary);
        }
        std::mem::take(&mut self.history)
    }
}
