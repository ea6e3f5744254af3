//! Chat templates: messages and tools to the prompt's text, by the template inside the GGUF.
//!
//! Templates are written for Python's Jinja2 and come with the weights, from anywhere: they run in minijinja with
//! Python's methods, a limit of instructions, and no access to anything. [`Rendered`] says which part of the text
//! each message became, so that a replay can show who said what.

pub mod answer;
pub mod family;
mod messages;
mod offer;
mod probe;
mod python;
mod spans;
pub mod tools;

use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use chrono::{DateTime, Utc};
use family::Format;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value as Jinja, context};
use probe::Abilities;
use serde_json::{Map, Value};

/// The template of a model that has none.
const CHATML: &str = "{% for message in messages %}\
    {{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Instructions that one rendering may take; a conversation of a thousand messages takes some 50 000.
const FUEL: u64 = 5_000_000;

const NAME: &str = "chat";

/// A compiled chat template.
#[derive(Debug)]
pub struct Template {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    source: String,
    /// Whether it is our fallback, because the model has none.
    fallback: bool,
    format: Format,
    abilities: Abilities,
}

/// What is rendered besides the messages.
#[derive(Debug, Clone)]
pub struct Options {
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

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The prompt's text.
    pub text: String,
    /// Which bytes of it each message's content became, in order; empty where the template changed a content
    /// beyond trimming.
    pub parts: Vec<Part>,
    /// Whether it ends within a thought, so that the answer begins in one.
    pub thinking: bool,
}

/// What a message's content became.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The message's role.
    pub role: String,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

/// Why a conversation has no prompt.
#[derive(Debug, thiserror::Error)]
pub enum Error {
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

impl Template {
    /// Compiles a model's template; `None` means the `ChatML` fallback. `bos` and `eos` are the texts of those tokens.
    ///
    /// # Errors
    /// [`Error::Template`].
    pub fn new(source: Option<&str>, bos: &str, eos: &str) -> Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| Error::Template(error.to_string()))?);
        environment.set_fuel(Some(FUEL));
        // The text is a prompt, not a page.
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut environment);
        let text = source.unwrap_or(CHATML);
        environment.add_template_owned(NAME, text.to_owned()).map_err(|error| Error::Template(described(&error)))?;
        let mut template = Self {
            environment,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
            source: text.to_owned(),
            fallback: source.is_none(),
            format: Format::of(text),
            abilities: Abilities { tools: true, system: true, arguments_as_text: false },
        };
        template.abilities = Abilities::of(&template, text);
        if !template.abilities.tools {
            template.format = template.format.without_own_tools();
        }
        Ok(template)
    }

    /// The template's text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// How the model's answers are written.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
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
    /// [`Error::Message`] and [`Error::Refused`].
    pub fn render(&self, messages: &Value, options: &Options) -> Result<Rendered, Error> {
        let mut messages = messages::normalised(messages)?;
        let last = if options.continue_final { Some(messages::to_continue(&mut messages)?) } else { None };
        if !self.abilities.tools {
            messages = offer::spelt_out(messages);
            if let Some(tools) = &options.tools {
                offer::described(&mut messages, tools, self.abilities.system);
            }
        }
        messages::adapt(&mut messages, &self.format, self.abilities.arguments_as_text, &self.source);
        let mut options = options.clone();
        options.add_generation_prompt |= last.is_some();
        let text = self.text(&messages, &options)?;
        let (marked, contents) = spans::mark(&messages);
        let parts = match self.text(&marked, &options) {
            Ok(frame) => spans::locate(&text, &frame, &contents).unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        let (open, close) = self.format.thought;
        let thinking = options.add_generation_prompt && text.trim_end().ends_with(open);
        let mut rendered = Rendered { text, parts, thinking };
        if thinking && options.variables.get("enable_thinking") == Some(&Value::Bool(false)) {
            // The template opens a thought, whatever it is told.
            rendered.text.push('\n');
            rendered.text.push_str(close);
            rendered.text.push_str("\n\n");
            rendered.thinking = false;
        }
        if let Some(last) = last {
            rendered.continue_with(&last, (open, close));
        }
        Ok(rendered)
    }

    fn text(&self, messages: &[Value], options: &Options) -> Result<String, Error> {
        let now = options.now;
        let tools = options.tools.as_ref().map_or(Jinja::from(()), |tools| Jinja::from(Serde(tools)));
        let variables = Jinja::from(Serde(&options.variables));
        let context = context! {
            messages => Jinja::from(Serde(messages)),
            tools,
            add_generation_prompt => options.add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            strftime_now => Jinja::from_function(move |format: String| python::strftime(now, &format)),
            ..variables
        };
        let template = self.environment.get_template(NAME).map_err(|error| Error::Template(described(&error)))?;
        template.render(context).map_err(|error| Error::Refused(described(&error)))
    }
}

impl Rendered {
    /// Appends what the assistant has said already.
    fn continue_with(&mut self, last: &messages::Last, (open, close): (&str, &str)) {
        if !last.reasoning.is_empty() || self.thinking {
            if !self.thinking {
                self.text.push_str(open);
                self.text.push('\n');
            }
            self.text.push_str(&last.reasoning);
            self.thinking = last.content.is_empty();
            if !self.thinking {
                self.text.push('\n');
                self.text.push_str(close);
                self.text.push_str("\n\n");
            }
        }
        let start = self.text.len();
        self.text.push_str(&last.content);
        if !self.parts.is_empty() && !last.content.is_empty() {
            self.parts.push(Part { role: "assistant".into(), start, end: self.text.len() });
        }
    }

    /// The tokens, and which of them came from whom; what belongs to no message is the template's.
    #[must_use]
    pub fn tokenize(&self, vocabulary: &Vocabulary) -> (Vec<TokenId>, Vec<Span>) {
        let mut tokens = vocabulary.encode(&self.text, true, true);
        // A template that writes BOS itself would otherwise get two.
        if let Some(bos) = vocabulary.special().bos
            && tokens.starts_with(&[bos, bos])
        {
            tokens.remove(0);
        }
        let spans = spans::over_tokens(&self.text, &self.parts, &tokens, vocabulary);
        (tokens, spans)
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
mod tests;
