//! Decode thread: admits runs to slots, builds batches, decodes them and passes the logits to the runs.

use super::attention_encoder::AttentionEncoderThread;
use super::control::{ControlRequest, PauseState, RunProgress};
use super::conversation::SlotHistory;
use super::host_cache::HostCache;
use super::recording::PendingSignal;
use super::run::Run;
use super::slots::{QueuedTask, SlotTask};
use super::status::EngineStatus;
use super::{Options, Output, RecordPolicy};
use crate::events::{FinishReason, RunId, Scope, Signal, Tenant, TokenId};
use crate::model::llama::{AdapterSet, Candidates, Context};
use crate::mods::{ModInstance, Reply, ReplySender};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::sync::oneshot;

/// Sleep of the thread while it only waits for clients, the recorder or a free slot.
const IDLE_SLEEP: Duration = Duration::from_millis(2);
/// Time for which the thread polls for a mod's reply before it sleeps.
const POLL_WINDOW: Duration = Duration::from_micros(200);

/// Decodes that take longer are followed by a flush of all events, since the next decode may take as long.
const SLOW_DECODE: Duration = Duration::from_millis(5);

/// Command to the decode thread.
pub(super) enum Command {
    /// A new run, its client, and the signal of its start if the recorder had no room for it.
    Submit(Box<Run>, mpsc::Sender<Output>, Option<Signal>),
    /// Reply of a mod to the call of that number.
    Reply(RunId, u64, Reply),
    /// Request to control an active run.
    Control(RunId, ControlRequest, oneshot::Sender<RunProgress>),
    /// Task for a slot, run as soon as the slot is free.
    Slot(usize, Scope, SlotTask),
    /// Ends all runs and the thread.
    Stop,
}

/// A run with its client and its place in the schedule.
pub(super) struct ActiveRun {
    pub(super) run: Box<Run>,
    pub(super) client: mpsc::Sender<Output>,
    pub(super) arrival: u64,
    /// Number of the batch that last included the run, if not all ready runs fit into it.
    pub(super) last_batch: u64,
    /// True after the run's sequence was matched with the slot's KV state.
    pub(super) has_state: bool,
    /// True if the run had a slot before and was preempted.
    pub(super) had_slot: bool,
    /// Set while the run is paused.
    pub(super) pause: Option<PauseState>,
    /// Time since which the client has read none of the waiting outputs.
    pub(super) unread_since: Option<Instant>,
    /// True after the ended run was added to the counters.
    pub(super) counted: bool,
}

/// A slot: one sequence of the context.
#[derive(Default)]
pub(super) struct Slot {
    pub(super) active: Option<ActiveRun>,
    /// Tenant of the newest run in the slot, or of the state that was restored.
    pub(super) owner: Option<Tenant>,
    /// Tokens of the sequence in the KV cache.
    pub(super) cache: Vec<TokenId>,
    /// LoRA adapters that the state was computed with; `None` before the first decode.
    pub(super) adapters: Option<AdapterSet>,
    /// History of the conversation in this slot.
    pub(super) history: SlotHistory,
    /// Prompt tokens that the last run evaluated.
    pub(super) processed: usize,
    pub(super) last_used: u64,
}

impl ActiveRun {
    /// Sends outputs while the client has room.
    pub(super) fn flush_outbox(&mut self) {
        while !self.run.outbox.is_empty() {
            let place = match self.client.try_reserve() {
                Ok(place) => Some(place),
                Err(TrySendError::Closed(())) => None,
                Err(TrySendError::Full(())) => {
                    self.unread_since.get_or_insert_with(Instant::now);
                    return;
                }
            };
            let output = self.run.outbox.pop_front();
            if matches!(output, Some(Output::Ended(_))) {
                self.run.has_ended.store(true, Ordering::Release);
            }
            if let (Some(place), Some(output)) = (place, output) {
                place.send(output);
            }
            self.unread_since = None;
        }
    }

    /// Adds an ended run to the counters, once. Called before the client learns of the end, so that the client finds
    /// its run counted.
    pub(super) fn count_end(&mut self, status: &EngineStatus) {
        if self.run.end.is_some() && !std::mem::replace(&mut self.counted, true) {
            status.count_run(&self.run);
        }
    }

