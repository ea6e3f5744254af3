//! Loading and unloading at run time, as the router of llama-server has it: by name, and nothing by path.

use crate::api::shared::fields::Fields;
use crate::api::{ApiError, App, Entry, ErrorKind, LlamaError, ModelState, shared};
use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Query, State};
use axum::response::IntoResponse;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::stream::{self, Stream};
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::{HashMap, VecDeque};
use std::convert::Infallible;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes; the list of models is among OpenAI's.
pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(load))
        .routes(routes!(unload))
        .routes(routes!(watch))
        .routes(routes!(add, remove))
}

#[derive(Deserialize)]
struct Which {
    model: Option<String>,
}

/// Begins to load the model `{"model": name}`; the list of models tells how far it is.
#[utoipa::path(post, path = "/models/load", tag = "models",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{success: true}`: the load goes on by itself"),
              (status = 400, description = "It is loaded"), (status = 404, description = "There is no such model"),
              (status = 429, description = "As many models as may be are loaded and in use")))]
async fn load(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, LlamaError> {
    app.ready()?;
    app.models().begin(&name(&body?)?).await?;
    Ok(Json(json!({ "success": true })))
}

/// Begins to unload the model `{"model": name}`: it takes no more requests, those that run may end within the time of
/// `--shutdown-grace`. A load that goes on is given up.
#[utoipa::path(post, path = "/models/unload", tag = "models",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{success: true}`: it is unloaded when its runs have ended"),
              (status = 400, description = "It is not loaded"), (status = 404, description = "There is no such model")))]
async fn unload(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, LlamaError> {
    app.ready()?;
    app.models().begin_unload(&name(&body?)?)?;
    Ok(Json(json!({ "success": true })))
}

/// Server-sent events of changes: `{model, event: "model_status", data: {status, progress?}}`, first the present state.
#[utoipa::path(get, path = "/models/sse", tag = "models", responses((status = 200, description = "Events")))]
async fn watch(State(app): State<App>) -> Result<impl IntoResponse, LlamaError> {
    app.ready()?;
    Ok(([("x-accel-buffering", "no")], Sse::new(changes(app)).keep_alive(KeepAlive::new())))
}

/// Refuses to download: models are put into the folder of `--models-dir`.
#[utoipa::path(post, path = "/models", tag = "models", responses((status = 400, description = "Always")))]
async fn add() -> LlamaError {
    let detail = "Thunder downloads nothing; put the GGUF into the folder of --models-dir, and it is listed";
    ApiError::new(ErrorKind::BadRequest, detail).into()
}

/// Refuses to delete: files belong to whoever put them there.
#[utoipa::path(delete, path = "/models", tag = "models", responses((status = 400, description = "Always"),
              (status = 404, description = "There is no such model")))]
async fn remove(State(app): State<App>, Query(which): Query<Which>) -> Result<Json<Value>, LlamaError> {
    let entry = app.models().named(&which.model.unwrap_or_default())?;
    let detail = format!("Thunder deletes no files; POST /models/unload frees the memory of '{}'", entry.name);
    Err(ApiError::invalid("model", detail).into())
}

fn name(body: &[u8]) -> Result<String, ApiError> {
    let body = shared::parse_json(body)?;
    let name = Fields::new(&body)?.text("model")?.filter(|name| !name.is_empty());
    name.map(str::to_owned).ok_or_else(|| {
        ApiError::invalid("model", "model is missing; it takes the name of a model, as GET /models lists them")
    })
}

/// A model's state as the list and the events tell it.
pub(in crate::api) fn status(entry: &Entry) -> Value {
    match &entry.state {
        _ if entry.is_asleep() => json!({ "value": "sleeping" }),
        ModelState::Unloaded => json!({ "value": "unloaded" }),
        ModelState::Loading(done) => json!({ "value": "loading", "progress": done }),
        ModelState::Ready(_) => json!({ "value": "loaded" }),
        ModelState::Unloading => json!({ "value": "unloading" }),
        ModelState::Failed(reason) => json!({ "value": "unloaded", "failed": true, "reason": reason }),
    }
}

fn changes(app: App) -> impl Stream<Item = Result<Event, Infallible>> {
    let changed = app.models().changes();
    let told: HashMap<String, Value> = HashMap::new();
    let ready: VecDeque<Event> = VecDeque::new();
    stream::unfold((app, changed, told, ready), |(app, mut changed, mut told, mut ready)| async move {
        loop {
            if let Some(event) = ready.pop_front() {
                return Some((Ok(event), (app, changed, told, ready)));
            }
            changed.mark_unchanged();
            for entry in app.models().list() {
                let mut status = status(&entry);
                if told.get(&entry.name) != Some(&status) {
                    told.insert(entry.name.clone(), status.clone());
                    status["status"] = status["value"].take();
                    if let Some(fields) = status.as_object_mut() {
                        fields.remove("value");
                    }
                    let data = json!({ "model": entry.name, "event": "model_status", "data": status });
                    ready.push_back(Event::default().data(data.to_string()));
                }
            }
            if ready.is_empty() {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = app.stopping() => return None,
                }
            }
        }
    })
}
