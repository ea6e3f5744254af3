//! Chat templates: rendering of messages and tools to the prompt's text by the template in the GGUF file.
//!
//! Templates are written for Python's Jinja2 and come with the weights, so they are untrusted: they run in minijinja
//! with Python's methods, limits of instructions and memory, and no access to the system. [`RenderedPrompt`] records
//! which part of the text each message became, so that a replay can show the role of each part.

pub mod answer;
mod capabilities;
mod compile;
mod derive;
mod describe_tools;
pub mod family;
mod jinja_syntax;
mod limited_text;
mod mask;
mod messages;
pub mod pattern;
mod python;
mod rendered;
mod renderer;
mod spans;
pub mod syntax;
pub mod tools;

pub use rendered::{RenderedMessage, RenderedPrompt};

use crate::model::{Vocabulary, llama};
use capabilities::DetectedCapabilities;
use chrono::{DateTime, Utc};
use renderer::{JinjaRenderer, TemplateRenderer};
use serde_json::{Map, Value, json};
use spans::{ContentMatch, MarkedConversation};
use std::sync::Arc;
use syntax::AnswerSyntax;

/// The default template for a model without one.
const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    renderer: TemplateRenderer,
    /// String literals in the template, which it may search for in messages.
    literals: Vec<String>,
    /// The vocabulary whose control tokens must not result from text in messages.
    vocabulary: Option<Arc<Vocabulary>>,
    source: String,
    /// True for the fallback template of a model without one.
    fallback: bool,
    syntax: Arc<AnswerSyntax>,
    capabilities: DetectedCapabilities,
}

/// Options of a rendering.
#[derive(Debug, Clone)]
pub struct RenderOptions {
    /// The tools, in OpenAI's format.
    pub tools: Option<Value>,
    /// True to end the text with the start of the assistant's answer.
    pub add_generation_prompt: bool,
    /// True to end the text inside the last message, which must be the assistant's; the answer continues it.
    pub continue_final: bool,
    /// Additional variables of the template, e.g. `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The time for `strftime_now`.
    pub now: DateTime<Utc>,
}

/// The reason why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateError {
    /// The GGUF's template does not compile.
    #[error("the model's chat template does not compile: {0}")]
    Template(String),
    /// The template called `raise_exception`, or failed on the messages.
    #[error("the model's chat template rejects these messages: {0}")]
    Rejected(String),
    /// A message is not in OpenAI's format.
    #[error("{message}")]
    Message {
        /// JSON path, e.g. `messages[2].content`.
        pointer: String,
        /// The error and the expected form.
        message: String,
    },
}

impl ChatTemplate {
    /// Compiles a model's template; `None` for the `ChatML` fallback. `bos` and `eos` are the texts of those tokens.
    ///
    /// # Errors
    /// [`ChatTemplateError::Template`].
    pub fn new(source: Option<&str>, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        // As in Jinja2.
        let text = source.unwrap_or(CHATML).replace("\r\n", "\n").replace('\r', "\n");
        let (renderer, literals) = JinjaRenderer::compile(&text, bos, eos)?;
        let typed_content = capabilities::needs_typed_content(&renderer);
        let renderer = renderer.with_typed_content(typed_content);
        let capabilities = DetectedCapabilities::detect(&renderer, &text);
        let limited = renderer.with_max_fuel(derive::FUEL);
        let syntax = derive::derive_syntax(&limited, &text, capabilities.arguments_as_text);
        Ok(Self {
            renderer: TemplateRenderer::Jinja(Box::new(renderer)),
            literals,
            vocabulary: None,
            source: text,
            fallback: source.is_none(),
            syntax: Arc::new(if capabilities.tools { syntax } else { syntax.without_own_tools() }),
            capabilities,
        })
    }

    /// Returns llama.cpp's built-in template with this name.
    ///
    /// # Errors
    /// [`ChatTemplateError::Template`] if llama.cpp has no template with this name.
    pub fn from_llama_cpp(name: &str) -> Result<Self, ChatTemplateError> {
        let sent = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")];
        // Its output contains the markers that determine the family.
        let Some(sample) = llama::apply_chat_template(name, &sent, true) else {
            return Err(ChatTemplateError::Template(format!("llama.cpp has no chat template '{name}'")));
        };
        Ok(Self {
            renderer: TemplateRenderer::LlamaCpp(name.to_owned()),
            literals: Vec::new(),
            vocabulary: None,
            source: name.to_owned(),
            fallback: false,
            syntax: Arc::new(AnswerSyntax::from_markers(&sample).without_own_tools()),
            capabilities: DetectedCapabilities { tools: false, system: true, arguments_as_text: false },
        })
    }

    /// Makes messages that contain literals of this vocabulary's control tokens render as plain text.
    #[must_use]
    pub fn with_literal_masking(mut self, vocabulary: Arc<Vocabulary>) -> Self {
        self.vocabulary = Some(vocabulary);
        self
    }

    /// Returns the template's text, or the name of a template of llama.cpp.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the syntax of the model's answers.
    #[must_use]
    pub fn syntax(&self) -> Arc<AnswerSyntax> {
        Arc::clone(&self.syntax)
    }

