//! Engine status: `/slots` for people and dashboards, `/metrics` for Prometheus. Reading it never delays the engine.

use super::props::ModelParams;
use crate::api::shared::error::LlamaError;
use crate::api::shared::generation::ThunderFields;
use crate::api::shared::settings::{GenerationSettings, LlamaResponseOptions};
use crate::engine::{Engine, EngineCounts, SlotView};
use crate::events::Scope;
use crate::server::models::Observed;
use crate::server::{ApiError, App};
use axum::Json;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(slots)).routes(routes!(metrics))
}

#[derive(Debug, Deserialize)]
struct SlotsParams {
    model: Option<String>,
    fail_on_no_slot: Option<String>,
}

/// Lists the state of every slot. `?fail_on_no_slot=1` returns 503 while no slot is free. Prompts and answers are not
/// included. For a slot with a run of another tenant only `is_processing` is shown.
#[utoipa::path(get, path = "/slots", tag = "llama-server",
    params(("fail_on_no_slot" = Option<String>, Query, description = "1 returns 503 while no slot is free")),
    responses((status = 200, body = Vec<SlotResponse>),
              (status = 501, description = "The server was started with --no-slots"),
              (status = 503, description = "No slot is free and `fail_on_no_slot` is set")))]
async fn slots(
    State(app): State<App>,
    scope: Scope,
    Query(query): Query<SlotsParams>,
) -> Result<Json<Vec<SlotResponse>>, LlamaError> {
    if !app.config().server.routes.slots {
        return Err(ApiError::not_supported("GET /slots is disabled; start the server without --no-slots").into());
    }
    let loaded = app.loaded_now(query.model.as_deref()).await?;
    let engine = loaded.engine();
    let slots = engine.status().slots();
    let fails = query.fail_on_no_slot.is_some_and(|value| !matches!(value.as_str(), "" | "0" | "false"));
    if fails && slots.iter().all(|slot| slot.busy) {
        return Err(ApiError::unavailable("no slot is free").into());
    }
    Ok(Json(slots.iter().enumerate().map(|(id, slot)| shown(&scope, id, slot, engine)).collect()))
}

/// The state of a slot.
#[derive(Debug, Default, Serialize, ToSchema)]
struct SlotResponse {
    /// Number of the slot.
    id: usize,
    /// Its context in tokens.
    n_ctx: u32,
    /// True if runs draft tokens.
    speculative: bool,
    /// True while it has an active run.
    is_processing: bool,
    /// Number of the newest run among those of the slot. This and all other fields of the run are absent if the client
    /// must not see it.
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
    /// Tokens generated so far.
    n_decoded: u32,
}

fn shown(scope: &Scope, id: usize, slot: &SlotView, engine: &Engine) -> SlotResponse {
    let hidden = SlotResponse {
        id,
        n_ctx: engine.context_per_slot(),
        speculative: engine.speculates(),
        is_processing: slot.busy,
        ..SlotResponse::default()
    };
    let occupant = slot.occupant.as_ref().filter(|occupant| scope.includes(occupant.owner.as_ref()));
    let Some(occupant) = occupant else { return hidden };
    let n_predict = i64::from(occupant.limits.max_tokens);
    let options = LlamaResponseOptions::new(n_predict);
    let mut params = GenerationSettings::new(&occupant.sampling, &occupant.limits, &options);
    params.lora = occupant.adapters.clone();
    SlotResponse {
        id_task: Some(slot.task),
        n_prompt_tokens: Some(slot.prompt_tokens),
        n_prompt_tokens_processed: Some(slot.processed),
        n_prompt_tokens_cache: Some(slot.cached),
        params: Some(params),
        next_token: Some([NextToken {
            has_next_token: slot.busy,
            has_new_line: slot.new_line,
            n_remain: if slot.busy { n_predict - i64::from(slot.generated) } else { -1 },
            n_decoded: if slot.busy { slot.generated } else { 0 },
        }]),
        thunder: Some(ThunderFields::run(occupant.run_id)),
        ..hidden
    }
}

/// Returns counters for Prometheus. The two rates cover the last minute, independent of the scrape interval.
#[utoipa::path(get, path = "/metrics", tag = "llama-server",
    responses((status = 200, description = "Prometheus' text format", content_type = "text/plain"),
              (status = 501, description = "The server was started without --metrics")))]
async fn metrics(State(app): State<App>, Query(params): Query<ModelParams>) -> Result<Response, LlamaError> {
    if !app.config().server.routes.metrics {
        return Err(ApiError::not_supported("GET /metrics is disabled; start the server with --metrics").into());
    }
    app.ready()?;
    let counts = match app.models().observed(params.model.as_deref())? {
        Observed::Awake(loaded) => loaded.engine().status().counts().plus(loaded.encoder().status().counts()),
        Observed::Asleep(asleep) => asleep.work[0].counts().plus(asleep.work[1].counts()),
    };
    let text = prometheus_text(counts);
    let headers = [
        (header::CONTENT_TYPE, "text/plain; version=0.0.4".to_owned()),
        (header::HeaderName::from_static("process-start-time-unix"), app.started_at().timestamp().to_string()),
    ];
    Ok((headers, text).into_response())
}

fn prometheus_text(counts: EngineCounts) -> String {
    let (total, recent) = (counts.total, counts.recent);
    let seconds = |us: u64| us as f64 / 1e6;
    let rate = |tokens: u64, us: u64| if us > 0 { tokens as f64 / seconds(us) } else { 0.0 };
    let busy = if counts.decodes > 0 { counts.busy_slots as f64 / counts.decodes as f64 } else { 0.0 };
    let counters: [(&str, &str, f64); 10] = [
        ("prompt_tokens_total", "Number of prompt tokens processed.", total.prompt_tokens as f64),
        ("prompt_tokens_cached_total", "Number of prompt tokens taken from the cache.", total.cached_tokens as f64),
        ("prompt_seconds_total", "Prompt process time", seconds(total.prompt_us)),
        ("tokens_predicted_total", "Number of generation tokens processed.", total.generated_tokens as f64),
        ("tokens_predicted_seconds_total", "Predict process time", seconds(total.generation_us)),
        ("n_decode_total", "Total number of llama_decode() calls", counts.decodes as f64),
        ("n_tokens_max", "Largest observed n_tokens.", counts.longest as f64),
        ("spec_decode_num_draft_tokens_total", "Drafted tokens.", total.drafted_tokens as f64),
        ("spec_decode_num_accepted_tokens_total", "Accepted draft tokens.", total.accepted_tokens as f64),
        ("spec_decode_num_drafts_total", "Drafts.", total.drafts as f64),
    ];
    let gauges: [(&str, &str, f64); 5] = [
        (
            "prompt_tokens_seconds",
            "Average prompt throughput in tokens/s over the last minute.",
            rate(recent.prompt_tokens, recent.prompt_us),
        ),
        (
            "predicted_tokens_seconds",
            "Average generation throughput in tokens/s over the last minute.",
            rate(recent.generated_tokens, recent.generation_us),
        ),
        ("requests_processing", "Number of requests processing.", f64::from(counts.running)),
        ("requests_deferred", "Number of requests deferred.", f64::from(counts.queued)),
        ("n_busy_slots_per_decode", "Average number of busy slots per llama_decode() call", busy),
    ];
    let mut text = String::new();
    for (kind, metrics) in [("counter", &counters[..]), ("gauge", &gauges[..])] {
        for (name, help, value) in metrics {
            // Writing to a String cannot fail.
            let _ =
                writeln!(text, "# HELP llamacpp:{name} {help}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}");
        }
    }
    text
}
