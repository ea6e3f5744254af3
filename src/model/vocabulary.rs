//! A model's vocabulary: texts of tokens, special tokens and the tokenizer.

pub(super) mod breakers;
mod special_tokens;

pub use special_tokens::{InfillTokens, SpecialTokens, TokenizeOptions};

use crate::events::{TokenId, is_image_token};
use breakers::Breakers;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A model's vocabulary, usable from any thread and without the model.
///
/// Token texts are bytes: a token may be an incomplete part of a UTF-8 character.
pub struct Vocabulary {
    pieces: Vec<Box<[u8]>>,
    control: Vec<bool>,
    end_of_generation: Vec<TokenId>,
    special: SpecialTokens,
    tokenize: Box<Tokenize>,
    literals: OnceLock<ControlLiterals>,
    /// Computed sequence breakers of DRY, the most recently used last.
    breakers: Mutex<Vec<(Vec<String>, Arc<Breakers>)>>,
}

/// Text for an image in a prompt.
pub const IMAGE_TEXT: &str = "<image>";

/// Number of breaker sets to keep.
const MAX_CACHED_BREAKERS: usize = 4;

/// Texts that the tokenizer parses as control tokens.
struct ControlLiterals {
    texts: HashSet<Box<[u8]>>,
    /// Lengths of the texts by their first byte, longest first.
    lengths: Vec<Vec<usize>>,
}

impl ControlLiterals {
    fn new(vocabulary: &Vocabulary) -> Self {
        let mut lengths = vec![Vec::new(); 256];
        // Masking inserts a mark inside a literal, which needs at least two bytes.
        let pieces = vocabulary.pieces.iter().zip(&vocabulary.control);
        let texts: HashSet<Box<[u8]>> =
            pieces.filter(|(piece, control)| **control && piece.len() > 1).map(|(piece, _)| piece.clone()).collect();
        for text in &texts {
            let lengths: &mut Vec<usize> = &mut lengths[usize::from(text[0])];
            if let Err(place) = lengths.binary_search_by(|len| text.len().cmp(len)) {
                lengths.insert(place, text.len());
            }
        }
        Self { texts, lengths }
    }

    /// Returns the length of the longest control literal at the start of the text.
    fn at(&self, text: &[u8]) -> Option<usize> {
        let lengths = &self.lengths[usize::from(*text.first()?)];
        lengths.iter().copied().find(|&len| text.get(..len).is_some_and(|start| self.texts.contains(start)))
    }
}

