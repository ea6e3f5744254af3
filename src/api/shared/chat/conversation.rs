//! Converts messages, tools and response formats to a prompt, a constraint and the format of the answer.

use super::functions::{parse_tool_choice, parse_tools};
use super::images::{ConversationImages, take_images};
use crate::api::shared::fields::{Fields, invalid_value};
use crate::api::shared::images::RequestImages;
use crate::api::shared::parameters;
use crate::api::shared::parameters::{SeveralConstraints, parse_constraint};
use crate::config::ImageConfig;
use crate::engine::{ReasoningBudget, SubmitError};
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use crate::model::chat::answer::{AnswerFormat, ToolDefinition};
use crate::model::chat::syntax::ReasoningMarkers;
use crate::model::chat::tools::{self, ToolChoice};
use crate::model::chat::{self, RenderOptions};
use crate::model::grammar::Constraint;
use crate::server::{ApiError, App, LoadedModel};
use serde::Serialize;
use serde_json::{Map, Value};
use std::sync::Arc;
use utoipa::ToSchema;

/// The conversation part of a chat request, validated but not rendered.
#[derive(Debug)]
pub(crate) struct Conversation {
    messages: Value,
    /// The tools as the client sent them, in OpenAI's format.
    tools: Vec<Value>,
    functions: Vec<ToolDefinition>,
    choice: ToolChoice,
    single_call: bool,
    /// Constraint on the text of the answer.
    text_constraint: Option<Constraint>,
    separate_reasoning: bool,
    /// Allows reasoning before a forced call; `None` if the request does not set it.
    may_think: Option<bool>,
    /// Maximum reasoning tokens, and the text appended when the budget is spent.
    budget: Option<(u32, String)>,
    options: RenderOptions,
    /// Settings of images.
    image_config: Option<ImageConfig>,
}

/// A conversation rendered for one model.
#[derive(Debug)]
pub(crate) struct PreparedChat {
    /// The prompt as text.
    pub(crate) text: String,
    pub(crate) tokens: Vec<TokenId>,
    /// Images of the prompt.
    pub(crate) images: RequestImages,
    pub(crate) spans: Vec<Span>,
    pub(crate) preview: String,
    pub(crate) conversation: Value,
    pub(crate) tools: Option<Value>,
    pub(crate) answer_format: Arc<AnswerFormat>,
    pub(crate) constraint: Option<Constraint>,
    pub(crate) reasoning_budget: Option<ReasoningBudget>,
    /// Control tokens that end a turn in this template family.
    pub(crate) end_tokens: Vec<TokenId>,
    /// End-of-turn texts for which the vocabulary has no token.
    pub(crate) end_texts: Vec<String>,
    /// Control tokens that structure the answer and are part of its text.
    pub(crate) visible: Vec<TokenId>,
}

/// The number of prompt tokens of a request, in OpenAI's format.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InputTokensResponse {
    /// Tokens of the prompt.
    input_tokens: usize,
    /// Always `response.input_tokens`.
    object: &'static str,
}

impl InputTokensResponse {
    pub(crate) fn new(prepared: &PreparedChat) -> Self {
        Self { input_tokens: prepared.tokens.len(), object: "response.input_tokens" }
    }
}

