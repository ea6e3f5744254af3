//! A run with its client and its place in the schedule: delivery of outputs and drafted tokens, pauses, control
//! requests.

use super::command::ControlRequest;
use crate::engine::output::{Output, RunActivity, RunProgress};
use crate::engine::recording::Recording;
use crate::engine::run::{Run, RunResources};
use crate::engine::speculation::run_speculation::{DraftedToken, RunSpeculation};
use crate::engine::status::EngineStatus;
use crate::events::{EndCause, RunEnd};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, OwnedPermit, error::TrySendError};

/// Time without reads by the client after which queued runs may take the run's slot.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(5);
/// Message of runs that the stop of the server ends.
pub const SHUTDOWN_MESSAGE: &str = "the server is shutting down";

/// A run with its client and its place in the schedule.
pub struct ScheduledRun {
    pub run: Box<Run>,
    /// Speculative decoding.
    pub speculation: RunSpeculation,
    /// Decoded tokens of the draft, with the logits after them, that the run has not processed yet because it waits for a
    /// mod.
    pending_draft: VecDeque<(DraftedToken, Vec<f32>)>,
    client: mpsc::Sender<Output>,
    /// Place in the client's channel for the end of the run.
    end_permit: Option<OwnedPermit<Output>>,
    /// Slot of the run; `None` while it is queued or preempted.
    slot: Option<u32>,
    /// Number of the run in order of arrival.
    arrival: u64,
    /// Number of the last batch with the run's adapters for which the run was ready.
    last_adapter_turn: u64,
    /// True if the slot's KV state is that of this run.
    owns_kv: bool,
    was_preempted: bool,
    pause: Option<Pause>,
    /// Time at which outputs began to wait for the client to read; `None` if none wait.
    unread_since: Option<Instant>,
    /// True after the ended run was added to the counters.
    counted: bool,
}

/// A pause of a run.
#[derive(Debug, Clone, Copy)]
struct Pause {
    since: Instant,
    /// Time after which the slot is released; `None` for never.
    keep_slot_until: Option<Instant>,
}

impl ScheduledRun {
    /// Creates the entry of a run that has just arrived.
    pub fn new(run: Box<Run>, client: mpsc::Sender<Output>, arrival: u64, speculation: RunSpeculation) -> Self {
        Self {
            run,
            speculation,
            pending_draft: VecDeque::new(),
            end_permit: client.clone().try_reserve_owned().ok(),
            client,
            slot: None,
            arrival,
            last_adapter_turn: 0,
            owns_kv: false,
            was_preempted: false,
            pause: None,
            unread_since: None,
            counted: false,
        }
    }

    /// Returns the number of the run in order of arrival.
    pub fn arrival(&self) -> u64 {
        self.arrival
    }

    /// Sets the slot that the run gets.
    pub fn set_slot(&mut self, slot: u32) {
        self.slot = Some(slot);
        self.run.set_slot(slot);
    }

    /// Returns true if the run had a slot before and was preempted.
    pub fn was_preempted(&self) -> bool {
        self.was_preempted
    }

    /// Returns true if the slot's KV state is that of this run, and not that of an earlier one.
    pub fn owns_kv(&self) -> bool {
        self.owns_kv
    }

    /// Returns true if the client has disconnected.
    pub fn is_disconnected(&self) -> bool {
        self.client.is_closed()
    }

    /// Returns the order in which runs with different adapters are decoded: longest wait first, then order of arrival.
    pub fn adapter_order(&self) -> (u64, u64) {
        (self.last_adapter_turn, self.arrival)
    }

    /// Sets the number of a batch with the run's adapters for which the run is ready.
    pub fn set_adapter_turn(&mut self, number: u64) {
        self.last_adapter_turn = number;
    }

    /// Makes the slot's KV state that of this run. Returns false if it already was.
    pub fn take_over_kv(&mut self) -> bool {
        let is_first = !std::mem::replace(&mut self.owns_kv, true);
        if is_first {
            self.speculation.free_tokens = self.run.sequence().len();
        }
        is_first
    }

    /// Returns true if the run needs a decode and nothing delays it.
    pub fn is_ready(&self) -> bool {
        self.run.needs_decode() && !self.run.has_outputs() && !self.is_held_by_pause()
    }

