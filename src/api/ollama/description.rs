//! Properties of a model in Ollama's format. Those of a model that is not loaded are in the header of its file.

use crate::model::chat::ChatTemplate;
use crate::model::llama::GgufHeader;
use crate::server::models::ModelView;
use crate::server::{App, LoadedModel, ModelEntry};
use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// Properties of a model. `/api/tags` leaves them empty for a model that is not loaded.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct OllamaDetails {
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

/// The description of a model.
#[derive(Debug, Default)]
pub(super) struct ModelDescription {
    pub(super) details: OllamaDetails,
    /// Source of the chat template.
    pub(super) template: String,
    /// Properties under the names of GGUF.
    pub(super) info: Map<String, Value>,
    /// `completion`, `vision`, `embedding`, `tools`, `thinking`, `insert`.
    pub(super) capabilities: Vec<&'static str>,
}

/// Capabilities that do not depend on the chat template.
#[derive(Debug, Clone, Copy)]
struct Support {
    completion: bool,
    vision: bool,
    embedding: bool,
    insert: bool,
}

impl OllamaDetails {
    /// Returns the properties of a loaded model, or empty ones.
    pub(super) fn new(loaded: Option<&LoadedModel>) -> Self {
        match loaded.map(|loaded| loaded.model().card()) {
            Some(card) => Self::from_model(&card.architecture, card.parameters, &card.file_type),
            None => Self { format: "gguf", ..Self::default() },
        }
    }

    fn from_model(architecture: &str, parameters: u64, file_type: &str) -> Self {
        Self {
            parent_model: "",
            format: "gguf",
            family: architecture.to_owned(),
            families: vec![architecture.to_owned()],
            parameter_size: parameter_size(parameters),
            quantization_level: file_type.to_owned(),
        }
    }
}

impl ModelDescription {
    /// Describes a model. A file that cannot be read has an empty description.
    pub(super) async fn new(app: &App, entry: &ModelEntry) -> Self {
        if let Some(loaded) = entry.ready() {
            return Self::from_loaded(loaded);
        }
        let engine = &app.config().engine;
        let template = kept_template(app, entry).or_else(|| engine.chat_template.clone());
        let (sees_images, embeds) = (entry.default && engine.images.is_some(), engine.encoder.embedding);
        let path = entry.path.clone();
        let read = move || {
            let header = GgufHeader::read(&path).ok()?;
            Some(Self::from_header(&header, template, sees_images, embeds))
        };
        let described = tokio::task::spawn_blocking(read).await.ok().flatten();
        described.unwrap_or_else(|| Self { details: OllamaDetails::new(None), ..Self::default() })
    }

    fn from_loaded(loaded: &LoadedModel) -> Self {
        let card = loaded.model().card();
        let template = loaded.template().ok();
        let support = Support {
            completion: loaded.model().generates(),
            vision: loaded.model().images().is_some(),
            embedding: loaded.encoder().embeddings().is_ok(),
            insert: loaded.vocabulary().special().infill.is_some(),
        };
        let numbers = [
            ("attention.head_count", card.heads.into()),
            ("attention.head_count_kv", card.kv_heads.into()),
            ("block_count", card.layers.into()),
            ("context_length", card.context_train.into()),
            ("embedding_length", card.embedding.into()),
            ("vocab_size", card.vocabulary as u64),
        ];
        Self {
            details: OllamaDetails::from_model(&card.architecture, card.parameters, &card.file_type),
            template: template.map(ChatTemplate::source).unwrap_or_default().to_owned(),
            info: info(&card.architecture, card.parameters, numbers),
            capabilities: capabilities(template, support),
        }
    }

