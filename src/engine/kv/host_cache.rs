//! Cache in host memory for slot states that would otherwise be discarded.

use super::conversation::SlotHistory;
use crate::events::TokenId;
use crate::model::common_prefix;
use crate::model::llama::{AdapterSet, Checkpoints};
use std::collections::VecDeque;

/// Minimum tokens of a cached state; computing a shorter one again takes no longer than copying it.
const MIN_STATE_TOKENS: usize = 32;

/// Cached state of a sequence.
pub struct CachedState {
    pub tokens: Vec<TokenId>,
    /// LoRA adapters that the state was computed with.
    pub adapters: Option<AdapterSet>,
    pub state: Vec<u8>,
    /// Checkpoints that the state can return to.
    pub checkpoints: Checkpoints,
    pub history: SlotHistory,
}

/// Cached states, oldest first, up to a limit in bytes.
pub struct HostCache {
    entries: VecDeque<CachedState>,
    bytes: usize,
    limit: usize,
    /// Approximate size of a state: fixed bytes, and bytes per token.
    sizes: (usize, usize),
    /// True if every prefix of a state can be used, so that a longer state replaces its prefixes.
    prefixes_usable: bool,
}

impl HostCache {
    /// Creates a cache of `limit` bytes; 0 keeps nothing.
    pub fn new(limit: usize, sizes: (usize, usize), prefixes_usable: bool) -> Self {
        Self { entries: VecDeque::new(), bytes: 0, limit, sizes, prefixes_usable }
    }

    /// Returns true if the state of these tokens should be stored.
    pub fn should_store(&self, tokens: &[TokenId], adapters: Option<&AdapterSet>) -> bool {
        tokens.len() >= MIN_STATE_TOKENS
            && self.sizes.0 + tokens.len() * self.sizes.1 <= self.limit
            && !self.entries.iter().any(|entry| {
                entry.adapters.as_ref() == adapters
                    && covers(self.prefixes_usable, &entry.tokens, tokens)
                    && entry.is_worth_copying(tokens.len())
            })
    }

    /// Stores a state. Removes the states that it covers, and the oldest ones if there is no room.
    pub fn insert(&mut self, idle: CachedState) {
        if idle.size() > self.limit {
            return;
        }
        let mut bytes = self.bytes;
        let prefixes_usable = self.prefixes_usable;
        self.entries.retain(|entry| {
            let held = idle.adapters == entry.adapters && covers(prefixes_usable, &idle.tokens, &entry.tokens);
            bytes -= if held { entry.size() } else { 0 };
            !held
        });
        self.bytes = bytes + idle.size();
        self.entries.push_back(idle);
        while self.bytes > self.limit
            && let Some(oldest) = self.entries.pop_front()
        {
            self.bytes -= oldest.size();
        }
    }

    /// Finds the state with these adapters of which a prompt can use most tokens: more than `shared`, and at least a
    /// quarter of the state. `reach` returns how many of the first tokens of a state can be used.
    pub fn find_best(
        &self,
        prompt: &[TokenId],
        adapters: Option<&AdapterSet>,
        shared: usize,
        reach: impl Fn(&CachedState, usize) -> usize,
    ) -> Option<usize> {
        let of = |entry: &CachedState| reach(entry, common_prefix(&entry.tokens, prompt));
        (0..self.entries.len())
            .filter(|&at| self.entries[at].adapters.as_ref() == adapters)
            .map(|at| (of(&self.entries[at]), at))
            .filter(|&(usable, at)| usable > shared && self.entries[at].is_worth_copying(usable))
            .max()
            .map(|(_, at)| at)
    }

    /// Removes and returns a state.
    pub fn take(&mut self, at: usize) -> Option<CachedState> {
        let idle = self.entries.remove(at)?;
        self.bytes -= idle.size();
        Some(idle)
    }

    /// Returns all states.
    pub fn iter(&self) -> impl Iterator<Item = &CachedState> {
        self.entries.iter()
    }
}

/// Returns true if the first state covers the second.
fn covers(prefixes_usable: bool, tokens: &[TokenId], others: &[TokenId]) -> bool {
    if prefixes_usable { tokens.starts_with(others) } else { tokens == others }
}

impl CachedState {
    /// Returns true if copying the state pays off for `shared` of its tokens.
    pub fn is_worth_copying(&self, shared: usize) -> bool {
        4 * shared >= self.tokens.len()
    }

