//! Planning of a batch: selection of runs, preparation of their KV state, and selection of their tokens.

use super::batch::{BatchPart, PlannedPart};
use super::drafts::Drafter;
use super::prefill::{PrefillPhase, PrefillPolicy, even_chunk};
use super::run_slots::RunSlots;
use crate::engine::kv::prompt::ExpectedPrefix;
use crate::engine::kv::slots::KvSlots;
use crate::engine::options::EngineOptions;
use crate::engine::recording::Recording;
use crate::events::{EndCause, TokenId};
use crate::model::{ModelError, common_prefix};
use std::time::Duration;

/// Maximum tokens of a short decode. Short decodes precede the decodes of prompts.
const MAX_SHORT_DECODE: usize = 16;

/// A run that is ready for a decode.
struct ReadyRun {
    slot: usize,
    arrival: u64,
    /// Tokens that it wants to decode.
    tokens: usize,
    /// True if the run has decoded its prompt.
    is_generating: bool,
    /// True if these tokens belong to an image.
    is_image: bool,
}

impl ReadyRun {
    fn is_short(&self) -> bool {
        self.tokens <= MAX_SHORT_DECODE
    }
}

/// Planner of the batches.
pub struct BatchPlanner {
    batch_size: usize,
    ubatch_size: usize,
    prefill_phase: PrefillPhase,
    /// Number of batches for which adapters were chosen. Runs with different adapters take turns.
    adapter_turn: u64,
    /// True if the last batch was an image.
    was_image: bool,
}

impl BatchPlanner {
    /// Creates the planner.
    pub fn new(options: &EngineOptions) -> Self {
        Self {
            batch_size: options.batch_size as usize,
            ubatch_size: options.ubatch_size as usize,
            prefill_phase: PrefillPhase::default(),
            adapter_turn: 0,
            was_image: false,
        }
    }

    /// Fills the next batch: generating runs first, unless a prefill phase has not ended, then prompts in order of
    /// arrival. Returns its parts.
    pub fn plan(
        &mut self,
        kv: &mut KvSlots<'_>,
        slots: &mut RunSlots,
        recording: &Recording,
        drafter: &mut Drafter<'_>,
    ) -> Vec<BatchPart> {
        let policy = PrefillPolicy::select(kv.has_gpu());
        let mut ready: Vec<ReadyRun> = Vec::new();
        let mut capturing_runs = 0;
        for index in slots.by_arrival() {
            if awaits_prefix(kv, slots, index, policy.max_shared_tokens) || is_delayed(slots, index) {
                continue;
            }
            prepare_slot(kv, slots, index);
            let Some(scheduled) = slots.get_mut(index).filter(|scheduled| scheduled.is_ready()) else { continue };
            let is_image = scheduled.run.next_is_image();
            if is_image && scheduled.run.next_embeddings().is_none() {
                scheduled.run.abort(EndCause::DecodeFailed, "the run lacks the embeddings of an image in its prompt");
                continue;
            }
            if scheduled.run.request().attention {
                capturing_runs += 1;
                if !recording.has_room_for_attention(capturing_runs) {
                    continue;
                }
            }
            ready.push(ReadyRun {
                slot: index,
                arrival: scheduled.arrival(),
                tokens: scheduled.run.max_decode_len(),
                is_generating: scheduled.run.has_decoded_prompt(),
                is_image,
            });
        }
        if let Err(error) = self.retain_same_adapters(kv, slots, &mut ready) {
            for ReadyRun { slot, .. } in ready {
                if let Some(scheduled) = slots.get_mut(slot) {
                    scheduled.run.abort(EndCause::DecodeFailed, error.to_string());
                }
            }
            return Vec::new();
        }
        if let Some(run) = self.take_image(&mut ready) {
            let others = ready.iter().any(ReadyRun::is_short);
            let budget = if others { self.ubatch_size } else { self.batch_size };
            let part = add_image(kv, slots, run.slot, budget.min(policy.max_chunk_tokens));
            self.prefill_phase.plan(part.as_ref().map_or(0, |part| part.end - part.from));
            return part.into_iter().collect();
        }
        let parts = self.select_tokens(ready, policy);
        let drafts = drafter.draft(&parts, slots, recording, capturing_runs);
        let planned = parts.into_iter().zip(drafts);
        planned.filter_map(|(part, draft)| add_part(kv, slots, part, &draft)).collect()
    }

