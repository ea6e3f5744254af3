//! The run list: the newest runs that match a filter, in pages.

use super::filter::{Filter, SearchRange};
use super::runs::{RunSummary, select_runs};
use super::scope::push_owned;
use super::{Error, Store};
use crate::events::{RunId, Scope};
use chrono::Utc;
use serde::Serialize;
use sqlx::{Postgres, QueryBuilder};

/// Maximum runs per page.
pub const MAX_PAGE: u32 = 500;

/// Default number of runs per page.
const DEFAULT_PAGE: u32 = 50;

/// Number of newest runs that are searched first for words. Words that occur in many runs are found there quickly.
const RECENT_RUNS: i64 = 1000;

/// Maximum number of models that are matched by name before the runs; each costs a step in their index.
const MAX_MODELS: i32 = 200;

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
    /// Value of [`RunQuery::before`] for the next page; `None` on the last one.
    pub next: Option<RunId>,
}

impl Store {
    /// Returns a page of the runs that the scope covers, newest first.
    ///
    /// # Errors
    /// [`Error::BadFilter`], or the database failed.
    pub async fn runs(&self, scope: &Scope, query: &RunQuery) -> Result<RunPage, Error> {
        let mut filter = Filter::parse(&query.q, Utc::now())?;
        if filter.has_models()
            && let Some(model_names) = self.model_names().await?
        {
            filter.resolve_models(&model_names);
        }
        let limit = if query.limit == 0 { DEFAULT_PAGE } else { query.limit.min(MAX_PAGE) };
        let mut runs = Vec::new();
        if filter.has_full_text_terms() {
            runs = self.newest(scope, query.before, &filter, limit, SearchRange::Newest).await?;
        }
        if runs.len() <= limit as usize {
            runs = self.newest(scope, query.before, &filter, limit, SearchRange::All).await?;
        }
        let more = runs.len() > limit as usize;
        runs.truncate(limit as usize);
        let next = runs.last().filter(|_| more).map(|run| run.run_id);
        Ok(RunPage { runs, next })
    }

    /// Returns the newest runs that match, up to one more than `limit`.
    async fn newest(
        &self,
        scope: &Scope,
        before: Option<RunId>,
        filter: &Filter,
        limit: u32,
        range: SearchRange,
    ) -> Result<Vec<RunSummary>, Error> {
        let parts = filter.split();
        let mut sql = QueryBuilder::<Postgres>::new(if parts.len() > 1 { "select * from (" } else { "" });
        for (number, part) in parts.iter().enumerate() {
            sql.push(if number > 0 { " union all (" } else { "(" });
            push_newest(&mut sql, scope, before, part, limit, range);
            sql.push(")");
        }
        if parts.len() > 1 {
            sql.push(") as runs order by run_id desc limit ").push_bind(i64::from(limit) + 1);
        }
        Ok(sql.build_query_as().fetch_all(&self.inner.pool).await?)
    }

    /// Returns the indexed names of the models of all runs; `None` if there are more than [`MAX_MODELS`].
    async fn model_names(&self) -> Result<Option<Vec<String>>, Error> {
        let names: Vec<String> =
            sqlx::query_scalar("select model_names($1)").bind(MAX_MODELS + 1).fetch_all(&self.inner.pool).await?;
        Ok(i32::try_from(names.len()).is_ok_and(|count| count <= MAX_MODELS).then_some(names))
    }
}

fn push_newest(
    sql: &mut QueryBuilder<Postgres>,
    scope: &Scope,
    before: Option<RunId>,
    filter: &Filter,
    limit: u32,
    range: SearchRange,
) {
    let push_bounds = |sql: &mut QueryBuilder<Postgres>| {
        push_owned(sql, scope);
        if let Some(before) = before {
            sql.push(" and run_id < ").push_bind(before.0);
        }
    };
    sql.push(select_runs!("null::text", "where true"));
    push_bounds(sql);
    if range == SearchRange::Newest {
        sql.push(" and run_id >= (select run_id from runs where true");
        push_bounds(sql);
        sql.push(" order by run_id desc offset ").push_bind(RECENT_RUNS).push(" limit 1)");
    }
    filter.push(sql, range);
    sql.push(" order by run_id desc limit ").push_bind(i64::from(limit) + 1);
}
