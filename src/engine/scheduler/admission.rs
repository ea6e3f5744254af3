//! Assignment of runs to slots.

use super::active_run::ActiveRun;
use super::{Scheduler, done};
use crate::engine::kv::prompt::SlotChoice;
use crate::events::EndCause;

impl Scheduler<'_> {
    /// Gives free slots to queued runs, in order of arrival. A run that waits for a specific slot lets others pass.
    pub(super) fn admit(&mut self) {
        while let Some(at) = self.queue.position(|live| live.client.is_closed()) {
            let Some(mut live) = self.queue.remove(at) else { break };
            let before = if live.had_slot { "resumed" } else { "started" };
            live.run.abort(EndCause::Disconnect, format!("the client disconnected before the run {before}"));
            if live.had_slot {
                live.count_end(&self.status);
            }
            // Like every end, after the attention rows that are still being encoded.
            live.run.record_end(&mut self.recording);
        }
        let mut at = 0;
        while self.slots.free() > 0
            && let Some(live) = self.queue.get(at)
        {
            let Some(choice) = self.choose_slot(live) else {
                at += 1;
                continue;
            };
            let Some(live) = self.queue.remove(at) else { return };
            self.start_run(live, choice);
        }
    }

    /// Chooses a slot. Returns `None` while the requested slot is busy or a task for the slot came first.
    fn choose_slot(&self, live: &ActiveRun) -> Option<SlotChoice> {
        let own = live.run.request().slot;
        let awaited = |index: usize| self.tasks.iter().any(|task| task.slot == index && task.arrival < live.arrival);
        self.kv.choose(live.run.prompt_view(), self.options.slot_prompt_similarity, |index| {
            self.slots.is_free(index) && own.is_none_or(|own| own as usize == index) && !awaited(index)
        })
    }

    fn start_run(&mut self, mut live: ActiveRun, choice: SlotChoice) {
        let SlotChoice { slot, aligned, history } = choice;
        if !live.had_slot {
            let commands = &self.commands;
            // A fork keeps the recorded tokens.
            if !live.run.is_fork() {
                live.run.sequence_mut().fit_prompt(aligned, history);
            }
            self.status.latencies().queue.observe_us(live.run.assign_slot(slot as u32));
            live.run.begin(&|id, call| done(commands, id, call));
        }
        self.kv.assign(slot, live.run.request().owner.as_ref(), self.arrivals);
        self.slots.put(slot, live);
    }
}
