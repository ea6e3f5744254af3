//! Bodies of llama-server's routes, which are read field by field; these types describe them.

use crate::api::shared::body::GenerationFields;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// A prompt to complete.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct LlamaCompletionBody {
    /// A string, token ids, a list of both, or a list of prompts.
    #[schema(value_type = Value)]
    prompt: Value,
    #[serde(flatten)]
    options: LlamaOptionFields,
    #[serde(flatten)]
    generation: GenerationFields,
}

/// Two texts and the gap between them to fill.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct InfillBody {
    /// Text before the answer.
    input_prefix: String,
    /// Text after the answer.
    input_suffix: String,
    /// Start of the answer.
    #[schema(value_type = Option<Value>)]
    prompt: Option<Value>,
    /// Other files for context: `{filename, text}`.
    #[schema(value_type = Option<Vec<Object>>)]
    input_extra: Option<Vec<Value>>,
    #[serde(flatten)]
    options: LlamaOptionFields,
    #[serde(flatten)]
    generation: GenerationFields,
}

/// Options of the response.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct LlamaOptionFields {
    /// Number of answers per prompt, up to the number of slots. Also `n`.
    #[schema(minimum = 1, default = 1)]
    n_cmpl: Option<u32>,
    /// Number of probabilities per token.
    #[schema(minimum = 0, maximum = 1000, default = 0)]
    n_probs: Option<u32>,
    /// Report the ids of the answer's tokens.
    #[schema(default = false)]
    return_tokens: Option<bool>,
    /// Paths to include in the response, such as `timings/prompt_n`; default all.
    response_fields: Option<Vec<String>>,
    /// Tokens of the prompt that a context shift keeps; -1 for all.
    #[schema(default = 0)]
    n_keep: Option<i32>,
    /// Tokens that a context shift removes; 0 for half.
    #[schema(default = 0)]
    n_discard: Option<i32>,
    /// Minimum tokens of a cached part of the prompt that is moved and reused; 0 disables this.
    #[schema(default = 0)]
    n_cache_reuse: Option<i32>,
    /// Minimum indentation of lines.
    #[schema(default = 0)]
    n_indent: Option<u32>,
    /// Maximum duration of the generation; 0 for none.
    #[schema(default = 0)]
    t_max_predict_ms: Option<i64>,
}

/// Texts to embed.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct EmbeddingsBody {
    /// A string, token ids, `{prompt_string}`, or a list of these. Also `content`, except on `/v1/embeddings`.
    #[schema(value_type = Value)]
    input: Value,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
    /// `float` or `base64`; on `/v1/embeddings`.
    #[schema(default = "float")]
    encoding_format: Option<String>,
    /// Norm to scale vectors to; -1 for none, 0 for 16-bit integers.
    #[schema(minimum = -1, maximum = 32, default = 2)]
    embd_normalize: Option<i32>,
    /// The size of the model's embeddings.
    dimensions: Option<u32>,
}

/// Documents to rank.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct RerankBody {
    /// The query.
    query: String,
    /// The documents: strings, or objects of `text`. Also `texts`, which selects the format of TEI.
    #[schema(value_type = Vec<Value>)]
    documents: Vec<Value>,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
    /// Maximum number of results.
    #[schema(minimum = 1)]
    top_n: Option<u32>,
    /// Repeat the documents. With `texts`: `return_text`.
    #[schema(default = false)]
    return_documents: Option<bool>,
}

/// Texts to classify.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct ClassifyBody {
    /// A string or a list of strings.
    #[schema(value_type = Value)]
    inputs: Value,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
}

/// A text to tokenize.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct TokenizeBody {
    /// A string, or a list of strings and token ids. Also `prompt`, which selects the format of vLLM.
    #[schema(value_type = Value)]
    content: Value,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
    /// Add the BOS token if the model uses one.
    #[schema(default = false)]
    add_special: Option<bool>,
    /// Recognize special tokens in the text.
    #[schema(default = true)]
    parse_special: Option<bool>,
    /// Return the text of each token.
    #[schema(default = false)]
    with_pieces: Option<bool>,
}

/// Tokens to convert to text.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct DetokenizeBody {
    /// Token ids.
    tokens: Vec<i32>,
    /// Name of a model; default is the server's default model.
    model: Option<String>,
}

/// The name of a model.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct ModelNameBody {
    /// Name of the model.
    model: String,
}
