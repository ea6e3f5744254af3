//! A rendered conversation and its tokenization.

use super::syntax::ReasoningMarkers;
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

    /// Separates the part of a system message from the message that it was merged into.
    pub(super) fn split_system_part(&mut self, system: &str) {
        if let Some(part) = self.parts.first_mut()
            && self.text[part.start..part.end].starts_with(system)
        {
            let end = part.start + system.len();
            let start = std::mem::replace(&mut part.start, (end + 1).min(part.end));
            self.parts.insert(0, RenderedMessage { role: "system".into(), start, end });
        }
    }

    /// Appends the end of the reasoning.
    pub(super) fn close_reasoning(&mut self, markers: &ReasoningMarkers) {
        self.push(&format!("\n{}\n\n", markers.close));
        self.thinking = false;
    }

    /// Appends the start of the assistant's answer, in which literals of control tokens of `vocabulary` stay text.
    pub(super) fn continue_with(
        &mut self,
        answer: &messages::PartialAnswer,
        markers: &ReasoningMarkers,
        vocabulary: Option<&Vocabulary>,
    ) {
        if !answer.reasoning.is_empty() || self.thinking {
            if !self.thinking {
                self.push(&format!("{}\n", markers.open));
                self.thinking = true;
            }
            self.push_masked(&answer.reasoning, vocabulary);
            if !answer.content.is_empty() {
                self.close_reasoning(markers);
            }
        }
        let start = self.text.len();
        self.push_masked(&answer.content, vocabulary);
        if !self.parts.is_empty() && !answer.content.is_empty() {
            self.parts.push(RenderedMessage { role: "assistant".into(), start, end: self.text.len() });
        }
    }

    /// Appends text, which may contain marks.
    fn push(&mut self, text: &str) {
        if let Some(masked) = &mut self.masked {
            masked.push_str(text);
            self.text.push_str(&mask::unmasked(text));
        } else {
            self.text.push_str(text);
        }
    }

    /// Appends text of a message, with marks in its literals of control tokens.
    fn push_masked(&mut self, text: &str, vocabulary: Option<&Vocabulary>) {
        let masked = vocabulary.and_then(|vocabulary| mask::masked(text, vocabulary, &[]));
        if masked.is_some() {
            self.masked.get_or_insert_with(|| self.text.clone());
        }
        self.push(masked.as_deref().unwrap_or(text));
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
