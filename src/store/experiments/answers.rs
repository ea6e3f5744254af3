//! The answers of the runs of cells.

use super::super::read::damaged;
use super::super::scope::is_visible;
use super::super::{Error, Store};
use crate::events::{RunId, Scope, TokenId};
use crate::trace::columns;

impl Store {
    /// Returns the whole answer of a run, as at the end of its replay, without hidden tokens; `None` if the scope has no such
    /// run, or if the run was deleted.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn answer(
        &self,
        scope: &Scope,
        run_id: RunId,
        is_hidden: impl Fn(TokenId) -> bool,
    ) -> Result<Option<String>, Error> {
        if !is_visible(&mut self.inner.pool.acquire().await?, scope, run_id).await? {
            return Ok(None);
        }
        let Some(file) = self.columns(scope, run_id).await? else { return Ok(None) };
        let columns = columns::decode(&file).map_err(|error| damaged(run_id, error))?;
        Ok(Some(columns.answer_text_without(is_hidden)))
    }
}
