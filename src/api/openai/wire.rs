//! From a body's fields to the one [`Request`] that the engine takes. Everything is checked here, and nowhere after.

use super::fields::{Fields, integer, wrong};
use super::mods;
use crate::api::{ApiError, App, Loaded};
use crate::engine::{Limits, RecordPolicy, Request, Sampling};
use crate::events::{Span, Surface, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::{self, Options};
use serde_json::Value;

/// Alternatives that are recorded for each token, unless the answer needs more.
const ALTERNATIVES: usize = 10;
/// Most alternatives that an answer can have, as with OpenAI.
const MOST_TOP_LOGPROBS: i64 = 20;
/// Longest `request_id`.
const LONGEST_ID: usize = 256;
/// Length of the text that a run is recognised by.
const PREVIEW: usize = 300;

/// Which of the two routes a body came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    Chat,
    Completions,
}

/// A body, read.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) request: Request,
    pub(super) answer: Answer,
}

/// How the answer is to be written.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    pub(super) route: Route,
    pub(super) stream: bool,
    /// Whether a stream ends with a chunk of token counts.
    pub(super) include_usage: bool,
    /// `Some(n)`: the log-probability of each token, and those of `n` alternatives.
    pub(super) logprobs: Option<usize>,
}

struct Prompt {
    tokens: Vec<TokenId>,
    spans: Vec<Span>,
    preview: String,
    conversation: Option<Value>,
    tools: Option<Value>,
}

/// Reads a body.
pub(super) fn read(app: &App, loaded: &Loaded, route: Route, body: &Value) -> Result<Asked, ApiError> {
    let fields = Fields::new(body)?;
    refuse_what_is_not_there(fields)?;
    let engine = loaded.engine();
    let vocabulary = loaded.vocabulary();
    let prompt = match route {
        Route::Chat => conversation(app, loaded, fields)?,
        Route::Completions => text(fields, vocabulary)?,
    };
    let stream = fields.flag("stream")?.unwrap_or(false);
    let include_usage = match fields.object("stream_options")? {
        Some(options) => options.get("include_usage").and_then(Value::as_bool).unwrap_or(false),
        None => false,
    };
    let logprobs = logprobs(fields, route)?;
    let room = (engine.context_per_slot() as usize).saturating_sub(prompt.tokens.len()).max(1) as u32;
    let request = Request {
        request_id: request_id(fields)?,
        surface: Surface::Openai,
        user_label: fields.text("user")?.map(|label| label.chars().take(LONGEST_ID).collect()),
        prompt: prompt.tokens,
        spans: prompt.spans,
        prompt_preview: prompt.preview,
        conversation: prompt.conversation,
        tools: prompt.tools,
        sampling: sampling(fields, vocabulary)?,
        limits: limits(fields, vocabulary, room)?,
        mods: mods::chosen(fields, loaded, app.registry())?,
        attention: fields.flag("attention")?.unwrap_or(false),
        alternatives: ALTERNATIVES.max(logprobs.unwrap_or(0)),
        record: record(fields)?,
    };
    Ok(Asked { request, answer: Answer { route, stream, include_usage, logprobs } })
}

/// Fields that ask for something Thunder cannot do: ignoring them would be an answer to another question.
fn refuse_what_is_not_there(fields: Fields<'_>) -> Result<(), ApiError> {
    let refuse =
        |name: &str, detail: &str| Err(ApiError::invalid(name, format!("{name}: {detail}")).code("unsupported"));
    for name in ["n", "best_of"] {
        if fields.get(name).is_some_and(|value| integer(value) != Some(1)) {
            return refuse(name, "only 1 is supported; send the request again for another answer");
        }
    }
    if fields.flag("echo")? == Some(true) {
        return refuse("echo", "the prompt cannot be repeated in the answer; leave it out");
    }
    if fields.text("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return refuse("suffix", "filling in between two texts is not supported; leave it out");
    }
    for name in ["grammar", "json_schema"] {
        if fields.get(name).is_some() {
            return refuse(name, "constrained output is not supported yet; leave it out, or constrain with a mod");
        }
    }
    if let Some(format) = fields.object("response_format")?
        && format.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "text")
    {
        return refuse(
            "response_format",
            "only {\"type\": \"text\"} is supported yet; constrain the output with a mod",
        );
    }
    match fields.get("tool_choice") {
        None => Ok(()),
        Some(Value::String(choice)) if choice == "auto" || choice == "none" => Ok(()),
        Some(_) => refuse("tool_choice", "only \"auto\" and \"none\" are supported; a mod can force a tool call"),
    }
}

