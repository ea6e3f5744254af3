//! Parser of answers in channels, as in gpt-oss: `analysis` is reasoning, `final` is text, and a message with a
//! recipient is a tool call.

use super::json::{ByteEffect, NotJson, Scanner};
use super::output::AnswerOutput;
use super::{AnswerFormat, TextEnd, len_before_partial_marker};
use serde_json::Value;
use std::ops::Range;

pub(in crate::model::chat) const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";
const CONSTRAIN: &str = "<|constrain|>";

/// The header of the final message.
pub(in crate::model::chat) const FINAL_HEADER: &str = "<|channel|>final<|message|>";

/// All markers.
pub(in crate::model::chat) const MARKERS: [&str; 7] = [START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN];

/// The markers that end a message; the first three are part of it.
const ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];

/// The text before a recipient.
const RECIPIENT: &str = "to=";
/// The continuation of a header that the prompt started.
const CONTINUATION: &str = " to=";

/// Maximum length of a header.
const MAX_HEADER: usize = 500;

/// The parser of one answer.
#[derive(Debug, Default)]
pub(super) struct ChannelParser {
    at: usize,
    body: Option<Body>,
    /// Byte ranges of complete reasoning parts.
    reasoning_ranges: Vec<Range<usize>>,
}

#[derive(Debug)]
struct Body {
    /// Start of its header.
    header: usize,
    message: ChannelMessage,
}

#[derive(Debug)]
enum ChannelMessage {
    Reasoning,
    Text,
    Call {
        /// Start of the part of the header that makes it a call.
        from: usize,
        scanner: Scanner,
        complete: bool,
    },
    /// A call beyond the permitted number.
    Suppressed {
        /// Start of the part of the header that makes it a call.
        from: usize,
    },
}

impl ChannelParser {
    pub(super) fn parse(
        &mut self,
        answer_format: &AnswerFormat,
        text: &str,
        text_end: TextEnd,
        output: &mut AnswerOutput,
    ) {
        loop {
            let has_changed = if self.body.is_some() {
                self.parse_body(text, text_end, output)
            } else {
                self.parse_header(answer_format, text, text_end, output)
            };
            if !has_changed {
                return;
            }
        }
    }

    /// Returns the byte ranges of reasoning in a text of this length.
    pub(super) fn reasoning_ranges(&self, end: usize) -> Vec<Range<usize>> {
        let open = self.body.as_ref().filter(|body| matches!(body.message, ChannelMessage::Reasoning));
        self.reasoning_ranges.iter().cloned().chain(open.map(|body| body.header..end)).collect()
    }

    /// Returns the end of the text that cannot be part of a call. In a call or an incomplete header, it is the start of
    /// the part of the header that makes it a call.
    pub(super) fn unsent_from(&self, text: &str) -> usize {
        match &self.body {
            None => self.at + call_start(&text[self.at..]),
            Some(Body { message: ChannelMessage::Call { from, .. } | ChannelMessage::Suppressed { from }, .. }) => {
                *from
            }
            Some(_) => self.at,
        }
    }

    fn parse_header(
        &mut self,
        answer_format: &AnswerFormat,
        text: &str,
        text_end: TextEnd,
        output: &mut AnswerOutput,
    ) -> bool {
        let rest = &text[self.at..];
        if rest.is_empty() {
            return false;
        }
        let begins = |marker: &str| rest.starts_with(marker) || (!text_end.is_final() && marker.starts_with(rest));
        // The prompt contains the start of the first message's header.
        let continues = self.at == 0 && begins(CONTINUATION);
        if !begins(START) && !begins(CHANNEL) && !continues {
            // Text without a header, e.g. forced by a mod.
            self.body = Some(Body { header: self.at, message: ChannelMessage::Text });
            return true;
        }
        let Some(len) = rest.find(MESSAGE).filter(|&len| len <= MAX_HEADER) else {
            let may_continue = rest.len() <= MAX_HEADER + MESSAGE.len();
            if may_continue && !text_end.is_final() {
                return false;
            }
            if may_continue && text_end == TextEnd::Cut && !continues {
                self.at = text.len();
                return false;
            }
            let markers = [START, CHANNEL, CONTINUATION];
            let marker = markers.into_iter().find(|marker| rest.starts_with(marker)).unwrap_or_default();
            let from = self.at;
            self.at += marker.len().min(rest.len());
            output.push_content(&text[from..self.at]);
            self.body = Some(Body { header: from, message: ChannelMessage::Text });
            return true;
        };
        let header = &rest[..len];
        let header_from = self.at;
        let call_from = header_from + call_start(header);
        let mut from = self.at + len + MESSAGE.len();
        let recipient =
            header.split(RECIPIENT).nth(1).map(|rest| rest.split(['<', ' ', '\n']).next().unwrap_or_default());
        let recipient = recipient.map(|name| name.strip_prefix("functions.").unwrap_or(name)).filter(|n| !n.is_empty());
        let channel = header.split(CHANNEL).nth(1).unwrap_or_default().trim_start();
        let parses_calls = !answer_format.tools.is_empty();
        let message = match recipient {
            Some(_) if parses_calls && answer_format.single && !output.message.calls.is_empty() => {
                ChannelMessage::Suppressed { from: call_from }
            }
            Some(name) if parses_calls => {
                output.begin_call(name);
                ChannelMessage::Call { from: call_from, scanner: Scanner::new(), complete: false }
            }
            Some(_) => {
                // The client offered no functions: the call stays text.
                from = header_from;
                ChannelMessage::Text
            }
            None if channel.starts_with("analysis") && answer_format.separates_reasoning => {
                // A blank line separates the messages of one channel.
                if !output.message.reasoning.is_empty() {
                    output.push_reasoning("\n\n");
                }
                ChannelMessage::Reasoning
            }
            None if channel.starts_with("analysis") => {
                from = header_from;
                ChannelMessage::Text
            }
            None => {
                if !output.message.content.is_empty() {
                    output.push_content("\n\n");
                }
                ChannelMessage::Text
            }
        };
        // If a header stays text, so do its markers.
        self.at = from;
        if from == header_from {
            let shown = &text[header_from..header_from + len + MESSAGE.len()];
            output.push_content(shown);
            self.at = header_from + shown.len();
        }
        self.body = Some(Body { header: header_from, message });
        true
    }

