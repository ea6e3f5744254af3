//! Text of the answer while tokens are added and removed: complete UTF-8, stop strings across token boundaries, and the
//! part that may be released to the client.

use crate::model::complete_prefix;

/// Text of the generated tokens.
#[derive(Debug, Default)]
pub struct OutputText {
    bytes: Vec<u8>,
    /// For each generated token: length of `bytes` after it, and length of the complete UTF-8 in them.
    ends: Vec<(usize, usize)>,
    stop: Vec<Vec<u8>>,
    /// First byte at which a stop string may start: the end of the text that was released before the stop strings were
    /// set.
    stop_from: usize,
    /// Position of the stop string that was found, and its index in `stop`.
    stopped: Option<(usize, usize)>,
    first_line_break: Option<usize>,
    /// Minimum indentation of every line except the first; 0 for no minimum.
    min_indent: usize,
    /// Start of the last line; only maintained if there is a minimum indentation.
    last_line: usize,
    /// Position of the first text in a line with less indentation.
    outdented: Option<usize>,
    /// Length of the text that was released.
    released: usize,
}

impl OutputText {
    /// Creates an empty text that ends before the first stop string in it.
    pub fn new(stop: &[String]) -> Self {
        Self { stop: stop.iter().map(|text| text.as_bytes().to_vec()).collect(), ..Self::default() }
    }

    /// Sets a minimum indentation: the text ends before the first line with less, except for line 1.
    pub fn with_min_indent(self, min_indent: usize) -> Self {
        Self { min_indent, ..self }
    }

    /// Returns true if the text of the first `tokens` has a line with less than the minimum indentation.
    pub fn is_outdented(&self, tokens: usize) -> bool {
        self.outdented.is_some_and(|at| at < self.end_of(tokens))
    }

    /// Appends a token. Returns the characters that it completes. A hidden token adds no text.
    pub fn push(&mut self, piece: &[u8], hidden: bool) -> String {
        if !hidden {
            let from = self.bytes.len();
            self.bytes.extend_from_slice(piece);
            if self.first_line_break.is_none() {
                self.first_line_break = piece.iter().position(|&byte| byte == b'\n').map(|at| from + at);
            }
        }
        let complete_before = self.complete();
        let complete = complete_before + complete_prefix(&self.bytes[complete_before..]);
        let end_before = self.ends.last().map_or(0, |&(end, _)| end);
        self.ends.push((self.bytes.len(), complete));
        if self.stopped.is_none() && !hidden {
            self.find_stop(end_before);
        }
        if self.min_indent > 0 && self.outdented.is_none() {
            self.find_outdented(end_before);
        }
        String::from_utf8_lossy(&self.bytes[complete_before..complete]).into_owned()
    }

    /// Removes all tokens after the first `tokens`. Returns the number of characters to retract from the client; 0 if all
    /// removed tokens were in the holdback. They include text that could now become part of a stop string; if it does
    /// not, it is released again.
    pub fn truncate(&mut self, tokens: usize) -> usize {
        self.ends.truncate(tokens);
        let end = self.ends.last().map_or(0, |&(end, _)| end);
        let mut retracted = self.bytes.split_off(end.min(self.bytes.len()));
        self.stop_from = self.stop_from.min(end);
        self.first_line_break = self.first_line_break.filter(|&at| at < end);
        self.outdented = self.outdented.filter(|&at| at < end);
        if end < self.last_line {
            self.last_line = self.bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        }
        if let Some((at, index)) = self.stopped
            && at + self.stop[index].len() > end
        {
            self.stopped = None;
        }
        let releasable = self.releasable_end(tokens);
        if self.released <= releasable {
            return 0;
        }
        retracted.splice(0..0, self.bytes[releasable..].iter().copied());
        retracted.truncate(self.released - releasable);
        self.released = releasable;
        String::from_utf8_lossy(&retracted).chars().count()
    }

    /// Replaces the stop strings; text that was released is not searched.
    pub fn set_stop_strings(&mut self, stop: Vec<Vec<u8>>) {
        self.stop = stop;
        self.stop_from = self.released;
        self.stopped = None;
        self.find_stop(self.released);
    }

    /// Returns true if the text of the first `tokens` contains a stop string.
    pub fn is_stopped(&self, tokens: usize) -> bool {
        self.stopped.is_some_and(|(at, index)| at + self.stop[index].len() <= self.end_of(tokens))
    }

    /// Returns the stop string that the text contains.
    pub fn stopped_by(&self) -> Option<String> {
        self.stopped.map(|(_, index)| String::from_utf8_lossy(&self.stop[index]).into_owned())
    }

    /// Takes the text that may be released: complete characters before the last `holdback` tokens that cannot become part
    /// of a stop string, even if a mod replaces these tokens.
    pub fn take_releasable(&mut self, holdback: usize) -> String {
        self.take_until(self.releasable_end(self.ends.len().saturating_sub(holdback)))
    }

    /// Takes all text that was not released, at the end of the run.
    pub fn take_remaining(&mut self) -> String {
        self.take_until(self.text_end())
    }

