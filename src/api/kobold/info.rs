//! Routes that report the model, the version and the limits, which `KoboldCPP`'s clients query first.

use super::error::KoboldError;
use super::request::default_length;
use crate::api::shared::settings::EmptyList;
use crate::events::TokenId;
use crate::server::models::ModelView;
use crate::server::{App, Caller};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Json};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Supported version of `KoboldAI`'s API.
const API_VERSION: &str = "1.2.5";
/// Version of `KoboldCPP` whose routes are emulated; clients enable features that it has.
const KOBOLDCPP_VERSION: &str = "1.82.4";
/// The model's name for clients without a key, as in `KoboldCPP`.
const PROTECTED_MODEL: &str = "koboldcpp/protected-model";

/// Returns the route that answers without a key.
pub(super) fn version_router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(version))
}

/// Returns the routes that reveal less without a key.
pub(super) fn model_router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(model)).route("/api/latest/model", get(model))
}

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(max_context_length))
        .routes(routes!(true_max_context_length))
        .routes(routes!(max_length))
        .routes(routes!(api_version))
        .routes(routes!(soft_prompts))
        .routes(routes!(soft_prompt))
        .route("/api/latest/config/max_context_length", get(max_context_length))
        .route("/api/latest/config/max_length", get(max_length))
        .route("/api/latest/info/version", get(api_version))
        .route("/api/latest/config/soft_prompts_list", get(soft_prompts))
        .route("/api/latest/config/soft_prompt", get(soft_prompt))
}

/// Name, context and dimensions of the model. The id of a token that the model lacks is -1.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldModelResponse {
    /// `thunder/` and the model's name.
    result: String,
    model_name: String,
    /// Context of a slot in tokens.
    max_context_length: u32,
    max_trained_context: u32,
    vocab_size: usize,
    num_layers: u32,
    num_attention_heads: u32,
    num_key_value_heads: u32,
    embedding_size: u32,
    rope_freq_base: Option<f64>,
    bos_token_id: i64,
    eos_token_id: i64,
    eot_token_id: i64,
}

/// The emulated version and its features.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldVersionResponse {
    /// Always `KoboldCpp`.
    result: &'static str,
    version: &'static str,
    /// True if the server has API keys.
    protected: bool,
    txt2img: bool,
    vision: bool,
    transcribe: bool,
    multiplayer: bool,
    websearch: bool,
    tts: bool,
    /// Version of Thunder.
    thunder: &'static str,
}

/// A response with one number.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldValueResponse {
    value: i64,
}

/// A response with one string.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldResultResponse {
    result: &'static str,
}

/// The soft prompts of `KoboldAI`, which this server does not have.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldSoftPromptsResponse {
    /// Always empty.
    #[schema(value_type = Vec<String>)]
    values: EmptyList,
}

/// The active soft prompt of `KoboldAI`.
#[derive(Debug, Serialize, ToSchema)]
struct KoboldSoftPromptResponse {
    /// Always empty.
    value: &'static str,
}

/// Returns name, context and dimensions of the model.
#[utoipa::path(get, path = "/api/v1/model", tag = "KoboldCPP",
    responses((status = 200, body = KoboldModelResponse,
               description = "The model. Without a key on a server with keys, only `result`: `koboldcpp/protected-model`"),
              (status = 503, description = "No model is loaded")))]
