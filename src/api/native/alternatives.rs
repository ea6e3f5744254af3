//! `/api/v1/runs/{id}/alternatives`: what else could have come, step by step.

use super::event_range;
use crate::api::extract::{Path, Query};
use crate::api::{ApiError, App, Problem};
use crate::events::{Alternative, Event, EventType, Measurements, RawJson, StageCount, TokenId, TraceItem};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

/// Most events of one answer; a page asks for what it shows.
const MOST_EVENTS: i32 = 6000;

/// Which events.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListAlternatives {
    /// First event, by `sequence_order`; 0 when absent.
    from: Option<i32>,
    /// One past the last event; 6000 events after `from` at most, and when absent.
    to: Option<i32>,
}

/// What else could have come.
#[derive(Debug, Serialize, ToSchema)]
pub struct Alternatives {
    /// One entry for each `ForwardPass` of the range.
    alternatives: Vec<Candidates>,
}

/// What else could have come at one step.
#[derive(Debug, Serialize, ToSchema)]
pub struct Candidates {
    /// The step's `ForwardPass`.
    sequence_order: i32,
    /// The step.
    step: i32,
    /// Index in the sequence of the token to come; `null` where a foreign trace does not say.
    position: Option<u32>,
    /// The token that was drawn; `null` when a mod decided instead.
    chosen: Option<TokenId>,
    /// The model's most probable tokens, `[{token, text, prob}]`; a foreign trace's `top_tokens` as they were given.
    model: Value,
    /// The same after mods edited the logits; empty when none did.
    #[schema(value_type = Vec<Object>)]
    after_mods: Vec<Alternative>,
    /// The distribution that was drawn from.
    #[schema(value_type = Vec<Object>)]
    after_sampler: Vec<Alternative>,
    /// The sampler's stages and how many candidates each left.
    #[schema(value_type = Vec<Object>)]
    stages: Vec<StageCount>,
}

/// Lists the candidates of every step: the model's, those after mods, and those that were drawn from.
#[utoipa::path(get, path = "/api/v1/runs/{id}/alternatives", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`"), ListAlternatives), responses(
    (status = 200, body = Alternatives), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub async fn list(
    State(app): State<App>,
    Path(id): Path<String>,
    Query(query): Query<ListAlternatives>,
) -> Result<Json<Alternatives>, ApiError> {
    let range = event_range(query.from, query.to)?;
    let end = range.end.min(range.start.saturating_add(MOST_EVENTS));
    let run = app.find_run(&id).await?;
    // One more, since the draw of the last step comes right after its forward pass.
    let items = app.store()?.items(run.run_id, range.start..end.saturating_add(1)).await?;
    Ok(Json(Alternatives { alternatives: steps(items, end) }))
}

fn steps(items: Vec<TraceItem>, end: i32) -> Vec<Candidates> {
    let mut steps: Vec<Candidates> = Vec::new();
    for item in items {
        let TraceItem::Event(event) = item else { continue };
        match event.event_type {
            EventType::ForwardPass if event.sequence_order < end => steps.push(Candidates::begin(event)),
            EventType::Sampled => {
                if let Some(step) = steps.last_mut().filter(|step| step.step == event.step) {
                    step.draw(event);
                }
            }
            _ => {}
        }
    }
    steps
}

impl Candidates {
    fn begin(event: Event) -> Self {
        let measured = measured(event.measured);
        let given = |raw: RawJson| serde_json::from_str(raw.get()).unwrap_or(Value::Null);
        let model = match event.top_tokens {
            Some(top) if measured.model.is_empty() => given(top),
            _ => serde_json::to_value(&measured.model).unwrap_or(Value::Null),
        };
        Self {
            sequence_order: event.sequence_order,
            step: event.step,
            position: measured.position,
            chosen: None,
            model,
            after_mods: Vec::new(),
            after_sampler: Vec::new(),
            stages: Vec::new(),
        }
    }

    fn draw(&mut self, event: Event) {
        let measured = measured(event.measured);
        self.chosen = event.sampled_token.or_else(|| measured.tokens.first().map(|measure| measure.token));
        self.after_mods = measured.after_mods;
        self.after_sampler = measured.after_sampler;
        self.stages = measured.stages;
    }
}

fn measured(measured: Option<Box<Measurements>>) -> Measurements {
    measured.map(|measured| *measured).unwrap_or_default()
}
