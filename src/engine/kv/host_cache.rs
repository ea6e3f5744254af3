//! Cache in host memory for states of sequences that would otherwise be discarded when their slot is needed.

use super::conversation::SlotHistory;
use super::prompt::StateKey;
use crate::events::{Tenant, TokenId};
use crate::model::common_prefix;
use crate::model::llama::{AdapterSet, SequenceMetadata};
use std::collections::VecDeque;

/// Minimum number of tokens that a cached state must have and save. Decoding fewer tokens again is as fast as restoring
/// a state.
pub const MIN_STATE_TOKENS: usize = 32;

/// Cached state of a sequence.
pub struct CachedState {
    pub tokens: Vec<TokenId>,
    /// Tenant of the run that computed the state.
    pub owner: Option<Tenant>,
    /// Adapters that the state was computed with.
    pub adapters: Option<AdapterSet>,
    pub state: Vec<u8>,
    pub metadata: SequenceMetadata,
    pub history: SlotHistory,
}

/// Approximate size of a state, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub struct StateSize {
    pub fixed: usize,
    pub per_token: usize,
}

impl StateSize {
    /// Returns the bytes of a state of this number of tokens.
    fn total_bytes(self, tokens: usize) -> usize {
        self.fixed + tokens * self.per_token
    }
}

/// Cached states, oldest first, up to a limit in bytes.
pub struct HostCache {
    entries: VecDeque<CachedState>,
    bytes: usize,
    limit: usize,
    state_size: StateSize,
    /// True if every prefix of a state can be used, so that a longer state replaces its prefixes.
    prefixes_usable: bool,
}

impl HostCache {
    /// Creates a cache of `limit` bytes; 0 keeps nothing.
    pub fn new(limit: usize, state_size: StateSize, prefixes_usable: bool) -> Self {
        Self { entries: VecDeque::new(), bytes: 0, limit, state_size, prefixes_usable }
    }

    /// Returns true if a state of these tokens fits and no cached state covers it.
    pub fn should_store(&self, tokens: &[TokenId], key: StateKey<'_>) -> bool {
        tokens.len() >= MIN_STATE_TOKENS
            && self.state_size.total_bytes(tokens.len()) <= self.limit
            && !self.entries.iter().any(|entry| {
                entry.key() == key
                    && covers(self.prefixes_usable, &entry.tokens, tokens)
                    && entry.is_worth_restoring(tokens.len(), 0)
            })
    }

    /// Stores a state as the newest. Removes the states that it covers, and the oldest ones while the cache exceeds its
    /// limit.
    pub fn insert(&mut self, state: CachedState) {
        if state.size() > self.limit {
            return;
        }
        let mut bytes = self.bytes;
        let prefixes_usable = self.prefixes_usable;
        self.entries.retain(|entry| {
            let is_covered = state.key() == entry.key() && covers(prefixes_usable, &state.tokens, &entry.tokens);
            bytes -= if is_covered { entry.size() } else { 0 };
            !is_covered
        });
        self.bytes = bytes + state.size();
        self.entries.push_back(state);
        while self.bytes > self.limit
            && let Some(oldest) = self.entries.pop_front()
        {
            self.bytes -= oldest.size();
        }
    }

    /// Finds the state with this key that has the most usable tokens for the prompt, and saves time compared with using
    /// the `known` tokens of another state. `usable_prefix` returns how many of the first tokens of a state can be used.
    pub fn find_best(
        &self,
        prompt: &[TokenId],
        key: StateKey<'_>,
        known: usize,
        usable_prefix: impl Fn(&CachedState, usize) -> usize,
    ) -> Option<usize> {
        let usable = |entry: &CachedState| usable_prefix(entry, common_prefix(&entry.tokens, prompt));
        (0..self.entries.len())
            .filter(|&at| self.entries[at].key() == key)
            .map(|at| (usable(&self.entries[at]), at))
            .filter(|&(usable, at)| self.entries[at].is_worth_restoring(usable, known))
            .max()
            .map(|(_, at)| at)
    }

    /// Removes and returns a state.
    pub fn take(&mut self, at: usize) -> Option<CachedState> {
        let state = self.entries.remove(at)?;
        self.bytes -= state.size();
        Some(state)
    }

    /// Returns all states.
    pub fn iter(&self) -> impl Iterator<Item = &CachedState> {
        self.entries.iter()
    }
}

/// Returns true if a state of `tokens` can be used in place of a state of `other` tokens.
fn covers(prefixes_usable: bool, tokens: &[TokenId], other: &[TokenId]) -> bool {
    if prefixes_usable { tokens.starts_with(other) } else { tokens == other }
}

