//! One batch: selection of runs and their tokens, the decode, and delivery of the logits to the runs.

use super::{Scheduler, reply_sender};
use crate::events::{EndCause, TokenId};
use crate::model::{ModelError, common_prefix};
use std::sync::Arc;
use std::time::{Duration, Instant};

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
    /// Minimum prompt tokens decoded between two decodes of the generating runs. If these took part in every decode of a
    /// short prompt, each would cost an additional pass over the weights, and the last of many prompts would wait for
    /// all of them.
    tokens_between_decodes: usize,
}

/// Minimum duration of a prefill phase, as a multiple of the last decode of generating runs. With a small model, a pass
/// over the weights takes as long as a hundred tokens of a prompt, so a minimum of tokens alone would delay the last
/// prompt by many passes.
const MIN_PREFILL_DECODES: u32 = 20;
/// Prompt tokens after which a prefill phase ends in any case.
const MAX_PREFILL_TOKENS: usize = 2048;

/// Prompt decoding between two decodes of the generating runs.
#[derive(Debug, Default)]
pub(super) struct PrefillPhase {
    /// Prompt tokens decoded since the generating runs were last in a batch.
    tokens: usize,
    /// Time of their decodes.
    time: Duration,
    /// Time of the last decode of generating runs.
    generation: Duration,
    /// Prompt tokens in the planned batch.
    planned: usize,
}

impl PrefillPhase {
    /// Returns true if the generating runs decode next.
    fn is_over(&self, policy: &PrefillPolicy) -> bool {
        let suffices = self.time >= self.generation * MIN_PREFILL_DECODES || self.tokens >= MAX_PREFILL_TOKENS;
        self.tokens >= policy.tokens_between_decodes && suffices
    }

    /// Counts the planned batch after its decode.
    pub(super) fn count(&mut self, elapsed: Duration) {
        if self.planned > 0 {
            self.tokens += self.planned;
            self.time += elapsed;
        } else {
            (self.tokens, self.time, self.generation) = (0, Duration::ZERO, elapsed);
        }
    }
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
    /// True if the run has decoded its prompt.
    is_generating: bool,
}

/// Part of a run's sequence in the current batch.
pub(super) struct BatchPart {
    pub slot: usize,
    /// Index in the batch and position of each token whose logits are requested.
    outputs: Vec<(usize, usize)>,
    from: usize,
    pub end: usize,
    /// Tokens that may follow, with their indexes in the batch.
    pub draft: Vec<(usize, TokenId)>,
}

impl BatchPart {
    /// Returns the number of tokens without the draft.
    pub fn len(&self) -> usize {
        self.end - self.from
    }

    /// Returns the index of the first token whose logits are requested.
    pub fn first_output(&self) -> Option<usize> {
        self.outputs.first().map(|&(index, _)| index)
    }
}

/// Splits `pending` tokens into chunks of equal size, of at most `max` tokens, and returns the size of the first. A
/// short last chunk would be slow, since llama.cpp computes flash attention for fewer than 64 tokens one token at a
/// time.
fn even_chunk(pending: usize, max: usize) -> usize {
    pending.div_ceil(pending.div_ceil(max.max(1)).max(1))
}

