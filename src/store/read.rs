//! Conversion of rows to items and documents.

use super::measured;
use super::pool::PgConnection;
use super::runs::{by_id, pack, save_columns};
use super::scope::covers;
use super::summary_builder::RunSummaryBuilder;
use super::{Error, Store, extras};
use crate::events::{
    ActionRecord, ActionType, Event, EventType, LogLevel, Measurements, ModCall, ModLog, RawJson, RunId, RunStatus,
    Scope, Surface, TraceItem,
};
use crate::trace::document::{Document, Numbering, RequestMeta};
use serde_json::value::RawValue;
use sqlx::Row;
use sqlx::postgres::PgRow;
use std::iter::Peekable;
use std::ops::Range;

/// A list of values, each with its index within the run.
type Indexed<T> = Vec<(i32, T)>;

/// Maximum events of a page, so that a long run is never completely in memory.
const MAX_PAGE_EVENTS: i64 = 1000;

/// Statement that begins a transaction with a consistent view of all tables, for runs that are growing.
pub(super) const SNAPSHOT: &str = "begin isolation level repeatable read, read only";

/// The items of some events of a run.
#[derive(Debug)]
pub struct ItemPage {
    /// Numbers of the calls, logs and actions before the first item.
    pub numbering: Numbering,
    /// The items in the order of [`Store::items`].
    pub items: Vec<TraceItem>,
    /// The first event of the next page; `None` on the last page.
    pub next: Option<i32>,
}

impl Store {
    /// Returns the items of a range of events, without attention, in item order: each event, then for each of its mod calls
    /// the call, its logs, its actions by `action_order`. Decodes the measurements of events. Returns an empty list for a
    /// run outside the scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn items(&self, scope: &Scope, run_id: RunId, events: Range<i32>) -> Result<Vec<TraceItem>, Error> {
        let mut transaction = self.inner.pool.begin_with(SNAPSHOT).await?;
        if !covers(&mut transaction, scope, run_id).await? {
            return Ok(Vec::new());
        }
        Ok(items(&mut transaction, run_id, events).await?.1)
    }

    /// Returns the items of the first 1000 events of a range; none for a run outside the scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn item_page(&self, scope: &Scope, run_id: RunId, events: Range<i32>) -> Result<ItemPage, Error> {
        let mut transaction = self.inner.pool.begin_with(SNAPSHOT).await?;
        if !covers(&mut transaction, scope, run_id).await? {
            return Ok(ItemPage { numbering: Numbering::default(), items: Vec::new(), next: None });
        }
        // Pages count rows, not event numbers, because events that are committed later belong to the next page.
        let next: Option<i32> = sqlx::query_scalar(
            "select sequence_order from events where run_id = $1 and sequence_order >= $2 and sequence_order < $3
            order by sequence_order offset $4 limit 1",
        )
        .bind(run_id.0)
        .bind(events.start)
        .bind(events.end)
        .bind(MAX_PAGE_EVENTS)
        .fetch_optional(&mut *transaction)
        .await?;
        let (numbering, items) = items(&mut transaction, run_id, events.start..next.unwrap_or(events.end)).await?;
        Ok(ItemPage { numbering, items, next })
    }

    /// Returns the whole run as a document. An ingested run is returned unchanged, a run of this server in the same format.
    /// Returns `None` if there is no such run in the scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn document(&self, scope: &Scope, run_id: RunId) -> Result<Option<Document>, Error> {
        let mut transaction = self.inner.pool.begin_with(SNAPSHOT).await?;
        let Some(run) = by_id(&mut transaction, scope, run_id).await? else { return Ok(None) };
        let mods = (run.surface != Surface::Ingest && !run.mods.is_empty()).then(|| run.mods.join(", "));
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
            extras: extras::read(&mut transaction, run_id).await?,
        };
        let connection = &mut *transaction;
        let events = events(connection, run_id, 0..i32::MAX).await?;
        let mod_calls = without_index(calls(connection, run_id, 0..i32::MAX).await?);
        let mod_logs = without_index(logs(connection, run_id, 0..i32::MAX).await?);
        let actions = without_index(actions(connection, run_id, 0..i32::MAX).await?);
        Ok(Some(Document { request, events, mod_calls, mod_logs, actions }))
    }

    /// Returns the replay's column file of a run (see [`crate::trace::columns`]); `None` if there is no such run in the
    /// scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn columns(&self, scope: &Scope, run_id: RunId) -> Result<Option<Vec<u8>>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !covers(&mut connection, scope, run_id).await? {
            return Ok(None);
        }
        let packed: Option<Vec<u8>> = sqlx::query_scalar(
            "select c.columns from run_columns c join runs r on r.run_id = $1
            where c.run_id = $1 and r.status <> 'running'",
        )
        .bind(run_id.0)
        .fetch_optional(&mut connection)
        .await?;
        if let Some(packed) = packed {
            let columns = zstd::decode_all(packed.as_slice()).map_err(|error| damaged(run_id, error))?;
            return Ok(Some(columns));
        }
        let Some(run) = by_id(&mut connection, scope, run_id).await? else { return Ok(None) };
        let finished = run.status != RunStatus::Running;
        let mut summary = RunSummaryBuilder::from_stored(run, None);
        for item in items(&mut connection, run_id, 0..i32::MAX).await?.1 {
            summary.apply(&item);
        }
        let columns = summary.columns();
        if finished {
            let packed = pack(&columns).map_err(|error| damaged(run_id, error))?;
            save_columns(&mut connection, run_id, &packed).await?;
        }
        Ok(Some(columns))
    }
}

