//! The run list: the newest runs that match a filter, in pages.
//!
//! A filter is evaluated in two steps. The probe examines the newest runs that an index returns in list order, which is
//! enough for filters that many runs match. The search combines the indexes of all terms, which return runs in no order, in
//! windows of run ids from the newest to the oldest, and checks the candidates for the conditions without an index. A page
//! ends early when too many candidates were checked; its `next` continues there. Neither step reads more than a few thousand
//! runs, and no statement allows a plan that reads all of them.

use super::filter::{Branch, Filter};
use super::pool::{PgConnection, PgPool};
use super::runs::{RunSummary, select_runs};
use super::scope::{Owner, owner_branches, push_owned, push_owner};
use super::{Error, Store};
use crate::events::{RunId, Scope, system};
use serde::Serialize;
use sqlx::{Postgres, QueryBuilder};
use uuid::Uuid;

/// Maximum runs per page.
pub const MAX_PAGE: u32 = 500;

/// Default number of runs per page.
const DEFAULT_PAGE: u32 = 50;

/// Number of runs that the probe examines, divided among the parts of a filter.
const PROBED: i64 = 1500;

/// Number of runs in the first window of the search.
const WINDOW: i64 = 10_000;

/// Maximum growth from one window to the next; the alternative is a window of all remaining runs.
const MAX_GROWTH: u128 = 16;

/// Maximum number of model names, and of sets of mods, that are matched by name before the runs.
const MAX_NAMES: i32 = 200;

/// Maximum number of runs that are found by a part of their request ids before the search.
const MAX_REQUESTS: i64 = 2000;

/// Settings for the search: plans read only runs found by indexes, and there is memory for their entries.
const SEARCH_SETTINGS: &str = "set local enable_indexscan = off; set local enable_seqscan = off; set local jit = off; \
                               set local max_parallel_workers_per_gather = 0; set local work_mem = '64MB'";

/// A query of the run list, newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunQuery {
    /// A filter text, see [`super::filter`]; empty for all runs.
    pub q: String,
    /// Only runs older than this one; [`RunPage::next`] of the previous page.
    pub before: Option<RunId>,
    /// Maximum runs to return, from 1 to [`MAX_PAGE`]; 0 for the default of 50.
    pub limit: u32,
}

/// A page of the run list, newest first.
#[derive(Debug, Clone, Serialize)]
pub struct RunPage {
    /// The runs.
    pub runs: Vec<RunSummary>,
    /// Value of [`RunQuery::before`] for the next page; `None` on the last one. It is also set on a page with fewer runs than
    /// its limit if older runs were not searched yet.
    pub next: Option<RunId>,
}

impl Store {
    /// Returns a page of the runs that the scope covers, newest first.
    ///
    /// # Errors
    /// [`Error::BadFilter`], or the database failed.
    pub async fn runs(&self, scope: &Scope, query: &RunQuery) -> Result<RunPage, Error> {
        let mut filter = Filter::parse(&query.q, system::now())?;
        if filter.has_models()
            && let Some(models) = self.names("select model_names($1)").await?
        {
            filter.resolve_models(&models);
        }
        if filter.has_mods()
            && let Some(sets) = self.names("select mod_sets($1)").await?
        {
            filter.resolve_mods(&sets);
        }
        let limit = if query.limit == 0 { DEFAULT_PAGE } else { query.limit.min(MAX_PAGE) } as usize;
        let Progress { mut ids, searched_until } =
            self.find_ids(scope, filter, query.before.map(|run| run.0), limit + 1).await?;
        let next = if ids.len() > limit { Some(ids[limit - 1]) } else { searched_until };
        ids.truncate(limit);
        let read = select_runs!("null::text", "where run_id = any($1) order by run_id desc");
        let runs = sqlx::query_as(read).bind(ids).fetch_all(&self.inner.pool).await?;
        Ok(RunPage { runs, next: next.map(RunId) })
    }

    async fn find_ids(
        &self,
        scope: &Scope,
        mut filter: Filter,
        before: Option<Uuid>,
        wanted: usize,
    ) -> Result<Progress, Error> {
        let probed = probe(&self.inner.pool, &Listing { scope, filter: &filter, wanted }, before).await?;
        if probed.ids.len() >= wanted || probed.searched_until.is_none() {
            return Ok(probed);
        }
        let mut transaction = self.inner.pool.begin().await?;
        look_up(&mut transaction, &mut filter).await?;
        let found = search(&mut transaction, &Listing { scope, filter: &filter, wanted }, probed).await?;
        transaction.rollback().await?;
        Ok(found)
    }

