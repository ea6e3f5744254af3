//! The rows of runs: read, written and deleted.

use super::pool::PgConnection;
use super::rows::clean;
use super::scope::{owners, visible};
use super::summary_builder::{ModCallTime, RunRow};
use super::{Error, Store, images, removed_runs};
use crate::events::{EndCause, FinishReason, RunId, RunMetadata, RunStatus, Scope};
use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

pub(super) use super::run_summary::{RunSummary, select_runs};

impl Store {
    /// Returns the run with this `run_id`, else with this `request_id`, if the scope covers it.
    ///
    /// # Errors
    /// The database failed.
    pub async fn find(&self, scope: &Scope, id_or_request_id: &str) -> Result<Option<RunSummary>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if let Ok(run_id) = id_or_request_id.parse()
            && let Some(run) = by_id(&mut connection, scope, run_id).await?
        {
            return Ok(Some(run));
        }
        if id_or_request_id.contains('\0') {
            return Ok(None);
        }
        match request_id_owner(&mut connection, id_or_request_id).await? {
            Some((run_id, _)) => Ok(by_id(&mut connection, scope, run_id).await?),
            None => Ok(None),
        }
    }

    /// Returns true if a run of any tenant has this id as its `request_id` or `run_id`. Runs of this server that are
    /// not stored yet are found without the database.
    ///
    /// # Errors
    /// The database failed.
    pub async fn has_id(&self, id: &str) -> Result<bool, Error> {
        if !self.inner.unstored.find(&Scope::All, id).is_empty() {
            return Ok(true);
        }
        let run_id = id.parse().ok().map(|RunId(run_id)| run_id);
        let found: Option<i32> =
            sqlx::query_scalar("select 1 from run_keys where request_id = $1 or run_id = $2 limit 1")
                .bind(clean(id))
                .bind(run_id)
                .fetch_optional(&self.inner.pool)
                .await?;
        Ok(found.is_some())
    }

    /// Removes a run with all its data. Returns false if the scope has no such run.
    ///
    /// # Errors
    /// [`Error::StillRunning`], or the database failed.
    pub async fn delete(&self, scope: &Scope, run_id: RunId) -> Result<bool, Error> {
        let mut transaction = self.inner.pool.begin().await?;
        if !lock_ended(&mut transaction, scope, run_id).await? {
            return Ok(false);
        }
        remove(&mut transaction, run_id).await?;
        transaction.commit().await?;
        Ok(true)
    }
}

/// Locks the row of a run that has ended. Returns false if the scope has no such run.
pub(super) async fn lock_ended(connection: &mut PgConnection, scope: &Scope, run_id: RunId) -> Result<bool, Error> {
    let find = concat!("select status from runs where run_id = $1 and ", visible!(2), " for update");
    let status: Option<String> =
        sqlx::query_scalar(find).bind(run_id.0).bind(owners(scope)).fetch_optional(connection).await?;
    match status.as_deref() {
        None => Ok(false),
        Some("running") => Err(Error::StillRunning(run_id)),
        Some(_) => Ok(true),
    }
}

/// Removes a run with all its data. The transaction must have locked its row.
pub(super) async fn remove(connection: &mut PgConnection, run_id: RunId) -> Result<(), sqlx::Error> {
    images::remove(connection, run_id.0, run_id.0).await?;
    for statement in [
        "delete from attention where run_id = $1",
        "delete from actions where run_id = $1",
        "delete from mod_logs where run_id = $1",
        "delete from mod_calls where run_id = $1",
        "delete from events where run_id = $1",
        "delete from run_columns where run_id = $1",
        "delete from responses where run_id = $1",
        "delete from run_keys where run_id = $1",
        "delete from runs where run_id = $1",
    ] {
        sqlx::query(statement).bind(run_id.0).execute(&mut *connection).await?;
    }
    removed_runs::add(connection, run_id).await
}

/// Returns the run with this id, if the scope covers it.
pub(super) async fn by_id(
    connection: &mut PgConnection,
    scope: &Scope,
    run_id: RunId,
) -> Result<Option<RunSummary>, sqlx::Error> {
    sqlx::query_as(concat!(select_runs!("mod_text", "where run_id = $1 and "), visible!(2)))
        .bind(run_id.0)
        .bind(owners(scope))
        .fetch_optional(connection)
        .await
}

