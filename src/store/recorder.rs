//! The recorder: a task between the engine's signals and the writer.
//!
//! It takes signals whenever they come and writes a batch at a time, so that nobody who sends waits for the database.
//! Per running run it keeps the fold, from which the run list's numbers and the column file come. When the database is
//! away, batches go to the spool file, and everything after them too until the file is drained: order is kept. When the
//! disk is full, too, runs that must be kept fail at once, and the others wait in memory as long as there is room.

mod landing;
#[cfg(test)]
mod tests;

use super::spool::Spool;
use super::summary_builder::{RunRow, RunSummaryBuilder};
use super::writer::Record;
use super::{Flush, Live, SIGNALS};
use crate::events::{DurabilityAcks, RunId, RunStatus, Signal, TraceItem, UnstoredRuns};
use crate::trace::document::Numbering;
use landing::{Batch, Fate, Landed, land};
use sqlx::PgPool;
use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Mutex, mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use uuid::Uuid;

pub use landing::drain_some;

/// Items wait at most this long before they are written.
const FLUSH: Duration = Duration::from_millis(250);
/// So many are written at once.
const BATCH: usize = 512;
/// So many wait for a slow database before the rest goes to the spool file.
const MOST_WAITING: usize = 50_000;
/// So many wait in memory while neither database nor disk takes them; then runs are given up, oldest first.
const MOST_IN_MEMORY: usize = 100_000;

/// Where the recorder writes.
#[derive(Clone)]
pub struct Target {
    /// Connections that readers do not use up.
    pub pool: PgPool,
    /// This Thunder, as owner of its runs.
    pub server_id: Uuid,
    /// Who watches.
    pub live: Live,
    /// The runs that must be kept.
    pub durability_acks: DurabilityAcks,
    /// The runs that readers must wait for.
    pub unstored: UnstoredRuns,
}

struct Recorder {
    target: Target,
    runs: HashMap<RunId, Recording>,
    pending: Vec<Record>,
    pending_items: usize,
    /// Runs that were given up and still go on.
    ignored: HashSet<RunId>,
    /// Runs that were given up: what is stored of them must be marked as interrupted.
    given_up: Vec<RunId>,
    /// The last rows of runs whose end waits in `pending` since neither database nor disk took it.
    ended: Vec<RunRow>,
    /// Runs that are over and of which a part is only in the spool file.
    spooled: Vec<RunId>,
    /// Readers that wait until what has come so far is stored.
    flushes: Vec<Flush>,
    /// True if a run has begun or ended since the last batch: lists of runs show that at once, on every server.
    urgent: bool,
}

struct Recording {
    summary: RunSummaryBuilder,
    numbering: Numbering,
    changed: bool,
}

/// A batch on its way.
struct Flight {
    task: JoinHandle<Landed>,
    /// Its runs, and those to be marked, should it never land.
    runs: HashSet<RunId>,
    given_up: Vec<RunId>,
    flushes: Vec<Flush>,
}