    /// Returns the names that runs have; `None` if there are more than [`MAX_NAMES`].
    async fn names(&self, select: &'static str) -> Result<Option<Vec<String>>, Error> {
        let names: Vec<String> = sqlx::query_scalar(select).bind(MAX_NAMES + 1).fetch_all(&self.inner.pool).await?;
        Ok(i32::try_from(names.len()).is_ok_and(|count| count <= MAX_NAMES).then_some(names))
    }
}

/// The search for one page.
struct Listing<'f> {
    scope: &'f Scope,
    filter: &'f Filter,
    wanted: usize,
}

/// The state of a search from the newest runs to older ones.
struct Progress {
    /// Matches found so far, newest first.
    ids: Vec<Uuid>,
    /// The oldest searched id; `None` if all runs are searched.
    searched_until: Option<Uuid>,
}

/// The result of [`push_examination`].
#[derive(sqlx::FromRow)]
struct Examined {
    /// Matches, newest first.
    matches: Vec<Uuid>,
    /// Number of candidates.
    candidates: i64,
    /// The oldest candidate.
    oldest: Option<Uuid>,
}

/// Appends a statement that reads the newest candidates and returns the matches among them as [`Examined`].
fn push_examination(
    sql: &mut QueryBuilder<Postgres>,
    push_candidates: impl FnOnce(&mut QueryBuilder<Postgres>) -> &'static str,
    max_candidates: i64,
    push_checks: impl FnOnce(&mut QueryBuilder<Postgres>),
    wanted: usize,
) {
    sql.push("(with candidates as materialized (select run_id, (true");
    push_checks(sql);
    sql.push(") as matches from (select * from runs where true");
    let order = push_candidates(sql);
    sql.push(" order by ").push(order).push("run_id desc limit ").push_bind(max_candidates);
    sql.push(") as runs) select array(select run_id from candidates where matches order by run_id desc limit ");
    sql.push_bind(wanted as i64);
    sql.push(") as matches, (select count(*) from candidates) as candidates, ");
    sql.push("(select run_id from candidates order by run_id limit 1) as oldest)");
}

fn push_before(sql: &mut QueryBuilder<Postgres>, before: Option<Uuid>) {
    if let Some(before) = before {
        sql.push(" and run_id < ").push_bind(before);
    }
}

/// Examines the newest runs of each part of the filter.
async fn probe(pool: &PgPool, listing: &Listing<'_>, before: Option<Uuid>) -> Result<Progress, Error> {
    let Listing { scope, filter, wanted } = *listing;
    let mut branches = Vec::new();
    for part in filter.split() {
        let driver = part.driver();
        let owners = if driver.is_none() { owner_branches(scope) } else { vec![Owner::InScope] };
        branches.extend(owners.into_iter().map(|owner| (part.clone(), driver, owner, Branch::Ids)));
        if part.span().is_some() {
            branches.push((part, None, Owner::InScope, Branch::Displaced));
        }
    }
    if branches.is_empty() {
        return Ok(Progress { ids: Vec::new(), searched_until: None });
    }
    let probed = (PROBED / branches.len() as i64).max(wanted as i64);
    let probed = if filter.is_empty() { wanted as i64 } else { probed };
    let mut sql = QueryBuilder::<Postgres>::new("");
    for (number, (part, driver, owner, branch)) in branches.iter().enumerate() {
        sql.push(if number > 0 { " union all " } else { "" });
        let push_candidates = |sql: &mut QueryBuilder<Postgres>| {
            let by_driver = driver.map(|driver| part.push_driver(driver, sql));
            let by_owner = push_owner(sql, owner);
            push_before(sql, before);
            if let Some(span) = part.span() {
                span.push(*branch, sql);
            }
            by_driver.unwrap_or(by_owner)
        };
        let push_checks = |sql: &mut QueryBuilder<Postgres>| {
            push_owned(sql, scope);
            part.push_all(sql);
        };
        push_examination(&mut sql, push_candidates, probed, push_checks, wanted);
    }
    let examined: Vec<Examined> = sql.build_query_as().fetch_all(pool).await?;
    // A branch with further runs is searched down to its oldest candidate, and the whole filter down to the newest of
    // these candidates.
    let unfinished = examined.iter().filter(|branch| branch.candidates >= probed);
    let searched_until = unfinished.filter_map(|branch| branch.oldest).max();
    let mut ids: Vec<Uuid> = examined.into_iter().flat_map(|branch| branch.matches).collect();
    ids.retain(|id| searched_until.is_none_or(|until| *id >= until));
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids.truncate(wanted);
    Ok(Progress { ids, searched_until })
}

