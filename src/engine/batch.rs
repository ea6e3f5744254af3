//! One batch: selection of runs and their tokens, the decode, and delivery of the logits to the runs.

use super::conversation::Memory;
use super::scheduler::{Live, Scheduler, done};
use crate::events::FinishReason;
use crate::model::ShiftError;
use std::sync::Arc;

/// Maximum tokens of a decode that counts as generation; such decodes go before prompts.
const SHORT: usize = 16;

/// Limits on the decoding of prompts.
struct Pace {
    /// Maximum total tokens of prompts that are decoded together. Longer prompts are decoded one after the other: a
    /// processor is not faster with more tokens at once, and the first prompt would wait for the last. A GPU fills a
    /// physical batch first.
    together: usize,
    /// Maximum tokens of one prompt in one decode. On a processor, larger chunks are not faster because their working
    /// set outgrows the cache. A GPU takes whole batches.
    chunk: usize,
    /// Prompt tokens decoded between two decodes of the generating runs. If these took part in every decode of a short
    /// prompt, each would cost an additional pass over the weights, and the last of many prompts would wait for all of
    /// them.
    between_turns: usize,
}

const PROCESSOR: Pace = Pace { together: 128, chunk: 256, between_turns: 256 };
const GPU: Pace = Pace { together: 512, chunk: usize::MAX, between_turns: 512 };

/// A run that waits for a decode.
struct Ready {
    slot: usize,
    arrival: u64,
    /// Number of tokens in its next decode.
    left: usize,
    /// True if the run has received logits before.
    begun: bool,
}

/// Part of a run's sequence in the current batch.
pub(super) struct Part {
    slot: usize,
    /// Index in the batch and position of each token whose logits are requested.
    outputs: Vec<(usize, usize)>,
    from: usize,
    upto: usize,
}

/// Splits `pending` tokens into chunks of equal size, of at most `max` tokens, and returns the size of the first. A
/// short last chunk would be slow, since llama.cpp computes flash attention for fewer than 64 tokens one token at a
/// time.
fn even(left: usize, most: usize) -> usize {
    left.div_ceil(left.div_ceil(most.max(1)).max(1))
}

