//! The run list: the newest runs that match a filter, in pages.
//!
//! A filter is evaluated in two steps. The probe examines the newest runs that an index returns in list order, which is
//! enough for filters that many runs match. It is repeated with more runs if these are expected to fill the page. The
//! search combines the indexes of all terms, which return runs in no order. It proceeds in windows of run ids from the
//! newest to the oldest, and checks the candidates for the conditions without an index. A page ends early when too many
//! candidates were checked; its `next` continues there. Neither step reads more than a few thousand runs, and no statement
//! allows a plan that reads all of them.

mod newer;
mod search;

use super::filter::{Branch, Filter, SearchPlan};
use super::pool::PgPool;
use super::run_summary::{RunSummary, select_runs};
use super::scope::{Owner, owner_branches, push_owned, push_owner};
use super::{Error, Store};
use crate::events::{RunId, Scope, system};
use search::{choose_indexes, search};
use serde::Serialize;
use sqlx::{Postgres, QueryBuilder};
use uuid::Uuid;

/// Maximum runs per page.
pub const MAX_PAGE_RUNS: u32 = 500;

/// Default number of runs per page.
const DEFAULT_PAGE_RUNS: u32 = 50;

/// Number of runs that the probe examines, divided among the parts of a filter.
const PROBE_RUNS: i64 = 1500;

/// Maximum number of runs that the repeated probe examines.
const MAX_PROBE_RUNS: i64 = 6000;

/// Maximum number of model names, and of sets of mods, that are compared with a term before the runs.
const MAX_NAMES: i32 = 200;

/// Condition of runs without a deletion, see `super::deletions`.
const NOT_DELETED: &str = " and deletion is null";

/// A query of the run list, newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunQuery {
    /// A filter text, see [`super::filter`]; empty for all runs.
    pub q: String,
    /// Only runs older than this one; [`RunPage::next`] of the previous page.
    pub before: Option<RunId>,
    /// Maximum runs to return, from 1 to [`MAX_PAGE_RUNS`]; 0 for the default of 50.
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
        let plan = self.plan(&query.q).await?;
        let limit = if query.limit == 0 { DEFAULT_PAGE_RUNS } else { query.limit.min(MAX_PAGE_RUNS) } as usize;
        let Progress { mut ids, searched_until } =
            self.find_ids(scope, &plan, query.before.map(|run| run.0), limit + 1).await?;
        let next = if ids.len() > limit { Some(ids[limit - 1]) } else { searched_until };
        ids.truncate(limit);
        let read = select_runs!("null::text", "where run_id = any($1) order by run_id desc");
        let runs = sqlx::query_as(read).bind(ids).fetch_all(&self.inner.pool).await?;
        Ok(RunPage { runs, next: next.map(RunId) })
    }

    /// Plans the search for the runs that match a filter.
    async fn plan(&self, q: &str) -> Result<SearchPlan, Error> {
        let mut plan = SearchPlan::new(Filter::parse(q, system::now())?);
        if plan.has_models()
            && let Some(models) = self.names("select model_names($1)").await?
        {
            plan.resolve_models(&models);
        }
        if plan.has_mods()
            && let Some(sets) = self.names("select mod_sets($1)").await?
        {
            plan.resolve_mods(&sets);
        }
        Ok(plan)
    }

    async fn find_ids(
        &self,
        scope: &Scope,
        plan: &SearchPlan,
        before: Option<Uuid>,
        wanted: usize,
    ) -> Result<Progress, Error> {
        let mut branches = Vec::new();
        for &branch in plan.branches() {
            branches.push(self.find_in_branch(scope, plan.clone(), branch, before, wanted).await?);
        }
        Ok(Progress::merge(branches, wanted, Order::NewestFirst))
    }

    async fn find_in_branch(
        &self,
        scope: &Scope,
        mut plan: SearchPlan,
        branch: Branch,
        before: Option<Uuid>,
        wanted: usize,
    ) -> Result<Progress, Error> {
        let listing = Listing { scope, plan: &plan, branch, wanted, order: Order::NewestFirst };
        let mut probed = probe(&self.inner.pool, &listing, before, PROBE_RUNS).await?;
        let missing = wanted.saturating_sub(probed.ids.len());
        let expected = (PROBE_RUNS * missing as i64).checked_div(probed.ids.len() as i64).map(|rows| rows * 5 / 4);
        if missing > 0
            && probed.searched_until.is_some()
            && let Some(rows) = expected.filter(|rows| *rows <= MAX_PROBE_RUNS)
        {
            let listing = Listing { wanted: missing, ..listing };
            let more = probe(&self.inner.pool, &listing, probed.searched_until, rows).await?;
            probed.ids.extend(more.ids);
            probed.searched_until = more.searched_until;
        }
        if probed.ids.len() >= wanted || probed.searched_until.is_none() {
            return Ok(probed);
        }
        let mut transaction = self.inner.pool.begin().await?;
        let frequency = choose_indexes(&mut transaction, &mut plan).await?;
        let listing = Listing { scope, plan: &plan, branch, wanted, order: Order::NewestFirst };
        let found = search(&mut transaction, &listing, probed, frequency).await?;
        transaction.rollback().await?;
        Ok(found)
    }

    /// Returns the names that runs have; `None` if there are more than [`MAX_NAMES`].
    async fn names(&self, select: &'static str) -> Result<Option<Vec<String>>, Error> {
        let names: Vec<String> = sqlx::query_scalar(select).bind(MAX_NAMES + 1).fetch_all(&self.inner.pool).await?;
        Ok(i32::try_from(names.len()).is_ok_and(|count| count <= MAX_NAMES).then_some(names))
    }
}

