//! The list of models: those that are loaded, and those that can be.

use crate::api::{App, Entry, Loaded, ModelState, OpenAiError};
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

/// Lists the models that requests can name, and what is known of those that are loaded.
#[utoipa::path(get, path = "/v1/models", tag = "openai",
    responses((status = 200, description = "The models, the default first"),
              (status = 503, description = "The server is starting")))]
pub(super) async fn list(State(app): State<App>) -> Result<Json<Value>, OpenAiError> {
    app.ready()?;
    let data: Vec<Value> = app.models().list().iter().map(|entry| object(&app, entry)).collect();
    Ok(Json(json!({ "object": "list", "data": data })))
}

/// Shows a model.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai", params(("id" = String, Path, description = "Its name")),
    responses((status = 200, description = "The model"), (status = 404, description = "There is no such model")))]
pub(super) async fn show(State(app): State<App>, Path(id): Path<String>) -> Result<Json<Value>, OpenAiError> {
    app.ready()?;
    Ok(Json(object(&app, &app.models().named(&id)?)))
}

fn object(app: &App, entry: &Entry) -> Value {
    json!({
        "id": entry.name,
        "aliases": entry.aliases,
        "object": "model",
        "created": app.started_at().timestamp(),
        "owned_by": "thunder",
        "status": status(&entry.state),
        "capabilities": entry.ready().map(Loaded::capabilities),
        "meta": entry.ready().map(meta),
    })
}

fn status(state: &ModelState) -> Value {
    match state {
        ModelState::Unloaded => json!({ "value": "unloaded" }),
        ModelState::Loading(done) => json!({ "value": "loading", "progress": done }),
        ModelState::Ready(_) => json!({ "value": "loaded" }),
        ModelState::Unloading => json!({ "value": "unloading" }),
        ModelState::Failed(reason) => json!({ "value": "unloaded", "failed": true, "reason": reason }),
    }
}

fn meta(loaded: &Loaded) -> Value {
    let card = loaded.model().card();
    json!({
        "architecture": card.architecture,
        "n_vocab": card.vocabulary,
        "n_ctx": loaded.engine().context_per_slot(),
        "n_ctx_train": card.context_train,
        "n_embd": card.embedding,
        "n_layer": card.layers,
        "n_head": card.heads,
        "n_params": card.parameters,
        "size": card.size_bytes,
    })
}
