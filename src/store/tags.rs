//! Tags of runs.
//!
//! A tag is an entry `tag=TAG` of `runs.labels`, so that the index of the labels finds its runs. The recorder does not
//! change the labels of a run after its start.

use super::scope::push_owned;
use super::text::clean;
use super::{Error, Store};
use crate::events::{RunId, Scope};
use serde::Serialize;
use sqlx::{Postgres, QueryBuilder};
use utoipa::ToSchema;

/// Maximum tags of a run.
pub const MAX_TAGS: usize = 32;

const PREFIX: &str = "tag=";

/// The tags of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct TaggedRun {
    /// Id of the run.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// Its tags, in the order in which they were added.
    pub tags: Vec<String>,
}

/// Returns the label of a tag.
pub(super) fn label(tag: &str) -> String {
    clean(&format!("{PREFIX}{tag}")).into_owned()
}

/// Returns the tags among the labels of a run.
pub(super) fn tags(labels: &[String]) -> Vec<String> {
    labels.iter().filter_map(|label| label.strip_prefix(PREFIX)).map(str::to_owned).collect()
}

impl Store {
    /// Removes and adds tags of stored runs; after an error, no run is changed. Returns the tags of the runs in order of
    /// their ids, without runs outside the scope.
    ///
    /// # Errors
    /// [`Error::TooManyTags`], or the database failed.
    pub async fn change_tags(
        &self,
        scope: &Scope,
        runs: &[RunId],
        add: &[String],
        remove: &[String],
    ) -> Result<Vec<TaggedRun>, Error> {
        let added: Vec<String> = add.iter().map(|tag| label(tag)).collect();
        let removed: Vec<String> = remove.iter().map(|tag| label(tag)).collect();
        // The recorder updates runs in order of their ids, too. Another order could cause a deadlock.
        let mut ids = runs.to_vec();
        ids.sort_unstable();
        ids.dedup();
        let mut transaction = self.inner.pool.begin().await?;
        let mut changed = Vec::new();
        for run_id in ids {
            let mut update = update_labels(scope, run_id, &added, &removed);
            let labels: Option<Vec<String>> = update.build_query_scalar().fetch_optional(&mut *transaction).await?;
            let Some(tags) = labels.map(|labels| tags(&labels)) else { continue };
            if tags.len() > MAX_TAGS {
                return Err(Error::TooManyTags(run_id, tags.len()));
            }
            changed.push(TaggedRun { run_id, tags });
        }
        transaction.commit().await?;
        Ok(changed)
    }
}

/// Returns the statement that changes the labels of a run and returns them.
fn update_labels(scope: &Scope, run_id: RunId, added: &[String], removed: &[String]) -> QueryBuilder<Postgres> {
    let mut sql = QueryBuilder::new("update runs set version = version + 1, labels = ");
    // A tag that is added again moves to the end. Citus rejects a subquery here.
    let dropped: Vec<&String> = removed.iter().chain(added).collect();
    sql.push("array_remove(".repeat(dropped.len())).push("labels");
    for label in dropped {
        sql.push(", ").push_bind(label.clone()).push(")");
    }
    sql.push(" || ")
        .push_bind(added.to_vec())
        .push(" where run_id = ")
        .push_bind(run_id.0)
        .push(" and deletion is null");
    push_owned(&mut sql, scope);
    sql.push(" returning labels");
    sql
}
