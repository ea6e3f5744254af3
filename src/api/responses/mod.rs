//! OpenAI's Responses API: chat requests and answers as items.
//!
//! `request` converts the body to that of a chat completion. `response` and `stream` convert the answer to items and
//! events. `stored` saves responses so that later requests can continue them. Runs are recorded as usual.

mod event;
mod input_items;
mod items;
mod logprobs;
mod references;
mod request;
mod response;
mod stored;
mod stream;

use super::shared::{self, Fields};
use crate::api::shared::chat::{ChatStream, InputTokensResponse, prepare_chat, stream_answers};
use crate::api::shared::error::OpenAiError;
use crate::api::shared::generation::{self, RunClient};
use crate::events::{Scope, Surface};
use crate::server::extract::Path;
use crate::server::{Access, ApiError, App, Protocol};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use event::ResponseStreamEvent;
use logprobs::TextTokens;
use request::ResponsesBody;
use response::{DeletedResponse, EchoedFields, ResponseObject};
use serde_json::Value;
use stored::ResponseRecord;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Returns the routes, with and without the `/v1` prefix.
pub(super) fn protocol() -> Protocol {
    use axum::routing::{get, post};
    let runs = OpenApiRouter::new().routes(routes!(create)).route("/responses", post(create));
    let routes = OpenApiRouter::new()
        .routes(routes!(input_tokens))
        .routes(routes!(show, delete))
        .routes(routes!(input_items::input_items))
        .route("/responses/input_tokens", post(input_tokens))
        .route("/responses/{response_id}", get(show).delete(delete))
        .route("/responses/{response_id}/input_items", get(input_items::input_items));
    Protocol::new(OpenAiError::render, &["/responses"]).routes(Access::Run, runs).routes(Access::Key, routes)
}

/// Generates a response, like OpenAI's Responses API. `"stream": true` returns server-sent events. Unless `store` is false, a
/// later request can continue it with `previous_response_id`. Stored responses are deleted with the runs of the same
/// day.
#[utoipa::path(post, path = "/v1/responses", tag = "openai",
    request_body(content = ResponsesBody, content_type = "application/json"),
    responses((status = 200, description = "A response, or server-sent events of its items",
                  content((ResponseObject = "application/json"), (ResponseStreamEvent = "text/event-stream"))),
              (status = 400, description = "A field is invalid; `error.param` names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 if the mod was written for Quote"),
              (status = 503, description = "The model is loading")))]
async fn create(client: RunClient, body: Result<Bytes, BytesRejection>) -> Result<Response, OpenAiError> {
    let body_json = shared::parse_json(&body?)?;
    let fields = Fields::new(&body_json)?;
    let (mut items, input) = conversation(&client.app, &client.caller.scope, fields).await?;
    let (body, names) = request::to_chat(&body_json, &items, &input)?;
    let echo = EchoedFields::from_body(&body_json);
    let stores = fields.flag("store")?.unwrap_or(true);
    items.extend(input);
    let started = ChatStream::parse_and_start(&client, &body, Surface::Responses).await;
    let mut chat = started.map_err(|error| names.restore(error))?;
    let run = chat.run();
    let record = stores.then_some(ResponseRecord { app: client.app, run, items, owner: client.caller.tenant });
    let response = if chat.options.stream {
        stream_answers(chat, stream::ResponseEventWriter::new(echo, record))
    } else {
        let mut tokens = TextTokens::default();
        while let Some(mut update) = chat.next().await? {
            tokens.add(&chat, &mut update);
            for delta in &update.deltas {
                tokens.assign(delta);
            }
        }
        let response = ResponseObject::complete(&chat, &tokens, echo);
        let response = match record {
            Some(record) => record.save(response).await,
            None => response,
        };
        Json(response).into_response()
    };
    Ok(generation::with_run_id(response, run))
}

/// Returns the items of the conversation that the request continues, and those of its input without references.
async fn conversation(app: &App, scope: &Scope, fields: Fields<'_>) -> Result<(Vec<Value>, Vec<Value>), ApiError> {
    let earlier = match fields.text("previous_response_id")? {
        Some(id) => stored::conversation(app, scope, id).await?,
        None => Vec::new(),
    };
    let input = references::resolve(app, scope, &earlier, request::input(fields)?).await?;
    Ok((earlier, input))
}

/// Returns a stored response.
#[utoipa::path(get, path = "/v1/responses/{response_id}", tag = "openai",
    params(("response_id" = String, Path, description = "Id of the response")),
    responses((status = 200, body = ResponseObject), (status = 404, description = "No stored response has this id")))]
async fn show(
    State(app): State<App>,
    scope: Scope,
    id: Result<Path<String>, ApiError>,
) -> Result<Json<Value>, OpenAiError> {
    Ok(Json(stored::get(&app, &scope, &id?.0).await?))
}

/// Deletes a stored response. Responses that continue it keep its conversation.
#[utoipa::path(delete, path = "/v1/responses/{response_id}", tag = "openai",
    params(("response_id" = String, Path, description = "Id of the response")),
    responses((status = 200, body = DeletedResponse), (status = 404, description = "No stored response has this id")))]
async fn delete(
    State(app): State<App>,
    scope: Scope,
    id: Result<Path<String>, ApiError>,
) -> Result<Json<DeletedResponse>, OpenAiError> {
    let Path(id) = id?;
    stored::delete(&app, &scope, &id).await?;
    Ok(Json(DeletedResponse { id, object: "response", deleted: true }))
}

/// Counts the prompt tokens of a request without running it.
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "openai",
    request_body(content = ResponsesBody, content_type = "application/json"),
    responses((status = 200, body = InputTokensResponse),
              (status = 400, description = "A field is invalid; `error.param` names it")))]
async fn input_tokens(
    State(app): State<App>,
    scope: Scope,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<InputTokensResponse>, OpenAiError> {
    let body_json = shared::parse_json(&body?)?;
    let (items, input) = conversation(&app, &scope, Fields::new(&body_json)?).await?;
    let (body, names) = request::to_chat(&body_json, &items, &input)?;
    let prepared = prepare_chat(&app, &body).await.map_err(|error| names.restore(error))?;
    Ok(Json(InputTokensResponse::new(&prepared)))
}
