//! Generations that can be looked at and aborted from other connections.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// Longest key that is kept.
const LONGEST: usize = 256;

/// Generations under way, by number; cheap to clone.
#[derive(Clone, Default)]
pub(in crate::api) struct Genkeys(Arc<Inner>);

#[derive(Default)]
struct Inner {
    next: AtomicU64,
    under_way: Mutex<HashMap<u64, UnderWay>>,
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

fn locked(text: &Mutex<String>) -> MutexGuard<'_, String> {
    text.lock().unwrap_or_else(PoisonError::into_inner)
}
