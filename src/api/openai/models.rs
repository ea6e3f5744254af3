//! The list of models, loaded or available.

use crate::api::shared::error::OpenAiError;
use crate::api::shared::model_status::status;
use crate::server::{App, Entry, Loaded};
use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::{Value, json};

/// Header that clients of Anthropic send.
const ANTHROPIC_VERSION: &str = "anthropic-version";

/// Query parameters of the model list.
#[derive(Deserialize)]
pub(super) struct ListModelsParams {
    reload: Option<String>,
}

/// Lists the models that requests can name, with details of the loaded ones. `?reload=1` looks for new files. Clients
/// that send `anthropic-version` get Anthropic's format.
#[utoipa::path(get, path = "/v1/models", tag = "openai",
    responses((status = 200, description = "The models, the default model first"),
              (status = 503, description = "The server is starting")))]
pub(super) async fn list(
    State(app): State<App>,
    Query(params): Query<ListModelsParams>,
    headers: HeaderMap,
) -> Result<Json<Value>, OpenAiError> {
    app.ready()?;
    if params.reload.is_some() {
        app.models().refresh().await;
    }
    let entries = app.models().list();
    if headers.contains_key(ANTHROPIC_VERSION) {
        let data: Vec<Value> = entries.iter().map(|entry| anthropic_model(&app, entry)).collect();
        let id = |entry: Option<&Entry>| entry.map(|entry| entry.name.clone());
        return Ok(Json(
            json!({ "data": data, "has_more": false, "first_id": id(entries.first()), "last_id": id(entries.last()) }),
        ));
    }
    let data: Vec<Value> = entries.iter().map(|entry| openai_model(&app, entry)).collect();
    let models: Vec<Value> = entries.iter().map(ollama_model).collect();
    Ok(Json(json!({ "object": "list", "data": data, "models": models })))
}

/// Returns one model.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai", params(("id" = String, Path, description = "Name of the model")),
    responses((status = 200, description = "The model"), (status = 404, description = "Unknown model")))]
pub(super) async fn show(
    State(app): State<App>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, OpenAiError> {
    app.ready()?;
    let entry = app.models().named(&id)?;
    Ok(Json(if headers.contains_key(ANTHROPIC_VERSION) {
        anthropic_model(&app, &entry)
    } else {
        openai_model(&app, &entry)
    }))
}

/// Returns the model in Anthropic's format.
fn anthropic_model(app: &App, entry: &Entry) -> Value {
    json!({
        "type": "model",
        "id": entry.name,
        "display_name": entry.name,
        "created_at": app.started_at().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
        "lifecycle": "active",
        "max_input_tokens": entry.ready().map(|loaded| loaded.engine().context_per_slot()),
        "max_tokens": entry.ready().map(|loaded| loaded.engine().context_per_slot()),
    })
}

fn openai_model(app: &App, entry: &Entry) -> Value {
    json!({
        "id": entry.name,
        "aliases": if entry.default { app.config().engine.alias.as_slice() } else { &entry.aliases },
        "tags": if entry.default { app.config().engine.tags.as_slice() } else { &[] },
        "object": "model",
        "created": app.started_at().timestamp(),
        "owned_by": "thunder",
        "status": status(entry),
        "capabilities": entry.ready().map(Loaded::capabilities),
        "meta": entry.ready().map(meta),
    })
}

/// Returns the model in Ollama's format.
fn ollama_model(entry: &Entry) -> Value {
    let card = entry.ready().map(|loaded| loaded.model().card());
    json!({
        "name": entry.name,
        "model": entry.name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": card.map(|card| card.architecture.as_str()).unwrap_or_default(),
            "families": [card.map(|card| card.architecture.as_str()).unwrap_or_default()],
            "parameter_size": "",
            "quantization_level": card.map(|card| card.file_type.as_str()).unwrap_or_default(),
        },
    })
}

fn meta(loaded: &Loaded) -> Value {
    let card = loaded.model().card();
    json!({
        "architecture": card.architecture,
        "vocab_type": card.tokenizer_id,
        "tokenizer": card.tokenizer,
        "n_vocab": card.vocabulary,
        "n_ctx": loaded.engine().context_per_slot(),
        "n_ctx_train": card.context_train,
        "n_embd": card.embedding,
        "n_layer": card.layers,
        "n_head": card.heads,
        "n_params": card.parameters,
        "size": card.size_bytes,
        "ftype": card.file_type,
    })
}
