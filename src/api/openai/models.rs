//! The list of models, loaded or available.

use crate::api::shared::error::OpenAiError;
use crate::api::shared::model_status::ModelStatus;
use crate::server::extract::{Path, Query};
use crate::server::{ApiError, App, LoadedModel, ModelEntry};
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Header that clients of Anthropic send.
const ANTHROPIC_VERSION: &str = "anthropic-version";

/// Query parameters of the model list.
#[derive(Debug, Deserialize)]
pub(super) struct ListModelsParams {
    reload: Option<String>,
}

/// The list of models.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ModelListResponse {
    /// OpenAI's format, with the models in Ollama's format too.
    OpenAi {
        /// Always `list`.
        object: &'static str,
        /// The models, the default model first.
        data: Vec<OpenAiModel>,
        /// The same models in Ollama's format.
        models: Vec<OllamaModel>,
    },
    /// Anthropic's format.
    Anthropic {
        /// The models, the default model first.
        data: Vec<AnthropicModel>,
        /// Always false.
        has_more: bool,
        /// Name of the first model.
        first_id: Option<String>,
        /// Name of the last model.
        last_id: Option<String>,
    },
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum ModelResponse {
    /// OpenAI's format.
    OpenAi(Box<OpenAiModel>),
    /// Anthropic's format.
    Anthropic(Box<AnthropicModel>),
}

/// A model in OpenAI's format.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OpenAiModel {
    /// Name of the model.
    id: String,
    /// Further names that requests may use.
    aliases: Vec<String>,
    /// Tags from `--tags`.
    tags: Vec<String>,
    /// Always `model`.
    object: &'static str,
    /// Start of the server in seconds since 1970.
    created: i64,
    /// Always `thunder`.
    owned_by: &'static str,
    status: ModelStatus,
    /// Supported request types and inputs; `null` if it is not loaded.
    capabilities: Option<Vec<&'static str>>,
    /// Properties of the file; `null` if it is not loaded.
    meta: Option<ModelMetadata>,
}

/// Properties of a loaded model.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ModelMetadata {
    architecture: String,
    /// llama.cpp's number of the tokenizer type.
    vocab_type: u32,
    tokenizer: &'static str,
    n_vocab: usize,
    /// Context of a slot in tokens.
    n_ctx: u32,
    n_ctx_train: u32,
    n_embd: u32,
    n_layer: u32,
    n_head: u32,
    n_params: u64,
    /// Size of the weights in bytes.
    size: u64,
    /// Quantization.
    ftype: String,
}

/// A model in Anthropic's format.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct AnthropicModel {
    /// Always `model`.
    r#type: &'static str,
    /// Name of the model.
    id: String,
    /// Name of the model.
    display_name: String,
    /// Start of the server.
    created_at: String,
    /// Always `active`.
    lifecycle: &'static str,
    /// Context in tokens; `null` if it is not loaded.
    max_input_tokens: Option<u32>,
    /// Context in tokens; `null` if it is not loaded.
    max_tokens: Option<u32>,
}

/// A model in Ollama's format; unknown fields are empty.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OllamaModel {
    /// Name of the model.
    name: String,
    /// Name of the model.
    model: String,
    modified_at: &'static str,
    size: &'static str,
    digest: &'static str,
    /// Always `model`.
    r#type: &'static str,
    description: &'static str,
    #[schema(value_type = Vec<String>)]
    tags: [&'static str; 1],
    /// `completion`, and `multimodal` for a model that sees images.
    capabilities: &'static [&'static str],
    parameters: &'static str,
    details: OllamaModelDetails,
}

/// Details of a model in Ollama's format.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OllamaModelDetails {
    parent_model: &'static str,
    /// Always `gguf`.
    format: &'static str,
    /// Architecture of the model.
    family: String,
    #[schema(value_type = Vec<String>)]
    families: [String; 1],
    parameter_size: &'static str,
    /// Quantization.
    quantization_level: String,
}

/// Lists the models that requests can name, with details of the loaded ones. `?reload=1` scans for new files first.
/// Clients that send `anthropic-version` receive Anthropic's format.
#[utoipa::path(get, path = "/v1/models", tag = "openai",
    responses((status = 200, body = ModelListResponse),
              (status = 503, description = "The server is starting")))]
