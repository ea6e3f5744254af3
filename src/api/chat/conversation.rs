//! From messages, tools and formats to a prompt, a constraint, and how the answer is to be read.

use crate::api::wire::constraint::constraint;
use crate::api::wire::fields::{Fields, wrong};
use crate::api::wire::parameters;
use crate::api::{ApiError, App, Loaded};
use crate::engine::ThinkingBudget;
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::{AnswerFormat, ToolDefinition};
use crate::model::chat::tools::{self, ToolChoice};
use crate::model::chat::{self, RenderOptions};
use crate::model::grammar::Constraint;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Most functions that a request may offer.
const MOST_TOOLS: usize = 512;

/// What a client asked about a conversation.
#[derive(Debug)]
pub(in crate::api) struct Conversation {
    messages: Value,
    /// In OpenAI's shape, as they were sent.
    tools: Vec<Value>,
    offered: Vec<ToolDefinition>,
    choice: ToolChoice,
    single: bool,
    /// What the answer's text must be.
    form: Option<Constraint>,
    thoughts: bool,
    /// Whether a thought may come before a call that must come, where the request says so.
    may_think: Option<bool>,
    /// Most tokens of thought, and what is said where they end.
    budget: Option<(u32, String)>,
    options: RenderOptions,
}

/// A conversation that can be run.
#[derive(Debug)]
pub(in crate::api) struct Prepared {
    /// The prompt as text.
    pub(in crate::api) text: String,
    pub(in crate::api) tokens: Vec<TokenId>,
    pub(in crate::api) spans: Vec<Span>,
    pub(in crate::api) preview: String,
    pub(in crate::api) conversation: Value,
    pub(in crate::api) tools: Option<Value>,
    pub(in crate::api) reading: Arc<AnswerFormat>,
    pub(in crate::api) constraint: Option<Constraint>,
    pub(in crate::api) thinking: Option<ThinkingBudget>,
    /// Tokens that end the family's turns.
    pub(in crate::api) end_tokens: Vec<TokenId>,
    /// Texts that do, where the vocabulary has no token for them.
    pub(in crate::api) end_texts: Vec<String>,
    /// Control tokens that structure the answer, and are part of its text.
    pub(in crate::api) visible: Vec<TokenId>,
}

impl Conversation {
    /// Reads what a body in the shape of a chat completion says about its conversation.
    pub(in crate::api) fn read(app: &App, fields: Fields<'_>) -> Result<Self, ApiError> {
        let defaults = &app.config().server.request_defaults;
        let fields = fields.or(defaults);
        let messages = fields.get("messages").ok_or_else(|| {
            ApiError::invalid("messages", "messages is missing; it takes a list of {\"role\": …, \"content\": …}")
        })?;
        let tools = fields.list("tools")?.cloned().unwrap_or_default();
        let offered = offered(&tools)?;
        let choice = choice(fields, &offered)?;
        let form = constraint(fields, true)?;
        if let Some(form) = &form
            && tools::schema(form).is_none()
            && !offered.is_empty()
            && choice != ToolChoice::None
        {
            let message = format!(
                "{} cannot be combined with tools, whose calls it would forbid; leave one out, or send \
                 \"tool_choice\": \"none\"",
                form.field
            );
            return Err(ApiError::invalid(form.field.as_str(), message));
        }
        // The server's variables, and over them the request's.
        let mut variables =
            defaults.get("chat_template_kwargs").and_then(Value::as_object).cloned().unwrap_or_default();
        variables.extend(fields.object("chat_template_kwargs")?.cloned().unwrap_or_default());
        let budget = think(fields, &mut variables)?;
        let may_think = match variables.get("enable_thinking") {
            Some(enabled) => Some(*enabled == Value::Bool(true)),
            None => variables.get("reasoning_effort").map(|effort| effort != "none"),
        };
        let (add_generation_prompt, continue_final) = ending(fields, messages)?;
        let mut messages = messages.clone();
        if let Some(last) = messages.as_array_mut().and_then(|list| list.last_mut()).filter(|_| continue_final) {
            join_continued(last);
        }
        let options = RenderOptions {
            tools: (choice != ToolChoice::None && !tools.is_empty()).then(|| Value::Array(tools.clone())),
            add_generation_prompt,
            continue_final,
            variables,
            now: app.now(),
        };
        Ok(Self {
            messages,
            offered: if choice == ToolChoice::None { Vec::new() } else { offered },
            tools,
            choice,
            single: fields.flag("parallel_tool_calls")? == Some(false),
            form,
            thoughts: thoughts(fields)?,
            may_think,
            budget,
            options,
        })
    }

