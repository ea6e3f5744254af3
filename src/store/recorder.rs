//! The recorder: a task between the engine's signals and the writer.
//!
//! It takes signals whenever they come and writes a batch at a time, so that nobody who sends waits for the database.
//! Per running run it keeps the fold, from which the run list's numbers and the column file come. When the database is
//! away, batches go to the spool file, and everything after them too until the file is drained: order is kept. When the
//! disk is full, too, runs that must be kept fail at once, and the others wait in memory as long as there is room.

use super::outline::{Outline, RunRow};
use super::spool::Spool;
use super::writer::{self, Attempt, Record};
use super::{Error, Live, error};
use crate::events::{Item, Promises, RunId, RunStatus, Signal};
use crate::trace::document::Numbering;
use chrono::Utc;
use sqlx::PgPool;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use uuid::Uuid;

/// Items wait at most this long before they are written.
const FLUSH: Duration = Duration::from_millis(250);
/// So many are written at once.
const BATCH: usize = 512;
/// So many wait for a slow database before the rest goes to the spool file.
const MOST_WAITING: usize = 50_000;
/// So many wait in memory while neither database nor disk takes them; then runs are given up, oldest first.
const MOST_IN_MEMORY: usize = 100_000;
/// A batch that takes longer counts as failed.
const PATIENCE: Duration = Duration::from_secs(15);
/// Draining pauses that often to append what came meanwhile.
const DRAIN: Duration = Duration::from_millis(500);

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
    pub promises: Promises,
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
}

struct Recording {
    outline: Outline,
    numbering: Numbering,
    changed: bool,
}

/// What is written at once.
struct Batch {
    records: Vec<Record>,
    rows: Vec<RunRow>,
    given_up: Vec<RunId>,
}

/// What became of a batch.
struct Landed {
    spool: Spool,
    records: Vec<Record>,
    rows: Vec<RunRow>,
    fate: Fate,
    /// Those of the batch that are still to be marked.
    given_up: Vec<RunId>,
    /// Runs of which a part was lost.
    lost: Vec<RunId>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// In the database.
    Stored,
    /// In the spool file.
    Spooled,
    /// Neither: the disk is full, too.
    Lost,
}

