//! The decode thread: admits runs to slots, puts batches together, decodes, hands logits to runs.

use super::capture::Capture;
use super::run::{Run, State};
use super::{Options, Output, RecordPolicy};
use crate::events::{FinishReason, Item, RunId, Signal, TokenId};
use crate::model::llama::{Candidates, Context};
use crate::mods::{Done, Reply};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::Duration;
use tokio::sync::mpsc::{self, error::TrySendError};

/// Runs whose next decode is at most this long count as generating: they go before prompts.
const SHORT: usize = 16;

/// How long the thread sleeps when all it waits for is somebody to read.
const NAP: Duration = Duration::from_millis(2);

/// What the decode thread is told.
pub(super) enum Command {
    /// A new run, its client, and the signal that it exists.
    Submit(Box<Run>, mpsc::Sender<Output>, Signal),
    /// A mod's answer to the call of that number.
    Reply(RunId, u64, Reply),
    /// End all runs and the thread.
    Stop,
}

/// A run and the client that listens to it.
struct Live {
    run: Box<Run>,
    client: mpsc::Sender<Output>,
    arrival: u64,
    /// Whether the run has found its slot's KV state.
    placed: bool,
}

/// A sequence of the context.
#[derive(Default)]
struct Slot {
    live: Option<Live>,
    /// What the KV cache holds of this sequence.
    cache: Vec<TokenId>,
    last_used: u64,
}

/// What the decode thread works with.
pub(super) struct Scheduler<'model> {
    context: Context<'model>,
    slots: Vec<Slot>,
    queue: VecDeque<Live>,
    inbox: Receiver<Command>,
    commands: Sender<Command>,
    recorder: mpsc::Sender<Signal>,
    /// Signals that the recorder had no room for; until they are gone, nothing is decoded.
    unrecorded: VecDeque<Signal>,
    capture: Option<Capture>,
    candidates: Candidates,
    options: Options,
    arrivals: u64,
    waiting: Arc<AtomicUsize>,
}

/// A part of a run's sequence in the batch under way.
struct Part {
    slot: usize,
    /// Index in the batch and position of every token whose logits were asked for.
    outputs: Vec<(usize, usize)>,
    from: usize,
    upto: usize,
}

impl<'model> Scheduler<'model> {
    pub fn new(
        context: Context<'model>,
        options: Options,
        inbox: Receiver<Command>,
        commands: Sender<Command>,
        recorder: mpsc::Sender<Signal>,
        capture: Option<Capture>,
        waiting: Arc<AtomicUsize>,
    ) -> Self {
        Self {
            context,
            slots: (0..options.parallel).map(|_| Slot::default()).collect(),
            queue: VecDeque::new(),
            inbox,
            commands,
            recorder,
            unrecorded: VecDeque::new(),
            capture,
            candidates: Candidates::default(),
            options,
            arrivals: 0,
            waiting,
        }
    }

