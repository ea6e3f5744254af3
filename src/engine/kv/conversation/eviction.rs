//! Parts of a conversation that can be dropped from a full context, oldest first.
//!
//! Most parts are turns. A turn extends from the content of one user message to the content of the next. Templates
//! write the same text before both, so the remaining tokens equal the conversation rendered without the turn, whatever
//! the template writes between messages. Within the last turn, a tool call can be dropped together with its result if
//! the template ends each message with an end-of-generation token.

use crate::events::{EvictedMessage, Span, TokenId, is_image_token};
use crate::model::{Vocabulary, common_prefix, without_nul};
use std::ops::Range;

/// Maximum characters of a dropped message that are reported to the client.
const PREVIEW_CHARS: usize = 80;

/// A part of a conversation that is dropped as a whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DroppablePart {
    pub range: Range<usize>,
    /// Role and token range of each message.
    pub contents: Vec<(String, Range<usize>)>,
}

impl DroppablePart {
    /// Returns the messages as they are reported to the client.
    pub fn evicted_messages(&self, tokens: &[TokenId], vocabulary: &Vocabulary) -> Vec<EvictedMessage> {
        self.contents.iter().map(|(role, range)| evicted_message(role, &tokens[range.clone()], vocabulary)).collect()
    }
}

/// Returns the messages within these ranges as they are reported to the client.
pub fn evicted_messages(
    tokens: &[TokenId],
    spans: &[Span],
    ranges: &[Range<usize>],
    vocabulary: &Vocabulary,
) -> Vec<EvictedMessage> {
    let message_spans: Vec<&Span> = spans.iter().filter(|span| span.role != "template").collect();
    let parts = ranges.iter().map(|range| make_part(tokens, range.clone(), &message_spans, vocabulary));
    parts.flat_map(|part| part.evicted_messages(tokens, vocabulary)).collect()
}

fn evicted_message(role: &str, content: &[TokenId], vocabulary: &Vocabulary) -> EvictedMessage {
    EvictedMessage {
        role: role.to_owned(),
        tokens: content.len() as u32,
        text: without_nul(vocabulary.decode(content).chars().take(PREVIEW_CHARS).collect()),
    }
}

/// Returns the parts that can be dropped, in the order in which they should be dropped: whole turns from the oldest,
/// then tool calls of the last turn with their results. System messages, the last user message and the last assistant
/// message stay.
pub fn droppable_parts(tokens: &[TokenId], spans: &[Span], vocabulary: &Vocabulary) -> Vec<DroppablePart> {
    let message_spans: Vec<&Span> = spans.iter().filter(|span| span.role != "template").collect();
    let users: Vec<usize> = (0..message_spans.len()).filter(|&at| message_spans[at].role == "user").collect();
    let Some(&last_user) = users.last() else { return Vec::new() };
    // An assistant message that only calls a tool has no span, but the result of the tool has one.
    let last_answer = message_spans.iter().rposition(|span| span.role == "assistant" || span.role == "tool");
    let mut parts = Vec::new();
    for pair in users.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let kept = |at: usize| {
            Some(at) == last_answer || !matches!(message_spans[at].role.as_str(), "user" | "assistant" | "tool")
        };
        if !(from..to).any(kept) {
            parts.push(make_part(
                tokens,
                message_spans[from].start as usize..message_spans[to].start as usize,
                &message_spans[from..to],
                vocabulary,
            ));
        }
    }
    parts.extend(tool_pairs(tokens, &message_spans[last_user..], vocabulary));
    parts
}

/// Selects parts in order until `target` or fewer of `len` tokens are left. Returns `None` if more than `max` tokens
/// are left after all parts are dropped.
pub fn select_parts(parts: Vec<DroppablePart>, len: usize, max: usize, target: usize) -> Option<Vec<DroppablePart>> {
    let mut left = len;
    let mut selected = Vec::new();
    for part in parts {
        if left <= target {
            break;
        }
        left -= part.range.len();
        selected.push(part);
    }
    selected.sort_by_key(|part| part.range.start);
    (left <= max).then_some(selected)
}

/// Returns the tool calls with their results in the last turn, except the last call. `message_spans` are those of the
/// turn.
fn tool_pairs(tokens: &[TokenId], message_spans: &[&Span], vocabulary: &Vocabulary) -> Vec<DroppablePart> {
    let Some(user) = message_spans.first() else { return Vec::new() };
    let messages = messages(tokens, user.start as usize..tokens.len(), message_spans, vocabulary);
    // The first message is the user's. A call is a message directly before that of a tool.
    let calls: Vec<usize> = (1..messages.len())
        .filter(|&at| {
            let is_tool = |message: &Range<usize>| {
                message_spans.iter().any(|span| span.role == "tool" && begins_in(span, message))
            };
            !is_tool(&messages[at]) && messages.get(at + 1).is_some_and(is_tool)
        })
        .collect();
    calls
        .windows(2)
        .map(|pair| make_part(tokens, messages[pair[0]].start..messages[pair[1]].start, message_spans, vocabulary))
        .filter(|part| part.contents.iter().all(|(role, _)| role == "assistant" || role == "tool"))
        .collect()
}

