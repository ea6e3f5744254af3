//! `/api/v1/runs/{id}/alternatives`: the candidates of every step.

use super::event_range;
use crate::events::{
    Alternative, Event, EventType, LogitLens, Measurements, RawJson, Scope, StageCount, TokenId, TraceItem,
};
use crate::server::extract::{Path, Query};
use crate::server::{ApiError, App, Problem};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};

/// Maximum events per response.
const MAX_EVENTS: i32 = 6000;

/// Query parameters of the list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListAlternativesParams {
    /// First event by `sequence_order`; default 0.
    from: Option<i32>,
    /// Event after the last one; default and maximum are `from` + 6000.
    to: Option<i32>,
}

/// The candidates of a range of steps.
#[derive(Debug, Serialize, ToSchema)]
pub struct Alternatives {
    /// One entry per `ForwardPass` of the range.
    alternatives: Vec<StepAlternatives>,
}

/// The candidates of one step.
#[derive(Debug, Serialize, ToSchema)]
pub struct StepAlternatives {
    /// `sequence_order` of the step's `ForwardPass`.
    sequence_order: i32,
    /// Number of the step.
    step: i32,
    /// Index of the next token in the context; `null` if an ingested run does not report it.
    position: Option<u32>,
    /// The sampled token; `null` if a mod chose the tokens instead.
    chosen: Option<TokenId>,
    /// The model's most probable tokens, `[{token, text, prob}]`; for an ingested run its `top_tokens`.
    model: Value,
    /// Logits of the first tokens of `model`, up to 64, after each layer; `null` if the request did not have `lens`.
    lens: Option<Box<LogitLens>>,
    /// Candidates after mods edited the logits; empty if none did.
    after_mods: Vec<Alternative>,
    /// The candidates after the sampling stages, from which the token was sampled.
    after_sampler: Vec<Alternative>,
    /// The sampling stages, each with the number of candidates after it.
    stages: Vec<StageCount>,
    /// The draft token of speculative decoding; `null` if there was none.
    drafted: Option<TokenId>,
}

/// Lists the candidates of every step: the model's, those after mods, and those sampled from.
#[utoipa::path(get, path = "/api/v1/runs/{id}/alternatives", tag = "runs",
    params(("id" = String, Path, description = "`run_id` or `request_id`"), ListAlternativesParams), responses(
    (status = 200, body = Alternatives), (status = 400, body = Problem), (status = 404, body = Problem)))]
pub async fn list(
    State(app): State<App>,
    scope: Scope,
    Path(id): Path<String>,
    Query(query): Query<ListAlternativesParams>,
) -> Result<Json<Alternatives>, ApiError> {
    let range = event_range(query.from, query.to)?;
    let end = range.end.min(range.start.saturating_add(MAX_EVENTS));
    let run = app.find_run(&scope, &id).await?;
    // One more event, because the `Sampled` event of the last step follows its forward pass.
    let items = app.store()?.items(&scope, run.run_id, range.start..end.saturating_add(1)).await?;
    Ok(Json(Alternatives { alternatives: steps(items, end) }))
}

fn steps(items: Vec<TraceItem>, end: i32) -> Vec<StepAlternatives> {
    let mut steps: Vec<StepAlternatives> = Vec::new();
    for item in items {
        let TraceItem::Event(event) = item else { continue };
        match event.event_type {
            EventType::ForwardPass if event.sequence_order < end => {
                steps.push(StepAlternatives::from_forward_pass(event));
            }
            EventType::Sampled => {
                if let Some(step) = steps.last_mut().filter(|step| step.step == event.step) {
                    step.add_sampled(event);
                }
            }
            _ => {}
        }
    }
    steps
}

impl StepAlternatives {
    fn from_forward_pass(event: Event) -> Self {
        let measured = measured(event.measured);
        let parse = |raw: RawJson| serde_json::from_str(raw.get()).unwrap_or(Value::Null);
        let model = match event.top_tokens {
            Some(top) if measured.model.is_empty() => parse(top),
            _ => serde_json::to_value(&measured.model).unwrap_or(Value::Null),
        };
        Self {
            sequence_order: event.sequence_order,
            step: event.step,
            position: measured.position,
            chosen: None,
            model,
            lens: measured.lens,
            after_mods: Vec::new(),
            after_sampler: Vec::new(),
            stages: Vec::new(),
            drafted: None,
        }
    }

    fn add_sampled(&mut self, event: Event) {
        let measured = measured(event.measured);
        self.chosen = event.sampled_token.or_else(|| measured.tokens.first().map(|measurement| measurement.token));
        self.after_mods = measured.after_mods;
        self.after_sampler = measured.after_sampler;
        self.stages = measured.stages;
        self.drafted = measured.drafted;
    }
}

fn measured(measured: Option<Box<Measurements>>) -> Measurements {
    measured.map(|measured| *measured).unwrap_or_default()
}
