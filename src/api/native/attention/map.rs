//! The attention map of steps × positions: many rows, reduced to as many columns as a screen can show.

use super::{AttentionView, ViewSelection, view_values};
use crate::events::{AttentionStep, RunId, Scope};
use crate::server::{ApiError, ErrorKind};
use crate::store::Store;
use serde::Serialize;
use std::ops::Range;
use utoipa::ToSchema;

/// Default number of columns.
pub(super) const DEFAULT_BINS: usize = 256;
/// Maximum number of columns.
pub(super) const MAX_BINS: usize = 4096;
/// Maximum number of rows. A longer run is sampled at evenly spaced steps, because reading 10,000 steps would take
/// about 300 MB.
const MAX_ROWS: i32 = 512;
/// Maximum events per step, so that a window of this length contains a forward pass.
const MAX_STEP_EVENTS: i32 = 3;
/// Maximum events per query.
const MAX_QUERY_EVENTS: i32 = 96;

/// The attention of many steps, reduced to columns.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AttentionMap {
    /// Number of positions of the longest row.
    row_len: usize,
    /// Number of columns of that row; shorter rows have fewer.
    bins: usize,
    view: AttentionView,
    /// Precision of the values: `f16`, or `u8` on a square-root scale.
    quality: &'static str,
    /// True if steps were left out.
    sampled: bool,
    rows: Vec<AttentionMapRow>,
}

/// The attention of one step, reduced to columns.
#[derive(Debug, Serialize, ToSchema)]
struct AttentionMapRow {
    /// `sequence_order` of the step's `ForwardPass`.
    sequence_order: i32,
    /// Number of positions.
    row_len: usize,
    /// The largest value of each column.
    values: Vec<f32>,
}

/// Reads the map of a range of events.
pub(super) async fn read(
    store: &Store,
    scope: &Scope,
    run_id: RunId,
    events: Range<i32>,
    selection: ViewSelection,
    bins: usize,
) -> Result<AttentionMap, ApiError> {
    let sampled = events.len() as i64 > i64::from(MAX_ROWS * MAX_STEP_EVENTS);
    let mut rows: Vec<AttentionMapRow> = Vec::new();
    for window in windows(&events, sampled) {
        let mut steps = store.attention_range(scope, run_id, window, selection.parts()).await?;
        if sampled {
            steps.truncate(1);
        }
        let decoded: Result<Vec<_>, _> = steps.into_iter().map(|step| decode(&step, selection)).collect();
        rows.extend(decoded?);
    }
    let row_len = rows.iter().map(|row| row.row_len).max().unwrap_or(0);
    if row_len == 0 {
        return Err(ApiError::new(ErrorKind::NotFound, "this range of events has no recorded attention"));
    }
    let bins = bins.min(row_len);
    for row in &mut rows {
        row.values = max_per_bin(&row.values, row_len, bins);
    }
    let (view, quality) = (selection.view, selection.view.precision());
    Ok(AttentionMap { row_len, bins, view, quality, sampled, rows })
}

/// Splits a range of events into windows that are read one after another; with `sampled`, windows of one step each.
pub(super) fn windows(events: &Range<i32>, sampled: bool) -> Vec<Range<i32>> {
    let (start, len) = (events.start, events.len() as i64);
    if sampled {
        let begin = |row: i32| start + (len * i64::from(row) / i64::from(MAX_ROWS)) as i32;
        return (0..MAX_ROWS).map(|row| begin(row)..begin(row) + MAX_STEP_EVENTS).collect();
    }
    let chunks = (start..events.end).step_by(MAX_QUERY_EVENTS as usize);
    chunks.map(|from| from..events.end.min(from + MAX_QUERY_EVENTS)).collect()
}

fn decode(step: &AttentionStep, selection: ViewSelection) -> Result<AttentionMapRow, ApiError> {
    let values = view_values(step, selection)?;
    Ok(AttentionMapRow { sequence_order: step.sequence_order, row_len: values.len(), values })
}

/// Returns the largest value of every column, rounded to four digits, for `row_len` positions in `bins` columns.
fn max_per_bin(values: &[f32], row_len: usize, bins: usize) -> Vec<f32> {
    let column = |position: usize| position * bins / row_len;
    let mut out = vec![0.0_f32; values.len().checked_sub(1).map_or(0, |last| column(last) + 1)];
    for (position, &value) in values.iter().enumerate() {
        let bin = &mut out[column(position)];
        *bin = bin.max((value * 1e4).round() / 1e4);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{max_per_bin, windows};

    #[test]
    fn bins_show_the_largest_of_their_positions() {
        assert_eq!(max_per_bin(&[0.1, 0.5, 0.2, 0.15, 0.05], 5, 2), [0.5, 0.15]);
        assert_eq!(max_per_bin(&[0.1, 0.5], 5, 2), [0.5]);
        assert_eq!(max_per_bin(&[0.1, 0.5], 5, 5), [0.1, 0.5]);
        assert_eq!(max_per_bin(&[], 5, 5), [0.0; 0]);
    }

    #[test]
    fn windows_cover_the_range_or_spread_over_it() {
        assert_eq!(windows(&(0..200), false), [0..96, 96..192, 192..200]);
        let spread = windows(&(0..60_000), true);
        assert_eq!((spread.len(), spread[0].clone(), spread[511].clone()), (512, 0..3, 59_882..59_885));
    }
}