/// Returns the messages within a range. A message ends with an end-of-generation token of the template and the
/// whitespace after it.
fn messages(
    tokens: &[TokenId],
    within: Range<usize>,
    message_spans: &[&Span],
    vocabulary: &Vocabulary,
) -> Vec<Range<usize>> {
    let inside = |at: usize| message_spans.iter().any(|span| (span.start as usize..span.end as usize).contains(&at));
    let blank = |at: usize| !inside(at) && is_blank(tokens[at], vocabulary);
    let (mut messages, mut start, mut at) = (Vec::new(), within.start, within.start);
    while at < within.end {
        at += 1;
        if vocabulary.is_end_of_generation(tokens[at - 1]) && !inside(at - 1) {
            while at < within.end && blank(at) {
                at += 1;
            }
            messages.push(start..at);
            start = at;
        }
    }
    messages
}

fn begins_in(span: &Span, range: &Range<usize>) -> bool {
    range.contains(&(span.start as usize))
}

fn is_blank(token: TokenId, vocabulary: &Vocabulary) -> bool {
    !vocabulary.is_control(token) && !is_image_token(token) && vocabulary.piece(token).trim_ascii().is_empty()
}

/// Creates a part from a range and the messages that start in it. A message without a span comes from an assistant and
/// has only tool calls; its content is the text between the template's markers.
fn make_part(
    tokens: &[TokenId],
    range: Range<usize>,
    message_spans: &[&Span],
    vocabulary: &Vocabulary,
) -> DroppablePart {
    let within: Vec<&Span> = message_spans.iter().copied().filter(|span| begins_in(span, &range)).collect();
    let mut contents: Vec<(String, Range<usize>)> =
        within.iter().map(|span| (span.role.clone(), span.start as usize..span.end as usize)).collect();
    for message in messages(tokens, range.clone(), &within, vocabulary) {
        if !within.iter().any(|span| begins_in(span, &message)) {
            contents.extend(
                tool_call_content(tokens, message, vocabulary).map(|content| ("assistant".to_owned(), content)),
            );
        }
    }
    contents.sort_by_key(|(_, content)| content.start);
    DroppablePart { range, contents }
}

