//! The family of a run: the first run that it descends from, and all forks of that one, direct and indirect.

use super::pool::PgConnection;
use super::run_summary::{RunSummary, select_runs};
use super::runs::by_id;
use super::scope::{owners, visible};
use super::{Error, Store};
use crate::events::{RunId, Scope};
use std::collections::{HashMap, HashSet};
use uuid::Uuid;

/// Maximum runs of a family.
const MAX_FAMILY: usize = 128;

/// Maximum generations above and below a run.
const MAX_GENERATIONS: usize = 32;

/// Maximum events per run whose log-probabilities are averaged.
const MAX_MEASURED_EVENTS: i32 = 8192;

/// The runs that descend from one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Family {
    /// The first run, then its forks, then their forks, each generation oldest first.
    pub runs: Vec<FamilyRun>,
    /// True if there are more runs or generations than were read.
    pub truncated: bool,
}

/// A run of a family.
#[derive(Debug, Clone, PartialEq)]
pub struct FamilyRun {
    /// Its summary.
    pub run: RunSummary,
    /// The mean of [`mean_logprobs`]; `None` if it was not requested.
    pub mean_logprob: Option<f64>,
}

impl Store {
    /// Returns the family of a run, as far as the scope covers it, with the means of the members in `mean_of`; `None` for
    /// all. Reads one generation per statement, because Citus rejects recursive queries over its shards.
    ///
    /// # Errors
    /// The database failed.
    pub async fn family(
        &self,
        scope: &Scope,
        run: RunSummary,
        mean_of: Option<&HashSet<RunId>>,
    ) -> Result<Family, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        let mut root = run;
        for _ in 0..MAX_GENERATIONS {
            let Some(parent) = &root.parent else { break };
            let Some(parent) = by_id(&mut connection, scope, parent.run_id).await? else { break };
            root = parent;
        }
        let mut known = HashSet::from([root.run_id]);
        let mut parents = vec![root.run_id];
        let mut runs = vec![root];
        let mut truncated = false;
        for generation in 0.. {
            let labels: Vec<String> = parents.iter().map(|parent| format!("parent={parent}")).collect();
            let read = concat!(
                select_runs!("null::text", "where labels <> '{}' and labels && $1 and ("),
                visible!(2),
                ") order by run_id limit $3"
            );
            let free = MAX_FAMILY - runs.len();
            let mut forks: Vec<RunSummary> = sqlx::query_as(read)
                .bind(labels)
                .bind(owners(scope))
                .bind(free as i64 + 1)
                .fetch_all(&mut connection)
                .await?;
            forks.retain(|fork| known.insert(fork.run_id));
            truncated = forks.len() > free || (generation == MAX_GENERATIONS && !forks.is_empty());
            forks.truncate(free);
            parents = forks.iter().map(|fork| fork.run_id).collect();
            if generation == MAX_GENERATIONS || parents.is_empty() {
                break;
            }
            runs.extend(forks);
            if truncated {
                break;
            }
        }
        let is_measured = |id: &RunId| mean_of.is_none_or(|ids| ids.contains(id));
        let ids: Vec<Uuid> = runs.iter().map(|run| run.run_id).filter(is_measured).map(|id| id.0).collect();
        let means = if ids.is_empty() { HashMap::new() } else { mean_logprobs(&mut connection, ids).await? };
        let with_mean = |run: RunSummary| FamilyRun { mean_logprob: means.get(&run.run_id).copied().flatten(), run };
        Ok(Family { runs: runs.into_iter().map(with_mean).collect(), truncated })
    }
}

/// Returns the mean ln p of each run over its `Added` events, of which it reads those among the first
/// [`MAX_MEASURED_EVENTS`] events. Of an event with several tokens, the first one counts. Tokens that were removed later
/// count, too.
pub(super) async fn mean_logprobs(
    connection: &mut PgConnection,
    runs: Vec<Uuid>,
) -> Result<HashMap<RunId, Option<f64>>, Error> {
    let means: Vec<(Uuid, Option<f64>)> = sqlx::query_as(
        "select run_id, avg(logprob) from events
        where run_id = any($1) and sequence_order < $2 and event_type = 'Added' group by run_id",
    )
    .bind(runs)
    .bind(MAX_MEASURED_EVENTS)
    .fetch_all(connection)
    .await?;
    Ok(means.into_iter().map(|(id, mean)| (RunId(id), mean)).collect())
}
