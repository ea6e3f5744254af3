//! Control of active runs: pause, resume, change of parameters, stop.
//!
//! Requests reach the decode thread like every other command, between two decodes, so that the thread needs no lock. A
//! paused run keeps its slot for a while. Then it is preempted: the slot goes to other runs. When the run resumes, it
//! reuses its state if it is still cached, or computes it again.

use super::run::{Run, State};
use super::scheduler::{Command, Live, Scheduler};
use super::thinking::Thinking;
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
const UNREAD: Duration = Duration::from_secs(5);

/// Maximum runs without a slot while slots are taken from clients that do not read. The unsent outputs of such runs
/// stay in memory, so their number is bounded.
const MOST_PARKED: usize = 16;

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
    pub worked: Duration,
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
pub enum EndThinking {
    /// The reasoning ends with the next tokens.
    Ended,
    /// The run is not reasoning.
    NotThinking,
    /// The run was started without a [`super::ThinkingBudget`].
    NoBudget,
}

/// Request to an active run.
pub(super) enum Order {
    /// Pause; release the slot after that time.
    Pause(Duration),
    Resume,
    Modify(Box<Change>),
    /// End the run; the text so far is the answer.
    Stop(String),
    /// End the current reasoning, and report whether there was one.
    EndThought(oneshot::Sender<EndThinking>),
    /// Report the progress only.
    Look,
}

/// Parameters that apply from the next token on.
pub(super) struct Change {
    sampling: SamplingParams,
    sampler: Sampler,
    limits: Limits,
    note: String,
}

/// A pause of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rest {
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
        self.order(Order::Pause(slot_for)).await
    }

    /// Resumes the run. A run without a slot waits for one, ahead of runs that arrived later.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn resume(&self) -> Result<RunProgress, RunOver> {
        self.order(Order::Resume).await
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
        super::submit::ban_ends(&mut sampling, &limits, &self.vocabulary);
        let vocabulary = Arc::clone(&self.vocabulary);
        let make = move || {
            let sampler = Sampler::new(&sampling, &vocabulary);
            Box::new(Change { sampling, sampler, limits, note })
        };
        let change = tokio::task::spawn_blocking(make).await.map_err(|_| RunOver)?;
        self.order(Order::Modify(change)).await
    }

    /// Ends the run; the text so far is its answer. `why` says who requested it.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn stop(&self, why: impl Into<String>) -> Result<RunProgress, RunOver> {
        self.order(Order::Stop(why.into())).await
    }

    /// Ends the current reasoning of the run, like an exhausted budget.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn end_thinking(&self) -> Result<EndThinking, RunOver> {
        let (answer, answered) = oneshot::channel();
        self.order(Order::EndThought(answer)).await?;
        answered.await.map_err(|_| RunOver)
    }

    /// Returns the progress of the run.
    ///
    /// # Errors
    /// [`RunOver`].
    pub async fn progress(&self) -> Result<RunProgress, RunOver> {
        self.order(Order::Look).await
    }

    async fn order(&self, order: Order) -> Result<RunProgress, RunOver> {
        let (answer, answered) = oneshot::channel();
        self.commands.send(Command::Control(self.run, order, answer)).map_err(|_| RunOver)?;
        answered.await.map_err(|_| RunOver)
    }
}

impl Rest {
    /// Returns true if the slot must be released.
    fn is_long(&self, now: Instant) -> bool {
        self.slot_until.is_some_and(|until| now >= until)
    }
}

impl Live {
    /// Returns true if the run is paused and no step is half done.
    pub(super) fn rests(&self) -> bool {
        self.rest.is_some() && self.run.is_between_tokens()
    }

    /// Returns true if the client has blocked the run for longer than [`UNREAD_TIMEOUT`].
    fn is_unread(&self, now: Instant) -> bool {
        self.unread_since.is_some_and(|since| now.duration_since(since) >= UNREAD)
            && (self.run.end.is_some() || (self.run.wants_decode().is_some() && self.run.is_between_tokens()))
    }