impl Conversation {
    /// Parses the conversation fields of a chat completion body, which include the server's defaults.
    pub(crate) fn parse(app: &App, fields: Fields<'_>) -> Result<Self, ApiError> {
        let messages = fields.get("messages").ok_or_else(|| {
            ApiError::invalid("messages", "`messages` is missing; send a list of {\"role\": …, \"content\": …}")
        })?;
        let tools = fields.list("tools")?.cloned().unwrap_or_default();
        let functions = parse_tools(&tools)?;
        let choice = parse_tool_choice(fields, &functions)?;
        let constraint = parse_constraint(fields, SeveralConstraints::Reject)?;
        if let Some(constraint) = &constraint
            && tools::schema(constraint).is_none()
            && !functions.is_empty()
            && choice != ToolChoice::None
        {
            let message = format!(
                "`{}` cannot be combined with tools because it would forbid tool calls; omit one of them or send \
                 \"tool_choice\": \"none\"",
                constraint.field
            );
            return Err(ApiError::invalid(constraint.field.as_str(), message));
        }
        let mut variables = template_variables(fields)?;
        let budget = reasoning_budget(fields)?;
        if budget.as_ref().is_some_and(|(tokens, _)| *tokens == 0) {
            variables.insert("enable_thinking".into(), false.into());
        }
        let may_think = match variables.get("enable_thinking") {
            Some(enabled) => Some(*enabled == Value::Bool(true)),
            None => variables.get("reasoning_effort").map(|effort| effort != "none"),
        };
        let (add_generation_prompt, continue_final) = generation_mode(fields, messages)?;
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
            functions: if choice == ToolChoice::None { Vec::new() } else { functions },
            tools,
            choice,
            single_call: fields.flag("parallel_tool_calls")? == Some(false),
            text_constraint: constraint,
            separate_reasoning: separates_reasoning(fields)?,
            may_think,
            budget,
            options,
            image_config: app.config().engine.images.clone(),
        })
    }

    /// Renders the conversation with the model's template.
    pub(crate) async fn prepare(mut self, loaded: &LoadedModel) -> Result<PreparedChat, ApiError> {
        let template = loaded.template()?;
        let vocabulary = loaded.vocabulary();
        let (marked, ConversationImages { marker, images }) =
            take_images(&mut self.messages, &self.options, self.image_config.as_ref(), loaded).await?;
        let rendered = template.render(marked.as_ref().unwrap_or(&self.messages), &self.options)?;
        let syntax = template.syntax();
        let answer_format = AnswerFormat {
            syntax: Arc::clone(&syntax),
            tools: self.functions,
            separates_reasoning: self.separate_reasoning,
            thinking: rendered.thinking,
            single: self.single_call || matches!(self.choice, ToolChoice::Function(_)),
        };
        // Models with answer channels always start with reasoning. Other models could reason without end instead of
        // calling.
        let may_think = self.may_think.unwrap_or(syntax.is_channels());
        let text = self.text_constraint.as_ref();
        let tools_len = self.tools.iter().map(|tool| tool.to_string().len()).sum();
        let calls = parameters::run_in_place(tools_len, || {
            tools::constraint(&answer_format, &self.choice, text, may_think, vocabulary)
        });
        let calls = calls.map_err(|error| SubmitError::Constraint { field: tools::FIELD.to_owned(), error })?;
        let constraint = calls.or_else(|| {
            self.text_constraint
                .map(|constraint| tools::after_reasoning(constraint, &answer_format, may_think, vocabulary))
        });
        let image_tokens: Vec<&[TokenId]> = images.images.iter().map(|image| image.tokens()).collect();
        let tokenize = || rendered.tokenize(vocabulary, &marker, &image_tokens);
        let (tokens, spans) = parameters::run_in_place(rendered.text.len(), tokenize)?;
        let ReasoningMarkers { open, close } = &syntax.reasoning_markers;
        let reasoning_budget = self.budget.map(|(tokens, message)| {
            let closing = format!("{message}{close}");
            let encode = || vocabulary.encode_markup_continuation(&closing);
            ReasoningBudget {
                tokens,
                open: open.clone(),
                close: close.clone(),
                closing_tokens: parameters::run_in_place(closing.len(), encode),
                starts_in_reasoning: rendered.thinking,
            }
        });
        // The end marker of reasoning does not end the turn.
        let ends = syntax.end_of_turn.iter().filter(|text| **text != *close);
        let ends: Vec<(&str, Option<TokenId>)> = ends.map(|text| (*text, control_token(text, vocabulary))).collect();
        let mut end_texts: Vec<String> = Vec::new();
        // A model without its own template never learned the fallback's marker as a token and may write it as text.
        if template.is_fallback() {
            end_texts.extend(ends.iter().filter(|(_, token)| token.is_none()).map(|(text, _)| (*text).to_owned()));
        }
        Ok(PreparedChat {
            tokens,
            images,
            spans,
            preview: parameters::preview(&preview_text(&self.messages)),
            conversation: self.messages,
            tools: (!self.tools.is_empty()).then_some(Value::Array(self.tools)),
            constraint,
            reasoning_budget,
            end_tokens: ends.into_iter().filter_map(|(_, token)| token).collect(),
            end_texts,
            visible: vocabulary.control_tokens_in(&syntax.markers()),
            answer_format: Arc::new(answer_format),
            text: rendered.without_bos(vocabulary).to_owned(),
        })
    }
}

