//! Vocabularies for tests: bytes, some words, and control tokens.

use super::{Constraint, GrammarCompiler, GrammarMatcher, GrammarSource};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::model::vocabulary::SpecialTokens;
use std::sync::Arc;

/// The words; the first of them follows the byte tokens.
pub(crate) const WORDS: &[&str] =
    &["{\"", "\":", "true", "false", "null", "\"}", ", \"", "<tool", "_call>", "<tool_call>{", "ab", "abc", "  ", "aa"];

/// A token that ends a generation.
pub(crate) const END: TokenId = 256 + WORDS.len() as TokenId;
/// A control token that does not end a generation.
pub(crate) const CONTROL: TokenId = END + 1;

/// Returns a vocabulary in which every byte is a token, followed by [`WORDS`], `<|end|>` and `<|control|>`.
pub(crate) fn vocabulary() -> Arc<Vocabulary> {
    let bytes = (0..=255u8).map(|byte| vec![byte].into_boxed_slice());
    let words = WORDS.iter().map(|word| word.as_bytes().into());
    let control = ["<|end|>", "<|control|>"].map(|word| word.as_bytes().into());
    let pieces: Vec<Box<[u8]>> = bytes.chain(words).chain(control).collect();
    let is_control = (0..pieces.len() as TokenId).map(|token| token >= END).collect();
    Arc::new(Vocabulary::new(pieces, is_control, vec![END], SpecialTokens::default(), |text, _, parse_special| {
        match text {
            "<|end|>" if parse_special => vec![END],
            "<|control|>" if parse_special => vec![CONTROL],
            text => text.bytes().map(TokenId::from).collect(),
        }
    }))
}

/// Returns a vocabulary like that of Llama 2: control tokens first, then byte tokens, then words that
/// start with a space; no token for `<|im_start|>`.
pub(crate) fn sentencepiece() -> Arc<Vocabulary> {
    let control = ["<unk>", "<s>", "</s>"].map(|word| word.as_bytes().into());
    let bytes = (0..=255u8).map(|byte| vec![byte].into_boxed_slice());
    let words =
        [" {\"", " \"", "\":", " true", " the", "answer", "}", "\n", " 1", "23"].map(|word| word.as_bytes().into());
    let pieces: Vec<Box<[u8]>> = control.into_iter().chain(bytes).chain(words).collect();
    let is_control = (0..pieces.len()).map(|token| token < 3).collect();
    let special = SpecialTokens { bos: Some(1), eos: Some(2), add_bos: true, ..SpecialTokens::default() };
    Arc::new(Vocabulary::new(pieces, is_control, vec![2], special, |text, _, _| {
        text.bytes().map(|byte| TokenId::from(byte) + 3).collect()
    }))
}

pub(crate) fn start_matcher(source: GrammarSource) -> GrammarMatcher {
    GrammarCompiler::new(vocabulary()).start_matcher(&Constraint::new("test", source)).unwrap()
}

/// Returns true if the text, one byte per token, is a complete answer.
pub(crate) fn accepts(matcher: &mut GrammarMatcher, text: &str) -> bool {
    let mut taken = 0;
    let fits = text.bytes().all(|byte| {
        let token = TokenId::from(byte);
        let fits = is_permitted(matcher, token);
        if fits {
            matcher.accept(token, &[byte]);
            taken += 1;
        }
        fits
    });
    let whole = fits && is_permitted(matcher, END);
    matcher.rewind(taken);
    whole
}

pub(crate) fn is_permitted(matcher: &mut GrammarMatcher, token: TokenId) -> bool {
    matcher.mask().unwrap().is_none_or(|mask| mask.is_allowed(token as u32))
}
