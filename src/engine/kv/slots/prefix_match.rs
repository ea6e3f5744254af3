//! Reuse of KV state by a new prompt: choice of a slot, and preparation of its state for the first decode.

use super::common_chunks::common_chunks;
use super::{KvSlots, SlotState};
use crate::engine::kv::conversation::{self, Alignment, SlotHistory, align};
use crate::engine::kv::host_cache::{CachedState, MIN_STATE_TOKENS};
use crate::engine::kv::prompt::{ExpectedPrefix, PromptView, SlotChoice, StateKey};
use crate::events::TokenId;
use crate::model::{ShiftError, common_prefix};
use std::cmp::Reverse;
use std::ops::Range;

/// Minimum number of tokens of a chunk that is shifted after an eviction. Decoding fewer tokens again is as fast.
const MIN_CHUNK_TOKENS: usize = 32;

/// Minimum number of tokens that a copy of another slot's state must save. Decoding fewer tokens is as fast as the
/// copy.
const MIN_COPY_TOKENS: usize = 64;

/// An alignment must leave room for the answer, up to the context divided by this number.
const ANSWER_RESERVE_DIVISOR: usize = 4;

/// Match of a prompt with one cached state.
struct PrefixMatch {
    /// Prompt aligned with the history of the state; `None` if nothing changes.
    aligned: Option<Alignment>,
    /// Tokens at the start that prompt and state have in common.
    matched: usize,
    /// Matched tokens that the run can use: up to a position at which the state can be truncated, and only those before
    /// the first evicted message if the prompt is longer than the context.
    reusable: usize,
}

/// State from which a run starts.
enum StateSource {
    /// The slot's own state.
    Own,
    /// A copy of the state of this slot.
    Slot(usize),
    /// A state that was taken from the host cache.
    Cached(Box<CachedState>),
}

