use super::llama::Breakers;
use crate::events::TokenId;
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// A model's vocabulary, readable from any thread and without the model.
///
/// Pieces are bytes: a token may be an incomplete piece of UTF-8.
pub struct Vocabulary {
    pieces: Vec<Box<[u8]>>,
    control: Vec<bool>,
    end_of_generation: Vec<TokenId>,
    special: SpecialTokens,
    tokenize: Box<Tokenize>,
    literals: OnceLock<ControlLiterals>,
    /// Sequence breakers of DRY that were worked out, the most recently used last.
    breakers: Mutex<Vec<(Vec<String>, Arc<Breakers>)>>,
}

/// Sets of sequence breakers that are kept.
const BREAKERS_KEPT: usize = 4;

/// The texts that the tokenizer reads as control tokens.
struct ControlLiterals {
    texts: HashSet<Box<[u8]>>,
    /// Lengths of the texts that begin with a byte, the longest first.
    lengths: Vec<Vec<usize>>,
}

impl ControlLiterals {
    fn of(vocabulary: &Vocabulary) -> Self {
        let mut lengths = vec![Vec::new(); 256];
        // A text of one byte has no inside for a mark to be put into.
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

    /// Returns the length of the longest literal with which the text begins.
    fn at(&self, text: &[u8]) -> Option<usize> {
        let lengths = &self.lengths[usize::from(*text.first()?)];
        lengths.iter().copied().find(|&len| text.get(..len).is_some_and(|start| self.texts.contains(start)))
    }
}

type Tokenize = dyn Fn(&str, bool, bool) -> Vec<TokenId> + Send + Sync;

/// The vocabulary's tokens with a role.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// Begins a sequence.
    pub bos: Option<TokenId>,
    /// Ends a sequence.
    pub eos: Option<TokenId>,
    /// Ends a turn of a conversation, where that is another token than `eos`.
    pub eot: Option<TokenId>,
    /// Fills batches up.
    pub pad: Option<TokenId>,
    /// Whether `bos` stands before every prompt.
    pub add_bos: bool,
    /// What filling in between two texts takes; `None` when the model was not trained for it.
    pub fill_in: Option<InfillTokens>,
}

impl SpecialTokens {
    /// The token that ends a turn of a conversation.
    #[must_use]
    pub fn end_of_turn(&self) -> Option<TokenId> {
        self.eot.or(self.eos)
    }
}

