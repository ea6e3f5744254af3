//! What a slot remembers of a conversation, so that the client's next request finds its state again: which answers it
//! generated, and which messages it dropped.
//!
//! A client sends the whole conversation each time, and its template writes past answers without their thinking. The
//! model has seen them with it: [`align`] puts the tokens back as they were generated, where the text that the client
//! sent is what it was given. In the same way, messages that were dropped before are left out again.

use super::moved;
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use std::ops::Range;
use xxhash_rust::xxh3::xxh3_64;

/// Thinking ends with one of these; what follows is the answer that clients send back.
const THINKING_ENDS: [&str; 6] =
    ["</think>", "</thinking>", "</thought>", "[/THINK]", "<|END_THINKING|>", "<|channel|>final<|message|>"];

/// Tokens before a generated answer that belong to it: what the template wrote to begin it, perhaps with empty thinking.
const OPENING: usize = 16;

/// What is remembered of the tokens of a sequence, by their indices in it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(in crate::engine) struct Memory {
    pub(super) gaps: Vec<Gap>,
    pub(super) answers: Vec<Answer>,
}

/// Messages that were dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gap {
    pub at: usize,
    pub len: usize,
    pub hash: u64,
    /// The messages, by role and text without thinking.
    pub messages: Vec<u64>,
}

/// An answer as it was generated, without the token that ended it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub start: usize,
    pub tokens: Vec<TokenId>,
}

/// A prompt in the light of a memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::engine) struct Aligned {
    pub tokens: Vec<TokenId>,
    pub spans: Vec<Span>,
    /// What was left out, in the indices of the prompt.
    pub left_out: Vec<Range<usize>>,
}

impl Memory {
    pub fn is_empty(&self) -> bool {
        self.gaps.is_empty() && self.answers.is_empty()
    }

    /// Forgets what is not about the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.gaps.retain(|gap| gap.at <= len);
        // The last token of an answer is drawn, and never decoded.
        self.answers.retain(|answer| answer.start < len && answer.start + answer.tokens.len() <= len + 1);
    }

    /// Remembers the answer that was generated from `start` on. The token that ended it does not belong to it.
    pub fn answered(&mut self, start: usize, generated: &[TokenId], vocabulary: &Vocabulary) {
        let ended = generated.last().is_some_and(|&token| vocabulary.is_end_of_generation(token));
        let tokens = &generated[..generated.len() - usize::from(ended)];
        if !tokens.is_empty() {
            self.answers.push(Answer { start, tokens: tokens.to_vec() });
        }
    }

    /// Remembers what is about to be dropped from a sequence, and follows it. `ranges` are in order.
    pub fn dropped(&mut self, tokens: &[TokenId], spans: &[Span], ranges: &[Range<usize>], vocabulary: &Vocabulary) {
        self.cut(ranges);
        for range in ranges {
            let messages = spans
                .iter()
                .filter(|span| span.role != "template" && range.contains(&(span.start as usize)))
                .map(|span| message_hash(span, tokens, vocabulary))
                .collect();
            let at = moved(range.start, ranges);
            let hash = hash(&tokens[range.clone()]);
            // Behind older gaps at the same place: their messages came before.
            let place = self.gaps.partition_point(|gap| gap.at <= at);
            self.gaps.insert(place, Gap { at, len: range.len(), hash, messages });
        }
    }

    /// Follows a sequence whose tokens were cut out without their being remembered.
    pub fn cut(&mut self, ranges: &[Range<usize>]) {
        self.gaps.retain(|gap| !ranges.iter().any(|range| range.start < gap.at && gap.at < range.end));
        self.answers.retain(|answer| {
            let own = answer.start..answer.start + answer.tokens.len();
            !ranges.iter().any(|range| range.start < own.end && own.start < range.end)
        });
        for gap in &mut self.gaps {
            gap.at = moved(gap.at, ranges);
        }
        for answer in &mut self.answers {
            answer.start = moved(answer.start, ranges);
        }
    }
}

