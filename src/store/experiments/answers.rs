//! The answers of the runs of cells.

use super::super::read::damaged;
use super::super::{Error, Store};
use crate::events::{RunId, Scope};
use crate::trace::columns;

impl Store {
    /// Returns the whole answer of a run, as at the end of its replay; `None` if the scope has no such run.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn answer(&self, scope: &Scope, run_id: RunId) -> Result<Option<String>, Error> {
        let Some(file) = self.columns(scope, run_id).await? else { return Ok(None) };
        let columns = columns::decode(&file).map_err(|error| damaged(run_id, error))?;
        Ok(Some(columns.answer_text()))
    }
}