/// Returns the content of an assistant message between its header and its end. The header is known from the end of the
/// prompt, where it starts the next answer. Returns `None` for a message with another header.
fn tool_call_content(tokens: &[TokenId], message: Range<usize>, vocabulary: &Vocabulary) -> Option<Range<usize>> {
    let ends = |token: &TokenId| vocabulary.is_end_of_generation(*token);
    let last_end = tokens.iter().rposition(ends)?;
    let header: Vec<TokenId> =
        tokens[last_end + 1..].iter().copied().skip_while(|token| is_blank(*token, vocabulary)).collect();
    let message_tokens = &tokens[message.clone()];
    let header_len = common_prefix(message_tokens, &header);
    // A header has a marker and the role; the headers of some models have only a marker.
    if header_len < header.len().min(2) {
        return None;
    }
    let start = message.start + header_len;
    let last = message_tokens.iter().rposition(|token| !ends(token) && !is_blank(*token, vocabulary))?;
    let end = message.start + last + 1;
    (header_len > 0 && start < end).then_some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::kv::conversation::eviction_target;
    use crate::model::SpecialTokens;

    const END: TokenId = 1;
    const BEGIN: TokenId = 2;
    const NEWLINE: TokenId = 3;

    fn vocabulary() -> Vocabulary {
        let pieces = (0..100u8)
            .map(|id| match id {
                1 => b"<end>".to_vec().into(),
                2 => b"<begin>".to_vec().into(),
                3 => b"\n".to_vec().into(),
                id => vec![id].into_boxed_slice(),
            })
            .collect();
        Vocabulary::new(
            pieces,
            (0..100).map(|id| id == END || id == BEGIN).collect(),
            vec![END],
            SpecialTokens::default(),
            |_, _, _| Vec::new(),
        )
    }

    /// Renders a conversation in `ChatML`: `<begin> role newline content <end> newline`. Messages are given by role and
    /// number of tokens; empty contents have no span.
    fn chat(messages: &[(&str, usize)]) -> (Vec<TokenId>, Vec<Span>) {
        let (mut tokens, mut spans): (Vec<TokenId>, Vec<Span>) = (Vec::new(), Vec::new());
        let mut template_from = 0;
        for (index, &(role, len)) in messages.iter().enumerate() {
            let header = match role {
                "tool" => "user",
                role => role,
            };
            tokens.extend([BEGIN, 10 + header.len() as TokenId, NEWLINE]);
            if len > 0 {
                spans.push(Span { role: "template".into(), start: template_from, end: tokens.len() as u32 });
                let start = tokens.len() as u32;
                tokens.extend(std::iter::repeat_n(50 + index as TokenId, len));
                template_from = tokens.len() as u32;
                spans.push(Span { role: role.into(), start, end: template_from });
            }
            tokens.extend([END, NEWLINE]);
        }
        tokens.extend([BEGIN, 19, NEWLINE]);
        spans.push(Span { role: "template".into(), start: template_from, end: tokens.len() as u32 });
        (tokens, spans)
    }

    fn without(messages: &[(&str, usize)], dropped: &[usize]) -> Vec<TokenId> {
        let (tokens, _) = chat(messages);
        let mut left = Vec::new();
        let mut start = 0;
        for (index, &(_, len)) in messages.iter().enumerate() {
            let end = start + len + 5;
            if !dropped.contains(&index) {
                left.extend_from_slice(&tokens[start..end]);
            }
            start = end;
        }
        left.extend_from_slice(&tokens[start..]);
        left
    }

    fn dropped(messages: &[(&str, usize)], max: usize, target: usize) -> Option<Vec<TokenId>> {
        let (mut tokens, spans) = chat(messages);
        let parts = select_parts(droppable_parts(&tokens, &spans, &vocabulary()), tokens.len(), max, target)?;
        for part in parts.iter().rev() {
            tokens.drain(part.range.clone());
        }
        Some(tokens)
    }

    #[test]
    fn oldest_turns_are_dropped_first() {
        let messages = [
            ("system", 4),
            ("user", 10),
            ("assistant", 20),
            ("user", 10),
            ("assistant", 0),
            ("tool", 30),
            ("assistant", 5),
            ("user", 10),
            ("assistant", 7),
            ("user", 3),
        ];
        assert_eq!(dropped(&messages, 1000, 140).unwrap(), without(&messages, &[1, 2]));
        assert_eq!(dropped(&messages, 1000, 10).unwrap(), without(&messages, &[1, 2, 3, 4, 5, 6]));
        assert_eq!(dropped(&messages, 20, 10), None, "the last user and assistant message stay, with their turn");
    }

    #[test]
    fn finished_tool_pairs_are_dropped_after_turns() {
        let messages = [
            ("user", 10),
            ("assistant", 5),
            ("user", 8),
            ("assistant", 0),
            ("tool", 30),
            ("assistant", 6),
            ("tool", 30),
            ("assistant", 0),
            ("tool", 4),
        ];
        assert_eq!(dropped(&messages, 1000, 125).unwrap(), without(&messages, &[0, 1]));
        assert_eq!(dropped(&messages, 1000, 85).unwrap(), without(&messages, &[0, 1, 3, 4]));
        assert_eq!(dropped(&messages, 1000, 1).unwrap(), without(&messages, &[0, 1, 3, 4, 5, 6]));
    }

    #[test]
    fn required_messages_are_never_dropped() {
        let only = [("system", 50), ("user", 50), ("assistant", 50), ("user", 50)];
        let (tokens, spans) = chat(&only);
        assert_eq!(droppable_parts(&tokens, &spans, &vocabulary()), []);
        let with_system = [("user", 5), ("assistant", 5), ("system", 5), ("user", 5), ("assistant", 5), ("user", 5)];
        let (tokens, spans) = chat(&with_system);
        assert_eq!(droppable_parts(&tokens, &spans, &vocabulary()), [], "a turn with a system message stays");
        assert_eq!(droppable_parts(&tokens, &[], &vocabulary()), []);
        assert_eq!(eviction_target(512), 384);
    }

    #[test]
    fn tool_call_without_content_is_listed_without_markers() {
        let messages =
            [("user", 3), ("assistant", 0), ("tool", 4), ("assistant", 2), ("user", 1), ("assistant", 1), ("user", 1)];
        let (mut tokens, mut spans) = chat(&messages);
        // A call in place of the content.
        let at = 3 + 3 + 2 + 3;
        tokens.splice(at..at, [80, 81]);
        for span in &mut spans {
            span.start += if span.start as usize >= at { 2 } else { 0 };
            span.end += if span.end as usize >= at { 2 } else { 0 };
        }
        let parts = droppable_parts(&tokens, &spans, &vocabulary());
        let reported = parts[0].evicted_messages(&tokens, &vocabulary());
        let listed: Vec<_> = reported.iter().map(|one| (one.role.as_str(), one.tokens, one.text.as_str())).collect();
        assert_eq!(listed, [("user", 3, "222"), ("assistant", 2, "PQ"), ("tool", 4, "4444"), ("assistant", 2, "55")]);
        let range = [parts[0].range.clone()];
        assert_eq!(
            evicted_messages(&tokens, &spans, &range, &vocabulary()),
            reported,
            "omitted messages are listed in the same way"
        );
    }

    #[test]
    fn dropped_messages_are_listed_for_client() {
        let messages = [("user", 3), ("assistant", 2), ("user", 1), ("assistant", 1), ("user", 1)];
        let (tokens, spans) = chat(&messages);
        let parts = droppable_parts(&tokens, &spans, &vocabulary());
        let reported = parts[0].evicted_messages(&tokens, &vocabulary());
        assert_eq!(
            reported.iter().map(|one| (one.role.as_str(), one.tokens)).collect::<Vec<_>>(),
            [("user", 3), ("assistant", 2)]
        );
        assert_eq!(reported[0].text, "222");
    }
}
