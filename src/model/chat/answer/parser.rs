//! The parser of an answer: one state for each kind of text.

mod blocks;

use super::call;
use super::channel::ChannelParser;
use super::output::{AnswerOutput, difference};
use super::{AnswerDelta, AnswerFormat, AnswerMessage, TextEnd, len_before_partial_marker};
use crate::model::chat::pattern::{PatternMatch, match_literal};
use crate::model::chat::syntax::ReasoningMarkers;
use blocks::Block;
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
enum State {
    /// Reasoning may start.
    Begin,
    /// Inside reasoning. The search for its end continues at `search`.
    Reasoning { search: usize },
    /// Whitespace after reasoning or a call, which is dropped.
    Gap,
    /// Text. The search for markers continues at `search`; at the `start` of a text, bare calls are possible.
    Text { search: usize, start: bool },
    /// Tool calls.
    Block(Box<Block>),
    /// An answer in channels.
    Channels(ChannelParser),
}

/// A marker in the text of an answer.
#[derive(Debug)]
struct Marker {
    text: String,
    /// The form of the calls after it; `None` if the marker is only removed from the text.
    form: Option<usize>,
}

/// The incremental parser of one answer.
#[derive(Debug)]
pub struct AnswerParser {
    answer_format: Arc<AnswerFormat>,
    markers: Vec<Marker>,
    text: String,
    /// End of the text that was sent or skipped.
    at: usize,
    /// End of the whitespace after `at`.
    blank: usize,
    state: State,
    output: AnswerOutput,
    /// Byte range of reasoning in the text; its end is unknown until it is complete.
    reasoning_range: Option<(usize, Option<usize>)>,
}

impl AnswerParser {
    /// Creates a parser at the start of an answer.
    #[must_use]
    pub fn new(answer_format: Arc<AnswerFormat>) -> Self {
        let state = if answer_format.syntax.is_channels() {
            State::Channels(ChannelParser::default())
        } else if !answer_format.separates_reasoning {
            State::Text { search: 0, start: true }
        } else if answer_format.thinking {
            State::Reasoning { search: 0 }
        } else {
            State::Begin
        };
        let reasoning_range = matches!(state, State::Reasoning { .. }).then_some((0, None));
        let ignored_markers =
            answer_format.syntax.ignored_markers.iter().map(|text| Marker { text: text.clone(), form: None });
        let forms = if answer_format.tools.is_empty() { &[][..] } else { &answer_format.syntax.calls };
        let calls = forms
            .iter()
            .enumerate()
            .filter_map(|(form, calls)| Some(Marker { text: calls.marker()?.to_owned(), form: Some(form) }));
        let markers = calls.chain(ignored_markers).collect();
        Self {
            answer_format,
            markers,
            text: String::new(),
            at: 0,
            blank: 0,
            state,
            output: AnswerOutput::default(),
            reasoning_range,
        }
    }

    /// Parses the next piece of text. Returns the changes of the message.
    pub fn push(&mut self, text: &str) -> Vec<AnswerDelta> {
        self.text.push_str(text);
        self.advance(TextEnd::More);
        self.output.take_deltas()
    }

    /// Removes the last `chars` characters of the text. Returns the changes of the message.
    pub fn retract(&mut self, chars: usize) -> Vec<AnswerDelta> {
        let keep = self.text.char_indices().rev().nth(chars.saturating_sub(1)).map_or(0, |(at, _)| at);
        let keep = if chars == 0 { self.text.len() } else { keep };
        let mut parser = Self::new(Arc::clone(&self.answer_format));
        parser.text.push_str(&self.text[..keep]);
        parser.advance(TextEnd::More);
        parser.output.take_deltas();
        let deltas = difference(&self.output.message, &parser.output.message);
        *self = parser;
        deltas
    }

    /// Ends a complete answer. Returns the last changes of the message.
    pub fn finish(&mut self) -> Vec<AnswerDelta> {
        self.advance(TextEnd::Complete);
        self.output.take_deltas()
    }

    /// Ends an answer that a limit cut: an incomplete call stays a call. Returns the last changes of the message.
    pub fn finish_cut(&mut self) -> Vec<AnswerDelta> {
        self.advance(TextEnd::Cut);
        self.output.take_deltas()
    }