/// The order in which runs are searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    NewestFirst,
    OldestFirst,
}

impl Order {
    /// Returns the keywords of this order and of the opposite one.
    const fn keywords(self) -> (&'static str, &'static str) {
        match self {
            Self::NewestFirst => ("desc", "asc"),
            Self::OldestFirst => ("asc", "desc"),
        }
    }

    /// Appends ` and …` with the condition of the runs that follow `id`.
    fn push_following(self, sql: &mut QueryBuilder<Postgres>, id: Option<Uuid>) {
        if let Some(id) = id {
            sql.push(if self == Self::NewestFirst { " and run_id < " } else { " and run_id > " }).push_bind(id);
        }
    }
}

/// The search for one page.
#[derive(Clone, Copy)]
struct Listing<'f> {
    scope: &'f Scope,
    plan: &'f SearchPlan,
    branch: Branch,
    wanted: usize,
    order: Order,
}

impl Listing<'_> {
    /// Returns true if several conditions have an index that contains the ids. The planner does not intersect such indexes
    /// if it can evaluate the condition on ids in one of them.
    fn has_several_id_indexes(&self) -> bool {
        let by_owner = usize::from(*self.scope != Scope::All);
        self.branch != Branch::Displaced && self.plan.count_id_indexes() + by_owner > 1
    }
}

/// The state of a search.
struct Progress {
    /// Matches found so far, in the order of the search.
    ids: Vec<Uuid>,
    /// The last searched id; `None` if all runs were searched.
    searched_until: Option<Uuid>,
}

impl Progress {
    /// Merges searches of different runs. The result is searched as far as all of them.
    fn merge(parts: Vec<Self>, wanted: usize, order: Order) -> Self {
        let ends = parts.iter().filter_map(|part| part.searched_until);
        let searched_until = if order == Order::NewestFirst { ends.max() } else { ends.min() };
        let mut ids: Vec<Uuid> = parts.into_iter().flat_map(|part| part.ids).collect();
        match order {
            Order::NewestFirst => {
                ids.retain(|id| searched_until.is_none_or(|until| *id >= until));
                ids.sort_unstable_by(|a, b| b.cmp(a));
            }
            Order::OldestFirst => {
                ids.retain(|id| searched_until.is_none_or(|until| *id <= until));
                ids.sort_unstable();
            }
        }
        ids.truncate(wanted);
        Self { ids, searched_until }
    }
}

