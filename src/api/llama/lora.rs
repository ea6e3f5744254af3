//! `/lora-adapters`: the adapters loaded with the model, and their default scales.

use super::props::ModelParams;
use crate::api::shared::error::LlamaError;
use crate::api::shared::settings::to_shortest_f64;
use crate::api::shared::{self, lora};
use crate::server::{App, Caller};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Query, State};
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list, scale))
}

/// Lists the adapters with their default scales. `?model=` selects a model.
#[utoipa::path(get, path = "/lora-adapters", tag = "llama-server",
    responses((status = 200, description = "`[{id, path, scale, task_name, prompt_prefix}]`"),
              (status = 503, description = "The model is loading")))]
async fn list(State(app): State<App>, Query(params): Query<ModelParams>) -> Result<Json<Value>, LlamaError> {
    let loaded = app.loaded_now(params.model.as_deref()).await?;
    let adapters = loaded.model().adapters();
    let usual = adapters.default_scales();
    let shown = adapters.list().iter().enumerate().map(|(id, adapter)| {
        json!({
            "id": id,
            "path": adapter.path.display().to_string(),
            "scale": to_shortest_f64(usual.scale(id)),
            "task_name": adapter.task_name,
            "prompt_prefix": adapter.prompt_prefix,
        })
    });
    Ok(Json(Value::Array(shown.collect())))
}

/// Sets the default scales of adapters, `[{id, scale}]`, for later requests without `lora`. Adapters that are not
/// listed get scale 0. `?model=` selects a model.
#[utoipa::path(post, path = "/lora-adapters", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{success: true}`"),
              (status = 400, description = "Unknown adapter, or a scale is not a number"),
              (status = 403, description = "The key has no right to change properties")))]
async fn scale(
    State(app): State<App>,
    caller: Caller,
    Query(params): Query<ModelParams>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, LlamaError> {
    caller.require_props()?;
    let loaded = app.loaded(params.model.as_deref()).await?;
    let body = shared::parse_json(&body?)?;
    let adapters = loaded.model().adapters();
    adapters.set_default_scales(lora::parse_adapter_set(&body, "the body", adapters)?);
    Ok(Json(json!({ "success": true })))
}
