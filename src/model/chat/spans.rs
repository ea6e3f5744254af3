//! Which part of a prompt came from which message.
//!
//! The conversation is rendered a second time with a mark in the place of every content. What stands between the
//! marks is the template's own text, and it must stand between the contents in the real prompt too. Where it does
//! not (a template that looks into its messages), there are no parts, rather than wrong ones.

use super::Part;
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use serde_json::Value;

/// The role of what no message wrote.
const TEMPLATE: &str = "template";

/// The content of a message, and who wrote it.
pub(super) struct Content {
    role: String,
    text: String,
}

/// A private-use character on each side, so that no template and no message has it by chance.
fn sentinel(index: usize) -> String {
    format!("\u{f5a8a}{index}\u{f5a8b}")
}

/// The messages with a mark in the place of every content that is not blank.
pub(super) fn mark(messages: &[Value]) -> (Vec<Value>, Vec<Content>) {
    let mut contents = Vec::new();
    let marked = messages
        .iter()
        .map(|message| {
            let mut message = message.clone();
            let text = message["content"].as_str().unwrap_or_default().to_owned();
            if !text.trim().is_empty() {
                message["content"] = sentinel(contents.len()).into();
                let role = message["role"].as_str().unwrap_or_default().to_owned();
                contents.push(Content { role, text });
            }
            message
        })
        .collect();
    (marked, contents)
}

/// Finds the contents in `text`, given the `frame` that was rendered around their marks.
pub(super) fn locate(text: &str, frame: &str, contents: &[Content]) -> Option<Vec<Part>> {
    let mut parts: Vec<Part> = Vec::with_capacity(contents.len());
    let (mut cursor, mut rest) = (0, frame);
    for (index, content) in contents.iter().enumerate() {
        let sentinel = sentinel(index);
        // A template may leave a message out, e.g. all but the last tool's answer.
        let Some(at) = rest.find(&sentinel) else { continue };
        let own = &rest[..at];
        rest = &rest[at + sentinel.len()..];
        cursor += text[cursor..].starts_with(own).then_some(own.len())?;
        let next = rest.find('\u{f5a8a}').map_or(rest, |end| &rest[..end]);
        let end = [content.text.as_str(), content.text.trim(), content.text.trim_end(), content.text.trim_start()]
            .into_iter()
            .filter(|candidate| text[cursor..].starts_with(candidate))
            .map(|candidate| cursor + candidate.len())
            .find(|&end| text[end..].starts_with(next))?;
        parts.push(Part { role: content.role.clone(), start: cursor, end });
        cursor = end;
    }
    (&text[cursor..] == rest).then_some(parts)
}

/// Parts of the text as spans of its tokens. A token that reaches over a border belongs to the part in which it begins.
pub(super) fn over_tokens(text: &str, parts: &[Part], tokens: &[TokenId], vocabulary: &Vocabulary) -> Vec<Span> {
    if parts.is_empty() {
        return Vec::new();
    }
    let Some(starts) = byte_starts(text, tokens, vocabulary) else { return Vec::new() };
    let mut spans: Vec<Span> = Vec::new();
    let mut parts = parts.iter().peekable();
    for (index, start) in starts.into_iter().enumerate() {
        while parts.next_if(|part| part.end <= start).is_some() {}
        let (role, own) = match parts.peek() {
            Some(part) if part.start <= start => (part.role.as_str(), part.start),
            _ => (TEMPLATE, usize::MAX),
        };
        let index = index as u32;
        match spans.last_mut() {
            // Two messages of one role that touch are still two.
            Some(last) if last.role == role && start != own => last.end = index + 1,
            _ => spans.push(Span { role: role.to_owned(), start: index, end: index + 1 }),
        }
    }
    spans
}

/// Where in the text each token begins; `None` when the tokens are not the text, e.g. because the tokenizer
/// normalises it. Tokens that the tokenizer put before the text begin at 0.
fn byte_starts(text: &str, tokens: &[TokenId], vocabulary: &Vocabulary) -> Option<Vec<usize>> {
    let bytes = text.as_bytes();
    let mut cursor = 0;
    let mut starts = Vec::with_capacity(tokens.len());
    for (index, &token) in tokens.iter().enumerate() {
        let piece = vocabulary.piece(token);
        starts.push(cursor);
        if bytes[cursor..].starts_with(piece) {
            cursor += piece.len();
        } else if index == 0 && piece.first() == Some(&b' ') && bytes.starts_with(&piece[1..]) {
            // SentencePiece puts a space before the first word.
            cursor += piece.len() - 1;
        } else if !vocabulary.is_control(token) {
            return None;
        }
    }
    (cursor == bytes.len()).then_some(starts)
}