    /// Returns true if the template describes tools; otherwise they are described in a message.
    #[must_use]
    pub fn supports_tools(&self) -> bool {
        self.capabilities.tools
    }

    /// Returns true for the fallback template of a model without one.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        self.fallback
    }

    /// Renders a conversation in OpenAI's format: an array of messages with `role` and `content`.
    ///
    /// # Errors
    /// [`ChatTemplateError::Message`] and [`ChatTemplateError::Rejected`].
    pub fn render(&self, messages: &Value, options: &RenderOptions) -> Result<RenderedPrompt, ChatTemplateError> {
        let mut messages = messages::normalize(messages)?;
        let partial_answer =
            if options.continue_final { Some(messages::take_partial_answer(&mut messages)?) } else { None };
        let mut options = options.clone();
        options.add_generation_prompt |= partial_answer.is_some();
        let adapted = self.adapt(messages.clone(), options.tools.as_ref());
        let text = self.text(&adapted, &options)?;
        let masked = self.masked_text(&messages, &options, &text);
        let text = masked.as_deref().map_or(text, mask::unmasked);
        let parts = self.parts(&adapted, &options, &text).unwrap_or_default();
        let markers = &self.syntax.reasoning_markers;
        let opens_reasoning = !markers.open.is_empty() && text.trim_end().ends_with(markers.open.as_str());
        let thinking = options.add_generation_prompt && opens_reasoning;
        let mut rendered = RenderedPrompt { text, parts, masked, thinking };
        if let Some(system) = self.merged_system(&messages) {
            rendered.split_system_part(system);
        }
        if thinking && options.variables.get("enable_thinking") == Some(&Value::Bool(false)) {
            // Some templates start reasoning although it is disabled.
            rendered.close_reasoning(markers);
        }
        if let Some(partial_answer) = partial_answer {
            rendered.continue_with(&partial_answer, markers, self.vocabulary.as_deref());
        }
        Ok(rendered)
    }

    /// Adapts messages in OpenAI's format to the template.
    fn adapt(&self, mut messages: Vec<Value>, tools: Option<&Value>) -> Vec<Value> {
        if !self.capabilities.tools {
            messages = describe_tools::render_calls_as_text(messages);
            if let Some(tools) = tools {
                describe_tools::describe_tools(&mut messages, tools, self.capabilities.system);
            }
        }
        if self.merged_system(&messages).is_some() {
            messages::merge_system(&mut messages);
        }
        messages::adapt(&mut messages, &self.syntax, self.capabilities.arguments_as_text, &self.source);
        messages
    }

    /// Returns the text of the system message if the template does not support system messages, so that it is merged
    /// into the next message.
    fn merged_system<'a>(&self, messages: &'a [Value]) -> Option<&'a str> {
        let [first, _, ..] = messages else { return None };
        let is_system = first["role"] == "system" || first["role"] == "developer";
        first["content"].as_str().filter(|_| is_system && !self.capabilities.system)
    }

    /// Renders the conversation again with marks in the literals of control tokens from messages; `text` is the
    /// rendering without marks. Returns `None` if no message has such a literal.
    fn masked_text(&self, messages: &[Value], options: &RenderOptions, text: &str) -> Option<String> {
        let vocabulary = self.vocabulary.as_deref()?;
        let attempt = |exempt: &[&str]| {
            let mut conversation = json!({ "messages": messages, "tools": options.tools });
            let found = mask::mask(&mut conversation, vocabulary, exempt);
            let messages = match conversation["messages"].take() {
                Value::Array(messages) if found => messages,
                _ => return None,
            };
            let tools = options.tools.is_some().then(|| conversation["tools"].take());
            let messages = self.adapt(messages, tools.as_ref());
            self.text(&messages, &RenderOptions { tools, ..options.clone() }).ok()
        };
        let same = |masked: &String| mask::unmasked(masked) == text;
        let whole = attempt(&[])?;
        if same(&whole) {
            return Some(whole);
        }
        // Leave the markers of reasoning unmarked, because templates search for them.
        let markers = &self.syntax.reasoning_markers;
        Some(attempt(&[&markers.open, &markers.close]).filter(same).unwrap_or(whole))
    }

    /// Locates each message's content in `text`.
    fn parts(&self, messages: &[Value], options: &RenderOptions, text: &str) -> Option<Vec<RenderedMessage>> {
        let whole = MarkedConversation::whole(messages);
        let marked_text = self.text(&whole.messages, options).ok();
        let found = marked_text.as_ref().and_then(|marked_text| whole.locate(text, marked_text, ContentMatch::Exact));
        let in_words = || {
            let words = MarkedConversation::words(messages, &self.literals);
            let marked_text = self.text(&words.messages, options).ok()?;
            let located = |content_match| words.locate(text, &marked_text, content_match);
            located(ContentMatch::Exact).or_else(|| located(ContentMatch::Changed))
        };
        found.or_else(in_words).or_else(|| whole.locate(text, &marked_text?, ContentMatch::Changed))
    }

    fn text(&self, messages: &[Value], options: &RenderOptions) -> Result<String, ChatTemplateError> {
        self.renderer.text(messages, options)
    }
}

#[cfg(test)]
mod comparison;
#[cfg(test)]
mod tests;
