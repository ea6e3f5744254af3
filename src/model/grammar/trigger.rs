//! A lazy constraint before it begins: watches what is generated for its trigger.

use super::Trigger;
use crate::events::TokenId;

/// What was generated so far, and what is looked for in it.
#[derive(Debug, Clone)]
pub(super) struct Watch {
    trigger: Trigger,
    longest: usize,
    text: Vec<u8>,
    /// Where each token's text begins in `text`.
    starts: Vec<usize>,
}

impl Watch {
    pub(super) fn new(mut trigger: Trigger) -> Self {
        trigger.texts.retain(|text| !text.is_empty());
        let longest = trigger.texts.iter().map(String::len).max().unwrap_or(0);
        Self { trigger, longest, text: Vec::new(), starts: Vec::new() }
    }

    /// The bytes of `piece` that stand behind the trigger, if the token completes it.
    pub(super) fn behind<'a>(&self, token: TokenId, piece: &'a [u8]) -> Option<&'a [u8]> {
        if self.trigger.tokens.contains(&token) {
            return Some(&[]);
        }
        let from = self.text.len().saturating_sub(self.longest.saturating_sub(1));
        let recent = &self.text[from..];
        let window = [recent, piece].concat();
        // The first trigger that ends within the new piece.
        let end = self
            .trigger
            .texts
            .iter()
            .filter_map(|text| {
                let first = (recent.len() + 1).saturating_sub(text.len());
                let at = window[first..].windows(text.len()).position(|found| found == text.as_bytes())?;
                Some(first + at + text.len())
            })
            .min()?;
        Some(&piece[end - recent.len()..])
    }

    /// Notes a token that was appended.
    pub(super) fn push(&mut self, piece: &[u8]) {
        self.starts.push(self.text.len());
        self.text.extend_from_slice(piece);
    }

    /// Forgets the last `count` tokens.
    pub(super) fn pop(&mut self, count: usize) {
        let keep = self.starts.len().saturating_sub(count);
        if let Some(&start) = self.starts.get(keep) {
            self.text.truncate(start);
            self.starts.truncate(keep);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_text_behind_a_trigger_is_found() {
        let mut watch = Watch::new(Trigger { tokens: vec![7], texts: vec!["<tool>".into()] });
        assert_eq!(watch.behind(1, b"say <to"), None);
        watch.push(b"say <to");
        assert_eq!(watch.behind(2, b"ol>{\"a"), Some(&b"{\"a"[..]));
        assert_eq!(watch.behind(3, b"tal"), None);
        assert_eq!(watch.behind(7, b"x"), Some(&b""[..]));
        watch.pop(1);
        assert_eq!(watch.behind(2, b"ol>"), None);
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(text in "[ab<>]{0,24}", cuts in proptest::collection::vec(1usize..5, 24)) {
            let whole = text.find("<a>").map(|at| at + 3);
            let mut watch = Watch::new(Trigger::text("<a>"));
            let (mut at, mut found) = (0, None);
            for cut in cuts {
                let end = (at + cut).min(text.len());
                let piece = &text.as_bytes()[at..end];
                if let Some(behind) = watch.behind(0, piece) {
                    found = Some(end - behind.len());
                    break;
                }
                watch.push(piece);
                at = end;
            }
            if at == text.len() || found.is_some() {
                prop_assert_eq!(found, whole);
            }
        }
    }
}
