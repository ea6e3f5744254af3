//! The connection for notifications and heartbeats between servers.
//!
//! One connection per server listens for notifications and another one sends the heartbeats, so that neither waits for a
//! free connection of a busy pool. Both are replaced when one is lost, and missed changes are looked up. A heartbeat is
//! also sent as a notification. A server that does not receive its own heartbeats is connected through a pooler that
//! forwards no notifications, and polls every second.

use super::liveness::{HEARTBEAT_INTERVAL, HeartbeatMonitor};
use super::notification::{self, Notification, RUNS_CHANNEL, RunNotification};
use super::{Announcement, heartbeats, interrupt_runs_of, renew_heartbeat};
use crate::events::{RunId, RunStatus, Tenant};
use crate::store::LiveHub;
use crate::store::address::{Addresses, with_timeout};
use crate::store::mods::MODS_CHANNEL;
use crate::store::pool::PgConnection;
use crate::store::uuid_v7::first_id_at;
use crate::store::writer::RunWriter;
use chrono::{DateTime, TimeDelta, Utc};
use sqlx::postgres::{PgListener, PgNotification};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval, sleep};
use uuid::Uuid;

/// Name of the connection in `pg_stat_activity`.
const APPLICATION_NAME: &str = "thunder notifications";
/// Delay before the attempt to reconnect to the database.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// Maximum time for an answer of the database. After it the connection is replaced, so that heartbeats do not stop.
const ANSWER_TIMEOUT: Duration = HEARTBEAT_INTERVAL.saturating_mul(2);
/// Maximum number of changes that are taken from the channel at once.
const MAX_BATCH: usize = 500;
/// Interval of lookups while notifications do not arrive.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of own heartbeats without a received notification after which notifications count as missing.
const MAX_UNRECEIVED: u32 = 2;
/// Overlap of a lookup with the time before it, because the times in run ids come from the clocks of different servers.
const CLOCK_MARGIN: TimeDelta = TimeDelta::minutes(5);
/// Maximum number of changes that are looked up. Beyond this number, clients must reload the list.
const MAX_LOOKUP: usize = 1000;

/// The task that notifies the other servers of changes, and receives their notifications and heartbeats.
pub struct Link {
    /// Marks the runs of dead servers as interrupted.
    pub writer: RunWriter,
    /// Addresses for the dedicated connections.
    pub addresses: Arc<Addresses>,
    /// Subscribers to runs.
    pub live: LiveHub,
    /// Notified when mods may have changed.
    pub mods: watch::Sender<()>,
    /// Data of this server for its row.
    pub announcement: watch::Receiver<Announcement>,
    /// Committed changes of which the other servers were not notified by a transaction.
    pub committed: mpsc::UnboundedReceiver<RunNotification>,
}

/// State that survives the loss of a connection.
struct State {
    monitor: HeartbeatMonitor,
    /// Task that marks the runs of dead servers as interrupted.
    interrupting: Option<JoinHandle<()>>,
    /// Changes before this time, by the database's clock, were received or looked up.
    received_until: Option<DateTime<Utc>>,
    /// Heartbeats of this server whose notification has not arrived yet.
    unreceived: u32,
    /// Changes taken from the channel and not sent yet.
    unsent: Vec<RunNotification>,
}

impl Link {
    /// Runs until it is aborted.
    pub async fn run(mut self) {
        let mut state = State {
            monitor: HeartbeatMonitor::default(),
            interrupting: None,
            received_until: None,
            unreceived: 0,
            unsent: Vec::new(),
        };
        loop {
            let lost = Box::pin(self.serve(&mut state)).await;
            let reason = lost.err().map_or_else(|| "it was closed".to_owned(), |error| error.to_string());
            tracing::debug!(reason, "the connection for notifications is lost");
            sleep(RETRY_DELAY).await;
        }
    }

    /// Opens the connections and serves them until one is lost.
    async fn serve(&mut self, state: &mut State) -> Result<(), sqlx::Error> {
        let mut listener = self.addresses.listener(APPLICATION_NAME).await?;
        if let Some(listener) = &mut listener {
            listener.eager_reconnect(false);
            wait_for_answer(listener.listen_all([RUNS_CHANNEL, MODS_CHANNEL])).await?;
        }
        let mut connection = wait_for_answer(Box::pin(self.addresses.direct())).await?;
        state.unreceived = 0;
        wait_for_answer(self.catch_up(&mut connection, state)).await?;
        self.mods.send_replace(());
        let mut heartbeats_due = interval(HEARTBEAT_INTERVAL);
        let mut polls_due = interval(POLL_INTERVAL);
        for ticks in [&mut heartbeats_due, &mut polls_due] {
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        }
        loop {
            wait_for_answer(self.send(&mut connection, state)).await?;
            tokio::select! {
                received = next_notification(&mut listener) => match received? {
                    Some(notification) if notification.channel() == MODS_CHANNEL => {
                        self.mods.send_replace(());
                    }
                    Some(notification) => self.on_notification(notification.payload(), state),
                    None => return Ok(()),
                },
                _ = self.committed.recv_many(&mut state.unsent, MAX_BATCH), if !self.committed.is_closed() => {}
                _ = heartbeats_due.tick() => self.renew_heartbeat(&mut connection, state).await?,
                _ = self.announcement.changed() => self.renew_heartbeat(&mut connection, state).await?,
                _ = polls_due.tick(), if state.unreceived > MAX_UNRECEIVED => {
                    wait_for_answer(self.catch_up(&mut connection, state)).await?;
                }
            }
        }
    }

