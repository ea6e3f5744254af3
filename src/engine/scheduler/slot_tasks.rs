//! Tasks for slots: read the tokens, erase, save and restore the state, remove tokens. A task waits until its slot is
//! free; it is dropped if its caller disconnects.

use super::Scheduler;
use super::active_run::{ActiveRun, Slot};
use super::command::SlotTask;
use crate::engine::kv::error::SlotError;
use crate::engine::kv::snapshot::{SlotTokens, Snapshot};
use crate::events::Scope;
use crate::model::ShiftError;
use crate::model::llama::AdapterSet;

impl Scheduler<'_> {
    /// Runs the tasks of slots that are free, in turn with the runs that wait for them.
    pub(super) fn run_slot_tasks(&mut self) {
        for _ in 0..self.tasks.len() {
            let Some(waiting) = self.tasks.pop_front() else { return };
            if waiting.task.is_cancelled() {
                continue;
            }
            let first = |live: &ActiveRun| {
                live.arrival < waiting.arrival && live.run.request.slot.is_none_or(|slot| slot as usize == waiting.slot)
            };
            if self.slots[waiting.slot].active.is_some() || self.queue.iter().any(first) {
                self.tasks.push_back(waiting);
            } else {
                self.run_task(waiting.slot, &waiting.scope, waiting.task);
            }
        }
    }

    /// Runs a task. A slot with the state of a tenant that the scope does not cover looks empty and stays unchanged.
    fn run_task(&mut self, index: usize, scope: &Scope, task: SlotTask) {
        if !scope.includes(self.slots[index].owner.as_ref()) {
            return task.answer_as_empty();
        }
        // The caller may have disconnected meanwhile.
        match task {
            SlotTask::Tokens(answer) => {
                let Slot { cache, processed, .. } = &self.slots[index];
                let _ = answer.send(SlotTokens { tokens: cache.clone(), processed: *processed });
            }
            SlotTask::Erase(answer) => {
                let erased = self.slots[index].cache.len();
                self.clear_slot(index);
                let _ = answer.send(erased);
            }
            SlotTask::Save(answer) => {
                let tokens = self.slots[index].cache.clone();
                let adapters = self.slots[index].adapters.clone().unwrap_or_default();
                let history = self.slots[index].history.clone();
                let state = if tokens.is_empty() { Ok(Vec::new()) } else { self.context.save(index as i32) };
                drop(answer.send(state.map(|state| Snapshot { tokens, adapters, history, state }).map_err(|error| {
                    tracing::error!(%error, slot = index, "slot state not saved");
                    SlotError::Stopped
                })));
            }
            SlotTask::Restore(saved, owner, answer) => {
                let restored = self.restore(index, saved);
                if restored.is_ok() {
                    self.slots[index].owner = owner;
                }
                let _ = answer.send(restored);
            }
            SlotTask::Shift { keep, discard, answer } => drop(answer.send(self.shift(index, keep, discard))),
        }
    }

    fn clear_slot(&mut self, index: usize) {
        self.context.clear(index as i32);
        self.slots[index].replace(Vec::new(), AdapterSet::default());
    }

    fn restore(&mut self, index: usize, saved: Snapshot) -> Result<(), SlotError> {
        let Snapshot { tokens, adapters, history, state } = saved;
        if tokens.is_empty() {
            self.clear_slot(index);
            return Ok(());
        }
        let sequence = index as i32;
        let held = self.slots[index].cache.len();
        let checkpoints = self.context.checkpoints(sequence).clone();
        let before = if held == 0 { None } else { Some(self.context.save(sequence).map_err(|_| SlotError::Refused)?) };
        if let Err(error) = self.context.restore(sequence, &state, tokens.len() as u32) {
            tracing::error!(%error, slot = index, "validated slot state rejected by llama.cpp");
            if let Some(before) = before {
                if self.context.restore(sequence, &before, held as u32).is_err() {
                    self.clear_slot(index);
                    return Err(SlotError::Failed("llama.cpp accepted neither the new state nor the old one".into()));
                }
                self.context.set_checkpoints(sequence, checkpoints);
            }
            return Err(SlotError::Refused);
        }
        self.slots[index].replace(tokens, adapters);
        self.slots[index].history = history;
        self.slots[index].last_used = self.arrivals;
        Ok(())
    }

    fn shift(&mut self, index: usize, keep: usize, discard: usize) -> Result<usize, SlotError> {
        let tokens = self.slots[index].cache.len();
        let end = keep.checked_add(discard).filter(|&end| end <= tokens);
        let end = end.ok_or(SlotError::Range { keep, discard, tokens })?;
        if discard == 0 {
            return Ok(tokens);
        }
        match self.context.cut(index as i32, tokens as u32, &[keep as u32..end as u32]) {
            Ok(left) => {
                self.slots[index].cache.drain(keep..end);
                self.slots[index].history.remove_ranges(&[keep..end]);
                Ok(left as usize)
            }
            Err(ShiftError::Fixed(reason)) => Err(SlotError::Fixed(reason)),
            Err(ShiftError::Failed) => {
                self.clear_slot(index);
                Err(SlotError::Failed(ShiftError::Failed.to_string()))
            }
        }
    }
}
