//! Attention of stored runs, in the encoding of the capture.

use super::scope::covers;
use super::{Error, Store};
use crate::events::{AttentionStep, RunId, Scope};
use sqlx::postgres::PgRow;
use sqlx::{FromRow, Row};
use std::ops::Range;

impl Store {
    /// Returns the attention of one step, both tiers; `None` for a run outside the scope.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn attention(
        &self,
        scope: &Scope,
        run_id: RunId,
        sequence_order: i32,
    ) -> Result<Option<AttentionStep>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !covers(&mut connection, scope, run_id).await? {
            return Ok(None);
        }
        let step: Option<Stored> = sqlx::query_as(
            "select sequence_order, row_len, heads, layer_ids, t0, t1 from attention
            where run_id = $1 and sequence_order = $2",
        )
        .bind(run_id.0)
        .bind(sequence_order)
        .fetch_optional(&mut connection)
        .await?;
        Ok(step.map(|stored| stored.0))
    }

    /// Returns the attention of the steps in a range of events, in order; none for a run outside the scope. `t1` is empty
    /// unless `with_t1` is set.
    ///
    /// # Errors
    /// The database failed, or what is stored is damaged.
    pub async fn attention_range(
        &self,
        scope: &Scope,
        run_id: RunId,
        events: Range<i32>,
        with_t1: bool,
    ) -> Result<Vec<AttentionStep>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !covers(&mut connection, scope, run_id).await? {
            return Ok(Vec::new());
        }
        let steps: Vec<Stored> = sqlx::query_as(
            "select sequence_order, row_len, heads, layer_ids, t0, case when $4 then t1 else '' end as t1 from attention
            where run_id = $1 and sequence_order >= $2 and sequence_order < $3 order by sequence_order",
        )
        .bind(run_id.0)
        .bind(events.start)
        .bind(events.end)
        .bind(with_t1)
        .fetch_all(&mut connection)
        .await?;
        Ok(steps.into_iter().map(|stored| stored.0).collect())
    }
}

struct Stored(AttentionStep);

impl FromRow<'_, PgRow> for Stored {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let out_of_range = |_| sqlx::Error::Decode("attention: a number is out of its range".into());
        let layer_ids: Vec<i32> = row.try_get("layer_ids")?;
        let layer_ids: Vec<u16> =
            layer_ids.into_iter().map(TryInto::try_into).collect::<Result<_, _>>().map_err(out_of_range)?;
        Ok(Self(AttentionStep {
            sequence_order: row.try_get("sequence_order")?,
            row_len: row.try_get::<i32, _>("row_len")?.cast_unsigned(),
            layer_ids: layer_ids.into(),
            heads: row.try_get::<i32, _>("heads")?.try_into().map_err(out_of_range)?,
            t0: row.try_get("t0")?,
            t1: row.try_get("t1")?,
        }))
    }
}
