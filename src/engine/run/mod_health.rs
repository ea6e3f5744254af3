//! Failed calls of a mod in one run.

use crate::events::{EventType, ModFailures};

/// Number of consecutive failed calls, per type of event, after which a mod is disabled for its run.
pub const MAX_CONSECUTIVE_FAILURES: u8 = 5;

/// Failed calls of a mod, and the reason if they disabled it.
#[derive(Debug, Default)]
pub struct ModHealth {
    /// Consecutive failed calls, by type of event.
    failures: [u8; 4],
    /// Reason why the mod is no longer called.
    pub disabled: Option<String>,
    /// Calls in this run.
    calls: u32,
    /// Calls in this run that failed.
    failed: u32,
    /// Message of the last failed call.
    last_failure: String,
}

impl ModHealth {
    /// Counts a call of the mod `name`, with its failure if it failed. Returns a message if that disables the mod.
    pub fn count_call(&mut self, name: &str, event: EventType, step: u32, failure: Option<&str>) -> Option<&str> {
        let count = &mut self.failures[event as usize];
        let Some(failure) = failure else {
            *count = 0;
            return None;
        };
        *count = count.saturating_add(1);
        if *count < MAX_CONSECUTIVE_FAILURES {
            return None;
        }
        let event = event.as_str();
        self.disabled = Some(format!(
            "the mod '{name}' was disabled at step {step} for the rest of this run: {count} consecutive calls for {event} failed; last failure: {failure}"
        ));
        self.disabled.as_deref()
    }

    /// Counts a call in this run, with its failure if it failed. A fork does not count the calls that it repeats.
    pub fn count_in_run(&mut self, failure: Option<&str>) {
        self.calls += 1;
        if let Some(failure) = failure {
            self.failed += 1;
            failure.clone_into(&mut self.last_failure);
        }
    }

    /// Returns the failed calls in this run of the mod `name`; `None` if there are none.
    #[must_use]
    pub fn failures(&self, name: &str) -> Option<ModFailures> {
        (self.failed > 0).then(|| ModFailures {
            mod_name: name.to_owned(),
            calls: self.calls,
            failed: self.failed,
            message: self.last_failure.clone(),
        })
    }
}
