//! Text of the answer while tokens are added and removed: complete UTF-8, stop strings across token boundaries, and the
//! part that may be released to the client.

use crate::model::complete_prefix;
use memchr::memmem;

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
    /// Position of the stop string that was found, and its index in `stop`. It ends in the first token that completes a
    /// stop string, so the text without that token contains none.
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
            self.stopped = self.find_stop(end_before, self.bytes.len());
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
        let mut from = self.released;
        self.stopped = self.ends.iter().find_map(|&(end, _)| {
            let found = self.find_stop(from, end);
            from = from.max(end);
            found
        });
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

    /// Returns true if the token with this index has added text. A hidden token has no text.
    pub fn has_text(&self, index: usize) -> bool {
        self.end_of(index) < self.end_of(index + 1)
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

    /// Returns position and index of the earliest stop string that ends after `from`, but not after `to`.
    fn find_stop(&self, from: usize, to: usize) -> Option<(usize, usize)> {
        let found = self.stop.iter().enumerate().filter(|(_, stop)| !stop.is_empty()).filter_map(|(index, stop)| {
            let start = (from + 1).saturating_sub(stop.len()).max(self.stop_from).min(to);
            memmem::find(&self.bytes[start..to], stop).map(|at| (start + at, index))
        });
        found.min()
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

#[cfg(test)]
mod tests;
