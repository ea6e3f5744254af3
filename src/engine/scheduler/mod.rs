//! Decode thread: admits runs to slots, plans and decodes batches, and passes the logits to the runs.
//!
//! The thread never waits for a database, socket or mod; it reads a file only for the logit lens. The [`Scheduler`] only
//! connects its parts: [`runs`] has the runs and applies control requests, [`slot_tasks`] has the tasks of clients for
//! slots, [`plan`] and [`prefill`] select runs and tokens for a batch, [`drafts`] and [`model_drafts`] add drafts, and
//! [`decode`] decodes the batch.

mod batch;
pub mod command;
mod decode;
mod drafts;
mod model_drafts;
mod plan;
mod prefill;
mod queue;
pub mod queue_place;
mod run_slots;
mod runs;
mod scheduled_run;
mod slot_tasks;

use super::kv::prompt::SlotChoice;
use super::kv::slots::KvSlots;
use super::options::EngineOptions;
use super::recording::Recording;
use super::request::RecordPolicy;
use super::run::RunResources;
use super::speculation::draft_context::DraftContext;
use super::speculation::run_speculation::RunSpeculation;
use super::status::EngineStatus;
use crate::events::{EndCause, RunId};
use crate::mods::{ModInstance, ReplySender};
use batch::BatchPart;
use command::Command;
use drafts::Drafter;
use plan::BatchPlanner;
use runs::ScheduledRuns;
use scheduled_run::{SHUTDOWN_MESSAGE, ScheduledRun};
use slot_tasks::{QueuedTask, SlotTasks};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

/// Sleep of the thread while it only waits for clients, the recorder or a free slot.
const IDLE_SLEEP: Duration = Duration::from_millis(2);
/// Interval between two checks for disconnected clients while all runs wait for mods or are paused.
const DISCONNECT_CHECK_INTERVAL: Duration = Duration::from_millis(20);
/// After decodes that take longer, all events are flushed, since the next decode may take as long.
const SLOW_DECODE: Duration = Duration::from_millis(5);
/// Maximum time that the thread polls for a mod's reply before it sleeps. Most mods reply before a sleeping core would
/// wake up.
const POLL_WINDOW: Duration = Duration::from_micros(200);

/// State of the decode thread.
pub struct Scheduler<'model> {
    kv: KvSlots<'model>,
    runs: ScheduledRuns,
    tasks: SlotTasks,
    inbox: Receiver<Command>,
    recording: Recording,
    resources: RunResources,
    planner: BatchPlanner,
    drafter: Drafter<'model>,
    options: EngineOptions,
    /// Number of runs and tasks that have arrived.
    arrivals: u64,
    status: Arc<EngineStatus>,
}

impl<'model> Scheduler<'model> {
    /// Creates the state of a decode thread without runs. The replies of mods are sent through the channel of the
    /// commands, too. `queue_places` counts the places in the queue.
    pub fn new(
        kv: KvSlots<'model>,
        draft_context: Option<DraftContext<'model>>,
        options: EngineOptions,
        (commands, inbox): (Sender<Command>, Receiver<Command>),
        recording: Recording,
        queue_places: Arc<AtomicUsize>,
        status: Arc<EngineStatus>,
    ) -> Self {
        Self {
            runs: ScheduledRuns::new(options.parallel, queue_places),
            tasks: SlotTasks::default(),
            inbox,
            recording,
            resources: RunResources::new(move |id, call| reply_sender(&commands, id, call)),
            planner: BatchPlanner::new(&options),
            drafter: Drafter::new(&options, draft_context, kv.are_all_prefixes_usable()),
            kv,
            options,
            arrivals: 0,
            status,
        }
    }

    /// Runs until a stop command.
    pub fn run(mut self) {
        while self.take_commands() {
            self.reassign_slots();
            // Commands and started runs may have added outputs; a run with unsent outputs is not ready for a decode.
            self.serve_clients();
            // Before the plan of the batch, which continues after the accepted tokens.
            if !self.recording.has_pending()
                && decode::resume_drafts(&mut self.kv, &mut self.runs.slots, &mut self.resources)
            {
                self.record_and_serve(false);
            }
            let parts = self.plan_batch();
            self.publish_status();
            if !parts.is_empty() {
                self.decode(parts);
            } else if !self.wait() {
                break;
            }
        }
        self.stop();
    }

