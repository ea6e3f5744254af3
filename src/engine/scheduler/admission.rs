//! Assignment of runs to slots, and the KV state that each run starts with.

use super::active_run::{ActiveRun, Slot};
use super::{Scheduler, done};
use crate::engine::kv::conversation;
use crate::engine::kv::conversation::{Alignment, SlotHistory, align};
use crate::engine::kv::host_cache::CachedState;
use crate::engine::request::Overflow;
use crate::engine::run::Run;
use crate::events::{FinishReason, TokenId};
use crate::model::llama::AdapterSet;
use crate::model::{ShiftError, common_prefix};
use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// Minimum tokens of a piece that is shifted after an eviction; computing fewer again takes no longer.
const MIN_PIECE_TOKENS: usize = 32;

/// A slot for a run, with the prompt aligned to the slot's history.
struct SlotChoice {
    slot: usize,
    aligned: Option<Alignment>,
    history: SlotHistory,
}

/// Match of a prompt with one cached state.
struct PrefixMatch {
    aligned: Option<Alignment>,
    shared: usize,
    /// Tokens that remain usable after the eviction of messages from a prompt that is longer than the context.
    reusable: usize,
}

impl Scheduler<'_> {
    /// Gives free slots to queued runs, in order of arrival. A run that waits for a specific slot lets others pass.
    pub(super) fn admit(&mut self) {
        let gone = |live: &ActiveRun| live.client.is_closed();
        while let Some(at) = self.queue.iter().position(gone) {
            let Some(mut live) = self.queue.remove(at) else { break };
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            let before = if live.had_slot { "resumed" } else { "started" };
            live.run.abort(FinishReason::Cancelled, format!("the client disconnected before the run {before}"));
            if live.had_slot {
                live.count_end(&self.status);
            }
            // Like every end, after the attention rows that are still being encoded.
            self.record_end(live);
        }
        let mut at = 0;
        while at < self.queue.len() && self.slots.iter().any(|slot| slot.active.is_none()) {
            let Some(choice) = self.choose_slot(&self.queue[at]) else {
                at += 1;
                continue;
            };
            let Some(live) = self.queue.remove(at) else { return };
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            self.start_run(live, choice);
        }
    }

    /// Returns the slot with the longest prefix match; without a match worth reusing, an empty slot or the least
    /// recently used one. Returns `None` while the requested slot is busy or a task for the slot came first.
    fn choose_slot(&self, live: &ActiveRun) -> Option<SlotChoice> {
        let run = &live.run;
        let awaited = |index: usize| self.tasks.iter().any(|task| task.slot == index && task.arrival < live.arrival);
        let free = |index: &usize| {
            self.slots[*index].active.is_none()
                && run.request.slot.is_none_or(|own| own as usize == *index)
                && !awaited(*index)
        };
        let prompt_len = run.sequence.len() as f32;
        let similarity = self.options.slot_prompt_similarity;
        let (slot, prefix) = (0..self.slots.len())
            .filter(free)
            .map(|index| {
                let Slot { cache, adapters, history, .. } = &self.slots[index];
                let reach = |keep| self.context.reach(index as i32, keep);
                (index, self.match_prefix(run, cache, adapters.as_ref(), history, reach))
            })
            .max_by_key(|(index, prefix)| {
                let slot = &self.slots[*index];
                let worth = similarity > 0.0 && prefix.reusable as f32 >= similarity * prompt_len;
                (
                    if worth { prefix.reusable } else { 0 },
                    // Lowest slots first: neighbouring sequences in the cache decode together.
                    Reverse(slot.cache.len().min(1)),
                    Reverse(slot.last_used),
                    Reverse(*index),
                )
            })?;
        let idle = self.host_cache.iter().map(|idle| {
            let reach = |keep| self.context.reach_of_saved(idle.tokens.len(), &idle.checkpoints, keep);
            (idle, self.match_prefix(run, &idle.tokens, idle.adapters.as_ref(), &idle.history, reach))
        });
        let best_idle = idle
            .filter(|(idle, other)| other.reusable > prefix.reusable && idle.is_worth_copying(other.reusable))
            .max_by_key(|(_, other)| other.reusable);
        Some(match best_idle {
            Some((idle, prefix)) => slot_choice(slot, prefix, &idle.history),
            None => slot_choice(slot, prefix, &self.slots[slot].history),
        })
    }

    /// Matches a run's prompt with a cached state. `reach` returns how many of the first `keep` tokens of the state can
    /// be used without the rest.
    fn match_prefix(
        &self,
        run: &Run,
        cached: &[TokenId],
        adapters: Option<&AdapterSet>,
        history: &SlotHistory,
        reach: impl Fn(usize) -> usize,
    ) -> PrefixMatch {
        if !run.request.cache_prompt || adapters != run.request.adapters.as_ref() {
            return PrefixMatch { aligned: None, shared: 0, reusable: 0 };
        }
        let context = self.options.ctx_size as usize;
        let evicts = run.request.overflow == Overflow::Evict;
        let forget = evicts && run.sequence.len() > conversation::eviction_target(context);
        let aligned = align(&run.sequence, &run.request.spans, cached, history, &run.view.vocabulary, forget);
        let (tokens, spans) =
            aligned.as_ref().map_or((&run.sequence, &run.request.spans), |aligned| (&aligned.tokens, &aligned.spans));
        let shared = common_prefix(cached, tokens);
        let evicted_from = if evicts && tokens.len() >= context {
            conversation::droppable_parts(tokens, spans, &run.view.vocabulary).first().map(|part| part.range.start)
        } else {
            None
        };
        let reusable = evicted_from.map_or(shared, |evicted_from| shared.min(evicted_from));
        // At least one token is always evaluated.
        let kept = reusable.min(tokens.len().saturating_sub(1));
        let usable = if kept == cached.len() { kept } else { reach(kept) };
        let reusable = if usable == kept { reusable } else { usable };
        PrefixMatch { aligned, shared, reusable }
    }

    fn start_run(&mut self, mut live: ActiveRun, choice: SlotChoice) {
        if !live.had_slot {
            let commands = self.commands.clone();
            live.run.fit_prompt(choice.aligned, choice.history);
            live.run.assign_slot(choice.slot as u32);
            live.run.begin(&|id, call| done(&commands, id, call));
        }
        self.slots[choice.slot].owner.clone_from(&live.run.request.owner);
        self.slots[choice.slot].active = Some(live);
        self.slots[choice.slot].last_used = self.arrivals;
    }

    /// Prepares the slot's state for the first decode of a run: reuses what the slot holds, or a state from the host
    /// cache.
    pub(super) fn reuse_state(&mut self, index: usize, live: &mut ActiveRun, outputs_from: usize) {
        let run = &mut live.run;
        let slot = &self.slots[index];
        let same = slot.adapters == run.request.adapters;
        let usable = |cache: &[TokenId]| {
            if run.request.cache_prompt { common_prefix(cache, &run.sequence) } else { 0 }
        };
        let mut shared = if same { usable(&slot.cache) } else { 0 };
        let kept = shared.min(outputs_from);
        let reach = if kept < slot.cache.len() { self.context.reach(index as i32, kept) } else { kept };
        if reach < kept {
            shared = reach;
        }
        if 2 * shared < slot.cache.len() {
            self.store_idle_state(index);
        }
        if run.request.cache_prompt
            && let Some(at) = self.host_cache.find_best(
                &run.sequence[..outputs_from],
                run.request.adapters.as_ref(),
                shared.min(outputs_from),
                |idle, keep| self.context.reach_of_saved(idle.tokens.len(), &idle.checkpoints, keep),
            )
            && let Some(idle) = self.host_cache.take(at)
        {
            shared = 0;
            if self.load_idle_state(index, &idle) {
                shared = usable(&idle.tokens);
                if !self.context.keeps_beginnings() {
                    // A recurrent state cannot return to this position once it is continued, so the cache keeps its
                    // copy.
                    self.host_cache.insert(idle);
                }
            }
        }
        self.slots[index].adapters.clone_from(&run.request.adapters);
        // Tokens after evicted messages are shifted, as during an eviction in the middle of an answer.
        let evicted = run.request.overflow == Overflow::Evict && run.evictions.truncated;
        let min_len = if evicted && run.request.cache_reuse == 0 { MIN_PIECE_TOKENS } else { run.request.cache_reuse };
        if run.request.cache_prompt && min_len > 0 && shared > 0 && self.context.can_shift() {
            let pieces = pieces(&self.slots[index].cache, &run.sequence, shared, min_len);
            shared = self.shift_pieces(index, shared, &pieces);
        }
        if run.request.attention && !self.context.rows_exact(index as i32) {
            shared = 0;
        }
        run.kv_len = shared.min(outputs_from);
        if self.context.keeps_checkpoints() {
            run.plan_checkpoints(outputs_from);
        }
    }

    /// Keeps only the beginning of a slot's state and these pieces, adjacent to each other. Returns the number of
    /// tokens left.
    fn shift_pieces(&mut self, index: usize, beginning: usize, pieces: &[Range<usize>]) -> usize {
        let Some(end) = pieces.last().map(|last| last.end) else { return beginning };
        if self.truncate(index, end) < end {
            return self.slots[index].cache.len().min(beginning);
        }
        let mut from = beginning;
        let mut gaps = Vec::with_capacity(pieces.len());
        for piece in pieces {
            gaps.push(from..piece.start);
            from = piece.end;
        }
        let ranges: Vec<_> = gaps.iter().map(|gap| gap.start as u32..gap.end as u32).collect();
        match self.context.cut(index as i32, end as u32, &ranges) {
            Ok(left) => {
                for gap in gaps.iter().rev() {
                    self.slots[index].cache.drain(gap.clone());
                }
                left as usize
            }
            Err(ShiftError::Fixed(_)) => beginning,
            Err(ShiftError::Failed) => {
                self.slots[index].cache.clear();
                0
            }
        }
    }

    /// Copies a slot's state to the host cache, if it has room and a use for it.
    fn store_idle_state(&mut self, index: usize) {
        let slot = &self.slots[index];
        if !self.host_cache.should_store(&slot.cache, slot.adapters.as_ref()) {
            return;
        }
        match self.context.save(index as i32) {
            Ok(state) => {
                let Slot { cache, adapters, history, .. } = slot;
                self.host_cache.insert(CachedState {
                    tokens: cache.clone(),
                    adapters: adapters.clone(),
                    state,
                    checkpoints: self.context.checkpoints(index as i32).clone(),
                    history: history.clone(),
                });
            }
            Err(error) => tracing::warn!(%error, slot = index, "slot state not cached"),
        }
    }

    /// Restores a cached state into a slot. Returns `false` and leaves the slot empty if that fails.
    fn load_idle_state(&mut self, index: usize, idle: &CachedState) -> bool {
        let restored = self.context.restore(index as i32, &idle.state, idle.tokens.len() as u32);
        let slot = &mut self.slots[index];
        match restored {
            Ok(()) => {
                slot.cache.clone_from(&idle.tokens);
                self.context.set_checkpoints(index as i32, idle.checkpoints.clone());
            }
            Err(error) => {
                tracing::warn!(%error, slot = index, "cached state not restored");
                slot.cache.clear();
                return false;
            }
        }
        true
    }
}