    /// Describes the model of a file. `template` replaces the chat template of the file.
    fn from_header(header: &GgufHeader, template: Option<String>, sees_images: bool, embeds: bool) -> Self {
        /// `pooling_type` of models that return scores.
        const RANK_POOLING: u64 = 4;
        let architecture = header.text("general.architecture").unwrap_or_default();
        let (parameters, generates) = (header.parameter_count(), header.generates());
        let template = template.or_else(|| header.text("tokenizer.chat_template").map(str::to_owned));
        let template = ChatTemplate::new(template.as_deref(), "", "").ok().filter(|_| generates);
        let heads = header.parameter("attention.head_count");
        let vocabulary = header.arrays.get("tokenizer.ggml.tokens").map(|array| array.count);
        let support = Support {
            completion: generates,
            vision: sees_images,
            embedding: (embeds || !generates) && header.parameter("pooling_type") != Some(RANK_POOLING),
            insert: header.integer("tokenizer.ggml.fim_pre_token_id").is_some(),
        };
        let numbers = [
            ("attention.head_count", heads),
            ("attention.head_count_kv", header.parameter("attention.head_count_kv").or(heads)),
            ("block_count", header.parameter("block_count")),
            ("context_length", header.parameter("context_length")),
            ("embedding_length", header.parameter("embedding_length")),
            ("vocab_size", vocabulary),
        ];
        let numbers = numbers.into_iter().filter_map(|(name, number)| Some((name, number?)));
        Self {
            details: OllamaDetails::from_model(architecture, parameters, &header.file_type()),
            info: info(architecture, parameters, numbers),
            capabilities: capabilities(template.as_ref(), support),
            template: template.as_ref().map(ChatTemplate::source).unwrap_or_default().to_owned(),
        }
    }
}

/// Returns the chat template that a sleeping model has kept.
fn kept_template(app: &App, entry: &ModelEntry) -> Option<String> {
    let Ok(ModelView::Sleeping(sleeping)) = app.models().view(Some(&entry.name)) else { return None };
    sleeping.chat_template.clone()
}

fn info<'a>(
    architecture: &str,
    parameters: u64,
    numbers: impl IntoIterator<Item = (&'a str, u64)>,
) -> Map<String, Value> {
    let general = [("general.architecture", architecture.into()), ("general.parameter_count", parameters.into())];
    let general = general.into_iter().map(|(name, value): (_, Value)| (name.to_owned(), value));
    let own = numbers.into_iter().map(|(name, number)| (format!("{architecture}.{name}"), number.into()));
    general.chain(own).collect()
}

fn capabilities(template: Option<&ChatTemplate>, support: Support) -> Vec<&'static str> {
    let has = |text: &str| template.is_some_and(|template| !text.is_empty() && template.source().contains(text));
    let reasoning = template.map(|template| template.syntax().reasoning_markers.open.clone()).unwrap_or_default();
    [
        (support.completion, "completion"),
        (support.vision, "vision"),
        (support.embedding, "embedding"),
        (has("tools"), "tools"),
        (has(&reasoning), "thinking"),
        (support.insert, "insert"),
    ]
    .into_iter()
    .filter_map(|(can, name)| can.then_some(name))
    .collect()
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

#[cfg(test)]
mod tests {
    use super::{ModelDescription, parameter_size};
    use crate::model::llama::GgufHeader;
    use std::path::Path;

    #[test]
    fn parameter_sizes_have_a_unit() {
        let sizes = [999, 12_345, 137_000_000, 8_030_261_248].map(parameter_size);
        assert_eq!(sizes, ["999", "12K", "137.00M", "8.0B"]);
    }

    #[test]
    fn file_is_described_by_its_header() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
        let header = GgufHeader::read(&path).unwrap();
        let described = ModelDescription::from_header(&header, None, false, true);
        assert_eq!(described.capabilities, ["completion", "embedding", "tools", "thinking"]);
        assert_eq!(described.info["general.parameter_count"], 279_616);
        assert_eq!(described.info["qwen2.vocab_size"], 640);
        let details = described.details;
        assert_eq!([details.family, details.parameter_size, details.quantization_level], ["qwen2", "280K", "F16"]);
        let other = ModelDescription::from_header(&header, Some("{{ messages }}".into()), true, false);
        assert_eq!(other.capabilities, ["completion", "vision"]);
        assert_eq!(other.template, "{{ messages }}");
    }
}