type Tokenize = dyn Fn(&str, bool, bool) -> Vec<TokenId> + Send + Sync;

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("len", &self.len()).field("special", &self.special).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Creates a vocabulary. `pieces` holds every token's bytes, with special tokens as their literals; `tokenize(text,
    /// add_special, parse_special)` is the model's tokenizer.
    pub fn new(
        pieces: Vec<Box<[u8]>>,
        control: Vec<bool>,
        end_of_generation: Vec<TokenId>,
        special: SpecialTokens,
        tokenize: impl Fn(&str, bool, bool) -> Vec<TokenId> + Send + Sync + 'static,
    ) -> Self {
        let tokenize = Box::new(tokenize);
        Self {
            pieces,
            control,
            end_of_generation,
            special,
            tokenize,
            literals: OnceLock::new(),
            breakers: Mutex::default(),
        }
    }

    /// Returns the number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Returns true if it has no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Tokenizes text.
    #[must_use]
    pub fn encode(&self, text: &str, options: TokenizeOptions) -> Vec<TokenId> {
        (self.tokenize)(text, options.add_special, options.parse_special)
    }

    /// Tokenizes a whole prompt; see [`TokenizeOptions::PROMPT`].
    #[must_use]
    pub fn encode_prompt(&self, text: &str) -> Vec<TokenId> {
        self.encode(text, TokenizeOptions::PROMPT)
    }

    /// Tokenizes text in which the literals of special tokens become these tokens; see [`TokenizeOptions::MARKUP`].
    #[must_use]
    pub fn encode_markup(&self, text: &str) -> Vec<TokenId> {
        self.encode(text, TokenizeOptions::MARKUP)
    }

    /// Tokenizes text in which the literals of special tokens stay text; see [`TokenizeOptions::PLAIN`].
    #[must_use]
    pub fn encode_plain(&self, text: &str) -> Vec<TokenId> {
        self.encode(text, TokenizeOptions::PLAIN)
    }

    /// Tokenizes text that continues another text: like [`Vocabulary::encode_markup`], but without the space that some
    /// tokenizers add before a text.
    #[must_use]
    pub fn encode_markup_continuation(&self, text: &str) -> Vec<TokenId> {
        self.encode_continuation(text, TokenizeOptions::MARKUP)
    }

    /// Tokenizes text that continues another text: like [`Vocabulary::encode_plain`], but without the space that some
    /// tokenizers add before a text.
    #[must_use]
    pub fn encode_plain_continuation(&self, text: &str) -> Vec<TokenId> {
        self.encode_continuation(text, TokenizeOptions::PLAIN)
    }

    /// Tokenizes text without the space that some tokenizers add before a text, such as `SentencePiece`.
    fn encode_continuation(&self, text: &str, options: TokenizeOptions) -> Vec<TokenId> {
        let mut tokens = self.encode(text, options);
        if !tokens.first().is_some_and(|&first| self.starts_with_space(first)) || !self.adds_space() {
            return tokens;
        }
        // The added space is before another character, whose tokens are removed. No token of the vocabulary may contain
        // both this character and the start of the text.
        for before in ["\n", "\u{1}", "|"] {
            let start = self.encode_plain(before);
            let both = self.encode(&format!("{before}{text}"), options);
            if let Some(rest) = both.strip_prefix(start.as_slice()) {
                return rest.to_vec();
            }
        }
        // The space is a token of its own, or the text has another one.
        if self.piece(tokens[0]) == b" " {
            tokens.remove(0);
        }
        tokens
    }

    /// Returns the control tokens in these texts.
    #[must_use]
    pub fn control_tokens_in(&self, texts: &[&str]) -> Vec<TokenId> {
        let mut tokens: Vec<TokenId> = texts.iter().flat_map(|text| self.encode_markup(text)).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.retain(|&token| self.is_control(token));
        tokens
    }

    /// Returns the bytes of a token, with special tokens as literals; empty for an id outside the vocabulary.
    #[must_use]
    pub fn piece(&self, token: TokenId) -> &[u8] {
        usize::try_from(token).ok().and_then(|index| self.pieces.get(index)).map_or(&[], |piece| piece)
    }

    /// Returns the bytes of the token at `index`; for the first placeholder of an image, [`IMAGE_TEXT`].
    fn piece_at(&self, tokens: &[TokenId], index: usize) -> &[u8] {
        let is_image = |index: usize| tokens.get(index).is_some_and(|&token| is_image_token(token));
        match (is_image(index), index.checked_sub(1).is_some_and(is_image)) {
            (false, _) => self.piece(tokens[index]),
            (true, false) => IMAGE_TEXT.as_bytes(),
            (true, true) => &[],
        }
    }

    /// Converts tokens to text, with special tokens as literals, invalid UTF-8 replaced, and images as [`IMAGE_TEXT`].
    #[must_use]
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let mut bytes = Vec::with_capacity(8 * tokens.len());
        for index in 0..tokens.len() {
            bytes.extend_from_slice(self.piece_at(tokens, index));
        }
        String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// Converts the tokens of a whole text to text. Like [`Vocabulary::decode`], but without the space that some
    /// tokenizers add before a text, such as `SentencePiece`.
    #[must_use]
    pub fn decode_text(&self, tokens: &[TokenId]) -> String {
        let mut text = self.decode(tokens);
        if tokens.first().is_some_and(|&first| self.starts_with_space(first)) && self.adds_space() {
            text.remove(0);
        }
        text
    }

    /// Returns true if the tokenizer adds a space before a text.
    fn adds_space(&self) -> bool {
        self.encode_plain("a").first().is_some_and(|&first| self.starts_with_space(first))
    }

    fn starts_with_space(&self, token: TokenId) -> bool {
        self.piece(token).starts_with(b" ")
    }

    /// Returns the text of each token. A token that is an incomplete part of a UTF-8 character has ""; its bytes are at
    /// the start of the text of the token that completes or breaks the character.
    #[must_use]
    pub fn texts(&self, tokens: &[TokenId]) -> Vec<String> {
        let mut pending = Vec::new();
        let last = tokens.len().saturating_sub(1);
        (0..tokens.len())
            .map(|index| {
                pending.extend_from_slice(self.piece_at(tokens, index));
                let complete = complete_prefix(&pending);
                let upto = if index == last { pending.len() } else { complete };
                let text = String::from_utf8_lossy(&pending[..upto]).into_owned();
                pending.drain(..upto);
                text
            })
            .collect()
    }

    /// Returns the text of each token for the recording, without NUL characters; see [`Vocabulary::texts`].
    #[must_use]
    pub fn storable_texts(&self, tokens: &[TokenId]) -> Vec<String> {
        self.texts(tokens).into_iter().map(without_nul).collect()
    }

    /// Returns true for a control token, e.g. `<|im_end|>`.
    #[must_use]
    pub fn is_control(&self, token: TokenId) -> bool {
        usize::try_from(token).ok().and_then(|index| self.control.get(index)).copied().unwrap_or(false)
    }

    /// Returns the ranges of control literals in a text, in order; ranges may overlap.
    pub(super) fn control_literals<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
        let literals = self.literals.get_or_init(|| ControlLiterals::new(self));
        (0..text.len())
            .filter_map(|start| literals.at(&text.as_bytes()[start..]).map(|len| start..start + len))
            .filter(|found| text.is_char_boundary(found.start) && text.is_char_boundary(found.end))
    }

    /// Returns true if the token ends a generation.
    #[must_use]
    pub fn is_end_of_generation(&self, token: TokenId) -> bool {
        self.end_of_generation.contains(&token)
    }

    /// Returns true if the token ends the answer of a run with these stop tokens.
    #[must_use]
    pub fn ends_answer(&self, token: TokenId, stop_tokens: &[TokenId]) -> bool {
        stop_tokens.contains(&token) || self.is_end_of_generation(token)
    }

    /// Returns all tokens that end a generation.
    #[must_use]
    pub fn end_of_generation(&self) -> &[TokenId] {
        &self.end_of_generation
    }

    /// Returns the sequence breakers of DRY as tokens. The computation scans the vocabulary, so recent results are
    /// cached.
    pub(super) fn breakers(&self, texts: &[String]) -> Arc<Breakers> {
        let mut cached = self.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = cached.iter().position(|(known, _)| known == texts).map(|at| cached.remove(at));
        let entry = known.unwrap_or_else(|| (texts.to_vec(), Arc::new(Breakers::new(self, texts))));
        let breakers = Arc::clone(&entry.1);
        cached.push(entry);
        if cached.len() > MAX_CACHED_BREAKERS {
            cached.remove(0);
        }
        breakers
    }

    /// Returns the special tokens.
    #[must_use]
    pub fn special(&self) -> SpecialTokens {
        self.special
    }

    /// Returns true if a prompt can have the id: it is in the vocabulary, or it is a placeholder of an image.
    #[must_use]
    pub fn is_prompt_token(&self, token: TokenId) -> bool {
        self.contains(token) || is_image_token(token)
    }

    /// Returns true if the id is in the vocabulary.
    #[must_use]
    pub fn contains(&self, token: TokenId) -> bool {
        usize::try_from(token).is_ok_and(|index| index < self.pieces.len())
    }
}

