//! Control of active runs: pause, resume, change of parameters, stop.
//!
//! Requests reach the decode thread like every other command, between two decodes, so that the thread needs no lock. A
//! paused run keeps its slot for a while. Then it is preempted: the slot goes to other runs. When the run resumes, it
//! reuses its state if it is still cached, or computes it again.

use super::reasoning::ReasoningTracker;
use super::run::{Run, RunState};
use super::scheduler::{ActiveRun, Command, Scheduler};
use super::{Limits, SamplingParams};
use crate::events::{FinishReason, RunId};
use crate::model::Vocabulary;
use crate::model::llama::Sampler;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Time for which a client may read nothing before its run's slot goes to queued runs.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum runs without a slot while slots are taken from clients that do not read. The unsent outputs of such runs
/// stay in memory, so their number is bounded.
const MAX_PREEMPTED: usize = 16;

/// Handle that controls an active run; cheap to clone.
#[derive(Debug, Clone)]
pub struct RunControl {
    run: RunId,
    commands: Sender<Command>,
    vocabulary: Arc<Vocabulary>,
}

/// The run has ended, or the engine has stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the run has ended")]
pub struct RunOver;

/// Progress of a run after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunProgress {
    /// Tokens in the answer.
    pub generated: u32,
    /// Activity of the run.
    pub activity: RunActivity,
    /// Time for which the run was active, without pauses.
    pub active_time: Duration,
}

/// Activity of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunActivity {
    /// Waits for a slot.
    Queued,
    /// Has a slot and is decoded.
    Running,
    /// Is paused and has a slot.
    Paused,
    /// Has lost its slot, by a pause or to a queued run.
    Preempted,
    /// Has ended.
    Finished,
}

/// Outcome of a request to end the reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReasoning {
    /// The reasoning ends with the next tokens.
    Ended,
    /// The run is not reasoning.
    NotReasoning,
    /// The run was started without a [`super::ReasoningBudget`].
    NoBudget,
}

/// Request to an active run.
pub(super) enum ControlRequest {
    /// Pause; release the slot after that time.
    Pause(Duration),
    Resume,
    Modify(Box<ParameterChange>),
    /// End the run; the text so far is the answer.
    Stop(String),
    /// End the current reasoning, and report whether there was one.
    EndReasoning(oneshot::Sender<EndReasoning>),
    /// Report the progress only.
    Progress,
}

/// Parameters that apply from the next token on.
pub(super) struct ParameterChange {
    sampling: SamplingParams,
    sampler: Sampler,
    limits: Limits,
    note: String,
}

/// A pause of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct PauseState {
    since: Instant,
    slot_until: Option<Instant>,
}

impl RunControl {
    pub(super) fn new(run: RunId, commands: Sender<Command>, vocabulary: Arc<Vocabulary>) -> Self {
        Self { run, commands, vocabulary }
    }

    /// Pauses the run: nothing is decoded for it. After `slot_for` its slot goes to other runs.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn pause(&self, slot_for: Duration) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Pause(slot_for)).await
    }

    /// Resumes the run. A run without a slot waits for one, ahead of runs that arrived later.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn resume(&self) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Resume).await
    }

    /// Changes sampling parameters and limits from the next token on. The random sequence continues unless the seed
    /// changes. `note` describes the change in the trace.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn modify(
        &self,
        mut sampling: SamplingParams,
        limits: Limits,
        note: String,
    ) -> Result<RunProgress, RunOver> {
        super::submit::ban_end_tokens(&mut sampling, &limits, &self.vocabulary);
        let vocabulary = Arc::clone(&self.vocabulary);
        let make = move || {
            let sampler = Sampler::new(&sampling, &vocabulary);
            Box::new(ParameterChange { sampling, sampler, limits, note })
        };
        let change = tokio::task::spawn_blocking(make).await.map_err(|_| RunOver)?;
        self.request(ControlRequest::Modify(change)).await
    }

    /// Ends the run; the text so far is its answer. `why` says who requested it.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn stop(&self, why: impl Into<String>) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Stop(why.into())).await
    }

    /// Ends the current reasoning of the run, like an exhausted budget.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn end_reasoning(&self) -> Result<EndReasoning, RunOver> {
        let (answer, answered) = oneshot::channel();
        self.request(ControlRequest::EndReasoning(answer)).await?;
        answered.await.map_err(|_| RunOver)
    }

    /// Returns the progress of the run.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn progress(&self) -> Result<RunProgress, RunOver> {
        self.request(ControlRequest::Progress).await
    }

    async fn request(&self, request: ControlRequest) -> Result<RunProgress, RunOver> {
        let (answer, answered) = oneshot::channel();
        self.commands.send(Command::Control(self.run, request, answer)).map_err(|_| RunOver)?;
        answered.await.map_err(|_| RunOver)
    }
}

