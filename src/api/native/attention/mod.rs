//! `/api/v1/runs/{id}/attention`: the row of one step, or a map of many steps.

mod map;
mod position;

use super::event_range;
use crate::events::{AttentionStep, RunId, Scope};
use crate::server::extract::{Path, Query};
use crate::server::{ApiError, App, ErrorKind, Problem};
use crate::store::{AttentionParts, HeadRowsPart, RunSummary, Store};
use crate::trace::attention::{self, HeadStatistics};
use axum::Json;
use axum::extract::State;
use map::AttentionMap;
use position::PositionAttention;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Maximum events between a step's forward pass, which has the attention, and its last event.
const MAX_EVENTS_AFTER_PASS: i32 = 2;

/// Query parameters.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ShowAttentionParams {
    /// `sequence_order` of the step's `ForwardPass` or of a later event of the step.
    at: Option<i32>,
    /// Aggregation of the heads; default `mean`.
    #[serde(default)]
    #[param(inline)]
    view: AttentionView,
    /// Layer, with the views `layer` and `head`; one of `layer_ids`.
    layer: Option<u16>,
    /// Index of the head in the layer, with the view `head`; layer and head must be one of `stored_heads`.
    head: Option<u16>,
    /// First event of a map, instead of `at`.
    from: Option<i32>,
    /// Event after the last one of the map.
    to: Option<i32>,
    /// Maximum columns of the map, 1 to 4096; default 256. A column has the largest value of its positions.
    bins: Option<usize>,
    /// Position in the context. With `from` and `to`, the response has the exact value of this position at every step
    /// instead of a map, for any view. A page covers 3072 events; `next` is the first event of the next page. The
    /// `evicted` ranges in an event's `details` are removed from the context, so later tokens change their position.
    position: Option<u32>,
}

impl ShowAttentionParams {
    fn selection(&self) -> ViewSelection {
        ViewSelection { view: self.view, layer: self.layer, head: self.head }
    }
}

/// Aggregation of the heads of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttentionView {
    /// Mean over all heads of all layers.
    #[default]
    Mean,
    /// Maximum over all heads of all layers.
    Max,
    /// Mean over the heads of the last layer.
    Last,
    /// Mean over all heads; layer l of L has the weight 0.5 + l / L.
    WeightedLayers,
    /// Mean over the heads of one layer.
    Layer,
    /// The row of one head, if the run stores it.
    Head,
}

/// The selected view with its layer and head.
#[derive(Debug, Clone, Copy)]
pub(super) struct ViewSelection {
    pub(super) view: AttentionView,
    pub(super) layer: Option<u16>,
    pub(super) head: Option<u16>,
}

impl ViewSelection {
    /// Returns the parts of a step that the view is computed from.
    pub(super) const fn parts(self) -> AttentionParts {
        let head_rows = match self.view {
            AttentionView::Head => HeadRowsPart::Rows,
            _ => HeadRowsPart::None,
        };
        AttentionParts { t1: self.view.reads_layers(), head_rows }
    }

    /// Returns layer and head of the view `head`.
    pub(super) fn layer_and_head(self) -> Result<(u16, u16), ApiError> {
        self.layer.zip(self.head).ok_or_else(|| {
            ApiError::invalid("head", "view=head requires `layer` and `head`; `stored_heads` lists the possible pairs")
        })
    }
}

impl AttentionView {
    /// Returns true for views that are computed from the values of single layers, which are stored as `u8`.
    pub(super) const fn reads_layers(self) -> bool {
        matches!(self, Self::WeightedLayers | Self::Layer)
    }

    /// Returns the precision of the view's values.
    pub(super) const fn precision(self) -> &'static str {
        if self.reads_layers() { "u8" } else { "f16" }
    }
}

/// The attention of one step, of many steps, or to one position.
#[derive(Debug, Serialize, ToSchema)]
pub struct RunAttentionResponse {
    attention: RunAttention,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum RunAttention {
    /// With `at`.
    Step(StepAttention),
    /// With `from` and `to`.
    Map(AttentionMap),
    /// With `from`, `to` and `position`.
    Position(PositionAttention),
}

/// The attention of one step.
#[derive(Debug, Serialize, ToSchema)]
pub struct StepAttention {
    /// `sequence_order` of its `ForwardPass`.
    sequence_order: i32,
    /// Number of positions in the context.
    row_len: u32,
    /// The layers with attention.
    layer_ids: Vec<u16>,
    /// Heads per layer.
    heads: u16,
    /// Aggregation of the heads.
    view: AttentionView,
    /// Precision of the values: `f16`, or `u8` on a square-root scale.
    quality: &'static str,
    /// One value per position.
    values: Vec<f32>,
    /// The position with the largest mean.
    sink: u32,
    /// Statistics of every head.
    stats: Vec<HeadMeasures>,
    /// Layer and head of each stored row, for the view `head`.
    stored_heads: Vec<(u16, u16)>,
}

/// Statistics of one head.
#[derive(Debug, Serialize, ToSchema)]
pub struct HeadMeasures {
    /// Layer of the head.
    layer: u16,
    /// Index of the head in the layer.
    head: u16,
    #[serde(flatten)]
    measures: HeadStatistics,
}

/// Returns the attention of one step (`at`), a map of steps × positions (`from`, `to`, `bins`), or the attention of the
/// steps to one position (`from`, `to`, `position`).
#[utoipa::path(get, path = "/api/v1/runs/{id}/attention", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`"), ShowAttentionParams), responses(
    (status = 200, body = RunAttentionResponse),
    (status = 400, body = Problem), (status = 404, body = Problem, description = "Unknown run, or no attention recorded")))]
