//! Lists and describes models in Ollama's format.

use super::error::OllamaError;
use super::request;
use crate::api::shared::{self, Fields};
use crate::model::chat::ChatTemplate;
use crate::server::{App, Loaded, ModelEntry};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

/// Version of Ollama's API that these routes implement. Clients compare it with the version that they need.
const OLLAMA_VERSION: &str = "0.9.0";

/// Reported time to the unloading of a model that stays loaded, as in Ollama.
const NEVER_UNLOADED: TimeDelta = TimeDelta::days(365 * 100);

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(tags)).routes(routes!(show)).routes(routes!(running)).routes(routes!(version))
}

/// The models that requests can name.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaTagsResponse {
    models: Vec<OllamaTag>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaTag {
    /// Name of the model.
    name: String,
    /// Name of the model.
    model: String,
    /// Time of the last change of the file.
    modified_at: String,
    /// Size of the file in bytes.
    size: u64,
    /// Fingerprint of the weights; empty if the model is not loaded.
    digest: String,
    details: OllamaDetails,
}

/// Properties of a model; empty if it is not loaded.
#[derive(Debug, Default, Serialize, ToSchema)]
struct OllamaDetails {
    /// Always empty.
    parent_model: &'static str,
    /// Always `gguf`.
    format: &'static str,
    /// Architecture of the model.
    family: String,
    families: Vec<String>,
    /// Number of weights, such as `8.0B`.
    parameter_size: String,
    /// Quantization.
    quantization_level: String,
}

/// The models in memory.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaProcessesResponse {
    models: Vec<OllamaProcess>,
}

/// A model in memory.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaProcess {
    #[serde(flatten)]
    tag: OllamaTag,
    /// Time at which it is unloaded if no request uses it; far in the future without `--sleep-idle-seconds`.
    expires_at: String,
    /// Bytes of the weights on GPUs.
    size_vram: u64,
    /// Context of a slot in tokens.
    context_length: u32,
}

/// The model to describe.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct OllamaShowBody {
    /// Name of the model.
    model: String,
}

/// A description of a model.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaShowResponse {
    /// Always empty.
    license: &'static str,
    /// The name of the model as a Modelfile.
    modelfile: String,
    /// Always empty.
    parameters: &'static str,
    /// The chat template; unlike Ollama's it is Jinja.
    template: String,
    details: OllamaDetails,
    /// Properties of the file, under the names of GGUF.
    #[schema(value_type = Object)]
    model_info: serde_json::Map<String, serde_json::Value>,
    /// `completion`, `vision`, `embedding`, `tools`, `thinking`, `insert`.
    capabilities: Vec<&'static str>,
    /// Time of the last change of the file.
    modified_at: String,
}

/// The version of Ollama's API.
#[derive(Debug, Serialize, ToSchema)]
struct OllamaVersionResponse {
    /// Version of Ollama's API that these routes implement.
    version: &'static str,
    /// Version of Thunder.
    thunder: &'static str,
}

/// Lists the models that requests can name.
#[utoipa::path(get, path = "/api/tags", tag = "ollama", responses((status = 200, body = OllamaTagsResponse)))]
async fn tags(State(app): State<App>) -> Result<Json<OllamaTagsResponse>, OllamaError> {
    app.ready()?;
    let mut models = Vec::new();
    for entry in app.models().list() {
        models.push(OllamaTag::new(&app, &entry).await);
    }
    Ok(Json(OllamaTagsResponse { models }))
}

/// Lists the models in memory.
#[utoipa::path(get, path = "/api/ps", tag = "ollama", responses((status = 200, body = OllamaProcessesResponse)))]
async fn running(State(app): State<App>) -> Result<Json<OllamaProcessesResponse>, OllamaError> {
    app.ready()?;
    let sleep_after = app.config().server.models.sleep_after.and_then(|delay| TimeDelta::from_std(delay).ok());
    let expires_at = time(app.now() + sleep_after.unwrap_or(NEVER_UNLOADED));
    let mut models = Vec::new();
    for entry in app.models().list() {
        let Some(loaded) = entry.ready() else { continue };
        let placement = loaded.model().placement();
        let bytes = loaded.model().card().size_bytes;
        models.push(OllamaProcess {
            tag: OllamaTag::new(&app, &entry).await,
            expires_at: expires_at.clone(),
            size_vram: bytes * u64::from(placement.gpu_layers) / u64::from(placement.layers.max(1)),
            context_length: loaded.engine().context_per_slot(),
        });
    }
    Ok(Json(OllamaProcessesResponse { models }))
}

/// Describes a model.
#[utoipa::path(post, path = "/api/show", tag = "ollama",
    request_body(content = OllamaShowBody, content_type = "application/json"),
    responses((status = 200, body = OllamaShowResponse),
              (status = 404, body = super::error::OllamaErrorResponse, description = "Unknown model")))]