/// Returns the run with this id, also if it is deleted and not removed yet.
pub(super) async fn stored_run(
    connection: &mut PgConnection,
    run_id: RunId,
) -> Result<Option<RunSummary>, sqlx::Error> {
    sqlx::query_as(select_runs!("mod_text", "where run_id = $1")).bind(run_id.0).fetch_optional(connection).await
}

/// Returns the run with a `request_id`, and the fingerprint of its document.
pub(super) async fn request_id_owner(
    connection: &mut PgConnection,
    request_id: &str,
) -> Result<Option<(RunId, Option<Vec<u8>>)>, sqlx::Error> {
    let row: Option<(Uuid, Option<Vec<u8>>)> =
        sqlx::query_as("select run_id, fingerprint from run_keys where request_id = $1")
            .bind(request_id)
            .fetch_optional(connection)
            .await?;
    Ok(row.map(|(run_id, fingerprint)| (RunId(run_id), fingerprint)))
}

/// Reserves a `request_id` for a run. Returns false if another run has it, or if the run has a `request_id`. Waits for
/// concurrent reservations of the id.
pub(super) async fn reserve_request_id(
    connection: &mut PgConnection,
    request_id: &str,
    run_id: RunId,
) -> Result<bool, sqlx::Error> {
    let done = sqlx::query("insert into run_keys (request_id, run_id) values ($1, $2) on conflict do nothing")
        .bind(request_id)
        .bind(run_id.0)
        .execute(connection)
        .await?;
    Ok(done.rows_affected() == 1)
}

/// Inserts or updates a run's row, its column file, and the fingerprint of its document.
pub(super) async fn save(connection: &mut PgConnection, row: &RunRow) -> Result<(), sqlx::Error> {
    let run = &row.summary;
    sqlx::query(SAVE)
        .bind(run.run_id.0)
        .bind(clean(&run.request_id))
        .bind(run.created_at)
        .bind(run.completed_at)
        .bind(run.status.as_str())
        .bind(run.finish_reason.map(FinishReason::as_str))
        .bind(run.message.as_deref().map(clean))
        .bind(run.surface.as_str())
        .bind(run.model.as_deref().map(clean))
        .bind(run.user_label.as_deref().map(clean))
        .bind(run.mods.iter().map(|name| clean(name)).collect::<Vec<_>>())
        .bind(run.max_tokens)
        .bind(run.temperature)
        .bind(run.seed.map(i64::from))
        .bind(run.mod_text.as_deref().map(clean))
        .bind(clean(&run.prompt_preview))
        .bind(clean(&run.output_preview))
        .bind(run.prompt_tokens)
        .bind(run.completion_tokens)
        .bind(run.cached_tokens)
        .bind(run.events)
        .bind(run.backtracked)
        .bind(run.forced)
        .bind(run.actions)
        .bind(run.errors)
        .bind(clean(&row.error_text))
        .bind(run.first_token_us)
        .bind(run.prompt_us)
        .bind(run.generation_us)
        .bind(run.has_attention)
        .bind(&run.surprise_strip)
        .bind(row.server_id)
        .bind(row.search.as_deref())
        .bind(row.columns.as_deref())
        .bind(row.fingerprint.as_ref().map(<[u8; 32]>::as_slice))
        .bind(row.request_extras.as_deref())
        .bind(run.owner.as_ref().map(|owner| clean(owner.as_str())))
        .bind(
            run.metadata
                .as_ref()
                .map(|metadata| Value::from(metadata.clone()).to_string().replace("\\u0000", "\\u2400")),
        )
        .bind(labels(run))
        .bind(run.end_cause.map(EndCause::as_str))
        .bind(run.parent.as_ref().map(|parent| parent.run_id.0))
        .bind(run.parent.as_ref().map(|parent| parent.sequence_order))
        .bind(run.parent.as_ref().map(|parent| parent.step))
        .bind(run.parent.as_ref().map(|parent| parent.change.to_string().replace("\\u0000", "\\u2400")))
        .bind(row.calls.iter().map(|call| clean(&call.name)).collect::<Vec<_>>())
        .bind(row.calls.iter().map(|call| call.calls).collect::<Vec<_>>())
        .bind(row.calls.iter().map(ModCallTime::total_us).collect::<Vec<_>>())
        .bind(row.calls.iter().map(ModCallTime::max_us).collect::<Vec<_>>())
        .execute(connection)
        .await?;
    Ok(())
}

