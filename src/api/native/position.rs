//! Attention of the steps of a run to one position.

use super::attention::{AttentionView, view_values};
use super::map::windows;
use crate::events::{RunId, Scope};
use crate::server::ApiError;
use crate::store::Store;
use serde::Serialize;
use std::ops::Range;
use utoipa::ToSchema;

/// Maximum events per response, so that a long run is read in pages.
const MAX_EVENTS: i32 = 3072;

/// The attention of steps to one position.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct PositionAttention {
    position: u32,
    view: AttentionView,
    layer: Option<u16>,
    /// First event of the next page; `null` on the last page.
    next: Option<i32>,
    /// The steps whose row contains the position.
    rows: Vec<PositionRow>,
}

/// The attention of one step to the position.
#[derive(Debug, Serialize, ToSchema)]
struct PositionRow {
    /// `sequence_order` of the step's `ForwardPass`.
    sequence_order: i32,
    value: f32,
}

/// Reads the value of `position` at every step of a range of events.
pub(super) async fn read(
    store: &Store,
    scope: &Scope,
    run_id: RunId,
    events: Range<i32>,
    position: u32,
    (view, layer): (AttentionView, Option<u16>),
) -> Result<PositionAttention, ApiError> {
    let end = events.end.min(events.start.saturating_add(MAX_EVENTS));
    let mut rows = Vec::new();
    for window in windows(&(events.start..end), false) {
        for step in store.attention_range(scope, run_id, window, view.reads_layers()).await? {
            let values = view_values(&step, view, layer)?;
            if let Some(&value) = values.get(position as usize) {
                rows.push(PositionRow { sequence_order: step.sequence_order, value });
            }
        }
    }
    let next = (end < events.end).then_some(end);
    Ok(PositionAttention { position, view, layer, next, rows })
}