    /// Notifies the other servers of committed changes.
    async fn send(&self, connection: &mut PgConnection, state: &mut State) -> Result<(), sqlx::Error> {
        if !state.unsent.is_empty() {
            notification::send(connection, self.writer.server_id, state.unsent.clone()).await?;
            state.unsent.clear();
        }
        Ok(())
    }

    fn on_notification(&self, payload: &str, state: &mut State) {
        let Ok(Notification { server, runs }) = serde_json::from_str(payload) else {
            return tracing::debug!(payload, "received a notification in an unknown format");
        };
        if server != self.writer.server_id {
            runs.into_iter().for_each(|run| self.live.report_remote_change(run.run_id, run.owner, run.status));
        } else if runs.is_empty() {
            state.unreceived = 0;
        }
    }

    /// Renews this server's row, and checks the heartbeats of the other servers.
    async fn renew_heartbeat(&mut self, connection: &mut PgConnection, state: &mut State) -> Result<(), sqlx::Error> {
        let announcement = self.announcement.borrow_and_update().clone();
        let renewal = async {
            let now = renew_heartbeat(&mut *connection, self.writer.server_id, &announcement).await?;
            sqlx::query("select pg_notify($1, $2)")
                .bind(RUNS_CHANNEL)
                .bind(notification::heartbeat(self.writer.server_id))
                .execute(&mut *connection)
                .await?;
            Ok::<_, sqlx::Error>((now, heartbeats(&mut *connection).await?))
        };
        let (now, counts) = wait_for_answer(renewal).await?;
        if state.unreceived == 0 {
            state.received_until = Some(now);
        }
        state.unreceived += 1;
        if state.unreceived == MAX_UNRECEIVED + 1 {
            tracing::warn!(
                "the database delivers no notifications, possibly because of a pooler in transaction mode: changes of other \
                 servers are looked up every second; set --database-direct-url to the address of the server behind the pooler"
            );
        }
        let others = counts.into_iter().filter(|(server, _)| *server != self.writer.server_id);
        let dead = state.monitor.check(others, Instant::now());
        if state.monitor.has_left() {
            // The server may have ended between a change and its notification.
            self.live.request_reload();
            self.live.wake_followers();
        }
        if !dead.is_empty() && state.interrupting.as_ref().is_none_or(JoinHandle::is_finished) {
            let (writer, live) = (self.writer.clone(), self.live.clone());
            state.interrupting = Some(tokio::spawn(async move {
                for (server, count) in dead {
                    match interrupt_runs_of(&writer, &live, server, count).await {
                        Ok(runs) => {
                            tracing::info!(%server, runs, "marked the runs of a dead server as interrupted");
                        }
                        Err(error) => {
                            tracing::warn!(%server, %error, "cannot mark the runs of a dead server as interrupted");
                        }
                    }
                }
            }));
        }
        Ok(())
    }

    /// Looks up the changes since notifications last arrived.
    async fn catch_up(&self, connection: &mut PgConnection, state: &mut State) -> Result<(), sqlx::Error> {
        let now: DateTime<Utc> = sqlx::query_scalar("select clock_timestamp()").fetch_one(&mut *connection).await?;
        let since = state.received_until.unwrap_or(now) - CLOCK_MARGIN;
        let select = "select run_id, owner, status from runs where run_id >= $1 order by run_id limit $2";
        let mut rows: Vec<(Uuid, Option<String>, String)> = sqlx::query_as(select)
            .bind(first_id_at(since))
            .bind(MAX_LOOKUP as i64 + 1)
            .fetch_all(&mut *connection)
            .await?;
        let complete = rows.len() <= MAX_LOOKUP;
        let running = sqlx::query_as("select run_id, owner, status from runs where status = 'running'");
        rows.extend(running.fetch_all(&mut *connection).await?);
        let known: Vec<Uuid> = self.live.known_running().into_iter().map(|run_id| run_id.0).collect();
        let ended =
            sqlx::query_as("select run_id, owner, status from runs where run_id = any($1) and status <> 'running'");
        rows.extend(ended.bind(known).fetch_all(&mut *connection).await?);
        for (run_id, owner, status) in rows {
            if let Some(status) = RunStatus::from_name(&status) {
                self.live.report_status(RunId(run_id), owner.map(Tenant::from), status);
            }
        }
        self.live.wake_followers();
        if !complete {
            self.live.request_reload();
        }
        state.received_until = Some(now);
        Ok(())
    }
}

/// Waits for an answer of the database for up to [`ANSWER_TIMEOUT`].
async fn wait_for_answer<T>(answer: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, sqlx::Error> {
    with_timeout(ANSWER_TIMEOUT, answer).await
}

/// Returns the next notification. Waits forever without a listener.
async fn next_notification(listener: &mut Option<PgListener>) -> Result<Option<PgNotification>, sqlx::Error> {
    match listener {
        Some(listener) => listener.try_recv().await,
        None => std::future::pending().await,
    }
}
