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
mod spans;
pub mod syntax;
pub mod tools;

pub use rendered::{RenderedMessage, RenderedPrompt};

use crate::model::{Vocabulary, llama};
use capabilities::DetectedCapabilities;
use chrono::{DateTime, Utc};
use limited_text::{LimitedText, MAX_TEXT_BYTES};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value as Jinja, context};
use serde_json::{Map, Value, json};
use spans::MarkedConversation;
use std::sync::Arc;
use syntax::AnswerSyntax;

/// The default template for a model without one.
const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Maximum instructions per rendering; a conversation of a thousand messages takes about 50,000. Lower for a template
/// with a long text, which it may repeat.
const FUEL: u64 = 5_000_000;

const NAME: &str = "chat";

/// The renderer of a conversation.
#[derive(Debug)]
enum Renderer {
    /// A Jinja template.
    Jinja(Box<Environment<'static>>),
    /// A template that is built into llama.cpp, by name.
    LlamaCpp(String),
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    renderer: Renderer,
    /// String literals in the template, which it may search for in messages.
    literals: Vec<String>,
    /// The vocabulary whose control tokens must not result from text in messages.
    vocabulary: Option<Arc<Vocabulary>>,
    bos: String,
    eos: String,
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
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| ChatTemplateError::Template(error.to_string()))?);
        // The output is a prompt, not HTML.
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut environment);
        // As in Jinja2.
        let text = &source.unwrap_or(CHATML).replace("\r\n", "\n").replace('\r', "\n");
        let mut translation = jinja_syntax::translate(text);
        // A block stores text outside of tags in a variable. To repeat all of this text takes at least 4 instructions, and to
        // repeat the text between two tags at least one.
        let max_bytes = 2 * python::budget::MAX_BYTES;
        let repetitions =
            (4 * max_bytes / translation.text_bytes.max(1)).max(max_bytes / translation.longest_text.max(1));
        let fuel = FUEL.min(repetitions as u64);
        environment.set_fuel(Some(fuel));
        let literals = std::mem::take(&mut translation.literals);
        compile::add_template(&mut environment, NAME, translation)?;
        let mut template = Self::from_renderer(Renderer::Jinja(Box::new(environment)), text, bos, eos);
        template.literals = literals;
        template.fallback = source.is_none();
        template.capabilities.typed_content = DetectedCapabilities::needs_typed_content(&template);
        template.capabilities = DetectedCapabilities::detect(&template, text);
        template.set_fuel(derive::FUEL.min(fuel));
        let syntax = derive::derive_syntax(&template);
        template.set_fuel(fuel);
        template.syntax = Arc::new(if template.capabilities.tools { syntax } else { syntax.without_own_tools() });
        Ok(template)
    }

    /// Returns llama.cpp's built-in template with this name.
    ///
    /// # Errors
    /// [`ChatTemplateError::Template`] if llama.cpp has no template with this name.
    pub fn from_llama_cpp(name: &str, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        let sent = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")];
        // Its output contains the markers that determine the family.
        let Some(sample) = llama::apply_chat_template(name, &sent, true) else {
            return Err(ChatTemplateError::Template(format!("llama.cpp has no chat template '{name}'")));
        };
        let mut template = Self::from_renderer(Renderer::LlamaCpp(name.to_owned()), &sample, bos, eos);
        name.clone_into(&mut template.source);
        template.capabilities = DetectedCapabilities { tools: false, ..template.capabilities };
        template.syntax = Arc::new(AnswerSyntax::from_markers(&sample).without_own_tools());
        Ok(template)
    }

    fn set_fuel(&mut self, fuel: u64) {
        if let Renderer::Jinja(environment) = &mut self.renderer {
            environment.set_fuel(Some(fuel));
        }
    }

    fn from_renderer(renderer: Renderer, text: &str, bos: &str, eos: &str) -> Self {
        Self {
            renderer,
            literals: Vec::new(),
            vocabulary: None,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            source: text.to_owned(),
            fallback: false,
            syntax: Arc::new(AnswerSyntax::from_markers(text)),
            capabilities: DetectedCapabilities {
                tools: true,
                system: true,
                arguments_as_text: false,
                typed_content: false,
            },
        }
    }

    /// Makes messages that contain literals of this vocabulary's control tokens render as plain text.
    #[must_use]
    pub fn with_literal_masking(mut self, vocabulary: Arc<Vocabulary>) -> Self {
        self.vocabulary = Some(vocabulary);
        self
    }

    /// Returns the template's text.
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
        let mut last = if options.continue_final { Some(messages::take_partial_answer(&mut messages)?) } else { None };
        let mut options = options.clone();
        options.add_generation_prompt |= last.is_some();
        let adapted = self.adapt(messages.clone(), options.tools.as_ref());
        let mut text = self.text(&adapted, &options)?;
        let masked = self.masked(&messages, &options, last.as_mut(), &mut text);
        let mut parts = self.parts(&adapted, &options, &text).unwrap_or_default();
        if let (Some(system), Some(part)) = (self.merged_system(&messages), parts.first_mut())
            && text[part.start..part.end].starts_with(system)
        {
            // The system message keeps its role in `parts`, even inside the user's message.
            let end = part.start + system.len();
            let start = std::mem::replace(&mut part.start, (end + 1).min(part.end));
            parts.insert(0, RenderedMessage { role: "system".into(), start, end });
        }
        let (open, close) = (self.syntax.reasoning_markers.0.as_str(), self.syntax.reasoning_markers.1.as_str());
        let thinking = options.add_generation_prompt && !open.is_empty() && text.trim_end().ends_with(open);
        let mut rendered = RenderedPrompt { text, parts, masked, thinking };
        if thinking && options.variables.get("enable_thinking") == Some(&Value::Bool(false)) {
            // Some templates start reasoning although it is disabled.
            rendered.push(&format!("\n{close}\n\n"));
            rendered.thinking = false;
        }
        if let Some(last) = last {
            rendered.continue_with(&last, (open, close));
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
    /// into the first user message.
    fn merged_system<'a>(&self, messages: &'a [Value]) -> Option<&'a str> {
        let [first, _, ..] = messages else { return None };
        let is_system = first["role"] == "system" || first["role"] == "developer";
        first["content"].as_str().filter(|_| is_system && !self.capabilities.system)
    }

    /// Renders the conversation again with marks in the literals of control tokens from messages, and adds marks to
    /// `last`. Sets `text` to this rendering without marks. Returns `None` if no message has such a literal.
    fn masked(
        &self,
        messages: &[Value],
        options: &RenderOptions,
        last: Option<&mut messages::PartialAnswer>,
        text: &mut String,
    ) -> Option<String> {
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
        let (open, close) = (self.syntax.reasoning_markers.0.as_str(), self.syntax.reasoning_markers.1.as_str());
        let same = |masked: &String| mask::unmasked(masked) == *text;
        let whole = attempt(&[]);
        let masked = match whole {
            // Leave the end marker of reasoning unmarked, because templates search for it.
            Some(whole) if !same(&whole) => Some(attempt(&[open, close]).filter(same).unwrap_or(whole)),
            whole => whole,
        };
        let mut last_has_marks = false;
        for sent in last.into_iter().flat_map(|last| [&mut last.reasoning, &mut last.content]) {
            if let Some(masked) = mask::masked(sent, vocabulary, &[]) {
                last_has_marks = true;
                *sent = masked;
            }
        }
        if let Some(masked) = &masked {
            *text = mask::unmasked(masked);
        }
        masked.or_else(|| last_has_marks.then(|| text.clone()))
    }

    /// Locates each message's content in `text`.
    fn parts(&self, messages: &[Value], options: &RenderOptions, text: &str) -> Option<Vec<RenderedMessage>> {
        let whole = MarkedConversation::whole(messages);
        let marked_text = self.text(&whole.messages, options).ok();
        let found = marked_text.as_ref().and_then(|marked_text| whole.locate(text, marked_text, false));
        let in_words = || {
            let words = MarkedConversation::words(messages, &self.literals);
            let marked_text = self.text(&words.messages, options).ok()?;
            words.locate(text, &marked_text, false).or_else(|| words.locate(text, &marked_text, true))
        };
        found.or_else(in_words).or_else(|| whole.locate(text, &marked_text?, true))
    }

    fn text(&self, messages: &[Value], options: &RenderOptions) -> Result<String, ChatTemplateError> {
        let environment = match &self.renderer {
            Renderer::Jinja(environment) => environment,
            Renderer::LlamaCpp(name) => {
                let field = |message: &'_ Value, name: &str| message[name].as_str().unwrap_or_default().to_owned();
                let sent: Vec<(String, String)> =
                    messages.iter().map(|message| (field(message, "role"), field(message, "content"))).collect();
                let sent: Vec<(&str, &str)> =
                    sent.iter().map(|(role, content)| (role.as_str(), content.as_str())).collect();
                return llama::apply_chat_template(name, &sent, options.add_generation_prompt).ok_or_else(|| {
                    ChatTemplateError::Rejected(format!("llama.cpp's template '{name}' cannot render them"))
                });
            }
        };
        let typed = self.capabilities.typed_content.then(|| messages::with_typed_content(messages));
        let messages = typed.as_deref().unwrap_or(messages);
        let now = options.now;
        // Variables that llama.cpp passes to every template.
        let mut variables = options.variables.clone();
        variables.entry("enable_thinking").or_insert(true.into());
        for (name, format) in [("date_string", "%d %b %Y"), ("datetime", "%b %d %Y")] {
            variables.entry(name).or_insert_with(|| now.format(format).to_string().into());
        }
        let tools = options.tools.as_ref().map_or(Jinja::from(()), |tools| Jinja::from(Serde(tools)));
        let variables = Jinja::from(Serde(variables));
        let context = context! {
            messages => Jinja::from(Serde(messages)),
            tools,
            add_generation_prompt => options.add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            strftime_now => Jinja::from_function(move |format: String| python::strftime(now, &format)),
            ..variables
        };
        let template =
            environment.get_template(NAME).map_err(|error| ChatTemplateError::Template(describe_error(&error)))?;
        let mut output = LimitedText::default();
        let rendered = template.render_captured_to(context, &mut output).map(|_| ());
        if output.is_full {
            return Err(ChatTemplateError::Rejected(format!(
                "the text has more than {MAX_TEXT_BYTES} bytes, the maximum; shorten the messages"
            )));
        }
        rendered.map_err(|error| ChatTemplateError::Rejected(describe_error(&error)))?;
        String::from_utf8(output.text).map_err(|error| ChatTemplateError::Rejected(error.to_string()))
    }
}

/// Returns the message of `raise_exception`, or the error with its line.
fn describe_error(error: &minijinja::Error) -> String {
    match (error.detail(), error.line()) {
        (Some(detail), _) if python::is_raised(error) => detail.to_owned(),
        (_, Some(line)) => format!("line {line}: {error}"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod comparison;
#[cfg(test)]
mod tests;
