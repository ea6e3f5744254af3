//! Location of each message in a prompt.
//!
//! The conversation is rendered a second time with a mark in place of every content. The text between the marks comes
//! from the template, so it must also be between the contents in the real prompt. A template that inspects messages may
//! render marks differently; then only the words between the template's own literals are marked. Content that the
//! template changed is located by the texts around it.

use super::RenderedMessage;
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use serde_json::Value;
use std::ops::Range;

/// The role of text that is not from a message.
const TEMPLATE: &str = "template";
/// Character before the number of a mark. It is a private-use character, so that no template and no message contains it
/// by chance.
const OPEN: char = '\u{f5a8a}';
/// Character after the number of a mark, also for private use.
const CLOSE: char = '\u{f5a8b}';
/// Minimum length of a template literal that is left unmarked anywhere in a message.
const MIN_LITERAL: usize = 3;

/// A conversation with marks, and the content of each mark.
pub(super) struct MarkedConversation {
    pub(super) messages: Vec<Value>,
    pieces: Vec<Piece>,
}

/// The way in which a template may render a content.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentMatch {
    /// As in the message, trimmed, or as JSON.
    Exact,
    /// In any way.
    Changed,
}

/// A piece of a message's content.
struct Piece {
    message: usize,
    role: String,
    text: String,
}

impl MarkedConversation {
    /// Replaces every non-blank content with one mark.
    pub(super) fn whole(messages: &[Value]) -> Self {
        Self::new(messages, |text| if text.trim().is_empty() { Vec::new() } else { vec![0..text.len()] })
    }

    /// Replaces the words between `literals` in every content with marks. Literals of the template and whitespace
    /// stay, because a template may search for them.
    pub(super) fn words(messages: &[Value], literals: &[String]) -> Self {
        Self::new(messages, |text| words(text, literals))
    }

    fn new(messages: &[Value], cut: impl Fn(&str) -> Vec<Range<usize>>) -> Self {
        let mut marked = Self { messages: messages.to_vec(), pieces: Vec::new() };
        for (index, message) in marked.messages.iter_mut().enumerate() {
            let text = message["content"].as_str().unwrap_or_default().to_owned();
            let role = message["role"].as_str().unwrap_or_default().to_owned();
            let (mut content, mut copied) = (String::new(), 0);
            for range in cut(&text) {
                content.push_str(&text[copied..range.start]);
                content.extend([OPEN.to_string(), marked.pieces.len().to_string(), CLOSE.to_string()]);
                copied = range.end;
                marked.pieces.push(Piece { message: index, role: role.clone(), text: text[range].to_owned() });
            }
            if copied > 0 {
                content.push_str(&text[copied..]);
                message["content"] = content.into();
            }
        }
        marked
    }

    /// Locates the contents in `text`. `marked_text` is the rendering with marks.
    pub(super) fn locate(
        &self,
        text: &str,
        marked_text: &str,
        content_match: ContentMatch,
    ) -> Option<Vec<RenderedMessage>> {
        let mut parts: Vec<RenderedMessage> = Vec::new();
        let mut last = None;
        let mut cursor = 0;
        let mut rest = marked_text;
        while let Some(at) = rest.find(OPEN) {
            let template_text = &rest[..at];
            let (number, following) = rest[at + OPEN.len_utf8()..].split_once(CLOSE)?;
            let number: usize = number.parse().ok()?;
            let piece = self.pieces.get(number)?;
            cursor += text[cursor..].starts_with(template_text).then_some(template_text.len())?;
            let next = following.find(OPEN).map_or(following, |end| &following[..end]);
            let is_last = next.len() == following.len();
            let end = piece.end_in(&text[cursor..], next).or_else(|| match content_match {
                ContentMatch::Exact => None,
                ContentMatch::Changed if is_last => text[cursor..].strip_suffix(next).map(str::len),
                ContentMatch::Changed if next.trim().is_empty() => None,
                ContentMatch::Changed => text[cursor..].find(next),
            });
            let end = cursor + end?;
            match (parts.last_mut(), last) {
                // The pieces of one content, in order, form one part together with the template's text between them.
                (Some(part), Some((message, before))) if message == piece.message && before < number => part.end = end,
                _ if end == cursor => {}
                _ => parts.push(RenderedMessage { role: piece.role.clone(), start: cursor, end }),
            }
            last = Some((piece.message, number));
            (cursor, rest) = (end, following);
        }
        (&text[cursor..] == rest).then_some(parts)
    }
}