impl Scheduler<'_> {
    /// Plans the next batch: generating runs first, if it is their turn, then prompts in order of arrival.
    pub(super) fn plan(&mut self) -> Vec<Part> {
        let mut budget = self.options.batch_size as usize;
        let mut ready: Vec<Ready> = Vec::new();
        let mut captures = 0;
        for index in 0..self.slots.len() {
            self.place(index);
            let Some(live) = &self.slots[index].live else { continue };
            let Some(_) = live.run.wants_decode() else { continue };
            if !live.run.outbox.is_empty() || live.rests() {
                continue;
            }
            if live.run.request.attention {
                captures += 1;
                if self.capture.as_ref().is_some_and(|capture| !capture.has_room(captures)) {
                    continue;
                }
            }
            let begun = live.run.prompt_us.is_some();
            ready.push(Ready { slot: index, arrival: live.arrival, left: live.run.next_decode(), begun });
        }
        if let Err(error) = self.keep_together(&mut ready, |run| run.slot) {
            for Ready { slot, .. } in ready {
                if let Some(live) = &mut self.slots[slot].live {
                    live.run.abort(FinishReason::Error, error.to_string());
                }
            }
            return Vec::new();
        }
        let generating = ready.iter().any(|run| run.left <= SHORT);
        // While other runs generate, prompts get one physical batch per decode, so that generation is not delayed for
        // long.
        let prompt_budget = if generating { self.options.ubatch_size as usize } else { budget };
        ready.sort_unstable_by_key(|run| (run.left > SHORT, run.arrival));
        let pace = if self.context.has_gpu() { GPU } else { PROCESSOR };
        let some_read = ready.iter().any(|run| run.left > SHORT);
        let prompts_only = some_read && self.read_since_turn < pace.between_turns;
        let mut parts: Vec<(usize, usize)> = Vec::new();
        let mut prompts = 0;
        for Ready { slot, left, begun, .. } in ready {
            let take = match left {
                ..=SHORT if prompts_only && begun => continue,
                ..=SHORT => left,
                _ if prompts == 0 => even(left, prompt_budget.min(pace.chunk)),
                _ if prompts + left <= pace.together => left,
                _ => continue,
            };
            let take = take.min(budget);
            if take == 0 {
                continue;
            }
            budget -= take;
            if left > SHORT {
                prompts += take;
            }
            parts.push((slot, take));
        }
        self.read_since_turn = prompts + if prompts_only { self.read_since_turn } else { 0 };
        parts.sort_unstable();
        parts.into_iter().filter_map(|(index, take)| self.add_part(index, take)).collect()
    }

    /// Prepares a slot's KV cache for the next decode: finds a prefix match before the first decode, and removes the
    /// tokens that the run has dropped.
    fn place(&mut self, index: usize) {
        let Some(mut live) = self.slots[index].live.take() else { return };
        if let Some(outputs_from) = live.run.wants_decode() {
            let first = !std::mem::replace(&mut live.placed, true);
            if first {
                self.find_state(index, &mut live, outputs_from);
            }
            self.follow_cuts(index, &mut live);
            live.run.cached = self.truncate(index, live.run.cached);
            if first && !live.begun {
                live.run.reused = live.run.cached;
                live.run.tell_progress();
                // A run with unsent outputs is left out of the batch.
                live.pass_on();
            }
        }
        self.slots[index].live = Some(live);
    }

    /// Truncates a slot's state to the first `keep` tokens. Returns how many are left.
    pub(super) fn truncate(&mut self, index: usize, keep: usize) -> usize {
        let slot = &mut self.slots[index];
        if slot.cache.len() <= keep {
            return slot.cache.len();
        }
        let left = self.context.truncate(index as i32, keep as u32) as usize;
        slot.cache.truncate(left);
        left
    }

    /// Removes evicted tokens from the middle of the KV cache. Tokens that the cache cannot keep are decoded again.
    pub(super) fn follow_cuts(&mut self, index: usize, live: &mut Live) {
        for cut in std::mem::take(&mut live.run.cuts) {
            if self.truncate(index, cut.cached) < cut.cached {
                live.run.cached = 0;
                continue;
            }
            let ranges: Vec<_> = cut.ranges.iter().map(|range| range.start as u32..range.end as u32).collect();
            match self.context.cut(index as i32, cut.cached as u32, &ranges) {
                Ok(_) => {
                    for range in cut.ranges.iter().rev() {
                        self.slots[index].cache.drain(range.clone());
                    }
                    // Closing the gap leaves layers with a sliding window only the content of their window, in other
                    // cells than its positions.
                    if live.run.request.attention && !self.context.rows_exact(index as i32) {
                        live.run.cached = 0;
                    }
                }
                Err(ShiftError::Fixed(_)) => {
                    let untouched = cut.ranges.first().map_or(0, |range| range.start);
                    // Nothing may follow: a later removal counts positions in the current sequence.
                    live.run.cached = live.run.cached.min(self.truncate(index, untouched));
                }
                Err(ShiftError::Failed) => {
                    self.slots[index].cache.clear();
                    live.run.cached = 0;
                }
            }
        }
    }

    fn add_part(&mut self, index: usize, take: usize) -> Option<Part> {
        let live = self.slots[index].live.as_ref()?;
        let run = &live.run;
        let outputs_from = run.wants_decode()?;
        let (from, upto) = (run.cached, run.cached + take);
        let mut outputs = Vec::new();
        for position in from..upto {
            let output = position >= outputs_from;
            let capture = run.captures(position, output);
            match self.context.add(run.sequence[position], position as u32, index as i32, output, capture) {
                Ok(at) if output => outputs.push((at, position)),
                Ok(_) => {}
                Err(error) => {
                    // The plan respects the batch size. If it ever does not, the rest goes into the next batch.
                    tracing::error!(%error, "batch exceeds its planned size");
                    return Some(Part { slot: index, outputs, from, upto: position });
                }
            }
        }
        Some(Part { slot: index, outputs, from, upto })
    }

    pub(super) fn decode(&mut self, parts: Vec<Part>) {
        let captured = match self.context.decode() {
            Ok(captured) => captured,
            Err(error) => return self.fail(&parts, &error.to_string()),
        };
        let mut captured = captured.into_iter().peekable();
        for part in parts {
            let slot = &mut self.slots[part.slot];
            let Some(live) = &mut slot.live else { continue };
            slot.cache.extend_from_slice(&live.run.sequence[part.from..part.upto]);
            live.run.cached = part.upto;
            if let Some(purpose) = live.run.checkpoint_due() {
                self.context.keep_checkpoint(part.slot as i32, part.upto, purpose);
            }
            live.run.tell_progress();
            let commands = &self.commands;
            for (index, position) in part.outputs {
                if let Some(row) = captured.next_if(|row| row.index == index) {
                    live.run.attention = Some(Arc::new(row));
                }
                let logits = self.context.logits(index);
                live.run.on_logits(position, logits, &mut self.candidates, &|id, call| done(commands, id, call));
            }
        }
        self.count_decode();
    }

    /// Handles a failed decode: the runs of the batch fail, all others continue.
    fn fail(&mut self, parts: &[Part], message: &str) {
        tracing::error!(message, "decode failed");
        for part in parts {
            self.context.clear(part.slot as i32);
            let slot = &mut self.slots[part.slot];
            slot.cache.clear();
            slot.memory = Memory::default();
            if let Some(live) = &mut slot.live {
                live.run.cached = 0;
                live.run.abort(FinishReason::Error, message.to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::even;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_are_even_and_as_few_as_can_be(length in 1usize..5000, most in 1usize..600) {
            let (mut left, mut parts) = (length, Vec::new());
            while left > 0 {
                parts.push(even(left, most));
                left -= parts[parts.len() - 1];
            }
            prop_assert_eq!(parts.len(), length.div_ceil(most));
            prop_assert!(parts[0] <= most && parts[0] - parts[parts.len() - 1] <= 1);
        }
    }
}
