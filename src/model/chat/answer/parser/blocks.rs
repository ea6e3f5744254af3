//! Blocks of tool calls.

use super::{AnswerParser, State};
use crate::model::chat::answer::TextEnd;
use crate::model::chat::answer::call::{CallParser, CallProgress, CallText, skip_space};
use crate::model::chat::answer::next_call::{BlockPosition, NextCall, find_next_call};
use crate::model::chat::answer::output::AnswerOutput;
use std::ops::Range;
use std::sync::Arc;

/// The state of parsing a block of calls.
#[derive(Debug)]
pub(super) struct Block {
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
    parser: Option<CallParser>,
    /// True if the call exceeds the permitted number: it is parsed but not sent.
    suppressed: bool,
}

impl Block {
    /// Creates a block with the form of this index. `from` is the start of the text if no call follows.
    pub(super) fn new(form: usize, from: usize, marker: Range<usize>) -> Self {
        Self { form, tried: 0, from, marker, last: None, list: false, parser: None, suppressed: false }
    }

    /// Returns the end of the last complete call, or the start of the block if there is none.
    pub(super) fn unsent_from(&self) -> usize {
        self.last.unwrap_or(self.from)
    }
}

impl AnswerParser {
    /// Parses the start of a call without a marker. Returns `None` if the text does not start like one, and otherwise
    /// the same as the functions in [`Self::advance`].
    pub(super) fn parse_bare_call(&mut self, text_end: TextEnd) -> Option<bool> {
        let answer_format = Arc::clone(&self.answer_format);
        let mut forms = answer_format.syntax.calls.iter().enumerate().filter(|(_, form)| form.is_bare()).peekable();
        if answer_format.tools.is_empty() || forms.peek().is_none() {
            return None;
        }
        let first = self.skip_blank();
        let rest = &self.text[first..];
        if rest.is_empty() && !text_end.is_final() {
            return Some(false);
        }
        let (index, form) = forms.find(|(_, form)| CallParser::may_be_bare(form, &answer_format, rest))?;
        self.state = State::Block(Box::new(Block {
            parser: Some(CallParser::new(form, first, rest, true)),
            suppressed: self.is_full(),
            ..Block::new(index, self.at, first..first)
        }));
        Some(true)
    }

    /// Parses calls. On entry, `self.at` is the start of the marker or the end of the last call.
    pub(super) fn parse_block(&mut self, text_end: TextEnd) -> bool {
        let answer_format = Arc::clone(&self.answer_format);
        let is_full = self.is_full();
        let State::Block(block) = &mut self.state else { return false };
        let form = &answer_format.syntax.calls[block.form];
        let call = CallText { answer_format: &answer_format, form, text: &self.text, text_end };
        if let Some(parser) = &mut block.parser {
            let mut discarded = AnswerOutput::default();
            let output = if block.suppressed { &mut discarded } else { &mut self.output };
            match parser.parse(call, output) {
                CallProgress::More => return false,
                CallProgress::Done(end) => {
                    block.last = Some(end);
                    block.parser = None;
                    block.tried = 0;
                    self.at = end;
                }
                CallProgress::Failed(at) => {
                    if parser.is_sent() && !block.suppressed {
                        self.output.retract_call();
                    }
                    self.reject_call(at);
                }
            }
            return true;
        }
        self.at = skip_space(&self.text, self.at);
        let position = BlockPosition { at: self.at, after_call: block.last.is_some(), list: block.list };
        match find_next_call(call, position) {
            NextCall::More => return false,
            NextCall::Next { at, list, kept } => {
                block.last = block.last.map(|_| kept);
                block.list = list;
                block.parser = Some(CallParser::new(form, at, &self.text[at..], block.marker.is_empty()));
                block.suppressed = is_full;
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
        self.output.malformed_calls += usize::from(!block.marker.is_empty());
        self.at = block.unsent_from();
        let search = at.max(block.marker.end).max(self.at);
        self.blank = 0;
        self.state = State::Text { search, start: false };
    }

    /// Parses the failed call again with the next form that has the same marker. Returns false if there is none.
    fn try_next_form(&mut self) -> bool {
        let State::Block(block) = &mut self.state else { return false };
        let text = &self.text[block.marker.clone()];
        block.tried |= 1 << block.form.min(63);
        block.parser = None;
        let forms = self.markers.iter().filter(|marker| marker.text == text).filter_map(|marker| marker.form);
        let Some(form) = forms.filter(|form| block.tried & (1 << form.min(&63)) == 0).min() else { return false };
        block.form = form;
        self.at = block.last.unwrap_or(block.marker.start);
        true
    }

    /// Returns true if no further call is permitted.
    fn is_full(&self) -> bool {
        self.answer_format.single && !self.output.message.calls.is_empty()
    }
}
