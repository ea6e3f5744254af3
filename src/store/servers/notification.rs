//! Notifications between the servers on one database.
//!
//! The recorder's transactions notify [`RUNS_CHANNEL`] of the runs that they change, so that the other servers learn of a
//! change when it is committed. PostgreSQL commits one notifying transaction at a time, so the many small transactions of
//! ingested documents do not notify: the link sends their changes in batches after they are committed.

use crate::events::{RunId, RunStatus, Tenant};
use crate::store::pool::PgConnection;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use uuid::Uuid;

/// PostgreSQL's notification channel for changes of runs, and for heartbeats.
pub const RUNS_CHANNEL: &str = "thunder_runs";
/// Maximum size of a payload; PostgreSQL refuses 8000 bytes.
const MAX_PAYLOAD_BYTES: usize = 7900;

/// A change of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunNotification {
    /// The run.
    pub run_id: RunId,
    /// The new status; `None` if only items were added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<RunStatus>,
    /// The tenant that it belongs to; only with a status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Tenant>,
}

impl RunNotification {
    /// Returns the notification of a change; [`notify()`] adds the owner.
    pub fn new(run_id: RunId, status: Option<RunStatus>) -> Self {
        Self { run_id, status, owner: None }
    }
}

/// Payload of a notification. Without runs it is a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notification {
    /// The server that sent it.
    pub server: Uuid,
    /// The runs that changed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<RunNotification>,
}

/// Notifies the other servers of changed runs once the transaction of `connection` is committed.
pub async fn notify(
    connection: &mut PgConnection,
    server: Uuid,
    mut runs: Vec<RunNotification>,
) -> Result<(), sqlx::Error> {
    add_owners(connection, &mut runs).await?;
    send(connection, server, runs).await
}

/// Notifies the other servers of changed runs, whose owners are known.
pub async fn send(connection: &mut PgConnection, server: Uuid, runs: Vec<RunNotification>) -> Result<(), sqlx::Error> {
    if runs.is_empty() {
        return Ok(());
    }
    sqlx::query("select pg_notify($1, payload) from unnest($2::text[]) payload")
        .bind(RUNS_CHANNEL)
        .bind(payloads(server, runs))
        .execute(connection)
        .await?;
    Ok(())
}

/// Reads the owners of runs with a new status: each server shows the change to them only.
async fn add_owners(connection: &mut PgConnection, runs: &mut [RunNotification]) -> Result<(), sqlx::Error> {
    let ids: Vec<Uuid> = runs.iter().filter(|run| run.status.is_some()).map(|run| run.run_id.0).collect();
    if ids.is_empty() {
        return Ok(());
    }
    let select = "select run_id, owner from runs where run_id = any($1) and owner is not null";
    let owners: Vec<(Uuid, String)> = sqlx::query_as(select).bind(ids).fetch_all(connection).await?;
    let mut owners: HashMap<Uuid, String> = owners.into_iter().collect();
    for run in runs.iter_mut().filter(|run| run.status.is_some()) {
        run.owner = owners.remove(&run.run_id.0).map(Tenant::from);
    }
    Ok(())
}

/// Returns the payload of a heartbeat.
pub fn heartbeat(server: Uuid) -> String {
    payload(server, Vec::new())
}

/// Groups changes into the fewest payloads that the maximum size allows.
fn payloads(server: Uuid, runs: Vec<RunNotification>) -> Vec<String> {
    let envelope = heartbeat(server).len() + r#","runs":[]"#.len();
    let (mut payloads, mut batch, mut size) = (Vec::new(), Vec::new(), envelope);
    for run in runs {
        let bytes = serde_json::to_string(&run).map_or(0, |json| json.len()) + 1;
        if size + bytes > MAX_PAYLOAD_BYTES {
            payloads.push(payload(server, std::mem::take(&mut batch)));
            size = envelope;
        }
        size += bytes;
        batch.push(run);
    }
    payloads.push(payload(server, batch));
    payloads
}

fn payload(server: Uuid, runs: Vec<RunNotification>) -> String {
    // Ids and names always serialize.
    serde_json::to_string(&Notification { server, runs }).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::system;

    #[test]
    fn payloads_fit_the_limit_and_keep_all_runs_in_order() {
        let server = system::new_id();
        let runs: Vec<_> = (0..1000)
            .map(|index| RunNotification {
                run_id: RunId::now(),
                status: (index % 2 == 0).then_some(RunStatus::Interrupted),
                owner: (index % 4 == 0).then(|| "ann".into()),
            })
            .collect();
        let payloads = payloads(server, runs.clone());
        assert!(payloads.iter().all(|payload| payload.len() < 8000) && payloads.len() < 12, "{}", payloads.len());
        let read = payloads.iter().flat_map(|payload| serde_json::from_str::<Notification>(payload).unwrap().runs);
        assert_eq!(read.collect::<Vec<_>>(), runs);
    }
}