    /// Removes the runs that continue with an image. Returns the one that arrived first if its image is decoded next:
    /// an image cannot share a decode, so images and batches of other runs take turns.
    fn take_image(&mut self, ready: &mut Vec<ReadyRun>) -> Option<ReadyRun> {
        let (images, texts): (Vec<ReadyRun>, Vec<ReadyRun>) =
            std::mem::take(ready).into_iter().partition(|run| run.is_image);
        *ready = texts;
        let turn = ready.is_empty() || !self.was_image;
        let next = images.into_iter().filter(|_| turn).min_by_key(|run| run.arrival);
        self.was_image = next.is_some();
        next
    }

    /// Adds the decode of the planned batch, which took `elapsed`.
    pub fn add_decode(&mut self, elapsed: Duration) {
        self.prefill_phase.add_decode(elapsed);
    }

    /// Selects the number of tokens to decode for each run. Returns the parts in order of slots.
    fn select_tokens(&mut self, mut ready: Vec<ReadyRun>, policy: &PrefillPolicy) -> Vec<PlannedPart> {
        ready.sort_unstable_by_key(|run| (!run.is_short(), run.arrival));
        let has_short_decodes = ready.iter().any(ReadyRun::is_short);
        let has_prompts = ready.iter().any(|run| !run.is_short());
        let has_generating = ready.iter().any(|run| run.is_short() && run.is_generating);
        let prefill_is_over = self.prefill_phase.is_over(policy);
        let mut budget = self.batch_size;
        // While other runs generate, prompts get one physical batch per decode, so that generation is not delayed for
        // long.
        let prompt_budget = if has_short_decodes { self.ubatch_size } else { budget };
        let mut parts: Vec<PlannedPart> = Vec::new();
        let mut prompt_tokens = 0;
        for run in ready {
            let tokens = if run.is_short() {
                if has_prompts && !prefill_is_over && run.is_generating {
                    continue;
                }
                run.tokens
            } else if prefill_is_over && has_generating {
                // llama.cpp decodes parts of different length one after the other, so sharing a batch saves no time.
                continue;
            } else if prompt_tokens == 0 {
                even_chunk(run.tokens, prompt_budget.min(policy.max_chunk_tokens))
            } else if prompt_tokens + run.tokens <= policy.max_shared_tokens {
                run.tokens
            } else {
                continue;
            };
            let tokens = tokens.min(budget);
            if tokens == 0 {
                continue;
            }
            budget -= tokens;
            if !run.is_short() {
                prompt_tokens += tokens;
            }
            parts.push(PlannedPart { slot: run.slot, tokens });
        }
        self.prefill_phase.plan(prompt_tokens);
        parts.sort_unstable_by_key(|part| part.slot);
        parts
    }

    /// Keeps only the runs that use the same adapters as the run that has waited longest, and applies these adapters.
    ///
    /// # Errors
    /// llama.cpp rejects the adapters.
    fn retain_same_adapters(
        &mut self,
        kv: &mut KvSlots<'_>,
        slots: &mut RunSlots,
        ready: &mut Vec<ReadyRun>,
    ) -> Result<(), ModelError> {
        if !kv.has_adapters() {
            return Ok(());
        }
        let order_and_adapters = |ready: &ReadyRun| {
            let scheduled = slots.get(ready.slot)?;
            Some((scheduled.adapter_order(), scheduled.run.request().adapters.clone()?))
        };
        let next = ready.iter().filter_map(order_and_adapters).min_by_key(|&(order, _)| order);
        let Some((_, set)) = next else { return Ok(()) };
        ready.retain(|run| order_and_adapters(run).is_some_and(|(_, other)| other == set));
        self.adapter_turn += 1;
        for run in ready {
            if let Some(scheduled) = slots.get_mut(run.slot) {
                scheduled.set_adapter_turn(self.adapter_turn);
            }
        }
        kv.set_adapters(&set)
    }
}

/// Returns true if a new run should wait until an earlier run has decoded a common prefix of their prompts, to copy its
/// state. A copy must save `min_saved` or more tokens.
fn awaits_prefix(kv: &KvSlots<'_>, slots: &RunSlots, index: usize, min_saved: usize) -> bool {
    let Some(scheduled) = slots.get(index).filter(|scheduled| !scheduled.owns_kv()) else { return false };
    let Some(must_decode_from) = scheduled.run.logits_from() else { return false };
    let prompt = scheduled.run.prompt_view();
    (0..slots.len()).filter_map(|slot| Some((slot, slots.get(slot)?))).any(|(slot, source)| {
        let is_decoding_prompt = source.owns_kv()
            && source.arrival() < scheduled.arrival()
            && source.is_ready()
            && !source.run.has_decoded_prompt()
            && source.run.prompt_view().key == prompt.key;
        is_decoding_prompt && {
            let sequence = source.run.sequence();
            let tokens = common_prefix(sequence.tokens(), prompt.tokens).min(must_decode_from);
            let expected = ExpectedPrefix { slot, tokens };
            tokens > sequence.kv_len() && kv.should_await(index, prompt, must_decode_from, expected, min_saved)
        }
    })
}