/// Reads a prompt in the light of what a slot holds. `forget` also leaves out again what was dropped before. `None`
/// when nothing in the prompt is touched.
pub(in crate::engine) fn align(
    prompt: &[TokenId],
    spans: &[Span],
    held: &[TokenId],
    memory: &Memory,
    vocabulary: &Vocabulary,
    forget: bool,
) -> Option<Aligned> {
    if spans.is_empty() || memory.is_empty() {
        return None;
    }
    let mut walk = Walk { prompt, spans, vocabulary, tokens: Vec::new(), edits: Vec::new(), at: 0 };
    let mut gaps = memory.gaps.iter().filter(|_| forget).peekable();
    let mut left_out = Vec::new();
    loop {
        while let Some(gap) = gaps.next_if(|gap| gap.at <= walk.tokens.len()) {
            if gap.at == walk.tokens.len()
                && let Some(end) = walk.end_of(gap)
            {
                left_out.push(walk.at..end);
                walk.replace(end, &[]);
            }
        }
        if walk.at == prompt.len() {
            break;
        }
        let here = walk.tokens.len();
        if held.get(here) == Some(&prompt[walk.at]) {
            walk.copy(1);
            continue;
        }
        let answer = memory.answers.iter().rfind(|answer| {
            (answer.start.saturating_sub(OPENING)..=answer.start + answer.tokens.len()).contains(&here)
        });
        let Some((back, end, tokens)) = answer.and_then(|answer| walk.answer(answer, held)) else { break };
        walk.tokens.truncate(here - back);
        walk.at -= back;
        walk.replace(end, &tokens);
        // Whatever follows now, the same place must not be tried twice.
        if walk.tokens.len() == here {
            break;
        }
    }
    walk.copy(prompt.len() - walk.at);
    if walk.tokens == prompt {
        return None;
    }
    let spans = walk.spans_now();
    Some(Aligned { tokens: walk.tokens, spans, left_out })
}

struct Walk<'a> {
    prompt: &'a [TokenId],
    spans: &'a [Span],
    vocabulary: &'a Vocabulary,
    /// The prompt as it will be, up to `at`.
    tokens: Vec<TokenId>,
    /// What became something else: a range of the prompt, and how many tokens it is now.
    edits: Vec<(Range<usize>, usize)>,
    at: usize,
}

impl Walk<'_> {
    fn copy(&mut self, count: usize) {
        self.tokens.extend_from_slice(&self.prompt[self.at..self.at + count]);
        self.at += count;
    }

    fn replace(&mut self, end: usize, tokens: &[TokenId]) {
        self.edits.push((self.at..end, tokens.len()));
        self.tokens.extend_from_slice(tokens);
        self.at = end;
    }

    /// Where the messages of a gap end, when they stand here.
    fn end_of(&self, gap: &Gap) -> Option<usize> {
        let end = self.at + gap.len;
        if self.prompt.get(self.at..end).is_some_and(|tokens| hash(tokens) == gap.hash) {
            return Some(end);
        }
        // Answers may have been written down otherwise than they were generated: then by text, message for message.
        let mut said = self.spans.iter().filter(|span| span.role != "template" && span.start as usize >= self.at);
        if gap.messages.is_empty() || said.clone().next()?.start as usize != self.at {
            return None;
        }
        for &message in &gap.messages {
            if message_hash(said.next()?, self.prompt, self.vocabulary) != message {
                return None;
            }
        }
        let next = said.next()?;
        (next.role == "user").then_some(next.start as usize)
    }

    /// An answer as it was generated, up to where it stands for what the client sent, and how many tokens back from here
    /// it begins.
    fn answer(&self, answer: &Answer, held: &[TokenId]) -> Option<(usize, usize, Vec<TokenId>)> {
        // The client's text may agree with the thinking for a while, which means nothing.
        let back = self.tokens.len().saturating_sub(answer.start);
        let (here, at) = (self.tokens.len() - back, self.at.checked_sub(back)?);
        if self.edits.last().is_some_and(|(range, _)| range.end > at) {
            return None;
        }
        let said = self.spans.iter().find(|span| span.role != "template" && span.end as usize > at)?;
        if said.role != "assistant" || said.start as usize > at + OPENING {
            return None;
        }
        let rest = &self.prompt[at..];
        let ends = |&token: &TokenId| self.vocabulary.is_end_of_generation(token);
        let behind = said.end as usize - at;
        let end = rest.iter().skip(behind).take(OPENING).position(ends).map_or(behind, |more| behind + more);
        let mut ours = held.get(here..answer.start)?.to_vec();
        ours.extend_from_slice(&answer.tokens);
        let (ours_text, theirs) = (self.vocabulary.decode(&ours), self.vocabulary.decode(&rest[..end]));
        let same = visible(&ours_text).trim() == visible(&theirs).trim();
        same.then_some((back, at + end, ours))
    }

    fn spans_now(&self) -> Vec<Span> {
        let now = |index: u32| {
            let index = index as usize;
            let mut shift = 0isize;
            for (range, len) in &self.edits {
                if index >= range.end {
                    shift += *len as isize - range.len() as isize;
                } else if index > range.start {
                    // Within what was replaced: as far as there is something.
                    return ((range.start as isize + shift) as usize + (index - range.start).min(*len)) as u32;
                }
            }
            (index as isize + shift) as u32
        };
        let mut spans: Vec<Span> = Vec::with_capacity(self.spans.len());
        for span in self.spans {
            let (start, end) = (now(span.start), now(span.end));
            match spans.last_mut() {
                _ if start >= end => {}
                Some(last) if last.role == "template" && span.role == "template" => last.end = end,
                _ => spans.push(Span { role: span.role.clone(), start, end }),
            }
        }
        spans
    }
}

