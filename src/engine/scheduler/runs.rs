//! All runs of the decode thread: those in slots, queued runs, and preempted runs.
//!
//! A paused run keeps its slot for a while. Then it is preempted: the slot goes to other runs. A run whose client does
//! not read is preempted, too, if other runs wait for a slot, and ends after some time. When a preempted run continues,
//! it is queued and reuses its KV state if it is still cached.

use super::command::ControlRequest;
use super::queue::RunQueue;
use super::run_slots::RunSlots;
use super::scheduled_run::ScheduledRun;
use crate::engine::kv::slots::KvSlots;
use crate::engine::output::{RunActivity, RunProgress};
use crate::engine::recording::Recording;
use crate::engine::status::EngineStatus;
use crate::events::{EndCause, RunId};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

/// Maximum number of preempted runs with unsent outputs, which stay in memory. Before more runs whose clients do not
/// read are preempted, the run that was unread for longest ends.
const MAX_PREEMPTED: usize = 16;

/// All runs of the decode thread.
pub struct ScheduledRuns {
    pub slots: RunSlots,
    pub queue: RunQueue,
    /// Paused or preempted runs without a slot, which are not queued.
    preempted: Vec<ScheduledRun>,
}

impl ScheduledRuns {
    /// Creates `slots` free slots. `queue_places` counts the places in the queue.
    pub fn new(slots: u32, queue_places: Arc<AtomicUsize>) -> Self {
        Self { slots: RunSlots::new(slots), queue: RunQueue::new(queue_places), preempted: Vec::new() }
    }

    /// Returns true if there are runs that are not queued.
    pub fn has_started(&self) -> bool {
        !self.preempted.is_empty() || self.slots.runs().next().is_some()
    }

    /// Returns true if a run that is not queued has outputs to send or needs a decode.
    pub fn has_work(&self) -> bool {
        self.slots.runs().chain(&self.preempted).any(ScheduledRun::has_work)
    }

    /// Removes and returns a run without a slot.
    pub fn pop_without_slot(&mut self) -> Option<ScheduledRun> {
        self.preempted.pop().or_else(|| self.queue.remove(0))
    }

    /// Applies a control request. Returns the progress of the run; `None` if the run is not active, or does not accept the
    /// request.
    pub fn control(&mut self, id: RunId, request: ControlRequest) -> Option<RunProgress> {
        if let Some(scheduled) = self.slots.find_mut(id) {
            return scheduled.accepts(&request).then(|| {
                scheduled.apply_request(request);
                scheduled.progress_in_slot()
            });
        }
        if let Some(at) = self.queue.position(|scheduled| scheduled.run.id() == id) {
            let scheduled = self.queue.get_mut(at)?;
            scheduled.apply_request(request);
            if scheduled.can_continue() {
                return Some(scheduled.progress(RunActivity::Queued));
            }
            let progress = scheduled.progress(RunActivity::Preempted);
            self.preempted.extend(self.queue.remove(at));
            return Some(progress);
        }
        let at = self.preempted.iter().position(|scheduled| scheduled.run.id() == id)?;
        let resumes = matches!(request, ControlRequest::Resume);
        let scheduled = &mut self.preempted[at];
        if !scheduled.accepts(&request) {
            return None;
        }
        scheduled.apply_request(request);
        if !(resumes && scheduled.can_continue()) {
            return Some(scheduled.progress(RunActivity::Preempted));
        }
        let progress = scheduled.progress(RunActivity::Queued);
        self.requeue(at);
        Some(progress)
    }

    /// Removes queued runs whose clients have disconnected.
    pub fn remove_disconnected(&mut self, recording: &mut Recording, status: &EngineStatus) {
        while let Some(at) = self.queue.position(ScheduledRun::is_disconnected) {
            let Some(mut scheduled) = self.queue.remove(at) else { break };
            let event = if scheduled.was_preempted() { "resumed" } else { "started" };
            scheduled.abort_disconnected(status, &format!("the client disconnected before the run {event}"));
            scheduled.count_end(status);
            scheduled.run.record_end(recording);
        }
    }

    /// Ends runs whose clients have not read for `max_time`.
    pub fn end_unread(&mut self, max_time: Duration, status: &EngineStatus) {
        let now = Instant::now();
        for scheduled in self.slots.runs_mut().chain(&mut self.preempted) {
            if let Some(time) = scheduled.unread_time(now).filter(|&time| time >= max_time) {
                let (time, max) = (time.as_secs(), max_time.as_secs());
                let message = format!("the client did not read for {time} s; the maximum is {max} s");
                scheduled.end_at_once(EndCause::Disconnect, message, status);
            }
        }
    }

    /// Preempts runs whose pause has expired, and runs whose clients do not read while other runs need a slot.
    pub fn reclaim_slots(&mut self, kv: &mut KvSlots<'_>, recording: &mut Recording, status: &EngineStatus) {
        let now = Instant::now();
        let free = self.slots.free() + self.slots.runs().filter(|scheduled| scheduled.is_finished()).count();
        let mut slots_needed = self.queue.len().saturating_sub(free);
        for index in 0..self.slots.len() {
            let Some(scheduled) = self.slots.get(index) else { continue };
            let is_stalled = slots_needed > 0 && scheduled.is_stalled(now);
            if !is_stalled && !scheduled.is_pause_expired(now) {
                continue;
            }
            slots_needed = slots_needed.saturating_sub(1);
            if is_stalled && !self.can_preempt() {
                self.end_longest_unread(now, status);
            }
            // The slot keeps the state until another run needs it; then the state moves to the host cache.
            if (!is_stalled || self.can_preempt())
                && let Some(mut scheduled) = self.slots.release(index, kv)
            {
                scheduled.preempt(recording);
                self.preempted.push(scheduled);
            }
        }
    }

    /// Returns true if there are fewer preempted runs with unsent outputs than [`MAX_PREEMPTED`].
    fn can_preempt(&self) -> bool {
        self.preempted.iter().filter(|scheduled| scheduled.has_unsent_outputs()).count() < MAX_PREEMPTED
    }

    /// Ends the run whose client has not read for longest.
    fn end_longest_unread(&mut self, now: Instant, status: &EngineStatus) {
        let runs = self.slots.runs_mut().chain(&mut self.preempted);
        let unread = runs.filter_map(|scheduled| Some((scheduled.unread_time(now)?, scheduled)));
        if let Some((time, scheduled)) = unread.max_by_key(|&(time, _)| time) {
            let time = time.as_secs();
            let message = format!("the client did not read for {time} s while other runs waited for a slot");
            scheduled.end_at_once(EndCause::Disconnect, message, status);
        }
    }

    /// Sends the outputs of preempted runs. Queues those that can continue, and removes those that have ended.
    pub fn serve_preempted(&mut self, recording: &mut Recording, status: &EngineStatus) {
        let mut at = 0;
        while at < self.preempted.len() {
            let scheduled = &mut self.preempted[at];
            scheduled.serve_client(status);
            if scheduled.is_finished() && !recording.has_pending() {
                self.preempted.swap_remove(at).run.record_end(recording);
            } else if scheduled.can_continue() {
                self.requeue(at);
            } else {
                at += 1;
            }
        }
    }

    /// Queues a preempted run, ahead of runs that arrived later.
    fn requeue(&mut self, at: usize) {
        let scheduled = self.preempted.swap_remove(at);
        self.queue.requeue(scheduled);
    }
}