    /// Renders it for a model.
    pub(in crate::api) fn prepare(self, loaded: &Loaded) -> Result<Prepared, ApiError> {
        let template = loaded.template()?;
        let vocabulary = loaded.vocabulary();
        let rendered = template.render(&self.messages, &self.options)?;
        let format = template.format();
        let reading = AnswerFormat {
            format: Arc::clone(&format),
            tools: self.offered,
            thoughts: self.thoughts,
            thinking: rendered.thinking,
            single: self.single || matches!(self.choice, ToolChoice::Function(_)),
        };
        let schema = self.form.as_ref().and_then(tools::schema);
        // A model that answers in channels always thinks on one of them first; others may think for ever instead of calling.
        let may_think = self.may_think.unwrap_or(format.is_channels());
        let calls = tools::constraint(&reading, &self.choice, schema.as_ref(), may_think, vocabulary);
        let constraint =
            calls.or_else(|| self.form.map(|form| tools::behind_thought(form, &reading, may_think, vocabulary)));
        let (tokens, spans) = rendered.tokenize(vocabulary);
        let (open, close) = &format.thought;
        let thinking = self.budget.map(|(tokens, message)| ThinkingBudget {
            tokens,
            open: open.clone(),
            close: close.clone(),
            closing_tokens: vocabulary.encode(&format!("{message}{close}"), false, true),
            begun: rendered.thinking,
        });
        // What ends a thought ends no turn.
        let ends = format.end_of_turn.iter().filter(|text| **text != format.thought.1);
        let ends: Vec<(&str, Option<TokenId>)> = ends.map(|text| (*text, control(text, vocabulary))).collect();
        let mut end_texts: Vec<String> = Vec::new();
        // A model without a template of its own never learned our fallback's marker as a token, and may write it out.
        if template.is_fallback() {
            end_texts.extend(ends.iter().filter(|(_, token)| token.is_none()).map(|(text, _)| (*text).to_owned()));
        }
        Ok(Prepared {
            tokens,
            spans,
            preview: parameters::preview(&last_words(&self.messages)),
            conversation: self.messages,
            tools: (!self.tools.is_empty()).then_some(Value::Array(self.tools)),
            constraint,
            thinking,
            end_tokens: ends.into_iter().filter_map(|(_, token)| token).collect(),
            end_texts,
            visible: vocabulary.controls_in(&format.markers()),
            reading: Arc::new(reading),
            text: rendered.without_bos(vocabulary).to_owned(),
        })
    }
}

/// The control token that a text is.
fn control(text: &str, vocabulary: &Vocabulary) -> Option<TokenId> {
    match vocabulary.encode(text, false, true)[..] {
        [token] if vocabulary.is_control(token) => Some(token),
        _ => None,
    }
}

fn offered(tools: &[Value]) -> Result<Vec<ToolDefinition>, ApiError> {
    if tools.len() > MOST_TOOLS {
        return Err(ApiError::invalid(
            "tools",
            format!("tools has {} functions, at most {MOST_TOOLS} are taken", tools.len()),
        ));
    }
    tools
        .iter()
        .enumerate()
        .map(|(index, tool)| {
            let at = |field: &str| format!("tools[{index}]{field}");
            if !tool.is_object() {
                return Err(wrong(&at(""), "an object {\"type\": \"function\", \"function\": {…}}", tool));
            }
            if tool.get("type").is_some_and(|kind| kind != "function") {
                return Err(wrong(&at(".type"), "\"function\"", &tool["type"]));
            }
            let function = &tool["function"];
            let name = function["name"].as_str().filter(|name| is_name(name)).ok_or_else(|| {
                let expected = "a name of letters, digits, '_', '-' and '.', at most 128 of them";
                wrong(&at(".function.name"), expected, &function["name"])
            })?;
            let parameters = match function.get("parameters") {
                None | Some(Value::Null) => json!({}),
                Some(Value::Object(schema)) => Value::Object(schema.clone()),
                Some(other) => return Err(wrong(&at(".function.parameters"), "a JSON schema, an object", other)),
            };
            let strict = match function.get("strict") {
                None | Some(Value::Null) => false,
                Some(Value::Bool(strict)) => *strict,
                Some(other) => return Err(wrong(&at(".function.strict"), "true or false", other)),
            };
            Ok(ToolDefinition { name: name.to_owned(), parameters, strict })
        })
        .collect()
}

fn is_name(name: &str) -> bool {
    (1..=128).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.'))
}

fn choice(fields: Fields<'_>, offered: &[ToolDefinition]) -> Result<ToolChoice, ApiError> {
    const EXPECTED: &str = "\"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}";
    let Some(value) = fields.get("tool_choice") else { return Ok(ToolChoice::Auto) };
    let choice = match value {
        Value::String(word) => match word.as_str() {
            "auto" => return Ok(ToolChoice::Auto),
            "none" => return Ok(ToolChoice::None),
            "required" | "any" => ToolChoice::Required,
            _ => return Err(wrong("tool_choice", EXPECTED, value)),
        },
        Value::Object(_) => match value.pointer("/function/name").and_then(Value::as_str) {
            Some(name) => ToolChoice::Function(name.to_owned()),
            None => return Err(wrong("tool_choice", EXPECTED, value)),
        },
        other => return Err(wrong("tool_choice", EXPECTED, other)),
    };
    if offered.is_empty() {
        return Err(ApiError::invalid("tool_choice", "tool_choice asks for a call, but tools is empty"));
    }
    if let ToolChoice::Function(name) = &choice
        && !offered.iter().any(|tool| tool.name == *name)
    {
        let known: Vec<&str> = offered.iter().map(|tool| tool.name.as_str()).collect();
        return Err(ApiError::invalid(
            "tool_choice",
            format!("tool_choice names the function '{name}', which is not in tools; there are: {}", known.join(", ")),
        ));
    }
    Ok(choice)
}