impl Piece {
    /// Returns the end of the piece at the start of `text` and before `next`: unchanged, trimmed, or as JSON.
    fn end_in(&self, text: &str, next: &str) -> Option<usize> {
        let whole = self.text.as_str();
        let fits = |candidate: &str| text.strip_prefix(candidate).is_some_and(|following| following.starts_with(next));
        let found =
            [whole, whole.trim(), whole.trim_end(), whole.trim_start()].into_iter().find(|candidate| fits(candidate));
        found.map(str::len).or_else(|| {
            let json = [whole, whole.trim()].map(|text| Value::from(text).to_string());
            json.iter().map(|json| &json[1..json.len() - 1]).find(|candidate| fits(candidate)).map(str::len)
        })
    }
}

/// Returns the words of a text, without the literals and the whitespace around them.
fn words(text: &str, literals: &[String]) -> Vec<Range<usize>> {
    let mut known: Vec<Range<usize>> = Vec::new();
    let inner = text.trim();
    let from = text.len() - text.trim_start().len();
    for literal in literals.iter().filter(|literal| !literal.chars().all(|c| c.is_alphanumeric() || c.is_whitespace()))
    {
        if literal.len() >= MIN_LITERAL {
            known.extend(text.match_indices(literal.as_str()).map(|(at, found)| at..at + found.len()));
        } else {
            // Templates search for short literals, such as a brace, only at the ends.
            known.extend(inner.starts_with(literal.as_str()).then(|| from..from + literal.len()));
            let to = from + inner.len();
            known.extend(inner.ends_with(literal.as_str()).then(|| to - literal.len()..to));
        }
    }
    known.sort_unstable_by_key(|range| range.start);
    known.push(text.len()..text.len());
    let mut words = Vec::new();
    let mut at = 0;
    for range in known {
        if let Some(between) = text.get(at..range.start) {
            let start = at + (between.len() - between.trim_start().len());
            let end = start + between.trim().len();
            if start < end {
                words.push(start..end);
            }
        }
        at = at.max(range.end);
    }
    words
}

/// Ranges of tokens, in order, each in place of `text_len` bytes of the text, e.g. the tokens of an image.
pub(super) struct InsertedTokens<'a> {
    pub(super) ranges: &'a [Range<usize>],
    pub(super) text_len: usize,
}

impl InsertedTokens<'_> {
    fn range_of(&self, index: usize) -> Option<&Range<usize>> {
        self.ranges.iter().find(|range| range.contains(&index))
    }
}

/// Converts parts of the text to spans of tokens. A token that crosses a boundary belongs to the part in which it
/// starts.
pub(super) fn token_spans(
    text: &str,
    parts: &[RenderedMessage],
    tokens: &[TokenId],
    inserted: &InsertedTokens<'_>,
    vocabulary: &Vocabulary,
) -> Vec<Span> {
    if parts.is_empty() {
        return Vec::new();
    }
    let Some(starts) = byte_starts(text, tokens, inserted, vocabulary) else { return Vec::new() };
    let mut spans: Vec<Span> = Vec::new();
    let mut parts = parts.iter().peekable();
    let mut previous = None;
    for (index, start) in starts.into_iter().enumerate() {
        while parts.next_if(|part| part.end <= start).is_some() {}
        let (role, part_start) = match parts.peek() {
            Some(part) if part.start <= start => (part.role.as_str(), part.start),
            _ => (TEMPLATE, usize::MAX),
        };
        let index = index as u32;
        // All tokens of an image start at the same byte.
        let begins_message = start == part_start && previous != Some(start);
        previous = Some(start);
        match spans.last_mut() {
            // Adjacent messages with the same role stay separate spans.
            Some(last) if last.role == role && !begins_message => last.end = index + 1,
            _ => spans.push(Span { role: role.to_owned(), start: index, end: index + 1 }),
        }
    }
    spans
}

/// Returns the start of each token in the text; `None` if the tokens do not match the text, e.g. because the tokenizer
/// normalizes it. Tokens that the tokenizer put before the text start at 0.
fn byte_starts(
    text: &str,
    tokens: &[TokenId],
    inserted: &InsertedTokens<'_>,
    vocabulary: &Vocabulary,
) -> Option<Vec<usize>> {
    let bytes = text.as_bytes();
    let mut cursor = 0;
    let mut starts = Vec::with_capacity(tokens.len());
    for (index, &token) in tokens.iter().enumerate() {
        let piece = vocabulary.piece(token);
        starts.push(cursor);
        if let Some(range) = inserted.range_of(index) {
            if index + 1 == range.end {
                cursor += inserted.text_len;
            }
            continue;
        }
        let is_first =
            || index == 0 || vocabulary.is_control(tokens[index - 1]) || inserted.range_of(index - 1).is_some();
        if bytes[cursor..].starts_with(piece) {
            cursor += piece.len();
        } else if is_first() && piece.first() == Some(&b' ') && bytes[cursor..].starts_with(&piece[1..]) {
            // SentencePiece adds a space before the first word, and before the first word after a control token.
            cursor += piece.len() - 1;
        } else if !vocabulary.is_control(token) {
            return None;
        }
    }
    (cursor == bytes.len()).then_some(starts)
}
