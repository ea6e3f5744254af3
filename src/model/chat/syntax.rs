//! The syntax of a model's answers: the markers of reasoning and text, and the forms of a tool call.

use super::answer::channel;
use super::family::ModelFamily;
use super::pattern::{Pattern, Placeholder};

/// The syntax of a model's answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerSyntax {
    /// The family.
    pub family: ModelFamily,
    /// Forms of a call. All are parsed; the first is used for required calls.
    pub calls: Vec<CallForm>,
    /// Markers before and after reasoning.
    pub reasoning_markers: ReasoningMarkers,
    /// Markers around ordinary text; they are not part of the text.
    pub ignored_markers: Vec<String>,
    /// Marker before an answer's text; it is not part of the text.
    pub text_marker: Option<String>,
    /// The template's role for a tool's result.
    pub tool_role: &'static str,
    /// Tokens that end a turn, in addition to the vocabulary's end-of-generation tokens.
    pub end_of_turn: &'static [&'static str],
}

/// Markers before and after reasoning; empty for none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReasoningMarkers {
    /// Text that begins reasoning.
    pub open: String,
    /// Text that ends it.
    pub close: String,
}

/// One form of a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallForm {
    /// Text before the first call of a block.
    pub open: Pattern,
    /// True if the calls of a block are in brackets.
    pub list: bool,
    /// Text before each call, up to its name or its object.
    pub before: Pattern,
    /// The name and the arguments.
    pub shape: CallShape,
    /// Text after each call.
    pub after: Pattern,
    /// Text between two calls.
    pub separator: Pattern,
    /// Text after the last call of a block.
    pub close: Pattern,
}

/// The name and the arguments of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallShape {
    /// An object with both.
    Json(Keys),
    /// The name, a text, then the arguments as an object.
    Named {
        /// Between name and arguments.
        middle: Pattern,
    },
    /// The name and each argument in tags.
    Tagged(Tags),
    /// `name{key:value}`, with strings in these quotes.
    Braces {
        /// Text before and after a string.
        quote: String,
    },
    /// `name(key=value)`, in Python's syntax.
    Python,
    /// An object, or code for a tool that runs it.
    Code,
    /// A message to the function, on a separate channel.
    Channel,
}

/// The keys of an object that is a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys {
    /// Key of the name; `None` if the name itself is the key of the arguments.
    pub name: Option<String>,
    /// Key of the arguments.
    pub arguments: String,
    /// The object up to the arguments.
    pub head: Pattern,
    /// The object after the arguments.
    pub tail: Pattern,
}

/// Tags around a call's arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tags {
    /// Text after the name.
    pub after_name: Pattern,
    /// Text before an argument's key.
    pub before_key: Pattern,
    /// Text between key and value.
    pub middle: Pattern,
    /// Text after the value, with [`Placeholder::Key`] in place of the key.
    pub after_value: String,
    /// Text for [`Placeholder::TypeName`] in `middle`, by JSON type; empty if `middle` has no such placeholder.
    pub type_names: Vec<(&'static str, String)>,
    /// True if a value is on separate lines.
    pub lines: bool,
}

impl AnswerSyntax {
    /// Returns true if answers are written in channels.
    #[must_use]
    pub fn is_channels(&self) -> bool {
        self.calls.iter().any(|form| form.shape == CallShape::Channel)
    }

    /// Returns the text that ends reasoning early. `earlier_ends` is the number of times that this text was used in the
    /// answer before: in channels, the message after the first end may be reasoning again, a later one may not.
    #[must_use]
    pub fn closing_text(&self, earlier_ends: usize) -> String {
        let close = &self.reasoning_markers.close;
        if self.is_channels() {
            let header = if earlier_ends > 0 { channel::FINAL_HEADER } else { "" };
            format!("{close}{}assistant{header}", channel::START)
        } else if close.starts_with("</") {
            format!("\n{close}\n\n")
        } else {
            close.clone()
        }
    }

    /// Returns the texts that structure an answer. A control token that is part of a marker belongs to the answer's
    /// text, unlike other control tokens.
    #[must_use]
    pub fn markers(&self) -> Vec<&str> {
        let mut markers: Vec<&str> = self.ignored_markers.iter().map(String::as_str).collect();
        for form in &self.calls {
            for pattern in [&form.open, &form.before, &form.after, &form.separator, &form.close] {
                markers.extend(pattern.texts());
            }
            match &form.shape {
                CallShape::Json(_) | CallShape::Python | CallShape::Code => {}
                CallShape::Named { middle } => markers.extend(middle.texts()),
                CallShape::Tagged(tags) => {
                    markers.extend(
                        [&tags.after_name, &tags.before_key, &tags.middle].into_iter().flat_map(Pattern::texts),
                    );
                    markers.extend(tags.after_value.split(Placeholder::Key.mark()));
                }
                CallShape::Braces { quote } => markers.push(quote),
                CallShape::Channel => markers.extend(channel::MARKERS),
            }
        }
        if !self.is_channels() {
            markers.extend([self.reasoning_markers.open.as_str(), self.reasoning_markers.close.as_str()]);
        }
        markers.retain(|marker| !marker.is_empty());
        markers
    }
}

impl ReasoningMarkers {
    /// Creates markers of these texts.
    #[must_use]
    pub fn new(open: &str, close: &str) -> Self {
        Self { open: open.to_owned(), close: close.to_owned() }
    }
}

impl CallForm {
    /// Creates a form whose blocks are a sequence of calls, with text before and after each.
    #[must_use]
    pub fn new(before: &str, shape: CallShape, after: &str, separator: &str) -> Self {
        Self {
            open: Pattern::default(),
            list: false,
            before: before.into(),
            shape,
            after: after.into(),
            separator: separator.into(),
            close: Pattern::default(),
        }
    }

    /// Adds text before and after the calls of a block.
    #[must_use]
    pub fn in_block(self, open: &str, close: &str) -> Self {
        Self { open: open.into(), close: close.into(), ..self }
    }

    /// Puts the calls of a block in brackets.
    #[must_use]
    pub fn in_list(self, open: &str, close: &str) -> Self {
        Self { list: true, ..self.in_block(open, close) }
    }

    /// Returns true if a call needs no marker at the start of an answer.
    #[must_use]
    pub fn is_bare(&self) -> bool {
        self.open.is_blank() && self.before.is_blank() && !self.list && self.shape != CallShape::Channel
    }

    /// Returns the text that identifies a block.
    #[must_use]
    pub fn marker(&self) -> Option<&str> {
        let patterns = [&self.open, &self.before, &self.separator];
        let first = patterns.into_iter().find(|pattern| !pattern.is_blank())?;
        first.marker().filter(|marker| marker.chars().any(|c| !matches!(c, ',' | ';' | '[')))
    }
}

impl CallShape {
    /// Creates an object with the name and the arguments under these keys, in this order.
    #[must_use]
    pub fn object(name: &str, arguments: &str) -> Self {
        Self::Json(Keys {
            name: Some(name.to_owned()),
            arguments: arguments.to_owned(),
            head: Pattern::new(&format!("{{\"{name}\": \"{}\", \"{arguments}\": ", Placeholder::Name.mark())),
            tail: "}".into(),
        })
    }

    /// Creates the shape of a name, a text, then the arguments as an object.
    #[must_use]
    pub fn named(middle: &str) -> Self {
        Self::Named { middle: middle.into() }
    }
}