/// Decides for which terms the search uses an index.
async fn look_up(connection: &mut PgConnection, filter: &mut Filter) -> Result<(), Error> {
    for (place, column, start) in filter.frequencies() {
        let frequency: f64 = sqlx::query_scalar(
            "select coalesce(sum(frequency), 0)::float8
            from pg_stats, unnest(most_common_elems::text::text[], most_common_elem_freqs) as common (element, frequency)
            where tablename = 'runs' and schemaname = any(current_schemas(false)) and attname = $1
                and (element = $2 or $1 = 'search' and starts_with(element, $2))",
        )
        .bind(column)
        .bind(start)
        .fetch_one(&mut *connection)
        .await?;
        filter.set_frequency(place, frequency);
    }
    for (place, pattern) in filter.requests() {
        let runs: Vec<Uuid> = sqlx::query_scalar("select run_id from run_keys where request_id ilike $1 limit $2")
            .bind(pattern)
            .bind(MAX_REQUESTS + 1)
            .fetch_all(&mut *connection)
            .await?;
        filter.set_requests(place, (runs.len() <= MAX_REQUESTS as usize).then_some(runs));
    }
    Ok(())
}

/// Searches the runs below those that the probe has examined.
async fn search(
    connection: &mut PgConnection,
    listing: &Listing<'_>,
    mut progress: Progress,
) -> Result<Progress, Error> {
    let max_candidates = listing.filter.max_candidates();
    let mut budget = max_candidates.unwrap_or(i64::MAX);
    // Above the span are displaced runs only: they belong to the first window.
    let span_end = listing.filter.span().and_then(|span| span.until);
    let below = progress.searched_until.into_iter().chain(span_end).min();
    let WindowEnds { newest, first, oldest } = window_ends(connection, below).await?;
    sqlx::raw_sql(SEARCH_SETTINGS).execute(&mut *connection).await?;
    let (mut upper, mut from) = (newest, first);
    loop {
        let lower = Some(from).filter(|from| *from > oldest);
        let missing = listing.wanted - progress.ids.len();
        let max = if max_candidates.is_some() { budget } else { missing as i64 };
        let window = examine_window(connection, listing, lower, progress.searched_until, max, missing).await?;
        let found = window.matches.len();
        progress.ids.extend(window.matches);
        if found == missing {
            return Ok(progress);
        }
        progress.searched_until = if window.candidates == max { window.oldest } else { lower };
        budget = budget.saturating_sub(window.candidates);
        let Some(end) = progress.searched_until.filter(|_| budget > 0) else { return Ok(progress) };
        // The next window has as many matches as are missing, or as many candidates as may be checked.
        let enough = (2 * (missing - found)).checked_div(found).map_or(u128::MAX, |growth| growth as u128);
        let allowed =
            budget.checked_div(window.candidates).map_or(u128::MAX, |growth| u128::from(growth.unsigned_abs()));
        let growth = match max_candidates {
            Some(_) => enough.min(allowed).max(1),
            None if enough > MAX_GROWTH => u128::MAX,
            None => enough.max(1),
        };
        let width = upper.as_u128().saturating_sub(end.as_u128()).saturating_mul(growth);
        from = Uuid::from_u128(end.as_u128().saturating_sub(width));
        upper = end;
    }
}

/// Ids at which windows begin and end.
struct WindowEnds {
    newest: Uuid,
    /// Begins the first window.
    first: Uuid,
    oldest: Uuid,
}

/// Returns the ends of windows on runs below an id. Without such runs there is one window for all.
async fn window_ends(connection: &mut PgConnection, before: Option<Uuid>) -> Result<WindowEnds, Error> {
    let mut sql = QueryBuilder::<Postgres>::new("");
    for (number, (order, offset)) in [("desc", 0), ("desc", WINDOW), ("asc", 0)].into_iter().enumerate() {
        sql.push(if number > 0 { " union all (" } else { "(" });
        sql.push("select run_id from runs where true");
        push_before(&mut sql, before);
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

/// Examines the runs between two ids.
async fn examine_window(
    connection: &mut PgConnection,
    listing: &Listing<'_>,
    from: Option<Uuid>,
    until: Option<Uuid>,
    max_candidates: i64,
    wanted: usize,
) -> Result<Examined, Error> {
    let mut sql = QueryBuilder::<Postgres>::new("");
    let push_candidates = |sql: &mut QueryBuilder<Postgres>| {
        if let Some(from) = from {
            sql.push(" and run_id >= ").push_bind(from);
        }
        push_before(sql, until);
        push_owned(sql, listing.scope);
        listing.filter.push_indexed(sql);
        ""
    };
    let push_checks = |sql: &mut QueryBuilder<Postgres>| listing.filter.push_checked(sql);
    push_examination(&mut sql, push_candidates, max_candidates, push_checks, wanted);
    Ok(sql.build_query_as().fetch_one(connection).await?)
}
