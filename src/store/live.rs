//! Live updates for subscribers: the newest items of every running run, and changes of the run list.

use crate::events::{RunId, RunStatus, Scope, Tenant, TraceItem};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;

/// Maximum updates that a slow subscriber can lag behind. Beyond this number, it must subscribe again.
const MAX_LAG: usize = 1024;
/// Maximum ended runs whose status is kept in memory, so that a lookup does not report it again.
const MAX_ENDED: usize = 4096;

/// An update of a followed run.
#[derive(Debug, Clone)]
pub enum LiveUpdate {
    /// The next items, in order.
    Items(Arc<Vec<TraceItem>>),
    /// The run has ended and can be read from the store. Always the last update.
    Ended(RunStatus),
}

/// A new run in the run list, or a change of its status.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct RunChange {
    /// The run.
    pub run_id: RunId,
    /// Its current status.
    pub status: RunStatus,
    /// The tenant that it belongs to.
    #[serde(skip)]
    pub owner: Option<Tenant>,
}

/// An update of the run list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunListUpdate {
    /// A run changed, here or on another server.
    Changed(RunChange),
    /// More changes than can be reported separately: the subscriber must load the list again.
    Missed,
}

/// The changes of the runs that a scope covers.
#[derive(Debug)]
pub struct RunChanges {
    scope: Scope,
    changes: broadcast::Receiver<RunListUpdate>,
}

impl RunChanges {
    /// Waits for the next change.
    ///
    /// # Errors
    /// The subscriber was too slow and missed changes of some runs, or the hub was dropped.
    pub async fn recv(&mut self) -> Result<RunListUpdate, RecvError> {
        loop {
            let update = self.changes.recv().await?;
            let is_covered = match &update {
                RunListUpdate::Changed(change) => self.scope.includes(change.owner.as_ref()),
                RunListUpdate::Missed => true,
            };
            if is_covered {
                return Ok(update);
            }
        }
    }
}

/// The hub between the recorder and the subscribers; cheap to clone.
#[derive(Debug, Clone)]
pub struct LiveHub {
    runs: Arc<Mutex<HashMap<RunId, LiveRun>>>,
    changes: broadcast::Sender<RunListUpdate>,
    statuses: Arc<Mutex<Statuses>>,
    /// Followers of runs that other servers generate.
    followers: Arc<Mutex<HashMap<RunId, watch::Sender<()>>>>,
}

/// The last known status of runs.
#[derive(Debug, Default)]
struct Statuses {
    runs: HashMap<RunId, RunStatus>,
    /// The ended runs among them, oldest first.
    ended: VecDeque<RunId>,
}

#[derive(Debug)]
struct LiveRun {
    owner: Option<Tenant>,
    /// All items from the last stored event on. The calls of that event may not be complete.
    backlog: Vec<Arc<Vec<TraceItem>>>,
    updates: broadcast::Sender<LiveUpdate>,
}

impl LiveHub {
    pub(super) fn new() -> Self {
        Self {
            runs: Arc::default(),
            changes: broadcast::Sender::new(MAX_LAG),
            statuses: Arc::default(),
            followers: Arc::default(),
        }
    }

    /// Follows a running run: returns the items that may not be stored yet and a receiver of later ones. Returns `None` if
    /// no run with that id and in the scope is running on this server.
    ///
    /// The backlog begins with an event, or is empty: read the stored items of the events before that one with
    /// [`super::Store::items`], then the backlog, then the updates. No item is missing or repeated.
    /// An empty backlog means that the run has no events yet. After [`broadcast::error::RecvError::Lagged`] subscribe again.
    #[must_use]
    pub fn subscribe(&self, scope: &Scope, run_id: RunId) -> Option<(Vec<TraceItem>, broadcast::Receiver<LiveUpdate>)> {
        let runs = self.lock();
        let running = runs.get(&run_id).filter(|running| scope.includes(running.owner.as_ref()))?;
        let backlog = running.backlog.iter().flat_map(|items| items.iter().cloned()).collect();
        Some((backlog, running.updates.subscribe()))
    }

    /// Returns the changes of the run list: new and ended runs of this server, of `/ingest`, and of other servers.
    #[must_use]
    pub fn runs(&self, scope: &Scope) -> RunChanges {
        RunChanges { scope: scope.clone(), changes: self.changes.subscribe() }
    }

    /// Follows a run of another server. The receiver is notified whenever more of the run is stored.
    #[must_use]
    pub fn follow_remote(&self, run_id: RunId) -> watch::Receiver<()> {
        let mut followers = self.followers();
        followers.retain(|_, follower| follower.receiver_count() > 0);
        followers.entry(run_id).or_default().subscribe()
    }

    /// Reports that another server has stored more of a run. `status` is the new status, if it changed.
    pub(super) fn report_remote_change(&self, run_id: RunId, owner: Option<Tenant>, status: Option<RunStatus>) {
        if let Some(follower) = self.followers().get(&run_id) {
            follower.send_replace(());
        }
        // A lookup may have reported the status before the notification arrived.
        if let Some(status) = status.filter(|status| self.statuses().runs.get(&run_id) != Some(status)) {
            self.report_change(run_id, owner, status);
        }
    }

    /// Reports the status of a run that was read from the database.
    pub(super) fn report_status(&self, run_id: RunId, owner: Option<Tenant>, status: RunStatus) {
        let is_known = self.statuses().runs.get(&run_id) == Some(&status);
        // Runs of this server are reported when they are stored.
        if !is_known && !self.lock().contains_key(&run_id) {
            self.report_change(run_id, owner, status);
        }
    }