/// Returns true if the slot's state is that of its run, but the run does not take part in the next decode. It then keeps
/// its state, and the decoded draft that may follow it, until it is ready.
fn is_delayed(slots: &RunSlots, index: usize) -> bool {
    slots.get(index).is_some_and(|scheduled| scheduled.owns_kv() && !scheduled.is_ready())
}

/// Prepares a slot's KV state for the next decode: finds a prefix match before the first one, and removes the tokens
/// that the run has dropped.
fn prepare_slot(kv: &mut KvSlots<'_>, slots: &mut RunSlots, index: usize) {
    let Some(scheduled) = slots.get_mut(index) else { return };
    let Some(logits_from) = scheduled.run.logits_from() else { return };
    // The truncation below removes the tokens of a draft.
    scheduled.discard_draft();
    let is_first = scheduled.take_over_kv();
    let kv_len = if is_first {
        kv.reuse(index, scheduled.run.prompt_view(), logits_from)
    } else {
        scheduled.run.sequence().kv_len()
    };
    let needs_cells_in_order = scheduled.run.request().attention;
    let sequence = scheduled.run.sequence_mut();
    let kv_len = kv.apply_removals(index, sequence.take_kv_removals(), kv_len, needs_cells_in_order);
    sequence.set_kv_len(kv.truncate(index, kv_len));
    if is_first && kv.uses_checkpoints() {
        scheduled.run.plan_checkpoints(logits_from);
    }
    // Only before the first decode of the run, which may have been preempted before.
    if scheduled.run.sequence_mut().count_cached_tokens() {
        scheduled.run.report_progress();
        // A run with unsent outputs is left out of the batch.
        scheduled.flush_outbox();
    }
}

/// Makes the next embeddings of a run the next decode: up to `budget`, or a whole image that cannot be divided. Returns
/// its only part. Ends the run if llama.cpp cannot decode the embeddings.
fn add_image(kv: &mut KvSlots<'_>, slots: &mut RunSlots, slot: usize, budget: usize) -> Option<BatchPart> {
    let run = &slots.get(slot)?.run;
    let logits_from = run.logits_from()?;
    let from = run.sequence().kv_len();
    let embeddings = run.next_embeddings()?;
    let max = run.max_decode_len();
    let tokens = if embeddings.is_undivided() { embeddings.count() } else { even_chunk(max, budget) };
    let outputs: Vec<bool> = (from..from + tokens).map(|position| position >= logits_from).collect();
    if let Err(error) = kv.set_embeddings(slot, embeddings.first(tokens), from, &outputs) {
        slots.get_mut(slot)?.run.abort(EndCause::DecodeFailed, error.to_string());
        return None;
    }
    let outputs = (0..tokens).zip(from..).filter(|&(_, position)| position >= logits_from).collect();
    Some(BatchPart { slot, from, end: from + tokens, outputs, draft: Vec::new() })
}

/// Adds the next tokens of a run and its draft to the batch. Returns the part.
fn add_part(
    kv: &mut KvSlots<'_>,
    slots: &RunSlots,
    PlannedPart { slot, tokens }: PlannedPart,
    draft: &[TokenId],
) -> Option<BatchPart> {
    let run = &slots.get(slot)?.run;
    let logits_from = run.logits_from()?;
    let from = run.sequence().kv_len();
    let end = from + tokens;
    let mut part = BatchPart { slot, from, end, outputs: Vec::new(), draft: Vec::new() };
    for (position, &token) in run.sequence().tokens().iter().enumerate().take(end).skip(from) {
        let output = position >= logits_from;
        match kv.add(slot, token, position, run.token_outputs(position, output)) {
            Ok(at) if output => part.outputs.push((at, position)),
            Ok(_) => {}
            Err(error) => {
                // A plan never exceeds the batch size. If one did, the remaining tokens go into the next batch.
                tracing::error!(%error, "batch exceeds its planned size");
                return Some(BatchPart { end: position, ..part });
            }
        }
    }
    for (position, &token) in (end..).zip(draft) {
        // If the batch is full, the draft is shortened.
        let Ok(at) = kv.add(slot, token, position, run.draft_outputs()) else { break };
        part.draft.push((at, token));
    }
    Some(part)
}
