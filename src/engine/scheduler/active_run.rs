//! A run in the schedule, with its client: delivery of outputs, pauses, and requests to the run.

use super::command::ControlRequest;
use crate::engine::output::{Output, RunActivity, RunProgress};
use crate::engine::run::{ReplySenderFactory, Run};
use crate::engine::speculation::lookahead::{DraftedToken, RunSpeculation};
use crate::engine::status::EngineStatus;
use crate::events::EndCause;
use crate::model::llama::Candidates;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, error::TrySendError};

/// Time for which a client may read nothing before its run's slot goes to queued runs.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(5);

/// A run with its client and its place in the schedule.
pub struct ActiveRun {
    pub run: Box<Run>,
    pub client: mpsc::Sender<Output>,
    pub arrival: u64,
    /// Number of the batch that last included the run, if not all ready runs fit into it.
    pub last_batch: u64,
    /// True after the run's sequence was matched with the slot's KV state.
    pub has_state: bool,
    /// True if the run had a slot before and was preempted.
    pub had_slot: bool,
    /// Set while the run is paused.
    pub pause: Option<PauseState>,
    /// Speculative decoding.
    pub speculation: RunSpeculation,
    /// Time since which the client has read none of the waiting outputs.
    unread_since: Option<Instant>,
    /// True after the ended run was added to the counters.
    counted: bool,
}

/// A pause of a run.
#[derive(Debug, Clone, Copy)]
pub struct PauseState {
    since: Instant,
    slot_until: Option<Instant>,
}

impl ActiveRun {
    /// Creates the entry of a run that has just arrived.
    pub fn new(run: Box<Run>, client: mpsc::Sender<Output>, arrival: u64, speculation: RunSpeculation) -> Self {
        Self {
            run,
            client,
            arrival,
            last_batch: 0,
            has_state: false,
            had_slot: false,
            pause: None,
            speculation,
            unread_since: None,
            counted: false,
        }
    }

    /// Sends outputs while the client has room.
    pub fn flush_outbox(&mut self) {
        while self.run.has_outputs() {
            let permit = match self.client.try_reserve() {
                Ok(permit) => Some(permit),
                Err(TrySendError::Closed(())) => None,
                Err(TrySendError::Full(())) => {
                    self.unread_since.get_or_insert_with(Instant::now);
                    return;
                }
            };
            if let (Some(output), Some(permit)) = (self.run.outbox().pop(), permit) {
                permit.send(output);
            }
            self.unread_since = None;
        }
    }

    /// Passes the logits after a drafted token to the run. Returns `false` if the run has not continued with that token.
    pub fn deliver(
        &mut self,
        drafted: DraftedToken,
        logits: &[f32],
        candidates: &mut Candidates,
        reply_sender: &ReplySenderFactory<'_>,
    ) -> bool {
        let DraftedToken { position, token, next, attention } = drafted;
        if !self.run.continues_with(position, token) {
            return false;
        }
        self.run.count_accepted();
        self.speculation.account.add_accepted();
        self.run.sequence_mut().set_kv_len(position + 1);
        if let Some(row) = attention {
            self.run.set_attention(row);
        }
        self.run.set_drafted(next);
        self.run.on_logits(position, logits, candidates, reply_sender);
        true
    }

    /// Passes the logits that waited for a mod's reply to the run, until it waits again or has not continued with a
    /// drafted token.
    pub fn deliver_lookahead(&mut self, candidates: &mut Candidates, reply_sender: &ReplySenderFactory<'_>) {
        while self.run.awaited_mod().is_none()
            && let Some((drafted, logits)) = self.speculation.lookahead.pop_front()
        {
            if !self.deliver(drafted, &logits, candidates, reply_sender) {
                self.speculation.lookahead.clear();
            }
        }
    }

    /// Adds an ended run to the counters, once. Called before the client learns of the end, so that the client finds
    /// its run counted.
    pub fn count_end(&mut self, status: &EngineStatus) {
        if let Some(end) = self.run.end()
            && !std::mem::replace(&mut self.counted, true)
        {
            status.count_run(self.run.metrics().slot.get().copied(), self.run.slot_progress(), end);
        }
    }

    /// Returns true if the client has read everything or has disconnected.
    pub fn is_delivered(&self) -> bool {
        !self.run.has_outputs() || self.client.is_closed()
    }

    /// Returns true if the run is paused and no step is half done.
    pub fn is_paused(&self) -> bool {
        self.pause.is_some() && self.run.is_between_tokens()
    }

    /// Returns true if the client has blocked the run for longer than [`UNREAD_TIMEOUT`].
    pub fn is_stalled(&self, now: Instant) -> bool {
        self.unread_since.is_some_and(|since| now.duration_since(since) >= UNREAD_TIMEOUT)
            && (self.run.end().is_some() || (self.run.needs_decode() && self.run.is_between_tokens()))
    }

    /// Ends the pause, if there is one.
    pub fn end_pause(&mut self) {
        if let Some(pause) = self.pause.take() {
            self.run.add_pause(pause.since.elapsed());
        }
    }

    /// Ends the run for an external reason. A pause ends with it and does not count as active time.
    pub fn abort(&mut self, cause: EndCause, message: impl Into<String>) {
        self.end_pause();
        self.run.abort(cause, message);
    }

    /// Returns the progress of the run, which has this activity unless it has ended.
    pub fn progress(&self, activity: RunActivity) -> RunProgress {
        let activity = if self.run.end().is_some() { RunActivity::Finished } else { activity };
        let pause = self.pause.map_or(Duration::ZERO, |pause| pause.since.elapsed());
        let active_time = self.run.active_time().saturating_sub(pause);
        RunProgress { generated: self.run.sequence().generated() as u32, activity, active_time }
    }

    /// Applies a request that changes the run itself.
    pub fn apply_request(&mut self, request: ControlRequest) {
        match request {
            ControlRequest::Modify(change) => self.run.apply_change(*change),
            ControlRequest::Stop(cause, why) => {
                self.abort(cause, why);
            }
            ControlRequest::EndReasoning(answer) => {
                // The client may have disconnected meanwhile.
                let _ = answer.send(self.run.end_reasoning());
            }
            ControlRequest::Pause(_) | ControlRequest::Resume | ControlRequest::Progress => {}
        }
    }
}

impl PauseState {
    /// Begins a pause.
    pub fn begin() -> Self {
        Self { since: Instant::now(), slot_until: None }
    }

    /// Sets the time after which the slot is released.
    pub fn release_slot_after(&mut self, delay: Duration) {
        self.slot_until = Instant::now().checked_add(delay);
    }

    /// Returns true if the slot must be released.
    pub fn slot_expired(&self, now: Instant) -> bool {
        self.slot_until.is_some_and(|until| now >= until)
    }
}