/// Replaces NUL characters, which PostgreSQL's text cannot store.
#[must_use]
pub fn without_nul(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// Returns the length of the common prefix of two sequences.
#[must_use]
pub fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    const BLOCK: usize = 64;
    // Whole blocks are compared as bytes, many tokens at a time.
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let same = blocks * BLOCK;
    same + a[same..].iter().zip(&b[same..]).take_while(|(a, b)| a == b).count()
}

/// Returns the length of the longest prefix that does not end inside a UTF-8 character. Invalid bytes count as
/// complete.
#[must_use]
pub fn complete_prefix(bytes: &[u8]) -> usize {
    let mut start = 0;
    loop {
        match std::str::from_utf8(&bytes[start..]) {
            Ok(_) => return bytes.len(),
            Err(error) => match error.error_len() {
                Some(invalid) => start += error.valid_up_to() + invalid,
                None => return start + error.valid_up_to(),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{SpecialTokens, Vocabulary, common_prefix, complete_prefix};
    use proptest::prelude::*;

    /// Returns a vocabulary whose tokenizer converts each byte to a token, after `prefix`.
    fn bytes_after(prefix: &'static str) -> Vocabulary {
        let pieces: Vec<Box<[u8]>> = (0..=u8::MAX).map(|byte| Box::from([byte])).collect();
        Vocabulary::new(pieces, vec![false; 256], Vec::new(), SpecialTokens::default(), move |text, _, _| {
            format!("{prefix}{text}").bytes().map(i32::from).collect()
        })
    }

    #[test]
    fn text_has_no_space_that_the_tokenizer_added() {
        let sentence_piece = bytes_after(" ");
        let round_trip = |text: &str| sentence_piece.decode_text(&sentence_piece.encode_plain(text));
        assert_eq!((round_trip("ab"), round_trip(" ab"), round_trip("")), ("ab".into(), " ab".into(), String::new()));
        assert_eq!(sentence_piece.decode_text(&[97, 32]), "a ", "the tokens start with another token");
        let other = bytes_after("");
        assert_eq!(other.decode_text(&other.encode_plain(" ab")), " ab");
        assert_eq!(other.decode_text(&[]), "");
        for vocabulary in [&sentence_piece, &other] {
            let continued = |text: &str| vocabulary.decode(&vocabulary.encode_plain_continuation(text));
            assert_eq!((continued("ab"), continued(" ab"), continued("")), ("ab".into(), " ab".into(), String::new()));
        }
    }

    #[test]
    fn only_storable_texts_have_no_nul() {
        let vocabulary = bytes_after("");
        assert_eq!(vocabulary.texts(&[97, 0]), ["a", "\0"]);
        assert_eq!(vocabulary.storable_texts(&[97, 0]), ["a", "\u{fffd}"]);
    }

    proptest! {
        #[test]
        fn common_prefix_ends_at_the_first_difference(same in 0usize..300, a in 0i32..3, b in 3i32..6, more in 0usize..90) {
            let one: Vec<i32> = (0..same as i32).chain(std::iter::repeat_n(-a, more)).collect();
            let other: Vec<i32> = (0..same as i32).chain(std::iter::repeat_n(-b, 90 - more)).collect();
            prop_assert_eq!(common_prefix(&one, &other), same);
            prop_assert_eq!(common_prefix(&one, &one), one.len());
        }

        #[test]
        fn token_texts_join_to_the_lossy_text(bytes: Vec<u8>, cut in 0usize..64) {
            let cut = cut.min(bytes.len());
            let first = complete_prefix(&bytes[..cut]);
            let joined = String::from_utf8_lossy(&bytes[..first]).into_owned() + &String::from_utf8_lossy(&bytes[first..]);
            prop_assert_eq!(joined, String::from_utf8_lossy(&bytes));
        }
    }
}