/// What the request says about thinking: as variables of the template, and as a number of tokens with what is said where
/// they end.
fn think(fields: Fields<'_>, variables: &mut Map<String, Value>) -> Result<Option<(u32, String)>, ApiError> {
    if let Some(effort) = fields.text("reasoning_effort")? {
        variables.entry("reasoning_effort").or_insert_with(|| effort.into());
        if effort == "none" {
            variables.entry("enable_thinking").or_insert(false.into());
        }
    }
    if let Some(enabled) = fields.flag("enable_thinking")? {
        variables.entry("enable_thinking").or_insert(enabled.into());
    }
    if let Some(enabled) = variables.get("enable_thinking").filter(|enabled| !enabled.is_boolean()) {
        return Err(wrong("chat_template_kwargs.enable_thinking", "true or false", enabled));
    }
    let message = fields.text("reasoning_budget_message")?.unwrap_or_default().to_owned();
    // Only a thought whose tokens are counted can be ended while it goes on.
    let any = fields.flag("reasoning_control")?.unwrap_or(false).then_some(i32::MAX as u32);
    // The server's own default has the last of these names.
    let Some((name, _)) = fields.first(&["reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget"])
    else {
        return Ok(any.map(|tokens| (tokens, message)));
    };
    let budget = fields.integer(name, -1..=i64::from(i32::MAX))?.and_then(|tokens| u32::try_from(tokens).ok());
    if budget == Some(0) {
        variables.insert("enable_thinking".into(), false.into());
    }
    Ok(budget.or(any).map(|tokens| (tokens, message)))
}

/// Whether thoughts are told from the text.
fn thoughts(fields: Fields<'_>) -> Result<bool, ApiError> {
    match fields.text("reasoning_format")? {
        // llama-server says of the last one that thoughts stay in the text as well, and leaves them out.
        None | Some("auto" | "deepseek" | "deepseek-legacy") => Ok(true),
        Some("none") => Ok(false),
        Some(other) => {
            Err(wrong("reasoning_format", "\"none\", \"deepseek\", \"deepseek-legacy\" or \"auto\"", &other.into()))
        }
    }
}

/// Whether a new message begins, or the last one goes on: by default it does when it is the assistant's.
fn ending(fields: Fields<'_>, messages: &Value) -> Result<(bool, bool), ApiError> {
    let add = fields.flag("add_generation_prompt")?;
    let go_on = fields.flag("continue_final_message")?;
    if add == Some(true) && go_on == Some(true) {
        return Err(ApiError::invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt exclude each other: the answer continues a message or \
             begins one",
        ));
    }
    let list = messages.as_array().map_or(&[][..], Vec::as_slice);
    let is_answer =
        |message: &Value| message["role"] == "assistant" && message["tool_calls"].as_array().is_none_or(Vec::is_empty);
    let prefilled = list.len() > 1 && list.last().is_some_and(is_answer);
    let continue_final = go_on.unwrap_or(prefilled && add.is_none());
    if let ([.., before, last], true) = (list, continue_final)
        && is_answer(before)
        && is_answer(last)
    {
        return Err(ApiError::invalid(
            "messages",
            "messages ends with two assistant messages, of which only the last could be continued; merge them into one",
        ));
    }
    Ok((add.unwrap_or(true) && !continue_final, continue_final))
}

/// Joins the text parts of a message that is continued with a blank line between them, as llama-server does.
fn join_continued(message: &mut Value) {
    let Some(parts) = message["content"].as_array() else { return };
    let is_text = |part: &Value| part.get("type").is_none_or(|kind| kind == "text");
    let texts: Option<Vec<&str>> =
        parts.iter().map(|part| part.get("text").and_then(Value::as_str).filter(|_| is_text(part))).collect();
    // Other parts are refused where messages are read.
    if let Some(texts) = texts {
        message["content"] = texts.join("\n\n").into();
    }
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

impl From<chat::ChatTemplateError> for ApiError {
    fn from(error: chat::ChatTemplateError) -> Self {
        match error {
            chat::ChatTemplateError::Message { pointer, message } => Self::invalid(pointer, message),
            chat::ChatTemplateError::Refused(_) => Self::invalid("messages", error.to_string()),
            chat::ChatTemplateError::Template(_) => Self::bad_request(error.to_string()),
        }
    }
}