impl KvSlots<'_> {
    /// Returns the free slot with the longest prefix match. If no match covers the fraction `similarity` of the prompt,
    /// or if that is 0, returns an empty slot or the least recently used one. Returns `None` if no slot is free.
    pub fn choose(
        &self,
        prompt: PromptView<'_>,
        similarity: f32,
        is_free: impl Fn(usize) -> bool,
    ) -> Option<SlotChoice> {
        let prompt_len = prompt.tokens.len() as f32;
        let (slot, prefix) = (0..self.slots.len())
            .filter(|&index| is_free(index))
            .map(|index| {
                let slot = &self.slots[index];
                let usable_prefix = |keep| self.context.usable_prefix(index as i32, keep);
                (index, self.match_prefix(prompt, &slot.tokens, slot.key(), &slot.history, usable_prefix))
            })
            .max_by_key(|(index, prefix)| {
                let slot = &self.slots[*index];
                let is_similar = similarity > 0.0 && prefix.reusable as f32 >= similarity * prompt_len;
                (
                    if is_similar { prefix.reusable } else { 0 },
                    // Empty slots first.
                    Reverse(slot.tokens.len().min(1)),
                    Reverse(slot.last_used),
                    // Low numbers first, since llama.cpp decodes neighboring sequences together.
                    Reverse(*index),
                )
            })?;
        let entries = self.host_cache.iter().map(|entry| {
            let usable_prefix = |keep| self.context.usable_prefix_of_saved(entry.tokens.len(), &entry.metadata, keep);
            (entry, self.match_prefix(prompt, &entry.tokens, entry.key(), &entry.history, usable_prefix))
        });
        let best_entry = entries
            .filter(|(entry, other)| entry.is_worth_restoring(other.reusable, prefix.reusable))
            .max_by_key(|(_, other)| other.reusable);
        Some(match best_entry {
            Some((entry, prefix)) => slot_choice(slot, prefix, &entry.history),
            None => slot_choice(slot, prefix, &self.slots[slot].history),
        })
    }

    /// Prepares a slot's state for the first decode of a run: uses the slot's own state, a state from the
    /// host cache, or a copy of the state of another slot, which may be busy. Returns the number of tokens that need no
    /// decode, up to `must_decode_from`. The caller truncates the state to them.
    pub fn reuse(&mut self, index: usize, prompt: PromptView<'_>, must_decode_from: usize) -> usize {
        let own = self.match_own(index, prompt, must_decode_from);
        let source = self.choose_source(index, prompt, must_decode_from, own.min(must_decode_from));
        let replaced = if self.loses_state(index, own, &source) { self.save_for_host_cache(index) } else { None };
        let mut matched = match source {
            StateSource::Own => own,
            StateSource::Slot(source) => {
                self.copy_state(source, index);
                common_prefix(&self.slots[index].tokens, prompt.tokens)
            }
            StateSource::Cached(entry) => self.load_from_host_cache(index, *entry, prompt),
        };
        // Inserted last, as the newest state: it may be the only copy, while the slot now has the state of the source.
        if let Some(replaced) = replaced {
            self.host_cache.insert(replaced);
        }
        let StateKey { owner, adapters } = prompt.key;
        (self.slots[index].owner, self.slots[index].adapters) = (owner.cloned(), adapters.cloned());
        // Chunks after evicted messages are shifted, even if the client did not enable `cache_reuse`.
        let evicted = prompt.evicts && prompt.is_truncated;
        let min_len = if evicted && prompt.cache_reuse == 0 { MIN_CHUNK_TOKENS } else { prompt.cache_reuse };
        if prompt.cache_prompt && min_len > 0 && matched > 0 && self.context.can_shift() {
            let chunks = common_chunks(&self.slots[index].tokens, prompt.tokens, matched, min_len);
            matched = self.shift_chunks(index, matched, &chunks);
        }
        if prompt.needs_cells_in_order && !self.context.has_cells_in_order(index as i32) {
            matched = 0;
        }
        matched.min(must_decode_from)
    }

    /// Returns true if waiting for the `expected` prefix of the prompt saves time: a later copy of the state with it saves
    /// `min_saved` or more tokens compared with a start now.
    pub fn should_await(
        &self,
        index: usize,
        prompt: PromptView<'_>,
        must_decode_from: usize,
        expected: ExpectedPrefix,
        min_saved: usize,
    ) -> bool {
        if !prompt.cache_prompt {
            return false;
        }
        let own = self.match_own(index, prompt, must_decode_from).min(must_decode_from);
        let max_known = expected.tokens.saturating_sub(min_saved);
        let others = self.find_source(index, prompt, must_decode_from, own, Some(expected.slot));
        others.map_or(own, |(_, usable)| usable) <= max_known
            && is_worth_copying(expected.tokens, own, expected.tokens)
            && self.find_in_host_cache(prompt, must_decode_from, max_known).is_none()
    }

    /// Returns the number of tokens at the start that the prompt has in common with the slot's own state, or fewer if the
    /// state cannot be cut there. `must_decode_from` is the first token that must be decoded.
    fn match_own(&self, index: usize, prompt: PromptView<'_>, must_decode_from: usize) -> usize {
        let slot = &self.slots[index];
        if !prompt.cache_prompt || slot.key() != prompt.key {
            return 0;
        }
        let matched = common_prefix(&slot.tokens, prompt.tokens);
        let kept = matched.min(must_decode_from);
        let usable = if kept < slot.tokens.len() { self.context.usable_prefix(index as i32, kept) } else { kept };
        if usable < kept { usable } else { matched }
    }

    /// Chooses the state with the most usable tokens for the prompt. `own` tokens of the slot's own state are usable.
    fn choose_source(
        &mut self,
        index: usize,
        prompt: PromptView<'_>,
        must_decode_from: usize,
        own: usize,
    ) -> StateSource {
        let slot = self.find_source(index, prompt, must_decode_from, own, None);
        let known = slot.map_or(own, |(_, usable)| usable);
        let cached = self.find_in_host_cache(prompt, must_decode_from, known).and_then(|at| self.host_cache.take(at));
        match (cached, slot) {
            (Some(entry), _) => StateSource::Cached(Box::new(entry)),
            (None, Some((source, _))) => StateSource::Slot(source),
            (None, None) => StateSource::Own,
        }
    }

    /// Returns true if a run that starts from `source` replaces so much of the slot's own state that the host cache should
    /// keep this. `own` tokens of it match the prompt.
    fn loses_state(&self, index: usize, own: usize, source: &StateSource) -> bool {
        let tokens = &self.slots[index].tokens;
        let is_replaced = !matches!(source, StateSource::Own);
        is_mostly_unmatched(own, tokens) || (is_replaced && tokens.len() - own >= MIN_STATE_TOKENS)
    }

    /// Returns the other slot, except `except`, with the most usable tokens for the prompt, and their number. Returns
    /// `None` if no copy saves time compared with using the `known` tokens of the slot's own state.
    fn find_source(
        &self,
        index: usize,
        prompt: PromptView<'_>,
        must_decode_from: usize,
        known: usize,
        except: Option<usize>,
    ) -> Option<(usize, usize)> {
        if !prompt.cache_prompt {
            return None;
        }
        let usable = |source: usize| {
            let cached = &self.slots[source].tokens;
            let keep = common_prefix(cached, &prompt.tokens[..must_decode_from]);
            self.context.usable_prefix_of_saved(cached.len(), self.context.metadata(source as i32), keep)
        };
        (0..self.slots.len())
            .filter(|&source| source != index && Some(source) != except && self.slots[source].key() == prompt.key)
            .map(|source| (source, usable(source)))
            .filter(|&(source, usable)| is_worth_copying(usable, known, self.slots[source].tokens.len()))
            .max_by_key(|&(_, usable)| usable)
    }

    /// Returns the state in the host cache with the most usable tokens for the prompt, if it saves time compared with
    /// using `known` tokens of another state.
    fn find_in_host_cache(&self, prompt: PromptView<'_>, must_decode_from: usize, known: usize) -> Option<usize> {
        let usable_prefix =
            |entry: &CachedState, keep| self.context.usable_prefix_of_saved(entry.tokens.len(), &entry.metadata, keep);
        let tokens = &prompt.tokens[..must_decode_from];
        prompt.cache_prompt.then(|| self.host_cache.find_best(tokens, prompt.key, known, usable_prefix)).flatten()
    }

    /// Replaces a slot's state with a copy of another slot's. Leaves the slot empty if that fails.
    ///
    /// The state is saved and restored: this copies only the used cells, and puts each token into the cell of its
    /// position. llama.cpp's copy between sequences would copy the whole KV stream.
    fn copy_state(&mut self, source: usize, index: usize) {
        let tokens = self.slots[source].tokens.clone();
        let metadata = self.context.metadata(source as i32).clone();
        let copied = self
            .context
            .save(source as i32)
            .and_then(|state| self.context.restore(index as i32, &state, tokens.len() as u32, metadata));
        match copied {
            Ok(()) => self.slots[index].tokens = tokens,
            Err(error) => {
                tracing::warn!(%error, source, slot = index, "slot state not copied");
                self.discard(index);
            }
        }
    }

    /// Matches a prompt with a cached state. `usable_prefix` returns how many of the first `keep` tokens of the state
    /// are usable if it is truncated there.
    fn match_prefix(
        &self,
        prompt: PromptView<'_>,
        cached: &[TokenId],
        key: StateKey<'_>,
        history: &SlotHistory,
        usable_prefix: impl Fn(usize) -> usize,
    ) -> PrefixMatch {
        if !prompt.cache_prompt || key != prompt.key {
            return PrefixMatch { aligned: None, matched: 0, reusable: 0 };
        }
        let context = self.ctx_size;
        let omit_dropped = prompt.evicts && prompt.tokens.len() > conversation::eviction_target(context);
        let aligned = align(prompt.tokens, prompt.spans, cached, history, prompt.vocabulary, omit_dropped)
            .filter(|aligned| leaves_room(prompt, aligned.tokens.len(), context));
        let (tokens, spans) = aligned
            .as_ref()
            .map_or((prompt.tokens, prompt.spans), |aligned| (aligned.tokens.as_slice(), aligned.spans.as_slice()));
        let matched = common_prefix(cached, tokens);
        let evicted_from = if prompt.evicts && tokens.len() >= context {
            conversation::droppable_parts(tokens, spans, prompt.vocabulary).first().map(|part| part.range.start)
        } else {
            None
        };
        let reusable = evicted_from.map_or(matched, |evicted_from| matched.min(evicted_from));
        // The last token is always decoded, for its logits.
        let kept = reusable.min(tokens.len().saturating_sub(1));
        let usable = if kept == cached.len() { kept } else { usable_prefix(kept) };
        let reusable = if usable == kept { reusable } else { usable };
        PrefixMatch { aligned, matched, reusable }
    }

    /// Removes everything from a slot's state except the first `prefix` tokens and these chunks. Returns the number of
    /// tokens that can be reused; only those of the prefix if the chunks cannot be shifted.
    fn shift_chunks(&mut self, index: usize, prefix: usize, chunks: &[Range<usize>]) -> usize {
        let Some(end) = chunks.last().map(|last| last.end) else { return prefix };
        if self.truncate(index, end) < end {
            return self.slots[index].tokens.len().min(prefix);
        }
        let mut from = prefix;
        let mut gaps = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            gaps.push(from..chunk.start);
            from = chunk.end;
        }
        let ranges: Vec<_> = gaps.iter().map(|gap| gap.start as u32..gap.end as u32).collect();
        match self.context.remove_ranges(index as i32, end as u32, &ranges) {
            Ok(left) => {
                for gap in gaps.iter().rev() {
                    self.slots[index].tokens.drain(gap.clone());
                }
                left as usize
            }
            Err(ShiftError::NotRemovable(_)) => prefix,
            Err(ShiftError::Failed) => {
                self.slots[index].tokens.clear();
                0
            }
        }
    }

    /// Returns a copy of a slot's state for the host cache; `None` if it does not fit or a cached state covers it.
    fn save_for_host_cache(&mut self, index: usize) -> Option<CachedState> {
        let slot = &self.slots[index];
        if !self.host_cache.should_store(&slot.tokens, slot.key()) {
            return None;
        }
        let SlotState { owner, tokens, adapters, history, .. } = slot;
        match self.context.save(index as i32) {
            Ok(state) => Some(CachedState {
                tokens: tokens.clone(),
                owner: owner.clone(),
                adapters: adapters.clone(),
                state,
                metadata: self.context.metadata(index as i32).clone(),
                history: history.clone(),
            }),
            Err(error) => {
                tracing::warn!(%error, slot = index, "slot state not cached");
                None
            }
        }
    }

    /// Restores a state that was taken from the host cache into a slot, and puts it back if the run will change it.
    /// Returns the number of tokens at the start that the prompt has in common with it; 0 if that fails, with an empty
    /// slot.
    fn load_from_host_cache(&mut self, index: usize, entry: CachedState, prompt: PromptView<'_>) -> usize {
        let restored =
            self.context.restore(index as i32, &entry.state, entry.tokens.len() as u32, entry.metadata.clone());
        if let Err(error) = restored {
            tracing::warn!(%error, slot = index, "cached state not restored");
            self.discard(index);
            return 0;
        }
        self.slots[index].tokens.clone_from(&entry.tokens);
        let matched = common_prefix(&entry.tokens, prompt.tokens);
        // The slot loses the tokens after the match. A recurrent state cannot even return to the match after a decode.
        if is_mostly_unmatched(matched, &entry.tokens) || !self.context.are_all_prefixes_usable() {
            self.host_cache.insert(entry);
        }
        matched
    }
}