impl Scheduler<'_> {
    /// Plans the next batch: generating runs first, unless a prefill phase has not ended, then prompts in order of arrival.
    pub(super) fn plan(&mut self) -> Vec<BatchPart> {
        let mut budget = self.options.batch_size as usize;
        let mut ready: Vec<ReadyRun> = Vec::new();
        let mut captures = 0;
        for index in self.slots.by_arrival() {
            if self.awaits_prefix(index) {
                continue;
            }
            self.prepare_slot(index);
            let Some(active) = self.slots.get(index) else { continue };
            let Some(_) = active.run.logits_from() else { continue };
            if active.run.has_outputs() || active.is_paused() {
                continue;
            }
            if active.run.request().attention {
                captures += 1;
                if !self.recording.has_room_for_attention(captures) {
                    continue;
                }
            }
            let is_generating = active.run.has_decoded_prompt();
            ready.push(ReadyRun {
                slot: index,
                arrival: active.arrival,
                left: active.run.max_decode_len(),
                is_generating,
            });
        }
        if let Err(error) = self.retain_same_adapters(&mut ready) {
            for ReadyRun { slot, .. } in ready {
                if let Some(active) = self.slots.get_mut(slot) {
                    active.run.abort(EndCause::DecodeFailed, error.to_string());
                }
            }
            return Vec::new();
        }
        let generating = ready.iter().any(|run| run.left <= MAX_SHORT_DECODE);
        // While other runs generate, prompts get one physical batch per decode, so that generation is not delayed for
        // long.
        let prompt_budget = if generating { self.options.ubatch_size as usize } else { budget };
        ready.sort_unstable_by_key(|run| (run.left > MAX_SHORT_DECODE, run.arrival));
        let policy = self.prefill_policy();
        let has_prompts = ready.iter().any(|run| run.left > MAX_SHORT_DECODE);
        let prefill_is_over = self.prefill_phase.is_over(policy);
        let some_generate = ready.iter().any(|run| run.left <= MAX_SHORT_DECODE && run.is_generating);
        let prompts_only = has_prompts && !prefill_is_over;
        let mut parts: Vec<(usize, usize)> = Vec::new();
        let mut prompts = 0;
        for ReadyRun { slot, left, is_generating, .. } in ready {
            let take = match left {
                ..=MAX_SHORT_DECODE if prompts_only && is_generating => continue,
                ..=MAX_SHORT_DECODE => left,
                // llama.cpp decodes parts of different length one after the other, so nothing is gained by both at once.
                _ if prefill_is_over && some_generate => continue,
                _ if prompts == 0 => even_chunk(left, prompt_budget.min(policy.max_chunk_tokens)),
                _ if prompts + left <= policy.max_shared_tokens => left,
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
        self.prefill_phase.planned = prompts;
        parts.sort_unstable();
        let drafts = self.draft(&parts, captures);
        let planned = parts.into_iter().zip(drafts);
        planned.filter_map(|((index, take), draft)| self.add_part(index, take, &draft)).collect()
    }

    fn prefill_policy(&self) -> &'static PrefillPolicy {
        if self.kv.has_gpu() { &GPU_PREFILL } else { &CPU_PREFILL }
    }

    /// Keeps those `ready` runs that use the same adapters as the run that has waited longest for a decode, and applies
    /// these adapters.
    ///
    /// # Errors
    /// llama.cpp rejects the adapters.
    fn retain_same_adapters(&mut self, ready: &mut Vec<ReadyRun>) -> Result<(), ModelError> {
        if !self.kv.has_adapters() {
            return Ok(());
        }
        let order_and_adapters = |ready: &ReadyRun| {
            let active = self.slots.get(ready.slot)?;
            Some((active.last_batch, active.arrival, active.run.request().adapters.clone()?))
        };
        let next = ready.iter().filter_map(order_and_adapters).min_by_key(|&(turn, arrival, _)| (turn, arrival));
        let Some((_, _, set)) = next else { return Ok(()) };
        ready.retain(|run| order_and_adapters(run).is_some_and(|(_, _, other)| other == set));
        self.partial_batches += 1;
        for one in ready {
            if let Some(active) = self.slots.get_mut(one.slot) {
                active.last_batch = self.partial_batches;
            }
        }
        self.kv.set_adapters(&set)
    }

    /// Returns true if a run that has not started should wait for a copy of a prefix of its prompt, which an earlier run
    /// is computing. Prompts are computed one after the other, so computing the prefix twice would take longer.
    fn awaits_prefix(&self, index: usize) -> bool {
        let Some(active) = self.slots.get(index).filter(|active| !active.has_state) else { return false };
        let Some(outputs_from) = active.run.logits_from() else { return false };
        let prompt = active.run.prompt_view();
        // Shorter prompts are computed together.
        let min_saved = self.prefill_policy().max_shared_tokens;
        (0..self.slots.len()).filter_map(|slot| Some((slot, self.slots.get(slot)?))).any(|(slot, source)| {
            let sequence = source.run.sequence();
            let computes = source.has_state
                && source.arrival < active.arrival
                && source.run.needs_decode()
                && !source.run.has_decoded_prompt()
                && !source.run.has_outputs()
                && !source.is_paused()
                && source.run.request().adapters == active.run.request().adapters;
            let expected = || common_prefix(sequence.tokens(), prompt.tokens).min(outputs_from);
            computes
                && Some(expected()).filter(|&expected| expected > sequence.kv_len()).is_some_and(|expected| {
                    self.kv.should_await(index, prompt, outputs_from, (slot, expected), min_saved)
                })
        })
    }

    /// Prepares a slot's KV cache for the next decode: finds a prefix match before the first decode, and removes the
    /// tokens that the run has dropped.
    fn prepare_slot(&mut self, index: usize) {
        let Self { kv, slots, .. } = self;
        let Some(active) = slots.get_mut(index) else { return };
        let Some(outputs_from) = active.run.logits_from() else { return };
        active.speculation.lookahead.clear();
        let first = !std::mem::replace(&mut active.has_state, true);
        if first {
            let kv_len = kv.reuse(index, active.run.prompt_view(), outputs_from);
            active.run.sequence_mut().set_kv_len(kv_len);
            if kv.keeps_checkpoints() {
                active.run.plan_checkpoints(outputs_from);
            }
        }
        let needs_exact_rows = active.run.request().attention;
        let sequence = active.run.sequence_mut();
        let removals = sequence.take_kv_removals();
        let kv_len = kv.apply_removals(index, removals, sequence.kv_len(), needs_exact_rows);
        sequence.set_kv_len(kv.truncate(index, kv_len));
        if first && !active.had_slot {
            sequence.count_cached_tokens();
            active.run.report_progress();
            // A run with unsent outputs is left out of the batch.
            active.flush_outbox();
        }
    }

    fn add_part(&mut self, index: usize, take: usize, draft: &[TokenId]) -> Option<BatchPart> {
        let run = &self.slots.get(index)?.run;
        let outputs_from = run.logits_from()?;
        let from = run.sequence().kv_len();
        let end = from + take;
        let mut part = BatchPart { slot: index, outputs: Vec::new(), from, end, draft: Vec::new() };
        for (position, &token) in run.sequence().tokens().iter().enumerate().take(end).skip(from) {
            let output = position >= outputs_from;
            match self.kv.add(index, token, position, output, run.captures(position, output)) {
                Ok(at) if output => part.outputs.push((at, position)),
                Ok(_) => {}
                Err(error) => {
                    // The plan respects the batch size. If it ever does not, the rest goes into the next batch.
                    tracing::error!(%error, "batch exceeds its planned size");
                    return Some(BatchPart { end: position, ..part });
                }
            }
        }
        for (position, &token) in (end..).zip(draft) {
            // Without room for all of them, the draft is shorter.
            let Ok(at) = self.kv.add(index, token, position, true, run.request().attention) else { break };
            part.draft.push((at, token));
        }
        Some(part)
    }

    /// Decodes the batch and passes the logits to its runs.
    pub(super) fn decode(&mut self, parts: Vec<BatchPart>) {
        let begun = Instant::now();
        let captured = match self.kv.decode() {
            Ok(captured) => captured,
            Err(error) => return self.fail(&parts, &error),
        };
        self.charge_drafts(&parts, begun);
        let mut captured = captured.into_iter().peekable();
        // Rows are in the order of the tokens; those of rejected tokens are skipped.
        let mut take_row = |index| {
            while captured.next_if(|row| row.index < index).is_some() {}
            captured.next_if(|row| row.index == index).map(Arc::new)
        };
        for part in parts {
            let Self { kv, slots, commands, candidates, .. } = self;
            let Some(active) = slots.get_mut(part.slot) else { continue };
            active.run.sequence_mut().set_kv_len(part.end);
            let checkpoint = active.run.take_due_checkpoint();
            kv.extend(part.slot, &active.run.sequence().tokens()[part.from..part.end], checkpoint);
            active.run.report_progress();
            active.run.set_drafted(part.draft.first().map(|&(_, token)| token));
            for &(index, position) in &part.outputs {
                if let Some(row) = take_row(index) {
                    active.run.set_attention(row);
                }
                active
                    .run
                    .on_logits(position, kv.logits(index), candidates, &|id, call| reply_sender(commands, id, call));
            }
            self.deliver_draft(&part, &mut take_row);
            self.wipe_invalid_state(part.slot);
        }
        self.count_decode();
    }

    /// Discards a slot's state if its run got logits that were not numbers.
    pub(super) fn wipe_invalid_state(&mut self, index: usize) {
        if self.slots.get(index).is_some_and(|active| active.run.has_invalid_logits()) {
            self.kv.wipe(index);
        }
    }

    /// Handles a failed decode: the runs of the batch fail, all others continue.
    fn fail(&mut self, parts: &[BatchPart], error: &ModelError) {
        tracing::error!(%error, "decode failed");
        let cause = match error {
            ModelError::OutOfMemory => EndCause::OutOfMemory,
            _ => EndCause::DecodeFailed,
        };
        for part in parts {
            self.kv.discard(part.slot);
            if let Some(active) = self.slots.get_mut(part.slot) {
                active.run.sequence_mut().set_kv_len(0);
                active.run.abort(cause, error.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CPU_PREFILL, MAX_PREFILL_TOKENS, MIN_PREFILL_DECODES, PrefillPhase, even_chunk};
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn generating_runs_wait_for_enough_tokens_and_time_of_prompts() {
        let generation = Duration::from_millis(3);
        let mut turn = PrefillPhase { generation, ..PrefillPhase::default() };
        // A chunk of 256 tokens that takes as long as seven decodes: its tokens suffice, its time does not.
        turn.planned = CPU_PREFILL.tokens_between_decodes;
        turn.count(7 * generation);
        assert!(!turn.is_over(&CPU_PREFILL));
        turn.count((MIN_PREFILL_DECODES - 7) * generation);
        assert!(turn.is_over(&CPU_PREFILL));
        // The next turn starts after a decode without prompts, which a slow model's chunk exceeds at once.
        turn.planned = 0;
        turn.count(generation);
        assert!(!turn.is_over(&CPU_PREFILL));
        turn.planned = CPU_PREFILL.tokens_between_decodes - 1;
        turn.count(100 * generation);
        assert!(!turn.is_over(&CPU_PREFILL));
        turn.planned = 1;
        turn.count(Duration::ZERO);
        assert!(turn.is_over(&CPU_PREFILL));
        // One slow decode does not stop the generating runs for long.
        turn.planned = 0;
        turn.count(Duration::from_mins(1));
        turn.planned = MAX_PREFILL_TOKENS;
        turn.count(generation);
        assert!(turn.is_over(&CPU_PREFILL));
    }

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
