//! Items of stored runs, completely or in pages, and the column file that is computed from them.

use super::pool::PgConnection;
use super::read::{SNAPSHOT, actions, calls, damaged, events, logs};
use super::runs::{by_id, pack, save_columns};
use super::scope::covers;
use super::summary_builder::RunSummaryBuilder;
use super::{Error, Store, extras};
use crate::events::{RunId, RunStatus, Scope, TraceItem};
use crate::trace::document::Numbering;
use std::iter::Peekable;
use std::ops::Range;

/// Maximum events of a page, so that a long run is never completely in memory.
const MAX_PAGE_EVENTS: i64 = 1000;

/// Statement that returns, for the calls, logs and actions of events before `$3`, their number and the range of their indexes,
/// grouped by the page of their event. Pages begin at the events `$2`; page 0 has all earlier events.
const PAGE_ROWS: &str = "
    select kind, page, count(*) as count, min(index) as first, max(index) + 1 as next from (
        select 0 as kind, width_bucket(event_sequence_order, $2::integer[]) as page, call_index as index
        from mod_calls where run_id = $1 and event_sequence_order < $3
        union all
        select 1, width_bucket(c.event_sequence_order, $2), l.log_index
        from mod_logs l join mod_calls c on c.run_id = l.run_id and c.call_index = l.mod_call_sequence
        where l.run_id = $1 and c.run_id = $1 and c.event_sequence_order < $3
        union all
        select 2, width_bucket(c.event_sequence_order, $2), a.action_index
        from actions a join mod_calls c on c.run_id = a.run_id and c.call_index = a.mod_call_sequence
        where a.run_id = $1 and c.run_id = $1 and c.event_sequence_order < $3
    ) items group by kind, page";

/// A row of [`PAGE_ROWS`].
#[derive(sqlx::FromRow)]
struct PageRow {
    kind: i32,
    page: i32,
    count: i64,
    first: i32,
    next: i32,
}

/// A page of a run: a range of events, and the rows that belong to them.
#[derive(Debug, Clone)]
pub struct ItemRange {
    events: Range<i32>,
    /// Numbers of the calls, logs and actions of earlier events.
    numbering: Numbering,
    /// The indexes of its rows are in these ranges, which limit the rows that are read.
    calls: Range<i32>,
    logs: Range<i32>,
    actions: Range<i32>,
}

impl ItemRange {
    /// Returns the next page of a run that Thunder records, whose rows are stored in item order. It begins at an event, and
    /// `numbering` counts the calls, logs and actions of earlier events. Needs no query, unlike [`Store::item_pages`].
    #[must_use]
    pub fn following(events: Range<i32>, numbering: Numbering) -> Self {
        let from = |first: u32| first.cast_signed()..i32::MAX;
        let Numbering { mod_calls, mod_logs, actions } = numbering;
        let end = events.end.min(events.start.saturating_add(MAX_PAGE_EVENTS as i32));
        Self {
            events: events.start..end,
            numbering,
            calls: from(mod_calls),
            logs: from(mod_logs),
            actions: from(actions),
        }
    }

    /// Returns the range of all items.
    fn all() -> Self {
        let [events, calls, logs, actions] = [const { 0..i32::MAX }; 4];
        Self { events, numbering: Numbering::default(), calls, logs, actions }
    }
}

