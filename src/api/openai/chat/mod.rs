//! Chat completions: a conversation is answered, with thoughts and tool calls told from text.

mod control;
mod shape;
mod stream;

use crate::api::chat::{Asked, Refused, Talk, stream::respond};
use crate::api::wire;
use crate::api::{ApiError, App, Caller, OpenAiError, generation};
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::Value;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// The routes, with `/v1` and without.
pub(super) fn router() -> OpenApiRouter<App> {
    use axum::routing::post;
    OpenApiRouter::new()
        .routes(routes!(completions))
        .route("/chat/completions", post(completions))
        .routes(routes!(control::control))
        .route("/chat/completions/control", post(control::control))
}

/// Answers a conversation, as OpenAI's route of that name does; with `"stream": true` token by token.
///
/// `tools` are offered to the model; with `tool_choice` `"required"` or a function's name the answer is made to be a call.
/// `response_format`, `json_schema` or `grammar` say what the text must be. Thoughts come as `reasoning_content`.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "A chat completion, or server-sent events of its chunks"),
              (status = 400, description = "A field is wrong; `error.param` names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 where it was written for Quote"),
              (status = 503, description = "The model is being loaded")))]
async fn completions(
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
    let body = wire::json(&body.map_err(ApiError::from)?)?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let asked = Asked::read(app, &loaded, &body)?;
    let mut talk = Talk::begin(app, &loaded, asked, headers, caller).await?;
    let run = talk.run();
    let response = if talk.wishes.stream {
        respond(talk, stream::Chunks::default())
    } else {
        let mut tokens = vec![Vec::new(); talk.len()];
        while let Some(heard) = talk.next().await.map_err(|error| Refused { error, run: Some(run) })? {
            shape::collect(&mut tokens[heard.answer], heard.tokens, heard.taken_back);
        }
        Json(shape::whole(&talk, &tokens)).into_response()
    };
    Ok(generation::with_run_id(response, run))
}
