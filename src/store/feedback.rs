//! Feedback on runs from people and programs.

use super::scope::{covers, owners, visible};
use super::text::clean;
use super::{Error, Store};
use crate::events::{RunId, Scope, system};
use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::FromRow;
use utoipa::ToSchema;
use uuid::Uuid;

/// Feedback to store.
#[derive(Debug, Clone, PartialEq)]
pub struct NewFeedback {
    /// Score from -1 (bad) to 1 (good).
    pub rating: f32,
    /// Comment text.
    pub text: Option<String>,
    /// Index of the token in the answer that the feedback refers to, from 0.
    pub position: Option<u32>,
    /// Name of the author.
    pub user_label: Option<String>,
}

/// Feedback on a run.
#[derive(Debug, Clone, PartialEq, Serialize, FromRow, ToSchema)]
pub struct Feedback {
    /// Id of the feedback.
    pub feedback_id: Uuid,
    /// Time of the feedback.
    pub created_at: DateTime<Utc>,
    /// Score from -1 (bad) to 1 (good).
    pub rating: f32,
    /// Comment text.
    pub text: Option<String>,
    /// Index of the token in the answer that the feedback refers to, from 0.
    pub position: Option<i32>,
    /// Name of the author.
    pub user_label: Option<String>,
}

/// The sign of a rating. Runs with such feedback have it among their labels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FeedbackKind {
    Good,
    Bad,
    Neutral,
}

impl FeedbackKind {
    pub(super) const ALL: [Self; 3] = [Self::Good, Self::Bad, Self::Neutral];

    fn from_rating(rating: f32) -> Self {
        match rating {
            rating if rating > 0.0 => Self::Good,
            rating if rating < 0.0 => Self::Bad,
            _ => Self::Neutral,
        }
    }

    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Bad => "bad",
            Self::Neutral => "neutral",
        }
    }

    /// Returns the label of a run with such feedback.
    pub(super) fn label(self) -> String {
        format!("feedback={}", self.as_str())
    }
}

impl Store {
    /// Stores feedback on a run. Returns `None` if there is no such run in the scope.
    ///
    /// # Errors
    /// The database failed.
    pub async fn add_feedback(
        &self,
        scope: &Scope,
        run_id: RunId,
        feedback: &NewFeedback,
        now: DateTime<Utc>,
    ) -> Result<Option<Feedback>, Error> {
        let text = feedback.text.as_deref().map(clean);
        let mut transaction = self.inner.pool.begin().await?;
        let stored = sqlx::query_as(concat!(
            "insert into feedback (run_id, feedback_id, created_at, rating, comment, position, user_label)
            select run_id, $2, $3, $4, $5, $6, $7 from runs where run_id = $1 and ",
            visible!(8),
            " returning feedback_id, created_at, rating, comment as text, position, user_label",
        ))
        .bind(run_id.0)
        .bind(system::new_id())
        .bind(now)
        .bind(feedback.rating)
        .bind(text)
        .bind(feedback.position.and_then(|position| i32::try_from(position).ok()))
        .bind(feedback.user_label.as_deref().map(clean))
        .bind(owners(scope))
        .fetch_optional(&mut *transaction)
        .await?;
        if stored.is_some() {
            let label = FeedbackKind::from_rating(feedback.rating).label();
            let add = "update runs set labels = array_append(labels, $2), version = version + 1
                where run_id = $1 and not labels @> array[$2]";
            sqlx::query(add).bind(run_id.0).bind(label).execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(stored)
    }

    /// Returns the feedback on a run, oldest first; none for a run outside the scope.
    ///
    /// # Errors
    /// The database failed.
    pub async fn feedback(&self, scope: &Scope, run_id: RunId) -> Result<Vec<Feedback>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !covers(&mut connection, scope, run_id).await? {
            return Ok(Vec::new());
        }
        let rows = sqlx::query_as(
            "select feedback_id, created_at, rating, comment as text, position, user_label from feedback
            where run_id = $1 order by feedback_id",
        )
        .bind(run_id.0)
        .fetch_all(&mut connection)
        .await?;
        Ok(rows)
    }
}
