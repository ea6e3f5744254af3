use super::call::{self, Between, CallReader, Step};
use super::channel::Channels;
use super::{
    Match, Message, Over, Piece, Reading, Retraction, difference, literal, safe, say_content, say_reasoning, void_calls,
};
use crate::model::chat::family::{CallShape, Family, Format};
use std::ops::Range;
use std::sync::Arc;

#[derive(Debug)]
enum State {
    /// A thought may begin.
    Begin,
    /// In a thought; `from` is where its text begins.
    Thought,
    /// Whitespace after a thought or a call is dropped.
    Gap,
    /// Text. Markers are looked for from `search` on; at the `start` of a text, calls may stand bare.
    Text { search: usize, start: bool },
    /// Calls.
    Block(Block),
    /// The whole answer is in channels.
    Channels(Channels),
}

#[derive(Debug)]
struct Block {
    /// Where text would go on if no call comes.
    from: usize,
    /// Whether there was no marker.
    bare: bool,
    /// The end of the last call.
    last: Option<usize>,
    /// Whether the calls stand in a list.
    list: bool,
    reader: Option<CallReader>,
}

/// Reads one answer.
#[derive(Debug)]
pub struct Parser {
    reading: Arc<Reading>,
    text: String,
    /// Up to where the text has been said.
    at: usize,
    state: State,
    message: Message,
    pieces: Vec<Piece>,
    /// Bytes of the text that are a thought; its end is not known before it is over.
    thought: Option<(usize, Option<usize>)>,
}

impl Parser {
    /// Begins an answer.
    #[must_use]
    pub fn new(reading: Arc<Reading>) -> Self {
        let state = match reading.format.call {
            CallShape::Channel => State::Channels(Channels::default()),
            _ if !reading.thoughts => State::Text { search: 0, start: true },
            _ if reading.thinking => State::Thought,
            _ => State::Begin,
        };
        let thought = matches!(state, State::Thought).then_some((0, None));
        Self { reading, text: String::new(), at: 0, state, message: Message::default(), pieces: Vec::new(), thought }
    }

