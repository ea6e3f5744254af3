//! The next newer run that matches a filter.

use super::{Listing, MAX_PAGE_RUNS, MAX_PROBE_RUNS, Order, Progress, probe};
use crate::events::{RunId, Scope};
use crate::store::filter::SearchPlan;
use crate::store::{Error, Store};
use uuid::Uuid;

/// Maximum number of probes, each of which examines up to [`MAX_PROBE_RUNS`] runs.
const MAX_PROBES: usize = 10;

/// Maximum number of pages of the list that are searched if the probes find no match.
const MAX_PAGES: usize = 10;

/// Maximum matches of a probe. Without a filter also its number of candidates, so that it passes some deleted runs.
const WANTED: usize = 200;

impl Store {
    /// Returns the oldest of the runs that match a filter, are in the scope and are newer than `run`; `None` if neither the
    /// probes nor the first pages of the list reach it.
    ///
    /// # Errors
    /// [`Error::BadFilter`], or the database failed.
    pub async fn newer_run(&self, scope: &Scope, q: &str, run: RunId) -> Result<Option<RunId>, Error> {
        let plan = self.plan(q).await?;
        let Progress { ids, searched_until } = self.probe_newer(scope, &plan, run.0).await?;
        let newer = match (ids.first(), searched_until) {
            // Few runs match, so the indexes of the terms find them.
            (None, Some(_)) => self.newer_in_list(scope, &plan, run.0).await?,
            (found, _) => found.copied(),
        };
        Ok(newer.map(RunId))
    }

    /// Examines the runs that follow `run`, until some match.
    async fn probe_newer(&self, scope: &Scope, plan: &SearchPlan, run: Uuid) -> Result<Progress, Error> {
        let mut progress = Progress { ids: Vec::new(), searched_until: Some(run) };
        for _ in 0..MAX_PROBES {
            let Some(start) = progress.searched_until.filter(|_| progress.ids.is_empty()) else { break };
            let mut branches = Vec::new();
            for &branch in plan.branches() {
                let listing = Listing { scope, plan, branch, wanted: WANTED, order: Order::OldestFirst };
                branches.push(probe(&self.inner.pool, &listing, Some(start), MAX_PROBE_RUNS).await?);
            }
            progress = Progress::merge(branches, WANTED, Order::OldestFirst);
        }
        Ok(progress)
    }

    /// Searches the list from the newest runs down to `run`. Returns the last match before it; `None` if the first pages end
    /// above `run`.
    async fn newer_in_list(&self, scope: &Scope, plan: &SearchPlan, run: Uuid) -> Result<Option<Uuid>, Error> {
        let (mut before, mut newer) = (None, None);
        for _ in 0..MAX_PAGES {
            let Progress { ids, searched_until } = self.find_ids(scope, plan, before, MAX_PAGE_RUNS as usize).await?;
            newer = ids.iter().copied().take_while(|id| *id > run).last().or(newer);
            before = if ids.len() < MAX_PAGE_RUNS as usize { searched_until } else { ids.last().copied() };
            if before.is_none_or(|id| id <= run) {
                return Ok(newer);
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::Tenant;
    use crate::store::test_store::{self, INSERT_RUNS};

    #[tokio::test]
    async fn newer_run_is_the_next_one_that_matches() {
        let (_folder, store) = test_store::open().await;
        let pool = &store.inner.pool;
        sqlx::query(INSERT_RUNS).bind(1).bind(8_000).execute(pool).await.unwrap();
        let changes = "update runs set completion_tokens = 9, model = 'tiny', status = 'failed', owner = 'ann'
            where request_id in ('r2', 'r7000', 'r7999')";
        sqlx::query(changes).execute(pool).await.unwrap();
        sqlx::query("update runs set deletion = run_id where request_id = 'r3'").execute(pool).await.unwrap();
        let ids: Vec<Uuid> =
            sqlx::query_scalar("select run_id from runs order by run_id").fetch_all(pool).await.unwrap();
        let ann = Scope::Owned { tenant: Some(Tenant::from("ann".to_owned())), includes_unowned: false };
        let both = Scope::Owned { tenant: Some(Tenant::from("ann".to_owned())), includes_unowned: true };
        let rare = [(1, Some(2)), (2, Some(7000)), (3, Some(7000)), (7000, Some(7_999)), (7_999, None)];
        let all = [(1, Some(2)), (2, Some(4)), (7500, Some(7501)), (7_999, Some(8_000)), (8_000, None)];
        for (scope, q, expected) in [
            (&Scope::All, "", &all),
            (&both, "", &all),
            (&Scope::All, "before:2000-01-01", &[(1, None), (2, None), (3, None), (4, None), (5, None)]),
            (&Scope::All, "after:2000-01-01", &all),
            (&ann, "", &rare),
            (&Scope::All, "tokens>5", &rare),
            (&Scope::All, "model:tiny tokens>5", &rare),
            (&Scope::All, "-status:done", &rare),
            (&both, "status:failed", &rare),
        ] {
            let plan = store.plan(q).await.unwrap();
            for &(number, next) in expected {
                let (run, next) = (ids[number - 1], next.map(|next| ids[next - 1]));
                let newer = store.newer_run(scope, q, RunId(run)).await.unwrap();
                assert_eq!(newer, next.map(RunId), "{q:?} after run {number}");
                if number >= 7000 || *expected == rare {
                    let newer = store.newer_in_list(scope, &plan, run).await.unwrap();
                    assert_eq!(newer, next, "{q:?} after run {number}, in the list");
                }
            }
        }
        store.close().await;
    }
}