fn conversation(app: &App, loaded: &Loaded, fields: Fields<'_>) -> Result<Prompt, ApiError> {
    let messages = fields.get("messages").ok_or_else(|| {
        ApiError::invalid("messages", "messages is missing; it takes a list of {\"role\": …, \"content\": …}")
    })?;
    let tools = fields.list("tools")?.filter(|tools| !tools.is_empty()).map(|tools| Value::Array(tools.clone()));
    let offered = if fields.get("tool_choice").and_then(Value::as_str) == Some("none") { None } else { tools.clone() };
    let options = Options {
        tools: offered,
        add_generation_prompt: fields.flag("add_generation_prompt")?.unwrap_or(true),
        variables: fields.object("chat_template_kwargs")?.cloned().unwrap_or_default(),
        now: app.now(),
    };
    let rendered = loaded.template()?.render(messages, &options)?;
    let (tokens, spans) = rendered.tokenize(loaded.vocabulary());
    Ok(Prompt { tokens, spans, preview: preview(&last_words(messages)), conversation: Some(messages.clone()), tools })
}

fn text(fields: Fields<'_>, vocabulary: &Vocabulary) -> Result<Prompt, ApiError> {
    const EXPECTED: &str = "a text or a list of token ids";
    let prompt = fields
        .get("prompt")
        .ok_or_else(|| ApiError::invalid("prompt", format!("prompt is missing; it takes {EXPECTED}")))?;
    // A list with one prompt in it is that prompt.
    let prompt = match prompt.as_array().map(Vec::as_slice) {
        Some([one]) if one.is_string() || one.is_array() => one,
        Some([first, _, ..]) if first.is_string() || first.is_array() => {
            return Err(
                ApiError::invalid("prompt", "prompt: only one prompt at a time is supported").code("unsupported")
            );
        }
        _ => prompt,
    };
    let tokens = match prompt {
        Value::String(text) => vocabulary.encode(text, true, true),
        Value::Array(ids) => ids
            .iter()
            .map(|id| token(id, vocabulary).ok_or_else(|| wrong("prompt", EXPECTED, id)))
            .collect::<Result<_, _>>()?,
        other => return Err(wrong("prompt", EXPECTED, other)),
    };
    let shown = prompt.as_str().map_or_else(|| vocabulary.decode(&tokens), str::to_owned);
    Ok(Prompt { tokens, spans: Vec::new(), preview: preview(&shown), conversation: None, tools: None })
}

/// The text of the last message that a person wrote, else of the last message.
fn last_words(messages: &Value) -> String {
    let list = messages.as_array().map_or(&[][..], Vec::as_slice);
    let of_user = list.iter().rev().find(|message| message["role"] == "user");
    match of_user.or(list.last()).map(|message| &message["content"]) {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")
        }
        _ => String::new(),
    }
}

fn preview(text: &str) -> String {
    text.trim().chars().take(PREVIEW).collect()
}

fn request_id(fields: Fields<'_>) -> Result<Option<String>, ApiError> {
    match fields.text("request_id")? {
        Some(id) if id.is_empty() || id.len() > LONGEST_ID || id.chars().any(char::is_control) => {
            Err(ApiError::invalid(
                "request_id",
                format!("request_id must have 1 to {LONGEST_ID} bytes and no control characters"),
            ))
        }
        id => Ok(id.map(str::to_owned)),
    }
}

