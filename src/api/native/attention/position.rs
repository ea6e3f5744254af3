//! The attention of a run's steps to one position.

use super::map::windows;
use super::{AttentionView, ViewSelection, codec_error, not_stored, view_values};
use crate::events::{RunId, Scope};
use crate::server::ApiError;
use crate::store::{AttentionParts, HeadRowsPart, Store, ValueRow};
use crate::trace::attention::{HeadLocation, decode_value, find_head};
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
    #[serde(skip_serializing_if = "Option::is_none")]
    head: Option<u16>,
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
    selection: ViewSelection,
) -> Result<PositionAttention, ApiError> {
    let end = events.end.min(events.start.saturating_add(MAX_EVENTS));
    let page = events.start..end;
    let stored_values = async |row: ValueRow<'_>| -> Result<Vec<PositionRow>, ApiError> {
        let Ok(position) = i32::try_from(position) else { return Ok(Vec::new()) };
        let values = store.attention_values(scope, run_id, page.clone(), row, position).await?;
        let rows = values.into_iter();
        Ok(rows.map(|(sequence_order, value)| PositionRow { sequence_order, value: decode_value(value) }).collect())
    };
    let rows = match selection.view {
        AttentionView::Mean => stored_values(ValueRow::Overview(0)).await?,
        AttentionView::Max => stored_values(ValueRow::Overview(1)).await?,
        AttentionView::Last => stored_values(ValueRow::Overview(2)).await?,
        AttentionView::Head => match find_head_location(store, scope, run_id, page.end, selection).await? {
            Some(location) => stored_values(ValueRow::Head(&location)).await?,
            None => Vec::new(),
        },
        AttentionView::WeightedLayers | AttentionView::Layer => {
            decoded_values(store, scope, run_id, page.clone(), position, selection).await?
        }
    };
    let next = (end < events.end).then_some(end);
    let ViewSelection { view, layer, head } = selection;
    Ok(PositionAttention { position, view, layer, head, next, rows })
}

/// Returns the location of the head in the stored steps, read from the first step of the run, because later ones may
/// have no rows of heads; `None` if there is no step before the end of the page.
async fn find_head_location(
    store: &Store,
    scope: &Scope,
    run_id: RunId,
    page_end: i32,
    selection: ViewSelection,
) -> Result<Option<HeadLocation>, ApiError> {
    let (layer, head) = selection.layer_and_head()?;
    let parts = AttentionParts { t1: false, head_rows: HeadRowsPart::Table };
    let Some(step) = store.first_attention(scope, run_id, 0..page_end, parts).await? else { return Ok(None) };
    let location = find_head(&step.head_rows, layer, head).map_err(|error| codec_error(&step, &error))?;
    location.map(Some).ok_or_else(|| not_stored(layer, head))
}

/// Reads the values of a view that is not stored but computed from stored rows.
async fn decoded_values(
    store: &Store,
    scope: &Scope,
    run_id: RunId,
    page: Range<i32>,
    position: u32,
    selection: ViewSelection,
) -> Result<Vec<PositionRow>, ApiError> {
    let mut rows = Vec::new();
    for window in windows(&page, false) {
        for step in store.attention_range(scope, run_id, window, selection.parts()).await? {
            let values = view_values(&step, selection)?;
            if let Some(&value) = values.get(position as usize) {
                rows.push(PositionRow { sequence_order: step.sequence_order, value });
            }
        }
    }
    Ok(rows)
}