    /// Returns true if the run has outputs to send or needs a decode.
    pub fn has_work(&self) -> bool {
        self.run.has_outputs() || (!self.is_held_by_pause() && self.run.needs_decode())
    }

    /// Sends outputs while the client has room.
    pub fn flush_outbox(&mut self) {
        while self.run.has_outputs() {
            match self.client.try_reserve() {
                Ok(permit) => {
                    if let Some(output) = self.run.outbox().pop() {
                        permit.send(output);
                    }
                }
                Err(TrySendError::Closed(())) => drop(self.run.outbox().pop()),
                Err(TrySendError::Full(())) => {
                    let Some(permit) = self.end_permit.take_if(|_| self.run.outbox().is_at_end()) else {
                        self.unread_since.get_or_insert_with(Instant::now);
                        return;
                    };
                    if let Some(end) = self.run.outbox().pop() {
                        permit.send(end);
                    }
                }
            }
            self.unread_since = None;
        }
    }

    /// Sends outputs. Aborts the run if its client has disconnected.
    pub fn serve_client(&mut self, status: &EngineStatus) {
        if self.client.is_closed() && self.run.end().is_none() {
            self.abort_disconnected(status, "the client disconnected");
        }
        self.count_end(status);
        self.flush_outbox();
    }

    /// Ends the run of a client that has disconnected, or whose connection a stopping server has closed.
    pub fn abort_disconnected(&mut self, status: &EngineStatus, message: &str) {
        if status.is_stopping() {
            self.abort(EndCause::Shutdown, SHUTDOWN_MESSAGE);
        } else {
            self.abort(EndCause::Disconnect, message);
        }
    }

    /// Returns true if the run has ended, and its client has read everything or has disconnected.
    pub fn is_finished(&self) -> bool {
        self.run.end().is_some() && (!self.run.has_outputs() || self.client.is_closed())
    }

    /// Returns true if outputs wait for the client to read.
    pub fn has_unsent_outputs(&self) -> bool {
        self.run.has_outputs() && !self.client.is_closed()
    }

    /// Processes a decoded token of the draft with the logits after it; later, if the run waits for a mod. Returns `false`
    /// if the token is rejected.
    pub fn on_drafted(&mut self, drafted: DraftedToken, logits: &[f32], resources: &mut RunResources) -> bool {
        if self.run.awaited_mod().is_none() {
            return self.accept_token(drafted, logits, resources);
        }
        // The next decode overwrites the logits before the mod replies.
        self.pending_draft.push_back((drafted, logits.to_vec()));
        true
    }

    /// Accepts a drafted token if the run has sampled it, and passes the logits after it to the run. Returns `false` if the
    /// token is rejected.
    fn accept_token(&mut self, drafted: DraftedToken, logits: &[f32], resources: &mut RunResources) -> bool {
        let DraftedToken { position, token, next, captures } = drafted;
        if !self.run.continues_with(position, token) {
            return false;
        }
        self.run.count_accepted();
        self.speculation.account.add_accepted();
        self.run.sequence_mut().set_kv_len(position + 1);
        self.run.set_captures(captures);
        self.run.set_drafted(next);
        self.run.on_logits(position, logits, resources);
        true
    }

    /// Continues with the draft that waited for a mod's reply, until the run waits for a mod again or rejects a token.
    /// Returns `false` if there is no draft, or the run cannot continue.
    pub fn resume_draft(&mut self, resources: &mut RunResources) -> bool {
        if !self.is_ready() || self.pending_draft.is_empty() {
            return false;
        }
        while self.run.awaited_mod().is_none()
            && let Some((drafted, logits)) = self.pending_draft.pop_front()
        {
            if !self.accept_token(drafted, &logits, resources) {
                self.pending_draft.clear();
            }
        }
        true
    }

    /// Discards the draft that waited for a mod's reply.
    pub fn discard_draft(&mut self) {
        self.pending_draft.clear();
    }

    /// Adds an ended run to the counters, once. Called before the end is sent, so that a client that has received it
    /// finds its run counted.
    pub fn count_end(&mut self, status: &EngineStatus) {
        if let Some(end) = self.run.end()
            && !std::mem::replace(&mut self.counted, true)
        {
            status.count_run(self.slot, self.run.slot_progress(), end);
        }
    }

    /// Returns the time for which outputs have waited for the client to read; `None` if none wait.
    pub fn unread_time(&self, now: Instant) -> Option<Duration> {
        self.unread_since.map(|since| now.duration_since(since))
    }

