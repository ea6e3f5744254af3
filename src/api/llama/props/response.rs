//! The properties of the server and a model.

use super::capabilities::{TemplateCapabilities, template_capabilities};
use crate::api::shared::images::MEDIA_MARKER;
use crate::api::shared::parameters::MinTokens;
use crate::api::shared::settings::{GenerationSettings, ReportedOptions};
use crate::api::shared::{Fields, parameters};
use crate::config::ModSandbox;
use crate::engine::Limits;
use crate::model::chat::ChatTemplate;
use crate::model::llama::{Device, Placement, devices};
use crate::mods::python::sandbox::{self, SandboxLauncher};
use crate::server::{ApiError, App, LoadedModel};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Properties of the server and a model.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::api::llama) struct PropsResponse {
    default_generation_settings: DefaultSettings,
    total_slots: u32,
    /// Name of the model.
    model_alias: String,
    model_path: String,
    /// Type of the weights.
    model_ftype: String,
    modalities: Modalities,
    media_marker: &'static str,
    endpoint_slots: bool,
    endpoint_props: bool,
    endpoint_metrics: bool,
    /// True if the server has a dashboard.
    ui: bool,
    ui_settings: UiSettings,
    /// Source of the chat template.
    chat_template: String,
    /// Null for a model without a chat template.
    chat_template_caps: Option<TemplateCapabilities>,
    bos_token: String,
    eos_token: String,
    mod_sandbox: SandboxStatus,
    devices: Vec<DeviceResponse>,
    /// Method by which attention is captured.
    attention: &'static str,
    /// Number of layers on GPUs.
    n_gpu_layers: u32,
    n_layers: u32,
    build_info: &'static str,
    /// True if the next request loads the model again.
    pub(in crate::api::llama) is_sleeping: bool,
    cors_proxy_enabled: bool,
}

/// Settings of a request without parameters.
#[derive(Debug, Serialize, ToSchema)]
struct DefaultSettings {
    params: GenerationSettings,
    /// Context of a slot in tokens.
    n_ctx: u32,
}

/// Supported inputs besides text.
#[derive(Debug, Serialize, ToSchema)]
struct Modalities {
    vision: bool,
    audio: bool,
    video: bool,
}

/// Settings of llama-server's pages; always empty.
#[derive(Debug, Serialize, ToSchema)]
struct UiSettings {}

/// The sandbox for mods.
#[derive(Debug, Serialize, ToSchema)]
struct SandboxStatus {
    available: bool,
    /// The mechanism, if available.
    #[serde(skip_serializing_if = "Option::is_none")]
    how: Option<String>,
    /// The reason, if not available.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// The mods that run in it: `uploaded`, `all` or `off`.
    policy: &'static str,
}

/// A compute device.
#[derive(Debug, Serialize, ToSchema)]
struct DeviceResponse {
    name: String,
    description: String,
    /// `gpu` or `cpu`.
    r#type: &'static str,
    /// True if this model uses it.
    used: bool,
    /// Total memory in bytes; 0 if unknown.
    memory_total: u64,
    /// Free memory in bytes.
    memory_free: u64,
}

/// Returns the properties of the server with this model.
pub(in crate::api::llama) async fn describe(app: &App, loaded: &LoadedModel) -> Result<PropsResponse, ApiError> {
    let (engine, vocabulary, card) = (loaded.engine(), loaded.vocabulary(), loaded.model().card());
    let (placement, template) = (loaded.model().placement(), loaded.template().ok());
    let routes = &app.config().server.routes;
    let text = |token: Option<_>| token.map(|token| vocabulary.decode(&[token])).unwrap_or_default();
    let path =
        app.models().entry_by_name(loaded.name()).map(|entry| entry.path.display().to_string()).unwrap_or_default();
    Ok(PropsResponse {
        default_generation_settings: DefaultSettings {
            params: defaults(app, loaded)?,
            n_ctx: engine.context_per_slot(),
        },
        total_slots: engine.slots(),
        model_alias: loaded.name().to_owned(),
        model_path: path,
        model_ftype: card.file_type.clone(),
        modalities: Modalities { vision: loaded.model().images().is_some(), audio: false, video: false },
        media_marker: MEDIA_MARKER,
        endpoint_slots: routes.slots,
        endpoint_props: routes.props,
        endpoint_metrics: routes.metrics,
        ui: app.config().server.dashboard,
        ui_settings: UiSettings {},
        chat_template: template
            .map(ChatTemplate::source)
            .or(card.chat_template.as_deref())
            .unwrap_or_default()
            .to_owned(),
        chat_template_caps: template.map(|template| template_capabilities(template, app)),
        bos_token: text(vocabulary.special().bos),
        eos_token: text(vocabulary.special().eos),
        mod_sandbox: sandbox(app).await,
        devices: device_list(placement).await,
        attention: engine.attention_capture().as_str(),
        n_gpu_layers: placement.gpu_layers,
        n_layers: placement.layers,
        build_info: concat!("thunder-", env!("CARGO_PKG_VERSION")),
        is_sleeping: false,
        cors_proxy_enabled: false,
    })
}

/// Returns the sandbox policy for mods and the system's support for a sandbox.
async fn sandbox(app: &App) -> SandboxStatus {
    let policy = match app.config().engine.mods.sandbox {
        ModSandbox::Uploaded => "uploaded",
        ModSandbox::All => "all",
        ModSandbox::Off => "off",
    };
    // Support is probed once, in a separate process.
    let probe = tokio::task::spawn_blocking(|| match sandbox::installed().map(SandboxLauncher::support) {
        Some(found) => found.map(str::to_owned).map_err(str::to_owned),
        None => Err("this program cannot start a sandbox".to_owned()),
    });
    let found = probe.await.unwrap_or_else(|error| Err(error.to_string()));
    let (available, how, reason) = match found {
        Ok(how) => (true, Some(how), None),
        Err(reason) => (false, None, Some(reason)),
    };
    SandboxStatus { available, how, reason, policy }
}

/// Lists the compute devices and marks those that this model uses.
async fn device_list(placement: &Placement) -> Vec<DeviceResponse> {
    // Drivers can be slow to report their memory.
    let all = tokio::task::spawn_blocking(devices).await.unwrap_or_default();
    let shown = |device: Device| DeviceResponse {
        r#type: if device.gpu { "gpu" } else { "cpu" },
        used: !device.gpu || placement.devices.contains(&device.name),
        memory_total: device.memory_bytes,
        memory_free: device.free_bytes,
        name: device.name,
        description: device.description,
    };
    all.into_iter().map(shown).collect()
}

/// Returns the settings of a request without parameters.
fn defaults(app: &App, loaded: &LoadedModel) -> Result<GenerationSettings, ApiError> {
    let empty = Value::Object(Map::new());
    let fields = Fields::new(&empty)?.with_server_defaults(app).lenient();
    let sampling = parameters::sampling(fields, loaded.vocabulary())?;
    let limits: Limits = parameters::limits(fields, loaded.vocabulary(), u32::MAX, MinTokens::One)?;
    let mut settings = GenerationSettings::new(&sampling, &limits, &ReportedOptions::from_fields(fields));
    if fields.get("seed").is_none() {
        // llama-server's value for a random seed.
        settings.seed = u32::MAX;
    }
    Ok(settings)
}