    /// Takes slots from runs that must release them, and assigns free slots to queued runs and tasks.
    fn reassign_slots(&mut self) {
        // First, so that a run that ends is not preempted.
        self.runs.end_unread(self.options.max_unread_time, &self.status);
        self.runs.reclaim_slots(&mut self.kv, &mut self.recording, &self.status);
        // Queues preempted runs that can continue, before free slots are assigned.
        self.runs.serve_preempted(&mut self.recording, &self.status);
        // Tasks run before `admit`, because it does not give their slots to runs that arrived later, and after it, because
        // a task may have waited for a run that got another slot.
        self.tasks.run(&self.runs, &mut self.kv, self.arrivals);
        self.admit();
        self.tasks.run(&self.runs, &mut self.kv, self.arrivals);
    }

    /// Plans the next batch. Returns no parts while the recorder's channel is full, so that nothing is decoded.
    fn plan_batch(&mut self) -> Vec<BatchPart> {
        if self.recording.has_pending() {
            return Vec::new();
        }
        self.planner.plan(&mut self.kv, &mut self.runs.slots, &self.recording, &mut self.drafter)
    }

    /// Decodes a batch, then records its events and sends its outputs.
    fn decode(&mut self, parts: Vec<BatchPart>) {
        self.stop_polling();
        let start = Instant::now();
        let Self { kv, runs: ScheduledRuns { slots, .. }, drafter, resources, .. } = self;
        if decode::decode(parts, kv, slots, drafter, resources) {
            self.count_decode();
        }
        let elapsed = start.elapsed();
        self.planner.add_decode(elapsed);
        self.record_and_serve(elapsed > SLOW_DECODE);
    }

