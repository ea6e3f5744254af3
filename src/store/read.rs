//! Conversion of rows to the parts of items, and to documents.

use super::measured;
use super::pool::PgConnection;
use super::run_summary::RunSummary;
use super::runs::by_id;
use super::scope::covers;
use super::{Error, Store, extras};
use crate::events::{
    ActionRecord, ActionType, Event, EventType, LogLevel, Measurements, ModCall, ModLog, RawJson, RunId, Scope, Surface,
};
use crate::trace::document::{Document, RequestMeta, RunDetails};
use futures::TryStreamExt;
use serde_json::Value;
use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::ops::Range;

/// A list of values, each with its index within the run.
pub(super) type Indexed<T> = Vec<(i32, T)>;

/// The range of all numbers.
const ALL: Range<i32> = 0..i32::MAX;

/// Statement that begins a transaction with a consistent view of all tables, for runs that are growing.
pub(super) const SNAPSHOT: &str = "begin isolation level repeatable read, read only";

impl Store {
    /// Returns the whole run as a document. An ingested run is returned unchanged, a run of this server in the same format.
    /// Returns `None` if there is no such run in the scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn document(&self, scope: &Scope, run_id: RunId) -> Result<Option<Document>, Error> {
        let mut transaction = self.inner.pool.begin_with(SNAPSHOT).await?;
        let Some(run) = by_id(&mut transaction, scope, run_id).await? else { return Ok(None) };
        let mods = (run.surface != Surface::Ingest && !run.mods.is_empty()).then(|| run.mods.join(", "));
        let mut extras = extras::read(&mut transaction, run_id).await?;
        // Documents are returned as they were ingested.
        if run.surface != Surface::Ingest {
            extras.thunder_run = Some(run_details(&run));
        }
        let request = RequestMeta {
            request_id: run.request_id,
            created_at: Some(run.created_at),
            completed_at: run.completed_at,
            model: run.model,
            user_api_key: run.user_label,
            max_tokens: run.max_tokens,
            temperature: run.temperature,
            mod_text: run.mod_text.or(mods),
            surface: None,
            extras,
        };
        let connection = &mut *transaction;
        let events = events(connection, run_id, &ALL).await?;
        let mod_calls = without_index(calls(connection, run_id, &ALL, &ALL).await?);
        let mod_logs = without_index(logs(connection, run_id, &ALL, &ALL).await?);
        let actions = without_index(actions(connection, run_id, &ALL, &ALL).await?);
        Ok(Some(Document { request, events, mod_calls, mod_logs, actions }))
    }

    /// Returns the causes of a run's end; none for a run outside the scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn end_details(&self, scope: &Scope, run_id: RunId) -> Result<EndDetails, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !covers(&mut connection, scope, run_id).await? {
            return Ok(EndDetails::default());
        }
        let mut details =
            EndDetails { stop_string: last_added(&mut connection, run_id).await?.stopped_by, ..EndDetails::default() };
        let select = "select action_type, tool_calls::text from actions where run_id = $1 and action_type = any($2)
            order by action_index";
        let types = [ActionType::EmitError.as_str(), ActionType::ToolCalls.as_str()];
        let actions = sqlx::query(select).bind(run_id.0).bind(&types[..]).fetch_all(&mut connection).await?;
        for action in &actions {
            if action.try_get::<&str, _>("action_type")? == ActionType::ToolCalls.as_str() {
                details.tool_calls = raw(action, "tool_calls")?;
            } else {
                details.is_mod_error = true;
            }
        }
        Ok(details)
    }
}

/// Returns what the document of a run of this server contains of its summary.
fn run_details(run: &RunSummary) -> RunDetails {
    let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    let count = |count: i32| u32::try_from(count).ok();
    let duration = |us: Option<i64>| us.and_then(|us| u64::try_from(us).ok());
    RunDetails {
        status: Some(run.status),
        finish_reason: run.finish_reason,
        end_cause: run.end_cause,
        message: run.message.clone(),
        seed: run.seed,
        metadata: run.metadata.as_ref().map(|metadata| metadata.iter().filter_map(text).collect()),
        prompt_preview: Some(run.prompt_preview.clone()),
        prompt_tokens: count(run.prompt_tokens),
        cached_tokens: count(run.cached_tokens),
        completion_tokens: count(run.completion_tokens),
        first_token_us: duration(run.first_token_us),
        prompt_us: duration(run.prompt_us),
        generation_us: duration(run.generation_us),
    }
}

