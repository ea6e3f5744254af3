//! Rendering of messages to text.

use super::compile::{add_template, describe_error};
use super::limited_text::{LimitedText, MAX_TEXT_BYTES};
use super::{ChatTemplateError, RenderOptions, jinja_syntax, messages, python};
use crate::model::llama;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Value as Jinja, context};
use serde_json::Value;

/// Maximum instructions per rendering; a conversation of a thousand messages takes about 50,000. Lower for a template
/// with a long text, which it may repeat.
const FUEL: u64 = 5_000_000;

const NAME: &str = "chat";

/// A renderer of messages that are adapted to the template.
#[derive(Debug)]
pub(super) enum TemplateRenderer {
    /// A Jinja template.
    Jinja(Box<JinjaRenderer>),
    /// A template that is built into llama.cpp, by name.
    LlamaCpp(String),
}

/// A compiled Jinja template.
#[derive(Debug, Clone)]
pub(super) struct JinjaRenderer {
    environment: Environment<'static>,
    bos: String,
    eos: String,
    /// True if the template expects the content of a message as a list of parts instead of a string, as the templates of
    /// some vision models do.
    typed_content: bool,
}

impl TemplateRenderer {
    pub(super) fn text(&self, messages: &[Value], options: &RenderOptions) -> Result<String, ChatTemplateError> {
        match self {
            Self::Jinja(renderer) => renderer.text(messages, options),
            Self::LlamaCpp(name) => {
                let field = |message: &'_ Value, name: &str| message[name].as_str().unwrap_or_default().to_owned();
                let sent: Vec<(String, String)> =
                    messages.iter().map(|message| (field(message, "role"), field(message, "content"))).collect();
                let sent: Vec<(&str, &str)> =
                    sent.iter().map(|(role, content)| (role.as_str(), content.as_str())).collect();
                llama::apply_chat_template(name, &sent, options.add_generation_prompt).ok_or_else(|| {
                    ChatTemplateError::Rejected(format!("llama.cpp's template '{name}' cannot render them"))
                })
            }
        }
    }
}

impl JinjaRenderer {
    /// Compiles a template. `bos` and `eos` are the texts of those tokens. Also returns the string literals in the
    /// template.
    ///
    /// # Errors
    /// [`ChatTemplateError::Template`].
    pub(super) fn compile(text: &str, bos: &str, eos: &str) -> Result<(Self, Vec<String>), ChatTemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| ChatTemplateError::Template(error.to_string()))?);
        // The output is a prompt, not HTML.
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut environment);
        let mut translation = jinja_syntax::translate(text);
        // A block stores text outside of tags in a variable. To repeat all of this text takes at least 4 instructions, and to
        // repeat the text between two tags at least one.
        let max_bytes = 2 * python::budget::MAX_BYTES;
        let repetitions =
            (4 * max_bytes / translation.text_bytes.max(1)).max(max_bytes / translation.longest_text.max(1));
        environment.set_fuel(Some(FUEL.min(repetitions as u64)));
        let literals = std::mem::take(&mut translation.literals);
        add_template(&mut environment, NAME, translation)?;
        Ok((Self { environment, bos: bos.to_owned(), eos: eos.to_owned(), typed_content: false }, literals))
    }

    pub(super) fn with_typed_content(self, typed_content: bool) -> Self {
        Self { typed_content, ..self }
    }

    /// Returns a copy with at most this number of instructions per rendering.
    pub(super) fn with_max_fuel(&self, max: u64) -> Self {
        let mut renderer = self.clone();
        renderer.environment.set_fuel(self.environment.fuel().map(|fuel| fuel.min(max)));
        renderer
    }

    pub(super) fn text(&self, messages: &[Value], options: &RenderOptions) -> Result<String, ChatTemplateError> {
        let typed = self.typed_content.then(|| messages::with_typed_content(messages));
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
            self.environment.get_template(NAME).map_err(|error| ChatTemplateError::Template(describe_error(&error)))?;
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
