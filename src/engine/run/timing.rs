//! Times of a run, in microseconds since its creation. Pauses do not count as active time.

use std::time::{Duration, Instant};

/// Times of one run.
pub struct Timing {
    started: Instant,
    /// Time at which the run got its first slot.
    slot_us: u64,
    /// Time from the slot assignment to the first logits.
    prompt_us: Option<u64>,
    first_token_us: Option<u64>,
    /// Active time before the first token.
    active_before_token_us: u64,
    paused: Duration,
}

impl Timing {
    /// Creates the times of a run that was created at `started`.
    pub fn new(started: Instant) -> Self {
        Self {
            started,
            slot_us: 0,
            prompt_us: None,
            first_token_us: None,
            active_before_token_us: 0,
            paused: Duration::ZERO,
        }
    }

    /// Returns the active time.
    pub fn elapsed_us(&self) -> u64 {
        self.started.elapsed().saturating_sub(self.paused).as_micros() as u64
    }

    /// Returns the active time since the run got its slot.
    pub fn since_slot_us(&self) -> u64 {
        self.elapsed_us().saturating_sub(self.slot_us)
    }

    /// Sets the time of the slot assignment to now. Returns the time that the run was queued.
    pub fn mark_slot(&mut self) -> u64 {
        self.slot_us = self.elapsed_us();
        self.slot_us
    }

    /// Sets the time of the first logits to now. Returns the time since the slot assignment; `None` if it was set
    /// before, because a mod backtracked to the end of the prompt.
    pub fn mark_prompt_end(&mut self) -> Option<u64> {
        if self.prompt_us.is_some() {
            return None;
        }
        self.prompt_us = Some(self.since_slot_us());
        self.prompt_us
    }

    /// Returns the time from the slot assignment to the first logits.
    pub fn prompt_us(&self) -> Option<u64> {
        self.prompt_us
    }

    /// Sets the time of the first token to now, unless it is set.
    pub fn mark_token(&mut self) {
        if self.first_token_us.is_none() {
            self.first_token_us = Some(self.started.elapsed().as_micros() as u64);
            self.active_before_token_us = self.elapsed_us();
        }
    }

    /// Returns the time of the first token.
    pub fn first_token_us(&self) -> Option<u64> {
        self.first_token_us
    }

    /// Returns the active time since the first token; `None` before it.
    pub fn since_first_token_us(&self) -> Option<u64> {
        self.first_token_us.map(|_| self.elapsed_us().saturating_sub(self.active_before_token_us))
    }

    /// Adds the length of a pause.
    pub fn add_pause(&mut self, pause: Duration) {
        self.paused += pause;
    }
}