    /// Ends the run without waiting for the client to read. If the client has no room for all outputs, it receives the
    /// aborted end in place of the rest.
    pub fn end_at_once(&mut self, cause: EndCause, message: impl Into<String>, status: &EngineStatus) {
        let message = message.into();
        self.abort(cause, message.as_str());
        self.count_end(status);
        self.flush_outbox();
        if self.run.has_outputs()
            && let Some(end) = self.run.end()
        {
            // The run may have ended before, but the client lacks the rest of the answer.
            let mut end = RunEnd::clone(end);
            end.set_aborted(cause, message);
            self.run.outbox().replace_with_end(Arc::new(end));
            self.flush_outbox();
        }
    }

    /// Returns true if the client has blocked the run for longer than [`UNREAD_TIMEOUT`].
    pub fn is_stalled(&self, now: Instant) -> bool {
        self.unread_time(now).is_some_and(|time| time >= UNREAD_TIMEOUT)
            && (self.run.end().is_some() || (self.run.needs_decode() && self.run.is_between_tokens()))
    }

    /// Returns true if the run is paused and no step is in progress. A paused run first completes its step.
    pub fn is_held_by_pause(&self) -> bool {
        self.pause.is_some() && self.run.is_between_tokens()
    }

    /// Returns true if the run has been paused for so long that it must release its slot.
    pub fn is_pause_expired(&self, now: Instant) -> bool {
        self.is_held_by_pause()
            && self.pause.and_then(|pause| pause.keep_slot_until).is_some_and(|until| now >= until)
            && self.run.needs_decode()
            && !self.run.has_outputs()
    }

    /// Returns true if a run without a slot can be queued for one.
    pub fn can_continue(&self) -> bool {
        self.pause.is_none() && self.run.end().is_none() && !self.run.has_outputs()
    }

    /// Updates the run after it has lost its slot.
    pub fn preempt(&mut self, recording: &mut Recording) {
        self.run.sequence_mut().discard_kv();
        self.discard_draft();
        self.slot = None;
        self.owns_kv = false;
        self.was_preempted = true;
        self.run.record(recording, true);
    }

    /// Ends the run for an external reason. A pause ends with it and does not count as active time.
    pub fn abort(&mut self, cause: EndCause, message: impl Into<String>) {
        self.end_pause();
        self.run.abort(cause, message);
    }

    fn end_pause(&mut self) {
        if let Some(pause) = self.pause.take() {
            self.run.add_pause(pause.since.elapsed());
        }
    }

    /// Returns false for a change of parameters after the end of the run, even if the client has not received the end.
    pub fn accepts(&self, request: &ControlRequest) -> bool {
        !(matches!(request, ControlRequest::Modify(_)) && self.run.end().is_some())
    }

    /// Applies a control request.
    pub fn apply_request(&mut self, request: ControlRequest) {
        match request {
            ControlRequest::Pause(keep_slot_for) => {
                let now = Instant::now();
                let pause = self.pause.get_or_insert(Pause { since: now, keep_slot_until: None });
                pause.keep_slot_until = now.checked_add(keep_slot_for);
            }
            ControlRequest::Resume => self.end_pause(),
            ControlRequest::Modify(change) => self.run.apply_change(*change),
            ControlRequest::Stop(cause, message) => self.abort(cause, message),
            ControlRequest::EndReasoning(response) => {
                // The client may have disconnected in the meantime.
                let _ = response.send(self.run.end_reasoning());
            }
            ControlRequest::Progress => {}
        }
    }

    /// Returns the progress of a run that has a slot.
    pub fn progress_in_slot(&self) -> RunProgress {
        self.progress(if self.pause.is_some() { RunActivity::Paused } else { RunActivity::Running })
    }

    /// Returns the progress of the run. Its activity is `activity`, unless it has ended.
    pub fn progress(&self, activity: RunActivity) -> RunProgress {
        let activity = if self.run.end().is_some() { RunActivity::Finished } else { activity };
        let pause = self.pause.map_or(Duration::ZERO, |pause| pause.since.elapsed());
        let active_time = self.run.active_time().saturating_sub(pause);
        let generated = self.run.sequence().answer_len() as u32;
        RunProgress { generated, activity, is_paused: self.pause.is_some(), active_time }
    }
}
