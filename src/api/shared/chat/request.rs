//! Parses and validates the body of a chat completion into engine requests.

use super::conversation::{Conversation, PreparedChat};
use crate::api::shared::generation;
use crate::api::shared::settings::{GenerationSettings, ReportedOptions};
use crate::api::shared::{self, Fields, parameters};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use crate::model::chat::answer::AnswerFormat;
use crate::server::{ApiError, App, LoadedModel};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Maximum alternatives per token of an answer.
const MAX_PROBS: i64 = 1000;
/// Default number of alternatives per token, as in llama-server.
const DEFAULT_PROBS: i64 = 20;
/// Maximum answers to one request.
const MAX_ANSWERS: i64 = 32;

/// A chat completion request that passed validation.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    /// One request per answer.
    pub(crate) requests: Vec<Request>,
    pub(crate) answer_format: Arc<AnswerFormat>,
    pub(crate) options: ResponseOptions,
}

/// Client options that shape the response, not the generation.
#[derive(Debug, Clone)]
pub(crate) struct ResponseOptions {
    pub(crate) stream: bool,
    /// Send a final chunk with token counts.
    pub(crate) include_usage: bool,
    /// `Some(n)`: report the log-probability of each token and of `n` alternatives.
    pub(crate) logprobs: Option<usize>,
    /// Report probabilities after the sampling stages instead of the model's log-probabilities.
    pub(crate) after_sampler: bool,
    /// Prompt text and settings to report; `None` unless the client sent `verbose`.
    pub(crate) verbose: Option<VerboseDetails>,
    /// Add timings to every chunk of a stream.
    pub(crate) timings_per_token: bool,
    /// Number of prompt tokens.
    pub(crate) prompt_tokens: usize,
    /// Maximum silence of a stream before a keep-alive is sent; `None` sends none.
    pub(crate) ping: Option<Duration>,
}

/// Prompt and settings reported when the client sends `verbose`.
#[derive(Debug, Clone)]
pub(crate) struct VerboseDetails {
    /// Text of the prompt's tokens, including the BOS token if the model adds one.
    pub(crate) prompt: String,
    /// llama-server's `generation_settings`.
    pub(crate) settings: GenerationSettings,
}

impl ChatRequest {
    /// Parses the body of a chat completion. The tokens `earlier` precede its prompt.
    pub(crate) async fn parse(
        app: &App,
        loaded: &LoadedModel,
        body: &Value,
        surface: Surface,
        earlier: &[TokenId],
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(body)?.with_server_defaults(app);
        let mut prepared = Conversation::parse(app, fields)?.prepare(loaded).await?;
        if !earlier.is_empty() {
            let bos = loaded.vocabulary().special().bos;
            let rest = prepared.tokens.strip_prefix(bos.as_slice()).unwrap_or(&prepared.tokens);
            prepared.tokens = [earlier, rest].concat();
            // They are those of the conversation alone.
            prepared.spans.clear();
        }
        let mut options = ResponseOptions::parse(app, fields, prepared.tokens.len())?;
        // The Responses API reports only the tokens of the text, and Ollama's API the tokens next to the message.
        let streams_call_tokens = options.stream && !matches!(surface, Surface::Responses | Surface::Ollama);
        if options.logprobs.is_some() && streams_call_tokens && !prepared.answer_format.tools.is_empty() {
            return Err(ApiError::invalid(
                "logprobs",
                "`logprobs` cannot be streamed together with tools, because a streamed tool call does not carry its \
                 tokens; omit `stream`, `tools` or `logprobs`",
            ));
        }
        let verbose = fields.flag("verbose")?.unwrap_or(false);
        let answers = fields.integer("n", 1..=MAX_ANSWERS)?.unwrap_or(1);
        let answer_format = Arc::clone(&prepared.answer_format);
        let first = chat_engine_request(app, loaded, fields, prepared, &options, surface)?;
        options.verbose = verbose.then(|| VerboseDetails {
            prompt: loaded.vocabulary().decode(&first.prompt),
            settings: generation_settings(fields, &first, &options),
        });
        Ok(Self { requests: generation::repeat_request(first, answers as u32).collect(), answer_format, options })
    }

