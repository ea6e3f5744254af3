//! Decode thread: admits runs to slots, builds batches, decodes them and passes the logits to the runs.
//!
//! It never waits for a database, a disk, a socket or a mod, and knows nothing of a run's tokens or text: the parts of
//! the run and of [`KvSlots`] decide.

mod active_run;
mod admission;
mod batch;
pub mod command;
mod control;
mod drafts;
mod polling;
mod queue;
mod slot_tasks;
mod slots;

use super::kv::slots::KvSlots;
use super::options::EngineOptions;
use super::recording::Recording;
use super::request::RecordPolicy;
use super::speculation::account::DecodeTimes;
use super::speculation::lookahead::RunSpeculation;
use super::status::EngineStatus;
use crate::events::{EndCause, RunId};
use crate::model::llama::Candidates;
use crate::mods::ReplySender;
use active_run::ActiveRun;
use batch::PrefillPhase;
use command::{Command, QueuedTask};
use queue::RunQueue;
use slots::ActiveSlots;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// Sleep of the thread while it only waits for clients, the recorder or a free slot.
const IDLE_SLEEP: Duration = Duration::from_millis(2);
/// Interval between two checks for disconnected clients while all runs wait for mods or are paused.
const DISCONNECT_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// Decodes that take longer are followed by a flush of all events, since the next decode may take as long.
const SLOW_DECODE: Duration = Duration::from_millis(5);

/// State of the decode thread.
pub struct Scheduler<'model> {
    kv: KvSlots<'model>,
    slots: ActiveSlots,
    queue: RunQueue,
    /// Paused or preempted runs without a slot.
    preempted: Vec<ActiveRun>,
    /// Tasks for slots that are still busy, in order of arrival.
    tasks: VecDeque<QueuedTask>,
    inbox: Receiver<Command>,
    commands: Sender<Command>,
    recording: Recording,
    /// Buffer of the sampler, shared by all runs.
    candidates: Candidates,
    options: EngineOptions,
    /// True if runs draft tokens.
    speculates: bool,
    decode_times: DecodeTimes,
    arrivals: u64,
    /// Number of batches that could not include all ready runs.
    partial_batches: u64,
    prefill_phase: PrefillPhase,
    status: Arc<EngineStatus>,
}

impl<'model> Scheduler<'model> {
    /// Creates the state of a decode thread without runs. `waiting` counts the runs that were submitted and have no slot.
    pub fn new(
        kv: KvSlots<'model>,
        options: EngineOptions,
        inbox: Receiver<Command>,
        commands: Sender<Command>,
        recording: Recording,
        waiting: Arc<AtomicUsize>,
        status: Arc<EngineStatus>,
    ) -> Self {
        let speculates = options.speculation.is_enabled() && kv.keeps_all_prefixes();
        Self {
            kv,
            slots: ActiveSlots::new(options.parallel),
            queue: RunQueue::new(waiting),
            preempted: Vec::new(),
            tasks: VecDeque::new(),
            inbox,
            commands,
            recording,
            candidates: Candidates::default(),
            options,
            speculates,
            decode_times: DecodeTimes::default(),
            arrivals: 0,
            partial_batches: 0,
            prefill_phase: PrefillPhase::default(),
            status,
        }
    }

    /// Runs until a stop command.
    pub fn run(mut self) {
        loop {
            if !self.take_commands() {
                break;
            }
            self.reclaim_idle_slots();
            self.run_slot_tasks();
            self.admit();
            self.run_slot_tasks();
            self.serve_clients();
            if !self.recording.has_pending() && self.deliver_lookaheads() {
                self.flush_events(false);
                self.serve_clients();
            }
            let parts = if self.recording.has_pending() { Vec::new() } else { self.plan() };
            self.publish_status();
            if parts.is_empty() {
                self.kv.park_threads();
                let keep_running = if let Some(command) = self.poll_mods() {
                    self.handle_command(command)
                } else {
                    self.flush_events(true);
                    self.wait()
                };
                if !keep_running {
                    break;
                }
                continue;
            }
            self.stop_polling();
            let begun = Instant::now();
            self.decode(parts);
            let elapsed = begun.elapsed();
            self.prefill_phase.count(elapsed);
            // Events are recorded before outputs are sent, so that a client that reads its run finds every token it
            // received.
            self.flush_events(elapsed > SLOW_DECODE);
            self.serve_clients();
        }
        self.stop();
    }

