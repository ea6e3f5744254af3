//! Conversion of trace items to rows, and their insertion into the large tables, for live runs and ingested documents.
//!
//! Rows are collected by column and inserted with one `unnest` per table, or with [COPY](super::copy). COPY is faster on
//! a Unix socket and several times slower over TCP, where sqlx 0.9 leaves Nagle's algorithm enabled. COPY cannot skip
//! existing rows, so a batch whose first write had an unknown outcome is written with [`InsertMode::SkipExisting`].

use super::copy::{CopyField, Integers, copy};
use super::measured;
use super::pool::PgConnection;
use super::table::{InsertStatements, Table, table};
use super::text::clean;
use crate::events::{
    ActionRecord, AttentionStep, Event, EventType, Measurements, ModCall, ModLog, RawJson, RunId, TraceItem,
};
use crate::trace::document::Numbering;
use chrono::{DateTime, Utc};
use sqlx::postgres::{PgArguments, Postgres};
use sqlx::query::Query;
use std::borrow::Cow;
use std::sync::LazyLock;
use uuid::Uuid;

/// Rows after which a batch is inserted, to limit memory here and in the database.
const MAX_BATCH_ROWS: usize = 20_000;
/// Bytes after which a batch is inserted.
const MAX_BATCH_BYTES: usize = 32 << 20;

type Text<'a> = Cow<'a, str>;
type Time = Option<DateTime<Utc>>;

table! {
    Events<'a> in "events" {
        sequence_order: i32,
        event_type: &'a str,
        step: i32,
        created_at: Time,
        prompt_length: Option<i32>,
        tokens_so_far_len: Option<i32>,
        max_steps: Option<i32>,
        input_text: Option<Text<'a>>,
        sampled_token: Option<i32>,
        token_text: Option<Text<'a>>,
        added_tokens: Option<Integers<'a>> => "integer[]",
        added_token_count: Option<i32>,
        forced: Option<bool>,
        position: Option<i32>,
        elapsed_us: Option<i64>,
        logprob: Option<f32>,
        rank: Option<i32>,
        entropy: Option<f32>,
        measured: Option<Vec<u8>>,
        details: Option<Text<'a>> => "json",
        top_tokens: Option<&'a str> => "json",
    }
}

table! {
    Calls<'a> in "mod_calls" {
        call_index: i32,
        event_sequence_order: i32,
        mod_name: Text<'a>,
        event_type: &'a str,
        step: i32,
        created_at: Time,
        execution_time_ms: Option<f64>,
        exception_occurred: bool,
        exception_message: Option<Text<'a>>,
        exception_traceback: Option<Text<'a>>,
    }
}

table! {
    Logs<'a> in "mod_logs" {
        log_index: i32,
        mod_call_sequence: i32,
        mod_name: Text<'a>,
        log_message: Text<'a>,
        log_level: &'a str,
        created_at: Time,
    }
}

table! {
    Actions<'a> in "actions" {
        action_index: i32,
        mod_call_sequence: i32,
        action_type: &'a str,
        action_order: i32,
        created_at: Time,
        details: Option<&'a str> => "json",
        new_prompt: Option<Text<'a>>,
        new_length: Option<i32>,
        adjusted_max_steps: Option<i32>,
        token_count: Option<i32>,
        tokens_preview: Option<Text<'a>>,
        backtrack_steps: Option<i32>,
        backtrack_token_count: Option<i32>,
        logits_shape: Option<Text<'a>>,
        temperature: Option<f64>,
        has_tool_calls: Option<bool>,
        tool_calls: Option<&'a str> => "json",
        error_message: Option<Text<'a>>,
    }
}

table! {
    Attention<'a> in "attention" {
        sequence_order: i32,
        row_len: i32,
        heads: i32,
        layer_ids: Integers<'static> => "integer[]",
        t0: &'a [u8],
        t1: &'a [u8],
        head_rows: &'a [u8],
    }
}

