//! `GET /slots`, for monitoring. A request never delays the engine.

use super::require_slots;
use crate::api::shared::error::LlamaError;
use crate::api::shared::generation::ThunderFields;
use crate::api::shared::settings::{GenerationSettings, ReportedOptions};
use crate::engine::{Engine, SlotView};
use crate::events::Scope;
use crate::server::extract::Query;
use crate::server::{ApiError, App};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(slots))
}

#[derive(Debug, Deserialize)]
struct SlotsParams {
    model: Option<String>,
    fail_on_no_slot: Option<String>,
}

/// Lists the state of every slot. `?fail_on_no_slot=1` returns 503 while no slot is free. Prompts and answers are not
/// included. The fields of a run are absent if it belongs to another tenant.
#[utoipa::path(get, path = "/slots", tag = "llama-server",
    params(("fail_on_no_slot" = Option<String>, Query, description = "1 returns 503 while no slot is free")),
    responses((status = 200, body = Vec<SlotResponse>),
              (status = 501, description = "The server was started with --no-slots"),
              (status = 503, description = "No slot is free and `fail_on_no_slot` is set")))]
async fn slots(
    State(app): State<App>,
    scope: Scope,
    query: Result<Query<SlotsParams>, ApiError>,
) -> Result<Json<Vec<SlotResponse>>, LlamaError> {
    let Query(query) = query?;
    require_slots(&app)?;
    let loaded = app.get_or_wake(query.model.as_deref()).await?;
    let engine = loaded.engine();
    let slots = engine.status().slots();
    let fails = query.fail_on_no_slot.is_some_and(|value| !matches!(value.as_str(), "" | "0" | "false"));
    if fails && slots.iter().all(|slot| slot.busy) {
        return Err(ApiError::unavailable("no slot is free").into());
    }
    Ok(Json(slots.iter().enumerate().map(|(id, slot)| slot_response(&scope, id, slot, engine)).collect()))
}

/// The state of a slot.
#[derive(Debug, Default, Serialize, ToSchema)]
struct SlotResponse {
    /// Index of the slot, from 0.
    id: usize,
    /// Its context in tokens.
    n_ctx: u32,
    /// True if runs draft tokens.
    speculative: bool,
    /// True while it has an active run.
    is_processing: bool,
    /// Number of the slot's newest run. This and the following fields are absent if the run belongs to another tenant.
    #[serde(skip_serializing_if = "Option::is_none")]
    id_task: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens: Option<u32>,
    /// Prompt tokens decoded so far.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens_processed: Option<u32>,
    /// Prompt tokens from the cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_prompt_tokens_cache: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    params: Option<GenerationSettings>,
    #[schema(value_type = Option<Vec<NextToken>>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    next_token: Option<[NextToken; 1]>,
    /// The run.
    #[serde(skip_serializing_if = "Option::is_none")]
    thunder: Option<ThunderFields>,
}

/// The state of an answer.
#[derive(Debug, Serialize, ToSchema)]
struct NextToken {
    has_next_token: bool,
    /// True if the answer has a line break.
    has_new_line: bool,
    /// Tokens left until the limit; -1 if the run has ended.
    n_remain: i64,
    /// Tokens generated so far; 0 if the run has ended.
    n_decoded: u32,
}

fn slot_response(scope: &Scope, id: usize, slot: &SlotView, engine: &Engine) -> SlotResponse {
    let hidden = SlotResponse {
        id,
        n_ctx: engine.context_per_slot(),
        speculative: engine.speculates(),
        is_processing: slot.busy,
        ..SlotResponse::default()
    };
    let run = slot.run.as_ref().filter(|run| scope.includes(run.owner.as_ref()));
    let Some(run) = run else { return hidden };
    let n_predict = i64::from(run.limits.max_tokens);
    let options = ReportedOptions { n_predict, adapters: run.adapters.clone(), ..ReportedOptions::default() };
    SlotResponse {
        id_task: Some(slot.task),
        n_prompt_tokens: Some(slot.prompt_tokens),
        n_prompt_tokens_processed: Some(slot.decoded),
        n_prompt_tokens_cache: Some(slot.cached),
        params: Some(GenerationSettings::new(&run.sampling, &run.limits, &options)),
        next_token: Some([NextToken {
            has_next_token: slot.busy,
            has_new_line: slot.new_line,
            n_remain: if slot.busy { n_predict - i64::from(slot.generated) } else { -1 },
            n_decoded: if slot.busy { slot.generated } else { 0 },
        }]),
        thunder: Some(ThunderFields::run(run.run_id)),
        ..hidden
    }
}
