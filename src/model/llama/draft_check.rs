//! Check that a draft model has the vocabulary of the main model, by the rules of llama.cpp's
//! `common_speculative_are_compatible`.

use super::tokenizer::TOKENIZERS;
use super::{Model, ModelError};
use crate::events::TokenId;
use llama_cpp_2::token::LlamaToken;

/// Maximum difference of the numbers of tokens.
const MAX_SIZE_DIFFERENCE: usize = 128;
/// First token whose texts are compared; special tokens before it may have other names.
const FIRST_COMPARED: usize = 5;

/// The reason why a model cannot draft for another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum DraftMismatch {
    /// The tokenizers differ.
    #[error("its tokenizer is of type {draft}, but the main model's is of type {main}")]
    Tokenizer {
        /// Type of the draft model.
        draft: &'static str,
        /// Type of the main model.
        main: &'static str,
    },
    /// Prompts start or end with different tokens.
    #[error("its prompts {place} {}, but those of the main model {place} {}", token(*draft), token(*main))]
    AddedToken {
        /// `start with` or `end with`.
        place: &'static str,
        /// Token that the draft model adds.
        draft: Option<TokenId>,
        /// Token that the main model adds.
        main: Option<TokenId>,
    },
    /// The numbers of tokens differ by too much.
    #[error("its vocabulary has {draft} tokens, but the main model's has {main}; the maximum difference is 128")]
    Size {
        /// Tokens of the draft model.
        draft: usize,
        /// Tokens of the main model.
        main: usize,
    },
    /// A token has different texts.
    #[error("its token {token} is {draft:?}, but the main model's is {main:?}")]
    Text {
        /// The token.
        token: usize,
        /// Text in the draft model.
        draft: String,
        /// Text in the main model.
        main: String,
    },
}

fn token(added: Option<TokenId>) -> String {
    added.map_or_else(|| "no special token".into(), |id| format!("token {id}"))
}

/// The parts of a vocabulary that must match.
struct Profile {
    tokenizer: u32,
    /// Token that is added before a prompt.
    bos: Option<TokenId>,
    /// Token that is added after a prompt.
    eos: Option<TokenId>,
    texts: Vec<Box<[u8]>>,
}

impl Profile {
    fn new(model: &Model) -> Self {
        let vocab = model.llama.vocab();
        let text = |token| vocab.text(LlamaToken::new(token)).map(|text| text.to_bytes().into()).unwrap_or_default();
        Self {
            tokenizer: model.card.tokenizer_id,
            bos: vocab.should_add_bos().then(|| vocab.bos().0),
            eos: vocab.should_add_eos().then(|| vocab.eos().0),
            texts: (0..vocab.n_tokens()).map(text).collect(),
        }
    }

    /// Compares the vocabulary of a main model with that of a draft model.
    fn check(&self, draft: &Self) -> Result<(), DraftMismatch> {
        if self.tokenizer != draft.tokenizer {
            let name = |id: u32| TOKENIZERS.get(id as usize).copied().unwrap_or("unknown");
            return Err(DraftMismatch::Tokenizer { draft: name(draft.tokenizer), main: name(self.tokenizer) });
        }
        for (place, draft, main) in [("start with", draft.bos, self.bos), ("end with", draft.eos, self.eos)] {
            if draft != main {
                return Err(DraftMismatch::AddedToken { place, draft, main });
            }
        }
        if self.texts.len().abs_diff(draft.texts.len()) > MAX_SIZE_DIFFERENCE {
            return Err(DraftMismatch::Size { draft: draft.texts.len(), main: self.texts.len() });
        }
        let mut pairs = draft.texts.iter().zip(&self.texts).enumerate().skip(FIRST_COMPARED);
        let readable = |text: &[u8]| String::from_utf8_lossy(text).into_owned();
        pairs.find(|(_, (draft, main))| draft != main).map_or(Ok(()), |(token, (draft, main))| {
            Err(DraftMismatch::Text { token, draft: readable(draft), main: readable(main) })
        })
    }
}

impl Model {
    /// Checks that `draft` can draft tokens for this model.
    ///
    /// # Errors
    /// [`ModelError::Draft`] with the first difference of the vocabularies.
    pub fn check_draft(&self, draft: &Self) -> Result<(), ModelError> {
        Profile::new(self).check(&Profile::new(draft)).map_err(|mismatch| draft.draft_error(mismatch))
    }

    /// Returns the error that this model cannot draft for the main model.
    #[must_use]
    pub fn draft_error(&self, reason: impl std::fmt::Display) -> ModelError {
        ModelError::Draft { path: self.path.display().to_string(), reason: reason.to_string() }
    }
}

#[cfg(test)]
mod tests {
    use super::{DraftMismatch, Profile};

    fn profile(tokens: usize) -> Profile {
        Profile { tokenizer: 1, bos: Some(1), eos: None, texts: vec![b"word"[..].into(); tokens] }
    }

    #[test]
    fn vocabularies_may_differ_in_their_first_and_last_tokens() {
        let mut draft = profile(300);
        draft.texts[4] = b"other"[..].into();
        assert_eq!(profile(300).check(&draft), Ok(()));
        assert_eq!(profile(428).check(&draft), Ok(()));
        assert_eq!(profile(429).check(&draft), Err(DraftMismatch::Size { draft: 300, main: 429 }));
        assert_eq!(profile(171).check(&draft), Err(DraftMismatch::Size { draft: 300, main: 171 }));
    }

    /// A change of the draft model's vocabulary.
    type Change = fn(&mut Profile);

    #[test]
    fn error_names_the_difference() {
        let main = profile(50);
        let cases: [(Change, &str); 5] = [
            (|draft| draft.tokenizer = 2, "its tokenizer is of type bpe, but the main model's is of type spm"),
            (
                |draft| draft.bos = Some(2),
                "its prompts start with token 2, but those of the main model start with token 1",
            ),
            (
                |draft| draft.bos = None,
                "its prompts start with no special token, but those of the main model start with token 1",
            ),
            (
                |draft| draft.eos = Some(2),
                "its prompts end with token 2, but those of the main model end with no special token",
            ),
            (|draft| draft.texts[5] = b"wor"[..].into(), "its token 5 is \"wor\", but the main model's is \"word\""),
        ];
        for (change, expected) in cases {
            let mut draft = profile(50);
            change(&mut draft);
            assert_eq!(main.check(&draft).unwrap_err().to_string(), expected);
        }
    }
}
