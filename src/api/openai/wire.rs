//! From a body's fields to the one [`Request`] that the engine takes. Everything is checked here, and nowhere after.

use crate::api::wire::fields::{Fields, integer, wrong};
use crate::api::wire::{mods, parameters};
use crate::api::{ApiError, App, Loaded};
use crate::engine::Request;
use crate::events::{Span, Surface, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::{self, Options};
use serde_json::Value;

/// Most alternatives that an answer can have, as with OpenAI.
const MOST_TOP_LOGPROBS: i64 = 20;

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
    let fields = Fields::new(body)?.or(&app.config().server.request_defaults);
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
        request_id: parameters::request_id(fields)?,
        user_label: parameters::user(fields)?,
        spans: prompt.spans,
        prompt_preview: prompt.preview,
        conversation: prompt.conversation,
        tools: prompt.tools,
        sampling: parameters::sampling(fields, vocabulary)?,
        limits: parameters::limits(fields, vocabulary, room)?,
        mods: mods::chosen(fields, loaded, app.registry())?,
        attention: fields.flag("attention")?.unwrap_or(false),
        alternatives: Request::ALTERNATIVES.max(logprobs.unwrap_or(0)),
        record: parameters::record(fields)?,
        ..Request::new(prompt.tokens, Surface::Openai)
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
    Ok(Prompt {
        tokens,
        spans,
        preview: parameters::preview(&last_words(messages)),
        conversation: Some(messages.clone()),
        tools,
    })
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
            .map(|id| parameters::token(id, vocabulary).ok_or_else(|| wrong("prompt", EXPECTED, id)))
            .collect::<Result<_, _>>()?,
        other => return Err(wrong("prompt", EXPECTED, other)),
    };
    let shown = prompt.as_str().map_or_else(|| vocabulary.decode(&tokens), str::to_owned);
    Ok(Prompt { tokens, spans: Vec::new(), preview: parameters::preview(&shown), conversation: None, tools: None })
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

impl From<chat::Error> for ApiError {
    fn from(error: chat::Error) -> Self {
        match error {
            chat::Error::Message { pointer, message } => Self::invalid(pointer, message),
            chat::Error::Refused(_) => Self::invalid("messages", error.to_string()),
            chat::Error::Template(_) => Self::bad_request(error.to_string()),
        }
    }
}
