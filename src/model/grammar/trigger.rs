//! Search for the trigger of a lazy constraint in the generated text.

use super::Trigger;
use crate::events::TokenId;
use memchr::memmem;

/// A search for a trigger in the text generated so far.
#[derive(Debug, Clone)]
pub(super) struct TriggerMatcher {
    trigger: Trigger,
    /// Length in bytes of the longest text to search for.
    longest: usize,
    text: Vec<u8>,
    /// Start of each token's text in `text`.
    starts: Vec<usize>,
    /// Position after the first text that ends reasoning.
    reasoning_ended_at: Option<usize>,
    /// Position where an opening may start; `None` if an opening is no longer possible.
    anchor: Option<usize>,
}

impl TriggerMatcher {
    pub(super) fn new(mut trigger: Trigger) -> Self {
        trigger.texts.retain(|text| !text.is_empty());
        trigger.openings.retain(|text| !text.is_empty());
        let longest = trigger.texts.iter().chain([&trigger.reasoning_end_marker]).map(String::len).max().unwrap_or(0);
        let anchor = first_anchor(&trigger);
        Self { trigger, longest, text: Vec::new(), starts: Vec::new(), reasoning_ended_at: None, anchor }
    }

    /// Returns the text that the grammar starts with, if the token completes the trigger. This is the part of `piece`
    /// after the trigger, or the whole opening.
    pub(super) fn text_after_trigger(&self, token: TokenId, piece: &[u8]) -> Option<Vec<u8>> {
        let from = self.text.len().saturating_sub(self.longest.saturating_sub(1));
        let recent = &self.text[from..];
        let window = [recent, piece].concat();
        if !self.is_reasoning() || ends_within(&window, recent.len(), &self.trigger.reasoning_end_marker).is_some() {
            if self.trigger.tokens.contains(&token) {
                return Some(Vec::new());
            }
            // Find the first trigger that ends inside the new piece.
            let end = self.trigger.texts.iter().filter_map(|text| ends_within(&window, recent.len(), text)).min();
            if let Some(end) = end {
                return Some(window[end..].to_vec());
            }
        }
        let opening_candidate = self.opening_candidate(&window, recent.len(), piece)?;
        let without_spaces = without_space(opening_candidate.iter());
        let opened = self.trigger.openings.iter().any(|opening| without_spaces.starts_with(opening.as_bytes()));
        opened.then(|| opening_candidate.trim_ascii_start().to_vec())
    }

    /// Records an appended token.
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.starts.push(self.text.len());
        let before = self.text.len();
        self.text.extend_from_slice(piece);
        self.find_reasoning_end(before);
        self.advance_anchor(before);
    }

    /// Removes the last `count` tokens.
    pub(super) fn pop(&mut self, count: usize) {
        let keep = self.starts.len().saturating_sub(count);
        if let Some(&start) = self.starts.get(keep) {
            self.text.truncate(start);
            self.starts.truncate(keep);
            self.reasoning_ended_at = None;
            self.find_reasoning_end(0);
            self.anchor = first_anchor(&self.trigger);
            self.advance_anchor(0);
        }
    }

    /// Returns true if the text ends within reasoning.
    fn is_reasoning(&self) -> bool {
        let Trigger { reasoning_start_marker, reasoning_end_marker, starts_in_reasoning, .. } = &self.trigger;
        let has_started = || {
            let marker = reasoning_start_marker.trim().as_bytes();
            !reasoning_start_marker.is_empty() && self.text.trim_ascii_start().starts_with(marker)
        };
        !reasoning_end_marker.is_empty() && self.reasoning_ended_at.is_none() && (*starts_in_reasoning || has_started())
    }

    /// Finds the end of reasoning in the text from `before` on.
    fn find_reasoning_end(&mut self, before: usize) {
        if self.reasoning_ended_at.is_none() {
            self.reasoning_ended_at = ends_within(&self.text, before, &self.trigger.reasoning_end_marker);
        }
    }

    /// Returns the text from the possible start of an opening to the end of the new piece.
    fn opening_candidate(&self, window: &[u8], recent: usize, piece: &[u8]) -> Option<Vec<u8>> {
        if self.trigger.openings.is_empty() {
            return None;
        }
        if let Some(end) = ends_within(window, recent, &self.trigger.reasoning_end_marker) {
            return Some(window[end..].to_vec());
        }
        self.anchor.map(|anchor| [&self.text[anchor..], piece].concat())
    }

    /// Updates the anchor for the text from `before` on.
    fn advance_anchor(&mut self, before: usize) {
        if self.trigger.openings.is_empty() {
            return;
        }
        let marker = self.trigger.reasoning_end_marker.as_bytes();
        let from = before.saturating_sub(marker.len().saturating_sub(1));
        if let Some(at) = (!marker.is_empty()).then(|| memmem::rfind(&self.text[from..], marker)).flatten() {
            self.anchor = Some(from + at + marker.len());
        }
        self.anchor = self.anchor.filter(|&anchor| {
            let without_spaces = without_space(self.text[anchor..].iter());
            self.trigger.openings.iter().any(|opening| opening.as_bytes().starts_with(&without_spaces))
        });
    }
}

fn first_anchor(trigger: &Trigger) -> Option<usize> {
    (!trigger.starts_in_reasoning && !trigger.openings.is_empty()).then_some(0)
}

/// Returns the end of `text` in the window if it is after the first `old` bytes.
fn ends_within(window: &[u8], old: usize, text: &str) -> Option<usize> {
    if text.is_empty() {
        return None;
    }
    let first = (old + 1).saturating_sub(text.len());
    memmem::find(&window[first..], text.as_bytes()).map(|at| first + at + text.len())
}

