//! Fields that the engine of an ingested run reported about its request, and the answers of runs.

use super::pool::PgConnection;
use super::read::{damaged, last_added};
use super::runs::{by_id, request_id_owner};
use super::scope::is_visible;
use super::{Error, Store};
use crate::events::{RunId, Scope};
use crate::trace::columns;
use crate::trace::document::RequestExtras;
use crate::trace::fold::client_text;

/// Fields reported by the engine of an ingested run, with a comparison of its text and its events.
#[derive(Debug, Clone, Default)]
pub struct Reported {
    /// Fields of the document's `request`.
    pub request: RequestExtras,
    /// The answer according to the events, if it differs from the `final_text` that another engine reported.
    pub replayed_text: Option<String>,
}

impl Store {
    /// Returns the fields that the engine of a run reported; empty for a run of Thunder, and for a run that the scope
    /// does not cover.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn reported(&self, scope: &Scope, run_id: RunId) -> Result<Reported, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        let Some(run) = by_id(&mut connection, scope, run_id).await? else { return Ok(Reported::default()) };
        let owner = request_id_owner(&mut connection, &run.request_id).await?;
        // Only documents have a fingerprint.
        if owner.is_none_or(|(_, fingerprint)| fingerprint.is_none()) {
            return Ok(Reported::default());
        }
        let request = read(&mut connection, run_id).await?;
        // Thunder exports the text that the client received; its tokens may also contain e.g. a stop string.
        let is_from_thunder = !last_added(&mut connection, run_id).await?.tokens.is_empty();
        drop(connection);
        let mut replayed_text = None;
        if let Some(final_text) = request.final_text.as_ref().filter(|_| !is_from_thunder)
            && let Some(columns) = self.columns(scope, run_id).await?
        {
            let replayed = columns::decode(&columns).map_err(|error| damaged(run_id, error))?.answer_text();
            replayed_text = (replayed != *final_text).then_some(replayed);
        }
        Ok(Reported { request, replayed_text })
    }

    /// Returns the whole answer of a run, as its client received it; `None` if the scope has no such run, or if the run was
    /// deleted. Runs of earlier versions have no stored answer; theirs is [`client_text`].
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn answer(&self, scope: &Scope, run_id: RunId) -> Result<Option<String>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !is_visible(&mut connection, scope, run_id).await? {
            return Ok(None);
        }
        let final_text = read(&mut connection, run_id).await?.final_text;
        let stop_string = last_added(&mut connection, run_id).await?.stopped_by;
        drop(connection);
        if final_text.is_some() {
            return Ok(final_text);
        }
        let Some(file) = self.columns(scope, run_id).await? else { return Ok(None) };
        let columns = columns::decode(&file).map_err(|error| damaged(run_id, error))?;
        Ok(Some(client_text(columns.answer(), stop_string.as_deref())))
    }
}

impl Reported {
    /// Returns remarks on differences between the document and the stored run.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        match self.request.replaced_nul {
            0 => {}
            1 => remarks.push("1 NUL character of the document was replaced with U+FFFD.".to_owned()),
            count => remarks.push(format!("{count} NUL characters of the document were replaced with U+FFFD.")),
        }
        if self.replayed_text.is_some() {
            remarks.push("The text of the events differs from the final_text that the engine reported.".to_owned());
        }
        remarks
    }
}

/// Encodes the extras for storage.
pub(super) fn to_json(extras: &RequestExtras) -> Option<String> {
    if extras.is_empty() { None } else { serde_json::to_string(extras).ok() }
}

/// Reads the extras of a run. A run of Thunder has at most a `final_text`.
pub(super) async fn read(connection: &mut PgConnection, run_id: RunId) -> Result<RequestExtras, Error> {
    let stored: Option<Option<String>> = sqlx::query_scalar("select request_extras::text from runs where run_id = $1")
        .bind(run_id.0)
        .fetch_optional(connection)
        .await?;
    let Some(json) = stored.flatten() else { return Ok(RequestExtras::default()) };
    serde_json::from_str(&json).map_err(|error| damaged(run_id, error))
}