pub async fn show(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(query): Query<ShowAttentionParams>,
) -> Result<Json<RunAttentionResponse>, ApiError> {
    let run = app.find_run(&scope, &id).await?;
    let attention = read(app.store()?, &scope, &run, &query).await?;
    Ok(Json(RunAttentionResponse { attention }))
}

async fn read(
    store: &Store,
    scope: &Scope,
    run: &RunSummary,
    query: &ShowAttentionParams,
) -> Result<RunAttention, ApiError> {
    if let Some(at) = query.at {
        return step(store, scope, run.run_id, at, query).await.map(RunAttention::Step);
    }
    if query.from.is_none() && query.to.is_none() {
        return Err(ApiError::invalid("at", "send either `at` (an event), or `from` and `to` (a range of events)"));
    }
    let events = event_range(query.from, query.to)?;
    let events = events.start..events.end.min(run.events);
    let selection = query.selection();
    if let Some(position) = query.position {
        let read = position::read(store, scope, run.run_id, events, position, selection).await?;
        return Ok(RunAttention::Position(read));
    }
    let bins = query.bins.unwrap_or(map::DEFAULT_BINS);
    if !(1..=map::MAX_BINS).contains(&bins) {
        return Err(ApiError::invalid(
            "bins",
            format!("`bins` must be an integer between 1 and {}, got {bins}", map::MAX_BINS),
        ));
    }
    if matches!(query.view, AttentionView::Layer | AttentionView::Head) {
        return Err(ApiError::invalid("view", "`view` of a map must be mean, max, last or weighted_layers"));
    }
    map::read(store, scope, run.run_id, events, selection, bins).await.map(RunAttention::Map)
}

async fn step(
    store: &Store,
    scope: &Scope,
    run_id: RunId,
    at: i32,
    query: &ShowAttentionParams,
) -> Result<StepAttention, ApiError> {
    let range = at.saturating_sub(MAX_EVENTS_AFTER_PASS).max(0)..at.saturating_add(1);
    let selection = query.selection();
    let mut parts = selection.parts();
    if parts.head_rows == HeadRowsPart::None {
        parts.head_rows = HeadRowsPart::Table;
    }
    let step = store.attention_range(scope, run_id, range, parts).await?.pop();
    let step = step.ok_or_else(|| {
        ApiError::new(ErrorKind::NotFound, format!("no attention was recorded at event {at} of this run"))
    })?;
    let overview = attention::decode_t0(&step.t0).map_err(|error| codec_error(&step, &error))?;
    let AttentionStep { sequence_order, row_len, layer_ids, heads, .. } = &step;
    let values = match query.view {
        AttentionView::Mean => overview.mean,
        AttentionView::Max => overview.max,
        AttentionView::Last => overview.last_layer,
        AttentionView::WeightedLayers | AttentionView::Layer | AttentionView::Head => view_values(&step, selection)?,
    };
    let stored_heads = attention::decode_head_table(&step.head_rows).map_err(|error| codec_error(&step, &error))?;
    let all_heads = layer_ids.iter().flat_map(|&layer| (0..*heads).map(move |head| (layer, head)));
    let stats =
        all_heads.zip(overview.stats).map(|((layer, head), measures)| HeadMeasures { layer, head, measures }).collect();
    Ok(StepAttention {
        sequence_order: *sequence_order,
        row_len: *row_len,
        layer_ids: layer_ids.to_vec(),
        heads: *heads,
        view: query.view,
        quality: query.view.precision(),
        values,
        sink: overview.sink,
        stats,
        stored_heads,
    })
}

/// Decodes the values of one layer, one per position.
fn layer_values(step: &AttentionStep, layer: Option<u16>) -> Result<Vec<f32>, ApiError> {
    let index = layer.and_then(|layer| step.layer_ids.iter().position(|&known| known == layer));
    let index = index.ok_or_else(|| {
        ApiError::invalid("layer", format!("view=layer requires `layer`, one of {:?}", step.layer_ids))
    })?;
    attention::decode_t1(&step.t1, index).map_err(|error| codec_error(step, &error))
}

/// Decodes the values of one head, one per position.
fn head_values(step: &AttentionStep, selection: ViewSelection) -> Result<Vec<f32>, ApiError> {
    let (layer, head) = selection.layer_and_head()?;
    let values = attention::decode_head(&step.head_rows, layer, head).map_err(|error| codec_error(step, &error))?;
    values.ok_or_else(|| not_stored(layer, head))
}

/// Returns the error for a head whose rows are not stored.
pub(super) fn not_stored(layer: u16, head: u16) -> ApiError {
    let detail = format!(
        "the attention rows of layer {layer}, head {head} are not stored; a run stores them if its request has \
         \"attention\": {{\"heads\": [[{layer}, {head}]]}}"
    );
    ApiError::new(ErrorKind::NotFound, detail)
}

/// Decodes the values of a view, one per position.
pub(super) fn view_values(step: &AttentionStep, selection: ViewSelection) -> Result<Vec<f32>, ApiError> {
    let overview = || attention::decode_t0(&step.t0).map_err(|error| codec_error(step, &error));
    match selection.view {
        AttentionView::Mean => Ok(overview()?.mean),
        AttentionView::Max => Ok(overview()?.max),
        AttentionView::Last => Ok(overview()?.last_layer),
        AttentionView::WeightedLayers => {
            attention::decode_t1_weighted(&step.t1, step.layer_ids.len()).map_err(|error| codec_error(step, &error))
        }
        AttentionView::Layer => layer_values(step, selection.layer),
        AttentionView::Head => head_values(step, selection),
    }
}

/// Returns the error for stored attention that cannot be decoded.
pub(super) fn codec_error(step: &AttentionStep, error: &attention::AttentionCodecError) -> ApiError {
    ApiError::internal(format!("decoding the stored attention of event {} failed: {error}", step.sequence_order))
}