/// Returns the items of a range of events, and the numbering of the items before them.
pub(super) async fn items(
    connection: &mut PgConnection,
    run_id: RunId,
    range: Range<i32>,
) -> Result<(Numbering, Vec<TraceItem>), Error> {
    let before = numbering(connection, run_id, range.start).await?;
    let events = events(connection, run_id, range.clone()).await?;
    let mut calls = calls(connection, run_id, range).await?;
    // An ingested document can list its calls in any order. As items, calls follow their events and get new numbers.
    calls.sort_by_key(|(index, call)| (call.event_sequence_order, *index));
    let mut by_index: Vec<(i32, i32)> =
        calls.iter().zip(before.mod_calls.cast_signed()..).map(|(call, new)| (call.0, new)).collect();
    by_index.sort_unstable();
    let span = match (by_index.first(), by_index.last()) {
        (Some(first), Some(last)) => first.0..last.0 + 1,
        _ => 0..0,
    };
    let renumber = |old: i32| by_index.binary_search_by_key(&old, |pair| pair.0).ok().map(|at| by_index[at].1);
    let mut logs = logs(connection, run_id, span.clone()).await?;
    logs.retain_mut(|(_, log)| renumber(log.mod_call_sequence).inspect(|new| log.mod_call_sequence = *new).is_some());
    logs.sort_by_key(|(index, log)| (log.mod_call_sequence, *index));
    let mut actions = actions(connection, run_id, span).await?;
    actions.retain_mut(|(_, action)| {
        renumber(action.mod_call_sequence).inspect(|new| action.mod_call_sequence = *new).is_some()
    });
    // Thunder's own actions have the order 0, so that they keep the order in which they were recorded.
    actions.sort_by_key(|(index, action)| (action.mod_call_sequence, action.action_order, *index));

    let mut items = Vec::with_capacity(events.len() + calls.len() + logs.len() + actions.len());
    let mut calls = calls.into_iter().map(|(_, call)| call).zip(before.mod_calls.cast_signed()..).peekable();
    let mut logs = logs.into_iter().map(|(_, log)| log).peekable();
    let mut actions = actions.into_iter().map(|(_, action)| action).peekable();
    for event in events {
        let sequence_order = event.sequence_order;
        items.push(TraceItem::Event(event));
        for (call, index) in next_matching(&mut calls, |(call, _)| call.event_sequence_order == sequence_order) {
            items.push(TraceItem::ModCall(call));
            items.extend(next_matching(&mut logs, |log| log.mod_call_sequence == index).map(TraceItem::ModLog));
            items
                .extend(next_matching(&mut actions, |action| action.mod_call_sequence == index).map(TraceItem::Action));
        }
    }
    Ok((before, items))
}

