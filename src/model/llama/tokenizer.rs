//! A model's tokenizer, which is llama.cpp's.
//!
//! llama.cpp divides the text for tokenizers of type "bpe" into words by regular expressions. For some models, the C++
//! standard library matches them, and its stack grows by about 330 bytes with each character of a word. A long word, such
//! as a line of spaces or an encoded image, would overflow the stack of an ordinary thread, which ends the process.

use super::ffi;
use crate::events::TokenId;
use crate::model::vocabulary::{InfillTokens, SpecialTokens, Vocabulary};
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use std::sync::Arc;

/// llama.cpp's types of tokenizer, by number.
pub const TOKENIZERS: [&str; 7] = ["none", "spm", "bpe", "wpm", "ugm", "rwkv", "plamo2"];

/// Number of the type "bpe".
const BPE: u32 = 2;

/// A text that every tokenizer can divide into tokens of its vocabulary.
const PLAIN_TEXT: &str = "Hello 12";

/// Maximum length of a text that is tokenized on the thread of the caller, in bytes.
const MAX_DIRECT_BYTES: usize = 1024;
/// Maximum length of a text that is tokenized at once, in bytes.
const MAX_PART_BYTES: usize = 256 << 10;
/// Stack per byte of the text; the system only allocates the used part.
const STACK_PER_BYTE: usize = 512;
/// Stack for everything else.
const MIN_STACK_BYTES: usize = 512 << 10;

/// llama.cpp's type of a tokenizer.
#[derive(Debug, Clone, Copy)]
pub struct TokenizerType {
    pub id: u32,
    pub name: &'static str,
}

/// Returns the type of a model's tokenizer.
///
/// # Errors
/// llama.cpp would abort the process at the first text. Returns the reason.
pub fn check(llama: &LlamaModel) -> Result<TokenizerType, String> {
    let id = ffi::model_info::tokenizer_type(llama);
    let name = TOKENIZERS.get(id as usize).copied().unwrap_or("unknown");
    match name {
        "none" => {
            Err("it has no tokenizer; tokenizer.ggml.model must be the type of one, such as gpt2 or llama".into())
        }
        "wpm" if llama.vocab().bos().0 < 0 || llama.vocab().sep().0 < 0 => {
            Err("its vocabulary lacks [CLS] or [SEP]; tokenizer.ggml.bos_token_id and \
                 tokenizer.ggml.seperator_token_id must be their ids"
                .into())
        }
        _ => Ok(TokenizerType { id, name }),
    }
}

/// Checks that the tokenizer fits the vocabulary.
///
/// # Errors
/// A simple text has a token that is not in the vocabulary, so every request would fail. Returns the reason.
pub fn check_tokens(vocabulary: &Vocabulary) -> Result<(), String> {
    let tokens = vocabulary.encode_plain(PLAIN_TEXT);
    let unknown = tokens.into_iter().find(|&token| !vocabulary.contains(token));
    unknown.map_or(Ok(()), |token| {
        Err(format!(
            "its tokenizer gives \"{PLAIN_TEXT}\" the token {token}, which is not in its vocabulary of {} tokens; \
             tokenizer.ggml.model must be the type of tokenizer.ggml.tokens",
            vocabulary.len()
        ))
    })
}

/// Reads the vocabulary of a model whose tokenizer was checked.
pub fn read_vocabulary(llama: &Arc<LlamaModel>) -> Vocabulary {
    let vocab = llama.vocab();
    let count = vocab.n_tokens();
    let tokens = || (0..count).map(LlamaToken::new);
    let valid = |token: LlamaToken| (token.0 >= 0).then_some(token.0);
    let infill = match (valid(vocab.fim_pre()), valid(vocab.fim_suf()), valid(vocab.fim_mid())) {
        (Some(prefix), Some(suffix), Some(middle)) => {
            let (repository, file) = (valid(vocab.fim_rep()), valid(vocab.fim_sep()));
            Some(InfillTokens { prefix, suffix, middle, repository, file })
        }
        _ => None,
    };
    let special = SpecialTokens {
        bos: valid(vocab.bos()),
        eos: valid(vocab.eos()),
        eot: valid(vocab.eot()),
        pad: valid(vocab.pad()),
        add_bos: vocab.should_add_bos(),
        infill,
    };
    let owner = Arc::clone(llama);
    Vocabulary::new(
        tokens().map(|token| vocab.token_to_piece(token, true, None).into_boxed_slice()).collect(),
        tokens().map(|token| vocab.is_control(token)).collect(),
        tokens().filter(|&token| vocab.is_eog(token)).map(|token| token.0).collect(),
        special,
        move |text, add_special, parse_special| tokenize(&owner, text, add_special, parse_special),
    )
}

