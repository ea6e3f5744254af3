//! The rows of runs: read, written and deleted.

use super::pool::PgConnection;
use super::scope::{owners, visible};
use super::summary_builder::{ModCallTime, RunRow};
use super::text::{clean, clean_json};
use super::{Error, Store, images, removed_runs};
use crate::events::{EndCause, FinishReason, RunId, RunMetadata, RunStatus, Scope};
use chrono::{DateTime, Utc};
use serde_json::Value;
use std::sync::LazyLock;
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

/// A column of the statement that inserts or updates a run's row.
struct SavedColumn {
    name: &'static str,
    /// SQL of the value, in which `{}` is the parameter.
    value: &'static str,
    if_exists: IfExists,
}

/// The treatment of a column if the row exists.
enum IfExists {
    Keep,
    Replace,
    /// Replaces the stored value, unless the new one is null.
    ReplaceUnlessNull,
}

/// Returns the query that saves a run: `$first` are its first parameters, and the others are the columns of `runs`.
macro_rules! save_query {
    ([$($first:expr),*], $($if_exists:ident { $($name:ident: $value:expr $(=> $sql:literal)?,)* })*) => {{
        static STATEMENT: LazyLock<String> = LazyLock::new(|| {
            save_statement(&[$($(SavedColumn {
                name: stringify!($name),
                value: save_query!(@sql $($sql)?),
                if_exists: IfExists::$if_exists,
            },)*)*])
        });
        sqlx::query(STATEMENT.as_str())$(.bind($first))*$($(.bind($value))*)*
    }};
    (@sql) => { "{}" };
    (@sql $sql:literal) => { $sql };
}

/// Inserts or updates a run's row, its column file, and the fingerprint of its document.
pub(super) async fn save(connection: &mut PgConnection, row: &RunRow) -> Result<(), sqlx::Error> {
    let run = &row.summary;
    let parent = run.parent.as_ref();
    let query = save_query! {
        [run.run_id.0, clean(&run.request_id), row.columns.as_deref(), row.fingerprint.as_ref().map(<[u8; 32]>::as_slice)],
        Keep {
            created_at: run.created_at,
            surface: run.surface.as_str(),
            model: run.model.as_deref().map(clean),
            owner: run.owner.as_ref().map(|owner| clean(owner.as_str())),
            user_label: run.user_label.as_deref().map(clean),
            max_tokens: run.max_tokens,
            temperature: run.temperature,
            seed: run.seed.map(i64::from),
            mod_text: run.mod_text.as_deref().map(clean),
            server_id: row.server_id,
            metadata: run.metadata.clone().map(|metadata| clean_json(&Value::from(metadata).to_string())) => "{}::json",
            labels: labels(run),
            parent_run: parent.map(|parent| parent.run_id.0),
            parent_event: parent.map(|parent| parent.sequence_order),
            parent_step: parent.map(|parent| parent.step),
            parent_change: parent.map(|parent| clean_json(&parent.change.to_string())) => "{}::json",
        }
        Replace {
            completed_at: run.completed_at,
            status: run.status.as_str(),
            finish_reason: run.finish_reason.map(FinishReason::as_str),
            end_cause: run.end_cause.map(EndCause::as_str),
            message: run.message.as_deref().map(clean),
            mods: run.mods.iter().map(|name| clean(name)).collect::<Vec<_>>(),
            prompt_preview: clean(&run.prompt_preview),
            output_preview: clean(&run.output_preview),
            prompt_tokens: run.prompt_tokens,
            completion_tokens: run.completion_tokens,
            cached_tokens: run.cached_tokens,
            events: run.events,
            backtracked: run.backtracked,
            forced: run.forced,
            actions: run.actions,
            errors: run.errors,
            error_text: clean(&row.error_text),
            first_token_us: run.first_token_us,
            prompt_us: run.prompt_us,
            generation_us: run.generation_us,
            has_attention: run.has_attention,
            surprise_strip: &run.surprise_strip,
            mod_call_names: row.calls.iter().map(|call| clean(&call.name)).collect::<Vec<_>>(),
            mod_call_counts: row.calls.iter().map(|call| call.calls).collect::<Vec<_>>(),
            mod_call_us: row.calls.iter().map(ModCallTime::total_us).collect::<Vec<_>>(),
            mod_call_max_us: row.calls.iter().map(ModCallTime::max_us).collect::<Vec<_>>(),
        }
        ReplaceUnlessNull {
            search: row.search.as_deref() => "to_tsvector('simple', coalesce({}, ''))",
            request_extras: row.request_extras.as_deref() => "{}::json",
        }
    };
    query.execute(connection).await.map(drop)
}

/// Returns a statement that writes three tables in one round trip. A null column file or fingerprint keeps the stored one.
fn save_statement(columns: &[SavedColumn]) -> String {
    let (mut names, mut values, mut updates) = (Vec::new(), Vec::new(), vec!["version = runs.version + 1".to_owned()]);
    for (number, SavedColumn { name, value, if_exists }) in (5..).zip(columns) {
        let parameter = format!("${number}");
        names.push(*name);
        values.push(value.replace("{}", &parameter));
        match if_exists {
            IfExists::Keep => {}
            IfExists::Replace => updates.push(format!("{name} = excluded.{name}")),
            IfExists::ReplaceUnlessNull => {
                let new = format!("case when {parameter} is null then runs.{name} else excluded.{name} end");
                updates.push(format!("{name} = {new}"));
            }
        }
    }
    let (names, values, updates) = (names.join(", "), values.join(", "), updates.join(", "));
    format!(
        "with column_file as (
            insert into run_columns (run_id, columns) select $1, $3 where $3::bytea is not null
            on conflict (run_id) do update set columns = excluded.columns
        ), signed as (
            update run_keys set fingerprint = $4 where request_id = $2 and $4::bytea is not null
        )
        insert into runs (run_id, request_id, {names}) values ($1, $2, {values})
        on conflict (run_id) do update set {updates}"
    )
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