impl PauseState {
    /// Returns true if the slot must be released.
    fn slot_expired(&self, now: Instant) -> bool {
        self.slot_until.is_some_and(|until| now >= until)
    }
}

impl ActiveRun {
    /// Returns true if the run is paused and no step is half done.
    pub(super) fn is_paused(&self) -> bool {
        self.pause.is_some() && self.run.is_between_tokens()
    }

    /// Returns true if the client has blocked the run for longer than [`UNREAD_TIMEOUT`].
    fn is_stalled(&self, now: Instant) -> bool {
        self.unread_since.is_some_and(|since| now.duration_since(since) >= UNREAD_TIMEOUT)
            && (self.run.end.is_some() || (self.run.wants_decode().is_some() && self.run.is_between_tokens()))
    }

    fn end_pause(&mut self) {
        if let Some(pause) = self.pause.take() {
            self.run.paused_time += pause.since.elapsed();
        }
    }

    /// Ends the run for an external reason. A pause ends with it and does not count as active time.
    pub(super) fn abort(&mut self, reason: FinishReason, message: impl Into<String>) {
        self.end_pause();
        self.run.abort(reason, message.into());
    }

    fn progress(&self, activity: RunActivity) -> RunProgress {
        let activity = if self.run.end.is_some() { RunActivity::Finished } else { activity };
        let pause = self.pause.map_or(Duration::ZERO, |pause| pause.since.elapsed());
        let active_time = Duration::from_micros(self.run.elapsed_us()).saturating_sub(pause);
        RunProgress { generated: self.run.generated() as u32, activity, active_time }
    }
}