/// The result of [`push_examination`].
#[derive(sqlx::FromRow)]
struct Examination {
    /// Matches in the order of the search.
    matches: Vec<Uuid>,
    /// Number of candidates.
    candidates: i64,
    /// The last candidate.
    last: Option<Uuid>,
}

/// Appends a statement that reads the first candidates and returns the matches among them as [`Examination`].
/// `push_candidates` returns the columns that precede `run_id` in an index, as for an order from the newest runs.
fn push_examination(
    sql: &mut QueryBuilder<Postgres>,
    order: Order,
    push_candidates: impl FnOnce(&mut QueryBuilder<Postgres>) -> &'static str,
    max_candidates: i64,
    push_checks: impl FnOnce(&mut QueryBuilder<Postgres>),
    wanted: usize,
) {
    let (forward, backward) = order.keywords();
    sql.push("(with candidates as materialized (select run_id, (true");
    push_checks(sql);
    sql.push(") as matches from (select * from runs where true");
    let columns = push_candidates(sql).replace(" desc", &format!(" {forward}"));
    sql.push(format_args!(" order by {columns}run_id {forward} limit ")).push_bind(max_candidates);
    sql.push(") as runs) select array(select run_id from candidates where matches order by run_id ");
    sql.push(forward).push(" limit ").push_bind(wanted as i64);
    sql.push(") as matches, (select count(*) from candidates) as candidates, ");
    sql.push(format_args!("(select run_id from candidates order by run_id {backward} limit 1) as last)"));
}

/// Examines the first runs that follow `start`, of each part of the plan, about `rows` runs in total.
async fn probe(pool: &PgPool, listing: &Listing<'_>, start: Option<Uuid>, rows: i64) -> Result<Progress, Error> {
    let Listing { scope, plan, branch, wanted, order } = *listing;
    let mut parts = Vec::new();
    if branch == Branch::Displaced {
        parts.push((plan.clone(), None, Owner::InScope));
    } else {
        for part in plan.split() {
            let driver = part.driver();
            let owners = if driver.is_none() { owner_branches(scope) } else { vec![Owner::InScope] };
            parts.extend(owners.into_iter().map(|owner| (part.clone(), driver, owner)));
        }
    }
    if parts.is_empty() {
        return Ok(Progress { ids: Vec::new(), searched_until: None });
    }
    let probed = (rows / parts.len() as i64).max(wanted as i64);
    let probed = if plan.is_empty() { wanted as i64 } else { probed };
    let mut sql = QueryBuilder::<Postgres>::new("");
    for (number, (part, driver, owner)) in parts.iter().enumerate() {
        sql.push(if number > 0 { " union all " } else { "" });
        let push_candidates = |sql: &mut QueryBuilder<Postgres>| {
            let by_driver = driver.map(|driver| part.push_driver(driver, sql));
            let by_owner = push_owner(sql, owner);
            order.push_following(sql, start);
            part.push_branch(branch, sql);
            by_driver.unwrap_or(by_owner)
        };
        let push_checks = |sql: &mut QueryBuilder<Postgres>| {
            sql.push(NOT_DELETED);
            push_owned(sql, scope);
            part.push_all(sql);
        };
        push_examination(&mut sql, order, push_candidates, probed, push_checks, wanted);
    }
    let examined: Vec<Examination> = sql.build_query_as().fetch_all(pool).await?;
    // A part with further runs is searched down to its last candidate.
    let progress = |part: Examination| Progress {
        searched_until: part.last.filter(|_| part.candidates >= probed),
        ids: part.matches,
    };
    Ok(Progress::merge(examined.into_iter().map(progress).collect(), wanted, order))
}
