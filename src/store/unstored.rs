//! Reads of runs that the recorder has not stored yet. A read asks the recorder to store them now, and waits.

use super::{Error, RecorderState, RunSummary, Store};
use crate::events::{RunId, Scope};
use crate::recording::UnstoredRun;
use std::sync::PoisonError;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::timeout;

/// Maximum time that a read waits for the rows of a run.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

impl Store {
    /// Returns the same run as [`Store::find`], as soon as its rows can be read: all rows of a run that has ended, and for a
    /// running run the rows that the recorder received before the call.
    ///
    /// # Errors
    /// [`Error::NotStored`], or the database failed.
    pub async fn find_recorded(&self, scope: &Scope, id_or_request_id: &str) -> Result<Option<RunSummary>, Error> {
        let unstored = self.inner.unstored.find(scope, id_or_request_id);
        let Some(run_id) = unstored.first().map(|run| run.run_id) else {
            return self.find(scope, id_or_request_id).await;
        };
        let ended: Vec<UnstoredRun> = unstored.into_iter().filter(UnstoredRun::is_over).collect();
        let has_ended = !ended.is_empty();
        let wait = async {
            let flushed = self.flush().await;
            for run in ended {
                run.wait_until_stored().await;
            }
            flushed || has_ended
        };
        let stored = timeout(READ_TIMEOUT, wait).await.unwrap_or(false);
        if has_ended && !stored {
            return Err(Error::NotStored(run_id));
        }
        match self.find(scope, id_or_request_id).await? {
            None if !stored => Err(Error::NotStored(run_id)),
            found => Ok(found),
        }
    }

    /// Returns the run while some of its rows are missing in the database, if the scope covers it.
    #[must_use]
    pub fn unstored(&self, scope: &Scope, run_id: RunId) -> Option<UnstoredRun> {
        self.inner.unstored.get(scope, run_id)
    }

    /// Returns the runs that this server records and that have not ended, with this `run_id` or `request_id`, as far as
    /// the scope covers them. Reads no rows.
    #[must_use]
    pub fn recorded_here(&self, scope: &Scope, id_or_request_id: &str) -> Vec<RunId> {
        let runs = self.inner.unstored.find(scope, id_or_request_id);
        runs.into_iter().filter(|run| !run.is_over()).map(|run| run.run_id).collect()
    }

    /// Asks the recorder to store everything it has received. Returns false if that fails.
    async fn flush(&self) -> bool {
        let flushes = match &*self.inner.recorder.lock().unwrap_or_else(PoisonError::into_inner) {
            RecorderState::Running { flushes, .. } => flushes.clone(),
            RecorderState::Pending { .. } => return true,
            RecorderState::Closed => return false,
        };
        let (stored, answer) = oneshot::channel();
        flushes.send(stored).await.is_ok() && answer.await.unwrap_or(false)
    }
}
