//! Attention of stored runs, encoded as it was captured.

use super::scope::covers;
use super::{Error, Store};
use crate::events::{AttentionStep, RunId, Scope};
use crate::trace::attention::{HeadLocation, T0_HEADER};
use sqlx::postgres::PgRow;
use sqlx::{FromRow, Row};
use std::ops::Range;

/// The parts of a step that are read besides T0, the overview over all heads. The others are empty.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AttentionParts {
    /// True to read T1, the means over the heads of each layer.
    pub t1: bool,
    /// The part of the rows of single heads to read.
    pub head_rows: HeadRowsPart,
}

/// A part of the rows of single heads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HeadRowsPart {
    /// Nothing.
    #[default]
    None,
    /// The table of stored heads.
    Table,
    /// Table and rows.
    Rows,
}

/// The row that a value is read from.
#[derive(Debug, Clone, Copy)]
pub enum ValueRow<'a> {
    /// A vector of T0: 0 for the mean, 1 for the maximum, 2 for the last layer.
    Overview(u8),
    /// The row of one head.
    Head(&'a HeadLocation),
}

impl Store {
    /// Returns the attention of the steps in a range of events, in order; none for a run outside the scope.
    ///
    /// # Errors
    /// The database failed, or the stored data is damaged.
    pub async fn attention_range(
        &self,
        scope: &Scope,
        run_id: RunId,
        events: Range<i32>,
        parts: AttentionParts,
    ) -> Result<Vec<AttentionStep>, Error> {
        self.attention_steps(scope, run_id, events, parts, None).await
    }

    /// Returns the first step with attention in a range of events; `None` without one, or for a run outside the scope.
    ///
    /// # Errors
    /// The database failed.
    pub async fn first_attention(
        &self,
        scope: &Scope,
        run_id: RunId,
        events: Range<i32>,
        parts: AttentionParts,
    ) -> Result<Option<AttentionStep>, Error> {
        Ok(self.attention_steps(scope, run_id, events, parts, Some(1)).await?.pop())
    }

    async fn attention_steps(
        &self,
        scope: &Scope,
        run_id: RunId,
        events: Range<i32>,
        parts: AttentionParts,
        max_steps: Option<i64>,
    ) -> Result<Vec<AttentionStep>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !covers(&mut connection, scope, run_id).await? {
            return Ok(Vec::new());
        }
        // Bytes 7 and 8 of the rows are the number of heads in the table.
        let steps: Vec<AttentionRow> = sqlx::query_as(
            "select sequence_order, row_len, heads, layer_ids, t0, case when $4 then t1 else '' end as t1,
                case when $5 = 2 then head_rows
                    when $5 = 1 and octet_length(head_rows) >= 8 then substring(head_rows for 12
                        + 4 * get_byte(substring(head_rows from 7 for 1), 0)
                        + 1024 * get_byte(substring(head_rows from 8 for 1), 0))
                    else '' end as head_rows
            from attention where run_id = $1 and sequence_order >= $2 and sequence_order < $3 order by sequence_order
            limit $6",
        )
        .bind(run_id.0)
        .bind(events.start)
        .bind(events.end)
        .bind(parts.t1)
        .bind(parts.head_rows as i32)
        .bind(max_steps)
        .fetch_all(&mut connection)
        .await?;
        Ok(steps.into_iter().map(|row| row.0).collect())
    }

    /// Returns the value of a row at a position, as f16, for each step in a range of events, with the event of the
    /// step. Skips steps whose row is shorter or not stored. Returns an empty list for a run outside the scope. Reads only the
    /// value from each row.
    ///
    /// # Errors
    /// The database failed.
    pub async fn attention_values(
        &self,
        scope: &Scope,
        run_id: RunId,
        events: Range<i32>,
        row: ValueRow<'_>,
        position: i32,
    ) -> Result<Vec<(i32, [u8; 2])>, Error> {
        let mut connection = self.inner.pool.acquire().await?;
        if !covers(&mut connection, scope, run_id).await? {
            return Ok(Vec::new());
        }
        let query = match row {
            ValueRow::Overview(_) => {
                "select sequence_order, substring(t0 from $5 + 2 * ($6 * row_len + $4) for 2) as value
                from attention where run_id = $1 and sequence_order >= $2 and sequence_order < $3 and row_len > $4
                order by sequence_order"
            }
            ValueRow::Head(_) => {
                "select sequence_order, substring(head_rows from $5 + 2 * ($6 * row_len + $4) for 2) as value
                from attention where run_id = $1 and sequence_order >= $2 and sequence_order < $3 and row_len > $4
                    and substring(head_rows for 8) = $7 and substring(head_rows from $8 for 4) = $9
                order by sequence_order"
            }
        };
        // SQL counts bytes from 1.
        let (offset, index) = match row {
            ValueRow::Overview(vector) => (T0_HEADER + 1, i32::from(vector)),
            ValueRow::Head(place) => (place.rows_at + 1, place.index as i32),
        };
        let query = sqlx::query(query).bind(run_id.0).bind(events.start).bind(events.end);
        let query = query.bind(position).bind(offset as i32).bind(index);
        let query = match row {
            ValueRow::Overview(_) => query,
            ValueRow::Head(place) => query.bind(place.start).bind(place.entry_at as i32 + 1).bind(place.entry),
        };
        let rows = query.fetch_all(&mut connection).await?;
        rows.iter()
            .map(|row| {
                let value: Vec<u8> = row.try_get("value")?;
                let value =
                    value.try_into().map_err(|_| sqlx::Error::Decode("attention: a row is too short".into()))?;
                Ok((row.try_get("sequence_order")?, value))
            })
            .collect()
    }
}

struct AttentionRow(AttentionStep);

impl FromRow<'_, PgRow> for AttentionRow {
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
            head_rows: row.try_get("head_rows")?,
        }))
    }
}