/// The method that inserts rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InsertMode {
    /// `insert`; none of the rows exists.
    #[default]
    New,
    /// `insert … on conflict do nothing`, which takes twice the time.
    SkipExisting,
    /// `copy`; none of the rows exists.
    Copy,
}

/// A batch of rows for all five tables.
#[derive(Default)]
pub struct Rows<'a> {
    events: Events<'a>,
    calls: Calls<'a>,
    logs: Logs<'a>,
    actions: Actions<'a>,
    attention: Attention<'a>,
    bytes: usize,
    mode: InsertMode,
}

impl<'a> Rows<'a> {
    /// Creates an empty batch.
    pub fn new(mode: InsertMode) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Adds an item. `numbering` holds the next index of each kind and is advanced.
    pub fn item(&mut self, run_id: RunId, item: &'a TraceItem, numbering: &mut Numbering) {
        let next = |count: &mut u32| {
            *count += 1;
            (*count - 1).cast_signed()
        };
        match item {
            TraceItem::Event(event) => self.event(run_id, event),
            TraceItem::ModCall(call) => self.call(run_id, next(&mut numbering.mod_calls), call),
            TraceItem::ModLog(log) => self.log(run_id, next(&mut numbering.mod_logs), log),
            TraceItem::Action(action) => self.action(run_id, next(&mut numbering.actions), action),
            TraceItem::Attention(step) => self.attention(run_id, step),
        }
    }

    /// Adds an event.
    pub fn event(&mut self, run_id: RunId, event: &'a Event) {
        let columns = &mut self.events;
        let measured = event.measured.as_deref();
        let token = measured.and_then(|measured| measured.tokens.first());
        columns.run_id.push(run_id.0);
        columns.sequence_order.push(event.sequence_order);
        columns.event_type.push(event.event_type.as_str());
        columns.step.push(event.step);
        columns.created_at.push(event.created_at);
        columns.prompt_length.push(event.prompt_length);
        columns.tokens_so_far_len.push(event.tokens_so_far_len);
        columns.max_steps.push(event.max_steps);
        columns.input_text.push(event.input_text.as_deref().map(clean));
        columns.sampled_token.push(event.sampled_token);
        columns.token_text.push(event.token_text.as_deref().map(clean));
        columns.added_tokens.push(event.added_tokens.as_deref().map(|tokens| Integers(tokens.into())));
        columns.added_token_count.push(event.added_token_count);
        columns.forced.push(event.forced);
        columns.position.push(measured.and_then(|measured| i32::try_from(measured.position?).ok()));
        columns.elapsed_us.push(measured.and_then(|measured| i64::try_from(measured.elapsed_us?).ok()));
        columns.logprob.push(token.and_then(|token| token.logprob));
        columns.rank.push(token.and_then(|token| i32::try_from(token.rank?).ok()));
        columns.entropy.push(match event.event_type {
            EventType::ForwardPass => measured.and_then(|measured| measured.entropy),
            _ => token.and_then(|token| token.entropy),
        });
        // Details of an ingested event contain all measurements and are stored unchanged.
        let own = measured.filter(|_| event.details.is_none());
        let encoded = own.map(measured::encode);
        let details = event.details.as_deref().map(|details| Cow::Borrowed(details.get()));
        let details = details.or_else(|| own.and_then(remaining_details).map(Cow::Owned));
        let texts = [event.input_text.as_deref(), event.token_text.as_deref(), details.as_deref()];
        let tokens = event.added_tokens.as_ref().map_or(0, |tokens| size_of_val(tokens.as_slice()));
        self.bytes += 200 + encoded.as_ref().map_or(0, Vec::len) + text_bytes(texts) + tokens;
        columns.measured.push(encoded);
        columns.details.push(details);
        columns.top_tokens.push(count_text(&mut self.bytes, event.top_tokens.as_ref()));
    }