/// Returns the labels under which the index finds a run.
fn labels(run: &RunSummary) -> Vec<String> {
    let pairs = run.metadata.iter().flatten().filter_map(|(key, value)| Some((key, value.as_str()?)));
    let label = |(key, value): (&String, &str)| {
        let session = (key == RunMetadata::SESSION).then(|| clean(&format!("session={value}")).into_owned());
        session.into_iter().chain([clean(&format!("metadata.{key}={value}")).into_owned()])
    };
    let parent = run.parent.iter().map(|parent| format!("parent={}", parent.run_id));
    pairs.flat_map(label).chain(parent).collect()
}

/// Marks an active run as interrupted at `at`; its recorded data does not change.
pub(super) async fn mark_interrupted(
    connection: &mut PgConnection,
    run_id: RunId,
    at: DateTime<Utc>,
) -> Result<(), sqlx::Error> {
    sqlx::query("update runs set status = $2, completed_at = $3, version = version + 1 where run_id = $1 and status = 'running'")
        .bind(run_id.0)
        .bind(RunStatus::Interrupted.as_str())
        .bind(at)
        .execute(connection)
        .await?;
    Ok(())
}

/// Compresses a column file for storage.
pub(super) fn pack(columns: &[u8]) -> std::io::Result<Vec<u8>> {
    const LEVEL: i32 = 3;
    zstd::encode_all(columns, LEVEL)
}

/// Stores a finished run's compressed column file.
pub(super) async fn save_columns(
    connection: &mut PgConnection,
    run_id: RunId,
    packed: &[u8],
) -> Result<(), sqlx::Error> {
    sqlx::query(
        // Inserts nothing if the run has been deleted.
        "insert into run_columns (run_id, columns) select run_id, $2 from runs where run_id = $1 for share
        on conflict (run_id) do update set columns = excluded.columns",
    )
    .bind(run_id.0)
    .bind(packed)
    .execute(connection)
    .await?;
    Ok(())
}

// Writes three tables in one round trip. A null column file, fingerprint, search text or value of `request_extras` keeps the
// stored one.
const SAVE: &str = "
    with column_file as (
        insert into run_columns (run_id, columns) select $1, $34 where $34::bytea is not null
        on conflict (run_id) do update set columns = excluded.columns
    ), signed as (
        update run_keys set fingerprint = $35 where request_id = $2 and $35::bytea is not null
    )
    insert into runs (run_id, request_id, created_at, completed_at, status, finish_reason, message, surface, model,
        user_label, mods, max_tokens, temperature, seed, mod_text, prompt_preview, output_preview, prompt_tokens,
        completion_tokens, cached_tokens, events, backtracked, forced, actions, errors, error_text, first_token_us,
        prompt_us, generation_us, has_attention, surprise_strip, server_id, search, request_extras, owner, metadata,
        labels, end_cause, parent_run, parent_event, parent_step, parent_change,
        mod_call_names, mod_call_counts, mod_call_us, mod_call_max_us)
    values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24,
        $25, $26, $27, $28, $29, $30, $31, $32, to_tsvector('simple', coalesce($33, '')),
        $36::json, $37, $38::json, $39, $40, $41, $42, $43, $44::json, $45, $46, $47, $48)
    on conflict (run_id) do update set
        completed_at = excluded.completed_at, status = excluded.status, finish_reason = excluded.finish_reason,
        end_cause = excluded.end_cause,
        message = excluded.message, mods = excluded.mods, prompt_preview = excluded.prompt_preview,
        output_preview = excluded.output_preview, prompt_tokens = excluded.prompt_tokens,
        completion_tokens = excluded.completion_tokens, cached_tokens = excluded.cached_tokens,
        events = excluded.events, backtracked = excluded.backtracked, forced = excluded.forced,
        actions = excluded.actions, errors = excluded.errors, error_text = excluded.error_text,
        first_token_us = excluded.first_token_us, prompt_us = excluded.prompt_us,
        generation_us = excluded.generation_us, has_attention = excluded.has_attention,
        surprise_strip = excluded.surprise_strip, mod_call_names = excluded.mod_call_names,
        mod_call_counts = excluded.mod_call_counts, mod_call_us = excluded.mod_call_us,
        mod_call_max_us = excluded.mod_call_max_us, version = runs.version + 1,
        search = case when $33 is null then runs.search else excluded.search end,
        request_extras = coalesce(excluded.request_extras, runs.request_extras)";
