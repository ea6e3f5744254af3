//! Lists and describes models in Ollama's format.

use super::description::{ModelDescription, OllamaDetails};
use super::error::OllamaError;
use super::request;
use crate::api::shared::{self, Fields};
use crate::events::hex;
use crate::server::{App, ModelEntry};
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
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
    /// Name of the model, with the tag `latest` if it has no tag.
    name: String,
    /// Like `name`.
    model: String,
    /// Time of the last change of the file.
    modified_at: String,
    /// Size of the file in bytes.
    size: u64,
    /// SHA-256 hash of path, size and time of the file, not of its content.
    digest: String,
    details: OllamaDetails,
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
    app.check_ready()?;
    let mut models = Vec::new();
    for entry in app.models().list() {
        models.push(OllamaTag::new(&app, &entry).await);
    }
    Ok(Json(OllamaTagsResponse { models }))
}

/// Lists the models in memory.
#[utoipa::path(get, path = "/api/ps", tag = "ollama", responses((status = 200, body = OllamaProcessesResponse)))]
async fn running(State(app): State<App>) -> Result<Json<OllamaProcessesResponse>, OllamaError> {
    app.check_ready()?;
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
    app.check_ready()?;
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    // Older clients send `name`.
    let name = match request::model(fields)? {
        Some(name) => Some(name),
        None => request::model_in(fields, "name")?,
    };
    let entry = app.models().entry_for_request(name)?;
    let description = ModelDescription::new(&app, &entry).await;
    Ok(Json(OllamaShowResponse {
        license: "",
        modelfile: format!("FROM {}\n", entry.name),
        parameters: "",
        template: description.template,
        details: description.details,
        model_info: description.info,
        capabilities: description.capabilities,
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
        let modified_at = time(modified.unwrap_or(app.started_at()));
        let size = file.map_or(0, |file| file.len());
        let file = format!("{}\n{size}\n{modified_at}", entry.path.display());
        let name = tagged_name(&entry.name);
        Self {
            name: name.clone(),
            model: name,
            modified_at,
            size,
            digest: hex(&Sha256::digest(file)),
            details: OllamaDetails::new(entry.ready()),
        }
    }
}

/// Returns a name with the tag `latest` if it has no tag, because clients look for such a name in the list.
fn tagged_name(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { format!("{name}:latest") }
}

fn time(time: DateTime<Utc>) -> String {
    time.to_rfc3339_opts(SecondsFormat::Nanos, true)
}

#[cfg(test)]
mod tests {
    use super::tagged_name;

    #[test]
    fn names_without_a_tag_get_one() {
        assert_eq!(["tiny", "tiny:1b", "tiny.gguf"].map(tagged_name), ["tiny:latest", "tiny:1b", "tiny.gguf:latest"]);
    }
}