fn logprobs(fields: Fields<'_>, route: Route) -> Result<Option<usize>, ApiError> {
    match route {
        Route::Completions => match fields.first(&["logprobs", "n_probs"]) {
            Some(("logprobs", Value::Bool(wanted))) => Ok(wanted.then_some(0)),
            Some((name, _)) => Ok(fields.integer(name, 0..=MOST_TOP_LOGPROBS)?.map(|count| count as usize)),
            None => Ok(None),
        },
        Route::Chat => {
            let top = fields.integer("top_logprobs", 0..=MOST_TOP_LOGPROBS)?;
            match (fields.flag("logprobs")?.unwrap_or(false), top) {
                (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
                (false, None | Some(0)) => Ok(None),
                (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "top_logprobs needs \"logprobs\": true")),
            }
        }
    }
}

fn sampling(fields: Fields<'_>, vocabulary: &Vocabulary) -> Result<Sampling, ApiError> {
    let default = Sampling::default();
    let seed = match fields.integer("seed", i64::MIN..=i64::MAX)? {
        // llama-server's word for "choose one".
        None | Some(-1) => rand::random(),
        // OpenAI's seeds have 64 bits, llama.cpp's have 32.
        Some(seed) => seed as u32,
    };
    let mut bias = match fields.get("logit_bias") {
        Some(value) => logit_bias(value, vocabulary)?,
        None => Vec::new(),
    };
    bias.extend(tokens(fields, "banned_tokens", vocabulary)?.into_iter().map(|token| (token, f32::NEG_INFINITY)));
    Ok(Sampling {
        temperature: fields.number("temperature", 0.0..=100.0)?.unwrap_or(default.temperature),
        top_k: fields.integer("top_k", -1..=i64::from(i32::MAX))?.map_or(default.top_k, |k| k.max(0) as i32),
        top_p: fields.number("top_p", 0.0..=1.0)?.unwrap_or(default.top_p),
        min_p: fields.number("min_p", 0.0..=1.0)?.unwrap_or(default.min_p),
        repeat_penalty: fields.number("repeat_penalty", 0.01..=100.0)?.unwrap_or(default.repeat_penalty),
        repeat_last_n: fields.integer("repeat_last_n", -1..=1 << 20)?.map_or(default.repeat_last_n, |n| n as i32),
        presence_penalty: fields.number("presence_penalty", -10.0..=10.0)?.unwrap_or(default.presence_penalty),
        frequency_penalty: fields.number("frequency_penalty", -10.0..=10.0)?.unwrap_or(default.frequency_penalty),
        seed,
        logit_bias: bias,
    })
}

fn limits(fields: Fields<'_>, vocabulary: &Vocabulary, room: u32) -> Result<Limits, ApiError> {
    let max_tokens = match fields.first(&["max_completion_tokens", "max_tokens", "n_predict"]) {
        // -1 is llama-server's word for "as many as fit".
        Some((name, value)) if integer(value) != Some(-1) => {
            fields.integer(name, 1..=i64::from(i32::MAX))?.map_or(room, |count| (count as u32).min(room))
        }
        _ => room,
    };
    let max_steps = fields.integer("max_steps", 1..=i64::from(u32::MAX))?.map(|steps| steps as u32);
    Ok(Limits {
        max_tokens,
        // Enough for a mod that takes every token back a few times, and an end for one that never stops.
        max_steps: max_steps.unwrap_or_else(|| max_tokens.saturating_mul(4).saturating_add(256)),
        stop: stop(fields)?,
        stop_tokens: tokens(fields, "stop_tokens", vocabulary)?,
        ignore_eos: fields.flag("ignore_eos")?.unwrap_or(false),
    })
}

fn stop(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let texts = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(one @ Value::String(_)) => std::slice::from_ref(one),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(wrong("stop", "a text or a list of texts", other)),
    };
    let read = |text: &Value| match text.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(wrong("stop", "a text or a list of texts", text)),
    };
    let texts: Vec<String> = texts.iter().map(read).collect::<Result<_, _>>()?;
    Ok(texts.into_iter().filter(|text| !text.is_empty()).collect())
}

