//! A conversation's prompt without a run: its text, or how many tokens it has.

use crate::api::wire::{self, Fields};
use crate::api::{ApiError, App, LlamaError, Loaded, OpenAiError};
use crate::model::chat::{Options, Rendered};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use serde_json::{Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new()
        .routes(routes!(apply_template))
        .routes(routes!(input_tokens))
        .route("/chat/completions/input_tokens", axum::routing::post(input_tokens))
}

/// The prompt that the model's chat template makes of `messages`, with the fields of a chat completion.
#[utoipa::path(post, path = "/apply-template", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{prompt: text}`"),
              (status = 400, description = "The template does not take these messages")))]
async fn apply_template(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, LlamaError> {
    let body = wire::json(&body?)?;
    let (_, rendered) = rendered(&app, &body).await?;
    Ok(Json(json!({ "prompt": rendered.text })))
}

/// How many tokens the prompt of a chat completion has.
#[utoipa::path(post, path = "/v1/chat/completions/input_tokens", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "`{input_tokens: n, object: \"response.input_tokens\"}`"),
              (status = 400, description = "The template does not take these messages")))]
async fn input_tokens(State(app): State<App>, body: Result<Bytes, BytesRejection>) -> Result<Json<Value>, OpenAiError> {
    let body = wire::json(&body?)?;
    let (loaded, rendered) = rendered(&app, &body).await?;
    let (tokens, _) = rendered.tokenize(loaded.vocabulary());
    Ok(Json(json!({ "input_tokens": tokens.len(), "object": "response.input_tokens" })))
}

async fn rendered(app: &App, body: &Value) -> Result<(Loaded, Rendered), ApiError> {
    let fields = Fields::new(body)?.or(&app.config().server.request_defaults);
    let messages = fields.get("messages").ok_or_else(|| {
        ApiError::invalid("messages", "messages is missing; it takes a list of {\"role\": …, \"content\": …}")
    })?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let tools = fields.list("tools")?.filter(|tools| !tools.is_empty()).map(|tools| Value::Array(tools.clone()));
    let offered = if fields.get("tool_choice").and_then(Value::as_str) == Some("none") { None } else { tools };
    let options = Options {
        tools: offered,
        add_generation_prompt: fields.flag("add_generation_prompt")?.unwrap_or(true),
        variables: fields.object("chat_template_kwargs")?.cloned().unwrap_or_default(),
        now: app.now(),
    };
    let rendered = loaded.template()?.render(messages, &options)?;
    Ok((loaded, rendered))
}