    /// Adds a mod call.
    pub fn call(&mut self, run_id: RunId, index: i32, call: &'a ModCall) {
        let columns = &mut self.calls;
        columns.run_id.push(run_id.0);
        columns.call_index.push(index);
        columns.event_sequence_order.push(call.event_sequence_order);
        columns.mod_name.push(clean(&call.mod_name));
        columns.event_type.push(call.event_type.as_str());
        columns.step.push(call.step);
        columns.created_at.push(call.created_at);
        columns.execution_time_ms.push(call.execution_time_ms);
        columns.exception_occurred.push(call.exception_occurred);
        columns.exception_message.push(call.exception_message.as_deref().map(clean));
        columns.exception_traceback.push(call.exception_traceback.as_deref().map(clean));
        let texts = [Some(&*call.mod_name), call.exception_message.as_deref(), call.exception_traceback.as_deref()];
        self.bytes += 150 + text_bytes(texts);
    }

    /// Adds a log line.
    pub fn log(&mut self, run_id: RunId, index: i32, log: &'a ModLog) {
        let columns = &mut self.logs;
        columns.run_id.push(run_id.0);
        columns.log_index.push(index);
        columns.mod_call_sequence.push(log.mod_call_sequence);
        columns.mod_name.push(clean(&log.mod_name));
        columns.log_message.push(clean(&log.log_message));
        columns.log_level.push(log.log_level.as_str());
        columns.created_at.push(log.created_at);
        self.bytes += 80 + log.mod_name.len() + log.log_message.len();
    }

    /// Adds an action.
    pub fn action(&mut self, run_id: RunId, index: i32, action: &'a ActionRecord) {
        let columns = &mut self.actions;
        columns.run_id.push(run_id.0);
        columns.action_index.push(index);
        columns.mod_call_sequence.push(action.mod_call_sequence);
        columns.action_type.push(action.action_type.as_str());
        columns.action_order.push(action.action_order);
        columns.created_at.push(action.created_at);
        columns.details.push(count_text(&mut self.bytes, action.details.as_ref()));
        columns.new_prompt.push(action.new_prompt.as_deref().map(clean));
        columns.new_length.push(action.new_length);
        columns.adjusted_max_steps.push(action.adjusted_max_steps);
        columns.token_count.push(action.token_count);
        columns.tokens_preview.push(action.tokens_preview.as_deref().map(clean));
        columns.backtrack_steps.push(action.backtrack_steps);
        columns.backtrack_token_count.push(action.backtrack_token_count);
        columns.logits_shape.push(action.logits_shape.as_deref().map(clean));
        columns.temperature.push(action.temperature);
        columns.has_tool_calls.push(action.has_tool_calls);
        columns.tool_calls.push(count_text(&mut self.bytes, action.tool_calls.as_ref()));
        columns.error_message.push(action.error_message.as_deref().map(clean));
        let texts = [&action.new_prompt, &action.tokens_preview, &action.logits_shape, &action.error_message];
        self.bytes += 200 + text_bytes(texts.map(Option::as_deref));
    }

    fn attention(&mut self, run_id: RunId, step: &'a AttentionStep) {
        let columns = &mut self.attention;
        columns.run_id.push(run_id.0);
        columns.sequence_order.push(step.sequence_order);
        columns.row_len.push(step.row_len.cast_signed());
        columns.heads.push(step.heads.into());
        columns.layer_ids.push(Integers(step.layer_ids.iter().map(|&layer| layer.into()).collect()));
        columns.t0.push(&step.t0);
        columns.t1.push(&step.t1);
        columns.head_rows.push(&step.head_rows);
        self.bytes += step.t0.len() + step.t1.len() + step.head_rows.len() + 100;
    }

    /// Inserts all rows if the batch has reached its maximum size.
    pub async fn insert_if_large(&mut self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        if self.is_large() { self.insert(connection).await } else { Ok(()) }
    }

