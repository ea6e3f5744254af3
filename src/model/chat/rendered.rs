//! A rendered conversation and its tokenization.

use super::{ChatTemplateError, mask, messages, spans};
use crate::events::{Span, TokenId};
use crate::model::Vocabulary;
use std::ops::Range;

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedPrompt {
    /// The prompt's text.
    pub text: String,
    /// Byte ranges of the messages' contents, in order; empty if unknown.
    pub parts: Vec<RenderedMessage>,
    /// The text with marks in literals of control tokens from messages; `None` if there are none.
    pub(super) masked: Option<String>,
    /// True if the text ends inside reasoning, so that the answer starts within it.
    pub thinking: bool,
}

/// The rendered content of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RenderedMessage {
    /// The message's role.
    pub role: String,
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

impl RenderedPrompt {
    /// Creates a prompt from a text without messages.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        Self { text: text.to_owned(), parts: Vec::new(), masked: None, thinking: false }
    }

    /// Appends text, which may contain marks.
    pub(super) fn push(&mut self, text: &str) {
        if let Some(masked) = &mut self.masked {
            masked.push_str(text);
            self.text.push_str(&mask::unmasked(text));
        } else {
            self.text.push_str(text);
        }
    }

    /// Appends the start of the assistant's answer.
    pub(super) fn continue_with(&mut self, last: &messages::PartialAnswer, (open, close): (&str, &str)) {
        if !last.reasoning.is_empty() || self.thinking {
            if !self.thinking {
                self.push(&format!("{open}\n"));
            }
            self.push(&last.reasoning);
            self.thinking = last.content.is_empty();
            if !self.thinking {
                self.push(&format!("\n{close}\n\n"));
            }
        }
        let start = self.text.len();
        self.push(&last.content);
        if !self.parts.is_empty() && !last.content.is_empty() {
            self.parts.push(RenderedMessage { role: "assistant".into(), start, end: self.text.len() });
        }
    }

    /// Returns the text without the BOS that the tokenizer adds to every prompt, as llama-server returns it.
    #[must_use]
    pub fn without_bos(&self, vocabulary: &Vocabulary) -> &str {
        let special = vocabulary.special();
        let bos = special.bos.filter(|_| special.add_bos).map(|bos| vocabulary.decode(&[bos])).unwrap_or_default();
        self.text.strip_prefix(bos.as_str()).unwrap_or(&self.text)
    }

    /// Returns the tokens, and the spans of tokens with their roles. Tokens outside of messages belong to the template.
    /// The tokens of each of the `images` replace one `marker` in the text.
    ///
    /// # Errors
    /// [`ChatTemplateError::Rejected`] if the template did not render every image once.
    pub fn tokenize(
        &self,
        vocabulary: &Vocabulary,
        marker: &str,
        images: &[&[TokenId]],
    ) -> Result<(Vec<TokenId>, Vec<Span>), ChatTemplateError> {
        let (mut tokens, mut inserted) = match &self.masked {
            _ if !images.is_empty() => self.tokenize_around_images(vocabulary, marker, images)?,
            Some(masked) => (mask::tokenize(masked, vocabulary), Vec::new()),
            None => (vocabulary.encode_prompt(&self.text), Vec::new()),
        };
        // Avoids a second BOS if the template writes it.
        if let Some(bos) = vocabulary.special().bos
            && tokens.starts_with(&[bos, bos])
        {
            tokens.remove(0);
            inserted.iter_mut().for_each(|range| *range = range.start - 1..range.end - 1);
        }
        let inserted = spans::InsertedTokens { ranges: &inserted, text_len: marker.len() };
        let spans = spans::token_spans(&self.text, &self.parts, &tokens, &inserted, vocabulary);
        Ok((tokens, spans))
    }

    /// Returns the tokens, and the ranges of those of images. Like llama.cpp, tokenizes the texts between images
    /// separately.
    fn tokenize_around_images(
        &self,
        vocabulary: &Vocabulary,
        marker: &str,
        images: &[&[TokenId]],
    ) -> Result<(Vec<TokenId>, Vec<Range<usize>>), ChatTemplateError> {
        let text = self.masked.as_ref().unwrap_or(&self.text);
        let mut texts = text.split(marker);
        let (mut tokens, after) = mask::surrounding_tokens(vocabulary);
        let mut inserted = Vec::with_capacity(images.len());
        tokens.extend(mask::tokenize_part(texts.next().unwrap_or_default(), vocabulary));
        for (index, image) in images.iter().enumerate() {
            let Some(following) = texts.next() else {
                let message = format!("it renders {index} of {} images", images.len());
                return Err(ChatTemplateError::Rejected(message));
            };
            inserted.push(tokens.len()..tokens.len() + image.len());
            tokens.extend_from_slice(image);
            tokens.extend(mask::tokenize_part(following, vocabulary));
        }
        if texts.next().is_some() {
            return Err(ChatTemplateError::Rejected("it renders an image more than once".into()));
        }
        tokens.extend(after);
        Ok((tokens, inserted))
    }
}
