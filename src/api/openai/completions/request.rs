//! Parses a completion body into engine requests, one per prompt and answer.

use crate::api::shared::body::{ChunkOptions, GenerationFields};
use crate::api::shared::fields::{Fields, integer, invalid_value};
use crate::api::shared::generation;
use crate::api::shared::infill::infill_prompt;
use crate::api::shared::settings::{GenerationSettings, ReportedOptions};
use crate::api::shared::{self, parameters};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use crate::model::TokenizeOptions;
use crate::server::{ApiError, App, ErrorCode, LoadedModel};
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;
use utoipa::ToSchema;

/// Maximum alternatives per token.
const MAX_LOGPROBS: i64 = 1000;
/// Maximum answers per prompt, as in OpenAI's API.
const MAX_ANSWERS: i64 = 128;

/// The body of a completion.
#[derive(Debug, Deserialize, ToSchema)]
#[expect(dead_code, reason = "the body is read field by field; this describes it")]
pub(super) struct CompletionBody {
    /// A string, token ids, or a list of prompts.
    #[schema(value_type = Value)]
    prompt: Value,
    /// Text after the answer.
    suffix: Option<String>,
    /// Number of answers per prompt.
    #[schema(minimum = 1, maximum = 128, default = 1)]
    n: Option<u32>,
    /// Repeat the prompt.
    #[schema(default = false)]
    echo: Option<bool>,
    /// Report the log-probability of each token and of this many alternatives.
    #[schema(minimum = 0, maximum = 1000)]
    logprobs: Option<u32>,
    stream_options: Option<ChunkOptions>,
    /// Report the prompt and the settings.
    #[schema(default = false)]
    verbose: Option<bool>,
    #[serde(flatten)]
    generation: GenerationFields,
}

/// A completion request that passed validation.
pub(super) struct CompletionRequest {
    /// One request per answer, in order.
    pub(super) requests: Vec<Request>,
    /// The prompt of each request.
    pub(super) prompts: Vec<CompletionPrompt>,
    pub(super) options: CompletionOptions,
}

/// A prompt with its text for `echo`.
#[derive(Debug, Clone)]
pub(super) struct CompletionPrompt {
    pub(super) tokens: Vec<TokenId>,
    pub(super) text: String,
    /// True if an earlier answer has the same prompt, so that its tokens are not counted twice.
    pub(super) repeated: bool,
}

/// Client options that shape the response, not the generation.
#[derive(Debug, Clone)]
pub(super) struct CompletionOptions {
    pub(super) stream: bool,
    /// Send a final chunk with token counts.
    pub(super) include_usage: bool,
    /// `Some(n)`: report the log-probability of each token and of `n` alternatives.
    pub(super) logprobs: Option<usize>,
    /// Report probabilities after the sampling stages instead of the model's log-probabilities.
    pub(super) after_sampler: bool,
    pub(super) echo: bool,
    /// llama-server's `generation_settings`, if the client sent `verbose`.
    pub(super) settings: Option<GenerationSettings>,
    /// Maximum silence of a stream before a keep-alive is sent; `None` sends none.
    pub(super) ping: Option<Duration>,
}

/// Parses a body.
pub(super) fn parse(app: &App, loaded: &LoadedModel, fields: Fields<'_>) -> Result<CompletionRequest, ApiError> {
    let fields = fields.with_server_defaults(app);
    let count = answer_count(fields)?;
    parameters::reject_lazy_grammar(fields)?;
    let mut options = CompletionOptions {
        stream: fields.flag("stream")?.unwrap_or(false),
        include_usage: parameters::include_usage(fields)?,
        logprobs: logprobs(fields)?,
        after_sampler: fields.flag("post_sampling_probs")?.unwrap_or(false),
        echo: fields.flag("echo")?.unwrap_or(false),
        settings: None,
        ping: parameters::ping_interval(app, fields)?,
    };
    let verbose = fields.flag("verbose")?.unwrap_or(false);
    let (mut requests, mut prompts) = (Vec::new(), Vec::new());
    let parsed = parse_prompts(app, loaded, fields)?;
    generation::check_run_count(parsed.len() * count as usize)?;
    for prompt in parsed {
        let first = completion_engine_request(app, loaded, fields, &prompt, &options)?;
        if verbose && options.settings.is_none() {
            options.settings = Some(generation_settings(fields, &first, &options));
        }
        requests.extend(generation::repeat_request(first, count));
        prompts.extend((0..count).map(|index| CompletionPrompt { repeated: index > 0, ..prompt.clone() }));
    }
    Ok(CompletionRequest { requests, prompts, options })
}