    /// Returns the answer parsed so far.
    #[must_use]
    pub fn message(&self) -> &AnswerMessage {
        &self.output.message
    }

    /// Returns the byte ranges of reasoning in the text, including the markers.
    #[must_use]
    pub fn reasoning_ranges(&self) -> Vec<Range<usize>> {
        let end = self.text.len();
        match (&self.state, self.reasoning_range) {
            (State::Channels(channels), _) => channels.reasoning_ranges(end),
            (_, Some((from, upto))) => vec![from..upto.unwrap_or(end)],
            (_, None) => Vec::new(),
        }
    }

    /// Returns the position after the sent text: in a block of calls, the end of the last complete call; in a call on a
    /// channel, the start of the part of its header that makes it a call; otherwise the start of text that may become a
    /// marker.
    #[must_use]
    pub fn unsent_from(&self) -> usize {
        match &self.state {
            State::Block(block) => block.unsent_from(),
            State::Channels(channels) => channels.unsent_from(&self.text),
            _ => self.at,
        }
    }

    /// Returns the number of calls, each introduced by a marker, that could not be parsed and became text.
    #[must_use]
    pub fn malformed_calls(&self) -> usize {
        self.output.malformed_calls
    }

    /// Parses as much text as possible. The function of each state returns true if it made progress, and false if it
    /// needs more text.
    fn advance(&mut self, text_end: TextEnd) {
        loop {
            let has_progressed = match &self.state {
                State::Begin => self.parse_begin(text_end),
                State::Reasoning { search } => self.parse_reasoning(*search, text_end),
                State::Gap => self.parse_gap(text_end),
                State::Text { search, start } => self.parse_text(*search, *start, text_end),
                State::Block(_) => self.parse_block(text_end),
                State::Channels(_) => self.parse_channels(text_end),
            };
            if !has_progressed {
                return;
            }
        }
    }

    fn parse_begin(&mut self, text_end: TextEnd) -> bool {
        let from = self.skip_blank();
        let answer_format = Arc::clone(&self.answer_format);
        let ReasoningMarkers { open, close } = &answer_format.syntax.reasoning_markers;
        let rest = &self.text[from..];
        match (match_literal(rest, open), match_literal(rest, close)) {
            (PatternMatch::Whole(len), _) if len > 0 => {
                self.at = from + len;
                self.reasoning_range = Some((from, None));
                self.state = State::Reasoning { search: self.at };
            }
            (PatternMatch::Partial, _) | (_, PatternMatch::Partial) if !text_end.is_final() => return false,
            (_, PatternMatch::Whole(len)) => {
                // With thinking disabled, some prompts leave the end marker to the model.
                self.at = from + len;
                self.state = State::Gap;
            }
            _ => self.state = State::Text { search: 0, start: true },
        }
        true
    }

    fn parse_reasoning(&mut self, search: usize, text_end: TextEnd) -> bool {
        let answer_format = Arc::clone(&self.answer_format);
        let ReasoningMarkers { open, close } = &answer_format.syntax.reasoning_markers;
        if self.output.message.reasoning.is_empty() {
            let from = self.skip_blank();
            // Some models repeat the start marker that the prompt already contains.
            let may_open = answer_format.thinking && !open.is_empty() && self.text[..self.at].trim().is_empty();
            match match_literal(&self.text[from..], open) {
                PatternMatch::Whole(len) if may_open => {
                    self.at = from + len;
                    return true;
                }
                PatternMatch::Partial if !text_end.is_final() => return false,
                _ => self.at = from,
            }
        }
        let search = search.max(self.at);
        if let Some(found) = self.text[search..].find(close.as_str()) {
            let end = search + found;
            self.output.push_reasoning(self.text[self.at..end].trim_end());
            self.at = end + close.len();
            self.reasoning_range = self.reasoning_range.map(|(from, _)| (from, Some(self.at)));
            self.state = State::Gap;
            return true;
        }
        let upto = if text_end.is_final() {
            self.text.len()
        } else {
            search + len_before_partial_marker(&self.text[search..], [close.as_str()])
        };
        let sent = if text_end.is_final() { upto } else { self.without_blank(upto) };
        self.output.push_reasoning(&self.text[self.at..sent]);
        self.at = sent;
        self.state = State::Reasoning { search: upto };
        false
    }