    fn parse_body(&mut self, text: &str, text_end: TextEnd, output: &mut AnswerOutput) -> bool {
        let Some(body) = &mut self.body else { return false };
        let rest = &text[self.at..];
        let end = ENDS.iter().filter_map(|marker| rest.find(marker).map(|at| (at, *marker))).min();
        let upto = match end {
            Some((at, _)) => at,
            None if text_end.is_final() => rest.len(),
            None => len_before_partial_marker(rest, ENDS),
        };
        let part = &rest[..upto];
        let mut retracted = false;
        match &mut body.message {
            ChannelMessage::Reasoning => output.push_reasoning(part),
            ChannelMessage::Text => output.push_content(part),
            ChannelMessage::Suppressed { .. } => {}
            ChannelMessage::Call { scanner, complete, .. } => {
                retracted = !parse_arguments(scanner, complete, part, output);
            }
        }
        self.at += upto;
        let ended = end.is_some() || text_end.is_final();
        if ended
            && !retracted
            && let ChannelMessage::Call { complete, .. } = &body.message
        {
            let arguments = output.message.calls.last().map_or("", |call| call.arguments.as_str());
            let cut = text_end == TextEnd::Cut && end.is_none();
            retracted = if *complete { serde_json::from_str::<Value>(arguments).is_err() } else { !cut };
            if *complete && !retracted {
                output.end_call();
            }
        }
        if retracted {
            output.retract_call();
            output.malformed_calls += 1;
            output.push_content(&text[body.header..self.at]);
            body.message = ChannelMessage::Text;
            return true;
        }
        if let Some((_, marker)) = end {
            if marker != START && marker != CHANNEL {
                self.at += marker.len();
            }
            if matches!(body.message, ChannelMessage::Reasoning) {
                self.reasoning_ranges.push(body.header..self.at);
            }
            self.body = None;
            return true;
        }
        false
    }
}

/// Returns the position in a header from which a call may differ from other messages: before its recipient or after the
/// marker of its channel, whichever is first; the start of a header that has neither.
fn call_start(header: &str) -> usize {
    let channel = header.find(CHANNEL).map(|at| at + CHANNEL.len());
    let recipient = header.find(RECIPIENT).map(|at| header[..at].trim_end().len());
    recipient.into_iter().chain(channel).min().unwrap_or(0)
}

/// Parses the next part of the arguments; returns false if they cannot become a JSON object.
fn parse_arguments(scanner: &mut Scanner, complete: &mut bool, part: &str, output: &mut AnswerOutput) -> bool {
    let mut begin = 0;
    for (at, byte) in part.bytes().enumerate() {
        if *complete || (output.message.calls.last().is_some_and(|call| call.arguments.is_empty()) && begin == at) {
            if byte.is_ascii_whitespace() {
                begin = if *complete { begin } else { at + 1 };
                continue;
            }
            if *complete || byte != b'{' {
                return false;
            }
        }
        match scanner.push(byte) {
            Err(NotJson) => return false,
            Ok(ByteEffect::End) => {
                *complete = true;
                output.push_arguments(&part[begin..=at]);
            }
            Ok(_) => {}
        }
    }
    if !*complete {
        output.push_arguments(&part[begin..]);
    }
    true
}