/// Records until `closing` says to stop; what came before is then stored or spooled.
pub async fn record(
    target: Target,
    mut spool_file: Option<Spool>,
    mut signals: mpsc::Receiver<Signal>,
    mut closing: watch::Receiver<bool>,
) {
    let mut recorder = Recorder {
        target,
        runs: HashMap::new(),
        pending: Vec::new(),
        pending_items: 0,
        ignored: HashSet::new(),
        given_up: Vec::new(),
        ended: Vec::new(),
    };
    let mut flight: Option<JoinHandle<Landed>> = None;
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
            landed = async { flight.as_mut()?.await.ok() }, if flight.is_some() => {
                flight = None;
                if let Some(landed) = landed {
                    if std::mem::replace(&mut lost, landed.fate == Fate::Lost) && !lost {
                        tracing::info!("runs can be stored or spooled again");
                    }
                    spool_file = Some(recorder.landed(landed));
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
        let waits = recorder.pending_items > 0
            || !recorder.given_up.is_empty()
            || spool_file.as_ref().is_some_and(|spool| !spool.is_drained());
        if waits
            && (due || !open || recorder.pending_items >= BATCH)
            && let Some(spool) = spool_file.take()
        {
            let overload = recorder.pending_items >= MOST_WAITING;
            flight = Some(tokio::spawn(land(recorder.target.pool.clone(), spool, recorder.batch(), overload, lost)));
        }
    }
    if let Some(spool) = spool_file.filter(Spool::is_drained) {
        spool.remove();
    }
}

impl Recorder {
    fn take(&mut self, signal: Signal) {
        match signal {
            Signal::Started(start) => {
                let run_id = start.run_id;
                let outline = Outline::started(&start, self.target.server_id);
                let recording = Recording { outline, numbering: Numbering::default(), changed: false };
                self.runs.insert(run_id, recording);
                self.target.live.started(run_id);
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
                    run.outline.apply(item);
                    match item {
                        Item::ModCall(_) => run.numbering.mod_calls += 1,
                        Item::ModLog(_) => run.numbering.mod_logs += 1,
                        Item::Action(_) => run.numbering.actions += 1,
                        Item::Event(_) | Item::Attention(_) => {}
                    }
                }
                run.changed = true;
                self.target.live.items(run_id, &items);
                self.push(Record::Items(run_id, numbering, items));
            }
            Signal::Ended(run_id, end) => {
                let Some(run) = self.runs.get_mut(&run_id) else {
                    self.ignored.remove(&run_id);
                    return;
                };
                run.outline.ended(&end);
                run.changed = true;
                self.push(Record::Ended(run_id, end));
            }
        }
    }

    fn push(&mut self, record: Record) {
        self.pending_items += record.len();
        self.pending.push(record);
    }

    fn batch(&mut self) -> Batch {
        self.pending_items = 0;
        let records = std::mem::take(&mut self.pending);
        let changed =
            self.runs.values_mut().filter_map(|run| std::mem::take(&mut run.changed).then(|| run.outline.row()));
        let rows = std::mem::take(&mut self.ended).into_iter().chain(changed).collect();
        self.runs.retain(|_, run| run.outline.status() == RunStatus::Running);
        Batch { records, rows, given_up: std::mem::take(&mut self.given_up) }
    }

    /// Tells the subscribers; gives the spool file back.
    fn landed(&mut self, landed: Landed) -> Spool {
        self.given_up.extend(&landed.given_up);
        for run_id in landed.lost {
            self.give_up(run_id, "a part of it could neither be stored nor spooled");
        }
        let live = &self.target.live;
        if landed.fate == Fate::Stored {
            let mut stored: HashMap<RunId, Vec<Arc<Vec<Item>>>> = HashMap::new();
            for record in &landed.records {
                if let Record::Items(run_id, _, items) = record {
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
            return landed.spool;
        }
        for record in &landed.records {
            match record {
                Record::Started(start, _) => live.changed(start.run_id, RunStatus::Running),
                Record::Ended(run_id, end) => {
                    live.ended(*run_id, end.status);
                    self.target.promises.settle(*run_id, Ok(()));
                }
                Record::Items(..) => {}
            }
        }
        landed.spool
    }

    /// Neither database nor disk takes anything: gives up what must not or cannot wait in memory.
    fn make_room(&mut self) {
        let mut waiting: HashSet<RunId> = self.pending.iter().map(Record::run_id).collect();
        waiting.retain(|run_id| self.target.promises.has(*run_id));
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
        self.target.promises.settle(run_id, Err(why.to_owned()));
        self.target.live.ended(run_id, RunStatus::Interrupted);
    }
}

/// Brings a batch to the database or, when it is away, to the disk. `told` says that it is known that neither takes any.
async fn land(pool: PgPool, mut spool: Spool, batch: Batch, overload: bool, told: bool) -> Landed {
    let Batch { records, rows, mut given_up } = batch;
    if spool.is_drained() && !overload {
        match timeout(PATIENCE, writer::write(&pool, &records, &rows, Attempt::First)).await {
            Ok(Ok(())) => {
                while let Some(run_id) = given_up.last()
                    && writer::interrupt(&pool, *run_id, Utc::now()).await.is_ok()
                {
                    given_up.pop();
                }
                return Landed { spool, records, rows, fate: Fate::Stored, given_up, lost: Vec::new() };
            }
            Ok(Err(failure)) if !error::is_transient(&failure) => {
                tracing::error!(error = %failure, "the database refused a batch; trying run by run");
                let lost = store_one_by_one(&pool, &mut spool, &records, &rows).await;
                let fate = if spool.is_drained() { Fate::Stored } else { Fate::Spooled };
                return Landed { spool, records, rows, fate, given_up, lost };
            }
            _ if told => {}
            Ok(Err(failure)) => tracing::warn!(error = %failure, "the database is away; runs go to the spool file"),
            Err(_) => tracing::warn!("the database is too slow; runs go to the spool file"),
        }
    }
    let fate = match spool.append(&records) {
        Ok(()) => Fate::Spooled,
        Err(failure) => {
            if !told {
                tracing::error!(error = %failure, "runs can neither be stored nor spooled");
            }
            Fate::Lost
        }
    };
    let until = Instant::now() + DRAIN;
    while !spool.is_drained() && Instant::now() < until {
        match drain_some(&pool, &mut spool).await {
            Ok(()) if spool.is_drained() => tracing::info!("the database is back and the spool file is drained"),
            Ok(()) => {}
            Err(_) => break,
        }
    }
    Landed { spool, records, rows, fate, given_up, lost: Vec::new() }
}

/// Stores the next records of a spool file.
pub async fn drain_some(pool: &PgPool, spool: &mut Spool) -> Result<(), Error> {
    let (records, at) = spool.next(BATCH)?;
    match timeout(PATIENCE, writer::rewrite(pool, &records)).await {
        Ok(Ok(())) => {}
        Err(_) | Ok(Err(Error::Unavailable(_))) => return Err(Error::Unavailable(sqlx::Error::PoolTimedOut)),
        Ok(Err(failure)) => {
            tracing::error!(error = %failure, "the database refused spooled records; trying run by run");
            for (_, records) in by_run(&records) {
                match writer::rewrite(pool, &records).await {
                    Ok(()) => {}
                    Err(Error::Unavailable(failure)) => return Err(Error::Unavailable(failure)),
                    Err(failure) => refuse(spool, &records, &failure)?,
                }
            }
        }
    }
    spool.drained(at)
}

/// Returns the runs that found no place.
async fn store_one_by_one(pool: &PgPool, spool: &mut Spool, records: &[Record], rows: &[RunRow]) -> Vec<RunId> {
    let mut lost = Vec::new();
    for (run_id, records) in by_run(records) {
        let row = rows.iter().find(|row| row.summary.run_id == run_id);
        let result = writer::write(pool, &records, row, Attempt::Again).await;
        let put_aside = match result {
            Ok(()) => Ok(()),
            Err(failure) if error::is_transient(&failure) => spool.append(&records),
            Err(failure) => match refuse(spool, &records, &failure) {
                // what the run list shows of it may still fit
                Ok(()) => writer::write(pool, &[], row, Attempt::Again).await.or(Ok(())),
                Err(failure) => Err(failure),
            },
        };
        if let Err(failure) = put_aside {
            tracing::error!(error = %failure, run.id = %run_id, "a run can neither be stored nor spooled");
            lost.push(run_id);
        }
    }
    lost
}

fn refuse(spool: &Spool, records: &[Record], failure: &dyn std::error::Error) -> Result<(), Error> {
    let path = spool.refuse(records)?;
    let run = records.first().map(|record| record.run_id().to_string()).unwrap_or_default();
    tracing::error!(error = %failure, run.id = run, path = %path.display(), "the database refuses a part of a run; it is kept in a file");
    Ok(())
}

/// Records by run, both in the order they had.
fn by_run(records: &[Record]) -> Vec<(RunId, Vec<Record>)> {
    let mut runs: Vec<(RunId, Vec<Record>)> = Vec::new();
    for record in records {
        let run_id = record.run_id();
        match runs.iter_mut().find(|(id, _)| *id == run_id) {
            Some((_, records)) => records.push(record.clone()),
            None => runs.push((run_id, vec![record.clone()])),
        }
    }
    runs
}