    fn parse_gap(&mut self, text_end: TextEnd) -> bool {
        self.at = self.skip_blank();
        let words = &self.text[self.at..];
        if words.is_empty() {
            return false;
        }
        // A model may repeat the end marker after its reasoning was ended by a limit.
        let close = &self.answer_format.syntax.reasoning_markers.close;
        match match_literal(words, close) {
            PatternMatch::Whole(len) if self.answer_format.separates_reasoning => {
                self.at += len;
                return true;
            }
            PatternMatch::Partial if self.answer_format.separates_reasoning && !text_end.is_final() => return false,
            _ => {}
        }
        self.state = State::Text { search: self.at, start: true };
        true
    }

    fn parse_text(&mut self, search: usize, start: bool, text_end: TextEnd) -> bool {
        if start
            && let Some(has_progressed) = self.skip_text_marker(text_end).or_else(|| self.parse_bare_call(text_end))
        {
            return has_progressed;
        }
        let search = search.max(self.at);
        let rest = &self.text[search..];
        let found = self
            .markers
            .iter()
            .filter_map(|marker| rest.find(&marker.text).map(|at| (search + at, marker.text.len(), marker.form)))
            .min_by_key(|&(at, len, form)| (at, std::cmp::Reverse(len), form));
        let upto = if text_end.is_final() {
            self.text.len()
        } else {
            search + len_before_partial_marker(rest, self.markers.iter().map(|marker| marker.text.as_str()))
        };
        // Another marker may start earlier, or be longer.
        if let Some((at, len, form)) = found.filter(|&(at, ..)| at < upto) {
            if let Some(form) = form {
                let from = self.without_blank(at);
                self.emit_content_upto(from);
                self.at = at;
                self.state = State::Block(Box::new(Block::new(form, from, at..at + len)));
            } else {
                if !start || self.skip_blank() < at {
                    self.emit_content_upto(at);
                }
                self.at = at + len;
                self.state = State::Text { search: self.at, start };
            }
            return true;
        }
        // Whitespace before a marker is not part of the text.
        let sent = if !text_end.is_final() && !self.markers.is_empty() { self.without_blank(upto) } else { upto };
        let start = start && sent == self.at;
        self.emit_content_upto(sent);
        self.state = State::Text { search: upto, start };
        false
    }

    /// Skips the marker before an answer's text. Returns `None` if the text does not start with it, and otherwise the
    /// same as the functions in [`Self::advance`].
    fn skip_text_marker(&mut self, text_end: TextEnd) -> Option<bool> {
        let answer_format = Arc::clone(&self.answer_format);
        let is_start = self.output.message.content.is_empty() && self.output.message.calls.is_empty();
        let text_marker = answer_format.syntax.text_marker.as_ref().filter(|_| is_start)?;
        let first = self.skip_blank();
        match match_literal(&self.text[first..], text_marker) {
            PatternMatch::Whole(len) => {
                self.at = first + len;
                self.state = State::Text { search: self.at, start: false };
                Some(true)
            }
            PatternMatch::Partial if !text_end.is_final() => Some(false),
            _ => None,
        }
    }

    /// Returns the first byte after the sent text that is not whitespace.
    fn skip_blank(&mut self) -> usize {
        self.blank = call::skip_space(&self.text, self.blank.max(self.at));
        self.blank
    }

    /// Returns the end of the text before `upto` without trailing whitespace.
    fn without_blank(&mut self, upto: usize) -> usize {
        let from = self.skip_blank().min(upto);
        let words = self.text[from..upto].trim_end();
        if words.is_empty() { self.at.min(upto) } else { from + words.len() }
    }

    fn parse_channels(&mut self, text_end: TextEnd) -> bool {
        let State::Channels(mut channels) = std::mem::replace(&mut self.state, State::Begin) else { return false };
        channels.parse(&self.answer_format, &self.text, text_end, &mut self.output);
        self.state = State::Channels(channels);
        false
    }

    fn emit_content_upto(&mut self, upto: usize) {
        if upto > self.at {
            self.output.push_content(&self.text[self.at..upto]);
            self.at = upto;
        }
    }
}
