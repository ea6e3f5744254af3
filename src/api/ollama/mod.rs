//! Ollama's API: chats, generations, embeddings and the list of models.
//!
//! `request` converts a body to that of a chat completion, so that every parameter of a chat completion is accepted, in
//! `options` too. `response` and `stream` convert the answer to Ollama's objects, which are streamed as JSON lines.

mod body;
mod client_names;
mod description;
mod embed;
mod error;
mod messages;
mod models;
mod request;
mod response;
mod stream;

use super::shared::{self, Fields};
use crate::api::shared::chat::{ChatRequest, ChatStream, stream_answer_lines};
use crate::api::shared::generation::{self, RunClient};
use crate::api::shared::parameters;
use crate::events::{Surface, TokenId};
use crate::model::TokenizeOptions;
use crate::server::{Access, ApiError, App, LoadedModel, Protocol};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use body::{OllamaChatBody, OllamaGenerateBody};
use error::{OllamaError, OllamaErrorResponse};
use request::OllamaRequest;
use response::{OllamaChatResponse, OllamaEnd, OllamaFormat, OllamaGenerateResponse, OllamaLine, RequestTimes};
use serde_json::Value;
use std::time::Instant;
use stream::AnswerLineWriter;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Ollama's paths, whose errors have its format, including paths that Thunder does not support.
const PREFIXES: &[&str] = &[
    "/api/chat",
    "/api/generate",
    "/api/tags",
    "/api/show",
    "/api/ps",
    "/api/version",
    "/api/embed",
    "/api/embeddings",
    "/api/create",
    "/api/copy",
    "/api/delete",
    "/api/pull",
    "/api/push",
    "/api/blobs",
];

/// Returns Ollama's routes.
pub(super) fn protocol() -> Protocol {
    Protocol::new(OllamaError::render, PREFIXES)
        .routes(Access::Run, OpenApiRouter::new().routes(routes!(chat)).routes(routes!(generate)))
        .routes(Access::Key, models::router().merge(embed::router()))
}

/// Answers a conversation, like Ollama's `/api/chat`. The answer is streamed as JSON lines unless `stream` is false.
#[utoipa::path(post, path = "/api/chat", tag = "ollama",
    request_body(content = OllamaChatBody, content_type = "application/json"),
    responses((status = 200, description = "The answer, or JSON lines of its parts",
                  content((OllamaChatResponse = "application/json"), (OllamaChatResponse = "application/x-ndjson"))),
              (status = 400, body = OllamaErrorResponse, description = "A field is invalid; the message names it"),
              (status = 404, body = OllamaErrorResponse, description = "Unknown model"),
              (status = 503, body = OllamaErrorResponse, description = "The model is loading")))]
async fn chat(client: RunClient, body: Result<Bytes, BytesRejection>) -> Result<Response, OllamaError> {
    Ok(answer(&client, &body?, OllamaFormat::Chat).await?)
}

/// Answers or completes a prompt, like Ollama's `/api/generate`. The answer is streamed as JSON lines unless `stream`
/// is false.
#[utoipa::path(post, path = "/api/generate", tag = "ollama",
    request_body(content = OllamaGenerateBody, content_type = "application/json"),
    responses((status = 200, description = "The answer, or JSON lines of its parts",
                  content((OllamaGenerateResponse = "application/json"), (OllamaGenerateResponse = "application/x-ndjson"))),
              (status = 400, body = OllamaErrorResponse, description = "A field is invalid; the message names it"),
              (status = 404, body = OllamaErrorResponse, description = "Unknown model"),
              (status = 501, body = OllamaErrorResponse, description = "`suffix` for a model without infill tokens"),
              (status = 503, body = OllamaErrorResponse, description = "The model is loading")))]
async fn generate(client: RunClient, body: Result<Bytes, BytesRejection>) -> Result<Response, OllamaError> {
    Ok(answer(&client, &body?, OllamaFormat::Generate).await?)
}

async fn answer(client: &RunClient, body: &[u8], format: OllamaFormat) -> Result<Response, ApiError> {
    let body = shared::parse_json(body)?;
    let request = match format {
        OllamaFormat::Chat => request::parse_chat(&body, &client.app.config().server.request_defaults)?,
        OllamaFormat::Generate => request::parse_generate(&body)?,
    };
    let answered = answer_request(client, request::model(Fields::new(&body)?)?, request, format).await;
    answered.map_err(|error| client_names::client_names(&body).restore(error))
}

async fn answer_request(
    client: &RunClient,
    name: Option<&str>,
    request: OllamaRequest,
    format: OllamaFormat,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let app = &client.app;
    if request == OllamaRequest::Unload {
        client.caller.require_models()?;
        let entry = app.models().entry_for_request(name)?;
        if entry.ready().is_some() {
            app.models().begin_unload(&entry.name)?;
        }
        return Ok(without_answer(format, &entry.name, "unload"));
    }
    let loaded = app.get_or_load(name).await?;
    let times = RequestTimes { started, load: started.elapsed() };
    let (request, is_raw) = match request {
        OllamaRequest::Chat(body, context) => {
            (ChatRequest::parse(app, &loaded, &body, Surface::Ollama, &context).await?, false)
        }
        OllamaRequest::Raw(body) => {
            let prompt = prompt_tokens(app, &loaded, &body)?;
            (ChatRequest::raw(app, &loaded, &body, prompt, Surface::Ollama)?, true)
        }
        OllamaRequest::Load | OllamaRequest::Unload => return Ok(without_answer(format, loaded.name(), "load")),
    };
    if request.requests.len() > 1 {
        return Err(ApiError::invalid("n", "`n` must be 1: a response of this API has one answer"));
    }
    let returns_context = format == OllamaFormat::Generate && !is_raw;
    let prompt = returns_context.then(|| request.requests[0].prompt.clone());
    let mut chat = ChatStream::start(client, &loaded, request).await?;
    let run = chat.run();
    let mut lines = AnswerLineWriter::new(format, prompt, times);
    let response = if chat.options.stream {
        stream_answer_lines(chat, lines)
    } else {
        while let Some(update) = chat.next().await? {
            lines.update_tokens(&chat, update.retracted_tokens, update.tokens);
        }
        json(lines.complete(&chat))
    };
    Ok(generation::with_run_id(response, run))
}

/// Returns the tokens of a prompt without a chat template.
fn prompt_tokens(app: &App, loaded: &LoadedModel, body: &Value) -> Result<Vec<TokenId>, ApiError> {
    let fields = Fields::new(body)?.with_server_defaults(app);
    let vocabulary = loaded.vocabulary();
    let prompt = fields.text("prompt")?.unwrap_or_default();
    if let Some(suffix) = fields.text("suffix")? {
        return Ok(shared::infill::infill_prompt(app, loaded, fields, prompt, suffix)?.0);
    }
    Ok(parameters::or_start_token(parameters::encode(vocabulary, prompt, TokenizeOptions::PROMPT), vocabulary))
}

fn without_answer(format: OllamaFormat, model: &str, done_reason: &'static str) -> Response {
    let end = Some(OllamaEnd::without_answer(done_reason));
    json(format.line(model, OllamaLine { end, ..OllamaLine::default() }))
}

fn json(body: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json; charset=utf-8")], body).into_response()
}