/// The items of a page.
#[derive(Debug)]
pub struct ItemPage {
    /// Numbers of the calls, logs and actions before the first item.
    pub numbering: Numbering,
    /// The items in the order of [`Store::items`].
    pub items: Vec<TraceItem>,
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
        let mut items = Vec::new();
        for range in ranges(&mut transaction, run_id, &[events.start], events.end).await? {
            items.extend(range_items(&mut transaction, run_id, &range).await?);
        }
        Ok(items)
    }

    /// Divides a range of events into pages of 1000 events for [`Store::item_page`]. There is at least one, maybe without
    /// events; none for a run outside the scope. Events that are stored later may be missing.
    ///
    /// # Errors
    /// The database failed.
    pub async fn item_pages(&self, scope: &Scope, run_id: RunId, events: Range<i32>) -> Result<Vec<ItemRange>, Error> {
        let mut transaction = self.inner.pool.begin_with(SNAPSHOT).await?;
        if !covers(&mut transaction, scope, run_id).await? {
            return Ok(Vec::new());
        }
        let (starts, last): (Option<Vec<i32>>, Option<i32>) = sqlx::query_as(
            "select array_agg(sequence_order order by sequence_order) filter (where place % $4 = 0), max(sequence_order)
            from (
                select sequence_order, row_number() over (order by sequence_order) - 1 as place
                from events where run_id = $1 and sequence_order >= $2 and sequence_order < $3
            ) numbered",
        )
        .bind(run_id.0)
        .bind(events.start)
        .bind(events.end)
        .bind(MAX_PAGE_EVENTS)
        .fetch_one(&mut *transaction)
        .await?;
        let later_pages = starts.into_iter().flatten().skip(1);
        let starts: Vec<i32> = std::iter::once(events.start).chain(later_pages).collect();
        // The ranges of rows do not include those that are stored later, so no later events may be read with them.
        let is_unlimited = starts == [0] && events.end == i32::MAX;
        let end = if is_unlimited { events.end } else { last.map_or(events.start, |last| last.saturating_add(1)) };
        ranges(&mut transaction, run_id, &starts, end).await
    }

    /// Returns the items of a page; none for a run outside the scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn item_page(&self, scope: &Scope, run_id: RunId, range: &ItemRange) -> Result<ItemPage, Error> {
        let mut transaction = self.inner.pool.begin_with(SNAPSHOT).await?;
        let items = if covers(&mut transaction, scope, run_id).await? {
            range_items(&mut transaction, run_id, range).await?
        } else {
            Vec::new()
        };
        Ok(ItemPage { numbering: range.numbering, items })
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
        summary.set_has_specified_actions(extras::read(&mut connection, run_id).await?.specified_actions);
        for item in all_items(&mut connection, run_id).await? {
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

/// Returns all items of a run, in the order of [`Store::items`].
pub(super) async fn all_items(connection: &mut PgConnection, run_id: RunId) -> Result<Vec<TraceItem>, Error> {
    range_items(connection, run_id, &ItemRange::all()).await
}

/// Returns the pages that begin at the events `starts`, in ascending order; the last one ends before the event `end`.
async fn ranges(
    connection: &mut PgConnection,
    run_id: RunId,
    starts: &[i32],
    end: i32,
) -> Result<Vec<ItemRange>, Error> {
    if starts == [0] && end == i32::MAX {
        return Ok(vec![ItemRange::all()]);
    }
    let rows: Vec<PageRow> =
        sqlx::query_as(PAGE_ROWS).bind(run_id.0).bind(starts).bind(end).fetch_all(connection).await?;
    let mut counts = vec![[0; 3]; starts.len() + 1];
    let mut indexes = vec![[const { 0..0 }; 3]; starts.len() + 1];
    for PageRow { kind, page, count, first, next } in rows {
        counts[page as usize][kind as usize] = count as u32;
        indexes[page as usize][kind as usize] = first..next;
    }
    let mut ranges = Vec::new();
    let mut numbering = Numbering::default();
    let ends = starts.iter().skip(1).chain([&end]);
    // Page 0 is before the first start.
    for (page, (&start, &end)) in (1..).zip(starts.iter().zip(ends)) {
        let [calls, logs, actions] = counts[page - 1];
        numbering.mod_calls += calls;
        numbering.mod_logs += logs;
        numbering.actions += actions;
        let [calls, logs, actions] = indexes[page].clone();
        ranges.push(ItemRange { events: start..end, numbering, calls, logs, actions });
    }
    Ok(ranges)
}

async fn range_items(connection: &mut PgConnection, run_id: RunId, range: &ItemRange) -> Result<Vec<TraceItem>, Error> {
    let first_call = range.numbering.mod_calls.cast_signed();
    let events = events(connection, run_id, &range.events).await?;
    let mut calls = calls(connection, run_id, &range.events, &range.calls).await?;
    // An ingested document can list its calls in any order. As items, calls follow their events and get new numbers.
    calls.sort_by_key(|(index, call)| (call.event_sequence_order, *index));
    let mut by_index: Vec<(i32, i32)> = calls.iter().zip(first_call..).map(|(call, new)| (call.0, new)).collect();
    by_index.sort_unstable();
    let span = match (by_index.first(), by_index.last()) {
        (Some(first), Some(last)) => first.0..last.0 + 1,
        _ => 0..0,
    };
    let renumber = |old: i32| by_index.binary_search_by_key(&old, |pair| pair.0).ok().map(|at| by_index[at].1);
    let mut logs = logs(connection, run_id, &span, &range.logs).await?;
    logs.retain_mut(|(_, log)| renumber(log.mod_call_sequence).inspect(|new| log.mod_call_sequence = *new).is_some());
    logs.sort_by_key(|(index, log)| (log.mod_call_sequence, *index));
    let mut actions = actions(connection, run_id, &span, &range.actions).await?;
    actions.retain_mut(|(_, action)| {
        renumber(action.mod_call_sequence).inspect(|new| action.mod_call_sequence = *new).is_some()
    });
    // Thunder's own actions have the order 0, so that they keep the order in which they were recorded.
    actions.sort_by_key(|(index, action)| (action.mod_call_sequence, action.action_order, *index));

    let mut items = Vec::with_capacity(events.len() + calls.len() + logs.len() + actions.len());
    let mut calls = calls.into_iter().map(|(_, call)| call).zip(first_call..).peekable();
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
    Ok(items)
}

fn next_matching<'i, T, I: Iterator<Item = T>>(
    items: &'i mut Peekable<I>,
    is_next: impl Fn(&T) -> bool + 'i,
) -> impl Iterator<Item = T> + 'i {
    std::iter::from_fn(move || items.next_if(&is_next))
}