    /// Records the events that are due, or `everything`, and then sends the outputs. With `everything`, a client that
    /// reads its run finds the tokens that it has received; otherwise the newest events may not be recorded yet.
    fn record_and_serve(&mut self, everything: bool) {
        self.flush_events(everything);
        self.serve_clients();
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

    /// Waits for a command or until there may be work, and handles the command. Returns `false` to stop.
    fn wait(&mut self) -> bool {
        self.kv.park_threads();
        self.drafter.park_threads();
        // While each reply arrives during the polling, the flush below is not reached.
        self.flush_events(false);
        if let Some(command) = self.poll_mods() {
            return self.handle_command(command);
        }
        self.flush_events(true);
        // A slot may have become free after the queue was checked.
        let has_waiting = !self.runs.queue.is_empty() || !self.tasks.is_empty();
        let timeout = if self.recording.has_pending() || self.runs.has_work() || has_waiting {
            IDLE_SLEEP
        } else if self.runs.has_started() {
            // The disconnect of a client sends no command.
            DISCONNECT_CHECK_INTERVAL
        } else {
            return self.inbox.recv().is_ok_and(|command| self.handle_command(command));
        };
        match self.inbox.recv_timeout(timeout) {
            Ok(command) => self.handle_command(command),
            Err(RecvTimeoutError::Timeout) => true,
            Err(RecvTimeoutError::Disconnected) => false,
        }
    }

    /// Polls for a short time for the replies of mods and for commands, while a reply is awaited. Returns the
    /// first command, which may be a reply.
    fn poll_mods(&mut self) -> Option<Command> {
        let start = Instant::now();
        while self.runs.slots.awaited_mods().next().is_some() && start.elapsed() < POLL_WINDOW {
            if let Ok(command) = self.inbox.try_recv() {
                return Some(command);
            }
            self.runs.slots.awaited_mods().for_each(ModInstance::poll_reply);
            // Let other threads on this core run first.
            std::thread::yield_now();
        }
        self.stop_polling();
        None
    }

    /// Stops polling for replies; they are then delivered by the mods' own threads.
    fn stop_polling(&mut self) {
        self.runs.slots.awaited_mods().for_each(ModInstance::stop_polling);
    }

    /// Handles a command. Returns `false` to stop.
    fn handle_command(&mut self, command: Command) -> bool {
        match command {
            Command::Submit { run, client, unsent_start, place } => {
                if let Some(start) = unsent_start {
                    self.recording.send(start);
                }
                self.arrivals += 1;
                let speculation = RunSpeculation::new(self.options.speculation.min_match);
                self.runs.queue.push(ScheduledRun::new(run, client, self.arrivals, speculation), place);
            }
            Command::Control(id, request, response) => {
                if let Some(progress) = self.runs.control(id, request) {
                    // The client may have disconnected in the meantime.
                    let _ = response.send(progress);
                }
            }
            Command::Reply(id, call, reply) => {
                if let Some(scheduled) = self.runs.slots.find_mut(id) {
                    scheduled.run.on_reply(call, reply, &mut self.resources);
                }
            }
            Command::Slot(slot, scope, task) => {
                self.arrivals += 1;
                self.tasks.push(QueuedTask { arrival: self.arrivals, slot, scope, task });
            }
            Command::Stop => return false,
        }
        true
    }

    /// Assigns free slots to queued runs, in order of arrival. A run that waits for a specific slot does not delay
    /// others.
    fn admit(&mut self) {
        self.runs.remove_disconnected(&mut self.recording, &self.status);
        let mut at = 0;
        while self.runs.slots.free() > 0
            && let Some(scheduled) = self.runs.queue.get(at)
        {
            let Some(choice) = self.choose_slot(scheduled) else {
                at += 1;
                continue;
            };
            let Some(scheduled) = self.runs.queue.remove(at) else { return };
            self.start_run(scheduled, choice);
        }
    }

    /// Chooses a slot. Returns `None` if every slot that the run may use is busy or must first run an earlier task.
    fn choose_slot(&self, scheduled: &ScheduledRun) -> Option<SlotChoice> {
        let requested = scheduled.run.request().slot;
        self.kv.choose(scheduled.run.prompt_view(), self.options.slot_prompt_similarity, |index| {
            self.runs.slots.is_free(index)
                && requested.is_none_or(|slot| slot as usize == index)
                && !self.tasks.has_earlier(index, scheduled)
        })
    }

    fn start_run(&mut self, mut scheduled: ScheduledRun, choice: SlotChoice) {
        let SlotChoice { slot, aligned, history } = choice;
        scheduled.set_slot(slot as u32);
        if !scheduled.was_preempted() {
            // A fork keeps the recorded tokens.
            if !scheduled.run.is_fork() {
                scheduled.run.sequence_mut().fit_prompt(aligned, history);
            }
            self.status.latencies().queue.observe_us(scheduled.run.mark_slot());
            scheduled.run.begin(&mut self.resources);
        }
        self.kv.mark_used(slot, self.arrivals);
        self.runs.slots.put(slot, scheduled);
    }

    /// Sends outputs, cancels runs of disconnected clients, and frees the slots of ended runs.
    fn serve_clients(&mut self) {
        for index in 0..self.runs.slots.len() {
            let Some(scheduled) = self.runs.slots.get_mut(index) else { continue };
            let must_be_recorded = scheduled.run.request().record == RecordPolicy::Required;
            if must_be_recorded && self.recording.is_closed() && !scheduled.is_disconnected() {
                scheduled.abort(EndCause::NotRecorded, "the run must be recorded, but the recorder has stopped");
            }
            scheduled.serve_client(&self.status);
            // While the recorder's channel is full, an ended run keeps its slot, so that the queue of signals does not
            // grow.
            if scheduled.is_finished() && !self.recording.has_pending() {
                self.finish_run(index);
            }
        }
    }

    /// Records the last items and the end of a run, and frees its slot.
    fn finish_run(&mut self, index: usize) {
        if let Some(scheduled) = self.runs.slots.release(index, &mut self.kv) {
            scheduled.run.record_end(&mut self.recording);
        }
    }

    /// Ends every run, and sends all data that the recorder still accepts.
    fn stop(mut self) {
        while let Some(mut scheduled) = self.runs.pop_without_slot() {
            scheduled.end_at_once(EndCause::Shutdown, SHUTDOWN_MESSAGE, &self.status);
            scheduled.run.record_end(&mut self.recording);
        }
        for index in 0..self.runs.slots.len() {
            if let Some(scheduled) = self.runs.slots.get_mut(index) {
                scheduled.end_at_once(EndCause::Shutdown, SHUTDOWN_MESSAGE, &self.status);
            }
            self.finish_run(index);
        }
        self.recording.finish();
    }

    /// Publishes the state of every slot.
    fn publish_status(&self) {
        self.status.set_queued(self.runs.queue.len());
        for index in 0..self.runs.slots.len() {
            match self.runs.slots.get(index) {
                Some(scheduled) => {
                    self.status.set_slot(index, scheduled.arrival(), scheduled.run.slot_progress(), || {
                        scheduled.run.slot_run()
                    });
                }
                None => self.status.set_free(index),
            }
        }
    }

    fn count_decode(&self) {
        let (busy, longest) = self
            .runs
            .slots
            .runs()
            .fold((0, 0), |(busy, longest), scheduled| (busy + 1, longest.max(scheduled.run.sequence().kv_len())));
        self.status.count_decode(busy, longest);
    }

    /// Sends the events of runs to the recorder: those that are due, or `everything`.
    fn flush_events(&mut self, everything: bool) {
        if !self.recording.flush() {
            return;
        }
        for scheduled in self.runs.slots.runs_mut() {
            scheduled.run.record(&mut self.recording, everything);
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
