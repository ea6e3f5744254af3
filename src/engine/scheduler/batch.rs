//! One batch: selection of runs and their tokens, the decode, and delivery of the logits to the runs.

use super::active_run::ActiveRun;
use super::{Scheduler, done};
use crate::engine::kv::conversation::SlotHistory;
use crate::events::FinishReason;
use crate::model::ShiftError;
use std::sync::Arc;

/// Maximum tokens of a decode that counts as generation; such decodes go before prompts.
const MAX_SHORT_DECODE: usize = 16;

/// Limits on the decoding of prompts.
struct PrefillPolicy {
    /// Maximum total tokens of prompts that are decoded together. Longer prompts are decoded one after the other: a
    /// processor is not faster with more tokens at once, and the first prompt would wait for the last. A GPU fills a
    /// physical batch first.
    max_shared_tokens: usize,
    /// Maximum tokens of one prompt in one decode. On a processor, larger chunks are not faster because their working
    /// set outgrows the cache. A GPU takes whole batches.
    max_chunk_tokens: usize,
    /// Prompt tokens decoded between two decodes of the generating runs. If these took part in every decode of a short
    /// prompt, each would cost an additional pass over the weights, and the last of many prompts would wait for all of
    /// them.
    tokens_between_decodes: usize,
}

const CPU_PREFILL: PrefillPolicy =
    PrefillPolicy { max_shared_tokens: 128, max_chunk_tokens: 256, tokens_between_decodes: 256 };
const GPU_PREFILL: PrefillPolicy =
    PrefillPolicy { max_shared_tokens: 512, max_chunk_tokens: usize::MAX, tokens_between_decodes: 512 };

/// A run that waits for a decode.
struct ReadyRun {
    slot: usize,
    arrival: u64,
    /// Number of tokens in its next decode.
    left: usize,
    /// True if the run has received logits before.
    begun: bool,
}

/// Part of a run's sequence in the current batch.
pub(super) struct BatchPart {
    slot: usize,
    /// Index in the batch and position of each token whose logits are requested.
    outputs: Vec<(usize, usize)>,
    from: usize,
    upto: usize,
}

/// Splits `pending` tokens into chunks of equal size, of at most `max` tokens, and returns the size of the first. A
/// short last chunk would be slow, since llama.cpp computes flash attention for fewer than 64 tokens one token at a
/// time.
fn even_chunk(pending: usize, max: usize) -> usize {
    pending.div_ceil(pending.div_ceil(max.max(1)).max(1))
}

