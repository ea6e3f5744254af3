//! All runs of the decode thread: those in slots, queued runs, and preempted runs.
//!
//! A paused run keeps its slot for a while. Then it is preempted: the slot goes to other runs. A run whose client does
//! not read is preempted, too, if other runs wait for a slot. When a preempted run continues, it is queued and reuses
//! its KV state if it is still cached.

use super::active_run::ActiveRun;
use super::command::ControlRequest;
use super::queue::RunQueue;
use super::slots::ActiveSlots;
use crate::engine::kv::slots::KvSlots;
use crate::engine::output::{RunActivity, RunProgress};
use crate::engine::recording::Recording;
use crate::engine::status::EngineStatus;
use crate::events::{EndCause, RunId};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

/// Maximum number of preempted runs. With more, runs whose clients do not read are not preempted. The unsent outputs of
/// such runs stay in memory.
const MAX_PREEMPTED: usize = 16;

/// All runs of the decode thread.
pub struct ActiveRuns {
    pub slots: ActiveSlots,
    pub queue: RunQueue,
    /// Paused or preempted runs without a slot, which are not queued.
    preempted: Vec<ActiveRun>,
}

impl ActiveRuns {
    /// Creates `slots` free slots. `waiting` counts the runs that were submitted and have no slot.
    pub fn new(slots: u32, waiting: Arc<AtomicUsize>) -> Self {
        Self { slots: ActiveSlots::new(slots), queue: RunQueue::new(waiting), preempted: Vec::new() }
    }

    /// Returns true if there are runs that are not queued.
    pub fn has_started(&self) -> bool {
        !self.preempted.is_empty() || self.slots.runs().next().is_some()
    }

    /// Returns true if a run that is not queued has outputs to send or needs a decode.
    pub fn has_work(&self) -> bool {
        self.slots.runs().chain(&self.preempted).any(ActiveRun::has_work)
    }

    /// Removes and returns a run without a slot.
    pub fn pop_without_slot(&mut self) -> Option<ActiveRun> {
        self.preempted.pop().or_else(|| self.queue.remove(0))
    }

    /// Applies a control request. Returns the progress of the run; `None` if the run is not active.
    pub fn control(&mut self, id: RunId, request: ControlRequest) -> Option<RunProgress> {
        if let Some(active) = self.slots.find_mut(id) {
            active.apply_request(request);
            return Some(active.progress_in_slot());
        }
        if let Some(at) = self.queue.position(|active| active.run.id() == id) {
            let leaves_queue = matches!(request, ControlRequest::Pause(_) | ControlRequest::Stop(..));
            let active = self.queue.get_mut(at)?;
            active.apply_request(request);
            if !leaves_queue {
                return Some(active.progress(RunActivity::Queued));
            }
            let progress = active.progress(RunActivity::Preempted);
            self.preempted.extend(self.queue.remove(at));
            return Some(progress);
        }
        let at = self.preempted.iter().position(|active| active.run.id() == id)?;
        let resumes = matches!(request, ControlRequest::Resume);
        let active = &mut self.preempted[at];
        active.apply_request(request);
        if !(resumes && active.can_continue()) {
            return Some(active.progress(RunActivity::Preempted));
        }
        let progress = active.progress(RunActivity::Queued);
        self.requeue(at);
        Some(progress)
    }

    /// Removes queued runs whose clients have disconnected.
    pub fn remove_disconnected(&mut self, recording: &mut Recording, status: &EngineStatus) {
        while let Some(at) = self.queue.position(ActiveRun::is_disconnected) {
            let Some(mut active) = self.queue.remove(at) else { break };
            let event = if active.was_preempted() { "resumed" } else { "started" };
            active.run.abort(EndCause::Disconnect, format!("the client disconnected before the run {event}"));
            if active.was_preempted() {
                active.count_end(status);
            }
            active.run.record_end(recording);
        }
    }

    /// Preempts runs whose pause has expired, and runs whose clients do not read while other runs need a slot.
    pub fn reclaim_slots(&mut self, kv: &mut KvSlots<'_>, recording: &mut Recording) {
        let now = Instant::now();
        let mut slots_needed = self.queue.len().saturating_sub(self.slots.free());
        for index in 0..self.slots.len() {
            let should_preempt = self.slots.get(index).is_some_and(|active| {
                active.is_pause_expired(now)
                    || (slots_needed > 0 && self.preempted.len() < MAX_PREEMPTED && active.is_stalled(now))
            });
            if should_preempt {
                slots_needed = slots_needed.saturating_sub(1);
                // The slot keeps the state until another run needs it; then the state moves to the host cache.
                if let Some(mut active) = self.slots.release(index, kv) {
                    active.preempt(recording);
                    self.preempted.push(active);
                }
            }
        }
    }

    /// Sends the outputs of preempted runs. Queues those that can continue, and removes those that have ended.
    pub fn serve_preempted(&mut self, recording: &mut Recording, status: &EngineStatus) {
        let mut at = 0;
        while at < self.preempted.len() {
            let active = &mut self.preempted[at];
            active.serve_client(status);
            if active.is_finished() && !recording.has_pending() {
                self.preempted.swap_remove(at).run.record_end(recording);
            } else if active.can_continue() {
                self.requeue(at);
            } else {
                at += 1;
            }
        }
    }

    /// Queues a preempted run, ahead of runs that arrived later.
    fn requeue(&mut self, at: usize) {
        let active = self.preempted.swap_remove(at);
        self.queue.requeue(active);
    }
}
