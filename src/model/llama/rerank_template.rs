//! Formatting of a query and a document as one input, in the format of the model's training.

use super::Model;
use crate::events::TokenId;
use crate::model::Vocabulary;
use llama_cpp_2::token::LlamaToken;

/// The template that joins a query and a document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RerankTemplate {
    /// A text with `{query}` and `{document}`, from the model's template `rerank`.
    Template(String),
    /// Tokens before, between and after both texts, e.g. `[CLS] query [SEP] document [SEP]` for BERT.
    Frame {
        /// Tokens before the query.
        before: Vec<TokenId>,
        /// Tokens between query and document.
        between: Vec<TokenId>,
        /// Tokens after the document.
        after: Vec<TokenId>,
    },
}

impl Model {
    /// Returns the template for a query and a document.
    #[must_use]
    pub fn rerank_template(&self) -> RerankTemplate {
        if let Ok(template) = self.llama.meta_val_str("tokenizer.chat_template.rerank") {
            return RerankTemplate::Template(template);
        }
        let vocab = self.llama.vocab();
        let token = |is_used: bool, token: LlamaToken| Vec::from_iter((is_used && token.0 >= 0).then_some(token.0));
        let end = if vocab.eos().0 >= 0 { vocab.eos() } else { vocab.sep() };
        let before = token(vocab.should_add_bos(), vocab.bos());
        // BERT's families have one token in between; the vocabulary's flags would omit the last token or duplicate the
        // first.
        if self.card.tokenizer == "wpm" || self.card.architecture == "modern-bert" {
            let separator = if vocab.sep().0 >= 0 { vocab.sep() } else { end };
            return RerankTemplate::Frame { before, between: token(true, separator), after: token(true, separator) };
        }
        let after = token(vocab.should_add_eos(), end);
        let between = [after.clone(), token(vocab.should_add_sep(), vocab.sep())].concat();
        RerankTemplate::Frame { before, between, after }
    }
}

impl RerankTemplate {
    /// Tokenizes a pair. Special tokens that occur as text in the query or the document are not parsed.
    #[must_use]
    pub fn tokens(&self, vocabulary: &Vocabulary, query: &str, document: &str) -> Vec<TokenId> {
        match self {
            Self::Frame { before, between, after } => {
                let query = vocabulary.encode(query, false, false);
                let document = vocabulary.encode(document, false, false);
                [before.clone(), query, between.clone(), document, after.clone()].concat()
            }
            Self::Template(template) => {
                let plain = |text| vocabulary.encode(text, false, true) == vocabulary.encode(text, false, false);
                if plain(query) && plain(document) {
                    // Tokenized as one text, because tokens may span the insertion points.
                    return vocabulary.encode(&fill(template, query, document).concat(), false, true);
                }
                let parts = fill(template, query, document);
                let is_template_text = |index: usize| index.is_multiple_of(2);
                let tokens = parts
                    .iter()
                    .enumerate()
                    .map(|(index, part)| vocabulary.encode(part, false, is_template_text(index)));
                tokens.flatten().collect()
            }
        }
    }
}

/// Splits the filled template into its literal texts, at even indexes, and the inserted texts, at odd indexes.
fn fill<'a>(template: &'a str, query: &'a str, document: &'a str) -> Vec<&'a str> {
    let mut parts = Vec::new();
    let mut rest = template;
    loop {
        let found = [("{query}", query), ("{document}", document)]
            .into_iter()
            .filter_map(|(name, text)| rest.find(name).map(|at| (at, name, text)))
            .min_by_key(|&(at, ..)| at);
        let Some((at, name, text)) = found else { break };
        parts.extend([&rest[..at], text]);
        rest = &rest[at + name.len()..];
    }
    parts.push(rest);
    parts
}

#[cfg(test)]
mod tests {
    use super::{RerankTemplate, fill};
    use crate::model::{SpecialTokens, Vocabulary};

    /// Returns a vocabulary in which a token is a byte and `<s>` is 1000 if special tokens are parsed.
    fn bytes() -> Vocabulary {
        Vocabulary::new(Vec::new(), Vec::new(), Vec::new(), SpecialTokens::default(), |text, _, special| {
            let text = if special { text.replace("<s>", "\u{1}") } else { text.to_owned() };
            text.bytes().map(|byte| if byte == 1 { 1000 } else { i32::from(byte) }).collect()
        })
    }

    #[test]
    fn template_placeholders_are_filled_once() {
        assert_eq!(fill("a{query}b{document}", "{document}", "d"), ["a", "{document}", "b", "d", ""]);
        assert_eq!(fill("plain", "q", "d"), ["plain"]);
    }

    #[test]
    fn special_tokens_are_parsed_only_in_the_template() {
        let template = RerankTemplate::Template("<s>{query}|{document}".into());
        assert_eq!(template.tokens(&bytes(), "a", "b"), [1000, 97, 124, 98]);
        assert_eq!(template.tokens(&bytes(), "<s>", "b"), [1000, 60, 115, 62, 124, 98]);
    }

    #[test]
    fn frame_tokens_surround_and_separate_the_pair() {
        let frame = RerankTemplate::Frame { before: vec![1], between: vec![2, 3], after: vec![4] };
        assert_eq!(frame.tokens(&bytes(), "a", "<s>"), [1, 97, 2, 3, 60, 115, 62, 4]);
    }
}
