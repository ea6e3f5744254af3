//! `/lora-adapters`: there are none yet, and whoever asks for one is told so instead of getting another answer.

use crate::api::wire;
use crate::api::wire::fields::{Fields, shown};
use crate::api::{ApiError, App, LlamaError};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(list, scale))
}

/// Lists the adapters that were loaded: none, since this server loads none yet.
#[utoipa::path(get, path = "/lora-adapters", tag = "llama-server",
    responses((status = 200, description = "An empty list"), (status = 503, description = "The model is being loaded")))]
async fn list(State(app): State<App>) -> Result<Json<Value>, LlamaError> {
    app.ready()?;
    Ok(Json(json!([])))
}

/// Sets the scales of adapters, `[{id, scale}]`; an id that is not listed is an error.
#[utoipa::path(post, path = "/lora-adapters", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{success: true}`"),
              (status = 400, description = "There is no such adapter")))]
async fn scale(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, LlamaError> {
    app.ready()?;
    let body = wire::json(&body?)?;
    none_of(&body, "the body")?;
    Ok(Json(json!({ "success": true })))
}

/// Checks that a request asks for no adapter.
///
/// # Errors
/// 400 naming the first that it asks for.
pub(super) fn refuse(fields: Fields<'_>) -> Result<(), ApiError> {
    fields.get("lora").map_or(Ok(()), |adapters| none_of(adapters, "lora"))
}

fn none_of(adapters: &Value, name: &str) -> Result<(), ApiError> {
    let list = adapters.as_array().ok_or_else(|| {
        ApiError::invalid(
            name,
            format!("{name} must be a list of {{\"id\": …, \"scale\": …}}, got {}", shown(adapters)),
        )
    })?;
    match list.iter().find(|adapter| adapter["scale"].as_f64() != Some(0.0)) {
        Some(adapter) => Err(ApiError::invalid(
            name,
            format!("{name}: there is no adapter {}; this server has no LoRA adapters", shown(&adapter["id"])),
        )),
        None => Ok(()),
    }
}
