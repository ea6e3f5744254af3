//! `/infill`: generates the text between two texts, for editors. Requires a model that was trained for infilling.

use super::request::{LlamaOptionFields, LlamaPrompt};
use super::response::{LlamaCompletion, LlamaCompletionChunk};
use super::routes::complete;
use crate::api::shared::body::GenerationFields;
use crate::api::shared::error::LlamaError;
use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::generation::RunClient;
use crate::api::shared::infill::{InfillParts, infill_tokens, is_suffix_first};
use crate::api::shared::{ModelBody, parameters};
use crate::events::TokenId;
use crate::model::{InfillTokens, TokenizeOptions, Vocabulary};
use crate::server::{ApiError, App, LoadedModel};
use axum::response::Response;
use serde::Deserialize;
use serde_json::Value;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(infill))
}

/// The texts before and after the text to generate.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
struct InfillBody {
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

/// Generates the text between `input_prefix` (followed by `prompt`) and `input_suffix`. `input_extra` is a list of
/// `{filename, text}` used as context. All other fields are those of `/completion`.
#[utoipa::path(post, path = "/infill", tag = "llama-server",
    request_body(content = InfillBody, content_type = "application/json"),
    responses((status = 200, description = "The answer, or server-sent events: chunks, the last one with the final fields and no text",
                  content((LlamaCompletion = "application/json"), (LlamaCompletionChunk = "text/event-stream"))),
              (status = 400, description = "A field is invalid; the message names it"),
              (status = 501, description = "The model was not trained for infilling")))]
async fn infill(client: RunClient, body: Result<ModelBody, ApiError>) -> Result<Response, LlamaError> {
    let ModelBody { body, loaded, .. } = body?;
    let fields = Fields::new(&body)?;
    let tokens = prompt(fields.with_server_defaults(&client.app), &loaded, is_suffix_first(&client.app))?;
    complete(&client, &loaded, fields, vec![LlamaPrompt { tokens, ..LlamaPrompt::default() }]).await
}

fn prompt(fields: Fields<'_>, loaded: &LoadedModel, suffix_first: bool) -> Result<Vec<TokenId>, ApiError> {
    let vocabulary = loaded.vocabulary();
    let tokens = infill_tokens(vocabulary)?;
    let required = |name: &str| {
        fields.text(name)?.ok_or_else(|| ApiError::invalid(name, format!("`{name}` is missing; send a string")))
    };
    let start = match fields.get("prompt") {
        Some(prompt) => parameters::encode_prompt(prompt, "prompt", vocabulary, TokenizeOptions::MARKUP)?,
        None => Vec::new(),
    };
    let mut parts = InfillParts {
        prefix: parameters::encode(vocabulary, required("input_prefix")?, TokenizeOptions::PLAIN),
        suffix: parameters::encode(vocabulary, required("input_suffix")?, TokenizeOptions::PLAIN),
        start,
        extra: encode_extra(fields, vocabulary, tokens)?,
        suffix_first,
    };
    let max_tokens = usize::try_from(parameters::n_predict(fields)).ok();
    parts.shorten(loaded.engine().context_per_slot() as usize, max_tokens);
    Ok(parts.prompt(vocabulary, tokens))
}

/// Tokenizes the other files, each preceded by its name if the model has a token for file names.
fn encode_extra(fields: Fields<'_>, vocabulary: &Vocabulary, tokens: InfillTokens) -> Result<Vec<TokenId>, ApiError> {
    const EXPECTED: &str = "a list of {\"filename\": …, \"text\": …}";
    let mut all = Vec::new();
    let plain = |text: &str| parameters::encode(vocabulary, text, TokenizeOptions::PLAIN);
    if let Some(repository) = tokens.repository {
        all.push(repository);
        all.extend(plain("myproject\n"));
    }
    for file in fields.list("input_extra")?.into_iter().flatten() {
        let text = file["text"].as_str().ok_or_else(|| invalid_value("input_extra", EXPECTED, file))?;
        let name = match &file["filename"] {
            Value::Null => "tmp",
            Value::String(name) => name,
            _ => return Err(invalid_value("input_extra", EXPECTED, file)),
        };
        match tokens.file {
            Some(separator) => {
                all.push(separator);
                all.extend(plain(&format!("{name}\n")));
            }
            None => all.extend(plain("\n\n--- snippet ---\n\n")),
        }
        all.extend(plain(text));
    }
    if let Some(separator) = tokens.file {
        all.push(separator);
        all.extend(plain("filename\n"));
    }
    Ok(all)
}
