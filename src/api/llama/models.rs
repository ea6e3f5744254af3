//! Loads and unloads models at run time by name, like llama-server's router. Paths are not accepted.

use super::request::ModelParams;
use super::response::SuccessResponse;
use crate::api::shared;
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::Fields;
use crate::api::shared::model_status::{ModelStatus, ModelStatusDetails, ModelStatusValue};
use crate::api::shared::sse::{self, EventSource, KEEP_ALIVE_INTERVAL, PendingEvents, ServerEvent};
use crate::server::extract::Query;
use crate::server::{ApiError, App, Caller, ErrorKind};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use tokio::sync::watch;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the routes, without the list of models, which is one of OpenAI's routes.
pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(load)).routes(routes!(unload)).routes(routes!(changes))
}

/// Returns the routes of model files.
pub(super) fn files_router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(add, remove))
}

/// The name of a model.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct ModelNameBody {
    /// Name of the model.
    model: String,
}

/// Starts loading the model `{"model": name}`. The list of models shows the progress.
#[utoipa::path(post, path = "/models/load", tag = "models",
    request_body(content = ModelNameBody, content_type = "application/json"),
    responses((status = 200, body = SuccessResponse, description = "The load continues in the background"),
              (status = 400, description = "The model is already loaded"), (status = 403, description = "The API key lacks the right to load models"), (status = 404, description = "Unknown model"),
              (status = 429, description = "The maximum number of models is loaded and in use")))]
async fn load(
    State(app): State<App>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<SuccessResponse>, LlamaError> {
    caller.require_models()?;
    app.check_ready()?;
    app.models().begin_load(&name(&body?)?).await?;
    Ok(Json(SuccessResponse::default()))
}

/// Starts unloading the model `{"model": name}`. New requests are rejected, and active runs may continue for
/// `--shutdown-grace`. A load in progress is cancelled.
#[utoipa::path(post, path = "/models/unload", tag = "models",
    request_body(content = ModelNameBody, content_type = "application/json"),
    responses((status = 200, body = SuccessResponse, description = "The model is unloaded when its runs have ended"),
              (status = 400, description = "The model is not loaded"), (status = 403, description = "The API key lacks the right to unload models"), (status = 404, description = "Unknown model")))]
async fn unload(
    State(app): State<App>,
    caller: Caller,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<SuccessResponse>, LlamaError> {
    caller.require_models()?;
    app.check_ready()?;
    app.models().begin_unload(&name(&body?)?)?;
    Ok(Json(SuccessResponse::default()))
}

/// Streams the state changes of models as server-sent events: `{model, event: "model_status", data: {status,
/// progress?}}`. The current state is sent first.
#[utoipa::path(get, path = "/models/sse", tag = "models", responses((status = 200, body = ModelStatusEvent, description = "Events", content_type = "text/event-stream")))]
async fn changes(State(app): State<App>) -> Result<Response, LlamaError> {
    app.check_ready()?;
    let changed = app.models().changes();
    let source = ModelChanges { app, changed, sent: HashMap::new() };
    Ok(sse::respond(source, PendingEvents::new(), sse::comments(Some(KEEP_ALIVE_INTERVAL))))
}

/// Rejects downloads: models are added to the folder of `--models-dir`.
#[utoipa::path(post, path = "/models", tag = "models", responses((status = 400, description = "Downloads are not supported")))]
async fn add() -> LlamaError {
    let detail = "downloads are not supported; put the GGUF file into the folder of --models-dir";
    ApiError::new(ErrorKind::BadRequest, detail).into()
}

/// Rejects deletions, because the server does not manage model files.
#[utoipa::path(delete, path = "/models", tag = "models", responses((status = 400, description = "Deletions are not supported"),
              (status = 404, description = "Unknown model")))]
async fn remove(State(app): State<App>, params: Result<Query<ModelParams>, ApiError>) -> Result<(), LlamaError> {
    let entry = app.models().entry_by_name(&params?.0.model.unwrap_or_default())?;
    let detail =
        format!("deleting model files is not supported; POST /models/unload frees the memory of '{}'", entry.name);
    Err(ApiError::invalid("model", detail).into())
}

fn name(body: &[u8]) -> Result<String, ApiError> {
    let body = shared::parse_json(body)?;
    let name = Fields::new(&body)?.text("model")?.filter(|name| !name.is_empty());
    name.map(str::to_owned)
        .ok_or_else(|| ApiError::invalid("model", "`model` is missing; send a name from GET /models"))
}

/// A change of a model's state.
#[derive(Debug, Serialize, ToSchema)]
struct ModelStatusEvent {
    /// Name of the model.
    model: String,
    /// Always `model_status`.
    event: &'static str,
    data: ModelStatusChange,
}

/// The new state of a model.
#[derive(Debug, Serialize, ToSchema)]
struct ModelStatusChange {
    /// The state.
    status: ModelStatusValue,
    #[serde(flatten)]
    details: ModelStatusDetails,
}

/// The state changes of all models.
struct ModelChanges {
    app: App,
    changed: watch::Receiver<()>,
    /// The last sent state of each model.
    sent: HashMap<String, ModelStatus>,
}

impl EventSource for ModelChanges {
    async fn advance(&mut self, pending: &mut PendingEvents) -> bool {
        self.changed.mark_unchanged();
        for entry in self.app.models().list() {
            let status = ModelStatus::from(&entry);
            if self.sent.get(&entry.name) != Some(&status) {
                self.sent.insert(entry.name.clone(), status.clone());
                let ModelStatus { value, details } = status;
                let data = ModelStatusChange { status: value, details };
                pending.push_back(ServerEvent::json(&ModelStatusEvent {
                    model: entry.name,
                    event: "model_status",
                    data,
                }));
            }
        }
        if !pending.is_empty() {
            return true;
        }
        tokio::select! {
            _ = self.changed.changed() => true,
            () = self.app.wait_until_stopping() => false,
        }
    }
}
