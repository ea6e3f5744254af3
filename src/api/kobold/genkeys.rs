//! Generations that can be looked at and aborted from other connections.

use serde_json::Value;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Longest key that is kept.
const LONGEST: usize = 256;
/// Maximum number of ended generations whose log-probabilities are kept.
const MAX_ENDED: usize = 16;

/// Generations under way, by number; cheap to clone.
#[derive(Clone, Default)]
pub(in crate::api) struct Genkeys(Arc<Inner>);

#[derive(Default)]
struct Inner {
    next: AtomicU64,
    under_way: Mutex<HashMap<u64, UnderWay>>,
    /// Keys and log-probabilities of generations that have ended, the newest last.
    ended: Mutex<VecDeque<(String, Value)>>,
}

struct UnderWay {
    /// The client's name for it; empty for none.
    key: String,
    text: Arc<Mutex<String>>,
    abort: watch::Sender<bool>,
}

/// A generation under way; it is not any more when this is dropped.
pub(super) struct Entry {
    genkeys: Genkeys,
    number: u64,
    text: Arc<Mutex<String>>,
    aborted: watch::Receiver<bool>,
}

impl Genkeys {
    /// Enters a generation.
    pub(super) fn enter(&self, key: &str) -> Entry {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let (abort, aborted) = watch::channel(false);
        let text = Arc::<Mutex<String>>::default();
        let key = key.chars().take(LONGEST).collect();
        self.lock().insert(number, UnderWay { key, text: Arc::clone(&text), abort });
        Entry { genkeys: self.clone(), number, text, aborted }
    }

    /// The text so far of the newest generation of that key.
    pub(super) fn text(&self, key: &str) -> String {
        let under_way = self.lock();
        let newest = under_way.iter().filter(|(_, one)| one.key == key).max_by_key(|(number, _)| **number);
        newest.map(|(_, one)| locked(&one.text).clone()).unwrap_or_default()
    }

    /// Aborts every generation of that key. Whether there was one.
    pub(super) fn abort(&self, key: &str) -> bool {
        let under_way = self.lock();
        let mut found = false;
        for one in under_way.values().filter(|one| one.key == key) {
            one.abort.send_replace(true);
            found = true;
        }
        found
    }

    /// Returns the log-probabilities of the newest ended generation of that key, null where it has none.
    pub(super) fn logprobs(&self, key: &str) -> Value {
        let ended = locked(&self.0.ended);
        let newest = ended.iter().rev().find(|(own, _)| own == key);
        newest.map_or(Value::Null, |(_, logprobs)| logprobs.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, UnderWay>> {
        self.0.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// Adds to the text that others see.
    pub(super) fn add(&self, text: &str) {
        locked(&self.text).push_str(text);
    }

    /// Takes characters off its end.
    pub(super) fn retract(&self, chars: usize) {
        let mut text = locked(&self.text);
        for _ in 0..chars {
            text.pop();
        }
    }

    /// Keeps the log-probabilities of the whole answer, in place of those of earlier ones of the same key.
    pub(super) fn keep_logprobs(&self, logprobs: Value) {
        let Some(key) = self.genkeys.lock().get(&self.number).map(|one| one.key.clone()) else { return };
        let mut ended = locked(&self.genkeys.0.ended);
        ended.retain(|(own, _)| *own != key);
        if ended.len() == MAX_ENDED {
            ended.pop_front();
        }
        ended.push_back((key, logprobs));
    }

    /// Returns when somebody has aborted it.
    pub(super) async fn aborted(&mut self) {
        if self.aborted.wait_for(|aborted| *aborted).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// The text so far.
    pub(super) fn text(&self) -> String {
        locked(&self.text).clone()
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.genkeys.lock().remove(&self.number);
    }
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
