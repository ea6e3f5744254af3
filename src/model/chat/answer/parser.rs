use super::call::{self, CallProgress, CallReader, NextCall};
use super::channel::Channels;
use super::{
    AnswerDelta, AnswerFormat, AnswerMessage, EndOfAnswer, Match, Retraction, difference, emit_content, emit_reasoning,
    len_before_partial_marker, match_literal, retract_calls,
};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
enum State {
    /// Reasoning may start.
    Begin,
    /// Inside reasoning. Its end is searched from `search` on.
    Reasoning { search: usize },
    /// White space after reasoning or a call is dropped.
    Gap,
    /// Text. Markers are searched from `search` on; at the `start` of a text, bare calls are possible.
    Text { search: usize, start: bool },
    /// Tool calls.
    Block(Box<Block>),
    /// An answer in channels.
    Channels(Channels),
}

#[derive(Debug)]
struct Block {
    /// Index of the form of the calls.
    form: usize,
    /// Bit set of the forms that were tried for the next call.
    tried: u64,
    /// Start of the text if no call follows.
    from: usize,
    /// The marker; empty for a bare call.
    marker: Range<usize>,
    /// End of the last call and of the text that belongs to it.
    last: Option<usize>,
    /// True if the calls are in a list.
    list: bool,
    reader: Option<CallReader>,
    /// True if the call exceeds the permitted number: it is parsed but not sent.
    suppressed: bool,
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
    /// End of the sent text.
    at: usize,
    /// End of the white space after `at`.
    blank: usize,
    state: State,
    message: AnswerMessage,
    deltas: Vec<AnswerDelta>,
    /// Byte range of reasoning in the text; its end is unknown until it is complete.
    reasoning_range: Option<(usize, Option<usize>)>,
}

impl AnswerParser {
    /// Creates a parser at the start of an answer.
    #[must_use]
    pub fn new(answer_format: Arc<AnswerFormat>) -> Self {
        let state = match () {
            () if answer_format.syntax.is_channels() => State::Channels(Channels::default()),
            () if !answer_format.separates_reasoning => State::Text { search: 0, start: true },
            () if answer_format.thinking => State::Reasoning { search: 0 },
            () => State::Begin,
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
            message: AnswerMessage::default(),
            deltas: Vec::new(),
            reasoning_range,
        }
    }

    /// Parses the next piece of text.
    pub fn push(&mut self, text: &str) -> Vec<AnswerDelta> {
        self.text.push_str(text);
        self.advance(None);
        std::mem::take(&mut self.deltas)
    }

    /// Removes the last `chars` characters of the text.
    pub fn retract(&mut self, chars: usize) -> Vec<AnswerDelta> {
        let keep = self.text.char_indices().rev().nth(chars.saturating_sub(1)).map_or(0, |(at, _)| at);
        let keep = if chars == 0 { self.text.len() } else { keep };
        let mut again = Self::new(Arc::clone(&self.answer_format));
        again.text.push_str(&self.text[..keep]);
        again.advance(None);
        again.deltas = difference(&self.message, &again.message);
        *self = again;
        std::mem::take(&mut self.deltas)
    }

    /// Ends the answer. `cut` is true if a limit ended it; an incomplete call then stays a call.
    pub fn finish(&mut self, cut: bool) -> Vec<AnswerDelta> {
        self.advance(Some(EndOfAnswer { cut }));
        std::mem::take(&mut self.deltas)
    }

    /// Retracts the text of the answer, but not its reasoning and calls.
    pub fn retract_content(&mut self) -> Option<Retraction> {
        let content = std::mem::take(&mut self.message.content).chars().count();
        (content > 0).then(|| Retraction { content, ..Retraction::default() })
    }

