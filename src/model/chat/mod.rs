//! Chat templates: messages and tools to the prompt's text, by the template inside the GGUF.
//!
//! Templates are written for Python's Jinja2 and come with the weights, from anywhere: they run in minijinja with
//! Python's methods, a limit of instructions, and no access to anything. [`RenderedPrompt`] says which part of the text
//! each message became, so that a replay can show who said what.

pub mod answer;
mod derive;
pub mod family;
pub mod format;
mod mask;
mod messages;
mod offer;
pub mod pattern;
mod probe;
mod python;
mod rendered;
mod spans;
mod syntax;
pub mod tools;

pub use rendered::{RenderedMessage, RenderedPrompt};

use crate::model::{Vocabulary, llama};
use chrono::{DateTime, Utc};
use format::AnswerSyntax;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value as Jinja, context};
use probe::Abilities;
use serde_json::{Map, Value, json};
use spans::Marked;
use std::sync::Arc;

/// The template of a model that has none.
const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Instructions that one rendering may take; a conversation of a thousand messages takes some 50 000.
const FUEL: u64 = 5_000_000;

const NAME: &str = "chat";

/// Renderer of a conversation.
#[derive(Debug)]
enum Renderer {
    /// A template in Jinja.
    Jinja(Box<Environment<'static>>),
    /// A template of llama.cpp, by its name.
    LlamaCpp(String),
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    renderer: Renderer,
    /// Texts that the template may look for in a message.
    literals: Vec<String>,
    /// The vocabulary whose control tokens a conversation cannot write.
    vocabulary: Option<Arc<Vocabulary>>,
    bos: String,
    eos: String,
    source: String,
    /// Whether it is our fallback, because the model has none.
    fallback: bool,
    format: Arc<AnswerSyntax>,
    abilities: Abilities,
}

/// What is rendered besides the messages.
#[derive(Debug, Clone)]
pub struct RenderOptions {
    /// The tools, in OpenAI's shape.
    pub tools: Option<Value>,
    /// Whether the text ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Whether the text ends within the last message, an assistant's, which the answer then continues.
    pub continue_final: bool,
    /// Further variables of the template, e.g. `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The time that `strftime_now` tells.
    pub now: DateTime<Utc>,
}

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum ChatTemplateError {
    /// The GGUF's template does not compile.
    #[error("the model's chat template cannot be read: {0}")]
    Template(String),
    /// The template called `raise_exception`, or tripped over the messages.
    #[error("the model's chat template does not take these messages: {0}")]
    Refused(String),
    /// A message is not in OpenAI's shape.
    #[error("{message}")]
    Message {
        /// Where, e.g. `messages[2].content`.
        pointer: String,
        /// What was wrong, and what would be right.
        message: String,
    },
}

impl ChatTemplate {
    /// Compiles a model's template; `None` means the `ChatML` fallback. `bos` and `eos` are the texts of those tokens.
    ///
    /// # Errors
    /// [`ChatTemplateError::Template`].
    pub fn new(source: Option<&str>, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| ChatTemplateError::Template(error.to_string()))?);
        environment.set_fuel(Some(FUEL));
        // The text is a prompt, not a page.
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut environment);
        let text = source.unwrap_or(CHATML);
        let translation = syntax::translate(text);
        environment
            .add_template_owned(NAME, translation.source)
            .map_err(|error| ChatTemplateError::Template(described(&error)))?;
        let mut template = Self::with(Renderer::Jinja(Box::new(environment)), text, bos, eos);
        template.literals = translation.literals;
        template.fallback = source.is_none();
        template.abilities = Abilities::of(&template, text);
        template.set_fuel(derive::FUEL);
        let format = derive::format(&template);
        template.set_fuel(FUEL);
        template.format = Arc::new(if template.abilities.tools { format } else { format.without_own_tools() });
        Ok(template)
    }

    /// Returns the template that llama.cpp has by this name and renders itself.
    ///
    /// # Errors
    /// [`ChatTemplateError::Template`] when llama.cpp has none of that name.
    pub fn of_llama_cpp(name: &str, bos: &str, eos: &str) -> Result<Self, ChatTemplateError> {
        let said = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")];
        // What it writes tells the family, as the text of a Jinja template does.
        let Some(sample) = llama::apply_chat_template(name, &said, true) else {
            return Err(ChatTemplateError::Template(format!("llama.cpp has no chat template '{name}'")));
        };
        let mut template = Self::with(Renderer::LlamaCpp(name.to_owned()), &sample, bos, eos);
        name.clone_into(&mut template.source);
        template.abilities = Abilities { tools: false, system: true, arguments_as_text: false };
        template.format = Arc::new(AnswerSyntax::of_markers(&sample).without_own_tools());
        Ok(template)
    }

    fn set_fuel(&mut self, fuel: u64) {
        if let Renderer::Jinja(environment) = &mut self.renderer {
            environment.set_fuel(Some(fuel));
        }
    }

    fn with(renderer: Renderer, text: &str, bos: &str, eos: &str) -> Self {
        Self {
            renderer,
            literals: Vec::new(),
            vocabulary: None,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            source: text.to_owned(),
            fallback: false,
            format: Arc::new(AnswerSyntax::of_markers(text)),
            abilities: Abilities { tools: true, system: true, arguments_as_text: false },
        }
    }

    /// Reads the literals of this vocabulary's control tokens as text where a conversation has them.
    #[must_use]
    pub fn guarding(mut self, vocabulary: Arc<Vocabulary>) -> Self {
        self.vocabulary = Some(vocabulary);
        self
    }

    /// The template's text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// How the model's answers are written.
    #[must_use]
    pub fn format(&self) -> Arc<AnswerSyntax> {
        Arc::clone(&self.format)
    }

    /// Whether the template describes tools; else they are described in the system message.
    #[must_use]
    pub fn knows_tools(&self) -> bool {
        self.abilities.tools
    }

    /// Whether it is our fallback, because the model has none.
    #[must_use]
    pub fn is_fallback(&self) -> bool {
        self.fallback
    }

    /// Renders a conversation in OpenAI's shape: an array of messages with `role` and `content`.
    ///
    /// # Errors
    /// [`ChatTemplateError::Message`] and [`ChatTemplateError::Refused`].
    pub fn render(&self, messages: &Value, options: &RenderOptions) -> Result<RenderedPrompt, ChatTemplateError> {
        let mut messages = messages::normalised(messages)?;
        let mut last = if options.continue_final { Some(messages::to_continue(&mut messages)?) } else { None };
        let mut options = options.clone();
        options.add_generation_prompt |= last.is_some();
        let adapted = self.adapted(messages.clone(), options.tools.as_ref());
        let mut text = self.text(&adapted, &options)?;
        let masked = self.masked(&messages, &options, last.as_mut(), &mut text);
        let mut parts = self.parts(&adapted, &options, &text).unwrap_or_default();
        if let (Some(system), Some(part)) = (self.merged_system(&messages), parts.first_mut())
            && text[part.start..part.end].starts_with(system)
        {
            // What the system says stays the system's, also where it stands in the user's message.
            let end = part.start + system.len();
            let start = std::mem::replace(&mut part.start, (end + 1).min(part.end));
            parts.insert(0, RenderedMessage { role: "system".into(), start, end });
        }
        let (open, close) = (self.format.thought.0.as_str(), self.format.thought.1.as_str());
        let thinking = options.add_generation_prompt && !open.is_empty() && text.trim_end().ends_with(open);
        let mut rendered = RenderedPrompt { text, parts, masked, thinking };
        if thinking && options.variables.get("enable_thinking") == Some(&Value::Bool(false)) {
            // The template opens a thought, whatever it is told.
            rendered.push(&format!("\n{close}\n\n"));
            rendered.thinking = false;
        }
        if let Some(last) = last {
            rendered.continue_with(&last, (open, close));
        }
        Ok(rendered)
    }

    /// Fits messages in OpenAI's shape to what the template takes.
    fn adapted(&self, mut messages: Vec<Value>, tools: Option<&Value>) -> Vec<Value> {
        if !self.abilities.tools {
            messages = offer::spelt_out(messages);
            if let Some(tools) = tools {
                offer::described(&mut messages, tools, self.abilities.system);
            }
        }
        if self.merged_system(&messages).is_some() {
            messages::merge_system(&mut messages);
        }
        messages::adapt(&mut messages, &self.format, self.abilities.arguments_as_text, &self.source);
        messages
    }

    /// Returns the system's text where it is put into the first user's message, for want of a place of its own.
    fn merged_system<'a>(&self, messages: &'a [Value]) -> Option<&'a str> {
        let [first, _, ..] = messages else { return None };
        let is_system = first["role"] == "system" || first["role"] == "developer";
        first["content"].as_str().filter(|_| is_system && !self.abilities.system)
    }

    /// Returns `text` with marks in what the conversation has of control tokens' literals, and puts them into `last`,
    /// too. `None` when there are none.
    fn masked(
        &self,
        messages: &[Value],
        options: &RenderOptions,
        last: Option<&mut messages::Last>,
        text: &mut String,
    ) -> Option<String> {
        let vocabulary = self.vocabulary.as_deref()?;
        let attempt = |spared: &[&str]| {
            let mut conversation = json!({ "messages": messages, "tools": options.tools });
            let found = mask::mask(&mut conversation, vocabulary, spared);
            let messages = match conversation["messages"].take() {
                Value::Array(messages) if found => messages,
                _ => return None,
            };
            let tools = options.tools.is_some().then(|| conversation["tools"].take());
            let messages = self.adapted(messages, tools.as_ref());
            self.text(&messages, &RenderOptions { tools, ..options.clone() }).ok()
        };
        let (open, close) = (self.format.thought.0.as_str(), self.format.thought.1.as_str());
        let same = |masked: &String| mask::unmasked(masked) == *text;
        let whole = attempt(&[]);
        let masked = match whole {
            // A template that looks for the end of a thought must find it.
            Some(whole) if !same(&whole) => Some(attempt(&[open, close]).filter(same).unwrap_or(whole)),
            whole => whole,
        };
        let mut continues = false;
        for said in last.into_iter().flat_map(|last| [&mut last.reasoning, &mut last.content]) {
            if let Some(masked) = mask::masked(said, vocabulary, &[]) {
                continues = true;
                *said = masked;
            }
        }
        if let Some(masked) = &masked {
            *text = mask::unmasked(masked);
        }
        masked.or_else(|| continues.then(|| text.clone()))
    }

    /// Finds what each message's content became in `text`.
    fn parts(&self, messages: &[Value], options: &RenderOptions, text: &str) -> Option<Vec<RenderedMessage>> {
        let whole = Marked::whole(messages);
        let frame = self.text(&whole.messages, options).ok();
        let found = frame.as_ref().and_then(|frame| whole.locate(text, frame, false));
        let in_words = || {
            let words = Marked::words(messages, &self.literals);
            let frame = self.text(&words.messages, options).ok()?;
            words.locate(text, &frame, false).or_else(|| words.locate(text, &frame, true))
        };
        found.or_else(in_words).or_else(|| whole.locate(text, &frame?, true))
    }

    fn text(&self, messages: &[Value], options: &RenderOptions) -> Result<String, ChatTemplateError> {
        let environment = match &self.renderer {
            Renderer::Jinja(environment) => environment,
            Renderer::LlamaCpp(name) => {
                let field = |message: &'_ Value, name: &str| message[name].as_str().unwrap_or_default().to_owned();
                let said: Vec<(String, String)> =
                    messages.iter().map(|message| (field(message, "role"), field(message, "content"))).collect();
                let said: Vec<(&str, &str)> =
                    said.iter().map(|(role, content)| (role.as_str(), content.as_str())).collect();
                return llama::apply_chat_template(name, &said, options.add_generation_prompt).ok_or_else(|| {
                    ChatTemplateError::Refused(format!("llama.cpp's template '{name}' cannot write them"))
                });
            }
        };
        let now = options.now;
        // What llama.cpp gives to every template.
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
            environment.get_template(NAME).map_err(|error| ChatTemplateError::Template(described(&error)))?;
        template.render(context).map_err(|error| ChatTemplateError::Refused(described(&error)))
    }
}

/// The message of `raise_exception` alone, or the error with the line where it happened.
fn described(error: &minijinja::Error) -> String {
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