/// Returns the control token whose text is exactly `text`.
fn control_token(text: &str, vocabulary: &Vocabulary) -> Option<TokenId> {
    match vocabulary.encode_markup(text)[..] {
        [token] if vocabulary.is_control(token) => Some(token),
        _ => None,
    }
}

/// Returns the variables of the template. The request's fields override those of the server, and the entries of
/// `chat_template_kwargs` override other fields. The reasoning effort `none` overrides `enable_thinking`.
fn template_variables(fields: Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let disables_thinking = fields.text("reasoning_effort")? == Some("none");
    let mut variables = Map::new();
    for layer in fields.layers() {
        if let Some(enabled) = layer.flag("enable_thinking")? {
            variables.insert("enable_thinking".into(), enabled.into());
        }
        if let Some(effort) = layer.text("reasoning_effort")? {
            variables.insert("reasoning_effort".into(), effort.into());
            if disables_thinking {
                variables.insert("enable_thinking".into(), false.into());
            }
        }
        variables.extend(layer.object("chat_template_kwargs")?.cloned().unwrap_or_default());
    }
    if let Some(enabled) = variables.get("enable_thinking").filter(|enabled| !enabled.is_boolean()) {
        return Err(invalid_value("chat_template_kwargs.enable_thinking", "true or false", enabled));
    }
    Ok(variables)
}

/// Returns the maximum of reasoning tokens, and the text appended when they are spent.
fn reasoning_budget(fields: Fields<'_>) -> Result<Option<(u32, String)>, ApiError> {
    let message = fields.text("reasoning_budget_message")?.unwrap_or_default().to_owned();
    // A control request can end the reasoning only if its tokens are counted, so the budget is set to its maximum.
    let max_budget = fields.flag("reasoning_control")?.unwrap_or(false).then_some(i32::MAX as u32);
    // The server's flag sets the last of these names.
    let Some((name, _)) =
        fields.first_present(&["reasoning_budget_tokens", "thinking_budget_tokens", "reasoning_budget"])
    else {
        return Ok(max_budget.map(|tokens| (tokens, message)));
    };
    let budget = fields.integer(name, -1..=i64::from(i32::MAX))?.and_then(|tokens| u32::try_from(tokens).ok());
    Ok(budget.or(max_budget).map(|tokens| (tokens, message)))
}

/// Returns true if reasoning is reported separately from the text.
fn separates_reasoning(fields: Fields<'_>) -> Result<bool, ApiError> {
    match fields.text("reasoning_format")? {
        // Like llama-server, and unlike its documentation, `deepseek-legacy` removes reasoning from the text too.
        None | Some("auto" | "deepseek" | "deepseek-legacy") => Ok(true),
        Some("none") => Ok(false),
        Some(other) => Err(invalid_value(
            "reasoning_format",
            "\"none\", \"deepseek\", \"deepseek-legacy\" or \"auto\"",
            &other.into(),
        )),
    }
}