/// Records until `closing` says to stop; what came before is then stored or spooled.
pub async fn record(
    target: Target,
    spool: Option<Spool>,
    mut signals: mpsc::Receiver<Signal>,
    mut flushes: mpsc::Receiver<Flush>,
    mut closing: watch::Receiver<bool>,
) {
    let Some(spool) = spool else { return };
    let mut drained = spool.is_drained();
    // A batch that never lands must not take it along.
    let spool = Arc::new(Mutex::new(spool));
    let mut recorder = Recorder::new(target);
    let mut flight: Option<Flight> = None;
    let mut tick = interval(FLUSH);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut open, mut lost) = (true, false);
    loop {
        let mut due = false;
        tokio::select! {
            signal = signals.recv(), if open => match signal {
                Some(signal) => recorder.take(signal),
                None => open = false,
            },
            Some(flush) = flushes.recv(), if open => {
                // What was sent before the request came is stored with it.
                for _ in 0..SIGNALS {
                    let Ok(signal) = signals.try_recv() else { break };
                    recorder.take(signal);
                }
                recorder.flushes.push(flush);
            }
            landed = async { Some((&mut flight.as_mut()?.task).await) }, if flight.is_some() => {
                drained = spool.try_lock().is_ok_and(|spool| spool.is_drained());
                match (landed, flight.take()) {
                    (Some(Ok(landed)), flight) => {
                        if std::mem::replace(&mut lost, landed.fate == Fate::Lost) && !lost {
                            tracing::info!("runs can be stored or spooled again");
                        }
                        recorder.landed(landed, drained);
                        answer(flight.into_iter().flat_map(|flight| flight.flushes), drained && !lost);
                    }
                    (_, Some(crashed)) => {
                        recorder.crashed(crashed.runs, &crashed.given_up);
                        answer(crashed.flushes, false);
                    }
                    (_, None) => {}
                }
            }
            _ = closing.wait_for(|closing| *closing), if open => {
                signals.close();
                due = true;
            }
            _ = tick.tick() => due = true,
        }
        if flight.is_some() {
            continue;
        }
        // what is spooled by the end is for the next Thunder
        if !open && (recorder.pending_items == 0 || lost) {
            break;
        }
        let waits = recorder.pending_items > 0 || !recorder.given_up.is_empty() || !drained;
        if !waits {
            answer(recorder.flushes.drain(..), true);
        }
        due |= !recorder.flushes.is_empty() || recorder.urgent;
        if waits && (due || !open || recorder.pending_items >= BATCH) {
            let overload = recorder.pending_items >= MOST_WAITING;
            let flushes = std::mem::take(&mut recorder.flushes);
            let batch = recorder.batch();
            let (runs, given_up) = (batch.records.iter().map(Record::run_id).collect(), batch.given_up.clone());
            let (pool, spool) = (recorder.target.pool.clone(), Arc::clone(&spool));
            let server = recorder.target.server_id;
            let task =
                tokio::spawn(async move { land(&pool, server, &mut *spool.lock().await, batch, overload, lost).await });
            flight = Some(Flight { task, runs, given_up, flushes });
        }
    }
    if let Some(spool) = Arc::into_inner(spool).map(Mutex::into_inner).filter(Spool::is_drained) {
        spool.remove();
    }
}

impl Recorder {
    fn new(target: Target) -> Self {
        Self {
            target,
            runs: HashMap::new(),
            pending: Vec::new(),
            pending_items: 0,
            ignored: HashSet::new(),
            given_up: Vec::new(),
            ended: Vec::new(),
            spooled: Vec::new(),
            flushes: Vec::new(),
            urgent: false,
        }
    }

    fn take(&mut self, signal: Signal) {
        let run_id = match &signal {
            Signal::Started(start) => start.run_id,
            Signal::Items(run_id, _) | Signal::Ended(run_id, _) => *run_id,
        };
        // Whatever is wrong with one run, the others are recorded.
        if catch_unwind(AssertUnwindSafe(|| self.apply(signal))).is_err() {
            self.give_up(run_id, "the recorder failed on it");
        }
    }

    fn apply(&mut self, signal: Signal) {
        match signal {
            Signal::Started(start) => {
                let run_id = start.run_id;
                let summary = RunSummaryBuilder::started(&start, self.target.server_id);
                let recording = Recording { summary, numbering: Numbering::default(), changed: false };
                self.runs.insert(run_id, recording);
                self.target.live.started(run_id, start.owner.clone());
                self.push(Record::Started(start, self.target.server_id));
            }
            Signal::Items(run_id, items) => {
                let Some(run) = self.runs.get_mut(&run_id) else {
                    if self.ignored.contains(&run_id) {
                        return;
                    }
                    tracing::error!(run.id = %run_id, "items of a run that never started are not recorded");
                    return;
                };
                let numbering = run.numbering;
                for item in items.iter() {
                    run.summary.apply(item);
                    run.numbering.skip(item);
                }
                run.changed = true;
                if is_shown(&items) {
                    self.target.live.items(run_id, &items);
                }
                self.push(Record::Items(run_id, numbering, items));
            }
            Signal::Ended(run_id, end) => {
                let Some(run) = self.runs.get_mut(&run_id) else {
                    self.ignored.remove(&run_id);
                    return;
                };
                run.summary.ended(&end);
                run.changed = true;
                self.push(Record::Ended(run_id, end));
            }
        }
    }

    fn push(&mut self, record: Record) {
        self.urgent |= !matches!(record, Record::Items(..));
        self.pending_items += record.len();
        self.pending.push(record);
    }

