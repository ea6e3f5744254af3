//! Threads that load a model or create a context. The program ends after them, because its exit destroys static data of
//! llama.cpp that they use.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

static COUNT: Mutex<usize> = Mutex::new(0);
static CHANGED: Condvar = Condvar::new();
static ENDING: AtomicBool = AtomicBool::new(false);

/// The use of llama.cpp by a thread, until it is dropped.
#[derive(Debug)]
pub struct LlamaUse(());

impl LlamaUse {
    /// Begins a use.
    #[must_use]
    pub fn begin() -> Self {
        *COUNT.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        Self(())
    }
}

impl Drop for LlamaUse {
    fn drop(&mut self) {
        *COUNT.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        CHANGED.notify_all();
    }
}

/// Returns true if the program ends, so that loads of models are cancelled.
pub(super) fn is_ending() -> bool {
    ENDING.load(Ordering::Acquire)
}

/// Cancels loads of models, and waits until no thread loads a model or creates a context.
pub fn wait_for_end_of_use(timeout: Duration) {
    ENDING.store(true, Ordering::Release);
    let count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    drop(CHANGED.wait_timeout_while(count, timeout, |count| *count > 0));
}
