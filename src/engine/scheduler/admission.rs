//! Assignment of runs to slots.

use super::active_run::ActiveRun;
use super::{Scheduler, reply_sender};
use crate::engine::kv::prompt::SlotChoice;
use crate::events::EndCause;

impl Scheduler<'_> {
    /// Gives free slots to queued runs, in order of arrival. A run that waits for a specific slot lets others pass.
    pub(super) fn admit(&mut self) {
        while let Some(at) = self.queue.position(|active| active.client.is_closed()) {
            let Some(mut active) = self.queue.remove(at) else { break };
            let before = if active.had_slot { "resumed" } else { "started" };
            active.run.abort(EndCause::Disconnect, format!("the client disconnected before the run {before}"));
            if active.had_slot {
                active.count_end(&self.status);
            }
            // Like every end, after the attention rows that are still being encoded.
            active.run.record_end(&mut self.recording);
        }
        let mut at = 0;
        while self.slots.free() > 0
            && let Some(active) = self.queue.get(at)
        {
            let Some(choice) = self.choose_slot(active) else {
                at += 1;
                continue;
            };
            let Some(active) = self.queue.remove(at) else { return };
            self.start_run(active, choice);
        }
    }

    /// Chooses a slot. Returns `None` while the requested slot is busy or a task for the slot came first.
    fn choose_slot(&self, active: &ActiveRun) -> Option<SlotChoice> {
        let requested = active.run.request().slot;
        let has_earlier_task =
            |index: usize| self.tasks.iter().any(|task| task.slot == index && task.arrival < active.arrival);
        self.kv.choose(active.run.prompt_view(), self.options.slot_prompt_similarity, |index| {
            self.slots.is_free(index) && requested.is_none_or(|slot| slot as usize == index) && !has_earlier_task(index)
        })
    }

    fn start_run(&mut self, mut active: ActiveRun, choice: SlotChoice) {
        let SlotChoice { slot, aligned, history } = choice;
        if !active.had_slot {
            let commands = &self.commands;
            // A fork keeps the recorded tokens.
            if !active.run.is_fork() {
                active.run.sequence_mut().fit_prompt(aligned, history);
            }
            self.status.latencies().queue.observe_us(active.run.assign_slot(slot as u32));
            active.run.begin(&|id, call| reply_sender(commands, id, call));
        }
        self.kv.assign(slot, active.run.request().owner.as_ref(), self.arrivals);
        self.slots.put(slot, active);
    }
}