    /// Takes further text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.text.push_str(text);
        self.advance(None);
        std::mem::take(&mut self.pieces)
    }

    /// Takes back the last `chars` characters of the text.
    pub fn retract(&mut self, chars: usize) -> Vec<Piece> {
        let keep = self.text.char_indices().rev().nth(chars.saturating_sub(1)).map_or(0, |(at, _)| at);
        let keep = if chars == 0 { self.text.len() } else { keep };
        let mut again = Self::new(Arc::clone(&self.reading));
        again.text.push_str(&self.text[..keep]);
        again.advance(None);
        again.pieces = difference(&self.message, &again.message);
        *self = again;
        std::mem::take(&mut self.pieces)
    }

    /// The answer is over. `cut` says that it ran into a limit: a call that had begun stays one, although incomplete.
    pub fn finish(&mut self, cut: bool) -> Vec<Piece> {
        self.advance(Some(Over { cut }));
        std::mem::take(&mut self.pieces)
    }

    /// Voids the text of the answer; its thoughts and calls stay.
    pub fn void_content(&mut self) -> Option<Retraction> {
        let content = std::mem::take(&mut self.message.content).chars().count();
        (content > 0).then(|| Retraction { content, ..Retraction::default() })
    }

    /// What was read so far.
    #[must_use]
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Bytes of the text that were read as thoughts, their markers included.
    #[must_use]
    pub fn thoughts(&self) -> Vec<Range<usize>> {
        let end = self.text.len();
        match (&self.state, self.thought) {
            (State::Channels(channels), _) => channels.thoughts(end),
            (_, Some((from, upto))) => vec![from..upto.unwrap_or(end)],
            (_, None) => Vec::new(),
        }
    }

    /// First byte that was not said yet: where a block of calls goes on that is being read, or what may become a marker.
    #[must_use]
    pub fn unsaid_from(&self) -> usize {
        match &self.state {
            State::Block(block) => block.last.unwrap_or(block.from),
            _ => self.at,
        }
    }

    /// Whether a call is being read, or is to follow, that a marker has announced.
    #[must_use]
    pub fn is_in_marked_call(&self) -> bool {
        matches!(&self.state, State::Block(block) if !block.bare && (block.last.is_none() || block.reader.is_some()))
    }

    fn advance(&mut self, over: Option<Over>) {
        loop {
            let goes_on = match &self.state {
                State::Begin => self.begin(over),
                State::Thought => self.thought(over),
                State::Gap => self.gap(over),
                State::Text { search, start } => self.words(*search, *start, over),
                State::Block(_) => self.block(over),
                State::Channels(_) => self.channels(over),
            };
            if !goes_on {
                return;
            }
        }
    }

    fn begin(&mut self, over: Option<Over>) -> bool {
        let (open, _) = self.reading.format.thought;
        let rest = self.text.trim_start();
        match literal(rest, open) {
            Match::Whole => {
                let from = self.text.len() - rest.len();
                self.at = from + open.len();
                self.thought = Some((from, None));
                self.state = State::Thought;
            }
            Match::Begun if over.is_none() => return false,
            _ => self.state = State::Text { search: 0, start: true },
        }
        true
    }

    fn thought(&mut self, over: Option<Over>) -> bool {
        let (open, close) = self.reading.format.thought;
        if self.message.reasoning.is_empty() {
            let rest = &self.text[self.at..];
            self.at += rest.len() - rest.trim_start().len();
            // Some models open a thought that the prompt has opened already.
            match literal(&self.text[self.at..], open) {
                Match::Whole if self.reading.thinking && self.text[..self.at].trim().is_empty() => {
                    self.at += open.len();
                    return true;
                }
                Match::Begun if over.is_none() => return false,
                _ => {}
            }
        }
        let rest = &self.text[self.at..];
        if let Some(found) = rest.find(close) {
            let thought = rest[..found].trim_end().to_owned();
            self.at += found + close.len();
            self.say_reasoning(&thought);
            self.thought = self.thought.map(|(from, _)| (from, Some(self.at)));
            self.state = State::Gap;
            return true;
        }
        let upto = if over.is_some() { rest.len() } else { safe(rest, &[close], true) };
        let thought = rest[..upto].to_owned();
        self.at += upto;
        self.say_reasoning(&thought);
        false
    }

    fn gap(&mut self, over: Option<Over>) -> bool {
        let (_, close) = self.reading.format.thought;
        let rest = &self.text[self.at..];
        let words = rest.trim_start();
        self.at += rest.len() - words.len();
        if words.is_empty() {
            return false;
        }
        // A model whose thought was ended for it may end it once more.
        match literal(words, close) {
            Match::Whole if self.reading.thoughts => {
                self.at += close.len();
                return true;
            }
            Match::Begun if self.reading.thoughts && over.is_none() => return false,
            _ => {}
        }
        self.state = State::Text { search: self.at, start: true };
        true
    }

    fn words(&mut self, search: usize, start: bool, over: Option<Over>) -> bool {
        let format = self.reading.format;
        let offers = !self.reading.tools.is_empty() && (!self.reading.single || self.message.calls.is_empty());
        if start && offers && format_takes_bare(&format) {
            let rest = &self.text[self.at..];
            let words = rest.trim_start();
            if words.is_empty() && over.is_none() {
                return false;
            }
            let first = self.text.len() - words.len();
            if CallReader::may_stand_bare(&self.reading, words) {
                self.state = State::Block(Block {
                    from: self.at,
                    bare: true,
                    last: None,
                    list: false,
                    reader: Some(CallReader::new(&self.reading, first, words, true)),
                });
                return true;
            }
        }
        let search = search.max(self.at);
        let open: &[&str] = if offers { format.open } else { &[] };
        let found = open
            .iter()
            .map(|marker| (*marker, true))
            .chain(format.silent.iter().map(|marker| (*marker, false)))
            .filter_map(|(marker, opens)| self.text[search..].find(marker).map(|at| (search + at, marker, opens)))
            .min_by_key(|&(at, ..)| at);
        if let Some((at, marker, opens)) = found {
            if opens {
                let said = self.text[self.at..at].trim_end().len();
                let from = self.at + said;
                self.say_content_upto(from);
                let after = at + marker.len();
                self.state = State::Block(Block { from, bare: false, last: None, list: false, reader: None });
                self.at = after;
            } else {
                self.say_content_upto(at);
                self.at = at + marker.len();
                self.state = State::Text { search: self.at, start: false };
            }
            return true;
        }
        let upto = if over.is_some() {
            self.text.len()
        } else {
            let markers: Vec<&str> = open.iter().chain(format.silent).copied().collect();
            search + safe(&self.text[search..], &markers, false)
        };
        // Whitespace before a call is not part of the text.
        let upto = if over.is_none() && offers && !format.open.is_empty() {
            self.at + self.text[self.at..upto].trim_end().len()
        } else {
            upto
        };
        let start = start && self.text[self.at..upto].trim().is_empty();
        self.say_content_upto(upto);
        self.state = State::Text { search: search.max(self.at), start };
        false
    }

    /// Reads calls; `at` is behind the marker, or behind the last call.
    fn block(&mut self, over: Option<Over>) -> bool {
        let State::Block(block) = &mut self.state else { return false };
        if let Some(reader) = &mut block.reader {
            let step = reader.read(&self.reading, &self.text, over, &mut self.pieces, &mut self.message);
            match step {
                Step::More => return false,
                Step::Done(end) => {
                    block.last = Some(end);
                    block.reader = None;
                    self.at = end;
                }
                Step::Failed(at) => {
                    let void = usize::from(reader.is_said());
                    let from = block.last.unwrap_or(block.from);
                    self.void_calls(void);
                    self.at = from;
                    self.state = State::Text { search: at.max(from), start: false };
                }
            }
            return true;
        }
        let reading = Arc::clone(&self.reading);
        match call::between(&reading.format, &self.text, self.at, block.last.is_some(), block.list, over.is_some()) {
            Between::More => return false,
            Between::Next { .. } if reading.single && block.last.is_some() => self.state = State::Gap,
            Between::Next { at, list } => {
                block.list = list;
                block.reader = Some(CallReader::new(&reading, at, &self.text[at..], block.bare));
            }
            Between::Closed(at) if block.last.is_some() => {
                self.at = at;
                self.state = State::Gap;
            }
            Between::Over(at) if block.last.is_some() => {
                self.at = at;
                self.state = State::Gap;
            }
            Between::Closed(at) | Between::Over(at) => {
                self.at = block.from;
                self.state = State::Text { search: at.max(self.at), start: false };
            }
        }
        true
    }

    fn channels(&mut self, over: Option<Over>) -> bool {
        let State::Channels(mut channels) = std::mem::replace(&mut self.state, State::Begin) else { return false };
        channels.read(&self.reading, &self.text, over, &mut self.pieces, &mut self.message);
        self.state = State::Channels(channels);
        false
    }

    fn say_reasoning(&mut self, text: &str) {
        say_reasoning(&mut self.pieces, &mut self.message, text);
    }

    fn say_content_upto(&mut self, upto: usize) {
        if upto > self.at {
            say_content(&mut self.pieces, &mut self.message, &self.text[self.at..upto]);
            self.at = upto;
        }
    }

    fn void_calls(&mut self, count: usize) {
        void_calls(&mut self.pieces, &mut self.message, count);
    }
}

fn format_takes_bare(format: &Format) -> bool {
    format.open.is_empty() || format.family == Family::Llama3
}
