//! Time limit of a compilation, including the translation of the grammar.

use super::GrammarError;
use std::time::{Duration, Instant};

/// Time limit of a compilation.
pub(super) const COMPILE_TIMEOUT: Duration = Duration::from_secs(10);

/// The time at which a compilation must end.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(Instant);

impl Deadline {
    /// Returns the deadline of a compilation that starts now.
    pub(super) fn start() -> Self {
        Self::after(COMPILE_TIMEOUT)
    }

    /// Returns the deadline after this time from now.
    pub(super) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    pub(super) fn is_over(self) -> bool {
        Instant::now() >= self.0
    }

    /// Returns [`GrammarError::TooSlow`] if the deadline is over.
    pub(super) fn check(self) -> Result<(), GrammarError> {
        if self.is_over() { Err(GrammarError::TooSlow { seconds: COMPILE_TIMEOUT.as_secs() }) } else { Ok(()) }
    }
}