    fn wake(&mut self) {
        if let Some(rest) = self.rest.take() {
            self.run.rested += rest.since.elapsed();
        }
    }

    /// Ends the run for an external reason. A pause ends with it and does not count as active time.
    pub(super) fn abort(&mut self, reason: FinishReason, message: impl Into<String>) {
        self.wake();
        self.run.abort(reason, message.into());
    }

    fn standing(&self, activity: RunActivity) -> RunProgress {
        let activity = if self.run.end.is_some() { RunActivity::Finished } else { activity };
        let rest = self.rest.map_or(Duration::ZERO, |rest| rest.since.elapsed());
        let worked = Duration::from_micros(self.run.elapsed_us()).saturating_sub(rest);
        RunProgress { generated: self.run.generated() as u32, activity, worked }
    }
}

impl Scheduler<'_> {
    /// Applies a request to a run. A run that has ended sends no reply.
    pub(super) fn control(&mut self, id: RunId, order: Order, answer: oneshot::Sender<RunProgress>) {
        let standing = if let Some(at) = self.slots.iter().position(|slot| is(slot.live.as_ref(), id)) {
            self.control_in_slot(at, order)
        } else if let Some(at) = self.queue.iter().position(|live| live.run.id == id) {
            self.control_in_queue(at, order)
        } else {
            let parked = self.parked.iter().position(|live| live.run.id == id);
            parked.map(|at| self.control_parked(at, order))
        };
        if let Some(standing) = standing {
            // The client may have disconnected meanwhile.
            let _ = answer.send(standing);
        }
    }

    fn control_in_slot(&mut self, at: usize, order: Order) -> Option<RunProgress> {
        let live = self.slots[at].live.as_mut()?;
        match order {
            Order::Pause(slot_for) => {
                let rest = live.rest.get_or_insert(Rest { since: Instant::now(), slot_until: None });
                rest.slot_until = Instant::now().checked_add(slot_for);
            }
            Order::Resume => live.wake(),
            other => live.obey(other),
        }
        Some(live.standing(if live.rest.is_some() { RunActivity::Paused } else { RunActivity::Running }))
    }

    fn control_in_queue(&mut self, at: usize, order: Order) -> Option<RunProgress> {
        if matches!(order, Order::Pause(_) | Order::Stop(_)) {
            // A paused run leaves the queue.
            let mut live = self.queue.remove(at)?;
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            live.rest = Some(Rest { since: Instant::now(), slot_until: None });
            live.obey(order);
            let standing = live.standing(RunActivity::Preempted);
            self.parked.push(live);
            return Some(standing);
        }
        let live = self.queue.get_mut(at)?;
        live.obey(order);
        Some(live.standing(RunActivity::Queued))
    }

    fn control_parked(&mut self, at: usize, order: Order) -> RunProgress {
        let live = &mut self.parked[at];
        match order {
            Order::Pause(_) => {
                live.rest.get_or_insert(Rest { since: Instant::now(), slot_until: None });
            }
            Order::Resume => {
                live.wake();
                if live.run.end.is_none() && live.run.outbox.is_empty() {
                    return self.queue_again(at);
                }
            }
            order => live.obey(order),
        }
        live.standing(RunActivity::Preempted)
    }

    /// Queues a run without a slot, ahead of runs that arrived later.
    fn queue_again(&mut self, at: usize) -> RunProgress {
        let live = self.parked.swap_remove(at);
        let standing = live.standing(RunActivity::Queued);
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let turn = self.queue.partition_point(|other| other.arrival < live.arrival);
        self.queue.insert(turn, live);
        standing
    }

    /// Takes the slots of runs whose pause is too long, and of runs whose clients do not read while others wait. Queues
    /// preempted runs whose clients read again, and removes those that have ended.
    pub(super) fn serve_resting(&mut self) {
        let now = Instant::now();
        let free = self.slots.iter().filter(|slot| slot.live.is_none()).count();
        let mut wanted = self.queue.len().saturating_sub(free);
        for index in 0..self.slots.len() {
            let long = self.slots[index].live.as_ref().is_some_and(|live| {
                let rested = live.rests()
                    && live.rest.is_some_and(|rest| rest.is_long(now))
                    && live.run.wants_decode().is_some()
                    && live.run.outbox.is_empty();
                rested || (wanted > 0 && self.parked.len() < MOST_PARKED && live.is_unread(now))
            });
            if long {
                wanted = wanted.saturating_sub(1);
                self.park(index);
            }
        }
        let mut at = 0;
        while at < self.parked.len() {
            let live = &mut self.parked[at];
            if live.client.is_closed() && live.run.end.is_none() {
                live.abort(FinishReason::Cancelled, "the client disconnected");
            }
            live.count_end(&self.status);
            live.pass_on();
            if live.run.end.is_some() && self.unrecorded.is_empty() && live.is_heard() {
                let live = self.parked.swap_remove(at);
                self.record_end(live);
            } else if live.rest.is_none() && live.run.end.is_none() && live.run.outbox.is_empty() {
                self.queue_again(at);
            } else {
                at += 1;
            }
        }
    }

    /// Preempts a run. The slot keeps its state until another run needs it, and then moves it to the host cache.
    fn park(&mut self, index: usize) {
        let Some(mut live) = self.slots[index].live.take() else { return };
        self.release(index, &mut live);
        live.run.cached = 0;
        live.placed = false;
        live.begun = true;
        self.record_run(&mut live.run);
        self.parked.push(live);
    }
}

