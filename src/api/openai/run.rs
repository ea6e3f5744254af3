//! The two routes that run something: body to request, request to engine, first result, answer.

use super::answer;
use super::shape::Head;
use super::stream;
use super::wire::{self, Route};
use crate::api::{ApiError, App, Caller, Kind, OpenAiError};
use crate::engine::{Output, SubmitError};
use crate::events::Surface;
use axum::Extension;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

const RUN_ID: HeaderName = HeaderName::from_static("x-thunder-run-id");
/// `thunder run` says so, and its runs are told from those of other programs.
const CLIENT: HeaderName = HeaderName::from_static("x-thunder-client");

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

/// Continues a text, as OpenAI's older route does.
#[utoipa::path(post, path = "/v1/completions", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "A completion, or server-sent events of its chunks"),
              (status = 400, description = "A field is wrong; `error.param` names it"),
              (status = 422, description = "A mod ended the run with an error before its first token"),
              (status = 503, description = "The model is being loaded")))]
pub(super) async fn completions(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, OpenAiError> {
    Ok(run(app, Route::Completions, caller, &headers, &body?).await?)
}

async fn run(
    app: App,
    route: Route,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<Response, ApiError> {
    // Whatever the content type says: clients that avoid a preflight send JSON as text.
    let body: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::bad_request(format!("the body is not JSON: {error}")).code("invalid_json"))?;
    let loaded = app.loaded(body.get("model").and_then(Value::as_str)).await?;
    let mut asked = wire::read(&app, &loaded, route, &body)?;
    if headers.get(CLIENT).is_some_and(|client| client == "cli") {
        asked.request.surface = Surface::Cli;
    }
    if let Some(Extension(caller)) = caller {
        asked.request.user_label.get_or_insert(caller.label);
    }
    refuse_known_id(&app, asked.request.request_id.as_deref()).await?;
    let mut generation = loaded.engine().submit(asked.request).await?;
    let head = Head {
        answer: asked.answer,
        run_id: generation.run_id,
        model: loaded.name().to_owned(),
        created: app.now().timestamp(),
        vocabulary: std::sync::Arc::clone(loaded.vocabulary()),
    };
    // Nothing is sent before the first result, so that a run that fails at once is a plain error.
    let first = tokio::select! {
        output = generation.output.recv() => output.ok_or_else(|| ApiError::internal("the engine dropped the run"))?,
        () = app.stopped() => return Err(ApiError::unavailable("the server is stopping").retry_after(1)),
    };
    let run_id = HeaderValue::from_str(&head.run_id.to_string());
    let answered = match &first {
        Output::Ended(end) if let Some(error) = answer::failure(end, &head) => Err(error),
        _ if head.answer.stream => Ok(stream::respond(app, head, first, generation.output)),
        _ => answer::whole(&app, &head, first, generation.output).await.map(|whole| Json(whole).into_response()),
    };
    // A failed run is recorded too, and its header leads to it.
    let mut response = answered.unwrap_or_else(|error| OpenAiError(error).into_response());
    if let Ok(run_id) = run_id {
        response.headers_mut().insert(RUN_ID, run_id);
    }
    Ok(response)
}

/// A client's id names one run for ever. When the database cannot be asked, the run goes on.
async fn refuse_known_id(app: &App, request_id: Option<&str>) -> Result<(), ApiError> {
    if let Some(id) = request_id
        && let Ok(Some(_)) = app.store()?.find(id).await
    {
        return Err(ApiError::conflict(format!("request_id '{id}' belongs to another run")).at("request_id"));
    }
    Ok(())
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::PromptTooLong { .. } => Self::bad_request(message).code("context_length_exceeded"),
            SubmitError::EmptyPrompt => Self::invalid("prompt", message),
            SubmitError::AttentionOff => Self::invalid("attention", message),
            SubmitError::ModConfig { .. } => Self::invalid("mods", message),
            SubmitError::Busy { .. } => Self::new(Kind::Busy, message).retry_after(1),
            SubmitError::Stopped => Self::unavailable(message),
        }
    }
}
