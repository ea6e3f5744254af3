//! Bodies of Ollama's routes.

use crate::events::TokenId;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;

/// The body of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct OllamaChatBody {
    /// The conversation; an empty list loads the model.
    messages: Vec<OllamaMessageBody>,
    /// Tools: `{type: "function", function: {name, description?, parameters}}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tools: Option<Vec<Value>>,
    /// Drop the oldest messages if the conversation does not fit into the context; false uses the server's
    /// `--context-policy`. Default: true, or false if the server has `--context-policy` or `--context-shift`.
    truncate: Option<bool>,
    #[serde(flatten)]
    common: OllamaCommonFields,
}

/// The body of a generation.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct OllamaGenerateBody {
    /// The prompt; a request without a prompt loads the model.
    prompt: Option<String>,
    /// Text after the answer, for models that were trained for infilling.
    suffix: Option<String>,
    /// The system message.
    system: Option<String>,
    /// Use the prompt without the model's chat template.
    #[schema(default = false)]
    raw: Option<bool>,
    /// `context` of the previous response.
    context: Option<Vec<TokenId>>,
    #[serde(flatten)]
    common: OllamaCommonFields,
}

/// Fields of chats and generations.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct OllamaCommonFields {
    /// Name of the model, optionally followed by mods: `model/mod`.
    model: String,
    /// `"json"`, or a JSON schema of the answer.
    #[schema(value_type = Option<Value>)]
    format: Option<Value>,
    /// Sampling parameters, `num_predict`, `stop`, `mods`, and all other parameters of a chat completion.
    #[schema(value_type = Option<Object>)]
    options: Option<Value>,
    /// True or false for reasoning, or its effort: `"low"`, `"medium"`, `"high"` or `"max"`, which is the same as
    /// `"high"`.
    #[schema(value_type = Option<Value>)]
    think: Option<Value>,
    /// Report the log-probability of each token.
    #[schema(default = false)]
    logprobs: Option<bool>,
    /// Number of alternatives of each token to report, with `logprobs`.
    #[schema(default = 0, maximum = 1000)]
    top_logprobs: Option<u32>,
    /// Answer with a stream of JSON lines.
    #[schema(default = true)]
    stream: Option<bool>,
    /// With 0, a request without messages or prompt unloads the model; other values have no effect.
    #[schema(value_type = Option<Value>)]
    keep_alive: Option<Value>,
}

/// A message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct OllamaMessageBody {
    /// `system`, `user`, `assistant` or `tool`.
    role: String,
    content: Option<String>,
    /// Reasoning of an assistant's message.
    thinking: Option<String>,
    /// Tool calls of an assistant's message: `{function: {name, arguments}}`.
    #[schema(value_type = Option<Vec<Object>>)]
    tool_calls: Option<Vec<Value>>,
    /// Name of the tool whose result the message contains, if the role is `tool`.
    tool_name: Option<String>,
}