/// The causes of a run's end that its summary does not contain.
#[derive(Debug, Default)]
pub struct EndDetails {
    /// The stop string that ended the answer.
    pub stop_string: Option<String>,
    /// True if a mod ended the run with an error.
    pub is_mod_error: bool,
    /// The tool calls with which a mod ended the run.
    pub tool_calls: Option<RawJson>,
}

fn without_index<T>(list: Indexed<T>) -> Vec<T> {
    list.into_iter().map(|(_, value)| value).collect()
}

/// Reads the rows of one table within ranges with `read`.
async fn list<T>(
    connection: &mut PgConnection,
    run_id: RunId,
    ranges: &[&Range<i32>],
    select: &'static str,
    read: impl Fn(&PgRow) -> Result<T, sqlx::Error>,
) -> Result<Vec<T>, Error> {
    let mut select = sqlx::query(select).bind(run_id.0);
    for range in ranges {
        select = select.bind(range.start).bind(range.end);
    }
    let mut rows = select.fetch(connection);
    let mut values = Vec::new();
    while let Some(row) = rows.try_next().await? {
        values.push(read(&row).map_err(|error| damaged(run_id, error))?);
    }
    Ok(values)
}

/// Returns a range of events.
pub(super) async fn events(
    connection: &mut PgConnection,
    run_id: RunId,
    range: &Range<i32>,
) -> Result<Vec<Event>, Error> {
    let select =
        "select sequence_order, event_type, step, created_at, prompt_length, tokens_so_far_len, max_steps, input_text,
            sampled_token, token_text, added_tokens, added_token_count, forced, measured, details::text, top_tokens::text
        from events where run_id = $1 and sequence_order >= $2 and sequence_order < $3 order by sequence_order";
    list(connection, run_id, &[range], select, event).await
}

/// Returns the measurements in the `details` of the newest `Added`. For a run of this server, these are only the values that
/// the column `measured` omits; for a document of Thunder, all.
pub(super) async fn last_added(connection: &mut PgConnection, run_id: RunId) -> Result<Measurements, Error> {
    let details: Option<Option<String>> = sqlx::query_scalar(
        "select details::text from events where run_id = $1 and event_type = 'Added' and added_tokens is distinct from '{}'
            order by sequence_order desc limit 1",
    )
    .bind(run_id.0)
    .fetch_optional(connection)
    .await?;
    let details = details.flatten().map(RawValue::from_string).transpose();
    let details = details.map_err(|error| damaged(run_id, error))?;
    Ok(details.as_ref().map(Measurements::from_details).unwrap_or_default())
}

fn event(row: &PgRow) -> Result<Event, sqlx::Error> {
    let mut details = raw(row, "details")?;
    let from_details = details.as_ref().map(Measurements::from_details);
    let mut measured = from_details.filter(|measured| !measured.is_empty()).map(Box::new);
    if let Some(encoded) = row.try_get::<Option<Vec<u8>>, _>("measured")? {
        let mut decoded = measured::decode(&encoded).ok_or_else(|| unknown_value("measured", "its encoding"))?;
        // For a run of this server, details hold only the values that the encoding omits.
        if let Some(from_details) = measured {
            decoded.prompt = from_details.prompt;
            decoded.stopped_by = from_details.stopped_by;
            decoded.evicted = from_details.evicted;
            decoded.note = from_details.note;
            decoded.discarded = from_details.discarded;
        }
        details = None;
        measured = Some(Box::new(decoded));
    }
    Ok(Event {
        event_type: event_type(row)?,
        step: row.try_get("step")?,
        sequence_order: row.try_get("sequence_order")?,
        created_at: row.try_get("created_at")?,
        details,
        prompt_length: row.try_get("prompt_length")?,
        tokens_so_far_len: row.try_get("tokens_so_far_len")?,
        max_steps: row.try_get("max_steps")?,
        input_text: row.try_get("input_text")?,
        top_tokens: raw(row, "top_tokens")?,
        sampled_token: row.try_get("sampled_token")?,
        token_text: row.try_get("token_text")?,
        added_tokens: row.try_get("added_tokens")?,
        added_token_count: row.try_get("added_token_count")?,
        forced: row.try_get("forced")?,
        measured,
    })
}