fn is(live: Option<&Live>, id: RunId) -> bool {
    live.is_some_and(|live| live.run.id == id)
}

impl Live {
    /// Applies a request that changes the run itself.
    fn obey(&mut self, order: Order) {
        match order {
            Order::Modify(change) => self.run.change(*change),
            Order::Stop(why) => {
                self.wake();
                if self.run.end.is_none() {
                    self.run.finish(FinishReason::Cancelled, Some(why), None);
                }
            }
            Order::EndThought(answer) => {
                let thought = match self.run.thinking.as_mut().map(Thinking::end) {
                    Some(true) => EndThinking::Ended,
                    Some(false) => EndThinking::NotThinking,
                    None => EndThinking::NoBudget,
                };
                // The client may have disconnected meanwhile.
                let _ = answer.send(thought);
            }
            Order::Pause(_) | Order::Resume | Order::Look => {}
        }
    }
}

impl Run {
    /// Returns true if no step is in progress that needs the slot.
    fn is_between_tokens(&self) -> bool {
        self.forced.is_none() && self.prompt_measures.is_empty()
    }

    fn change(&mut self, change: Change) {
        if self.end.is_some() {
            return;
        }
        let Change { sampling, mut sampler, limits, note } = change;
        sampler.take_over(&mut self.sampler, &self.request.sampling, &sampling);
        self.sampler = sampler;
        self.request.sampling = sampling;
        // A mod may have set another maximum.
        if limits.max_tokens != self.request.limits.max_tokens {
            self.max_tokens = limits.max_tokens as usize;
        }
        if limits.stop != self.request.limits.stop {
            self.answer.stop_at(limits.stop.iter().map(|text| text.as_bytes().to_vec()).collect());
        }
        self.request.limits = limits;
        // Several changes may arrive before the next event records them.
        self.note = Some(self.note.take().map_or(note.clone(), |before| format!("{before}; {note}")));
        let between_tokens = matches!(self.state, State::Decode { .. }) && self.forced.is_none();
        if between_tokens && self.generated() > 0 && self.generated() >= self.max_tokens {
            self.finish(FinishReason::Length, None, None);
        }
    }
}
