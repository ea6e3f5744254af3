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
        } else if let Some(at) = self.queue.position(|live| live.run.id() == id) {
            self.control_in_queue(at, request)
        } else {
            let preempted = self.preempted.iter().position(|live| live.run.id() == id);
            preempted.map(|at| self.control_preempted(at, request))
        };
        if let Some(progress) = progress {
            // The client may have disconnected meanwhile.
            let _ = answer.send(progress);
        }
    }

    fn control_in_slot(&mut self, at: usize, request: ControlRequest) -> Option<RunProgress> {
        let live = self.slots.get_mut(at)?;
        match request {
            ControlRequest::Pause(slot_for) => {
                live.pause.get_or_insert_with(PauseState::begin).release_slot_after(slot_for);
            }
            ControlRequest::Resume => live.end_pause(),
            other => live.apply_request(other),
        }
        Some(live.progress(if live.pause.is_some() { RunActivity::Paused } else { RunActivity::Running }))
    }

    fn control_in_queue(&mut self, at: usize, request: ControlRequest) -> Option<RunProgress> {
        if matches!(request, ControlRequest::Pause(_) | ControlRequest::Stop(..)) {
            // A paused run leaves the queue.
            let mut live = self.queue.remove(at)?;
            live.pause = Some(PauseState::begin());
            live.apply_request(request);
            let progress = live.progress(RunActivity::Preempted);
            self.preempted.push(live);
            return Some(progress);
        }
        let live = self.queue.get_mut(at)?;
        live.apply_request(request);
        Some(live.progress(RunActivity::Queued))
    }

    fn control_preempted(&mut self, at: usize, request: ControlRequest) -> RunProgress {
        let live = &mut self.preempted[at];
        match request {
            ControlRequest::Pause(_) => {
                live.pause.get_or_insert_with(PauseState::begin);
            }
            ControlRequest::Resume => {
                live.end_pause();
                if live.run.end().is_none() && !live.run.has_outputs() {
                    return self.requeue(at);
                }
            }
            request => live.apply_request(request),
        }
        live.progress(RunActivity::Preempted)
    }

    /// Queues a run without a slot, ahead of runs that arrived later.
    fn requeue(&mut self, at: usize) -> RunProgress {
        let live = self.preempted.swap_remove(at);
        let progress = live.progress(RunActivity::Queued);
        self.queue.requeue(live);
        progress
    }

    /// Takes the slots of runs whose pause is too long, and of runs whose clients do not read while others wait. Queues
    /// preempted runs whose clients read again, and removes those that have ended.
    pub(super) fn reclaim_idle_slots(&mut self) {
        let now = Instant::now();
        let mut wanted = self.queue.len().saturating_sub(self.slots.free());
        for index in 0..self.slots.len() {
            let long = self.slots.get(index).is_some_and(|live| {
                let pause_expired = live.is_paused()
                    && live.pause.is_some_and(|pause| pause.slot_expired(now))
                    && live.run.wants_decode().is_some()
                    && !live.run.has_outputs();
                pause_expired || (wanted > 0 && self.preempted.len() < MAX_PREEMPTED && live.is_stalled(now))
            });
            if long {
                wanted = wanted.saturating_sub(1);
                self.preempt(index);
            }
        }
        let mut at = 0;
        while at < self.preempted.len() {
            let live = &mut self.preempted[at];
            if live.client.is_closed() && live.run.end().is_none() {
                live.abort(EndCause::Disconnect, "the client disconnected");
            }
            live.count_end(&self.status);
            live.flush_outbox();
            if live.run.end().is_some() && !self.recording.has_pending() && live.is_delivered() {
                let live = self.preempted.swap_remove(at);
                live.run.record_end(&mut self.recording);
            } else if live.pause.is_none() && live.run.end().is_none() && !live.run.has_outputs() {
                self.requeue(at);
            } else {
                at += 1;
            }
        }
    }

    /// Preempts a run. The slot keeps its state until another run needs it, and then moves it to the host cache.
    fn preempt(&mut self, index: usize) {
        let Some(mut live) = self.slots.take(index) else { return };
        self.release(index, &mut live);
        live.run.sequence_mut().set_kv_len(0);
        live.speculation.lookahead.clear();
        live.has_state = false;
        live.had_slot = true;
        live.run.record(&mut self.recording, true);
        self.preempted.push(live);
    }
}
