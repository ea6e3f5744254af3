//! From a body to the requests that the engine takes, one for each prompt and each answer to it.

use crate::api::generation;
use crate::api::llama;
use crate::api::wire::constraint::constraint;
use crate::api::wire::fields::{Fields, integer, wrong};
use crate::api::wire::{self, parameters};
use crate::api::{ApiError, App, Loaded};
use crate::engine::{ReportOptions, Request};
use crate::events::{Surface, TokenId};
use serde_json::Value;

/// Most alternatives that an answer can have for each token.
const MOST_LOGPROBS: i64 = 1000;
/// Most answers to one prompt, as with OpenAI.
const MOST_ANSWERS: i64 = 128;

/// A body, read.
pub(super) struct Asked {
    /// One for each answer, in order.
    pub(super) requests: Vec<Request>,
    /// The prompt of each.
    pub(super) prompts: Vec<Prompt>,
    pub(super) answer: Answer,
}

/// A prompt, as it is repeated.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<TokenId>,
    pub(super) text: String,
    /// Whether an earlier answer has the same, so that its tokens are not counted again.
    pub(super) again: bool,
}

/// How the answer is to be written.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) stream: bool,
    /// Whether a stream ends with a chunk of token counts.
    pub(super) include_usage: bool,
    /// `Some(n)`: the log-probability of each token, and those of `n` alternatives.
    pub(super) logprobs: Option<usize>,
    /// Whether they are probabilities behind the sampler's stages.
    pub(super) after_sampler: bool,
    pub(super) echo: bool,
    /// llama-server's `generation_settings`, where the answer is to say how it came about.
    pub(super) settings: Option<Value>,
}

/// Reads a body.
pub(super) fn read(app: &App, loaded: &Loaded, fields: Fields<'_>) -> Result<Asked, ApiError> {
    let fields = fields.or(&app.config().server.request_defaults);
    let count = count(fields)?;
    let stream_options = fields.object("stream_options")?;
    let include_usage = stream_options.and_then(|options| options.get("include_usage")).and_then(Value::as_bool);
    let mut answer = Answer {
        stream: fields.flag("stream")?.unwrap_or(false),
        include_usage: include_usage.unwrap_or(false),
        logprobs: logprobs(fields)?,
        after_sampler: fields.flag("post_sampling_probs")?.unwrap_or(false),
        echo: fields.flag("echo")?.unwrap_or(false),
        settings: None,
    };
    let verbose = fields.flag("verbose")?.unwrap_or(false);
    let (mut requests, mut prompts) = (Vec::new(), Vec::new());
    for prompt in self::prompts(fields, loaded)? {
        let first = request(app, loaded, fields, &prompt, &answer)?;
        if verbose && answer.settings.is_none() {
            answer.settings = Some(llama::settings(&first.sampling, &first.limits, &told(fields, &answer)));
        }
        requests.extend(generation::answers(first, count));
        prompts.extend((0..count).map(|index| Prompt { again: index > 0, ..prompt.clone() }));
    }
    Ok(Asked { requests, prompts, answer })
}

fn count(fields: Fields<'_>) -> Result<u32, ApiError> {
    let count = fields.integer("n", 1..=MOST_ANSWERS)?.unwrap_or(1);
    match fields.get("best_of") {
        Some(best_of) if integer(best_of) != Some(count) => {
            let detail = format!("best_of must be n, which is {count}: answers are not compared; leave it out");
            Err(ApiError::invalid("best_of", detail).code("unsupported"))
        }
        _ => Ok(count as u32),
    }
}

fn logprobs(fields: Fields<'_>) -> Result<Option<usize>, ApiError> {
    match fields.first(&["logprobs", "n_probs"]) {
        Some(("logprobs", Value::Bool(wanted))) => Ok(wanted.then_some(1)),
        Some((name, _)) => Ok(fields.integer(name, 0..=MOST_LOGPROBS)?.map(|count| count as usize)),
        None => Ok(None),
    }
}

/// The answer as llama-server's settings tell it.
fn told(fields: Fields<'_>, answer: &Answer) -> llama::Answer {
    llama::Answer {
        stream: answer.stream,
        n_probs: answer.logprobs.unwrap_or(0),
        post_sampling: answer.after_sampler,
        ..llama::Answer::usual(parameters::n_predict(fields))
    }
}

fn request(
    app: &App,
    loaded: &Loaded,
    fields: Fields<'_>,
    prompt: &Prompt,
    answer: &Answer,
) -> Result<Request, ApiError> {
    Ok(Request {
        prompt_preview: parameters::preview(&prompt.text),
        constraint: constraint(fields, false)?,
        alternatives: Request::ALTERNATIVES.max(answer.logprobs.unwrap_or(0)),
        report: ReportOptions {
            prompt_probabilities: answer.echo && answer.logprobs.is_some(),
            after_sampler: answer.after_sampler && answer.logprobs.is_some(),
            ..ReportOptions::default()
        },
        ..wire::request(app, loaded, fields, prompt.tokens.clone(), Surface::Openai)?
    })
}

fn prompts(fields: Fields<'_>, loaded: &Loaded) -> Result<Vec<Prompt>, ApiError> {
    const EXPECTED: &str = "a text, a list of token ids, or a list of such prompts";
    let prompt = fields
        .get("prompt")
        .ok_or_else(|| ApiError::invalid("prompt", format!("prompt is missing; it takes {EXPECTED}")))?;
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    match prompt {
        Value::Array(list) if list.is_empty() => Err(wrong("prompt", EXPECTED, prompt)),
        Value::Array(list) if !list.iter().any(Value::is_number) => {
            list.iter().map(|one| self::prompt(one, suffix, loaded)).collect()
        }
        one => Ok(vec![self::prompt(one, suffix, loaded)?]),
    }
}

fn prompt(value: &Value, suffix: Option<&str>, loaded: &Loaded) -> Result<Prompt, ApiError> {
    let vocabulary = loaded.vocabulary();
    let tokens = match (suffix, value) {
        (None, value) => {
            let tokens = parameters::text_or_tokens(value, "prompt", vocabulary, true, true)?;
            parameters::or_beginning(tokens, vocabulary)
        }
        (Some(suffix), Value::String(prefix)) => {
            let tokens = llama::tokens_of(vocabulary).map_err(|error| error.at("suffix"))?;
            llama::between(vocabulary, tokens, prefix, suffix)
        }
        (Some(_), other) => return Err(wrong("prompt", "a text where there is a suffix", other)),
    };
    let text = value.as_str().map_or_else(|| vocabulary.decode(&tokens), str::to_owned);
    Ok(Prompt { tokens, text, again: false })
}