    /// Returns true if the client has read everything or has disconnected.
    pub(super) fn is_delivered(&self) -> bool {
        self.run.outbox.is_empty() || self.client.is_closed()
    }
}

impl Slot {
    /// Replaces the state by tokens that did not come from a run.
    pub(super) fn replace(&mut self, tokens: Vec<TokenId>, adapters: AdapterSet) {
        self.cache = tokens;
        self.adapters = Some(adapters);
        self.history = SlotHistory::default();
        self.processed = 0;
    }
}

/// State of the decode thread.
pub(super) struct Scheduler<'model> {
    pub(super) context: Context<'model>,
    pub(super) slots: Vec<Slot>,
    pub(super) queue: VecDeque<ActiveRun>,
    /// Paused or preempted runs without a slot.
    pub(super) preempted: Vec<ActiveRun>,
    /// Tasks for slots that are still busy, in order of arrival.
    pub(super) tasks: VecDeque<QueuedTask>,
    /// States kept outside of the slots.
    pub(super) host_cache: HostCache,
    pub(super) inbox: Receiver<Command>,
    pub(super) commands: Sender<Command>,
    pub(super) recorder: mpsc::Sender<Signal>,
    /// Signals that the recorder had no room for; nothing is decoded until they are sent.
    pub(super) pending_signals: VecDeque<PendingSignal>,
    pub(super) attention_encoder: Option<AttentionEncoderThread>,
    pub(super) candidates: Candidates,
    pub(super) options: Options,
    pub(super) arrivals: u64,
    /// Number of batches that could not include all ready runs.
    pub(super) partial_batches: u64,
    /// Prompt tokens decoded since the generating runs were last in a batch.
    pub(super) prompt_tokens_since_decode: usize,
    pub(super) waiting: Arc<AtomicUsize>,
    pub(super) status: Arc<EngineStatus>,
}

