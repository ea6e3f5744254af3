//! Sequence breakers of DRY for a vocabulary.

use super::Vocabulary;
use crate::events::TokenId;
use memchr::memmem::Finder;
use std::collections::HashMap;

/// llama.cpp's maximum length of a breaker in bytes.
const MAX_BREAKER_BYTES: usize = 40;
/// llama.cpp's maximum number of tokens after the first token of a breaker.
pub(in crate::model) const MAX_TAIL: usize = 20;

/// Texts that end repetitions, as tokens. Maps each token in which such a text starts to the token sequences that
/// complete it.
#[derive(Debug, Default)]
pub(in crate::model) struct Breakers(pub(in crate::model) HashMap<TokenId, Vec<Vec<TokenId>>>);

impl Breakers {
    pub(in crate::model) fn new(vocabulary: &Vocabulary, texts: &[String]) -> Self {
        let mut heads: HashMap<TokenId, Vec<Vec<TokenId>>> = HashMap::new();
        for text in texts {
            let text = &text.as_bytes()[..text.len().min(MAX_BREAKER_BYTES)];
            let Some(&first) = text.first() else { continue };
            let finder = Finder::new(text);
            let mut tails: HashMap<usize, Vec<TokenId>> = HashMap::new();
            for token in 0..vocabulary.len() as TokenId {
                let piece = vocabulary.piece(token);
                if finder.find(piece).is_some() {
                    heads.entry(token).or_default().push(Vec::new());
                    continue;
                }
                for at in piece.iter().enumerate().filter(|(_, byte)| **byte == first).map(|(at, _)| at) {
                    let within = piece.len() - at;
                    if within < text.len() && piece[at..] == text[..within] {
                        let tail = tails.entry(within).or_insert_with(|| {
                            let mut tail = vocabulary.encode_plain(&String::from_utf8_lossy(&text[within..]));
                            tail.truncate(MAX_TAIL);
                            tail
                        });
                        let known = heads.entry(token).or_default();
                        if !known.contains(tail) {
                            known.push(tail.clone());
                        }
                    }
                }
            }
        }
        Self(heads)
    }

    /// Returns true if the token contains a whole breaker.
    pub(in crate::model) fn has_whole_breaker(&self, token: TokenId) -> bool {
        self.0.get(&token).is_some_and(|tails| tails.iter().any(Vec::is_empty))
    }
}
