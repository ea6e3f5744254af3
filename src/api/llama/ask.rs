//! From the body of a native completion to the requests that the engine takes: one for each prompt and each answer to it.

use crate::api::generation;
use crate::api::shared::constraint::parse_constraint;
use crate::api::shared::fields::{Fields, abbreviate, invalid_value};
use crate::api::shared::{self, lora, parameters};
use crate::api::{ApiError, App, Loaded};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Most alternatives that an answer can have for each token.
const MOST_PROBS: i64 = 1000;

/// A body, read.
#[derive(Debug)]
pub(super) struct Asked {
    /// One for each answer, in order.
    pub(super) requests: Vec<Request>,
    pub(super) answer: Answer,
}

/// How the answer is to be written.
#[derive(Debug, Clone)]
pub(in crate::api) struct Answer {
    pub(in crate::api) stream: bool,
    /// What `n_predict` was; -1 for as many as fit.
    pub(in crate::api) n_predict: i64,
    /// ProbabilityFormatter of that many tokens at each place; 0 for none.
    pub(in crate::api) n_probs: usize,
    /// ProbabilityFormatter after the sampler's stages, instead of the model's.
    pub(in crate::api) post_sampling: bool,
    pub(in crate::api) return_tokens: bool,
    pub(in crate::api) timings_per_token: bool,
    pub(in crate::api) return_progress: bool,
    /// Paths of what the answer has; empty for everything.
    pub(in crate::api) response_fields: Vec<String>,
    pub(in crate::api) ping: Option<Duration>,
    /// Parameters that are echoed as they were sent.
    pub(in crate::api) sent: Map<String, Value>,
}

impl Answer {
    /// The answer to a request that says nothing but how long it may be.
    pub(in crate::api) fn usual(n_predict: i64) -> Self {
        Self {
            stream: false,
            n_predict,
            n_probs: 0,
            post_sampling: false,
            return_tokens: false,
            timings_per_token: false,
            return_progress: false,
            response_fields: Vec::new(),
            ping: None,
            sent: Map::new(),
        }
    }
}

/// Reads a body whose prompts are these.
pub(super) fn read(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    prompts: Vec<Vec<TokenId>>,
) -> Result<Asked, ApiError> {
    let fields = fields.with_defaults(&app.config().server.request_defaults).clamp_numbers();
    let mut answer = answer(app, fields)?;
    let adapters = loaded.model().adapters();
    let adapters = lora::requested_adapters(fields, adapters)?.unwrap_or_else(|| adapters.usual());
    answer.sent.insert("lora".into(), json!(adapters));
    let count = count(fields, loaded.engine().slots())?;
    let mut requests = Vec::with_capacity(prompts.len() * count as usize);
    for prompt in prompts {
        let mut request = request(app, loaded, fields, prompt, &answer)?;
        request.adapters = Some(adapters.clone());
        requests.extend(generation::repeat_request(request, count));
    }
    Ok(Asked { requests, answer })
}

fn answer(app: &App, fields: Fields<'_>) -> Result<Answer, ApiError> {
    let flag = |name| fields.flag(name).map(|flag| flag.unwrap_or(false));
    let n_probs = fields.first_present(&["n_probs", "logprobs"]).map(|(name, value)| match value {
        Value::Bool(wanted) => Ok(i64::from(*wanted)),
        _ => fields.integer(name, i64::from(i32::MIN)..=MOST_PROBS).map(|count| count.unwrap_or_default().max(0)),
    });
    let response_fields = fields.list("response_fields")?.into_iter().flatten().map(|path| match path.as_str() {
        Some(path) => Ok(path.to_owned()),
        None => Err(invalid_value("response_fields", "a list of texts", path)),
    });
    let ping = match fields.integer("sse_ping_interval", -1..=86_400)? {
        None => app.config().server.routes.sse_ping_interval,
        Some(seconds) => u64::try_from(seconds).ok().filter(|&seconds| seconds > 0).map(Duration::from_secs),
    };
    Ok(Answer {
        stream: flag("stream")?,
        n_predict: parameters::n_predict(fields),
        n_probs: n_probs.transpose()?.unwrap_or(0) as usize,
        post_sampling: flag("post_sampling_probs")?,
        return_tokens: flag("return_tokens")?,
        timings_per_token: flag("timings_per_token")?,
        return_progress: flag("return_progress")?,
        response_fields: response_fields.collect::<Result<_, _>>()?,
        ping,
        sent: fields.present_fields(super::settings::ECHOED),
    })
}

/// Answers to each prompt.
fn count(fields: Fields<'_>, slots: u32) -> Result<u32, ApiError> {
    let count = match fields.first_present(&["n_cmpl", "n"]) {
        Some((name, _)) => fields.integer(name, 1..=i64::from(slots))?,
        None => None,
    };
    Ok(count.unwrap_or(1) as u32)
}

fn request(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    prompt: Vec<TokenId>,
    answer: &Answer,
) -> Result<Request, ApiError> {
    Ok(Request {
        prompt_preview: parameters::preview(&loaded.vocabulary().decode(&prompt)),
        constraint: parse_constraint(fields, false)?,
        alternatives: Request::ALTERNATIVES.max(answer.n_probs),
        report: ReportOptions {
            progress: answer.return_progress && answer.stream,
            after_sampler: answer.post_sampling && answer.n_probs > 0,
            ..ReportOptions::default()
        },
        ..shared::engine_request(app, loaded, fields, prompt, Surface::LlamaServer)?
    })
}

/// The prompts of a body: a text, tokens, a mixed list, or a list of those.
pub(super) fn prompts(fields: Fields<'_>, loaded: &Loaded) -> Result<Vec<Vec<TokenId>>, ApiError> {
    const EXPECTED: &str = "a text, a list of token ids and texts, or a list of such prompts";
    let value = fields
        .get("prompt")
        .ok_or_else(|| ApiError::invalid("prompt", format!("prompt is missing; it takes {EXPECTED}")))?;
    match value {
        Value::Array(list) if list.is_empty() => Err(invalid_value("prompt", EXPECTED, value)),
        // As llama-server has it: a list with a number in it is one prompt, any other a list of prompts.
        Value::Array(list) if !list.iter().any(Value::is_number) => {
            list.iter().enumerate().map(|(index, one)| prompt(one, &format!("prompt[{index}]"), loaded)).collect()
        }
        one => Ok(vec![prompt(one, "prompt", loaded)?]),
    }
}

fn prompt(value: &Value, name: &str, loaded: &Loaded) -> Result<Vec<TokenId>, ApiError> {
    let text = match value {
        Value::Object(object) => {
            if object.get("multimodal_data").is_some_and(|data| !is_nothing(data)) {
                return Err(ApiError::not_supported(format!(
                    "{name}.multimodal_data: this server takes text only; leave it out"
                )));
            }
            object.get("prompt_string").filter(|text| text.is_string()).ok_or_else(|| {
                ApiError::invalid(name, format!("{name} needs prompt_string, a text, got {}", abbreviate(value)))
            })?
        }
        other => other,
    };
    let tokens = parameters::encode_prompt(text, name, loaded.vocabulary(), true, true)?;
    Ok(parameters::or_start_token(tokens, loaded.vocabulary()))
}

/// Returns true for null and for an empty list.
pub(super) fn is_nothing(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}
