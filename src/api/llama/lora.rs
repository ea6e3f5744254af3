//! `/lora-adapters`: the adapters loaded with the model, and their default scales.

use super::request::ModelParams;
use super::response::SuccessResponse;
use crate::api::shared::body::AdapterScaleBody;
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::abbreviate;
use crate::api::shared::{self, parameters};
use crate::events::shortest_f64;
use crate::server::extract::Query;
use crate::server::{ApiError, App, Caller};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list, scale))
}

/// An adapter.
#[derive(Debug, Serialize, ToSchema)]
struct AdapterResponse {
    /// Id of the adapter, for requests.
    id: usize,
    /// Path of its GGUF file.
    path: String,
    /// Scale in requests without `lora`.
    scale: f64,
    /// Task name in its file.
    task_name: String,
    /// Prompt prefix in its file.
    prompt_prefix: String,
}

/// Lists the adapters with their default scales. `?model=` selects a model.
#[utoipa::path(get, path = "/lora-adapters", tag = "llama-server",
    responses((status = 200, body = Vec<AdapterResponse>),
              (status = 503, description = "The model is loading")))]
async fn list(
    State(app): State<App>,
    params: Result<Query<ModelParams>, ApiError>,
) -> Result<Json<Vec<AdapterResponse>>, LlamaError> {
    let Query(params) = params?;
    let loaded = app.get_or_wake(params.model.as_deref()).await?;
    let adapters = loaded.model().adapters();
    let defaults = adapters.default_set();
    let responses = adapters.loras().iter().enumerate().map(|(id, adapter)| AdapterResponse {
        id,
        path: adapter.path.display().to_string(),
        scale: shortest_f64(defaults.scale(id)),
        task_name: adapter.task_name.clone(),
        prompt_prefix: adapter.prompt_prefix.clone(),
    });
    Ok(Json(responses.collect()))
}

/// Sets the default scales of adapters, `[{id, scale}]`, for later requests without `lora`. Adapters that are not
/// listed get scale 0. `?model=` selects a model.
#[utoipa::path(post, path = "/lora-adapters", tag = "llama-server",
    request_body(content = Vec<AdapterScaleBody>, content_type = "application/json"),
    responses((status = 200, body = SuccessResponse),
              (status = 400, description = "Unknown adapter, or a scale is not a number"),
              (status = 403, description = "The API key lacks the right to change properties")))]
async fn scale(
    State(app): State<App>,
    caller: Caller,
    params: Result<Query<ModelParams>, ApiError>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<SuccessResponse>, LlamaError> {
    let Query(params) = params?;
    caller.require_props()?;
    let loaded = app.get_or_load(params.model.as_deref()).await?;
    let body = shared::parse_json(&body?)?;
    let known = loaded.model().adapters();
    let list = body.as_array().ok_or_else(|| {
        ApiError::bad_request(format!("the body must be {}, got {}", parameters::ADAPTER_LIST, abbreviate(&body)))
    })?;
    known.set_default_loras(&parameters::parse_loras(list, "body", known)?);
    Ok(Json(SuccessResponse::default()))
}