    fn size(&self) -> usize {
        self.state.len() + self.checkpoints.bytes() + size_of_val(self.tokens.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(_: &CachedState, common: usize) -> usize {
        common
    }

    fn whole(idle: &CachedState, common: usize) -> usize {
        if idle.tokens.len() == common { common } else { 0 }
    }

    fn idle(tokens: std::ops::Range<i32>, bytes: usize) -> CachedState {
        let tokens: Vec<TokenId> = tokens.collect();
        let state = vec![0; bytes - 4 * tokens.len()];
        CachedState {
            tokens,
            adapters: None,
            state,
            checkpoints: Checkpoints::default(),
            history: SlotHistory::default(),
        }
    }

    #[test]
    fn lookup_ignores_states_of_other_adapters() {
        let set = AdapterSet::new([crate::model::llama::ScaledAdapter { id: 0, scale: 1.0 }]);
        let mut cache = HostCache::new(1 << 20, (0, 10), true);
        cache.insert(CachedState { adapters: Some(set.clone()), ..idle(0..60, 1000) });
        let prompt: Vec<TokenId> = (0..60).collect();
        assert!(
            cache.find_best(&prompt, None, 0, any).is_none() && cache.find_best(&prompt, Some(&set), 0, any).is_some()
        );
        assert!(cache.should_store(&prompt, None) && !cache.should_store(&prompt, Some(&set)));
        cache.insert(idle(0..70, 1000));
        assert_eq!(cache.iter().count(), 2);
    }

    #[test]
    fn insert_evicts_oldest_states() {
        let mut cache = HostCache::new(3000, (0, 10), true);
        for start in [0, 1000, 2000, 3000] {
            cache.insert(idle(start..start + 100, 1000));
        }
        let starts: Vec<i32> = cache.iter().map(|entry| entry.tokens[0]).collect();
        assert_eq!((starts, cache.bytes), (vec![1000, 2000, 3000], 3000));
        cache.insert(idle(0..100, 4000));
        assert_eq!(cache.bytes, 3000, "a state larger than the cache is not stored");
        cache.insert(idle(1000..1200, 1500));
        assert_eq!(cache.bytes, 2500, "the longer state replaced the oldest one and its own prefix");
    }

    #[test]
    fn lookup_returns_longest_match() {
        let mut cache = HostCache::new(1 << 20, (0, 10), true);
        cache.insert(idle(0..100, 1000));
        cache.insert(idle(0..60, 1000));
        assert_eq!(cache.iter().count(), 2, "a shorter state does not replace a longer one");
        let prompt: Vec<TokenId> = (0..200).collect();
        let best = cache.find_best(&prompt, None, 0, any).unwrap();
        assert_eq!(cache.entries[best].tokens.len(), 100);
        assert_eq!(cache.find_best(&prompt, None, 100, any), None);
        let other: Vec<TokenId> = (0..70).chain(500..600).collect();
        assert_eq!(cache.entries[cache.find_best(&other, None, 0, whole).unwrap()].tokens.len(), 60);
        let barely: Vec<TokenId> = (0..10).chain(500..600).collect();
        assert_eq!(cache.find_best(&barely, None, 0, any), None);
        assert!(
            !cache.should_store(&prompt[..50], None)
                && cache.should_store(&prompt, None)
                && !cache.should_store(&other[..20], None)
        );
        assert!(!HostCache::new(1999, (0, 10), true).should_store(&prompt, None));
        let taken = cache.take(best).unwrap();
        assert_eq!((taken.tokens.len(), cache.bytes), (100, 1000));
    }

    #[test]
    fn unsplittable_states_are_kept_beside_their_prefixes() {
        let mut cache = HostCache::new(1 << 20, (0, 10), false);
        cache.insert(idle(0..60, 1000));
        let prompt: Vec<TokenId> = (0..100).collect();
        assert!(cache.should_store(&prompt, None) && !cache.should_store(&prompt[..60], None));
        cache.insert(idle(0..100, 1000));
        assert!(cache.should_store(&prompt[..50], None));
        cache.insert(idle(0..100, 1000));
        assert_eq!(cache.iter().count(), 2);
        let best = cache.find_best(&prompt[..80], None, 0, whole).unwrap();
        assert_eq!(cache.entries[best].tokens.len(), 60);
    }
}
