//! The two routes that run something: body to request, request to engine, first result, answer.

use super::answer;
use super::shape::Head;
use super::stream;
use super::wire::{self, Route};
use crate::api::{ApiError, App, Caller, OpenAiError, generation};
use crate::engine::Output;
use axum::Extension;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

/// Answers a conversation, as OpenAI's route of that name does; with `"stream": true` token by token.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "A chat completion, or server-sent events of its chunks"),
              (status = 400, description = "A field is wrong; `error.param` names it"),
              (status = 422, description = "A mod ended the run with an error before its first token"),
              (status = 503, description = "The model is being loaded")))]
pub(super) async fn chat_completions(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, OpenAiError> {
    Ok(run(app, Route::Chat, caller, &headers, &body?).await?)
}

async fn run(
    app: App,
    route: Route,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, ApiError> {
    let body = crate::api::wire::json(body)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let mut asked = wire::read(&app, &loaded, route, &body)?;
    generation::note_client(&mut asked.request, headers, caller);
    let begun = generation::begin(&app, &loaded, asked.request).await?;
    let head = Head {
        answer: asked.answer,
        run_id: begun.run_id,
        model: loaded.name().to_owned(),
        created: app.now().timestamp(),
        vocabulary: std::sync::Arc::clone(loaded.vocabulary()),
    };
    let answered = match &begun.first {
        Output::Ended(end) if let Some(error) = generation::failure(end, begun.run_id) => Err(error),
        _ if head.answer.stream => Ok(stream::respond(app, head, begun.first, begun.rest)),
        _ => answer::whole(&app, &head, begun.first, begun.rest).await.map(|whole| Json(whole).into_response()),
    };
    let response = answered.unwrap_or_else(|error| OpenAiError(error).into_response());
    Ok(generation::with_run_id(response, begun.run_id))
}
