//! The decode thread: admits runs to slots, puts batches together, decodes, hands logits to runs.

use super::capture::Capture;
use super::control::{Order, Rest, RunProgress};
use super::conversation::Memory;
use super::host_cache::HostCache;
use super::recording::Unrecorded;
use super::run::Run;
use super::slots::{SlotTask, Waiting};
use super::status::EngineStatus;
use super::{Options, Output, RecordPolicy};
use crate::events::{FinishReason, RunId, Signal, TokenId};
use crate::model::llama::{AdapterSet, Candidates, Context};
use crate::mods::{ModInstance, Reply, ReplySender};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio::sync::oneshot;

/// How long the thread sleeps when all it waits for is somebody to read.
const NAP: Duration = Duration::from_millis(2);
/// How long the thread stays awake for a mod's answer.
const MOMENT: Duration = Duration::from_micros(200);

/// After a decode that takes longer, everything is recorded at once: the next may take as long.
const SLOW_DECODE: Duration = Duration::from_millis(5);

/// What the decode thread is told.
pub(super) enum Command {
    /// A new run, its client, and the signal that it exists where the recorder has not got it yet.
    Submit(Box<Run>, mpsc::Sender<Output>, Option<Signal>),
    /// A mod's answer to the call of that number.
    Reply(RunId, u64, Reply),
    /// An order to a run.
    Control(RunId, Order, oneshot::Sender<RunProgress>),
    /// Something to do with that slot, as soon as it is free.
    Slot(usize, SlotTask),
    /// End all runs and the thread.
    Stop,
}

/// A run and the client that listens to it.
pub(super) struct Live {
    pub(super) run: Box<Run>,
    pub(super) client: mpsc::Sender<Output>,
    pub(super) arrival: u64,
    /// When it was last in a batch, where not all runs fit into one.
    pub(super) turn: u64,
    /// Whether the run has found its slot's KV state.
    pub(super) placed: bool,
    /// Whether it had a slot before, which it gave back.
    pub(super) begun: bool,
    /// Since when it rests.
    pub(super) rest: Option<Rest>,
    /// Since when the client has taken nothing of what there is for it.
    pub(super) unread_since: Option<Instant>,
    /// The run has ended and is in the counters.
    pub(super) counted: bool,
}

/// A sequence of the context.
#[derive(Default)]
pub(super) struct Slot {
    pub(super) live: Option<Live>,
    /// What the KV cache holds of this sequence.
    pub(super) cache: Vec<TokenId>,
    /// The LoRA adapters that it was computed with; `None` before anything was.
    pub(super) adapters: Option<AdapterSet>,
    /// What is remembered of it.
    pub(super) memory: Memory,
    /// Tokens of the last run's prompt that were evaluated.
    pub(super) processed: usize,
    pub(super) last_used: u64,
}

impl Live {
    /// Passes outputs on, as far as the client has room.
    pub(super) fn pass_on(&mut self) {
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
                self.run.is_over.store(true, Ordering::Release);
            }
            if let (Some(place), Some(output)) = (place, output) {
                place.send(output);
            }
            self.unread_since = None;
        }
    }

    /// Adds a run that has ended to the counters, once. Before the client hears of the end, so that it finds its run counted.
    pub(super) fn count_end(&mut self, status: &EngineStatus) {
        if self.run.end.is_some() && !std::mem::replace(&mut self.counted, true) {
            status.ended(&self.run);
        }
    }

    /// Whether the client has everything, or wants no more.
    pub(super) fn is_heard(&self) -> bool {
        self.run.outbox.is_empty() || self.client.is_closed()
    }
}

impl Slot {
    /// Holds tokens that no run brought.
    pub(super) fn hold(&mut self, tokens: Vec<TokenId>, adapters: AdapterSet) {
        self.cache = tokens;
        self.adapters = Some(adapters);
        self.memory = Memory::default();
        self.processed = 0;
    }
}

