//! Search for the next call after a marker or after another call.

use super::TextEnd;
use super::call::{CallText, PartialMatch, is_name_byte, skip_space};
use crate::model::chat::pattern::{Pattern, PatternMatch};
use crate::model::chat::syntax::{CallForm, CallShape};

/// The continuation after a marker or a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NextCall {
    /// More text is needed.
    More,
    /// A call starts at the byte `at`; `list` is true if the calls are in a list, and `kept` is the end of the block
    /// without the call.
    Next { at: usize, list: bool, kept: usize },
    /// The block ends before this byte, or other text starts there.
    End(usize),
}

/// A position in a block of calls.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockPosition {
    /// The byte.
    pub(super) at: usize,
    /// True after a call, false after the marker of the block.
    pub(super) after_call: bool,
    /// True if the calls are in a list.
    pub(super) list: bool,
}

/// Finds the next call of a block from a position on.
pub(super) fn find_next_call(call: CallText<'_>, from: BlockPosition) -> NextCall {
    let CallText { form, text, text_end, .. } = call;
    let BlockPosition { at, after_call, list } = from;
    let mut search = Search {
        form,
        after_call,
        list,
        has_open: false,
        has_before: false,
        has_separator: false,
        has_close: false,
        kept: at,
        at,
    };
    loop {
        if search.has_close {
            return NextCall::End(search.kept);
        }
        search.at = skip_space(text, search.at);
        if search.at == text.len() {
            return if text_end.is_final() { NextCall::End(search.kept) } else { NextCall::More };
        }
        match search.consume_part(&text[search.at..], text_end) {
            PartialMatch::Found(true) => {}
            PartialMatch::Found(false) => {
                return NextCall::Next { at: search.at, list: search.list, kept: search.kept };
            }
            PartialMatch::More => return NextCall::More,
            PartialMatch::No => return NextCall::End(if after_call { search.kept } else { search.at }),
        }
    }
}

/// A text around the calls of a block, see [`CallForm`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Open,
    Before,
    After,
    Separator,
    Close,
}

#[expect(clippy::struct_excessive_bools, reason = "each flag is a part that was consumed")]
struct Search<'a> {
    form: &'a CallForm,
    after_call: bool,
    list: bool,
    has_open: bool,
    has_before: bool,
    has_separator: bool,
    has_close: bool,
    /// End of the text that belongs to the block even if no call follows.
    kept: usize,
    at: usize,
}

impl Search<'_> {
    /// Consumes the next part. Returns `Found(false)` at the start of a call.
    fn consume_part(&mut self, rest: &str, text_end: TextEnd) -> PartialMatch<bool> {
        let form = self.form;
        if !self.has_before {
            let ends_call = self.after_call && !self.has_open && !self.has_separator;
            let separates = (self.after_call || form.is_bare()) && !self.has_separator;
            let candidates: [(Part, &Pattern, bool); 5] = [
                (Part::Close, &form.close, ends_call),
                (Part::After, &form.after, ends_call),
                (Part::Separator, &form.separator, separates),
                (Part::Open, &form.open, !self.has_open),
                (Part::Before, &form.before, true),
            ];
            for (part, pattern, expected) in candidates {
                if !expected || pattern.is_blank() {
                    continue;
                }
                let matched = match part {
                    Part::Close | Part::After => pattern.match_beginning(rest),
                    Part::Separator | Part::Open | Part::Before => pattern.match_whole(rest),
                };
                match matched {
                    PatternMatch::Whole(len) => {
                        self.at += len;
                        match part {
                            Part::Close | Part::After => {
                                self.kept = self.at;
                                self.has_close = part == Part::Close;
                            }
                            Part::Separator => self.has_separator = true,
                            Part::Open => self.has_open = true,
                            Part::Before => self.has_before = true,
                        }
                        return PartialMatch::Found(true);
                    }
                    PatternMatch::Partial if !text_end.is_final() => return PartialMatch::More,
                    _ => {}
                }
            }
        }
        let introduced = self.has_open || self.has_before || self.has_separator;
        match rest.as_bytes()[0] {
            b'{' if introduced || self.list || form.before.is_blank() => return PartialMatch::Found(false),
            b'[' if introduced && !self.list => self.list = true,
            b']' if self.after_call && self.list && !introduced => {
                self.list = false;
                self.kept = self.at + 1;
            }
            b',' | b';' if self.after_call && !introduced => self.has_separator = true,
            _ if form.shape == CallShape::Code && self.has_before => return PartialMatch::Found(false),
            first => {
                let may_start = self.has_before || (form.before.is_blank() && (introduced || self.list));
                let is_name = is_name_byte(first) && !matches!(form.shape, CallShape::Json(_) | CallShape::Code);
                return if may_start && is_name { PartialMatch::Found(false) } else { PartialMatch::No };
            }
        }
        self.at += 1;
        PartialMatch::Found(true)
    }
}
