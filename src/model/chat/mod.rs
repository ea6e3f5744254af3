//! Chat templates: messages and tools to the prompt's text, by the template inside the GGUF.
//!
//! Templates are written for Python's Jinja2 and come with the weights, from anywhere: they run in minijinja with
//! Python's methods, a limit of instructions, and no access to anything. [`Rendered`] says which part of the text
//! each message became, so that a replay can show who said what.

mod python;
mod spans;

use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use chrono::{DateTime, Utc};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value as Jinja, context};
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
    /// Whether it is our fallback, because the model has none.
    fallback: bool,
}

/// What is rendered besides the messages.
#[derive(Debug, Clone)]
pub struct Options {
    /// The tools, in OpenAI's shape.
    pub tools: Option<Value>,
    /// Whether the text ends with the beginning of the assistant's answer.
    pub add_generation_prompt: bool,
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
        environment
            .add_template_owned(NAME, source.unwrap_or(CHATML).to_owned())
            .map_err(|error| Error::Template(described(&error)))?;
        Ok(Self { environment, bos: bos.to_owned(), eos: eos.to_owned(), fallback: source.is_none() })
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
        let messages = normalised(messages)?;
        let text = self.text(&messages, options)?;
        let (marked, contents) = spans::mark(&messages);
        let parts = match self.text(&marked, options) {
            Ok(frame) => spans::locate(&text, &frame, &contents).unwrap_or_default(),
            Err(_) => Vec::new(),
        };
        Ok(Rendered { text, parts })
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

/// Messages as templates expect them: `content` is a text (parts are joined), the arguments of tool calls are
/// objects.
fn normalised(messages: &Value) -> Result<Vec<Value>, Error> {
    let wrong = |pointer: String, message: String| Error::Message { pointer, message };
    let list = messages
        .as_array()
        .filter(|list| !list.is_empty())
        .ok_or_else(|| wrong("messages".into(), "messages must be a list with at least one message".into()))?;
    let mut normal = Vec::with_capacity(list.len());
    for (index, message) in list.iter().enumerate() {
        let at = |field: &str| format!("messages[{index}]{field}");
        let Some(fields) = message.as_object() else {
            return Err(wrong(at(""), format!("messages[{index}] must be an object with role and content")));
        };
        let role = fields.get("role").and_then(Value::as_str).filter(|role| !role.is_empty());
        if role.is_none() {
            return Err(wrong(at(".role"), format!("messages[{index}].role must be a text, e.g. \"user\"")));
        }
        let content = match fields.get("content") {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(Value::Array(parts)) => joined(parts, &at(".content"))?,
            Some(_) => {
                return Err(wrong(
                    at(".content"),
                    format!("messages[{index}].content must be a text or a list of parts"),
                ));
            }
        };
        let mut fields = fields.clone();
        fields.insert("content".into(), content.into());
        if let Some(Value::Array(calls)) = fields.get_mut("tool_calls") {
            for call in calls {
                if let Some(arguments) = call.pointer_mut("/function/arguments")
                    && let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok())
                    && object.is_object()
                {
                    *arguments = object;
                }
            }
        }
        normal.push(Value::Object(fields));
    }
    Ok(normal)
}

fn joined(parts: &[Value], pointer: &str) -> Result<String, Error> {
    let mut texts = Vec::with_capacity(parts.len());
    for part in parts {
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text") | None, Some(text)) => texts.push(text),
            (kind, _) => {
                return Err(Error::Message {
                    pointer: pointer.to_owned(),
                    message: format!(
                        "{pointer} has a part of type '{}'; the model takes text parts only",
                        kind.unwrap_or("?")
                    ),
                });
            }
        }
    }
    Ok(texts.join("\n"))
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
