//! Tags of runs.
//!
//! A tag is an entry `tag=TAG` of `runs.labels`, so that the index of the labels finds its runs. The recorder does not
//! change the labels of a run after its start.

use super::rows::clean;
use super::scope::push_owned;
use super::{Error, Store};
use crate::events::{RunId, Scope};
use serde::Serialize;
use sqlx::{Postgres, QueryBuilder, Row};
use utoipa::ToSchema;
use uuid::Uuid;

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
    /// Removes and adds tags of stored runs, of all or of none. Returns their tags; runs outside the scope are left out.
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
        let ids: Vec<Uuid> = runs.iter().map(|run_id| run_id.0).collect();
        let added: Vec<String> = add.iter().map(|tag| label(tag)).collect();
        let removed: Vec<String> = remove.iter().map(|tag| label(tag)).collect();
        let mut query = QueryBuilder::<Postgres>::new("update runs set version = version + 1, labels = ");
        // A tag that is added again moves to the end. Citus rejects a subquery here.
        let dropped: Vec<&String> = removed.iter().chain(&added).collect();
        query.push("array_remove(".repeat(dropped.len())).push("labels");
        for label in dropped {
            query.push(", ").push_bind(label.clone()).push(")");
        }
        query.push(" || ").push_bind(added).push(" where run_id = any(").push_bind(ids).push(")");
        push_owned(&mut query, scope);
        query.push(" returning run_id, labels");
        let mut transaction = self.inner.pool.begin().await?;
        let mut changed = Vec::new();
        for row in query.build().fetch_all(&mut *transaction).await? {
            let run_id = RunId(row.try_get("run_id")?);
            let tags = tags(&row.try_get::<Vec<String>, _>("labels")?);
            if tags.len() > MAX_TAGS {
                return Err(Error::TooManyTags(run_id, tags.len()));
            }
            changed.push(TaggedRun { run_id, tags });
        }
        transaction.commit().await?;
        changed.sort_unstable_by_key(|run| run.run_id);
        Ok(changed)
    }
}
