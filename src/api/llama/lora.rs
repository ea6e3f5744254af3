//! `/lora-adapters`: the adapters that were loaded with the model, and how strongly each holds where a request does not
//! say.

use super::props::Which;
use super::settings::shortest;
use crate::api::shared::{self, lora};
use crate::api::{App, LlamaError};
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

/// Lists the adapters, each with its scale. `?model=` names a model.
#[utoipa::path(get, path = "/lora-adapters", tag = "llama-server",
    responses((status = 200, description = "`[{id, path, scale, task_name, prompt_prefix}]`"),
              (status = 503, description = "The model is being loaded")))]
async fn list(State(app): State<App>, Query(which): Query<Which>) -> Result<Json<Value>, LlamaError> {
    let loaded = app.loaded_now(which.model.as_deref()).await?;
    let adapters = loaded.model().adapters();
    let usual = adapters.usual();
    let shown = adapters.list().iter().enumerate().map(|(id, adapter)| {
        json!({
            "id": id,
            "path": adapter.path.display().to_string(),
            "scale": shortest(usual.scale(id)),
            "task_name": adapter.task_name,
            "prompt_prefix": adapter.prompt_prefix,
        })
    });
    Ok(Json(Value::Array(shown.collect())))
}

/// Sets the scales of adapters, `[{id, scale}]`, for requests that begin from now on and have no `lora` of their own; the
/// scale of an adapter that is not listed is 0 then. `?model=` names a model.
#[utoipa::path(post, path = "/lora-adapters", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{success: true}`"),
              (status = 400, description = "There is no such adapter, or a scale is no number")))]
async fn scale(
    State(app): State<App>,
    Query(which): Query<Which>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, LlamaError> {
    let loaded = app.loaded(which.model.as_deref()).await?;
    let body = shared::parse_json(&body?)?;
    let adapters = loaded.model().adapters();
    adapters.set_usual(lora::parse_adapter_set(&body, "the body", adapters)?);
    Ok(Json(json!({ "success": true })))
}
