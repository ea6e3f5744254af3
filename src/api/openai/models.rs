//! The list of models: the one that runs.

use crate::api::{ApiError, App, OpenAiError};
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

/// Lists the model that runs, and what is known of it.
#[utoipa::path(get, path = "/v1/models", tag = "openai",
    responses((status = 200, description = "A list of one model"), (status = 503, description = "It is being loaded")))]
pub(super) async fn list(State(app): State<App>) -> Result<Json<Value>, OpenAiError> {
    Ok(Json(json!({ "object": "list", "data": [model(&app)?] })))
}

/// Shows the model that runs.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai", params(("id" = String, Path, description = "Its name")),
    responses((status = 200, description = "The model"), (status = 404, description = "Another model is running")))]
pub(super) async fn show(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Value>, OpenAiError> {
    let model = model(&app)?;
    if model["id"] != id {
        return Err(ApiError::not_found("model", id).did_you_mean(model["id"].as_str()).code("model_not_found").into());
    }
    Ok(Json(model))
}

fn model(app: &App) -> Result<Value, ApiError> {
    let engine = app.engine()?;
    let card = engine.model().card();
    Ok(json!({
        "id": card.name,
        "object": "model",
        "created": app.started_at().timestamp(),
        "owned_by": "thunder",
        "meta": {
            "architecture": card.architecture,
            "n_vocab": card.vocabulary,
            "n_ctx": engine.context_per_slot(),
            "n_ctx_train": card.context_train,
            "n_embd": card.embedding,
            "n_layer": card.layers,
            "n_head": card.heads,
            "n_params": card.parameters,
            "size": card.size_bytes,
        },
    }))
}