    /// Returns the runs whose last known status is running.
    pub(super) fn known_running(&self) -> Vec<RunId> {
        let statuses = self.statuses();
        statuses.runs.iter().filter(|(_, status)| **status == RunStatus::Running).map(|(run_id, _)| *run_id).collect()
    }

    /// Notifies all followers of runs of other servers.
    pub(super) fn wake_followers(&self) {
        self.followers().values().for_each(|follower| follower.send_replace(()));
    }

    /// Asks all subscribers to reload the run list.
    pub(super) fn request_reload(&self) {
        let _ = self.changes.send(RunListUpdate::Missed);
    }

    pub(super) fn add_run(&self, run_id: RunId, owner: Option<Tenant>) {
        let running = LiveRun { owner, backlog: Vec::new(), updates: broadcast::Sender::new(MAX_LAG) };
        self.lock().insert(run_id, running);
    }

    pub(super) fn add_items(&self, run_id: RunId, items: &Arc<Vec<TraceItem>>) {
        if let Some(running) = self.lock().get_mut(&run_id) {
            running.backlog.push(Arc::clone(items));
            let _ = running.updates.send(LiveUpdate::Items(Arc::clone(items)));
        }
    }

    /// Removes stored batches from the backlog, up to their last event.
    pub(super) fn remove_stored_items(&self, run_id: RunId, stored: &[Arc<Vec<TraceItem>>]) {
        if let Some(running) = self.lock().get_mut(&run_id) {
            running.remove_stored(stored);
        }
    }

    pub(super) fn end_run(&self, run_id: RunId, status: RunStatus) {
        let running = self.lock().remove(&run_id);
        let owner = running.and_then(|running| {
            let _ = running.updates.send(LiveUpdate::Ended(status));
            running.owner
        });
        self.report_change(run_id, owner, status);
    }

    pub(super) fn report_change(&self, run_id: RunId, owner: Option<Tenant>, status: RunStatus) {
        self.statuses().set(run_id, status);
        let _ = self.changes.send(RunListUpdate::Changed(RunChange { run_id, status, owner }));
    }

    fn statuses(&self) -> MutexGuard<'_, Statuses> {
        self.statuses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn followers(&self) -> MutexGuard<'_, HashMap<RunId, watch::Sender<()>>> {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RunId, LiveRun>> {
        self.runs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Statuses {
    fn set(&mut self, run_id: RunId, status: RunStatus) {
        let before = self.runs.insert(run_id, status);
        if status != RunStatus::Running && before.is_none_or(|before| before == RunStatus::Running) {
            self.ended.push_back(run_id);
        }
        while self.ended.len() > MAX_ENDED
            && let Some(oldest) = self.ended.pop_front()
        {
            self.runs.remove(&oldest);
        }
    }
}

impl LiveRun {
    fn remove_stored(&mut self, stored: &[Arc<Vec<TraceItem>>]) {
        let Some(newest) = stored.last() else { return };
        let Some(end) = self.backlog.iter().position(|items| Arc::ptr_eq(items, newest)) else { return };
        let last_event = self.backlog[..=end].iter().enumerate().rev().find_map(|(batch, items)| {
            items.iter().rposition(|item| matches!(item, TraceItem::Event(_))).map(|item| (batch, item))
        });
        let Some((batch, item)) = last_event else { return };
        self.backlog.drain(..batch);
        if item > 0 {
            self.backlog[0] = Arc::new(self.backlog[0][item..].to_vec());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Event, EventType, LogLevel, ModLog};

    fn event(sequence_order: i32) -> TraceItem {
        TraceItem::Event(Event::new(EventType::ForwardPass, 1, sequence_order, None))
    }

    fn log() -> TraceItem {
        TraceItem::ModLog(ModLog {
            mod_call_sequence: 0,
            mod_name: "m".into(),
            log_message: "hello".into(),
            log_level: LogLevel::Info,
            created_at: None,
        })
    }

    fn orders(items: &[TraceItem]) -> Vec<Option<i32>> {
        items
            .iter()
            .map(|item| if let TraceItem::Event(event) = item { Some(event.sequence_order) } else { None })
            .collect()
    }

    #[tokio::test]
    async fn backlog_begins_with_the_last_stored_event() {
        let live = LiveHub::new();
        let run_id = RunId::now();
        live.add_run(run_id, None);
        let first = Arc::new(vec![event(0), event(1), log()]);
        let second = Arc::new(vec![log(), event(2)]);
        live.add_items(run_id, &first);
        live.add_items(run_id, &second);
        live.remove_stored_items(run_id, &[Arc::clone(&first)]);
        let (backlog, mut updates) = live.subscribe(&Scope::All, run_id).unwrap();
        assert_eq!(orders(&backlog), [Some(1), None, None, Some(2)]);
        live.remove_stored_items(run_id, &[Arc::clone(&second)]);
        let (backlog, _) = live.subscribe(&Scope::All, run_id).unwrap();
        assert_eq!(orders(&backlog), [Some(2)]);
        live.end_run(run_id, RunStatus::Done);
        assert!(matches!(updates.recv().await, Ok(LiveUpdate::Ended(RunStatus::Done))));
        assert!(live.subscribe(&Scope::All, run_id).is_none());
    }
}