/// Returns pieces of a state, after the common prefix, that appear in the prompt in the same order.
fn pieces(cached: &[TokenId], prompt: &[TokenId], shared: usize, min_len: usize) -> Vec<Range<usize>> {
    let (mut at, mut wanted) = (shared, shared);
    let mut pieces = Vec::new();
    while at < cached.len() && wanted < prompt.len() {
        let same = common_prefix(&cached[at..], &prompt[wanted..]);
        if same >= min_len {
            pieces.push(at..at + same);
            at += same;
            wanted += same;
        } else {
            at += 1;
        }
    }
    pieces
}

fn slot_choice(slot: usize, prefix: PrefixMatch, history: &SlotHistory) -> SlotChoice {
    let mut history = history.clone();
    history.truncate(prefix.shared);
    SlotChoice { slot, aligned: prefix.aligned, history }
}

#[cfg(test)]
mod tests {
    use super::pieces;

    #[test]
    fn pieces_are_found_in_order() {
        let cached = [1, 2, 3, 90, 91, 4, 5, 6, 92, 7, 8, 9];
        assert_eq!(pieces(&cached, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 3, 3), [5..8, 9..12]);
        assert!(pieces(&cached, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 3, 4).is_empty());
        assert!(pieces(&cached, &[1, 2, 3], 3, 1).is_empty());
        assert_eq!(pieces(&cached, &[1, 2, 3, 7, 8, 4, 5, 6], 3, 2), [9..11]);
    }
}
