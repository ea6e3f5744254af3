//! Small routes that `KoboldCPP`'s clients query first.

use super::error::KoboldError;
use super::request::default_length;
use crate::events::TokenId;
use crate::server::App;
use axum::Json;
use axum::extract::State;
use axum::routing::get;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Supported version of `KoboldAI`'s API.
const API_VERSION: &str = "1.2.5";
/// Version of `KoboldCPP` whose routes are emulated; clients enable features by it.
const KOBOLDCPP_VERSION: &str = "1.82.4";

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(model))
        .routes(routes!(version))
        .routes(routes!(max_context_length))
        .routes(routes!(true_max_context_length))
        .routes(routes!(max_length))
        .routes(routes!(api_version))
        .routes(routes!(perf))
        .route("/api/latest/model", get(model))
        .route("/api/latest/config/max_context_length", get(max_context_length))
        .route("/api/latest/config/max_length", get(max_length))
        .route("/api/latest/info/version", get(api_version))
}

/// Returns the model: its name, its context and its dimensions.
#[utoipa::path(get, path = "/api/v1/model", tag = "KoboldCPP",
    responses((status = 200, description = "`{result: \"thunder/NAME\", model_name, max_context_length, max_trained_context, vocab_size, \
                                            num_layers, num_attention_heads, num_key_value_heads, embedding_size, rope_freq_base, \
                                            bos_token_id, eos_token_id, eot_token_id}`; an id that the model lacks is -1"),
              (status = 503, description = "No model is loaded")))]
async fn model(State(app): State<App>) -> Result<Json<Value>, KoboldError> {
    let loaded = app.loaded_now(None).await?;
    let (card, special) = (loaded.model().card(), loaded.vocabulary().special());
    let id = |token: Option<TokenId>| token.map_or(-1, i64::from);
    Ok(Json(json!({
        "result": format!("thunder/{}", loaded.name()),
        "model_name": loaded.name(),
        "max_context_length": loaded.engine().context_per_slot(),
        "max_trained_context": card.context_train,
        "vocab_size": card.vocabulary,
        "num_layers": card.layers,
        "num_attention_heads": card.heads,
        "num_key_value_heads": card.kv_heads,
        "embedding_size": card.embedding,
        "rope_freq_base": card.rope_base,
        "bos_token_id": id(special.bos),
        "eos_token_id": id(special.eos),
        "eot_token_id": id(special.eot.or(special.eos)),
    })))
}

/// Returns the emulated version and its features.
#[utoipa::path(get, path = "/api/extra/version", tag = "KoboldCPP",
    responses((status = 200, description = "`{result: \"KoboldCpp\", version, protected, …, thunder}`")))]
async fn version(State(app): State<App>) -> Json<Value> {
    let protected = !app.config().server.security.keys.is_empty();
    Json(json!({
        "result": "KoboldCpp",
        "version": KOBOLDCPP_VERSION,
        "protected": protected,
        "txt2img": false,
        "vision": false,
        "transcribe": false,
        "multiplayer": false,
        "websearch": false,
        "tts": false,
        "thunder": env!("CARGO_PKG_VERSION"),
    }))
}

/// Returns the maximum context length in tokens.
#[utoipa::path(get, path = "/api/v1/config/max_context_length", tag = "KoboldCPP",
    responses((status = 200, description = "`{value}`"), (status = 503, description = "No model is loaded")))]
async fn max_context_length(State(app): State<App>) -> Result<Json<Value>, KoboldError> {
    Ok(Json(json!({ "value": app.loaded_now(None).await?.engine().context_per_slot() })))
}

/// Returns the maximum context length in tokens, like `/api/v1/config/max_context_length`.
#[utoipa::path(get, path = "/api/extra/true_max_context_length", tag = "KoboldCPP",
    responses((status = 200, description = "`{value}`"), (status = 503, description = "No model is loaded")))]
async fn true_max_context_length(app: State<App>) -> Result<Json<Value>, KoboldError> {
    max_context_length(app).await
}

/// Returns the default length of an answer in tokens.
#[utoipa::path(get, path = "/api/v1/config/max_length", tag = "KoboldCPP", responses((status = 200, description = "`{value}`")))]
async fn max_length(State(app): State<App>) -> Json<Value> {
    Json(json!({ "value": default_length(&app) }))
}

/// Returns the version of `KoboldAI`'s API.
#[utoipa::path(get, path = "/api/v1/info/version", tag = "KoboldCPP", responses((status = 200, description = "`{result}`")))]
async fn api_version() -> Json<Value> {
    Json(json!({ "result": API_VERSION }))
}

/// Returns the number of waiting runs and the uptime.
#[utoipa::path(get, path = "/api/extra/perf", tag = "KoboldCPP",
    responses((status = 200, description = "`{queue, idle, uptime}`"), (status = 503, description = "No model is loaded")))]
async fn perf(State(app): State<App>) -> Result<Json<Value>, KoboldError> {
    let engine = app.loaded_now(None).await?.engine().clone();
    let active = engine.runs();
    let uptime_s = (app.now() - app.started_at()).num_milliseconds() as f64 / 1e3;
    Ok(Json(json!({
        "queue": active.saturating_sub(engine.slots() as usize),
        "idle": u8::from(active == 0),
        "uptime": uptime_s,
    })))
}