/// Returns true if copying the state of another slot, which has `length` tokens, takes less time than decoding the tokens
/// that it saves: the difference between its `usable` tokens and the `known` ones. A copy is slower than restoring a
/// cached state, because the state is also saved.
fn is_worth_copying(usable: usize, known: usize, length: usize) -> bool {
    let saved = usable.saturating_sub(known);
    saved >= MIN_COPY_TOKENS && 4 * saved >= length
}

/// Returns true if a run that matches `matched` tokens of a state does not use most of it, so that the host cache should
/// keep the state.
fn is_mostly_unmatched(matched: usize, tokens: &[TokenId]) -> bool {
    2 * matched < tokens.len()
}

/// Returns true if a prompt that an alignment changes to `aligned` tokens leaves room for the answer. Restored reasoning
/// must not shorten the answer or evict messages of a prompt that fits without it.
fn leaves_room(prompt: PromptView<'_>, aligned: usize, context: usize) -> bool {
    let reserve = prompt.max_tokens.min(context / ANSWER_RESERVE_DIVISOR).max(1);
    let original = prompt.tokens.len();
    aligned + reserve <= context || aligned <= original || (prompt.evicts && original >= context)
}

fn slot_choice(slot: usize, prefix: PrefixMatch, history: &SlotHistory) -> SlotChoice {
    let mut history = history.clone();
    history.truncate(prefix.matched);
    SlotChoice { slot, aligned: prefix.aligned, history }
}