/// What the decode thread works with.
pub(super) struct Scheduler<'model> {
    pub(super) context: Context<'model>,
    pub(super) slots: Vec<Slot>,
    pub(super) queue: VecDeque<Live>,
    /// Runs that rest and have no slot.
    pub(super) parked: Vec<Live>,
    /// What is to be done with slots that are still busy, in the order in which it was asked for.
    pub(super) tasks: VecDeque<Waiting>,
    /// States that no slot has room for.
    pub(super) idle: HostCache,
    pub(super) inbox: Receiver<Command>,
    pub(super) commands: Sender<Command>,
    pub(super) recorder: mpsc::Sender<Signal>,
    /// What the recorder had no room for; until it is gone, nothing is decoded.
    pub(super) unrecorded: VecDeque<Unrecorded>,
    pub(super) capture: Option<Capture>,
    pub(super) candidates: Candidates,
    pub(super) options: Options,
    pub(super) arrivals: u64,
    /// Batches of which not all runs that were ready could be part.
    pub(super) turns: u64,
    /// Tokens of prompts that were decoded since runs that generate had their turn.
    pub(super) read_since_turn: usize,
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
        capture: Option<Capture>,
        waiting: Arc<AtomicUsize>,
        status: Arc<EngineStatus>,
        idle: HostCache,
    ) -> Self {
        Self {
            context,
            slots: (0..options.parallel).map(|_| Slot::default()).collect(),
            queue: VecDeque::new(),
            parked: Vec::new(),
            tasks: VecDeque::new(),
            idle,
            inbox,
            commands,
            recorder,
            unrecorded: VecDeque::new(),
            capture,
            candidates: Candidates::default(),
            options,
            arrivals: 0,
            turns: 0,
            read_since_turn: 0,
            waiting,
            status,
        }
    }

    /// Runs until told to stop.
    pub fn run(mut self) {
        loop {
            if !self.take_commands() {
                break;
            }
            self.serve_resting();
            self.serve_slots();
            self.admit();
            self.serve_slots();
            self.serve_clients();
            let parts = if self.unrecorded.is_empty() { self.plan() } else { Vec::new() };
            self.show_status();
            if parts.is_empty() {
                self.context.rest();
                let go_on = if let Some(command) = self.soon() {
                    self.obey(command)
                } else {
                    self.record(true);
                    self.wait()
                };
                if !go_on {
                    break;
                }
                continue;
            }
            self.stop_polling();
            let begun = Instant::now();
            self.decode(parts);
            // Before the clients: a client that reads its run finds every token it received.
            self.record(begun.elapsed() > SLOW_DECODE);
            self.serve_clients();
        }
        self.stop();
    }

    /// Takes everything that is waiting. `false` to stop.
    fn take_commands(&mut self) -> bool {
        loop {
            match self.inbox.try_recv() {
                Ok(command) => {
                    if !self.obey(command) {
                        return false;
                    }
                }
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// Sleeps until there is something to do. `false` to stop.
    fn wait(&mut self) -> bool {
        let has_something =
            |live: &Live| !live.run.outbox.is_empty() || (!live.rests() && live.run.wants_decode().is_some());
        let somebody_must_read = !self.unrecorded.is_empty()
            || self.slots.iter().any(|slot| slot.live.as_ref().is_some_and(has_something))
            || self.parked.iter().any(has_something);
        // A slot may have become free since they were looked at.
        let somebody_waits = !self.queue.is_empty() || !self.tasks.is_empty();
        // A run that waits for its mod must still notice that its client has gone.
        let timeout = if somebody_must_read || somebody_waits {
            Some(NAP)
        } else if !self.parked.is_empty() || self.slots.iter().any(|slot| slot.live.is_some()) {
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
        self.obey(command)
    }

    /// What comes within a moment, while a mod's answer is awaited. Most mods answer sooner than a sleeping core wakes up.
    fn soon(&mut self) -> Option<Command> {
        let begun = Instant::now();
        while self.awaiting().next().is_some() && begun.elapsed() < MOMENT {
            if let Ok(command) = self.inbox.try_recv() {
                return Some(command);
            }
            self.awaiting().for_each(ModInstance::poll_reply);
            // Whoever shares the core goes first.
            std::thread::yield_now();
        }
        self.stop_polling();
        None
    }

    /// The mods that are asked for an answer at this moment.
    fn awaiting(&mut self) -> impl Iterator<Item = &mut dyn ModInstance> {
        self.slots.iter_mut().filter_map(|slot| slot.live.as_mut()?.run.awaited())
    }

    /// Nobody looks for mods' answers for a while.
    fn stop_polling(&mut self) {
        self.awaiting().for_each(ModInstance::stop_polling);
    }

    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(run, client, started) => {
                if let Some(started) = started {
                    self.signal(started);
                }
                self.arrivals += 1;
                let (arrival, turn, placed, begun, counted) = (self.arrivals, 0, false, false, false);
                let live = Live { run, client, arrival, turn, placed, begun, rest: None, unread_since: None, counted };
                self.queue.push_back(live);
            }
            Command::Control(id, order, answer) => self.control(id, order, answer),
            Command::Reply(id, call, reply) => {
                let commands = self.commands.clone();
                let candidates = &mut self.candidates;
                let live = self.slots.iter_mut().filter_map(|slot| slot.live.as_mut()).find(|live| live.run.id == id);
                if let Some(live) = live
                    && live.run.awaited_call == call
                {
                    live.run.on_reply(reply, candidates, &|id, call| done(&commands, id, call));
                }
            }
            Command::Slot(slot, task) => {
                self.arrivals += 1;
                self.tasks.push_back(Waiting { arrival: self.arrivals, slot, task });
            }
            Command::Stop => return false,
        }
        true
    }

    /// Passes outputs on, notices who has gone, and clears finished runs away.
    fn serve_clients(&mut self) {
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            let Some(live) = &mut slot.live else { continue };
            if live.client.is_closed() && live.run.end.is_none() {
                live.abort(FinishReason::Cancelled, "the client went away");
            }
            if live.run.request.record == RecordPolicy::Required && self.recorder.is_closed() {
                live.abort(FinishReason::Error, "the run must be recorded, and the recorder has ended");
            }
            live.count_end(&self.status);
            live.pass_on();
            // Behind what the recorder had no room for: a run's end is its last signal.
            if live.run.end.is_some() && self.unrecorded.is_empty() && live.is_heard() {
                self.clear(index);
            }
        }
    }

    /// A run is over: its last items and its end are recorded, its slot is free.
    fn clear(&mut self, index: usize) {
        let Some(mut live) = self.slots[index].live.take() else { return };
        live.count_end(&self.status);
        self.release(index, &mut live);
        self.record_end(live);
    }

    /// Leaves in a slot what belongs to the run that leaves it.
    pub(super) fn release(&mut self, index: usize, live: &mut Live) {
        // A run that never decoded has touched nothing.
        if !live.placed {
            return;
        }
        if live.run.poisoned {
            self.context.wipe(index as i32, &self.slots[index].cache);
        }
        self.follow_cuts(index, live);
        let left = self.truncate(index, live.run.cached);
        let mut memory = live.run.remember();
        memory.truncate(left);
        self.slots[index].memory = memory;
        self.slots[index].processed = live.run.prompt_decoded();
    }

    /// Ends every run and leaves nothing unrecorded that the recorder still takes.
    fn stop(mut self) {
        let message = "the server stops";
        let without_slot = std::mem::take(&mut self.parked).into_iter().chain(std::mem::take(&mut self.queue));
        for mut live in without_slot {
            live.abort(FinishReason::Cancelled, message);
            live.pass_on();
            self.record_end(live);
        }
        for index in 0..self.slots.len() {
            if let Some(live) = &mut self.slots[index].live {
                live.abort(FinishReason::Cancelled, message);
                live.pass_on();
            }
            self.clear(index);
        }
        self.finish_recording();
    }
}

pub(super) fn done(commands: &Sender<Command>, id: RunId, call: u64) -> ReplySender {
    let commands = commands.clone();
    let done = ReplySender::new(move |reply| {
        // The decode thread is gone only when its runs are.
        let _ = commands.send(Command::Reply(id, call, reply));
    });
    done.polled()
}