/// Returns (`add_generation_prompt`, `continue_final_message`). By default a final assistant message is continued.
fn generation_mode(fields: Fields<'_>, messages: &Value) -> Result<(bool, bool), ApiError> {
    let add = fields.flag("add_generation_prompt")?;
    let continues = match fields.get("continue_final_message") {
        // llama-server's names of the part to continue. Both continue the content, or the reasoning of a message without
        // content.
        Some(Value::String(part)) if part == "content" || part == "reasoning_content" => Some(true),
        _ => fields.flag("continue_final_message")?,
    };
    if add == Some(true) && continues == Some(true) {
        return Err(ApiError::invalid(
            "continue_final_message",
            "`continue_final_message` and `add_generation_prompt` must not both be true: the answer either continues a \
             message or starts a new one",
        ));
    }
    let list = messages.as_array().map_or(&[][..], Vec::as_slice);
    let is_answer =
        |message: &Value| message["role"] == "assistant" && message["tool_calls"].as_array().is_none_or(Vec::is_empty);
    let prefilled = list.len() > 1 && list.last().is_some_and(is_answer);
    let continue_final = continues.unwrap_or(prefilled && add.is_none());
    if let ([.., before, last], true) = (list, continue_final)
        && is_answer(before)
        && is_answer(last)
    {
        return Err(ApiError::invalid(
            "messages",
            "`messages` ends with two assistant messages, but only one can be continued; merge them",
        ));
    }
    Ok((add.unwrap_or(true) && !continue_final, continue_final))
}

/// Joins the text parts of a continued message with blank lines, as llama-server does.
fn join_continued(message: &mut Value) {
    let Some(parts) = message["content"].as_array() else { return };
    let is_text = |part: &Value| part.get("type").is_none_or(|kind| kind == "text");
    let texts: Option<Vec<&str>> =
        parts.iter().map(|part| part.get("text").and_then(Value::as_str).filter(|_| is_text(part))).collect();
    // Other part types are rejected when the template renders the messages.
    if let Some(texts) = texts {
        message["content"] = texts.join("\n\n").into();
    }
}

/// Returns the text of the last user message, or of the last message if there is none.
fn preview_text(messages: &Value) -> String {
    let list = messages.as_array().map_or(&[][..], Vec::as_slice);
    let last_user = list.iter().rev().find(|message| message["role"] == "user");
    match last_user.or(list.last()).map(|message| &message["content"]) {
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
            chat::ChatTemplateError::Rejected(_) => Self::invalid("messages", error.to_string()),
            chat::ChatTemplateError::Template(_) => Self::bad_request(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn template_variables_of_request_override_those_of_server() {
        for (server, request, expected) in [
            (
                json!({"chat_template_kwargs": {"enable_thinking": false, "a": 1}}),
                json!({"enable_thinking": true}),
                json!({"enable_thinking": true, "a": 1}),
            ),
            (
                json!({"enable_thinking": false}),
                json!({"chat_template_kwargs": {"enable_thinking": true}}),
                json!({"enable_thinking": true}),
            ),
            (
                json!({"reasoning_effort": "none"}),
                json!({"enable_thinking": true}),
                json!({"enable_thinking": true, "reasoning_effort": "none"}),
            ),
            (
                json!({"reasoning_effort": "none"}),
                json!({"reasoning_effort": "high"}),
                json!({"reasoning_effort": "high"}),
            ),
            (
                json!({"enable_thinking": true}),
                json!({"reasoning_effort": "none"}),
                json!({"enable_thinking": false, "reasoning_effort": "none"}),
            ),
            (
                json!({}),
                json!({"reasoning_effort": "none", "enable_thinking": true}),
                json!({"enable_thinking": false, "reasoning_effort": "none"}),
            ),
            (
                json!({"chat_template_kwargs": {"reasoning_effort": "low"}}),
                json!({"reasoning_effort": "high", "chat_template_kwargs": {"b": 2}}),
                json!({"reasoning_effort": "high", "b": 2}),
            ),
            (
                json!({}),
                json!({"enable_thinking": true, "chat_template_kwargs": {"enable_thinking": false}}),
                json!({"enable_thinking": false}),
            ),
        ] {
            let fields = Fields::new(&request).unwrap().with_defaults(server.as_object().unwrap());
            assert_eq!(Value::from(template_variables(fields).unwrap()), expected, "{server} {request}");
        }
    }
}
