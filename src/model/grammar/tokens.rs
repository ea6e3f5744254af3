//! Translation of a model's vocabulary for llguidance.

use crate::events::TokenId;
use crate::model::Vocabulary;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, TokEnv, TokRxInfo, TokTrie};
use std::sync::Arc;

/// Maximum length of a token's text in the trie; tokens with a longer text cannot be sampled under a grammar.
const MAX_PIECE_BYTES: usize = 1000;

/// Builds llguidance's token environment: bytes for text tokens, a marker before the literal of control tokens, nothing
/// for tokens without text.
pub(super) fn environment(vocabulary: &Vocabulary) -> TokEnv {
    let marker = TokTrie::SPECIAL_TOKEN_MARKER;
    let pieces: Vec<Vec<u8>> = (0..vocabulary.len() as TokenId)
        .map(|token| {
            let piece = vocabulary.piece(token);
            if piece.len() > MAX_PIECE_BYTES || piece.first() == Some(&marker) {
                Vec::new()
            } else if vocabulary.is_control(token) || vocabulary.is_end_of_generation(token) {
                if piece.is_empty() { Vec::new() } else { [&[marker], piece].concat() }
            } else {
                piece.to_vec()
            }
        })
        .collect();
    let ends: Vec<u32> = vocabulary.end_of_generation().iter().map(|&token| token as u32).collect();
    let first = ends.first().copied().unwrap_or(INVALID_TOKEN);
    let trie = TokTrie::from(&TokRxInfo::new(pieces.len() as u32, first), &pieces);
    let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) };
    // Approximate, because the model need not tokenize its text canonically.
    Arc::new(ApproximateTokEnv::new(trie))
}