async fn model(State(app): State<App>, caller: Option<Extension<Caller>>) -> Result<Response, KoboldError> {
    if caller.is_none() {
        return Ok(Json(KoboldResultResponse { result: PROTECTED_MODEL }).into_response());
    }
    let loaded = app.get_or_wake(None).await?;
    let (card, special) = (loaded.model().card(), loaded.vocabulary().special());
    let id = |token: Option<TokenId>| token.map_or(-1, i64::from);
    Ok(Json(KoboldModelResponse {
        result: format!("thunder/{}", loaded.name()),
        model_name: loaded.name().to_owned(),
        max_context_length: loaded.engine().context_per_slot(),
        max_trained_context: card.context_train,
        vocab_size: card.vocabulary,
        num_layers: card.layers,
        num_attention_heads: card.heads,
        num_key_value_heads: card.kv_heads,
        embedding_size: card.embedding,
        rope_freq_base: card.rope_base.map(f64::from),
        bos_token_id: id(special.bos),
        eos_token_id: id(special.eos),
        eot_token_id: id(special.eot.or(special.eos)),
    })
    .into_response())
}

/// Returns the emulated version and its features.
#[utoipa::path(get, path = "/api/extra/version", tag = "KoboldCPP",
    responses((status = 200, body = KoboldVersionResponse)))]
async fn version(State(app): State<App>) -> Json<KoboldVersionResponse> {
    let protected = !app.credentials().security.keys.is_empty();
    let vision = match app.models().view(None) {
        Ok(ModelView::Loaded(loaded)) => loaded.model().images().is_some(),
        Ok(ModelView::Sleeping(sleeping)) => sleeping.vision,
        Err(_) => false,
    };
    Json(KoboldVersionResponse {
        result: "KoboldCpp",
        version: KOBOLDCPP_VERSION,
        protected,
        txt2img: false,
        vision,
        transcribe: false,
        multiplayer: false,
        websearch: false,
        tts: false,
        thunder: env!("CARGO_PKG_VERSION"),
    })
}

/// Returns the maximum context length in tokens.
#[utoipa::path(get, path = "/api/v1/config/max_context_length", tag = "KoboldCPP",
    responses((status = 200, body = KoboldValueResponse), (status = 503, description = "No model is loaded")))]
async fn max_context_length(State(app): State<App>) -> Result<Json<KoboldValueResponse>, KoboldError> {
    Ok(Json(KoboldValueResponse { value: app.get_or_wake(None).await?.engine().context_per_slot().into() }))
}

/// Returns the maximum context length in tokens, like `/api/v1/config/max_context_length`.
#[utoipa::path(get, path = "/api/extra/true_max_context_length", tag = "KoboldCPP",
    responses((status = 200, body = KoboldValueResponse), (status = 503, description = "No model is loaded")))]
async fn true_max_context_length(app: State<App>) -> Result<Json<KoboldValueResponse>, KoboldError> {
    max_context_length(app).await
}

/// Returns the default length of an answer in tokens.
#[utoipa::path(get, path = "/api/v1/config/max_length", tag = "KoboldCPP", responses((status = 200, body = KoboldValueResponse)))]
async fn max_length(State(app): State<App>) -> Json<KoboldValueResponse> {
    Json(KoboldValueResponse { value: default_length(&app) })
}

/// Returns the version of `KoboldAI`'s API.
#[utoipa::path(get, path = "/api/v1/info/version", tag = "KoboldCPP", responses((status = 200, body = KoboldResultResponse)))]
async fn api_version() -> Json<KoboldResultResponse> {
    Json(KoboldResultResponse { result: API_VERSION })
}

/// Returns an empty list: the server has no soft prompts. Clients of `KoboldAI` query it when they connect.
#[utoipa::path(get, path = "/api/v1/config/soft_prompts_list", tag = "KoboldCPP",
    responses((status = 200, body = KoboldSoftPromptsResponse)))]
async fn soft_prompts() -> Json<KoboldSoftPromptsResponse> {
    Json(KoboldSoftPromptsResponse { values: [] })
}

/// Returns an empty name: no soft prompt is active.
#[utoipa::path(get, path = "/api/v1/config/soft_prompt", tag = "KoboldCPP",
    responses((status = 200, body = KoboldSoftPromptResponse)))]
async fn soft_prompt() -> Json<KoboldSoftPromptResponse> {
    Json(KoboldSoftPromptResponse { value: "" })
}