/// Tokenizes a text. `add_special` adds the tokens that the model expects at the start and the end of a text;
/// `parse_special` parses the texts of control tokens as these tokens.
fn tokenize(llama: &LlamaModel, text: &str, add_special: bool, parse_special: bool) -> Vec<TokenId> {
    let encode = |text: &str, add_special| {
        let tokens = llama.vocab().tokenize(text.as_bytes(), add_special, parse_special);
        tokens.into_iter().map(|token| token.0).collect()
    };
    if text.len() <= MAX_DIRECT_BYTES || ffi::model_info::tokenizer_type(llama) != BPE {
        return encode(text, add_special);
    }
    let encode_parts = |max_bytes| match split(text, max_bytes).as_slice() {
        [whole] => encode(whole, add_special),
        parts => {
            let vocab = llama.vocab();
            let bos = (add_special && vocab.should_add_bos()).then(|| vocab.bos().0);
            let eos = (add_special && vocab.should_add_eos()).then(|| vocab.eos().0);
            let tokens = parts.iter().flat_map(|part| encode(part, false));
            bos.into_iter().chain(tokens).chain(eos).collect()
        }
    };
    std::thread::scope(|scope| {
        let stack = MIN_STACK_BYTES + STACK_PER_BYTE * text.len().min(MAX_PART_BYTES);
        let thread = std::thread::Builder::new().name("tokenizer".into()).stack_size(stack);
        match thread.spawn_scoped(scope, || encode_parts(MAX_PART_BYTES)) {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(error) => {
                tracing::warn!(%error, "no thread for the tokenizer: long words are tokenized in parts");
                encode_parts(MAX_DIRECT_BYTES)
            }
        }
    })
}

/// Splits a text into parts of at most `max_bytes`: after a line break before a character that is not whitespace, since no
/// tokenizer joins the two in one word; else at whitespace; else anywhere.
fn split(mut text: &str, max_bytes: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    while text.len() > max_bytes {
        let head = &text[..text.floor_char_boundary(max_bytes)];
        let next_is_word = |end: &usize| text[*end..].starts_with(|next: char| !next.is_whitespace());
        let after_line = head.rmatch_indices('\n').map(|(at, _)| at + 1).find(next_is_word);
        let before_space = || head.rfind(char::is_whitespace).filter(|&at| at > 0);
        let (part, rest) = text.split_at(after_line.or_else(before_space).unwrap_or(head.len()));
        parts.push(part);
        text = rest;
    }
    parts.push(text);
    parts
}

#[cfg(test)]
mod tests {
    use super::split;
    use proptest::prelude::*;

    #[test]
    fn long_text_is_split_between_lines_or_words() {
        assert_eq!(split("one two", 7), ["one two"]);
        assert_eq!(split("a\nb c\n\n d\ne f", 11), ["a\nb c\n\n d\n", "e f"]);
        assert_eq!(split("one two three", 8), ["one two", " three"]);
        assert_eq!(split("ééééé", 5), ["éé", "éé", "é"]);
        assert_eq!(split("", 8), [""]);
    }

    proptest! {
        #[test]
        fn parts_of_any_text_are_short_and_complete(text in "[a\n é😀]{0,60}", max in 4..20_usize) {
            let parts = split(&text, max);
            prop_assert!(parts.iter().all(|part| part.len() <= max));
            prop_assert_eq!(parts.concat(), text);
        }
    }
}