/// The text behind its thinking.
fn visible(text: &str) -> &str {
    THINKING_ENDS
        .iter()
        .filter_map(|mark| text.rfind(mark).map(|at| at + mark.len()))
        .max()
        .map_or(text, |from| &text[from..])
}

fn message_hash(span: &Span, tokens: &[TokenId], vocabulary: &Vocabulary) -> u64 {
    let text = vocabulary.decode(&tokens[span.start as usize..span.end as usize]);
    let text = if span.role == "assistant" { visible(&text) } else { &text };
    xxh3_64(format!("{}\0{}", span.role, text.trim()).as_bytes())
}

fn hash(tokens: &[TokenId]) -> u64 {
    xxh3_64(bytemuck::cast_slice(tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Special;

    const END: TokenId = 1;

    /// Token 1 ends a message, 2 is `</think>`, every other is the letter of its number.
    fn vocabulary() -> Vocabulary {
        let pieces = (0..128u8)
            .map(|id| match id {
                1 => b"<end>".to_vec().into(),
                2 => b"</think>".to_vec().into(),
                id => vec![id].into_boxed_slice(),
            })
            .collect();
        Vocabulary::new(pieces, (0..128).map(|id| id == END).collect(), vec![END], Special::default(), |_, _, _| {
            Vec::new()
        })
    }

    fn text(text: &str) -> Vec<TokenId> {
        text.bytes().map(TokenId::from).collect()
    }

    /// `U` user, `A` assistant; a message is its letter, a colon, its text and the end token.
    fn chat(messages: &[(&str, &str)]) -> (Vec<TokenId>, Vec<Span>) {
        let (mut tokens, mut spans) = (Vec::new(), Vec::new());
        let mut own = 0;
        for (role, content) in messages {
            tokens.extend(text(if *role == "user" { "U:" } else { "A:" }));
            let start = tokens.len() as u32;
            spans.push(Span { role: "template".into(), start: own, end: start });
            tokens.extend(text(content));
            own = tokens.len() as u32;
            spans.push(Span { role: (*role).into(), start, end: own });
            tokens.push(END);
        }
        tokens.extend(text("A:"));
        spans.push(Span { role: "template".into(), start: own, end: tokens.len() as u32 });
        (tokens, spans)
    }

    /// A slot after the first answer, which thought before it spoke. The end token was drawn, and never decoded.
    fn slot(thought: &str, said: &str) -> (Vec<TokenId>, Memory) {
        let vocabulary = vocabulary();
        let (mut held, _) = chat(&[("user", "hi")]);
        let start = held.len();
        let mut generated = text(thought);
        if !thought.is_empty() {
            generated.push(2);
        }
        generated.extend(text(said));
        generated.push(END);
        let mut memory = Memory::default();
        memory.answered(start, &generated, &vocabulary);
        generated.pop();
        held.extend(generated);
        memory.truncate(held.len());
        (held, memory)
    }

    #[test]
    fn thinking_comes_back() {
        let (held, memory) = slot("hmm", "hello");
        let (prompt, spans) = chat(&[("user", "hi"), ("assistant", "hello"), ("user", "more")]);
        let aligned = align(&prompt, &spans, &held, &memory, &vocabulary(), false).unwrap();
        assert_eq!(aligned.tokens[..held.len()], held);
        assert_eq!(vocabulary().decode(&aligned.tokens), "U:hi<end>A:hmm</think>hello<end>U:more<end>A:");
        let said: Vec<(String, String)> = aligned
            .spans
            .iter()
            .map(|span| {
                (span.role.clone(), vocabulary().decode(&aligned.tokens[span.start as usize..span.end as usize]))
            })
            .collect();
        assert_eq!(said[1], ("user".into(), "hi".into()));
        assert_eq!(said.last().unwrap().1, "<end>A:");
        assert_eq!(said[said.len() - 2], ("user".into(), "more".into()));
    }

    #[test]
    fn an_answer_that_the_client_changed_stays_changed() {
        let (held, memory) = slot("hmm", "hello");
        for changed in ["hell", "hello!", "no", "ello"] {
            let (prompt, spans) = chat(&[("user", "hi"), ("assistant", changed), ("user", "more")]);
            assert_eq!(align(&prompt, &spans, &held, &memory, &vocabulary(), false), None, "{changed}");
        }
        let (plain, memory) = slot("", "yes hello");
        let (prompt, spans) = chat(&[("user", "hi"), ("assistant", "hello"), ("user", "more")]);
        assert_eq!(align(&prompt, &spans, &plain, &memory, &vocabulary(), false), None, "only thinking is left out");
    }

    #[test]
    fn an_answer_that_comes_back_as_it_was_needs_nothing() {
        let (held, memory) = slot("", "hello");
        let (prompt, spans) = chat(&[("user", "hi"), ("assistant", "hello"), ("user", "more")]);
        assert_eq!(align(&prompt, &spans, &held, &memory, &vocabulary(), false), None);
    }

    #[test]
    fn dropped_messages_are_left_out_again() {
        let vocabulary = vocabulary();
        let conversation =
            [("user", "one"), ("assistant", "first"), ("user", "two"), ("assistant", "second"), ("user", "three")];
        let (full, spans) = chat(&conversation);
        let (start, end) = (spans[1].start as usize, spans[5].start as usize);
        let mut memory = Memory::default();
        memory.dropped(&full, &spans, &[start..end], &vocabulary);
        let mut held = full.clone();
        held.drain(start..end);
        assert_eq!(vocabulary.decode(&held), "U:two<end>A:second<end>U:three<end>A:");
        let mut longer = conversation.to_vec();
        longer.extend([("assistant", "third"), ("user", "four")]);
        let (prompt, prompt_spans) = chat(&longer);
        let aligned = align(&prompt, &prompt_spans, &held, &memory, &vocabulary, true).unwrap();
        assert_eq!(vocabulary.decode(&aligned.tokens), "U:two<end>A:second<end>U:three<end>A:third<end>U:four<end>A:");
        assert_eq!(aligned.left_out, [start..end]);
        assert_eq!(align(&prompt, &prompt_spans, &held, &memory, &vocabulary, false), None);
        // And once more, behind it.
        let (second, third) = (aligned.spans[1].start as usize, aligned.spans[5].start as usize);
        let mut memory = memory.clone();
        memory.dropped(&aligned.tokens, &aligned.spans, &[second..third], &vocabulary);
        let mut held = aligned.tokens.clone();
        held.drain(second..third);
        let aligned = align(&prompt, &prompt_spans, &held, &memory, &vocabulary, true).unwrap();
        assert_eq!(vocabulary.decode(&aligned.tokens), "U:three<end>A:third<end>U:four<end>A:");
        // A client that says something else than what was dropped is taken at its word.
        longer[0] = ("user", "other");
        let (prompt, prompt_spans) = chat(&longer);
        assert_eq!(align(&prompt, &prompt_spans, &held, &memory, &vocabulary, true), None);
    }

    #[test]
    fn dropped_messages_are_known_without_their_thinking() {
        let vocabulary = vocabulary();
        let thinking = [("user", "one"), ("assistant", "hm\u{2}first"), ("user", "two")];
        let (full, spans) = chat(&thinking);
        let (start, end) = (spans[1].start as usize, spans[5].start as usize);
        let mut memory = Memory::default();
        memory.dropped(&full, &spans, &[start..end], &vocabulary);
        let mut held = full.clone();
        held.drain(start..end);
        let (prompt, prompt_spans) = chat(&[("user", "one"), ("assistant", "first"), ("user", "two")]);
        let aligned = align(&prompt, &prompt_spans, &held, &memory, &vocabulary, true).unwrap();
        assert_eq!(vocabulary.decode(&aligned.tokens), "U:two<end>A:");
    }

    #[test]
    fn memory_follows_the_tokens() {
        let (_, mut memory) = slot("", "hello");
        memory.cut(&[0..3]);
        assert_eq!(memory.answers[0].start, 4);
        let mut cut = memory.clone();
        cut.cut(&[5..6]);
        assert!(cut.is_empty(), "an answer with a hole is no answer");
        memory.truncate(7);
        assert!(memory.is_empty());
    }
}