fn answer_count(fields: Fields<'_>) -> Result<u32, ApiError> {
    let count = fields.integer("n", 1..=MAX_ANSWERS)?.unwrap_or(1);
    match fields.get("best_of") {
        Some(best_of) if integer(best_of) != Some(count) => {
            let detail =
                format!("`best_of` must be equal to `n`, which is {count}, because answers are not ranked; omit it");
            Err(ApiError::invalid("best_of", detail).code(ErrorCode::Unsupported))
        }
        _ => Ok(count as u32),
    }
}

fn logprobs(fields: Fields<'_>) -> Result<Option<usize>, ApiError> {
    match fields.first_present(&["logprobs", "n_probs"]) {
        Some(("logprobs", Value::Bool(enabled))) => Ok(enabled.then_some(1)),
        Some((name, _)) => Ok(fields.integer(name, 0..=MAX_LOGPROBS)?.map(|count| count as usize)),
        None => Ok(None),
    }
}

/// Returns the run's settings in llama-server's `generation_settings` format.
fn generation_settings(fields: Fields<'_>, request: &Request, options: &CompletionOptions) -> GenerationSettings {
    let reported = ReportedOptions {
        stream: options.stream,
        n_probs: options.logprobs.unwrap_or(0),
        after_sampler: options.after_sampler,
        adapters: request.adapters.clone().unwrap_or_default(),
        ..ReportedOptions::from_fields(fields)
    };
    GenerationSettings::new(&request.sampling, &request.limits, &reported)
}

fn completion_engine_request(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prompt: &CompletionPrompt,
    options: &CompletionOptions,
) -> Result<Request, ApiError> {
    Ok(Request {
        prompt_preview: parameters::preview(&prompt.text),
        alternatives: Request::ALTERNATIVES.max(options.logprobs.unwrap_or(0)),
        report: ReportOptions {
            prompt_probabilities: options.echo && options.logprobs.is_some(),
            after_sampler: options.after_sampler && options.logprobs.is_some(),
            ..ReportOptions::default()
        },
        ..shared::engine_request(app, loaded, fields, prompt.tokens.clone(), Surface::Openai)?
    })
}

fn parse_prompts(app: &App, loaded: &LoadedModel, fields: Fields<'_>) -> Result<Vec<CompletionPrompt>, ApiError> {
    const EXPECTED: &str = "a string, a list of token ids, or a list of such prompts";
    let prompt = fields
        .get("prompt")
        .ok_or_else(|| ApiError::invalid("prompt", format!("`prompt` is missing; send {EXPECTED}")))?;
    let parse = |prompt: &Value| parse_prompt(app, loaded, fields, prompt);
    match prompt {
        Value::Array(list) if list.is_empty() => Err(invalid_value("prompt", EXPECTED, prompt)),
        Value::Array(list) if !list.iter().any(Value::is_number) => {
            generation::check_run_count(list.len())?;
            list.iter().map(parse).collect()
        }
        prompt => Ok(vec![parse(prompt)?]),
    }
}

fn parse_prompt(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    value: &Value,
) -> Result<CompletionPrompt, ApiError> {
    let vocabulary = loaded.vocabulary();
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    let (tokens, text) = match (suffix, value) {
        (None, value) => {
            let tokens = parameters::encode_prompt(value, "prompt", vocabulary, TokenizeOptions::PROMPT)?;
            let tokens = parameters::or_start_token(tokens, vocabulary);
            let text = value.as_str().map_or_else(|| vocabulary.decode(&tokens), str::to_owned);
            (tokens, text)
        }
        (Some(suffix), Value::String(prefix)) => infill_prompt(app, loaded, fields, prefix, suffix)?,
        (Some(_), other) => return Err(invalid_value("prompt", "a string when `suffix` is set", other)),
    };
    Ok(CompletionPrompt { tokens, text, repeated: false })
}
