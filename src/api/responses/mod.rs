//! OpenAI's Responses: the same conversations, written as items.
//!
//! `convert` writes the body as that of a chat completion, `shape` and `stream` write what was heard as items and events,
//! and `kept` keeps responses for later ones to go on from; the runs are recorded like any other.

mod convert;
mod input_items;
mod kept;
mod shape;
mod stream;

use super::chat::{Asked, Conversation, Refused, Talk, stream::respond};
use super::wire::{self, Fields};
use super::{ApiError, App, Caller, OpenAiError, generation};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use kept::Keeper;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes, with `/v1` and without.
pub(super) fn router() -> OpenApiRouter<App> {
    use axum::routing::{get, post};
    OpenApiRouter::new()
        .routes(routes!(create))
        .routes(routes!(input_tokens))
        .routes(routes!(show, delete))
        .routes(routes!(input_items::input_items))
        .route("/responses", post(create))
        .route("/responses/input_tokens", post(input_tokens))
        .route("/responses/{response_id}", get(show).delete(delete))
        .route("/responses/{response_id}/input_items", get(input_items::input_items))
}

/// Answers a conversation, as OpenAI's route of that name does; with `"stream": true` event by event. Unless `store` is
/// false, `previous_response_id` can name the response later: it is kept as long as the runs of its day.
#[utoipa::path(post, path = "/v1/responses", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "A response, or server-sent events of its items"),
              (status = 400, description = "A field is wrong; `error.param` names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 where it was written for Quote"),
              (status = 503, description = "The model is being loaded")))]
async fn create(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    answer(&app, caller, &headers, body).await.unwrap_or_else(|refused| refused.respond(OpenAiError))
}

async fn answer(
    app: &App,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Refused> {
    let asked = wire::json(&body.map_err(ApiError::from)?)?;
    let fields = Fields::new(&asked)?;
    let owner = kept::owner(caller.as_deref());
    let mut items = earlier(app, fields, owner.as_deref()).await?;
    let body = convert::to_chat(&asked, &items)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let echo = shape::Echo::of(&asked);
    let keeps = fields.flag("store")?.unwrap_or(true);
    items.extend(convert::input(fields)?);
    let mut talk = Talk::begin(app, &loaded, Asked::read(app, &loaded, &body)?, headers, caller).await?;
    let run = talk.run();
    let keeper = keeps.then(|| Keeper { app: app.clone(), run, items, owner });
    let response = if talk.wishes.stream {
        respond(talk, stream::Events::new(echo, keeper))
    } else {
        while talk.next().await.map_err(|error| Refused { error, run: Some(run) })?.is_some() {}
        let response = shape::response(&talk, &echo);
        let response = match keeper {
            Some(keeper) => keeper.keep(response).await,
            None => response,
        };
        Json(response).into_response()
    };
    Ok(generation::with_run_id(response, run))
}

/// The conversation that the request goes on from.
async fn earlier(app: &App, fields: Fields<'_>, owner: Option<&str>) -> Result<Vec<Value>, ApiError> {
    match fields.text("previous_response_id")? {
        Some(id) => kept::conversation(app, id, owner).await,
        None => Ok(Vec::new()),
    }
}

/// A response that is kept.
#[utoipa::path(get, path = "/v1/responses/{response_id}", tag = "openai",
    params(("response_id" = String, Path, description = "As the response's `id` says")),
    responses((status = 200, description = "The response"), (status = 404, description = "It is not kept")))]
async fn show(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, OpenAiError> {
    Ok(Json(kept::get(&app, &id, kept::owner(caller.as_deref()).as_deref()).await?))
}

/// Forgets a response; those that go on from it keep its conversation.
#[utoipa::path(delete, path = "/v1/responses/{response_id}", tag = "openai",
    params(("response_id" = String, Path, description = "As the response's `id` says")),
    responses((status = 200, description = "`{id, object, deleted: true}`"), (status = 404, description = "It is not kept")))]
async fn delete(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, OpenAiError> {
    kept::delete(&app, &id, kept::owner(caller.as_deref()).as_deref()).await?;
    Ok(Json(json!({ "id": id, "object": "response", "deleted": true })))
}

/// How many tokens the prompt of a response has, without running it.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{\"input_tokens\": n, \"object\": \"response.input_tokens\"}`"),
              (status = 400, description = "A field is wrong; `error.param` names it")))]
async fn input_tokens(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, OpenAiError> {
    let asked = wire::json(&body?)?;
    let items = earlier(&app, Fields::new(&asked)?, kept::owner(caller.as_deref()).as_deref()).await?;
    let body = convert::to_chat(&asked, &items)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let prepared = Conversation::read(&app, Fields::new(&body)?)?.prepare(&loaded)?;
    Ok(Json(json!({ "input_tokens": prepared.tokens.len(), "object": "response.input_tokens" })))
}
