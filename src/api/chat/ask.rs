//! From the body of a chat completion to the requests that the engine takes. Everything is checked here.

use super::conversation::{Conversation, Prepared};
use crate::api::generation;
use crate::api::llama;
use crate::api::wire::{self, Fields, parameters};
use crate::api::{ApiError, App, Loaded};
use crate::engine::{ReportOptions, Request};
use crate::events::Surface;
use crate::model::chat::answer::AnswerFormat;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

/// Most alternatives that an answer can have.
const MOST_PROBS: i64 = 1000;
/// How many it has unless it says, as with llama-server.
const USUAL_PROBS: i64 = 20;
/// Most answers to one request.
const MOST_ANSWERS: i64 = 32;

/// A body, read.
#[derive(Debug)]
pub(in crate::api) struct Asked {
    /// One for each answer.
    pub(in crate::api) requests: Vec<Request>,
    pub(in crate::api) reading: Arc<AnswerFormat>,
    pub(in crate::api) wishes: Wishes,
}

/// How the answer is to be written.
#[derive(Debug, Clone)]
pub(in crate::api) struct Wishes {
    pub(in crate::api) stream: bool,
    /// Whether a stream ends with a chunk of token counts.
    pub(in crate::api) include_usage: bool,
    /// `Some(n)`: the log-probability of each token, and those of `n` alternatives.
    pub(in crate::api) logprobs: Option<usize>,
    /// Whether they are probabilities behind the sampler's stages.
    pub(in crate::api) after_sampler: bool,
    /// The prompt and what it was continued with, where the answer is to say how it came about.
    pub(in crate::api) verbose: Option<Verbose>,
    /// Whether each chunk of a stream says where the time went so far.
    pub(in crate::api) timings_per_token: bool,
    /// Tokens of the prompt.
    pub(in crate::api) prompt_tokens: usize,
    /// Longest silence of a stream.
    pub(in crate::api) ping: Option<Duration>,
}

/// How an answer came about.
#[derive(Debug, Clone)]
pub(in crate::api) struct Verbose {
    /// Text of the prompt's tokens, with the BOS token where there is one.
    pub(in crate::api) prompt: String,
    /// llama-server's `generation_settings`.
    pub(in crate::api) settings: Value,
}

impl Asked {
    /// Reads a body in the shape of a chat completion.
    pub(in crate::api) fn read(app: &App, loaded: &Loaded, body: &Value) -> Result<Self, ApiError> {
        let fields = Fields::new(body)?.or(&app.config().server.request_defaults);
        let prepared = Conversation::read(app, fields)?.prepare(loaded)?;
        let stream = fields.flag("stream")?.unwrap_or(false);
        let verbose = fields.flag("verbose")?.unwrap_or(false);
        let mut wishes = Wishes {
            stream,
            include_usage: match fields.object("stream_options")? {
                Some(options) => options.get("include_usage").and_then(Value::as_bool).unwrap_or(false),
                None => false,
            },
            logprobs: logprobs(fields, &prepared, stream)?,
            after_sampler: fields.flag("post_sampling_probs")?.unwrap_or(false),
            verbose: None,
            timings_per_token: fields.flag("timings_per_token")?.unwrap_or(false),
            prompt_tokens: prepared.tokens.len(),
            ping: match fields.integer("sse_ping_interval", -1..=i64::from(i32::MAX))? {
                None => app.config().server.routes.sse_ping_interval,
                Some(seconds @ 1..) => Some(Duration::from_secs(seconds as u64)),
                Some(_) => None,
            },
        };
        let answers = fields.integer("n", 1..=MOST_ANSWERS)?.unwrap_or(1);
        let reading = Arc::clone(&prepared.reading);
        let first = request(app, loaded, fields, prepared, &wishes)?;
        wishes.verbose = verbose.then(|| Verbose {
            prompt: loaded.vocabulary().decode(&first.prompt),
            settings: settings(fields, &first, &wishes),
        });
        Ok(Self { requests: generation::answers(first, answers as u32).collect(), reading, wishes })
    }
}

fn request(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    prepared: Prepared,
    wishes: &Wishes,
) -> Result<Request, ApiError> {
    let mut request = wire::request(app, loaded, fields, prepared.tokens, Surface::Openai)?;
    if !request.limits.ignore_eos {
        request.limits.stop_tokens.extend(&prepared.end_tokens);
        request.limits.stop.extend(prepared.end_texts);
    }
    Ok(Request {
        spans: prepared.spans,
        prompt_preview: prepared.preview,
        conversation: Some(prepared.conversation),
        tools: prepared.tools,
        reading: Some(prepared.reading),
        constraint: prepared.constraint,
        thinking: prepared.thinking,
        visible: prepared.visible,
        alternatives: Request::ALTERNATIVES.max(wishes.logprobs.unwrap_or(0)),
        report: ReportOptions {
            progress: wishes.stream && fields.flag("return_progress")?.unwrap_or(false),
            after_sampler: wishes.after_sampler && wishes.logprobs.is_some(),
            ..ReportOptions::default()
        },
        ..request
    })
}

/// The settings of a run as llama-server tells them.
fn settings(fields: Fields<'_>, request: &Request, wishes: &Wishes) -> Value {
    let answer = llama::Answer {
        stream: wishes.stream,
        n_probs: wishes.logprobs.unwrap_or(0),
        timings_per_token: wishes.timings_per_token,
        post_sampling: wishes.after_sampler,
        ..llama::Answer::usual(parameters::n_predict(fields))
    };
    llama::settings(&request.sampling, &request.limits, &answer)
}

fn logprobs(fields: Fields<'_>, prepared: &Prepared, stream: bool) -> Result<Option<usize>, ApiError> {
    let top = fields.integer("top_logprobs", 0..=MOST_PROBS)?;
    let probs = fields.integer("n_probs", i64::from(i32::MIN)..=MOST_PROBS)?.filter(|&count| count > 0);
    let wanted = fields.flag("logprobs")?.unwrap_or(probs.is_some());
    match (wanted, top) {
        (true, _) if stream && !prepared.reading.tools.is_empty() => Err(ApiError::invalid(
            "logprobs",
            "logprobs cannot be streamed together with tools, whose calls have no tokens of their own in a stream; \
             leave out stream, tools or logprobs",
        )),
        (true, top) => Ok(Some(top.or(probs).unwrap_or(USUAL_PROBS) as usize)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "top_logprobs needs \"logprobs\": true")),
    }
}
