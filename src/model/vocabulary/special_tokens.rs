//! Special tokens of a vocabulary, and their treatment by the tokenizer.

use crate::events::TokenId;

/// The treatment of special tokens in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenizeOptions {
    /// True to add BOS and EOS as the model requires.
    pub add_special: bool,
    /// True to parse the literals of special tokens as these tokens.
    pub parse_special: bool,
}

impl TokenizeOptions {
    /// A whole prompt that may contain special tokens.
    pub const PROMPT: Self = Self { add_special: true, parse_special: true };
    /// A part of a text that may contain special tokens, such as a part of a chat template.
    pub const MARKUP: Self = Self { add_special: false, parse_special: true };
    /// A part of a text that must not become special tokens, such as a part of a message.
    pub const PLAIN: Self = Self { add_special: false, parse_special: false };
}

/// The special tokens of the vocabulary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SpecialTokens {
    /// Start of a sequence.
    pub bos: Option<TokenId>,
    /// End of a sequence.
    pub eos: Option<TokenId>,
    /// End of a turn, if it differs from `eos`.
    pub eot: Option<TokenId>,
    /// Padding of batches.
    pub pad: Option<TokenId>,
    /// True if every prompt starts with `bos`.
    pub add_bos: bool,
    /// Infill tokens; `None` if the model was not trained for infilling.
    pub infill: Option<InfillTokens>,
}

impl SpecialTokens {
    /// Returns the token that ends a turn of a conversation.
    #[must_use]
    pub fn end_of_turn(&self) -> Option<TokenId> {
        self.eot.or(self.eos)
    }
}

/// Tokens of an infill prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfillTokens {
    /// Precedes the text before the gap.
    pub prefix: TokenId,
    /// Precedes the text after the gap.
    pub suffix: TokenId,
    /// Precedes the generated middle.
    pub middle: TokenId,
    /// Precedes the name of a repository.
    pub repository: Option<TokenId>,
    /// Precedes the name of a file.
    pub file: Option<TokenId>,
}