/// Returns the calls of a range of events, among a range of calls.
pub(super) async fn calls(
    connection: &mut PgConnection,
    run_id: RunId,
    events: &Range<i32>,
    indexes: &Range<i32>,
) -> Result<Indexed<ModCall>, Error> {
    let select = "select call_index, event_sequence_order, mod_name, event_type, step, created_at, execution_time_ms,
            exception_occurred, exception_message, exception_traceback
        from mod_calls where run_id = $1 and event_sequence_order >= $2 and event_sequence_order < $3
            and call_index >= $4 and call_index < $5 order by call_index";
    list(connection, run_id, &[events, indexes], select, |row| {
        Ok((
            row.try_get("call_index")?,
            ModCall {
                event_sequence_order: row.try_get("event_sequence_order")?,
                mod_name: row.try_get("mod_name")?,
                event_type: event_type(row)?,
                step: row.try_get("step")?,
                created_at: row.try_get("created_at")?,
                execution_time_ms: row.try_get("execution_time_ms")?,
                exception_occurred: row.try_get("exception_occurred")?,
                exception_message: row.try_get("exception_message")?,
                exception_traceback: row.try_get("exception_traceback")?,
            },
        ))
    })
    .await
}

/// Returns the logs of a range of calls, among a range of logs.
pub(super) async fn logs(
    connection: &mut PgConnection,
    run_id: RunId,
    calls: &Range<i32>,
    indexes: &Range<i32>,
) -> Result<Indexed<ModLog>, Error> {
    let select = "select log_index, mod_call_sequence, mod_name, log_message, log_level, created_at
        from mod_logs where run_id = $1 and mod_call_sequence >= $2 and mod_call_sequence < $3
            and log_index >= $4 and log_index < $5 order by log_index";
    list(connection, run_id, &[calls, indexes], select, |row| {
        let level: String = row.try_get("log_level")?;
        Ok((
            row.try_get("log_index")?,
            ModLog {
                mod_call_sequence: row.try_get("mod_call_sequence")?,
                mod_name: row.try_get("mod_name")?,
                log_message: row.try_get("log_message")?,
                log_level: LogLevel::from_name(&level).ok_or_else(|| unknown_value("log_level", &level))?,
                created_at: row.try_get("created_at")?,
            },
        ))
    })
    .await
}

/// Returns the actions of a range of calls, among a range of actions.
pub(super) async fn actions(
    connection: &mut PgConnection,
    run_id: RunId,
    calls: &Range<i32>,
    indexes: &Range<i32>,
) -> Result<Indexed<ActionRecord>, Error> {
    let select =
        "select action_index, mod_call_sequence, action_type, action_order, created_at, details::text, new_prompt,
            new_length, adjusted_max_steps, token_count, tokens_preview, backtrack_steps, backtrack_token_count,
            logits_shape, temperature, has_tool_calls, tool_calls::text, error_message
        from actions where run_id = $1 and mod_call_sequence >= $2 and mod_call_sequence < $3
            and action_index >= $4 and action_index < $5 order by action_index";
    list(connection, run_id, &[calls, indexes], select, |row| {
        let kind: String = row.try_get("action_type")?;
        Ok((
            row.try_get("action_index")?,
            ActionRecord {
                mod_call_sequence: row.try_get("mod_call_sequence")?,
                action_type: ActionType::from_name(&kind).ok_or_else(|| unknown_value("action_type", &kind))?,
                action_order: row.try_get("action_order")?,
                created_at: row.try_get("created_at")?,
                details: raw(row, "details")?,
                new_prompt: row.try_get("new_prompt")?,
                new_length: row.try_get("new_length")?,
                adjusted_max_steps: row.try_get("adjusted_max_steps")?,
                token_count: row.try_get("token_count")?,
                tokens_preview: row.try_get("tokens_preview")?,
                backtrack_steps: row.try_get("backtrack_steps")?,
                backtrack_token_count: row.try_get("backtrack_token_count")?,
                logits_shape: row.try_get("logits_shape")?,
                temperature: row.try_get("temperature")?,
                has_tool_calls: row.try_get("has_tool_calls")?,
                tool_calls: raw(row, "tool_calls")?,
                error_message: row.try_get("error_message")?,
            },
        ))
    })
    .await
}

fn event_type(row: &PgRow) -> Result<EventType, sqlx::Error> {
    let name: &str = row.try_get("event_type")?;
    EventType::from_name(name).ok_or_else(|| unknown_value("event_type", name))
}

fn raw(row: &PgRow, column: &str) -> Result<Option<RawJson>, sqlx::Error> {
    let text: Option<String> = row.try_get(column)?;
    text.map(RawValue::from_string).transpose().map_err(|error| sqlx::Error::Decode(error.into()))
}

fn unknown_value(column: &str, value: &str) -> sqlx::Error {
    sqlx::Error::Decode(format!("{column}: '{value}' is unknown").into())
}

pub(super) fn damaged(run_id: RunId, error: impl std::fmt::Display) -> Error {
    Error::Damaged { run_id, reason: error.to_string() }
}