impl Scheduler<'_> {
    /// Applies a request to a run. A run that has ended sends no reply.
    pub(super) fn handle_control(&mut self, id: RunId, request: ControlRequest, answer: oneshot::Sender<RunProgress>) {
        let progress = if let Some(at) = self.slots.iter().position(|slot| is_run(slot.active.as_ref(), id)) {
            self.control_in_slot(at, request)
        } else if let Some(at) = self.queue.iter().position(|live| live.run.id == id) {
            self.control_in_queue(at, request)
        } else {
            let preempted = self.preempted.iter().position(|live| live.run.id == id);
            preempted.map(|at| self.control_preempted(at, request))
        };
        if let Some(progress) = progress {
            // The client may have disconnected meanwhile.
            let _ = answer.send(progress);
        }
    }

    fn control_in_slot(&mut self, at: usize, request: ControlRequest) -> Option<RunProgress> {
        let live = self.slots[at].active.as_mut()?;
        match request {
            ControlRequest::Pause(slot_for) => {
                let pause = live.pause.get_or_insert(PauseState { since: Instant::now(), slot_until: None });
                pause.slot_until = Instant::now().checked_add(slot_for);
            }
            ControlRequest::Resume => live.end_pause(),
            other => live.apply_request(other),
        }
        Some(live.progress(if live.pause.is_some() { RunActivity::Paused } else { RunActivity::Running }))
    }

    fn control_in_queue(&mut self, at: usize, request: ControlRequest) -> Option<RunProgress> {
        if matches!(request, ControlRequest::Pause(_) | ControlRequest::Stop(_)) {
            // A paused run leaves the queue.
            let mut live = self.queue.remove(at)?;
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            live.pause = Some(PauseState { since: Instant::now(), slot_until: None });
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
                live.pause.get_or_insert(PauseState { since: Instant::now(), slot_until: None });
            }
            ControlRequest::Resume => {
                live.end_pause();
                if live.run.end.is_none() && live.run.outbox.is_empty() {
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
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let turn = self.queue.partition_point(|other| other.arrival < live.arrival);
        self.queue.insert(turn, live);
        progress
    }

    /// Takes the slots of runs whose pause is too long, and of runs whose clients do not read while others wait. Queues
    /// preempted runs whose clients read again, and removes those that have ended.
    pub(super) fn reclaim_idle_slots(&mut self) {
        let now = Instant::now();
        let free = self.slots.iter().filter(|slot| slot.active.is_none()).count();
        let mut wanted = self.queue.len().saturating_sub(free);
        for index in 0..self.slots.len() {
            let long = self.slots[index].active.as_ref().is_some_and(|live| {
                let pause_expired = live.is_paused()
                    && live.pause.is_some_and(|pause| pause.slot_expired(now))
                    && live.run.wants_decode().is_some()
                    && live.run.outbox.is_empty();
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
            if live.client.is_closed() && live.run.end.is_none() {
                live.abort(FinishReason::Cancelled, "the client disconnected");
            }
            live.count_end(&self.status);
            live.flush_outbox();
            if live.run.end.is_some() && self.pending_signals.is_empty() && live.is_delivered() {
                let live = self.preempted.swap_remove(at);
                self.record_end(live);
            } else if live.pause.is_none() && live.run.end.is_none() && live.run.outbox.is_empty() {
                self.requeue(at);
            } else {
                at += 1;
            }
        }
    }

    /// Preempts a run. The slot keeps its state until another run needs it, and then moves it to the host cache.
    fn preempt(&mut self, index: usize) {
        let Some(mut live) = self.slots[index].active.take() else { return };
        self.release(index, &mut live);
        live.run.kv_len = 0;
        live.has_state = false;
        live.had_slot = true;
        self.record_run(&mut live.run);
        self.preempted.push(live);
    }
}

fn is_run(live: Option<&ActiveRun>, id: RunId) -> bool {
    live.is_some_and(|live| live.run.id == id)
}

impl ActiveRun {
    /// Applies a request that changes the run itself.
    fn apply_request(&mut self, request: ControlRequest) {
        match request {
            ControlRequest::Modify(change) => self.run.apply_change(*change),
            ControlRequest::Stop(why) => {
                self.end_pause();
                if self.run.end.is_none() {
                    self.run.finish(FinishReason::Cancelled, Some(why), None);
                }
            }
            ControlRequest::EndReasoning(answer) => {
                let outcome = match self.run.thinking.as_mut().map(ReasoningTracker::request_end) {
                    Some(true) => EndReasoning::Ended,
                    Some(false) => EndReasoning::NotReasoning,
                    None => EndReasoning::NoBudget,
                };
                // The client may have disconnected meanwhile.
                let _ = answer.send(outcome);
            }
            ControlRequest::Pause(_) | ControlRequest::Resume | ControlRequest::Progress => {}
        }
    }
}

impl Run {
    /// Returns true if no step is in progress that needs the slot.
    fn is_between_tokens(&self) -> bool {
        self.forced.is_none() && self.prompt_measures.is_empty()
    }

    fn apply_change(&mut self, change: ParameterChange) {
        if self.end.is_some() {
            return;
        }
        let ParameterChange { sampling, mut sampler, limits, note } = change;
        sampler.inherit_state(&mut self.sampler, &self.request.sampling, &sampling);
        self.sampler = sampler;
        self.request.sampling = sampling;
        // A mod may have set another maximum.
        if limits.max_tokens != self.request.limits.max_tokens {
            self.max_tokens = limits.max_tokens as usize;
        }
        if limits.stop != self.request.limits.stop {
            self.output_text.stop_at(limits.stop.iter().map(|text| text.as_bytes().to_vec()).collect());
        }
        self.request.limits = limits;
        // Several changes may arrive before the next event records them.
        self.note = Some(self.note.take().map_or(note.clone(), |before| format!("{before}; {note}")));
        let between_tokens = matches!(self.state, RunState::Decode { .. }) && self.forced.is_none();
        if between_tokens && self.generated() > 0 && self.generated() >= self.max_tokens {
            self.finish(FinishReason::Length, None, None);
        }
    }
}
