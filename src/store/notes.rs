//! Notes of users on runs and on tokens of their answers.
//!
//! The notes of a run are a column of the run, so they belong to its owner and are removed with it. Labels of the run allow
//! filters to find runs with notes.

use super::read::damaged;
use super::scope::{owners, visible};
use super::text::clean;
use super::{Error, Store};
use crate::events::{RunId, Scope};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Maximum notes of a run.
pub const MAX_NOTES: usize = 200;

/// A note on a run or on a token of its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Note {
    /// Index of the token in the answer that the note is about, from 0; null for the whole run.
    pub position: Option<u32>,
    /// The text.
    pub text: String,
    /// Time of the last change.
    pub updated_at: DateTime<Utc>,
    /// Name of the author of the last change.
    pub user_label: Option<String>,
}

/// The subject of a note.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoteKind {
    Run,
    Token,
}

impl NoteKind {
    pub(super) const ALL: [Self; 2] = [Self::Run, Self::Token];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Token => "token",
        }
    }

    /// Returns the label of a run with such a note.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Run => "note=run",
            Self::Token => "note=token",
        }
    }
}

impl Store {
    /// Returns the notes of a run: the one on the run, then those on tokens in their order. Notes that this release cannot
    /// read are omitted. Returns `None` for a run outside the scope.
    ///
    /// # Errors
    /// The database failed.
    pub async fn notes(&self, scope: &Scope, run_id: RunId) -> Result<Option<Vec<Note>>, Error> {
        let read = concat!("select user_notes::text from runs where run_id = $1 and ", visible!(2));
        let stored: Option<Option<String>> =
            sqlx::query_scalar(read).bind(run_id.0).bind(owners(scope)).fetch_optional(&self.inner.pool).await?;
        Ok(stored.map(|text| {
            parse(text.as_deref()).unwrap_or_else(|error| {
                tracing::warn!(run.id = %run_id, %error, "notes cannot be read");
                Vec::new()
            })
        }))
    }

    /// Changes the note on a run or on a token, or removes it if the text is empty. Returns all notes of the run; `None` for a
    /// run outside the scope.
    ///
    /// # Errors
    /// [`Error::TooManyNotes`], [`Error::Damaged`] if the stored notes cannot be read, or the database failed.
    pub async fn set_note(
        &self,
        scope: &Scope,
        run_id: RunId,
        position: Option<u32>,
        text: &str,
        user_label: Option<&str>,
        now: DateTime<Utc>,
    ) -> Result<Option<Vec<Note>>, Error> {
        let mut transaction = self.inner.pool.begin().await?;
        let read = concat!("select user_notes::text from runs where run_id = $1 and ", visible!(2), " for update");
        let stored: Option<Option<String>> =
            sqlx::query_scalar(read).bind(run_id.0).bind(owners(scope)).fetch_optional(&mut *transaction).await?;
        let Some(stored) = stored else { return Ok(None) };
        // Other notes that cannot be read would be lost.
        let mut notes = parse(stored.as_deref()).map_err(|error| damaged(run_id, format!("its notes: {error}")))?;
        notes.retain(|note| note.position != position);
        if !text.is_empty() {
            let (text, user_label) = (clean(text).into_owned(), user_label.map(|label| clean(label).into_owned()));
            notes.push(Note { position, text, updated_at: now, user_label });
        }
        if notes.len() > MAX_NOTES {
            return Err(Error::TooManyNotes(run_id, notes.len()));
        }
        notes.sort_by_key(|note| note.position);
        let has = |kind: NoteKind| notes.iter().any(|note| note.position.is_none() == (kind == NoteKind::Run));
        let labels: Vec<&str> = NoteKind::ALL.into_iter().filter(|kind| has(*kind)).map(NoteKind::label).collect();
        let json = serde_json::to_string(&notes).map_err(|error| sqlx::Error::Encode(error.into()))?;
        sqlx::query(
            "update runs set user_notes = $2::json, version = version + 1,
                labels = array_remove(array_remove(labels, 'note=run'), 'note=token') || $3 where run_id = $1",
        )
        .bind(run_id.0)
        .bind((!notes.is_empty()).then_some(json))
        .bind(labels)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(Some(notes))
    }
}

/// Parses the stored notes. A newer release may have written them in another form.
fn parse(stored: Option<&str>) -> serde_json::Result<Vec<Note>> {
    stored.map_or(Ok(Vec::new()), serde_json::from_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::test_store::{self, INSERT_RUNS};

    #[tokio::test]
    async fn change_keeps_notes_that_cannot_be_read() {
        let (_folder, store) = test_store::open().await;
        sqlx::query(INSERT_RUNS).bind(1).bind(1).execute(&store.inner.pool).await.unwrap();
        let run: RunId = sqlx::query_scalar("update runs set user_notes = '{\"v\":2}' returning run_id")
            .fetch_one(&store.inner.pool)
            .await
            .map(RunId)
            .unwrap();
        let change = store.set_note(&Scope::All, run, None, "new", None, crate::events::system::now()).await;
        assert!(matches!(change, Err(Error::Damaged { .. })), "{change:?}");
        assert_eq!(store.notes(&Scope::All, run).await.unwrap(), Some(Vec::new()));
        let stored: String =
            sqlx::query_scalar("select user_notes::text from runs").fetch_one(&store.inner.pool).await.unwrap();
        assert_eq!(stored, "{\"v\":2}");
        store.close().await;
    }
}
