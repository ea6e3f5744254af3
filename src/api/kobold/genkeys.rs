//! Registry of generations, which other connections can poll and abort by their `genkey`.

use super::response::KoboldLogprobs;
use crate::api::shared::attention::AttentionEvent;
use crate::events::{Scope, Tenant};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

/// Maximum length of a stored key.
const MAX_KEY_CHARS: usize = 256;
/// Maximum number of ended generations whose log-probabilities are kept.
const MAX_ENDED: usize = 16;

/// Active generations by number, and the log-probabilities of the last ended ones; cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Genkeys(Arc<Inner>);

#[derive(Default)]
struct Inner {
    next: AtomicU64,
    active: Mutex<HashMap<u64, ActiveGeneration>>,
    /// Newest last.
    ended: Mutex<VecDeque<EndedGeneration>>,
}

/// Owner, key and log-probabilities of an ended generation.
type EndedGeneration = (Option<Tenant>, String, Option<Arc<KoboldLogprobs>>);

struct ActiveGeneration {
    owner: Option<Tenant>,
    /// The client's key; empty for none.
    key: String,
    text: Arc<Mutex<String>>,
    aborted: CancellationToken,
}

/// A registered generation; dropping it removes it from the registry.
pub(super) struct GenerationEntry {
    genkeys: Genkeys,
    number: u64,
    text: Arc<Mutex<String>>,
    aborted: CancellationToken,
}

impl Genkeys {
    /// Registers a generation.
    pub(super) fn register(&self, owner: Option<&Tenant>, key: &str) -> GenerationEntry {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let aborted = CancellationToken::new();
        let text = Arc::<Mutex<String>>::default();
        let key = key.chars().take(MAX_KEY_CHARS).collect();
        let active = ActiveGeneration { owner: owner.cloned(), key, text: Arc::clone(&text), aborted: aborted.clone() };
        self.lock().insert(number, active);
        GenerationEntry { genkeys: self.clone(), number, text, aborted }
    }

    /// Returns the text so far of the newest generation in the scope with that key.
    pub(super) fn text(&self, scope: &Scope, key: &str) -> String {
        let active = self.lock();
        let newest =
            active.iter().filter(|(_, generation)| generation.matches(scope, key)).max_by_key(|(number, _)| **number);
        newest.map(|(_, generation)| locked(&generation.text).clone()).unwrap_or_default()
    }

    /// Aborts all generations in the scope with that key. Returns true if there were any.
    pub(super) fn abort(&self, scope: &Scope, key: &str) -> bool {
        let active = self.lock();
        let mut found = false;
        for generation in active.values().filter(|generation| generation.matches(scope, key)) {
            generation.aborted.cancel();
            found = true;
        }
        found
    }

    /// Returns the log-probabilities of the newest ended generation in the scope with that key, if it has any.
    pub(super) fn logprobs(&self, scope: &Scope, key: &str) -> Option<Arc<KoboldLogprobs>> {
        let ended = locked(&self.0.ended);
        let newest = ended.iter().rev().find(|(owner, own_key, _)| own_key == key && scope.includes(owner.as_ref()));
        newest.and_then(|(_, _, logprobs)| logprobs.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, ActiveGeneration>> {
        locked(&self.0.active)
    }
}

impl ActiveGeneration {
    fn matches(&self, scope: &Scope, key: &str) -> bool {
        self.key == key && scope.includes(self.owner.as_ref())
    }
}

impl GenerationEntry {
    /// Appends text that other connections can read.
    pub(super) fn add(&self, text: &str) {
        locked(&self.text).push_str(text);
    }

    /// Removes characters from the end.
    pub(super) fn retract(&self, chars: usize) {
        let mut text = locked(&self.text);
        for _ in 0..chars {
            text.pop();
        }
    }

    /// Applies an event of an answer to `input_ids`. The text is that of the first sample.
    pub(super) fn apply(&self, event: &AttentionEvent) {
        match event {
            AttentionEvent::Token(token) if token.sample == 0 => self.add(token.text()),
            AttentionEvent::Retract { sample: 0, chars, .. } => self.retract(*chars),
            _ => {}
        }
    }

    /// Stores the log-probabilities of the complete answer and replaces those of earlier generations with the same key.
    pub(super) fn keep_logprobs(&self, logprobs: Option<Arc<KoboldLogprobs>>) {
        let found = self.genkeys.lock().get(&self.number).map(|active| (active.owner.clone(), active.key.clone()));
        let Some((owner, key)) = found else { return };
        let mut ended = locked(&self.genkeys.0.ended);
        ended.retain(|(other_owner, other_key, _)| *other_owner != owner || *other_key != key);
        if ended.len() == MAX_ENDED {
            ended.pop_front();
        }
        ended.push_back((owner, key, logprobs));
    }

    /// Returns the token that cancels the runs when the generation is aborted.
    pub(super) fn aborted(&self) -> CancellationToken {
        self.aborted.clone()
    }

    /// Returns the text so far.
    pub(super) fn text(&self) -> String {
        locked(&self.text).clone()
    }
}

impl Drop for GenerationEntry {
    fn drop(&mut self) {
        self.genkeys.lock().remove(&self.number);
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