impl CachedState {
    /// Returns the key of the state.
    pub fn key(&self) -> StateKey<'_> {
        StateKey { owner: self.owner.as_ref(), adapters: self.adapters.as_ref() }
    }

    /// Returns true if restoring the state, of which `usable` tokens are used, saves time compared with using the `known`
    /// tokens of another state.
    pub fn is_worth_restoring(&self, usable: usize, known: usize) -> bool {
        usable >= known + MIN_STATE_TOKENS && 4 * usable >= self.tokens.len()
    }

    fn size(&self) -> usize {
        self.state.len() + self.metadata.checkpoints.bytes() + size_of_val(self.tokens.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: StateKey<'_> = StateKey { owner: None, adapters: None };
    const SIZE: StateSize = StateSize { fixed: 0, per_token: 10 };

    fn with(adapters: &AdapterSet) -> StateKey<'_> {
        StateKey { adapters: Some(adapters), ..KEY }
    }

    fn any_prefix(_: &CachedState, common: usize) -> usize {
        common
    }

    fn whole_state(state: &CachedState, common: usize) -> usize {
        if state.tokens.len() == common { common } else { 0 }
    }

    fn state(tokens: std::ops::Range<i32>, bytes: usize) -> CachedState {
        let tokens: Vec<TokenId> = tokens.collect();
        let state = vec![0; bytes - 4 * tokens.len()];
        CachedState {
            tokens,
            owner: None,
            adapters: None,
            state,
            metadata: SequenceMetadata::default(),
            history: SlotHistory::default(),
        }
    }

    #[test]
    fn lookup_ignores_states_of_other_adapters() {
        let set = AdapterSet::new([crate::model::llama::ScaledAdapter { id: 0, scale: 1.0 }]);
        let mut cache = HostCache::new(1 << 20, SIZE, true);
        cache.insert(CachedState { adapters: Some(set.clone()), ..state(0..60, 1000) });
        let prompt: Vec<TokenId> = (0..60).collect();
        assert!(
            cache.find_best(&prompt, KEY, 0, any_prefix).is_none()
                && cache.find_best(&prompt, with(&set), 0, any_prefix).is_some()
        );
        assert!(cache.should_store(&prompt, KEY) && !cache.should_store(&prompt, with(&set)));
        cache.insert(state(0..70, 1000));
        assert_eq!(cache.iter().count(), 2);
    }

    #[test]
    fn insert_evicts_oldest_states() {
        let mut cache = HostCache::new(3000, SIZE, true);
        for start in [0, 1000, 2000, 3000] {
            cache.insert(state(start..start + 100, 1000));
        }
        let starts: Vec<i32> = cache.iter().map(|entry| entry.tokens[0]).collect();
        assert_eq!((starts, cache.bytes), (vec![1000, 2000, 3000], 3000));
        cache.insert(state(0..100, 4000));
        assert_eq!(cache.bytes, 3000, "a state larger than the cache is not stored");
        cache.insert(state(1000..1200, 1500));
        assert_eq!(cache.bytes, 2500, "the longer state replaced the oldest one and its own prefix");
    }

    #[test]
    fn lookup_returns_longest_match() {
        let mut cache = HostCache::new(1 << 20, SIZE, true);
        cache.insert(state(0..100, 1000));
        cache.insert(state(0..60, 1000));
        assert_eq!(cache.iter().count(), 2, "a shorter state does not replace a longer one");
        let prompt: Vec<TokenId> = (0..200).collect();
        let best = cache.find_best(&prompt, KEY, 0, any_prefix).unwrap();
        assert_eq!(cache.entries[best].tokens.len(), 100);
        assert_eq!(cache.find_best(&prompt, KEY, 68, any_prefix), Some(best));
        assert_eq!(cache.find_best(&prompt, KEY, 69, any_prefix), None, "too few tokens are saved");
        let other: Vec<TokenId> = (0..70).chain(500..600).collect();
        assert_eq!(cache.entries[cache.find_best(&other, KEY, 0, whole_state).unwrap()].tokens.len(), 60);
        let barely: Vec<TokenId> = (0..10).chain(500..600).collect();
        assert_eq!(cache.find_best(&barely, KEY, 0, any_prefix), None);
        assert!(
            !cache.should_store(&prompt[..50], KEY)
                && cache.should_store(&prompt, KEY)
                && !cache.should_store(&other[..20], KEY)
        );
        assert!(!HostCache::new(1999, SIZE, true).should_store(&prompt, KEY));
        let taken = cache.take(best).unwrap();
        assert_eq!((taken.tokens.len(), cache.bytes), (100, 1000));
    }

    #[test]
    fn states_with_unusable_prefixes_do_not_replace_shorter_ones() {
        let mut cache = HostCache::new(1 << 20, SIZE, false);
        cache.insert(state(0..60, 1000));
        let prompt: Vec<TokenId> = (0..100).collect();
        assert!(cache.should_store(&prompt, KEY) && !cache.should_store(&prompt[..60], KEY));
        cache.insert(state(0..100, 1000));
        assert!(cache.should_store(&prompt[..50], KEY));
        cache.insert(state(0..100, 1000));
        assert_eq!(cache.iter().count(), 2);
        let best = cache.find_best(&prompt[..80], KEY, 0, whole_state).unwrap();
        assert_eq!(cache.entries[best].tokens.len(), 60);
    }
}
