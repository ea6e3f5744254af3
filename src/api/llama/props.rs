//! `/props`: server properties that clients query before their first request.

use super::response::SuccessResponse;
use crate::api::shared::error::LlamaError;
use crate::api::shared::settings::LlamaResponseOptions;
use crate::api::shared::settings::generation_settings;
use crate::api::shared::{Fields, parameters};
use crate::config::ModSandbox;
use crate::engine::Limits;
use crate::model::chat::{ChatTemplate, RenderOptions};
use crate::model::llama::{Device, Placement, devices};
use crate::mods::python::sandbox::{self, SandboxLauncher};
use crate::server::models::Observed;
use crate::server::{ApiError, App, Caller, Loaded};
use axum::Json;
use axum::extract::{Query, State};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(show, change))
}

/// The query parameter of routes without a body that selects a model.
#[derive(Debug, Deserialize)]
pub(super) struct ModelParams {
    pub(super) model: Option<String>,
}

/// Returns the server's properties: request defaults, slots, model and chat template. `?model=` selects a model.
#[utoipa::path(get, path = "/props", tag = "llama-server",
    responses((status = 200, description = "The properties"), (status = 503, description = "The model is loading")))]
async fn show(State(app): State<App>, Query(params): Query<ModelParams>) -> Result<Json<Value>, LlamaError> {
    app.ready()?;
    Ok(Json(match app.models().observed(params.model.as_deref())? {
        Observed::Awake(loaded) => describe(&app, &loaded).await?,
        Observed::Asleep(asleep) => asleep.props.clone(),
    }))
}

/// Returns the properties of the server with this model.
pub(super) async fn describe(app: &App, loaded: &Loaded) -> Result<Value, ApiError> {
    let (engine, vocabulary, card) = (loaded.engine(), loaded.vocabulary(), loaded.model().card());
    let routes = &app.config().server.routes;
    let text = |token: Option<_>| token.map(|token| vocabulary.decode(&[token])).unwrap_or_default();
    let path = app.models().named(loaded.name()).map(|entry| entry.path.display().to_string()).unwrap_or_default();
    Ok(json!({
        "default_generation_settings": { "params": defaults(app, loaded)?, "n_ctx": engine.context_per_slot() },
        "total_slots": engine.slots(),
        "model_alias": loaded.name(),
        "model_path": path,
        "model_ftype": card.file_type,
        "modalities": { "vision": false, "audio": false, "video": false },
        "media_marker": "<__media__>",
        "endpoint_slots": routes.slots,
        "endpoint_props": routes.props,
        "endpoint_metrics": routes.metrics,
        "ui": routes.dashboard,
        "ui_settings": {},
        "chat_template": loaded.template().map(crate::model::chat::ChatTemplate::source).ok().or(card.chat_template.as_deref()).unwrap_or_default(),
        "chat_template_caps": loaded.template().map(|template| template_capabilities(template, app)).unwrap_or_default(),
        "bos_token": text(vocabulary.special().bos),
        "eos_token": text(vocabulary.special().eos),
        "mod_sandbox": sandbox(app).await,
        "devices": device_list(loaded.model().placement()).await,
        "attention": engine.attention_capture().as_str(),
        "n_gpu_layers": loaded.model().placement().gpu_layers,
        "n_layers": loaded.model().placement().layers,
        "build_info": concat!("thunder-", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
        "cors_proxy_enabled": false,
    }))
}

/// Returns the sandbox policy for mods, and whether the system supports a sandbox.
async fn sandbox(app: &App) -> Value {
    let policy = match app.config().engine.mods.sandbox {
        ModSandbox::Uploaded => "uploaded",
        ModSandbox::All => "all",
        ModSandbox::Off => "off",
    };
    // The sandbox is tried once, in a separate process.
    let tried = tokio::task::spawn_blocking(|| match sandbox::installed().map(SandboxLauncher::support) {
        Some(Ok(how)) => json!({ "available": true, "how": how }),
        Some(Err(reason)) => json!({ "available": false, "reason": reason }),
        None => json!({ "available": false, "reason": "this program cannot start a sandbox" }),
    });
    let mut found = tried.await.unwrap_or_else(|error| json!({ "available": false, "reason": error.to_string() }));
    found["policy"] = policy.into();
    found
}

/// Lists the compute devices and whether this model uses them.
async fn device_list(placement: &Placement) -> Value {
    // Drivers can be slow to report their memory.
    let all = tokio::task::spawn_blocking(devices).await.unwrap_or_default();
    let shown = |device: &Device| {
        json!({
            "name": device.name,
            "description": device.description,
            "type": if device.gpu { "gpu" } else { "cpu" },
            "used": !device.gpu || placement.devices.contains(&device.name),
            "memory_total": device.memory_bytes,
            "memory_free": device.free_bytes,
        })
    };
    all.iter().map(shown).collect()
}

/// Accepts changes but ignores them, like llama-server; requires `--props`.
#[utoipa::path(post, path = "/props", tag = "llama-server",
    responses((status = 200, body = SuccessResponse),
              (status = 403, description = "The key has no right to change properties"),
              (status = 501, description = "The server was started without --props")))]
