//! Control of active runs: pause, resume, change of parameters, stop.
//!
//! Requests reach the decode thread like every other command, between two decodes, so that the thread needs no lock. A
//! paused run keeps its slot for a while. Then it is preempted: the slot goes to other runs. When the run resumes, it
//! reuses its state if it is still cached, or computes it again.

use super::Scheduler;
use super::active_run::PauseState;
use super::command::ControlRequest;
use crate::engine::output::{RunActivity, RunProgress};
use crate::events::{EndCause, RunId};
use std::time::Instant;
use tokio::sync::oneshot;

/// Maximum runs without a slot while slots are taken from clients that do not read. The unsent outputs of such runs
/// stay in memory, so their number is bounded.
const MAX_PREEMPTED: usize = 16;

impl Scheduler<'_> {
    /// Applies a request to a run. A run that has ended sends no reply.
    pub(super) fn handle_control(&mut self, id: RunId, request: ControlRequest, answer: oneshot::Sender<RunProgress>) {
        let progress = if let Some(at) = self.slots.find(id) {
            self.control_in_slot(at, request)
        } else if let Some(at) = self.queue.position(|active| active.run.id() == id) {
            self.control_in_queue(at, request)
        } else {
            let preempted = self.preempted.iter().position(|active| active.run.id() == id);
            preempted.map(|at| self.control_preempted(at, request))
        };
        if let Some(progress) = progress {
            // The client may have disconnected meanwhile.
            let _ = answer.send(progress);
        }
    }

    fn control_in_slot(&mut self, at: usize, request: ControlRequest) -> Option<RunProgress> {
        let active = self.slots.get_mut(at)?;
        match request {
            ControlRequest::Pause(keep_slot_for) => {
                active.pause.get_or_insert_with(PauseState::begin).release_slot_after(keep_slot_for);
            }
            ControlRequest::Resume => active.end_pause(),
            other => active.apply_request(other),
        }
        Some(active.progress(if active.pause.is_some() { RunActivity::Paused } else { RunActivity::Running }))
    }

    fn control_in_queue(&mut self, at: usize, request: ControlRequest) -> Option<RunProgress> {
        if matches!(request, ControlRequest::Pause(_) | ControlRequest::Stop(..)) {
            // A paused run leaves the queue.
            let mut active = self.queue.remove(at)?;
            active.pause = Some(PauseState::begin());
            active.apply_request(request);
            let progress = active.progress(RunActivity::Preempted);
            self.preempted.push(active);
            return Some(progress);
        }
        let active = self.queue.get_mut(at)?;
        active.apply_request(request);
        Some(active.progress(RunActivity::Queued))
    }

    fn control_preempted(&mut self, at: usize, request: ControlRequest) -> RunProgress {
        let active = &mut self.preempted[at];
        match request {
            ControlRequest::Pause(_) => {
                active.pause.get_or_insert_with(PauseState::begin);
            }
            ControlRequest::Resume => {
                active.end_pause();
                if active.run.end().is_none() && !active.run.has_outputs() {
                    return self.requeue(at);
                }
            }
            request => active.apply_request(request),
        }
        active.progress(RunActivity::Preempted)
    }

    /// Queues a run without a slot, ahead of runs that arrived later.
    fn requeue(&mut self, at: usize) -> RunProgress {
        let active = self.preempted.swap_remove(at);
        let progress = active.progress(RunActivity::Queued);
        self.queue.requeue(active);
        progress
    }

    /// Takes the slots of runs whose pause is too long, and of runs whose clients do not read while others wait. Queues
    /// preempted runs whose clients read again, and removes those that have ended.
    pub(super) fn reclaim_idle_slots(&mut self) {
        let now = Instant::now();
        let mut slots_needed = self.queue.len().saturating_sub(self.slots.free());
        for index in 0..self.slots.len() {
            let should_preempt = self.slots.get(index).is_some_and(|active| {
                let pause_expired = active.is_paused()
                    && active.pause.is_some_and(|pause| pause.slot_expired(now))
                    && active.run.needs_decode()
                    && !active.run.has_outputs();
                pause_expired || (slots_needed > 0 && self.preempted.len() < MAX_PREEMPTED && active.is_stalled(now))
            });
            if should_preempt {
                slots_needed = slots_needed.saturating_sub(1);
                self.preempt(index);
            }
        }
        let mut at = 0;
        while at < self.preempted.len() {
            let active = &mut self.preempted[at];
            if active.client.is_closed() && active.run.end().is_none() {
                active.abort(EndCause::Disconnect, "the client disconnected");
            }
            active.count_end(&self.status);
            active.flush_outbox();
            if active.run.end().is_some() && !self.recording.has_pending() && active.is_delivered() {
                let active = self.preempted.swap_remove(at);
                active.run.record_end(&mut self.recording);
            } else if active.pause.is_none() && active.run.end().is_none() && !active.run.has_outputs() {
                self.requeue(at);
            } else {
                at += 1;
            }
        }
    }

    /// Preempts a run. The slot keeps its state until another run needs it, and then moves it to the host cache.
    fn preempt(&mut self, index: usize) {
        let Some(mut active) = self.slots.take(index) else { return };
        self.release(index, &mut active);
        active.run.sequence_mut().set_kv_len(0);
        active.speculation.lookahead.clear();
        active.has_state = false;
        active.had_slot = true;
        active.run.record(&mut self.recording, true);
        self.preempted.push(active);
    }
}