pub(super) async fn list(
    State(app): State<App>,
    params: Result<Query<ListModelsParams>, ApiError>,
    headers: HeaderMap,
) -> Result<Json<ModelListResponse>, OpenAiError> {
    let Query(params) = params?;
    app.check_ready()?;
    if params.reload.is_some() {
        app.models().refresh().await;
    }
    let entries = app.models().list();
    if headers.contains_key(ANTHROPIC_VERSION) {
        return Ok(Json(ModelListResponse::Anthropic {
            data: entries.iter().map(|entry| AnthropicModel::new(&app, entry)).collect(),
            has_more: false,
            first_id: entries.first().map(|entry| entry.name.clone()),
            last_id: entries.last().map(|entry| entry.name.clone()),
        }));
    }
    Ok(Json(ModelListResponse::OpenAi {
        object: "list",
        data: entries.iter().map(|entry| OpenAiModel::new(&app, entry)).collect(),
        models: entries.iter().map(OllamaModel::new).collect(),
    }))
}

/// Returns one model.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "openai", params(("id" = String, Path, description = "Name of the model")),
    responses((status = 200, body = ModelResponse), (status = 404, description = "Unknown model")))]
pub(super) async fn show(
    State(app): State<App>,
    id: Result<Path<String>, ApiError>,
    headers: HeaderMap,
) -> Result<Json<ModelResponse>, OpenAiError> {
    let Path(id) = id?;
    app.check_ready()?;
    let entry = app.models().entry_by_name(&id)?;
    Ok(Json(if headers.contains_key(ANTHROPIC_VERSION) {
        ModelResponse::Anthropic(Box::new(AnthropicModel::new(&app, &entry)))
    } else {
        ModelResponse::OpenAi(Box::new(OpenAiModel::new(&app, &entry)))
    }))
}

impl AnthropicModel {
    fn new(app: &App, entry: &ModelEntry) -> Self {
        let context = entry.ready().map(|loaded| loaded.engine().context_per_slot());
        Self {
            r#type: "model",
            id: entry.name.clone(),
            display_name: entry.name.clone(),
            created_at: app.started_at().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
            lifecycle: "active",
            max_input_tokens: context,
            max_tokens: context,
        }
    }
}

impl OpenAiModel {
    fn new(app: &App, entry: &ModelEntry) -> Self {
        let engine = &app.config().engine;
        Self {
            id: entry.name.clone(),
            aliases: if entry.default { engine.alias.clone() } else { entry.aliases.clone() },
            tags: if entry.default { engine.tags.clone() } else { Vec::new() },
            object: "model",
            created: app.started_at().timestamp(),
            owned_by: "thunder",
            status: entry.into(),
            capabilities: entry.ready().map(LoadedModel::capabilities),
            meta: entry.ready().map(ModelMetadata::new),
        }
    }
}

impl OllamaModel {
    fn new(entry: &ModelEntry) -> Self {
        let card = entry.ready().map(|loaded| loaded.model().card());
        let family = card.map(|card| card.architecture.clone()).unwrap_or_default();
        Self {
            name: entry.name.clone(),
            model: entry.name.clone(),
            modified_at: "",
            size: "",
            digest: "",
            r#type: "model",
            description: "",
            tags: [""],
            capabilities: match entry.ready().and_then(|loaded| loaded.model().images()) {
                Some(_) => &["completion", "multimodal"],
                None => &["completion"],
            },
            parameters: "",
            details: OllamaModelDetails {
                parent_model: "",
                format: "gguf",
                family: family.clone(),
                families: [family],
                parameter_size: "",
                quantization_level: card.map(|card| card.file_type.clone()).unwrap_or_default(),
            },
        }
    }
}

impl ModelMetadata {
    fn new(loaded: &LoadedModel) -> Self {
        let card = loaded.model().card();
        Self {
            architecture: card.architecture.clone(),
            vocab_type: card.tokenizer_id,
            tokenizer: card.tokenizer,
            n_vocab: card.vocabulary,
            n_ctx: loaded.engine().context_per_slot(),
            n_ctx_train: card.context_train,
            n_embd: card.embedding,
            n_layer: card.layers,
            n_head: card.heads,
            n_params: card.parameters,
            size: card.size_bytes,
            ftype: card.file_type.clone(),
        }
    }
}