async fn change(State(app): State<App>, caller: Caller) -> Result<Json<SuccessResponse>, LlamaError> {
    caller.require_props()?;
    if !app.config().server.routes.props {
        return Err(ApiError::not_supported("POST /props is disabled; start the server with --props").into());
    }
    Ok(Json(SuccessResponse::default()))
}

/// Returns the settings of a request without parameters.
fn defaults(app: &App, loaded: &Loaded) -> Result<Value, ApiError> {
    let nothing = Value::Object(Map::new());
    let fields = Fields::new(&nothing)?.with_defaults(&app.config().server.request_defaults).clamp_numbers();
    let sampling = parameters::sampling(fields, loaded.vocabulary())?;
    let limits: Limits = parameters::limits(fields, loaded.vocabulary(), u32::MAX)?;
    let n_predict = fields.integer("n_predict", -1..=i64::from(i32::MAX))?.unwrap_or(-1);
    let mut settings = generation_settings(&sampling, &limits, &LlamaResponseOptions::new(n_predict));
    if fields.get("seed").is_none() {
        // llama-server's value for a random seed.
        settings["seed"] = u32::MAX.into();
    }
    Ok(settings)
}

/// Returns the capabilities of the chat template, determined by test renderings.
fn template_capabilities(template: &ChatTemplate, app: &App) -> Value {
    const MARK: &str = "qzmarkzq";
    const OTHER: &str = "qzotherzq";
    let options = |tools: Value, variables: Value| RenderOptions {
        tools: (!tools.is_null()).then_some(tools),
        add_generation_prompt: true,
        continue_final: false,
        variables: variables.as_object().cloned().unwrap_or_default(),
        now: app.now(),
    };
    let plain = || options(Value::Null, Value::Null);
    let text =
        |messages: Value, options: &RenderOptions| template.render(&messages, options).map(|rendered| rendered.text);
    let shows = |messages: Value, options: &RenderOptions, mark: &str| {
        text(messages, options).is_ok_and(|text| text.contains(mark))
    };
    let user = || json!({ "role": "user", "content": "hello" });
    let call = |name: &str| {
        json!({ "id": "call_1", "type": "function",
                                    "function": { "name": name, "arguments": { "key": "value" } } })
    };
    let calls = |calls: Value| json!([user(), { "role": "assistant", "content": "", "tool_calls": calls }, user()]);
    let both = text(calls(json!([call(MARK), call(OTHER)])), &plain());
    let effort =
        |effort: &str| text(json!([user()]), &options(Value::Null, json!({ "reasoning_effort": effort }))).ok();
    json!({
        "supports_string_content": shows(json!([{ "role": "user", "content": MARK }]), &plain(), MARK),
        "supports_typed_content":
            shows(json!([{ "role": "user", "content": [{ "type": "text", "text": MARK }] }]), &plain(), MARK),
        "supports_tools": template.knows_tools(),
        "supports_tool_calls": shows(calls(json!([call(MARK)])), &plain(), MARK),
        "supports_parallel_tool_calls": both.is_ok_and(|text| text.contains(MARK) && text.contains(OTHER)),
        "supports_system_role": shows(json!([{ "role": "system", "content": MARK }, user()]), &plain(), MARK),
        "supports_preserve_reasoning": shows(
            json!([user(), { "role": "assistant", "content": "hi", "reasoning_content": MARK }, user()]),
            &plain(),
            MARK
        ),
        "supports_reasoning_effort": effort("low") != effort("high"),
        "supports_object_arguments": shows(calls(json!([call(MARK)])), &plain(), "value"),
    })
}