fn next_matching<'i, T, I: Iterator<Item = T>>(
    items: &'i mut Peekable<I>,
    is_next: impl Fn(&T) -> bool + 'i,
) -> impl Iterator<Item = T> + 'i {
    std::iter::from_fn(move || items.next_if(&is_next))
}

fn without_index<T>(list: Indexed<T>) -> Vec<T> {
    list.into_iter().map(|(_, value)| value).collect()
}

async fn numbering(connection: &mut PgConnection, run_id: RunId, before: i32) -> Result<Numbering, Error> {
    if before <= 0 {
        return Ok(Numbering::default());
    }
    let row = sqlx::query(
        "with calls as (select call_index from mod_calls where run_id = $1 and event_sequence_order < $2)
        select (select count(*) from calls) as calls,
            (select count(*) from mod_logs where run_id = $1 and mod_call_sequence in (select call_index from calls)) as logs,
            (select count(*) from actions where run_id = $1 and mod_call_sequence in (select call_index from calls)) as actions",
    )
    .bind(run_id.0)
    .bind(before)
    .fetch_one(connection)
    .await?;
    let count = |column| Ok::<_, sqlx::Error>(row.try_get::<i64, _>(column)? as u32);
    Ok(Numbering { mod_calls: count("calls")?, mod_logs: count("logs")?, actions: count("actions")? })
}

/// Reads the rows of one table within a range with `read`.
async fn list<T>(
    connection: &mut PgConnection,
    (run_id, range): (RunId, Range<i32>),
    select: &'static str,
    read: impl Fn(&PgRow) -> Result<T, sqlx::Error>,
) -> Result<Vec<T>, Error> {
    let select = sqlx::query(select).bind(run_id.0).bind(range.start).bind(range.end);
    let rows = select.fetch_all(connection).await?;
    rows.iter().map(|row| read(row).map_err(|error| damaged(run_id, error))).collect()
}

async fn events(connection: &mut PgConnection, run_id: RunId, range: Range<i32>) -> Result<Vec<Event>, Error> {
    let select =
        "select sequence_order, event_type, step, created_at, prompt_length, tokens_so_far_len, max_steps, input_text,
            sampled_token, token_text, added_tokens, added_token_count, forced, measured, details::text, top_tokens::text
        from events where run_id = $1 and sequence_order >= $2 and sequence_order < $3 order by sequence_order";
    list(connection, (run_id, range), select, event).await
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

/// Returns the calls of a range of events.
async fn calls(connection: &mut PgConnection, run_id: RunId, range: Range<i32>) -> Result<Indexed<ModCall>, Error> {
    let select = "select call_index, event_sequence_order, mod_name, event_type, step, created_at, execution_time_ms,
            exception_occurred, exception_message, exception_traceback
        from mod_calls where run_id = $1 and event_sequence_order >= $2 and event_sequence_order < $3 order by call_index";
    list(connection, (run_id, range), select, |row| {
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

/// Returns the logs of a range of calls.
async fn logs(connection: &mut PgConnection, run_id: RunId, range: Range<i32>) -> Result<Indexed<ModLog>, Error> {
    let select = "select log_index, mod_call_sequence, mod_name, log_message, log_level, created_at
        from mod_logs where run_id = $1 and mod_call_sequence >= $2 and mod_call_sequence < $3 order by log_index";
    list(connection, (run_id, range), select, |row| {
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

/// Returns the actions of a range of calls.
async fn actions(
    connection: &mut PgConnection,
    run_id: RunId,
    range: Range<i32>,
) -> Result<Indexed<ActionRecord>, Error> {
    let select =
        "select action_index, mod_call_sequence, action_type, action_order, created_at, details::text, new_prompt,
            new_length, adjusted_max_steps, token_count, tokens_preview, backtrack_steps, backtrack_token_count,
            logits_shape, temperature, has_tool_calls, tool_calls::text, error_message
        from actions where run_id = $1 and mod_call_sequence >= $2 and mod_call_sequence < $3 order by action_index";
    list(connection, (run_id, range), select, |row| {
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
