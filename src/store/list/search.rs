//! The search for runs with the indexes of all terms, in windows of run ids from the newest to the oldest.

use super::{Examination, Listing, NOT_DELETED, Progress, push_examination};
use crate::store::Error;
use crate::store::filter::{Branch, IdRange, SearchPlan};
use crate::store::pool::PgConnection;
use crate::store::scope::push_owned;
use sqlx::{Postgres, QueryBuilder};
use uuid::Uuid;

/// Number of the newest runs from which the shares of runs with words and labels are estimated.
const SAMPLE_RUNS: i64 = 1000;

/// Minimum and maximum number of runs in the first window of the search.
const FIRST_WINDOW: (f64, f64) = (10_000.0, 100_000.0);

/// Maximum growth in percent from one window to the next. Beyond it, the next window covers all remaining runs.
const MAX_GROWTH: u128 = 1600;

/// Minimum width from which the next window is estimated: the ids of one second.
const MIN_WINDOW: u128 = 1000 << 80;

/// Maximum number of runs with a matching request id that are looked up before the search.
const MAX_REQUEST_MATCHES: i64 = 2000;

/// Settings for the search: plans read only runs that indexes find, and get memory for the entries of the indexes.
const SEARCH_SETTINGS: &str = "set local enable_indexscan = off; set local enable_seqscan = off; set local jit = off; \
                               set local max_parallel_workers_per_gather = 0; set local work_mem = '64MB'";

/// Statement that reads the frequencies of words and labels from the statistics of PostgreSQL.
const FREQUENCIES: &str = "
    with common as materialized (
        select attname, element, frequency
        from pg_stats, unnest(most_common_elems::text::text[], most_common_elem_freqs) as common (element, frequency)
        where tablename = 'runs' and schemaname = any(current_schemas(false)) and attname in ('search', 'labels')
    )
    select coalesce(sum(frequency), 0)::float8
    from unnest($1::text[], $2::text[]) with ordinality as wanted (attname, start, place)
    left join common on common.attname = wanted.attname
        and (element = start or common.attname = 'search' and starts_with(element, start))
    group by place order by place";

/// Selects the terms for which the search uses an index. Returns the maximum share of runs that match all of these terms.
pub(super) async fn choose_indexes(connection: &mut PgConnection, plan: &mut SearchPlan) -> Result<f64, Error> {
    let wanted = plan.frequency_terms();
    let mut shares = newest_shares(connection, &wanted).await?;
    if !wanted.is_empty() {
        let overall: Vec<f64> = sqlx::query_scalar(FREQUENCIES)
            .bind(wanted.iter().map(|(_, column, _)| *column).collect::<Vec<_>>())
            .bind(wanted.iter().map(|(_, _, start)| start.as_str()).collect::<Vec<_>>())
            .fetch_all(&mut *connection)
            .await?;
        for (share, overall) in shares.iter_mut().zip(overall) {
            *share = share.max(overall);
        }
    }
    let indexes = wanted.iter().map(|(index, ..)| *index);
    let lowest = plan.set_frequencies(&indexes.zip(shares).collect::<Vec<_>>());
    for (index, pattern) in plan.request_patterns() {
        let runs: Vec<Uuid> = sqlx::query_scalar("select run_id from run_keys where request_id ilike $1 limit $2")
            .bind(pattern)
            .bind(MAX_REQUEST_MATCHES + 1)
            .fetch_all(&mut *connection)
            .await?;
        plan.set_request_matches(index, (runs.len() <= MAX_REQUEST_MATCHES as usize).then_some(runs));
    }
    Ok(lowest)
}