    fn batch(&mut self) -> Batch {
        self.pending_items = 0;
        self.urgent = false;
        let records = std::mem::take(&mut self.pending);
        let changed =
            self.runs.values_mut().filter_map(|run| std::mem::take(&mut run.changed).then(|| run.summary.row()));
        let rows = std::mem::take(&mut self.ended).into_iter().chain(changed).collect();
        self.runs.retain(|_, run| run.summary.status() == RunStatus::Running);
        Batch { records, rows, given_up: std::mem::take(&mut self.given_up) }
    }

    /// A batch never landed: something of it could not even be written to the spool file. What is stored of its runs stays,
    /// as that of runs that were interrupted.
    fn crashed(&mut self, runs: HashSet<RunId>, given_up: &[RunId]) {
        self.given_up.extend(given_up);
        for run_id in runs {
            self.give_up(run_id, "the recorder failed on it");
        }
    }

    /// Tells the subscribers. `drained`: nothing is in the spool file any more.
    fn landed(&mut self, landed: Landed, drained: bool) {
        self.given_up.extend(&landed.given_up);
        let lost: HashSet<RunId> = landed.lost.into_iter().collect();
        for &run_id in &lost {
            self.give_up(run_id, "a part of it could neither be stored nor spooled");
        }
        let live = &self.target.live;
        if landed.fate == Fate::Stored {
            let mut stored: HashMap<RunId, Vec<Arc<Vec<TraceItem>>>> = HashMap::new();
            for record in &landed.records {
                if let Record::Items(run_id, _, items) = record
                    && is_shown(items)
                {
                    stored.entry(*run_id).or_default().push(Arc::clone(items));
                }
            }
            for (run_id, items) in &stored {
                live.stored(*run_id, items);
            }
        }
        if landed.fate == Fate::Lost {
            self.pending_items += landed.records.iter().map(Record::len).sum::<usize>();
            self.pending.splice(..0, landed.records);
            for row in landed.rows {
                match self.runs.get_mut(&row.summary.run_id) {
                    Some(run) => run.changed = true,
                    None => self.ended.push(row),
                }
            }
            self.make_room();
            return;
        }
        for record in landed.records.iter().filter(|record| !lost.contains(&record.run_id())) {
            match record {
                Record::Started(start, _) => live.changed(start.run_id, start.owner.clone(), RunStatus::Running),
                Record::Ended(run_id, end) => {
                    live.ended(*run_id, end.status);
                    self.target.durability_acks.resolve(*run_id, Ok(()));
                    self.spooled.push(*run_id);
                }
                Record::Items(..) => {}
            }
        }
        if drained {
            self.spooled.drain(..).for_each(|run_id| self.target.unstored.remove(run_id));
        }
    }

    /// Neither database nor disk takes anything: gives up what must not or cannot wait in memory.
    fn make_room(&mut self) {
        let mut waiting: HashSet<RunId> = self.pending.iter().map(Record::run_id).collect();
        waiting.retain(|run_id| self.target.durability_acks.is_requested(*run_id));
        for run_id in waiting {
            self.give_up(run_id, "neither the database nor the disk takes it");
        }
        while self.pending_items > MOST_IN_MEMORY
            && let Some(oldest) = self.pending.first().map(Record::run_id)
        {
            self.give_up(oldest, "neither the database nor the disk takes it, and memory is full");
        }
    }

    fn give_up(&mut self, run_id: RunId, why: &str) {
        tracing::error!(run.id = %run_id, why, "a run is not recorded any further");
        let over = self.pending.iter().any(|record| matches!(record, Record::Ended(id, _) if *id == run_id));
        self.pending.retain(|record| record.run_id() != run_id);
        self.pending_items = self.pending.iter().map(Record::len).sum();
        self.ended.retain(|row| row.summary.run_id != run_id);
        if self.runs.remove(&run_id).is_some() && !over {
            self.ignored.insert(run_id);
        }
        self.given_up.push(run_id);
        self.target.durability_acks.resolve(run_id, Err(why.to_owned()));
        self.target.unstored.remove(run_id);
        self.target.live.ended(run_id, RunStatus::Interrupted);
    }
}

fn answer(flushes: impl IntoIterator<Item = Flush>, stored: bool) {
    for flush in flushes {
        // Readers that have gone need no answer.
        let _ = flush.send(stored);
    }
}

/// Whether anybody who watches is told of them. Attention is read from the store; kept for watchers, that of a long run would
/// fill the memory while the database is away.
fn is_shown(items: &[TraceItem]) -> bool {
    items.iter().any(|item| !matches!(item, TraceItem::Attention(_)))
}
