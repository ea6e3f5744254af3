//! `tool-guard`: checks tool calls, for clients that must not receive invalid ones.

use super::describe;
use super::support::{
    answer_text::AnswerText,
    avoided::AvoidedTokens,
    config::{self, schema},
    sequence::SequenceTracker,
};
use crate::events::{EventType, LogLevel, TokenId};
use crate::model::chat::answer::{AnswerDelta, AnswerFormat, AnswerParser, ToolDefinition};
use crate::model::complete_prefix;
use crate::mods::{
    Action, Call, CallEvent, EventSet, LogitEdit, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
    schema_check,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `tool-guard`: removes invalid tool calls and samples them again.
pub struct ToolGuard;

impl ModFactory for ToolGuard {
    fn describe(&self) -> ModDescription {
        describe(
            "tool-guard",
            "Checks tool calls while they are written, and removes invalid ones.",
            "Calls are parsed in the format of the model's family. If the name is unknown or blocked, if the \
             arguments do not match the tool's JSON schema, or if a call cannot be parsed, it is removed and drawn \
             again at `temperature`. After `max_retries` retries in one answer, the field `then` decides: the call is replaced with \
             text, the run ends with an error, or the call is kept with a warning. If a constraint such as `tool_choice` \
             \"required\" permits only a call, the call is kept instead of replaced with text. The stream holds a call back until it is \
             checked.",
            json!({"tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}], "block": ["delete"]}),
            schema(
                &[],
                json!({
                    "tools": {"type": "array", "items": {"type": "object"}, "minItems": 1,
                        "description": "Tools in OpenAI's format; by default those of the request."},
                    "block": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1,
                        "description": "Names of tools that must not be called."},
                    "max_retries": {"type": "integer", "minimum": 0, "maximum": 100, "default": 3,
                        "description": "Maximum retries in one answer."},
                    "temperature": {"type": "number", "minimum": 0, "maximum": 10, "default": 1.0,
                        "description": "Temperature of the retries; at 0 all attempts are equal."},
                    "then": {"enum": ["text", "error", "keep"], "default": "text",
                        "description": "Treatment of an invalid call once the retries are used up."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let config: GuardConfig = config::parse(self, config)?;
        let tools = match &config.tools {
            Some(tools) => parse_tools(tools)?,
            None if !run.answer_format.tools.is_empty() => run.answer_format.tools.clone(),
            None => return Err("`tools` is missing, and the request has no tools".into()),
        };
        let answer_format = Arc::new(AnswerFormat { tools, ..(*run.answer_format).clone() });
        Ok(Box::new(Guard {
            parser: AnswerParser::new(Arc::clone(&answer_format)),
            answer_format,
            config,
            tracker: SequenceTracker::default(),
            answer: AnswerText::new(run),
            parsed_bytes: 0,
            is_finished: false,
            tolerated_until: 0,
            retry: RetryState::default(),
        }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct GuardConfig {
    tools: Option<Vec<Value>>,
    #[serde(default)]
    block: Vec<String>,
    max_retries: usize,
    temperature: f32,
    then: Fallback,
}

/// Treatment of an invalid call once the retries are used up.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Fallback {
    /// Text replaces the call.
    Text,
    /// The run ends with an error.
    Error,
    /// The call is kept.
    Keep,
}

/// Parses tools in OpenAI's format, with or without the enclosing function object.
fn parse_tools(list: &[Value]) -> Result<Vec<ToolDefinition>, String> {
    let expected =
        "`tools` must be a list of {\"type\": \"function\", \"function\": {\"name\": …, \"parameters\": {…}}}";
    list.iter()
        .map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function.get("name").and_then(Value::as_str).filter(|name| !name.is_empty());
            let name = name.ok_or_else(|| format!("{expected}, got {tool} in it"))?;
            let parameters = function.get("parameters").cloned().unwrap_or_else(|| json!({}));
            if !parameters.is_object() {
                return Err(format!(
                    "`tools`: the parameters of '{name}' must be a JSON schema (an object), got {parameters}"
                ));
            }
            Ok(ToolDefinition { name: name.to_owned(), parameters, strict: false })
        })
        .collect()
}

struct Guard {
    parser: AnswerParser,
    answer_format: Arc<AnswerFormat>,
    config: GuardConfig,
    tracker: SequenceTracker,
    answer: AnswerText,
    /// Bytes of the text that were parsed.
    parsed_bytes: usize,
    /// True if the end of the answer was parsed.
    is_finished: bool,
    /// Position in bytes before which invalid calls are kept.
    tolerated_until: usize,
    retry: RetryState,
}

/// State of the retries of an answer.
#[derive(Default)]
struct RetryState {
    count: usize,
    /// Position in tokens from which a call is sampled again.
    from: Option<usize>,
    /// Tokens that are avoided at a position in tokens, so that no call begins there.
    avoided: Option<AvoidedTokens>,
    /// Expected length of the answer in tokens after a Backtrack.
    expected_length: Option<usize>,
}

/// An invalid tool call.
struct InvalidCall {
    /// Byte at which it begins.
    from: usize,
    reason: String,
}

/// Result of parsing new text.
#[derive(Default)]
struct ParsedText {
    /// The first invalid call.
    invalid: Option<InvalidCall>,
    /// True if the text completes a call or contains text other than calls.
    has_answer: bool,
}

impl Guard {
    fn update(&mut self, call: &Call<'_>) {
        let delta = self.tracker.update(call);
        let remaining_bytes = self.answer.apply(&delta, &call.run.vocabulary);
        let length = self.tracker.token_count();
        // If another mod's action won, the invalid call remains and is parsed again.
        let backtrack_was_superseded =
            self.retry.expected_length.take().is_some_and(|expected| length - delta.added.len() > expected);
        if backtrack_was_superseded || remaining_bytes < self.parsed_bytes || (delta.removed > 0 && self.is_finished) {
            self.parser = AnswerParser::new(Arc::clone(&self.answer_format));
            self.is_finished = false;
            self.tolerated_until = self.tolerated_until.min(remaining_bytes);
            self.parsed_bytes =
                if backtrack_was_superseded { 0 } else { complete_prefix(&self.answer.bytes()[..remaining_bytes]) };
            self.parser.push(&self.answer.text(0, self.parsed_bytes));
        }
        self.retry.from.take_if(|from| *from > length);
        self.retry.avoided.take_if(|avoided| avoided.position() > length);
        if let Some(avoided) = &mut self.retry.avoided {
            avoided.observe(call);
        }
    }

    /// Parses new text. `is_complete` is true at the end of the answer.
    fn parse(&mut self, is_complete: bool) -> ParsedText {
        let end = self.parsed_bytes + complete_prefix(&self.answer.bytes()[self.parsed_bytes..]);
        let text = self.answer.text(self.parsed_bytes, end);
        let mut parsed = ParsedText::default();
        for c in text.chars() {
            self.parsed_bytes += c.len_utf8();
            self.parse_piece(&mut parsed, |parser| parser.push(c.encode_utf8(&mut [0; 4])));
        }
        if is_complete && !self.is_finished {
            self.is_finished = true;
            self.parse_piece(&mut parsed, AnswerParser::finish);
        }
        parsed
    }

    /// Parses one character or the end of the answer with this function, and adds the result to `parsed`.
    fn parse_piece(&mut self, parsed: &mut ParsedText, parse: impl FnOnce(&mut AnswerParser) -> Vec<AnswerDelta>) {
        // The call that this piece completes begins before it.
        let (from, malformed_calls) = (self.parser.unsent_from(), self.parser.malformed_calls());
        let deltas = parse(&mut self.parser);
        parsed.has_answer |= deltas
            .iter()
            .any(|delta| matches!(delta, AnswerDelta::CallEnd | AnswerDelta::Content(_) | AnswerDelta::Reasoning(_)));
        if parsed.invalid.is_none() {
            let is_malformed = self.parser.malformed_calls() > malformed_calls;
            parsed.invalid = self.find_invalid(&deltas, from, is_malformed);
        }
    }

    /// Returns the call that begins at `from` or after spaces there, if it is invalid.
    fn find_invalid(&self, deltas: &[AnswerDelta], from: usize, is_malformed: bool) -> Option<InvalidCall> {
        let problem = deltas.iter().find_map(|delta| match delta {
            AnswerDelta::Call(name) => self.name_problem(name),
            AnswerDelta::CallEnd => self.arguments_problem(),
            _ => None,
        });
        let reason = problem.or_else(|| is_malformed.then(|| "the call cannot be parsed".to_owned()))?;
        // Spaces before a call may remain. In channels, a space is part of the header.
        let rest = &self.answer.bytes()[from..];
        let is_channels = self.answer_format.syntax.is_channels();
        let spaces = if is_channels { 0 } else { rest.len() - rest.trim_ascii_start().len() };
        let from = from + spaces;
        (from >= self.tolerated_until).then_some(InvalidCall { from, reason })
    }

    fn name_problem(&self, name: &str) -> Option<String> {
        if self.config.block.iter().any(|blocked| blocked == name) {
            return Some(format!("the tool '{name}' is blocked"));
        }
        let known: Vec<&str> = self.answer_format.tools.iter().map(|tool| tool.name.as_str()).collect();
        (!known.contains(&name)).then(|| format!("unknown tool '{name}'; known tools: {}", known.join(", ")))
    }

    fn arguments_problem(&self) -> Option<String> {
        let call = self.parser.message().calls.last()?;
        let tool = self.answer_format.tools.iter().find(|tool| tool.name == call.name)?;
        let problem = match serde_json::from_str(&call.arguments) {
            Ok(arguments) => schema_check::first_error(&arguments, &tool.parameters)?,
            Err(error) => format!("not valid JSON: {error}"),
        };
        Some(format!("the arguments of '{}' are invalid: {problem}", call.name))
    }

    fn respond(&mut self, invalid: &InvalidCall, call: &Call<'_>) -> Reply {
        let cut = self.answer.cut(invalid.from);
        let position = self.tracker.token_count() - cut.tokens;
        let tokens = call.run.vocabulary.encode_plain_continuation(&cut.before);
        let call_start = position + tokens.len();
        self.retry.avoided.take_if(|avoided| avoided.position() != call_start);
        let may_retry = self.retry.count < self.config.max_retries;
        let is_unavoidable = self.retry.avoided.as_ref().is_some_and(AvoidedTokens::is_unavoidable);
        let (level, is_removed, outcome) = match self.config.then {
            _ if may_retry => (LogLevel::Info, true, "retrying"),
            Fallback::Keep => (LogLevel::Warning, false, "keeping it"),
            Fallback::Error => {
                let (count, reason) = (self.retry.count, &invalid.reason);
                return Action::error(format!("tool-guard: gave up after {count} retries: {reason}")).into();
            }
            Fallback::Text if is_unavoidable => {
                (LogLevel::Warning, false, "keeping it, because a constraint permits only a call")
            }
            Fallback::Text => (LogLevel::Warning, true, "replacing it with text"),
        };
        let message = format!("{}; {outcome}", invalid.reason);
        if !is_removed {
            self.tolerated_until = self.parsed_bytes.max(invalid.from + 1);
            return Reply::noop().with_log(level, message);
        }
        let generated = call.generated_in_context();
        if may_retry {
            self.retry.count += 1;
            self.retry.from = Some(call_start);
        } else {
            // If the call began within a token, that token is replaced by its text before the call.
            let first = generated.len().checked_sub(cut.tokens).map(|index| generated[index]);
            let first = if cut.before.is_empty() { first } else { self.first_of_call(invalid.from, call) };
            self.retry.from = None;
            let avoided = self.retry.avoided.get_or_insert_with(|| AvoidedTokens::new(call_start));
            first.into_iter().for_each(|token| avoided.insert(token));
        }
        self.retry.expected_length = Some(position);
        Reply::from(Action::backtrack(cut.tokens, tokens)).with_log(level, message)
    }

    /// Returns the first token of the call: its text, from the byte `from` on, is encoded without the text before it.
    fn first_of_call(&self, from: usize, call: &Call<'_>) -> Option<TokenId> {
        let text = String::from_utf8_lossy(&self.answer.bytes()[from..]).into_owned();
        call.run.vocabulary.encode_markup_continuation(&text).first().copied()
    }
}

impl ModInstance for Guard {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass, EventType::Added])
    }

    /// Returns the number of tokens from the start of a call, or of a possible call.
    fn holdback(&self) -> usize {
        self.answer.cut(self.parser.unsent_from()).tokens
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        self.update(call);
        let length = self.tracker.token_count();
        Some(match call.event {
            CallEvent::Added { .. } => {
                let parsed = self.parse(call.ends_answer());
                if let Some(invalid) = parsed.invalid {
                    self.respond(&invalid, call)
                } else {
                    // A retry is complete after a valid call or text.
                    self.retry.from.take_if(|from| parsed.has_answer && *from < length);
                    Reply::noop()
                }
            }
            CallEvent::ForwardPass { .. } => match (&self.retry.avoided, self.retry.from) {
                (Some(avoided), _) if avoided.position() == length => avoided.action().into(),
                (_, Some(_)) => {
                    let temperature = Some(self.config.temperature);
                    Action::AdjustedLogits { edit: LogitEdit::Keep, temperature }.into()
                }
                _ => Reply::noop(),
            },
            _ => Reply::noop(),
        })
    }
}

#[cfg(test)]
mod tests;