fn without_space<'a>(bytes: impl Iterator<Item = &'a u8>) -> Vec<u8> {
    bytes.copied().filter(|byte| !byte.is_ascii_whitespace()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn text_after_a_trigger_is_found() {
        let mut trigger_matcher = TriggerMatcher::new(Trigger { tokens: vec![7], ..Trigger::text("<tool>") });
        assert_eq!(trigger_matcher.text_after_trigger(1, b"say <to"), None);
        trigger_matcher.push(b"say <to");
        assert_eq!(trigger_matcher.text_after_trigger(2, b"ol>{\"a"), Some(b"{\"a".to_vec()));
        assert_eq!(trigger_matcher.text_after_trigger(3, b"tal"), None);
        assert_eq!(trigger_matcher.text_after_trigger(7, b"x"), Some(Vec::new()));
        trigger_matcher.pop(1);
        assert_eq!(trigger_matcher.text_after_trigger(2, b"ol>"), None);
    }

    #[test]
    fn trigger_does_not_count_within_reasoning() {
        let trigger = |starts_in_reasoning| Trigger {
            tokens: vec![7],
            reasoning_start_marker: "<think>".into(),
            reasoning_end_marker: "</think>".into(),
            starts_in_reasoning,
            ..Trigger::text("<call>")
        };
        let mut opened_by_prompt = TriggerMatcher::new(trigger(true));
        let mut opened_by_answer = TriggerMatcher::new(trigger(false));
        opened_by_answer.push(b"\n<thi");
        opened_by_answer.push(b"nk>");
        for matcher in [&mut opened_by_prompt, &mut opened_by_answer] {
            matcher.push(b"I use <ca");
            assert_eq!(matcher.text_after_trigger(1, b"ll>"), None);
            assert_eq!(matcher.text_after_trigger(7, b"x"), None);
            matcher.push(b"ll></th");
            assert_eq!(matcher.text_after_trigger(1, b"ink><call>{"), Some(b"{".to_vec()));
            matcher.push(b"ink>");
            assert_eq!(matcher.text_after_trigger(1, b"<call>{"), Some(b"{".to_vec()));
            assert_eq!(matcher.text_after_trigger(7, b"x"), Some(Vec::new()));
            matcher.pop(1);
            assert_eq!(matcher.text_after_trigger(7, b"x"), None);
        }
        let mut without_reasoning = TriggerMatcher::new(trigger(false));
        without_reasoning.push(b"Hi. <think>");
        assert_eq!(without_reasoning.text_after_trigger(7, b"x"), Some(Vec::new()), "it does not start the answer");
    }

    fn opening(starts_in_reasoning: bool) -> TriggerMatcher {
        let openings = vec!["{\"name\":\"f\"".into(), "f{".into()];
        TriggerMatcher::new(Trigger {
            openings,
            reasoning_end_marker: "</think>".into(),
            starts_in_reasoning,
            ..Trigger::default()
        })
    }

    /// Returns the text that the grammar starts with, and the number of pieces before it.
    fn opened(trigger_matcher: &mut TriggerMatcher, pieces: &[&str]) -> Option<(usize, String)> {
        for (index, piece) in pieces.iter().enumerate() {
            if let Some(text_after_trigger) = trigger_matcher.text_after_trigger(0, piece.as_bytes()) {
                return Some((index, String::from_utf8(text_after_trigger).unwrap()));
            }
            trigger_matcher.push(piece.as_bytes());
        }
        None
    }

    #[test]
    fn opening_counts_only_at_the_start() {
        let found = |pieces: &[&str]| opened(&mut opening(false), pieces);
        assert_eq!(found(&["\n{ ", "\"name\"", ": \"", "f", "\", "]), Some((4, "{ \"name\": \"f\", ".into())));
        assert_eq!(found(&["f", "\n", "{\"a"]), Some((2, "f\n{\"a".into())));
        assert_eq!(found(&["{\"name\": \"g\"}"]), None);
        assert_eq!(found(&["so ", "f", "{"]), None);
        assert_eq!(found(&["so </thi", "nk>\nf", "{"]), Some((2, "f{".into())));
        assert_eq!(found(&["so </think>f{"]), Some((0, "f{".into())));
        assert_eq!(opened(&mut opening(true), &["f", "{", "</think>", " f{"]), Some((3, "f{".into())));
    }

    #[test]
    fn opening_is_found_again_after_backtrack() {
        let mut trigger_matcher = opening(false);
        assert_eq!(opened(&mut trigger_matcher, &["f", "oo"]), None);
        trigger_matcher.pop(1);
        assert_eq!(opened(&mut trigger_matcher, &["{"]), Some((0, "f{".into())));
        assert_eq!(opened(&mut trigger_matcher, &["x", "</think>", "y"]), None);
        trigger_matcher.pop(1);
        assert_eq!(opened(&mut trigger_matcher, &["f {"]), Some((0, "f {".into())));
    }

    proptest! {
        #[test]
        fn trigger_is_found_for_any_division_into_tokens(text in "[ab<>]{0,24}", cuts in proptest::collection::vec(1usize..5, 24)) {
            let whole = text.find("<a>").map(|at| at + 3);
            let mut trigger_matcher = TriggerMatcher::new(Trigger::text("<a>"));
            let (mut at, mut found) = (0, None);
            for cut in cuts {
                let end = (at + cut).min(text.len());
                let piece = &text.as_bytes()[at..end];
                if let Some(text_after_trigger) = trigger_matcher.text_after_trigger(0, piece) {
                    found = Some(end - text_after_trigger.len());
                    break;
                }
                trigger_matcher.push(piece);
                at = end;
            }
            if at == text.len() || found.is_some() {
                prop_assert_eq!(found, whole);
            }
        }
    }
}
