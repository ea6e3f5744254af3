//! Polling for the replies of mods. Most mods reply sooner than a sleeping core wakes up.

use super::Scheduler;
use super::command::Command;
use crate::mods::ModInstance;
use std::time::{Duration, Instant};

/// Time for which the thread polls for a mod's reply before it sleeps.
const POLL_WINDOW: Duration = Duration::from_micros(200);

impl Scheduler<'_> {
    /// Polls for replies and commands for a short time while a mod's reply is awaited.
    pub(super) fn poll_mods(&mut self) -> Option<Command> {
        let begun = Instant::now();
        while self.awaiting().next().is_some() && begun.elapsed() < POLL_WINDOW {
            if let Ok(command) = self.inbox.try_recv() {
                return Some(command);
            }
            self.awaiting().for_each(ModInstance::poll_reply);
            // Other threads on this core go first.
            std::thread::yield_now();
        }
        self.stop_polling();
        None
    }

    /// Returns the mod instances whose replies are awaited.
    fn awaiting(&mut self) -> impl Iterator<Item = &mut dyn ModInstance> {
        self.slots.runs_mut().filter_map(|active| active.run.awaited_mod())
    }

    /// Stops polling for replies; they are then delivered by the mods' own threads.
    pub(super) fn stop_polling(&mut self) {
        self.awaiting().for_each(ModInstance::stop_polling);
    }
}