    /// Returns the answer parsed so far.
    #[must_use]
    pub fn message(&self) -> &AnswerMessage {
        &self.message
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

    /// Returns the first unsent byte: the continuation of the current block of calls, or text that may become a marker.
    #[must_use]
    pub fn unsent_from(&self) -> usize {
        match &self.state {
            State::Block(block) => block.last.unwrap_or(block.from),
            _ => self.at,
        }
    }

    /// Returns true inside or directly before a call that a marker introduced.
    #[must_use]
    pub fn is_in_marked_call(&self) -> bool {
        matches!(&self.state, State::Block(block) if !block.marker.is_empty() && (block.last.is_none() || block.reader.is_some()))
    }

    /// Parses as much text as possible. The function for each state returns true if it changed the state, and false if more
    /// text is needed.
    fn advance(&mut self, answer_end: Option<EndOfAnswer>) {
        loop {
            let is_active = match &self.state {
                State::Begin => self.begin(answer_end),
                State::Reasoning { search } => self.parse_reasoning(*search, answer_end),
                State::Gap => self.parse_gap(answer_end),
                State::Text { search, start } => self.parse_text(*search, *start, answer_end),
                State::Block(_) => self.parse_block(answer_end),
                State::Channels(_) => self.parse_channels(answer_end),
            };
            if !is_active {
                return;
            }
        }
    }

    fn begin(&mut self, answer_end: Option<EndOfAnswer>) -> bool {
        let from = self.skip_blank();
        let answer_format = Arc::clone(&self.answer_format);
        let (open, close) = &answer_format.syntax.reasoning_markers;
        let rest = &self.text[from..];
        let (opened, closed) = (match_literal(rest, open), match_literal(rest, close));
        if opened == Match::Whole && !open.is_empty() {
            self.at = from + open.len();
            self.reasoning_range = Some((from, None));
            self.state = State::Reasoning { search: self.at };
        } else if (opened == Match::Partial || closed == Match::Partial) && answer_end.is_none() {
            return false;
        } else if closed == Match::Whole {
            // With thinking disabled, some prompts leave the end marker to the model.
            self.at = from + close.len();
            self.state = State::Gap;
        } else {
            self.state = State::Text { search: 0, start: true };
        }
        true
    }

    fn parse_reasoning(&mut self, search: usize, answer_end: Option<EndOfAnswer>) -> bool {
        let answer_format = Arc::clone(&self.answer_format);
        let (open, close) = &answer_format.syntax.reasoning_markers;
        if self.message.reasoning.is_empty() {
            let from = self.skip_blank();
            // Some models repeat the start marker that the prompt already contains.
            let may_open = answer_format.thinking && !open.is_empty() && self.text[..self.at].trim().is_empty();
            match match_literal(&self.text[from..], open) {
                Match::Whole if may_open => {
                    self.at = from + open.len();
                    return true;
                }
                Match::Partial if answer_end.is_none() => return false,
                _ => self.at = from,
            }
        }
        let search = search.max(self.at);
        if let Some(found) = self.text[search..].find(close.as_str()) {
            let end = search + found;
            let reasoning = self.text[self.at..end].trim_end().to_owned();
            self.at = end + close.len();
            self.emit_reasoning(&reasoning);
            self.reasoning_range = self.reasoning_range.map(|(from, _)| (from, Some(self.at)));
            self.state = State::Gap;
            return true;
        }
        let upto = if answer_end.is_some() {
            self.text.len()
        } else {
            search + len_before_partial_marker(&self.text[search..], &[close])
        };
        let sent = if answer_end.is_some() { upto } else { self.without_blank(upto) };
        let reasoning = self.text[self.at..sent].to_owned();
        self.at = sent;
        self.emit_reasoning(&reasoning);
        self.state = State::Reasoning { search: upto };
        false
    }

    fn parse_gap(&mut self, answer_end: Option<EndOfAnswer>) -> bool {
        self.at = self.skip_blank();
        let words = &self.text[self.at..];
        if words.is_empty() {
            return false;
        }
        // A model may repeat the end marker after its reasoning was ended by a limit.
        let close = &self.answer_format.syntax.reasoning_markers.1;
        match match_literal(words, close) {
            Match::Whole if self.answer_format.separates_reasoning => {
                self.at += close.len();
                return true;
            }
            Match::Partial if self.answer_format.separates_reasoning && answer_end.is_none() => return false,
            _ => {}
        }
        self.state = State::Text { search: self.at, start: true };
        true
    }

    fn parse_text(&mut self, search: usize, start: bool, answer_end: Option<EndOfAnswer>) -> bool {
        if start && let Some(is_active) = self.parse_lead(answer_end).or_else(|| self.parse_bare(answer_end)) {
            return is_active;
        }
        let search = search.max(self.at);
        let rest = &self.text[search..];
        let found = self
            .markers
            .iter()
            .filter_map(|marker| rest.find(&marker.text).map(|at| (search + at, marker.text.len(), marker.form)))
            .min_by_key(|&(at, len, form)| (at, std::cmp::Reverse(len), form));
        let texts: Vec<&str> = self.markers.iter().map(|marker| marker.text.as_str()).collect();
        let upto =
            if answer_end.is_some() { self.text.len() } else { search + len_before_partial_marker(rest, &texts) };
        // Another marker may start earlier, or be longer.
        if let Some((at, len, form)) = found.filter(|&(at, ..)| at < upto) {
            if let Some(form) = form {
                let from = self.without_blank(at);
                self.emit_content_upto(from);
                self.at = at;
                self.state = State::Block(Box::new(Block {
                    form,
                    tried: 0,
                    from,
                    marker: at..at + len,
                    last: None,
                    list: false,
                    reader: None,
                    suppressed: false,
                }));
            } else {
                if !start || self.skip_blank() < at {
                    self.emit_content_upto(at);
                }
                self.at = at + len;
                self.state = State::Text { search: self.at, start };
            }
            return true;
        }
        // White space before a marker is not part of the text.
        let sent = if answer_end.is_none() && !self.markers.is_empty() { self.without_blank(upto) } else { upto };
        let start = start && sent == self.at;
        self.emit_content_upto(sent);
        self.state = State::Text { search: upto, start };
        false
    }

    /// Skips the marker before an answer's text; `None` if the text does not start with it.
    fn parse_lead(&mut self, answer_end: Option<EndOfAnswer>) -> Option<bool> {
        let answer_format = Arc::clone(&self.answer_format);
        let fresh = self.message.content.is_empty() && self.message.calls.is_empty();
        let lead = answer_format.syntax.lead.as_ref().filter(|_| fresh)?;
        let first = self.skip_blank();
        match match_literal(&self.text[first..], lead) {
            Match::Whole => {
                self.at = first + lead.len();
                self.state = State::Text { search: self.at, start: false };
                Some(true)
            }
            Match::Partial if answer_end.is_none() => Some(false),
            _ => None,
        }
    }

    /// Searches for a call without a marker; `None` if the text has no such call.
    fn parse_bare(&mut self, answer_end: Option<EndOfAnswer>) -> Option<bool> {
        let answer_format = Arc::clone(&self.answer_format);
        let mut forms = answer_format.syntax.calls.iter().enumerate().filter(|(_, form)| form.is_bare()).peekable();
        if answer_format.tools.is_empty() || forms.peek().is_none() {
            return None;
        }
        let first = self.skip_blank();
        let words = &self.text[first..];
        if words.is_empty() && answer_end.is_none() {
            return Some(false);
        }
        let (form, shape) = forms.find(|(_, form)| CallReader::may_be_bare(form, &answer_format, words))?;
        self.state = State::Block(Box::new(Block {
            form,
            tried: 0,
            from: self.at,
            marker: first..first,
            last: None,
            list: false,
            reader: Some(CallReader::new(shape, first, words, true)),
            suppressed: self.is_full(),
        }));
        Some(true)
    }

    /// Returns true if no further call is permitted.
    fn is_full(&self) -> bool {
        self.answer_format.single && !self.message.calls.is_empty()
    }

    /// Parses calls; `at` is the start of the marker, or the end of the last call.
    fn parse_block(&mut self, answer_end: Option<EndOfAnswer>) -> bool {
        let answer_format = Arc::clone(&self.answer_format);
        let State::Block(block) = &mut self.state else { return false };
        let form = &answer_format.syntax.calls[block.form];
        if let Some(reader) = &mut block.reader {
            let syntax = (&*answer_format, form);
            let progress = if block.suppressed {
                reader.read(syntax, &self.text, answer_end, &mut Vec::new(), &mut AnswerMessage::default())
            } else {
                reader.read(syntax, &self.text, answer_end, &mut self.deltas, &mut self.message)
            };
            match progress {
                CallProgress::More => return false,
                CallProgress::Done(end) => {
                    block.last = Some(end);
                    block.reader = None;
                    block.tried = 0;
                    self.at = end;
                }
                CallProgress::Failed(at) => {
                    let retracted = usize::from(reader.is_sent() && !block.suppressed);
                    self.retract_calls(retracted);
                    self.reject_call(at);
                }
            }
            return true;
        }
        self.at = call::skip_space(&self.text, self.at);
        match call::find_next_call(form, &self.text, self.at, block.last.is_some(), block.list, answer_end.is_some()) {
            NextCall::More => return false,
            NextCall::Next { at, list, kept } => {
                block.last = block.last.map(|_| kept);
                block.list = list;
                block.reader = Some(CallReader::new(form, at, &self.text[at..], block.marker.is_empty()));
                block.suppressed = self.answer_format.single && !self.message.calls.is_empty();
            }
            NextCall::End(at) if block.last.is_some() => {
                block.last = Some(at);
                self.at = at;
                if !self.try_next_form() {
                    self.state = State::Gap;
                }
            }
            NextCall::End(at) => self.reject_call(at),
        }
        true
    }

    /// Handles text that looked like a call up to the byte `at`: tries another form with the same marker, else treats
    /// it as text.
    fn reject_call(&mut self, at: usize) {
        if self.try_next_form() {
            return;
        }
        let State::Block(block) = &self.state else { return };
        self.at = block.last.unwrap_or(block.from);
        let search = at.max(block.marker.end).max(self.at);
        self.blank = 0;
        self.state = State::Text { search, start: false };
    }

    /// Parses the failed call again with the next form that has the same marker. Returns `false` if there is none.
    fn try_next_form(&mut self) -> bool {
        let State::Block(block) = &mut self.state else { return false };
        let text = &self.text[block.marker.clone()];
        block.tried |= 1 << block.form.min(63);
        block.reader = None;
        let other = self.markers.iter().filter(|other| other.text == text).filter_map(|other| other.form);
        let Some(form) = other.filter(|form| block.tried & (1 << form.min(&63)) == 0).min() else { return false };
        block.form = form;
        self.at = block.last.unwrap_or(block.marker.start);
        true
    }

    /// Returns the first byte after the sent text that is not white space.
    fn skip_blank(&mut self) -> usize {
        self.blank = call::skip_space(&self.text, self.blank.max(self.at));
        self.blank
    }

    /// Returns the end of the text before `upto` without trailing white space.
    fn without_blank(&mut self, upto: usize) -> usize {
        let from = self.skip_blank().min(upto);
        let words = self.text[from..upto].trim_end();
        if words.is_empty() { self.at.min(upto) } else { from + words.len() }
    }

    fn parse_channels(&mut self, answer_end: Option<EndOfAnswer>) -> bool {
        let State::Channels(mut channels) = std::mem::replace(&mut self.state, State::Begin) else { return false };
        channels.read(&self.answer_format, &self.text, answer_end, &mut self.deltas, &mut self.message);
        self.state = State::Channels(channels);
        false
    }

    fn emit_reasoning(&mut self, text: &str) {
        emit_reasoning(&mut self.deltas, &mut self.message, text);
    }

    fn emit_content_upto(&mut self, upto: usize) {
        if upto > self.at {
            emit_content(&mut self.deltas, &mut self.message, &self.text[self.at..upto]);
            self.at = upto;
        }
    }

    fn retract_calls(&mut self, count: usize) {
        retract_calls(&mut self.deltas, &mut self.message, count);
    }
}
