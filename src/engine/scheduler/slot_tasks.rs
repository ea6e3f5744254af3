//! Tasks of clients for slots: read the tokens, erase, save and restore the state, remove tokens. A task waits until
//! its slot is free, and is dropped if its caller disconnects.

use super::command::SlotTask;
use super::runs::ScheduledRuns;
use super::scheduled_run::ScheduledRun;
use crate::engine::kv::slots::KvSlots;
use crate::events::Scope;
use std::collections::VecDeque;

/// Tasks that wait for their slots, in order of arrival.
#[derive(Default)]
pub struct SlotTasks(VecDeque<QueuedTask>);

/// A task that waits for its slot.
pub struct QueuedTask {
    /// Number of the task in the order of arrival of runs and tasks.
    pub arrival: u64,
    pub slot: usize,
    /// States that the caller may access.
    pub scope: Scope,
    pub task: SlotTask,
}

impl SlotTasks {
    /// Appends a task.
    pub fn push(&mut self, task: QueuedTask) {
        self.0.push_back(task);
    }

    /// Returns true if no task waits.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns true if a task for the slot arrived before the run.
    pub fn has_earlier(&self, slot: usize, scheduled: &ScheduledRun) -> bool {
        self.0.iter().any(|task| task.slot == slot && task.arrival < scheduled.arrival())
    }

    /// Runs the tasks whose slots are free, except while a run that arrived earlier waits for the slot. `arrivals` is
    /// the number of runs and tasks that have arrived.
    pub fn run(&mut self, runs: &ScheduledRuns, kv: &mut KvSlots<'_>, arrivals: u64) {
        for _ in 0..self.0.len() {
            let Some(queued) = self.0.pop_front() else { return };
            if queued.task.is_cancelled() {
                continue;
            }
            let is_before = |scheduled: &ScheduledRun| {
                scheduled.arrival() < queued.arrival
                    && scheduled.run.request().slot.is_none_or(|slot| slot as usize == queued.slot)
            };
            if !runs.slots.is_free(queued.slot) || runs.queue.iter().any(is_before) {
                self.0.push_back(queued);
            } else {
                run_task(queued, kv, arrivals);
            }
        }
    }
}

/// Runs a task. If the slot's state belongs to a tenant outside of the scope, the task sees an empty slot and changes
/// nothing.
fn run_task(queued: QueuedTask, kv: &mut KvSlots<'_>, arrivals: u64) {
    let QueuedTask { slot, scope, task, .. } = queued;
    if !kv.is_visible(slot, &scope) {
        return task.answer_as_empty();
    }
    // The caller may have disconnected in the meantime.
    match task {
        SlotTask::Tokens(response) => drop(response.send(kv.tokens(slot))),
        SlotTask::Erase(response) => drop(response.send(kv.erase(slot))),
        SlotTask::Save(response) => drop(response.send(kv.save(slot))),
        SlotTask::Restore(saved, owner, response) => drop(response.send(kv.restore(slot, saved, owner, arrivals))),
        SlotTask::Shift { keep, discard, response } => drop(response.send(kv.shift(slot, keep, discard))),
    }
}