/// Tokens of a prompt that is to be filled in between two texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfillTokens {
    /// Stands before the text in front of the gap.
    pub prefix: TokenId,
    /// Stands before the text behind the gap.
    pub suffix: TokenId,
    /// Stands where the filling begins.
    pub middle: TokenId,
    /// Stands before the name of a repository.
    pub repository: Option<TokenId>,
    /// Stands before the name of a file.
    pub file: Option<TokenId>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("len", &self.len()).field("special", &self.special).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Puts a vocabulary together. `pieces` holds every token's bytes, special tokens as their literal text;
    /// `tokenize(text, add_special, parse_special)` is the model's tokenizer.
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

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether it has no token at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Text to tokens. `add_special` puts BOS before and EOS after as the model wants it; `parse_special` reads
    /// the literals of special tokens as those tokens.
    #[must_use]
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Vec<TokenId> {
        (self.tokenize)(text, add_special, parse_special)
    }

    /// Returns the control tokens in these texts.
    #[must_use]
    pub fn controls_in(&self, texts: &[&str]) -> Vec<TokenId> {
        let mut tokens: Vec<TokenId> = texts.iter().flat_map(|text| self.encode(text, false, true)).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.retain(|&token| self.is_control(token));
        tokens
    }

    /// The bytes of a token, a special token's literal included; empty for an id outside the vocabulary.
    #[must_use]
    pub fn piece(&self, token: TokenId) -> &[u8] {
        usize::try_from(token).ok().and_then(|index| self.pieces.get(index)).map_or(&[], |piece| piece)
    }

    /// Tokens to text, special tokens as their literals, invalid UTF-8 replaced.
    #[must_use]
    pub fn decode(&self, tokens: &[TokenId]) -> String {
        let mut bytes = Vec::with_capacity(8 * tokens.len());
        for &token in tokens {
            bytes.extend_from_slice(self.piece(token));
        }
        String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// The text of each token; a token that is an incomplete piece of UTF-8 has "", and its bytes stand at the
    /// start of the text of the token that completes or breaks the character.
    #[must_use]
    pub fn texts(&self, tokens: &[TokenId]) -> Vec<String> {
        let mut pending = Vec::new();
        let last = tokens.len().saturating_sub(1);
        tokens
            .iter()
            .enumerate()
            .map(|(index, &token)| {
                pending.extend_from_slice(self.piece(token));
                let complete = complete_prefix(&pending);
                let upto = if index == last { pending.len() } else { complete };
                let text = printable(String::from_utf8_lossy(&pending[..upto]).into_owned());
                pending.drain(..upto);
                text
            })
            .collect()
    }

    /// Whether the token is a control token, which is never part of an answer's text.
    #[must_use]
    pub fn is_control(&self, token: TokenId) -> bool {
        usize::try_from(token).ok().and_then(|index| self.control.get(index)).copied().unwrap_or(false)
    }

    /// Returns where literals of control tokens stand in a text, in order; one may begin within another.
    pub(super) fn control_literals<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
        let literals = self.literals.get_or_init(|| ControlLiterals::of(self));
        (0..text.len())
            .filter_map(|start| literals.at(&text.as_bytes()[start..]).map(|len| start..start + len))
            .filter(|found| text.is_char_boundary(found.start) && text.is_char_boundary(found.end))
    }

    /// Whether the token ends a generation.
    #[must_use]
    pub fn is_end_of_generation(&self, token: TokenId) -> bool {
        self.end_of_generation.contains(&token)
    }

    /// All tokens that end a generation.
    #[must_use]
    pub fn end_of_generation(&self) -> &[TokenId] {
        &self.end_of_generation
    }

    /// Where the texts that end a repetition begin; it takes a pass over the vocabulary, so the last ones are kept.
    pub(super) fn breakers(&self, texts: &[String]) -> Arc<Breakers> {
        let mut kept = self.breakers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = kept.iter().position(|(known, _)| known == texts).map(|at| kept.remove(at));
        let entry = known.unwrap_or_else(|| (texts.to_vec(), Arc::new(Breakers::of(self, texts))));
        let breakers = Arc::clone(&entry.1);
        kept.push(entry);
        if kept.len() > BREAKERS_KEPT {
            kept.remove(0);
        }
        breakers
    }

    /// The tokens with a role.
    #[must_use]
    pub fn special(&self) -> SpecialTokens {
        self.special
    }

    /// Whether the id is in the vocabulary.
    #[must_use]
    pub fn contains(&self, token: TokenId) -> bool {
        usize::try_from(token).is_ok_and(|index| index < self.pieces.len())
    }
}

/// Text as the trace keeps it: PostgreSQL's text cannot hold NUL.
#[must_use]
pub fn printable(text: String) -> String {
    if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text }
}

/// How many tokens two sequences begin with alike.
#[must_use]
pub fn common_prefix(a: &[TokenId], b: &[TokenId]) -> usize {
    const BLOCK: usize = 64;
    // Whole blocks are compared as bytes, many tokens at a time.
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let same = blocks * BLOCK;
    same + a[same..].iter().zip(&b[same..]).take_while(|(a, b)| a == b).count()
}

/// Length of the longest prefix that does not end within a UTF-8 character. Invalid bytes count as complete.
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
    use super::{common_prefix, complete_prefix};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sequences_begin_alike_up_to_where_they_differ(same in 0usize..300, a in 0i32..3, b in 3i32..6, more in 0usize..90) {
            let one: Vec<i32> = (0..same as i32).chain(std::iter::repeat_n(-a, more)).collect();
            let other: Vec<i32> = (0..same as i32).chain(std::iter::repeat_n(-b, 90 - more)).collect();
            prop_assert_eq!(common_prefix(&one, &other), same);
            prop_assert_eq!(common_prefix(&one, &one), one.len());
        }

        #[test]
        fn pieces_join_to_the_lossy_text(bytes: Vec<u8>, cut in 0usize..64) {
            let cut = cut.min(bytes.len());
            let first = complete_prefix(&bytes[..cut]);
            let joined = String::from_utf8_lossy(&bytes[..first]).into_owned() + &String::from_utf8_lossy(&bytes[first..]);
            prop_assert_eq!(joined, String::from_utf8_lossy(&bytes));
        }
    }
}