    /// Handles all queued commands. Returns `false` to stop.
    fn take_commands(&mut self) -> bool {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => {
                    if !self.handle_command(command) {
                        return false;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Sleeps until there is work. Returns `false` to stop.
    fn wait(&mut self) -> bool {
        let has_output_or_work =
            |active: &ActiveRun| active.run.has_outputs() || (!active.is_paused() && active.run.needs_decode());
        let has_pending_output = self.recording.has_pending()
            || self.slots.runs().any(has_output_or_work)
            || self.preempted.iter().any(has_output_or_work);
        // A slot may have become free since the queue was checked.
        let has_waiting_work = !self.queue.is_empty() || !self.tasks.is_empty();
        // A run that waits for its mod must still notice that its client has disconnected.
        let timeout = if has_pending_output || has_waiting_work {
            Some(IDLE_SLEEP)
        } else if !self.preempted.is_empty() || self.slots.runs().next().is_some() {
            Some(DISCONNECT_CHECK_INTERVAL)
        } else {
            None
        };
        let command = match timeout {
            Some(timeout) => match self.inbox.recv_timeout(timeout) {
                Ok(command) => command,
                Err(RecvTimeoutError::Timeout) => return true,
                Err(RecvTimeoutError::Disconnected) => return false,
            },
            None => match self.inbox.recv() {
                Ok(command) => command,
                Err(_) => return false,
            },
        };
        self.handle_command(command)
    }

    fn handle_command(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(run, client, started) => {
                if let Some(started) = started {
                    self.recording.send(started);
                }
                self.arrivals += 1;
                let speculation = RunSpeculation::new(self.options.speculation.min_match);
                self.queue.push(ActiveRun::new(run, client, self.arrivals, speculation));
            }
            Command::Control(id, request, answer) => self.handle_control(id, request, answer),
            Command::Reply(id, call, reply) => {
                let commands = self.commands.clone();
                let candidates = &mut self.candidates;
                let active = self.slots.find(id).and_then(|index| self.slots.get_mut(index));
                if let Some(active) = active {
                    active.run.on_reply(call, reply, candidates, &|id, call| reply_sender(&commands, id, call));
                }
            }
            Command::Slot(slot, scope, task) => {
                self.arrivals += 1;
                self.tasks.push_back(QueuedTask { arrival: self.arrivals, slot, scope, task });
            }
            Command::Stop => return false,
        }
        true
    }

    /// Sends outputs, cancels runs of disconnected clients, and frees the slots of ended runs.
    fn serve_clients(&mut self) {
        for index in 0..self.slots.len() {
            let Some(active) = self.slots.get_mut(index) else { continue };
            if active.client.is_closed() && active.run.end().is_none() {
                active.abort(EndCause::Disconnect, "the client disconnected");
            }
            if active.run.request().record == RecordPolicy::Required && self.recording.is_closed() {
                active.abort(EndCause::NotRecorded, "the run must be recorded, but the recorder has stopped");
            }
            active.count_end(&self.status);
            active.flush_outbox();
            // Only after all waiting signals: the end of a run is its last signal.
            if active.run.end().is_some() && !self.recording.has_pending() && active.is_delivered() {
                self.finish_run(index);
            }
        }
    }

    /// Records the last items and the end of a run, and frees its slot.
    fn finish_run(&mut self, index: usize) {
        let Some(mut active) = self.slots.take(index) else { return };
        active.count_end(&self.status);
        self.release(index, &mut active);
        active.run.record_end(&mut self.recording);
    }

    /// Updates a slot with the state of the run that leaves it.
    fn release(&mut self, index: usize, active: &mut ActiveRun) {
        // A run that never decoded has not touched the slot's state.
        if active.has_state {
            self.kv.release(index, active.run.take_released_state());
        }
    }

    /// Ends every run and sends the recorder everything that it still accepts.
    fn stop(mut self) {
        let message = "the server is shutting down";
        while let Some(mut active) = self.preempted.pop().or_else(|| self.queue.remove(0)) {
            active.abort(EndCause::Shutdown, message);
            active.flush_outbox();
            active.run.record_end(&mut self.recording);
        }
        for index in 0..self.slots.len() {
            if let Some(active) = self.slots.get_mut(index) {
                active.abort(EndCause::Shutdown, message);
                active.flush_outbox();
            }
            self.finish_run(index);
        }
        self.recording.finish();
    }

    /// Publishes the state of every slot.
    fn publish_status(&self) {
        self.status.set_queued(self.queue.len());
        for index in 0..self.slots.len() {
            match self.slots.get(index) {
                Some(active) => {
                    self.status.set_slot(index, active.arrival, active.run.slot_progress(), || active.run.slot_run());
                }
                None => self.status.set_free(index),
            }
        }
    }

    /// Counts a decode.
    fn count_decode(&self) {
        let (busy, longest) = self
            .slots
            .runs()
            .fold((0, 0), |(busy, longest), active| (busy + 1, longest.max(active.run.sequence().kv_len())));
        self.status.count_decode(busy, longest);
    }

    /// Sends collected events to the recorder: those that are due, or all of them before the thread sleeps and after
    /// slow decodes.
    fn flush_events(&mut self, everything: bool) {
        if !self.recording.flush() {
            return;
        }
        for active in self.slots.runs_mut() {
            active.run.record(&mut self.recording, everything);
        }
    }
}

/// Creates the sender for the reply to the call with this number.
fn reply_sender(commands: &Sender<Command>, id: RunId, call: u64) -> ReplySender {
    let commands = commands.clone();
    let sender = ReplySender::new(move |reply| {
        // The decode thread ends only after its runs.
        let _ = commands.send(Command::Reply(id, call, reply));
    });
    sender.polled()
}