async fn show(
    State(app): State<App>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<OllamaShowResponse>, OllamaError> {
    app.ready()?;
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    // Older clients send `name`.
    let name = match request::model(fields)? {
        Some(name) => Some(name),
        None => fields.text("name")?,
    };
    let entry = app.models().find_entry(name)?;
    let loaded = entry.ready();
    let template = loaded.and_then(|loaded| loaded.template().ok());
    Ok(Json(OllamaShowResponse {
        license: "",
        modelfile: format!("FROM {}\n", entry.name),
        parameters: "",
        template: template.map(ChatTemplate::source).unwrap_or_default().to_owned(),
        details: OllamaDetails::new(loaded),
        model_info: loaded.map(model_info).unwrap_or_default(),
        capabilities: loaded.map(capabilities).unwrap_or_default(),
        modified_at: OllamaTag::new(&app, &entry).await.modified_at,
    }))
}

/// Returns the version of Ollama's API.
#[utoipa::path(get, path = "/api/version", tag = "ollama", responses((status = 200, body = OllamaVersionResponse)))]
async fn version() -> Json<OllamaVersionResponse> {
    Json(OllamaVersionResponse { version: OLLAMA_VERSION, thunder: env!("CARGO_PKG_VERSION") })
}

impl OllamaTag {
    async fn new(app: &App, entry: &ModelEntry) -> Self {
        let file = tokio::fs::metadata(&entry.path).await.ok();
        let modified = file.as_ref().and_then(|file| file.modified().ok()).map(DateTime::<Utc>::from);
        let digest = entry.ready().map(|loaded| format!("{:032x}", loaded.model().fingerprint()));
        Self {
            name: entry.name.clone(),
            model: entry.name.clone(),
            modified_at: time(modified.unwrap_or(app.started_at())),
            size: file.map_or(0, |file| file.len()),
            digest: digest.unwrap_or_default(),
            details: OllamaDetails::new(entry.ready()),
        }
    }
}

impl OllamaDetails {
    fn new(loaded: Option<&Loaded>) -> Self {
        let Some(card) = loaded.map(|loaded| loaded.model().card()) else {
            return Self { format: "gguf", ..Self::default() };
        };
        Self {
            parent_model: "",
            format: "gguf",
            family: card.architecture.clone(),
            families: vec![card.architecture.clone()],
            parameter_size: parameter_size(card.parameters),
            quantization_level: card.file_type.clone(),
        }
    }
}

fn time(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Nanos, true)
}

/// Returns a number of weights in Ollama's format.
fn parameter_size(parameters: u64) -> String {
    let count = parameters as f64;
    match parameters {
        1_000_000_000.. => format!("{:.1}B", count / 1e9),
        1_000_000.. => format!("{:.2}M", count / 1e6),
        1_000.. => format!("{:.0}K", count / 1e3),
        _ => parameters.to_string(),
    }
}

fn model_info(loaded: &Loaded) -> serde_json::Map<String, serde_json::Value> {
    let card = loaded.model().card();
    let architecture = &card.architecture;
    let own = |name: &str| format!("{architecture}.{name}");
    [
        ("general.architecture".to_owned(), architecture.as_str().into()),
        ("general.parameter_count".to_owned(), card.parameters.into()),
        (own("attention.head_count"), card.heads.into()),
        (own("attention.head_count_kv"), card.kv_heads.into()),
        (own("block_count"), card.layers.into()),
        (own("context_length"), card.context_train.into()),
        (own("embedding_length"), card.embedding.into()),
        (own("vocab_size"), card.vocabulary.into()),
    ]
    .into_iter()
    .collect()
}

fn capabilities(loaded: &Loaded) -> Vec<&'static str> {
    let template = loaded.template().ok();
    let has = |text: &str| template.is_some_and(|template| !text.is_empty() && template.source().contains(text));
    let reasoning = template.map(|template| template.syntax().reasoning_markers.0.clone()).unwrap_or_default();
    [
        (loaded.model().generates(), "completion"),
        (loaded.model().images().is_some(), "vision"),
        (loaded.encoder().embeddings().is_ok(), "embedding"),
        (has("tools"), "tools"),
        (has(&reasoning), "thinking"),
        (loaded.vocabulary().special().infill.is_some(), "insert"),
    ]
    .into_iter()
    .filter_map(|(can, name)| can.then_some(name))
    .collect()
}

#[cfg(test)]
mod tests {
    use super::parameter_size;

    #[test]
    fn parameter_sizes_have_a_unit() {
        let sizes = [999, 12_345, 137_000_000, 8_030_261_248].map(parameter_size);
        assert_eq!(sizes, ["999", "12K", "137.00M", "8.0B"]);
    }
}