    /// Parses the body of a completion whose answer is text only: a prompt without a chat template.
    pub(crate) fn raw(
        app: &App,
        loaded: &LoadedModel,
        body: &Value,
        prompt: Vec<TokenId>,
        surface: Surface,
    ) -> Result<Self, ApiError> {
        let fields = Fields::new(body)?.with_server_defaults(app);
        let options = ResponseOptions::parse(app, fields, prompt.len())?;
        let answer_format = Arc::new(AnswerFormat { separates_reasoning: false, ..AnswerFormat::plain("") });
        let request = Request {
            prompt_preview: parameters::preview(&loaded.vocabulary().decode(&prompt)),
            alternatives: Request::ALTERNATIVES.max(options.logprobs.unwrap_or(0)),
            report: report_options(&options),
            ..shared::engine_request(app, loaded, fields, prompt, surface)?
        };
        Ok(Self { requests: vec![request], answer_format, options })
    }
}

/// Renders the conversation of a chat completion for the model that the body names.
pub(crate) async fn prepare_chat(app: &App, body: &Value) -> Result<PreparedChat, ApiError> {
    let loaded = app.get_or_load(body.get("model").and_then(Value::as_str)).await?;
    Conversation::parse(app, Fields::new(body)?.with_server_defaults(app))?.prepare(&loaded).await
}

impl ResponseOptions {
    /// Parses the options, without the details for `verbose`.
    fn parse(app: &App, fields: Fields<'_>, prompt_tokens: usize) -> Result<Self, ApiError> {
        Ok(Self {
            stream: fields.flag("stream")?.unwrap_or(false),
            include_usage: parameters::include_usage(fields)?,
            logprobs: logprobs(fields)?,
            after_sampler: fields.flag("post_sampling_probs")?.unwrap_or(false),
            verbose: None,
            timings_per_token: fields.flag("timings_per_token")?.unwrap_or(false),
            prompt_tokens,
            ping: parameters::ping_interval(app, fields)?,
        })
    }
}

fn chat_engine_request(
    app: &App,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prepared: PreparedChat,
    options: &ResponseOptions,
    surface: Surface,
) -> Result<Request, ApiError> {
    let mut request = shared::engine_request(app, loaded, fields, prepared.tokens, surface)?;
    if !request.limits.ignore_eos {
        request.limits.stop_tokens.extend(&prepared.end_tokens);
        request.limits.stop.extend(prepared.end_texts);
    }
    prepared.images.move_to(&mut request);
    Ok(Request {
        spans: prepared.spans,
        prompt_preview: prepared.preview,
        conversation: Some(prepared.conversation),
        tools: prepared.tools,
        answer_format: Some(prepared.answer_format),
        constraint: prepared.constraint,
        reasoning_budget: prepared.reasoning_budget,
        visible_tokens: prepared.visible,
        alternatives: Request::ALTERNATIVES.max(options.logprobs.unwrap_or(0)),
        report: ReportOptions {
            progress: fields.flag("return_progress")?.unwrap_or(false) && options.stream,
            ..report_options(options)
        },
        ..request
    })
}

fn report_options(options: &ResponseOptions) -> ReportOptions {
    ReportOptions { after_sampler: options.after_sampler && options.logprobs.is_some(), ..ReportOptions::default() }
}

/// Returns the run's settings in llama-server's `generation_settings` format.
fn generation_settings(fields: Fields<'_>, request: &Request, options: &ResponseOptions) -> GenerationSettings {
    let reported = ReportedOptions {
        stream: options.stream,
        n_probs: options.logprobs.unwrap_or(0),
        timings_per_token: options.timings_per_token,
        after_sampler: options.after_sampler,
        adapters: request.adapters.clone().unwrap_or_default(),
        ..ReportedOptions::from_fields(fields)
    };
    GenerationSettings::new(&request.sampling, &request.limits, &reported)
}

/// Parses the number of alternatives to report; `None` for no log-probabilities.
fn logprobs(fields: Fields<'_>) -> Result<Option<usize>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MAX_PROBS)?;
    let probs = fields.integer("n_probs", i64::from(i32::MIN)..=MAX_PROBS)?.filter(|&count| count > 0);
    let is_requested = fields.flag("logprobs")?.unwrap_or(probs.is_some());
    match (is_requested, top) {
        (true, top) => Ok(Some(top.or(probs).unwrap_or(DEFAULT_PROBS) as usize)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "`top_logprobs` requires \"logprobs\": true")),
    }
}