impl Scheduler<'_> {
    /// Plans the next batch: generating runs first, if it is their turn, then prompts in order of arrival.
    pub(super) fn plan(&mut self) -> Vec<BatchPart> {
        let mut budget = self.options.batch_size as usize;
        let mut ready: Vec<ReadyRun> = Vec::new();
        let mut captures = 0;
        for index in 0..self.slots.len() {
            self.prepare_slot(index);
            let Some(live) = &self.slots[index].active else { continue };
            let Some(_) = live.run.wants_decode() else { continue };
            if !live.run.outbox.is_empty() || live.is_paused() {
                continue;
            }
            if live.run.request.attention {
                captures += 1;
                if !self.recording.has_room_for_attention(captures) {
                    continue;
                }
            }
            let begun = live.run.prompt_us.is_some();
            ready.push(ReadyRun { slot: index, arrival: live.arrival, left: live.run.max_decode_len(), begun });
        }
        if let Err(error) = self.retain_same_adapters(&mut ready, |run| run.slot) {
            for ReadyRun { slot, .. } in ready {
                if let Some(live) = &mut self.slots[slot].active {
                    live.run.abort(FinishReason::Error, error.to_string());
                }
            }
            return Vec::new();
        }
        let generating = ready.iter().any(|run| run.left <= MAX_SHORT_DECODE);
        // While other runs generate, prompts get one physical batch per decode, so that generation is not delayed for
        // long.
        let prompt_budget = if generating { self.options.ubatch_size as usize } else { budget };
        ready.sort_unstable_by_key(|run| (run.left > MAX_SHORT_DECODE, run.arrival));
        let pace = if self.context.has_gpu() { GPU_PREFILL } else { CPU_PREFILL };
        let some_read = ready.iter().any(|run| run.left > MAX_SHORT_DECODE);
        let prompts_only = some_read && self.prompt_tokens_since_decode < pace.tokens_between_decodes;
        let mut parts: Vec<(usize, usize)> = Vec::new();
        let mut prompts = 0;
        for ReadyRun { slot, left, begun, .. } in ready {
            let take = match left {
                ..=MAX_SHORT_DECODE if prompts_only && begun => continue,
                ..=MAX_SHORT_DECODE => left,
                _ if prompts == 0 => even_chunk(left, prompt_budget.min(pace.max_chunk_tokens)),
                _ if prompts + left <= pace.max_shared_tokens => left,
                _ => continue,
            };
            let take = take.min(budget);
            if take == 0 {
                continue;
            }
            budget -= take;
            if left > MAX_SHORT_DECODE {
                prompts += take;
            }
            parts.push((slot, take));
        }
        self.prompt_tokens_since_decode = prompts + if prompts_only { self.prompt_tokens_since_decode } else { 0 };
        parts.sort_unstable();
        parts.into_iter().filter_map(|(index, take)| self.add_part(index, take)).collect()
    }

    /// Prepares a slot's KV cache for the next decode: finds a prefix match before the first decode, and removes the
    /// tokens that the run has dropped.
    fn prepare_slot(&mut self, index: usize) {
        let Some(mut live) = self.slots[index].active.take() else { return };
        if let Some(outputs_from) = live.run.wants_decode() {
            let first = !std::mem::replace(&mut live.has_state, true);
            if first {
                self.reuse_state(index, &mut live, outputs_from);
            }
            self.apply_kv_removals(index, &mut live);
            live.run.kv_len = self.truncate(index, live.run.kv_len);
            if first && !live.had_slot {
                live.run.cached_tokens = live.run.kv_len;
                live.run.report_progress();
                // A run with unsent outputs is left out of the batch.
                live.flush_outbox();
            }
        }
        self.slots[index].active = Some(live);
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
    pub(super) fn apply_kv_removals(&mut self, index: usize, live: &mut ActiveRun) {
        for removal in std::mem::take(&mut live.run.kv_removals) {
            if self.truncate(index, removal.kv_len) < removal.kv_len {
                live.run.kv_len = 0;
                continue;
            }
            let ranges: Vec<_> = removal.ranges.iter().map(|range| range.start as u32..range.end as u32).collect();
            match self.context.cut(index as i32, removal.kv_len as u32, &ranges) {
                Ok(_) => {
                    for range in removal.ranges.iter().rev() {
                        self.slots[index].cache.drain(range.clone());
                    }
                    // Closing the gap leaves layers with a sliding window only the content of their window, in other
                    // cells than its positions.
                    if live.run.request.attention && !self.context.rows_exact(index as i32) {
                        live.run.kv_len = 0;
                    }
                }
                Err(ShiftError::Fixed(_)) => {
                    let untouched = removal.ranges.first().map_or(0, |range| range.start);
                    // Nothing may follow: a later removal counts positions in the current sequence.
                    live.run.kv_len = live.run.kv_len.min(self.truncate(index, untouched));
                }
                Err(ShiftError::Failed) => {
                    self.slots[index].cache.clear();
                    live.run.kv_len = 0;
                }
            }
        }
    }

    fn add_part(&mut self, index: usize, take: usize) -> Option<BatchPart> {
        let live = self.slots[index].active.as_ref()?;
        let run = &live.run;
        let outputs_from = run.wants_decode()?;
        let (from, upto) = (run.kv_len, run.kv_len + take);
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
                    return Some(BatchPart { slot: index, outputs, from, upto: position });
                }
            }
        }
        Some(BatchPart { slot: index, outputs, from, upto })
    }

    pub(super) fn decode(&mut self, parts: Vec<BatchPart>) {
        let captured = match self.context.decode() {
            Ok(captured) => captured,
            Err(error) => return self.fail(&parts, &error.to_string()),
        };
        let mut captured = captured.into_iter().peekable();
        for part in parts {
            let slot = &mut self.slots[part.slot];
            let Some(live) = &mut slot.active else { continue };
            slot.cache.extend_from_slice(&live.run.sequence[part.from..part.upto]);
            live.run.kv_len = part.upto;
            if let Some(purpose) = live.run.take_due_checkpoint() {
                self.context.keep_checkpoint(part.slot as i32, part.upto, purpose);
            }
            live.run.report_progress();
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
    fn fail(&mut self, parts: &[BatchPart], message: &str) {
        tracing::error!(message, "decode failed");
        for part in parts {
            self.context.clear(part.slot as i32);
            let slot = &mut self.slots[part.slot];
            slot.cache.clear();
            slot.history = SlotHistory::default();
            if let Some(live) = &mut slot.active {
                live.run.kv_len = 0;
                live.run.abort(FinishReason::Error, message.to_owned());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::even_chunk;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_are_even_and_as_few_as_possible(length in 1usize..5000, most in 1usize..600) {
            let (mut left, mut parts) = (length, Vec::new());
            while left > 0 {
                parts.push(even_chunk(left, most));
                left -= parts[parts.len() - 1];
            }
            prop_assert_eq!(parts.len(), length.div_ceil(most));
            prop_assert!(parts[0] <= most && parts[0] - parts[parts.len() - 1] <= 1);
        }
    }
}
