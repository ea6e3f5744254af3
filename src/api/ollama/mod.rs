//! Ollama's API: chats, generations, embeddings and the list of models.
//!
//! `request` converts a body to that of a chat completion, so that every parameter of a chat completion is accepted, in
//! `options` too. `response` and `stream` convert the answer to Ollama's objects, which are streamed as JSON lines.

mod body;
mod description;
mod embed;
mod error;
mod messages;
mod models;
mod request;
mod response;
mod stream;

use super::shared::{self, Fields};
use crate::api::shared::chat::sse::respond_lines;
use crate::api::shared::chat::{ChatRequest, ChatStream};
use crate::api::shared::generation::{self, RunClient};
use crate::api::shared::parameters;
use crate::events::{Surface, TokenId};
use crate::model::TokenizeOptions;
use crate::server::{Access, ApiError, App, Loaded, Protocol};
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use body::{OllamaChatBody, OllamaGenerateBody};
use error::{OllamaError, OllamaErrorResponse};
use request::OllamaRequest;
use response::{OllamaChatResponse, OllamaEnd, OllamaFormat, OllamaGenerateResponse, OllamaMessage, RequestTimes};
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
    let defaults = &client.app.config().server.request_defaults;
    Ok(answer(&client, &body?, |body| request::parse_chat(body, defaults), OllamaFormat::Chat).await?)
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
    Ok(answer(&client, &body?, request::parse_generate, OllamaFormat::Generate { prompt: None }).await?)
}

async fn answer(
    client: &RunClient,
    body: &[u8],
    parse: impl FnOnce(&Value) -> Result<OllamaRequest, ApiError>,
    mut format: OllamaFormat,
) -> Result<Response, ApiError> {
    let body = shared::parse_json(body)?;
    let request = parse(&body)?;
    let started = Instant::now();
    let app = &client.app;
    let name = request::model(Fields::new(&body)?)?;
    if request == OllamaRequest::Unload {
        client.caller.require_models()?;
        let entry = app.models().find_entry(name)?;
        if entry.ready().is_some() {
            app.models().begin_unload(&entry.name)?;
        }
        return Ok(without_answer(&format, &entry.name, "unload"));
    }
    let loaded = app.loaded(name).await?;
    let times = RequestTimes { started, load: started.elapsed() };
    let request = match request {
        OllamaRequest::Chat(body, context) => {
            let mut request = ChatRequest::parse(app, &loaded, &body, Surface::Ollama).await?;
            for engine_request in &mut request.requests {
                engine_request.prompt = after_context(&context, &engine_request.prompt, &loaded);
                if !context.is_empty() {
                    engine_request.spans.clear();
                }
            }
            if let OllamaFormat::Generate { prompt } = &mut format {
                *prompt = request.requests.first().map(|request| request.prompt.clone());
            }
            request
        }
        OllamaRequest::Raw(body) => {
            ChatRequest::raw(app, &loaded, &body, prompt_tokens(app, &loaded, &body)?, Surface::Ollama)?
        }
        OllamaRequest::Load | OllamaRequest::Unload => return Ok(without_answer(&format, loaded.name(), "load")),
    };
    if request.requests.len() > 1 {
        return Err(ApiError::invalid("options.n", "`n` must be 1: a response of this API has one answer"));
    }
    let mut chat = ChatStream::start(client, &loaded, request).await?;
    let run = chat.run();
    let mut lines = AnswerLineWriter::new(format, times);
    let response = if chat.options.stream {
        respond_lines(chat, lines)
    } else {
        while let Some(update) = chat.next().await? {
            lines.update_tokens(&chat, update.retracted_tokens, update.tokens);
        }
        json(lines.complete(&chat))
    };
    Ok(generation::with_run_id(response, run))
}

/// Returns the tokens of an earlier response, followed by those of a prompt without its BOS token.
fn after_context(context: &[TokenId], prompt: &[TokenId], loaded: &Loaded) -> Vec<TokenId> {
    let bos = loaded.vocabulary().special().bos;
    let rest = prompt.strip_prefix(bos.as_slice()).filter(|_| !context.is_empty() && bos.is_some()).unwrap_or(prompt);
    [context, rest].concat()
}

/// Returns the tokens of a prompt without a chat template.
fn prompt_tokens(app: &App, loaded: &Loaded, body: &Value) -> Result<Vec<TokenId>, ApiError> {
    let fields = Fields::new(body)?.with_server_defaults(app);
    let vocabulary = loaded.vocabulary();
    let prompt = fields.text("prompt")?.unwrap_or_default();
    if let Some(suffix) = fields.text("suffix")? {
        return Ok(shared::infill::infill_prompt(app, loaded, fields, prompt, suffix)?.0);
    }
    Ok(parameters::or_start_token(parameters::encode(vocabulary, prompt, TokenizeOptions::PROMPT), vocabulary))
}

fn without_answer(format: &OllamaFormat, model: &str, done_reason: &'static str) -> Response {
    json(format.line(
        model,
        OllamaMessage::default(),
        Vec::new(),
        Some((OllamaEnd::without_answer(done_reason), &[])),
        None,
    ))
}

fn json(body: String) -> Response {
    ([(header::CONTENT_TYPE, "application/json; charset=utf-8")], body).into_response()
}