    /// Marks the text of the first `tokens` tokens as released, for a client that receives whole tokens.
    pub fn mark_released(&mut self, tokens: usize) {
        self.released = self.end_of(tokens);
    }

    /// Returns true if the text of the first `tokens` has a line break.
    pub fn has_new_line(&self, tokens: usize) -> bool {
        self.first_line_break.is_some_and(|at| at < self.end_of(tokens))
    }

    /// Returns the number of tokens.
    pub fn tokens(&self) -> usize {
        self.ends.len()
    }

    /// Returns the number of tokens whose text was released completely. A hidden token has no text.
    pub fn released_tokens(&self) -> usize {
        self.ends.partition_point(|&(end, _)| end <= self.released)
    }

    /// Returns the text of the answer, which ends before a stop string or a line with less indentation.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes[..self.text_end()]).into_owned()
    }

    fn complete(&self) -> usize {
        self.ends.last().map_or(0, |&(_, complete)| complete)
    }

    /// Returns the end of the text of the first `tokens`.
    fn end_of(&self, tokens: usize) -> usize {
        self.ends[..tokens.min(self.ends.len())].last().map_or(0, |&(end, _)| end)
    }

    fn text_end(&self) -> usize {
        let stopped = self.stopped.map_or(self.bytes.len(), |(at, _)| at);
        self.outdented.map_or(stopped, |at| at.min(stopped))
    }

    fn take_until(&mut self, end: usize) -> String {
        if end <= self.released {
            return String::new();
        }
        let text = String::from_utf8_lossy(&self.bytes[self.released..end]).into_owned();
        self.released = end;
        text
    }

    /// Finds the earliest stop string that ends after `from`.
    fn find_stop(&mut self, from: usize) {
        self.stopped = self
            .stop
            .iter()
            .enumerate()
            .filter_map(|(index, stop)| {
                let start = (from + 1).saturating_sub(stop.len()).max(self.stop_from).min(self.bytes.len());
                find(&self.bytes[start..], stop).map(|at| (start + at, index))
            })
            .min();
    }

    /// Checks the indentation of the last line, and of all lines that start after `from`.
    fn find_outdented(&mut self, from: usize) {
        loop {
            let line = &self.bytes[self.last_line..];
            let indent = line.iter().take_while(|&&byte| matches!(byte, b' ' | b'\t')).count();
            if self.last_line > 0 && indent < line.len() && indent < self.min_indent {
                self.outdented = Some(self.last_line + indent);
                return;
            }
            let from = from.max(self.last_line);
            match self.bytes[from..].iter().position(|&byte| byte == b'\n') {
                Some(at) => self.last_line = from + at + 1,
                None => return,
            }
        }
    }

    /// Returns the end of the text of the first `tokens` tokens that may be released: complete characters that cannot
    /// become part of a stop string, whatever follows these tokens.
    fn releasable_end(&self, tokens: usize) -> usize {
        let Some(&(end, complete)) = self.ends[..tokens.min(self.ends.len())].last() else { return 0 };
        if self.is_stopped(tokens) || self.is_outdented(tokens) {
            return self.text_end();
        }
        let searched = &self.bytes[self.stop_from.min(end)..end];
        let partial = |stop: &Vec<u8>| {
            (1..stop.len().min(searched.len() + 1)).rev().find(|&len| searched.ends_with(&stop[..len])).unwrap_or(0)
        };
        complete.min(end - self.stop.iter().map(partial).max().unwrap_or(0))
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    if needle.is_empty() {
        return None;
    }
    haystack.windows(needle.len()).position(|window| window == needle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn answer(stop: &[&str]) -> OutputText {
        OutputText::new(&stop.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn stop_string_across_tokens_is_never_released() {
        let mut answer = answer(&["END"]);
        let mut released = String::new();
        for piece in ["ab", "E", "N", "x E", "ND", "more"] {
            answer.push(piece.as_bytes(), false);
            released += &answer.take_releasable(0);
        }
        assert_eq!(released, "abENx ");
        assert_eq!(answer.stopped_by().as_deref(), Some("END"));
        assert_eq!(answer.text(), "abENx ");
        assert!(answer.is_stopped(5) && !answer.is_stopped(4), "the fifth token completes the stop string");
    }

    #[test]
    fn new_stop_strings_do_not_retract_released_text() {
        let mut answer = answer(&["xyz"]);
        answer.push(b"one xy", false);
        assert_eq!(answer.take_releasable(0), "one ");
        answer.set_stop_strings(vec![b"one".to_vec(), b"xy".to_vec()]);
        assert_eq!((answer.stopped_by().as_deref(), answer.text().as_str()), (Some("xy"), "one "));
        answer.set_stop_strings(vec![b"e ".to_vec()]);
        answer.push(b" one ", false);
        assert_eq!((answer.stopped_by().as_deref(), answer.text().as_str()), (Some("e "), "one xy on"));
    }

    #[test]
    fn incomplete_characters_are_held_back() {
        let mut answer = answer(&[]);
        let euro = "€".as_bytes();
        assert_eq!(answer.push(&euro[..2], false), "");
        assert_eq!(answer.take_releasable(0), "");
        assert_eq!(answer.push(&euro[2..], false), "€");
        assert_eq!(answer.take_releasable(0), "€");
    }

    #[test]
    fn less_indented_line_ends_text() {
        let mut answer = answer(&[]).with_min_indent(2);
        let mut released = String::new();
        for piece in ["def f():\n", " ", " x", "\n    y\n", "z = 1\nmore"] {
            assert!(!answer.is_outdented(answer.tokens()), "{released:?}");
            answer.push(piece.as_bytes(), false);
            released += &answer.take_releasable(0);
        }
        assert!(answer.is_outdented(answer.tokens()));
        assert_eq!(released, "def f():\n  x\n    y\n");
        assert_eq!(answer.text(), released);
        answer.truncate(4);
        assert!(!answer.is_outdented(answer.tokens()));
    }

    #[test]
    fn new_line_is_found_in_first_tokens() {
        let mut answer = answer(&[]);
        for piece in ["a", "\n", "b"] {
            answer.push(piece.as_bytes(), false);
        }
        assert!(!answer.has_new_line(1) && answer.has_new_line(2));
    }

    #[test]
    fn text_that_may_become_stop_string_is_retracted() {
        let mut answer = answer(&["cc"]);
        answer.push(b"c", false);
        answer.push(b".", false);
        assert_eq!(answer.take_releasable(0), "c.");
        assert_eq!(answer.truncate(1), 2);
        answer.push(b"c", false);
        assert_eq!((answer.take_remaining().as_str(), answer.stopped_by().as_deref()), ("", Some("cc")));
    }

    #[test]
    fn removed_holdback_retracts_nothing() {
        let mut answer = answer(&["\n\n"]);
        let mut released = String::new();
        for piece in ["foo\n", " bad", "word", "!"] {
            answer.push(piece.as_bytes(), false);
            if piece == "!" {
                assert_eq!(answer.truncate(1), 0);
            }
            released += &answer.take_releasable(2);
        }
        assert_eq!((released.as_str(), answer.take_remaining().as_str()), ("foo", "\n"));
    }

    #[test]
    fn truncate_counts_retracted_characters() {
        let mut answer = answer(&[]);
        for piece in ["a", "é", "€uro"] {
            answer.push(piece.as_bytes(), false);
        }
        assert_eq!(answer.take_releasable(0), "aé€uro");
        assert_eq!(answer.truncate(1), 5);
        assert_eq!(answer.text(), "a");
    }

    /// Returns a strategy for the bytes of a token: often a part of a stop string, sometimes incomplete characters.
    fn piece() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof!["[a-cé]{0,3}".prop_map(String::into_bytes), any::<Vec<u8>>()]
    }

    proptest! {
        #[test]
        fn outdented_line_is_found_after_truncation(edits in proptest::collection::vec(("[ \nx]{0,4}", 0usize..4), 1..30)) {
            let mut edited = answer(&[]).with_min_indent(2);
            let mut pieces: Vec<String> = Vec::new();
            for (piece, removed) in edits {
                edited.push(piece.as_bytes(), false);
                pieces.push(piece);
                pieces.truncate(pieces.len() - removed.saturating_sub(2).min(pieces.len()));
                edited.truncate(pieces.len());
                let mut expected = answer(&[]).with_min_indent(2);
                pieces.iter().for_each(|piece| drop(expected.push(piece.as_bytes(), false)));
                prop_assert_eq!((edited.outdented, edited.last_line), (expected.outdented, expected.last_line));
            }
        }

        /// A client that applies every delta and retraction always has the text of the answer. Removed tokens in the
        /// holdback cause no retraction.
        #[test]
        fn client_text_matches_after_retractions(
            pieces in proptest::collection::vec((piece(), proptest::option::of(0usize..5)), 0..30),
            holdback in 0usize..4,
            stop in "[a-c]{1,3}",
        ) {
            let mut answer = OutputText::new(&[stop]);
            let mut client: Vec<char> = Vec::new();
            // `before_holdback`: tokens that were before the holdback when text was released.
            let (mut tokens, mut before_holdback) = (0usize, 0usize);
            for (piece, removed) in pieces {
                answer.push(&piece, false);
                tokens += 1;
                if let Some(removed) = removed {
                    tokens = tokens.saturating_sub(removed);
                    let retracted = answer.truncate(tokens);
                    prop_assert!(tokens < before_holdback || retracted == 0, "{} characters retracted", retracted);
                    before_holdback = before_holdback.min(tokens);
                    client.truncate(client.len() - retracted);
                }
                client.extend(answer.take_releasable(holdback).chars());
                before_holdback = before_holdback.max(tokens.saturating_sub(holdback));
                if answer.stopped_by().is_some() { break; }
            }
            client.extend(answer.take_remaining().chars());
            prop_assert_eq!(client.into_iter().collect::<String>(), answer.text());
        }
    }
}
