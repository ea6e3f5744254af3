//! Tasks of clients for slots: read the tokens, erase, save and restore the state, remove tokens. A task waits until its
//! slot is free; it is dropped if its caller disconnects.

use super::Scheduler;
use super::active_run::ActiveRun;
use super::command::SlotTask;
use crate::events::Scope;

impl Scheduler<'_> {
    /// Runs tasks whose slots are free, unless a run that arrived earlier waits for the slot.
    pub(super) fn run_slot_tasks(&mut self) {
        for _ in 0..self.tasks.len() {
            let Some(waiting) = self.tasks.pop_front() else { return };
            if waiting.task.is_cancelled() {
                continue;
            }
            let first = |active: &ActiveRun| {
                active.arrival < waiting.arrival
                    && active.run.request().slot.is_none_or(|slot| slot as usize == waiting.slot)
            };
            if !self.slots.is_free(waiting.slot) || self.queue.iter().any(first) {
                self.tasks.push_back(waiting);
            } else {
                self.run_task(waiting.slot, &waiting.scope, waiting.task);
            }
        }
    }

    /// Runs a task. A slot with the state of a tenant that the scope does not cover looks empty and stays unchanged.
    fn run_task(&mut self, index: usize, scope: &Scope, task: SlotTask) {
        if !self.kv.is_visible(index, scope) {
            return task.answer_as_empty();
        }
        // The caller may have disconnected meanwhile.
        match task {
            SlotTask::Tokens(answer) => drop(answer.send(self.kv.tokens(index))),
            SlotTask::Erase(answer) => drop(answer.send(self.kv.erase(index))),
            SlotTask::Save(answer) => drop(answer.send(self.kv.save(index))),
            SlotTask::Restore(saved, owner, answer) => {
                let _ = answer.send(self.kv.restore(index, saved, owner, self.arrivals));
            }
            SlotTask::Shift { keep, discard, answer } => drop(answer.send(self.kv.shift(index, keep, discard))),
        }
    }
}