    fn is_large(&self) -> bool {
        let rows = self.events.len() + self.calls.len() + self.logs.len() + self.actions.len();
        rows >= MAX_BATCH_ROWS || self.bytes >= MAX_BATCH_BYTES
    }

    /// Inserts all rows and empties the batch.
    pub async fn insert(&mut self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let rows = std::mem::replace(self, Self::new(self.mode));
        insert(connection, &rows.events, self.mode).await?;
        insert(connection, &rows.calls, self.mode).await?;
        insert(connection, &rows.logs, self.mode).await?;
        insert(connection, &rows.actions, self.mode).await?;
        insert(connection, &rows.attention, self.mode).await
    }
}

async fn insert<T: Table>(connection: &mut PgConnection, table: &T, mode: InsertMode) -> Result<(), sqlx::Error> {
    let statement: &'static str = match mode {
        _ if table.len() == 0 => return Ok(()),
        InsertMode::Copy => return copy(connection, table).await,
        InsertMode::New => &T::insert_statements().new,
        InsertMode::SkipExisting => &T::insert_statements().skip_existing,
    };
    table.bind(sqlx::query(statement)).execute(connection).await.map(drop)
}

/// Returns the measurements that [`measured::encode`] omits, as JSON.
fn remaining_details(measured: &Measurements) -> Option<String> {
    if measured.prompt.is_none()
        && measured.stopped_by.is_none()
        && measured.evicted.is_none()
        && measured.note.is_none()
        && measured.discarded == 0
    {
        return None;
    }
    let rest = Measurements {
        prompt: measured.prompt.clone(),
        stopped_by: measured.stopped_by.clone(),
        evicted: measured.evicted.clone(),
        note: measured.note.clone(),
        discarded: measured.discarded,
        ..Measurements::default()
    };
    serde_json::to_string(&rest).ok()
}

fn text_bytes<const N: usize>(texts: [Option<&str>; N]) -> usize {
    texts.into_iter().flatten().map(str::len).sum()
}

fn count_text<'a>(bytes: &mut usize, json: Option<&'a RawJson>) -> Option<&'a str> {
    let text = json?.get();
    *bytes += text.len();
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::{Attention, MAX_BATCH_BYTES, Rows, Table};
    use crate::events::{ActionRecord, ActionType, Event, EventType, RunId};

    #[test]
    fn long_texts_and_token_lists_make_a_batch_large() {
        let text = || Some("x".repeat(MAX_BATCH_BYTES));
        let event = |change: fn(&mut Event)| {
            let mut event = Event::new(EventType::Added, 0, 0, None);
            change(&mut event);
            event
        };
        let events = [
            Event { input_text: text(), ..event(|_| {}) },
            Event { token_text: text(), ..event(|_| {}) },
            event(|event| event.added_tokens = Some(vec![1; MAX_BATCH_BYTES / 4])),
        ];
        for event in &events {
            let mut rows = Rows::default();
            rows.event(RunId::now(), event);
            assert!(rows.is_large());
        }
        let mut action = ActionRecord::new(0, ActionType::EmitError, None);
        action.error_message = text();
        let mut rows = Rows::default();
        rows.action(RunId::now(), 0, &action);
        assert!(rows.is_large());
    }

    #[test]
    fn insert_statement_casts_columns_that_are_sent_as_text() {
        let expected = "insert into attention (run_id, sequence_order, row_len, heads, layer_ids, t0, t1, head_rows) \
                        select run_id, sequence_order, row_len, heads, layer_ids::integer[], t0, t1, head_rows \
                        from unnest($1, $2, $3, $4, $5, $6, $7, $8) \
                        as r (run_id, sequence_order, row_len, heads, layer_ids, t0, t1, head_rows)";
        assert_eq!(Attention::insert_statements().new, expected);
        assert_eq!(Attention::insert_statements().skip_existing, format!("{expected} on conflict do nothing"));
    }
}