    /// Runs until told to stop, or until nobody can give work any more.
    pub fn run(mut self) {
        loop {
            if !self.take_commands() {
                break;
            }
            self.admit();
            self.serve_clients();
            let parts = if self.unrecorded.is_empty() { self.plan() } else { Vec::new() };
            if parts.is_empty() {
                self.record(true);
                if !self.wait() {
                    break;
                }
                continue;
            }
            self.decode(parts);
            self.serve_clients();
            self.record(false);
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
        let somebody_must_read = !self.unrecorded.is_empty()
            || self.slots.iter().any(|slot| slot.live.as_ref().is_some_and(|live| !live.run.outbox.is_empty()))
            || self.slots.iter().any(|slot| slot.live.as_ref().is_some_and(|live| live.run.wants_decode().is_some()));
        // A run that waits for its mod must still notice that its client has gone.
        let timeout = if somebody_must_read {
            Some(NAP)
        } else if self.slots.iter().any(|slot| slot.live.is_some()) {
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

    fn obey(&mut self, command: Command) -> bool {
        match command {
            Command::Submit(run, client, started) => {
                if run.journal.recorded() {
                    self.signal(started);
                }
                self.arrivals += 1;
                self.queue.push_back(Live { run, client, arrival: self.arrivals, placed: false });
            }
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
            Command::Stop => return false,
        }
        true
    }

    /// Gives free slots to waiting runs, first come first served; a run takes the free slot whose state it shares most of.
    fn admit(&mut self) {
        self.queue.retain_mut(|live| {
            if !live.client.is_closed() {
                return true;
            }
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            live.run.abort(FinishReason::Cancelled, "the client went away before the run began".into());
            if let (true, Some(end)) = (live.run.journal.recorded(), live.run.end.clone()) {
                self.unrecorded.push_back(Signal::Ended(live.run.id, end));
            }
            false
        });
        while !self.queue.is_empty() {
            let prompt = &self.queue[0].run.sequence;
            let best = self
                .slots
                .iter()
                .enumerate()
                .filter(|(_, slot)| slot.live.is_none())
                .max_by_key(|(index, slot)| {
                    let shared = common_prefix(&slot.cache, prompt);
                    // Without a shared state worth having: the lowest slot whose state was left alone longest, since
                    // neighbours in the cache decode together.
                    let worth = if shared * 10 >= prompt.len() { shared } else { 0 };
                    (
                        worth,
                        std::cmp::Reverse(slot.cache.len().min(1)),
                        std::cmp::Reverse(slot.last_used),
                        std::cmp::Reverse(*index),
                    )
                })
                .map(|(index, _)| index);
            let (Some(index), Some(mut live)) = (best, self.queue.pop_front()) else { return };
            self.waiting.fetch_sub(1, Ordering::AcqRel);
            let commands = self.commands.clone();
            live.run.begin(&|id, call| done(&commands, id, call));
            self.slots[index].live = Some(live);
            self.slots[index].last_used = self.arrivals;
        }
    }

    /// Passes outputs on, notices who has gone, and clears finished runs away.
    fn serve_clients(&mut self) {
        for index in 0..self.slots.len() {
            let slot = &mut self.slots[index];
            let Some(live) = &mut slot.live else { continue };
            if live.client.is_closed() && live.run.end.is_none() {
                live.run.abort(FinishReason::Cancelled, "the client went away".into());
            }
            if live.run.request.record == RecordPolicy::Required && self.recorder.is_closed() {
                live.run.abort(FinishReason::Error, "the run must be recorded, and the recorder has ended".into());
            }
            while let Some(output) = live.run.outbox.pop_front() {
                if let Err(TrySendError::Full(output)) = live.client.try_send(output) {
                    live.run.outbox.push_front(output);
                    break;
                }
            }
            // Behind what the recorder had no room for: a run's end is its last signal.
            if live.run.end.is_some()
                && self.unrecorded.is_empty()
                && (live.run.outbox.is_empty() || live.client.is_closed())
            {
                self.clear(index);
            }
        }
    }

    /// A run is over: its last items and its end are recorded, its slot is free.
    fn clear(&mut self, index: usize) {
        let Some(mut live) = self.slots[index].live.take() else { return };
        let keep = live.run.cached.min(self.slots[index].cache.len());
        self.slots[index].cache.truncate(keep);
        let left = self.context.truncate(index as i32, keep as u32);
        self.slots[index].cache.truncate(left as usize);
        if live.run.journal.recorded() {
            let items = live.run.journal.take_all();
            self.signal_items(live.run.id, items);
            self.flush_attention(&mut live.run);
            if let Some(end) = live.run.end.clone() {
                let signal = Signal::Ended(live.run.id, end);
                match &self.capture {
                    // Behind the rows of attention that are still being coded.
                    Some(capture) if live.run.request.attention => capture.pass(signal),
                    _ => self.signal(signal),
                }
            }
        }
    }

    /// Chooses what the next batch decodes: first runs that generate, then prompts in order of arrival.
    fn plan(&mut self) -> Vec<Part> {
        let mut budget = self.options.batch_size as usize;
        let mut ready: Vec<(u64, usize, usize)> = Vec::new();
        let mut captures = 0;
        for index in 0..self.slots.len() {
            self.place(index);
            let Some(live) = &self.slots[index].live else { continue };
            let Some(_) = live.run.wants_decode() else { continue };
            if !live.run.outbox.is_empty() {
                continue;
            }
            if live.run.request.attention {
                captures += 1;
                if self.capture.as_ref().is_some_and(|capture| !capture.has_room(captures)) {
                    continue;
                }
            }
            ready.push((live.arrival, index, live.run.sequence.len() - live.run.cached));
        }
        let generating = ready.iter().any(|&(_, _, left)| left <= SHORT);
        // While others generate, a prompt gets one physical batch per decode, so that their tokens keep coming.
        let mut prompt_budget = if generating { self.options.ubatch_size as usize } else { budget };
        ready.sort_unstable_by_key(|&(arrival, _, left)| (left > SHORT, arrival));
        let mut parts: Vec<(usize, usize)> = Vec::new();
        for (_, index, left) in ready {
            let take = if left <= SHORT { left.min(budget) } else { left.min(budget).min(prompt_budget) };
            if take == 0 {
                continue;
            }
            budget -= take;
            if left > SHORT {
                prompt_budget -= take;
            }
            parts.push((index, take));
        }
        parts.sort_unstable();
        parts.into_iter().filter_map(|(index, take)| self.add_part(index, take)).collect()
    }

    /// Lets a run's first decode begin behind the state that its slot already holds, and takes from the cache what the run
    /// has taken back.
    fn place(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        let Some(live) = &mut slot.live else { return };
        let Some(outputs_from) = live.run.wants_decode() else { return };
        if !live.placed {
            live.placed = true;
            live.run.cached = common_prefix(&slot.cache, &live.run.sequence).min(outputs_from);
            live.run.reused = live.run.cached;
        }
        if slot.cache.len() > live.run.cached {
            let left = self.context.truncate(index as i32, live.run.cached as u32) as usize;
            slot.cache.truncate(left);
            live.run.cached = left;
        }
    }

    fn add_part(&mut self, index: usize, take: usize) -> Option<Part> {
        let live = self.slots[index].live.as_ref()?;
        let run = &live.run;
        let outputs_from = run.wants_decode()?;
        let (from, upto) = (run.cached, run.cached + take);
        let mut outputs = Vec::new();
        for position in from..upto {
            let output = position >= outputs_from;
            let capture = run.request.attention && position + 1 == run.sequence.len();
            match self.context.add(run.sequence[position], position as u32, index as i32, output, capture) {
                Ok(at) if output => outputs.push((at, position)),
                Ok(_) => {}
                Err(error) => {
                    // The plan keeps to the batch's size; should it ever not, the rest goes into the next batch.
                    tracing::error!(%error, "a batch was planned too large");
                    return Some(Part { slot: index, outputs, from, upto: position });
                }
            }
        }
        Some(Part { slot: index, outputs, from, upto })
    }

    fn decode(&mut self, parts: Vec<Part>) {
        let captured = match self.context.decode() {
            Ok(captured) => captured,
            Err(error) => return self.fail(&parts, &error.to_string()),
        };
        let mut captured = captured.into_iter().peekable();
        for part in parts {
            let slot = &mut self.slots[part.slot];
            let Some(live) = &mut slot.live else { continue };
            slot.cache.extend_from_slice(&live.run.sequence[part.from..part.upto]);
            live.run.cached = part.upto;
            let commands = &self.commands;
            for (index, position) in part.outputs {
                if let Some(row) = captured.next_if(|row| row.index == index) {
                    live.run.attention = Some(row);
                }
                let logits = self.context.logits(index);
                live.run.on_logits(position, logits, &mut self.candidates, &|id, call| done(commands, id, call));
            }
        }
    }

    /// The model could not decode: the runs of the batch fail, the others go on.
    fn fail(&mut self, parts: &[Part], message: &str) {
        tracing::error!(message, "a decode failed");
        for part in parts {
            self.context.clear(part.slot as i32);
            let slot = &mut self.slots[part.slot];
            slot.cache.clear();
            if let Some(live) = &mut slot.live {
                live.run.cached = 0;
                live.run.abort(FinishReason::Error, message.to_owned());
            }
        }
    }

    /// Sends the recorder what has gathered: what is due, or everything when the thread is about to sleep.
    fn record(&mut self, everything: bool) {
        while let Some(signal) = self.unrecorded.pop_front() {
            if let Err(TrySendError::Full(signal)) = self.recorder.try_send(signal) {
                self.unrecorded.push_front(signal);
                return;
            }
        }
        for index in 0..self.slots.len() {
            let Some(mut live) = self.slots[index].live.take() else { continue };
            let items = if everything { Some(live.run.journal.take_all()) } else { live.run.journal.take_due() };
            if let Some(items) = items {
                self.signal_items(live.run.id, items);
            }
            self.flush_attention(&mut live.run);
            self.slots[index].live = Some(live);
        }
    }

    fn flush_attention(&mut self, run: &mut Run) {
        if let (Some((order, captured)), Some(capture)) = (run.attention_ready.take(), &self.capture)
            && run.journal.recorded()
        {
            capture.row(run.id, order, captured);
        }
    }

    fn signal_items(&mut self, run: RunId, items: Vec<Item>) {
        if !items.is_empty() {
            self.signal(Signal::Items(run, Arc::new(items)));
        }
    }

    fn signal(&mut self, signal: Signal) {
        if !self.unrecorded.is_empty() {
            self.unrecorded.push_back(signal);
            return;
        }
        if let Err(TrySendError::Full(signal)) = self.recorder.try_send(signal) {
            self.unrecorded.push_back(signal);
        }
    }

    /// Ends every run and leaves nothing unrecorded that the recorder still takes.
    fn stop(mut self) {
        let message = "the server stops";
        for mut live in std::mem::take(&mut self.queue) {
            live.run.abort(FinishReason::Cancelled, message.into());
            for output in live.run.outbox.drain(..) {
                let _ = live.client.try_send(output);
            }
            if let (true, Some(end)) = (live.run.journal.recorded(), live.run.end.take()) {
                self.unrecorded.push_back(Signal::Ended(live.run.id, end));
            }
        }
        for index in 0..self.slots.len() {
            if let Some(live) = &mut self.slots[index].live
                && !matches!(live.run.state, State::Ended)
            {
                live.run.abort(FinishReason::Cancelled, message.into());
            }
            if let Some(live) = &mut self.slots[index].live {
                for output in live.run.outbox.drain(..) {
                    let _ = live.client.try_send(output);
                }
            }
            self.clear(index);
        }
        for signal in self.unrecorded.drain(..) {
            // The thread is about to end, so that it may wait for the recorder now.
            if self.recorder.blocking_send(signal).is_err() {
                return;
            }
        }
    }
}

fn done(commands: &Sender<Command>, id: RunId, call: u64) -> Done {
    let commands = commands.clone();
    Done::new(move |reply| {
        // The decode thread is gone only when its runs are.
        let _ = commands.send(Command::Reply(id, call, reply));
    })
}

fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
