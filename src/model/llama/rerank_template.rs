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
    /// Returns the tokenizer for the pairs of a query. Only texts that are inserted into a template may be tokenized
    /// again with each pair.
    #[must_use]
    pub fn pair_tokenizer<'a>(&'a self, vocabulary: &'a Vocabulary, query: &'a str) -> PairTokenizer<'a> {
        let query_tokens = vocabulary.encode_plain(query);
        let format = match self {
            Self::Frame { before, between, after } => {
                PairFormat::Frame { start: [before.as_slice(), &query_tokens, between].concat(), end: after }
            }
            Self::Template(template) => {
                let is_query_plain = vocabulary.encode_markup(query) == query_tokens;
                let tokens = |part: &TemplatePart<'_>| match part {
                    TemplatePart::Text(text) => vocabulary.encode_markup(text),
                    TemplatePart::Query => query_tokens.clone(),
                    TemplatePart::Document => Vec::new(),
                };
                let parts = split(template).into_iter().map(|part| (part, tokens(&part))).collect();
                PairFormat::Template { query, is_query_plain, parts }
            }
        };
        PairTokenizer { vocabulary, format }
    }
}

/// Tokenizes the pairs of a query and documents.
pub struct PairTokenizer<'a> {
    vocabulary: &'a Vocabulary,
    format: PairFormat<'a>,
}

enum PairFormat<'a> {
    /// Tokens before and after the document.
    Frame { start: Vec<TokenId>, end: &'a [TokenId] },
    /// The parts of a template, each with its tokens; those of a document are not known.
    Template {
        query: &'a str,
        /// True if the query does not contain special tokens as text.
        is_query_plain: bool,
        parts: Vec<(TemplatePart<'a>, Vec<TokenId>)>,
    },
}

/// A part of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TemplatePart<'a> {
    Text(&'a str),
    Query,
    Document,
}

impl PairTokenizer<'_> {
    /// Tokenizes the query and a document. Special tokens that occur as text in one of them are not parsed.
    #[must_use]
    pub fn encode(&self, document: &str) -> Vec<TokenId> {
        match &self.format {
            PairFormat::Frame { start, end } => {
                [start.as_slice(), &self.vocabulary.encode_plain(document), end].concat()
            }
            PairFormat::Template { query, is_query_plain, parts } => {
                let document_tokens = self.vocabulary.encode_plain(document);
                if *is_query_plain && self.vocabulary.encode_markup(document) == document_tokens {
                    // Tokenized as one text, because tokens may span the insertion points.
                    let text: String = parts.iter().map(|(part, _)| part.text(query, document)).collect();
                    return self.vocabulary.encode_markup(&text);
                }
                let tokens = parts.iter().map(|(part, tokens)| match part {
                    TemplatePart::Document => &document_tokens,
                    TemplatePart::Text(_) | TemplatePart::Query => tokens,
                });
                tokens.flatten().copied().collect()
            }
        }
    }
}

impl<'a> TemplatePart<'a> {
    fn text(self, query: &'a str, document: &'a str) -> &'a str {
        match self {
            Self::Text(text) => text,
            Self::Query => query,
            Self::Document => document,
        }
    }
}

/// Splits a template at `{query}` and `{document}`.
fn split(template: &str) -> Vec<TemplatePart<'_>> {
    let mut parts = Vec::new();
    let mut rest = template;
    loop {
        let found = [("{query}", TemplatePart::Query), ("{document}", TemplatePart::Document)]
            .into_iter()
            .filter_map(|(name, part)| rest.find(name).map(|at| (at, name, part)))
            .min_by_key(|&(at, ..)| at);
        let Some((at, name, part)) = found else { break };
        parts.extend([TemplatePart::Text(&rest[..at]), part]);
        rest = &rest[at + name.len()..];
    }
    parts.push(TemplatePart::Text(rest));
    parts
}

#[cfg(test)]
mod tests {
    use super::{RerankTemplate, TemplatePart, split};
    use crate::model::{SpecialTokens, Vocabulary};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Returns a vocabulary in which a token is a byte and `<s>` is 1000 if special tokens are parsed.
    fn bytes() -> Vocabulary {
        counting_bytes(&Arc::default())
    }

    /// Returns the same vocabulary. It adds the bytes of all tokenized texts to `tokenized`.
    fn counting_bytes(tokenized: &Arc<AtomicUsize>) -> Vocabulary {
        let tokenized = Arc::clone(tokenized);
        Vocabulary::new(Vec::new(), Vec::new(), Vec::new(), SpecialTokens::default(), move |text, _, special| {
            tokenized.fetch_add(text.len(), Ordering::Relaxed);
            let text = if special { text.replace("<s>", "\u{1}") } else { text.to_owned() };
            text.bytes().map(|byte| if byte == 1 { 1000 } else { i32::from(byte) }).collect()
        })
    }

    fn encode(template: &RerankTemplate, query: &str, document: &str) -> Vec<i32> {
        template.pair_tokenizer(&bytes(), query).encode(document)
    }

    #[test]
    fn template_is_split_at_placeholders() {
        let (text, query, document) = (TemplatePart::Text, TemplatePart::Query, TemplatePart::Document);
        assert_eq!(split("a{query}b{document}"), [text("a"), query, text("b"), document, text("")]);
        assert_eq!(split("{document}{query}"), [text(""), document, text(""), query, text("")]);
        assert_eq!(split("plain"), [text("plain")]);
    }

    #[test]
    fn special_tokens_are_parsed_only_in_the_template() {
        let template = RerankTemplate::Template("<s>{query}|{document}".into());
        assert_eq!(encode(&template, "a", "b"), [1000, 97, 124, 98]);
        assert_eq!(encode(&template, "<s>", "b"), [1000, 60, 115, 62, 124, 98]);
        assert_eq!(encode(&template, "a", "<s>"), [1000, 97, 124, 60, 115, 62]);
    }

    #[test]
    fn placeholders_in_texts_are_not_filled() {
        let template = RerankTemplate::Template("{query}|{document}".into());
        assert_eq!(encode(&template, "{document}", "d"), "{document}|d".bytes().map(i32::from).collect::<Vec<_>>());
    }

    #[test]
    fn frame_tokens_surround_and_separate_the_pair() {
        let frame = RerankTemplate::Frame { before: vec![1], between: vec![2, 3], after: vec![4] };
        assert_eq!(encode(&frame, "a", "<s>"), [1, 97, 2, 3, 60, 115, 62, 4]);
    }

    #[test]
    fn query_is_tokenized_once_for_all_documents() {
        let query = "q".repeat(1000);
        let frame = RerankTemplate::Frame { before: vec![1], between: vec![2], after: vec![3] };
        // A pair with special tokens as text is tokenized in parts.
        for (template, document) in [(frame, "d"), (RerankTemplate::Template("{query}{document}".into()), "<s>")] {
            let tokenized = Arc::default();
            let vocabulary = counting_bytes(&tokenized);
            let pairs = template.pair_tokenizer(&vocabulary, &query);
            assert!((0..100).all(|_| pairs.encode(document).len() > query.len()));
            assert!(tokenized.load(Ordering::Relaxed) < 3 * query.len(), "{template:?}: {tokenized:?} bytes");
        }
    }
}