fn token(value: &Value, vocabulary: &Vocabulary) -> Option<TokenId> {
    let id = TokenId::try_from(integer(value)?).ok()?;
    vocabulary.contains(id).then_some(id)
}

/// A list of token ids, or of texts that are one token each.
fn tokens(fields: Fields<'_>, name: &str, vocabulary: &Vocabulary) -> Result<Vec<TokenId>, ApiError> {
    let one = |value: &Value| match value.as_str() {
        Some(text) => match vocabulary.encode(text, false, true)[..] {
            [token] => Ok(token),
            ref several => Err(ApiError::invalid(
                name,
                format!("{name}: the text {value} is {} tokens ({several:?}), not one; give the ids", several.len()),
            )),
        },
        None => token(value, vocabulary)
            .ok_or_else(|| wrong(name, &format!("a list of token ids below {}, or of texts", vocabulary.len()), value)),
    };
    fields.list(name)?.into_iter().flatten().map(one).collect()
}

/// `{"id or text": bias}` as OpenAI has it, or llama-server's `[[id or text, bias or false], …]`.
fn logit_bias(value: &Value, vocabulary: &Vocabulary) -> Result<Vec<(TokenId, f32)>, ApiError> {
    const EXPECTED: &str = "an object from token to a bias between -100 and 100 (false bans it)";
    let refuse = || wrong("logit_bias", EXPECTED, value);
    let bias = |value: &Value| match value {
        Value::Bool(false) => Some(f32::NEG_INFINITY),
        other => other.as_f64().map(|number| number as f32).filter(|number| (-100.0..=100.0).contains(number)),
    };
    let named = |name: &str| match name.parse::<TokenId>() {
        Ok(id) => vocabulary.contains(id).then(|| vec![id]),
        Err(_) => Some(vocabulary.encode(name, false, true)),
    };
    let mut biases = Vec::new();
    let mut add = |tokens: Option<Vec<TokenId>>, value: &Value| -> Option<()> {
        let bias = bias(value)?;
        biases.extend(tokens?.into_iter().map(|token| (token, bias)));
        Some(())
    };
    match value {
        Value::Object(object) => {
            for (name, value) in object {
                add(named(name), value).ok_or_else(refuse)?;
            }
        }
        Value::Array(list) => {
            for pair in list {
                let [of, value] = pair.as_array().map_or(&[][..], Vec::as_slice) else { return Err(refuse()) };
                let tokens = match of.as_str() {
                    Some(text) => Some(vocabulary.encode(text, false, true)),
                    None => token(of, vocabulary).map(|token| vec![token]),
                };
                add(tokens, value).ok_or_else(refuse)?;
            }
        }
        _ => return Err(refuse()),
    }
    Ok(biases)
}

fn record(fields: Fields<'_>) -> Result<RecordPolicy, ApiError> {
    match fields.get("record") {
        None | Some(Value::Bool(true)) => Ok(RecordPolicy::BestEffort),
        Some(Value::Bool(false)) => Ok(RecordPolicy::Off),
        Some(Value::String(word)) if word == "required" => Ok(RecordPolicy::Required),
        Some(Value::String(word)) if word == "best-effort" => Ok(RecordPolicy::BestEffort),
        Some(Value::String(word)) if word == "off" => Ok(RecordPolicy::Off),
        Some(other) => Err(wrong("record", "true, false, \"required\", \"best-effort\" or \"off\"", other)),
    }
}

impl From<chat::Error> for ApiError {
    fn from(error: chat::Error) -> Self {
        match error {
            chat::Error::Message { pointer, message } => Self::invalid(pointer, message),
            chat::Error::Refused(_) => Self::invalid("messages", error.to_string()),
            chat::Error::Template(_) => Self::bad_request(error.to_string()),
        }
    }
}
