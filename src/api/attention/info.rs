//! `/api/v1/model/info`: the properties of the model that clients need to interpret its attention.

use super::AttentionError;
use crate::events::TokenId;
use crate::server::extract::Query;
use crate::server::{ApiError, App, LoadedModel};
use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{IntoParams, ToSchema};

/// llama.cpp's prefix of a type that the file does not state.
const GUESSED: &str = "(guessed) ";

/// Query parameters of the model information.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ModelInfoParams {
    /// Name of the model; default is the server's default model.
    model: Option<String>,
}

/// Properties of a model under the names of the Transformers library.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelInfo {
    /// Name of the model.
    model_name: String,
    /// Class of the model in the Transformers library, e.g. `Qwen2ForCausalLM`; llama.cpp's name if the class is
    /// unknown.
    architecture: String,
    /// Number of tokens in the vocabulary.
    vocab_size: usize,
    /// Number of layers; the first dimension of an attention row.
    num_layers: u32,
    /// Attention heads per layer; the second dimension.
    num_attention_heads: u32,
    /// Number of key and value heads per layer.
    num_key_value_heads: u32,
    /// Width of the hidden state.
    hidden_size: u32,
    /// Context the model was trained with, in tokens.
    max_position_embeddings: u32,
    /// Base frequency of the rotary position embedding; `null` if the model has none.
    rope_theta: Option<f32>,
    /// Token that starts a sequence.
    bos_token_id: Option<TokenId>,
    /// Token that ends a sequence.
    eos_token_id: Option<TokenId>,
    /// Special tokens: `bos_token`, `eos_token`, `pad_token` as text, and `im_start_id`, `im_end_id` if the vocabulary
    /// has them.
    #[schema(value_type = Object)]
    special_tokens: Map<String, Value>,
    /// The chat template in Jinja.
    chat_template: Option<String>,
    /// llama.cpp's name of the type of the weights, e.g. `F16` or `Q4_K - Medium`. If the file does not state it, the
    /// type of most tensors.
    torch_dtype: String,
    /// Maximum tokens of one request, prompt and answer together.
    context_length: u32,
    /// Width of the sliding attention window of some layers; `null` if all layers use full attention.
    sliding_window: Option<u32>,
    /// True if requests can include attention.
    attention_available: bool,
    /// The layers with attention, if not all layers have it; their number is the first dimension of a row.
    attention_layer_ids: Option<Vec<u16>>,
    /// True if heads have attention sinks, which take a share of each row, so that rows sum to less than 1.
    attention_sinks: bool,
}

/// Returns the properties of a model. Loads it if a generation request would load it.
#[utoipa::path(get, path = "/api/v1/model/info", tag = "attention", params(ModelInfoParams), responses(
    (status = 200, body = ModelInfo),
    (status = 400, description = "A query parameter is invalid; the message names it. `NO_MODEL`: the model is not loaded, \
        and requests do not load it"),
    (status = 503, description = "`NO_MODEL`: no model is available, or it is being unloaded or could not be loaded")))]
pub(super) async fn show(
    State(app): State<App>,
    query: Result<Query<ModelInfoParams>, ApiError>,
) -> Result<Json<ModelInfo>, AttentionError> {
    let Query(query) = query?;
    let loaded = app.get_or_load(query.model.as_deref()).await?;
    Ok(Json(describe(&loaded)))
}

fn describe(loaded: &LoadedModel) -> ModelInfo {
    let card = loaded.model().card();
    let (vocabulary, engine) = (loaded.vocabulary(), loaded.engine());
    let special = vocabulary.special();
    let mut special_tokens = Map::new();
    let roles = [("bos_token", special.bos), ("eos_token", special.eos), ("pad_token", special.pad)];
    for (name, token) in roles {
        let text = token.map(|token| vocabulary.decode(&[token]));
        special_tokens.insert(name.into(), text.map_or(Value::Null, Value::from));
    }
    for (name, literal) in [("im_start_id", "<|im_start|>"), ("im_end_id", "<|im_end|>")] {
        // A vocabulary without that token splits the text into several tokens.
        if let [token] = vocabulary.encode_markup(literal)[..] {
            special_tokens.insert(name.into(), token.into());
        }
    }
    let support = engine.attention().ok();
    ModelInfo {
        model_name: loaded.name().to_owned(),
        architecture: transformers_class(&card.architecture).map_or_else(|| card.architecture.clone(), str::to_owned),
        vocab_size: card.vocabulary,
        num_layers: card.layers,
        num_attention_heads: card.heads,
        num_key_value_heads: card.kv_heads,
        hidden_size: card.embedding,
        max_position_embeddings: card.context_train,
        rope_theta: card.rope_base,
        bos_token_id: special.bos,
        eos_token_id: special.eos,
        special_tokens,
        chat_template: loaded.template().ok().map(|template| template.source().to_owned()),
        torch_dtype: card.file_type.trim_start_matches(GUESSED).to_owned(),
        context_length: engine.context_per_slot(),
        sliding_window: card.window,
        attention_available: support.is_some(),
        attention_layer_ids: support
            .map(|support| support.layer_ids.clone())
            .filter(|layer_ids| layer_ids.len() < card.layers as usize),
        attention_sinks: support.is_some_and(|support| support.sinks),
    }
}

/// Returns the class in the Transformers library for an architecture of llama.cpp.
fn transformers_class(architecture: &str) -> Option<&'static str> {
    const CLASSES: [(&str, &str); 28] = [
        ("cohere2", "Cohere2ForCausalLM"),
        ("command-r", "CohereForCausalLM"),
        ("deepseek2", "DeepseekV2ForCausalLM"),
        ("exaone4", "Exaone4ForCausalLM"),
        ("falcon", "FalconForCausalLM"),
        ("gemma", "GemmaForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
        ("glm4", "Glm4ForCausalLM"),
        ("gpt-oss", "GptOssForCausalLM"),
        ("gpt2", "GPT2LMHeadModel"),
        ("granite", "GraniteForCausalLM"),
        ("internlm2", "InternLM2ForCausalLM"),
        ("llama", "LlamaForCausalLM"),
        ("llama4", "Llama4ForConditionalGeneration"),
        ("mistral3", "Mistral3ForConditionalGeneration"),
        ("nemotron", "NemotronForCausalLM"),
        ("olmo2", "Olmo2ForCausalLM"),
        ("phi2", "PhiForCausalLM"),
        ("phi3", "Phi3ForCausalLM"),
        ("qwen2", "Qwen2ForCausalLM"),
        ("qwen2moe", "Qwen2MoeForCausalLM"),
        ("qwen3", "Qwen3ForCausalLM"),
        ("qwen3moe", "Qwen3MoeForCausalLM"),
        ("smollm3", "SmolLM3ForCausalLM"),
        ("stablelm", "StableLmForCausalLM"),
        ("starcoder2", "Starcoder2ForCausalLM"),
        ("seed_oss", "SeedOssForCausalLM"),
    ];
    CLASSES.iter().find(|(name, _)| *name == architecture).map(|(_, class)| *class)
}