/// Returns the share of the newest runs that have each of these words and labels. PostgreSQL's own statistics do not
/// suffice: they contain only the most common words, few of which may start with the searched prefix.
async fn newest_shares(
    connection: &mut PgConnection,
    wanted: &[(usize, &'static str, String)],
) -> Result<Vec<f64>, Error> {
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let mut sql = QueryBuilder::<Postgres>::new("select array[");
    for (number, (_, column, start)) in wanted.iter().enumerate() {
        sql.push(if number > 0 { ", " } else { "" }).push("coalesce(avg(coalesce(");
        if *column == "search" {
            sql.push("search @@ (nullif(plainto_tsquery('simple', ").push_bind(start.clone());
            sql.push(")::text, '') || ':*')::tsquery");
        } else {
            sql.push("labels @> array[").push_bind(start.clone()).push("]");
        }
        sql.push(", false)::integer), 0)::float8");
    }
    sql.push("] from (select search, labels from runs order by run_id desc limit ").push_bind(SAMPLE_RUNS);
    sql.push(") as newest");
    Ok(sql.build_query_scalar().fetch_one(connection).await?)
}

/// The run ids at the ends of the windows of a search.
struct WindowEnds {
    newest: Uuid,
    /// First id of the first window.
    first: Uuid,
    oldest: Uuid,
}

/// The ids from `lower` up to `upper`; without `lower`, all older ones.
struct Window {
    lower: Option<Uuid>,
    upper: Uuid,
}

/// The size of the next window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum NextWindow {
    /// Percent of the last window, or of [`MIN_WINDOW`] if that is larger.
    Percent(u128),
    /// All remaining runs.
    Rest,
}

impl Window {
    fn new(lower: Uuid, upper: Uuid, ends: &WindowEnds) -> Self {
        Self { lower: Some(lower).filter(|lower| *lower > ends.oldest), upper }
    }

    /// Returns the window below this one; `None` if no run is older.
    fn next(&self, size: NextWindow, ends: &WindowEnds) -> Option<Self> {
        let upper = self.lower?;
        let width = self.upper.as_u128().saturating_sub(upper.as_u128()).max(MIN_WINDOW);
        let lower = match size {
            NextWindow::Percent(percent) => {
                upper.as_u128().saturating_sub((width / 100).saturating_mul(percent.max(1)))
            }
            NextWindow::Rest => 0,
        };
        Some(Self::new(Uuid::from_u128(lower), upper, ends))
    }
}

/// Searches the runs that are older than those of the probe. `frequency` is the result of [`choose_indexes`].
pub(super) async fn search(
    connection: &mut PgConnection,
    listing: &Listing<'_>,
    progress: Progress,
    frequency: f64,
) -> Result<Progress, Error> {
    let max_candidates = listing.plan.max_candidates();
    let mut range = listing.plan.id_range().filter(|_| listing.branch == Branch::Ids).unwrap_or_default();
    range.until = progress.searched_until.into_iter().chain(range.until).min();
    let first_window = max_candidates.map_or(0.0, |max| max as f64 / frequency).clamp(FIRST_WINDOW.0, FIRST_WINDOW.1);
    let ends = window_ends(connection, range, first_window as i64).await?;
    sqlx::raw_sql(SEARCH_SETTINGS).execute(&mut *connection).await?;
    match max_candidates {
        Some(budget) => search_checked(connection, listing, progress, &ends, budget).await,
        None => search_unchecked(connection, listing, progress, &ends).await,
    }
}

/// Searches with conditions that must be checked for each candidate, until `budget` candidates are checked.
async fn search_checked(
    connection: &mut PgConnection,
    listing: &Listing<'_>,
    mut progress: Progress,
    ends: &WindowEnds,
    mut budget: i64,
) -> Result<Progress, Error> {
    let mut window = Window::new(ends.first, ends.newest, ends);
    loop {
        let missing = listing.wanted - progress.ids.len();
        let examined = examine_window(connection, listing, &window, ends, &progress, budget).await?;
        let found = examined.matches.len();
        progress.ids.extend(examined.matches);
        if found == missing {
            progress.searched_until = progress.ids.last().copied();
            return Ok(progress);
        }
        budget = budget.saturating_sub(examined.candidates);
        if budget == 0 {
            progress.searched_until = examined.last;
            return Ok(progress);
        }
        progress.searched_until = window.lower;
        let affordable = (100 * budget).checked_div(examined.candidates);
        let affordable =
            affordable.map_or(NextWindow::Rest, |percent| NextWindow::Percent(percent.unsigned_abs().into()));
        let size = affordable.min(next_window(found, missing - found));
        let Some(next) = window.next(size, ends) else { return Ok(progress) };
        window = next;
    }
}

/// Searches with conditions that the indexes decide.
async fn search_unchecked(
    connection: &mut PgConnection,
    listing: &Listing<'_>,
    mut progress: Progress,
    ends: &WindowEnds,
) -> Result<Progress, Error> {
    // The probe counts as a window if its matches allow an estimate of the frequency.
    let probed = progress.ids.first().map(|first_match| Window { lower: progress.searched_until, upper: *first_match });
    let found = progress.ids.len();
    let after_probe = probed.and_then(|probed| probed.next(next_unchecked_window(found, listing.wanted - found), ends));
    let mut window = after_probe.unwrap_or_else(|| Window::new(ends.first, ends.newest, ends));
    let mut min_candidates = 0;
    loop {
        let missing = listing.wanted - progress.ids.len();
        let max_candidates = (missing as i64).max(min_candidates);
        let examined = examine_window(connection, listing, &window, ends, &progress, max_candidates).await?;
        let found = examined.matches.len();
        progress.ids.extend(examined.matches);
        if found == missing {
            progress.searched_until = progress.ids.last().copied();
            return Ok(progress);
        }
        if examined.candidates == max_candidates {
            progress.searched_until = examined.last;
            // Some candidates were deleted. The rest of the window follows, in few statements even if many are.
            min_candidates = examined.candidates.saturating_mul(2);
            continue;
        }
        progress.searched_until = window.lower;
        let Some(next) = window.next(next_unchecked_window(found, missing - found), ends) else { return Ok(progress) };
        window = next;
    }
}

/// Returns the size of the next window that is expected to contain twice the missing matches.
fn next_window(found: usize, missing: usize) -> NextWindow {
    (200 * missing).checked_div(found).map_or(NextWindow::Rest, |percent| NextWindow::Percent(percent as u128))
}

/// Returns [`next_window`] for candidates that need no check: all remaining runs if the growth exceeds [`MAX_GROWTH`].
fn next_unchecked_window(found: usize, missing: usize) -> NextWindow {
    match next_window(found, missing) {
        NextWindow::Percent(percent) if percent > MAX_GROWTH => NextWindow::Rest,
        size => size,
    }
}

/// Returns the ends of windows on the runs of a range; the first window has `rows` runs. With fewer runs, the first window
/// covers all of them.
async fn window_ends(connection: &mut PgConnection, range: IdRange, rows: i64) -> Result<WindowEnds, Error> {
    let mut sql = QueryBuilder::<Postgres>::new("");
    for (number, (order, offset)) in [("desc", 0), ("desc", rows), ("asc", 0)].into_iter().enumerate() {
        sql.push(if number > 0 { " union all (" } else { "(" });
        sql.push("select run_id from runs where true");
        range.push_inside(&mut sql);
        sql.push(" order by run_id ").push(order).push(" offset ").push_bind(offset).push(" limit 1)");
    }
    let mut ends: Vec<Uuid> = sql.build_query_scalar().fetch_all(connection).await?;
    ends.sort_unstable();
    Ok(match *ends.as_slice() {
        [oldest, first, newest] => WindowEnds { newest, first, oldest },
        [oldest, newest] => WindowEnds { newest, first: oldest, oldest },
        _ => WindowEnds { newest: Uuid::nil(), first: Uuid::nil(), oldest: Uuid::nil() },
    })
}

/// Examines up to `max_candidates` runs of a window, without those that are searched already.
async fn examine_window(
    connection: &mut PgConnection,
    listing: &Listing<'_>,
    window: &Window,
    ends: &WindowEnds,
    progress: &Progress,
    max_candidates: i64,
) -> Result<Examination, Error> {
    // The last of several windows covers most runs, so the plan uses no index for the condition on ids.
    let hides_ids = window.lower.is_none() && ends.first > ends.oldest && listing.has_several_id_indexes();
    let range = IdRange { from: window.lower, until: progress.searched_until };
    let mut sql = QueryBuilder::<Postgres>::new("");
    let push_candidates = |sql: &mut QueryBuilder<Postgres>| {
        sql.push(if hides_ids { " and (true" } else { "" });
        range.push_inside(sql);
        listing.plan.push_branch(listing.branch, sql);
        sql.push(if hides_ids { ") is true" } else { "" });
        push_owned(sql, listing.scope);
        listing.plan.push_indexed(sql);
        ""
    };
    let push_checks = |sql: &mut QueryBuilder<Postgres>| {
        sql.push(NOT_DELETED);
        listing.plan.push_checked(sql);
    };
    let missing = listing.wanted - progress.ids.len();
    push_examination(&mut sql, listing.order, push_candidates, max_candidates, push_checks, missing);
    Ok(sql.build_query_as().fetch_one(connection).await?)
}