impl<'model> Scheduler<'model> {
    #[expect(clippy::too_many_arguments, reason = "called once")]
    pub fn new(
        context: Context<'model>,
        options: Options,
        inbox: Receiver<Command>,
        commands: Sender<Command>,
        recorder: mpsc::Sender<Signal>,
        attention_encoder: Option<AttentionEncoderThread>,
        waiting: Arc<AtomicUsize>,
        status: Arc<EngineStatus>,
        host_cache: HostCache,
    ) -> Self {
        Self {
            context,
            slots: (0..options.parallel).map(|_| Slot::default()).collect(),
            queue: VecDeque::new(),
            preempted: Vec::new(),
            tasks: VecDeque::new(),
            host_cache,
            inbox,
            commands,
            recorder,
            pending_signals: VecDeque::new(),
            attention_encoder,
            candidates: Candidates::default(),
            options,
            arrivals: 0,
            partial_batches: 0,
            prompt_tokens_since_decode: 0,
            waiting,
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
            let parts = if self.pending_signals.is_empty() { self.plan() } else { Vec::new() };
            self.publish_status();
            if parts.is_empty() {
                self.context.park_threads();
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
            // Events are recorded before outputs are sent, so that a client that reads its run finds every token it
            // received.
            self.flush_events(begun.elapsed() > SLOW_DECODE);
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
        let has_something =
            |live: &ActiveRun| !live.run.outbox.is_empty() || (!live.is_paused() && live.run.wants_decode().is_some());
        let somebody_must_read = !self.pending_signals.is_empty()
            || self.slots.iter().any(|slot| slot.active.as_ref().is_some_and(has_something))
            || self.preempted.iter().any(has_something);
        // A slot may have become free since the queue was checked.
        let somebody_waits = !self.queue.is_empty() || !self.tasks.is_empty();
        // A run that waits for its mod must still notice that its client has disconnected.
        let timeout = if somebody_must_read || somebody_waits {
            Some(IDLE_SLEEP)
        } else if !self.preempted.is_empty() || self.slots.iter().any(|slot| slot.active.is_some()) {
            Some(Duration::from_millis(20))
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

    /// Polls for replies and commands for a short time while a mod's reply is awaited. Most mods reply sooner than a
    /// sleeping core wakes up.
    fn poll_mods(&mut self) -> Option<Command> {
        let begun = Instant::now();
        while self.awaiting().next().is_some() && begun.elapsed() < POLL_WINDOW {
            if let Ok(command) = self.inbox.try_recv() {
                return Some(command);
            }
            self.awaiting().for_each(ModInstance::poll_reply);
            // Other threads on this core go first.
            std::thread::yield_now();
        }
        self.stop_polling();
        None
    }

    /// Returns the mod instances whose replies are awaited.
    fn awaiting(&mut self) -> impl Iterator<Item = &mut dyn ModInstance> {
        self.slots.iter_mut().filter_map(|slot| slot.active.as_mut()?.run.awaited_mod())
    }

    /// Stops polling for replies; they are then delivered by the mods' own threads.
    fn stop_polling(&mut self) {
        self.awaiting().for_each(ModInstance::stop_polling);
    }

    fn handle_command(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(run, client, started) => {
                if let Some(started) = started {
                    self.send_signal(started);
                }
                self.arrivals += 1;
                let (arrival, last_batch, has_state, had_slot, counted) = (self.arrivals, 0, false, false, false);
                let live = ActiveRun {
                    run,
                    client,
                    arrival,
                    last_batch,
                    has_state,
                    had_slot,
                    pause: None,
                    unread_since: None,
                    counted,
                };
                self.queue.push_back(live);
            }
            Command::Control(id, request, answer) => self.handle_control(id, request, answer),
            Command::Reply(id, call, reply) => {
                let commands = self.commands.clone();
                let candidates = &mut self.candidates;
                let live = self.slots.iter_mut().filter_map(|slot| slot.active.as_mut()).find(|live| live.run.id == id);
                if let Some(live) = live
                    && live.run.pending_call == call
                {
                    live.run.on_reply(reply, candidates, &|id, call| done(&commands, id, call));
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
            let slot = &mut self.slots[index];
            let Some(live) = &mut slot.active else { continue };
            if live.client.is_closed() && live.run.end.is_none() {
                live.abort(FinishReason::Cancelled, "the client disconnected");
            }
            if live.run.request.record == RecordPolicy::Required && self.recorder.is_closed() {
                live.abort(FinishReason::Error, "the run must be recorded, but the recorder has stopped");
            }
            live.count_end(&self.status);
            live.flush_outbox();
            // Only after all waiting signals: the end of a run is its last signal.
            if live.run.end.is_some() && self.pending_signals.is_empty() && live.is_delivered() {
                self.clear(index);
            }
        }
    }

    /// Records the last items and the end of a run, and frees its slot.
    fn clear(&mut self, index: usize) {
        let Some(mut live) = self.slots[index].active.take() else { return };
        live.count_end(&self.status);
        self.release(index, &mut live);
        self.record_end(live);
    }

    /// Updates a slot with the state of the run that leaves it.
    pub(super) fn release(&mut self, index: usize, live: &mut ActiveRun) {
        // A run that never decoded has not touched the slot's state.
        if !live.has_state {
            return;
        }
        if live.run.poisoned {
            self.context.wipe(index as i32, &self.slots[index].cache);
        }
        self.apply_kv_removals(index, live);
        let left = self.truncate(index, live.run.kv_len);
        let mut history = live.run.take_history();
        history.truncate(left);
        self.slots[index].history = history;
        self.slots[index].processed = live.run.prompt_decoded();
    }

    /// Ends every run and sends the recorder everything that it still accepts.
    fn stop(mut self) {
        let message = "the server is shutting down";
        let without_slot = std::mem::take(&mut self.preempted).into_iter().chain(std::mem::take(&mut self.queue));
        for mut live in without_slot {
            live.abort(FinishReason::Cancelled, message);
            live.flush_outbox();
            self.record_end(live);
        }
        for index in 0..self.slots.len() {
            if let Some(live) = &mut self.slots[index].active {
                live.abort(FinishReason::Cancelled, message);
                live.flush_outbox();
            }
            self.clear(index);
        }
        self.finish_recording();
    }
}

pub(super) fn done(commands: &Sender<Command>, id: RunId, call: u64) -> ReplySender {
    let commands = commands.clone();
    let done = ReplySender::new(move |reply| {
        // The decode thread ends only after its runs.
        let _ = commands.send(Command::Reply(id, call, reply));
    });
    done.polled()
}
