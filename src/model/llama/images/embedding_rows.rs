//! Embeddings of consecutive tokens of an image, as a context decodes them.

use crate::model::llama::image_spans::{ImageLayout, ImageSpan, MROPE_SECTIONS};

/// Embeddings of consecutive tokens of an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbeddingRows<'a> {
    pub(super) values: &'a [f32],
    pub(super) count: usize,
    /// Tokens of the chunk before these.
    pub(super) offset: usize,
    /// Tokens of the whole chunk.
    pub(super) chunk: usize,
    /// Positions of the chunk's tokens.
    pub(super) layout: ImageLayout,
    /// True if tokens of the chunk attend to later ones.
    pub(super) non_causal: bool,
}

impl<'a> EmbeddingRows<'a> {
    /// Returns the number of tokens.
    #[must_use]
    pub fn count(self) -> usize {
        self.count
    }

    /// Returns true if all tokens must be decoded together, because they attend to each other.
    #[must_use]
    pub fn is_undivided(self) -> bool {
        self.non_causal
    }

    /// Returns the first `count` tokens.
    #[must_use]
    pub fn first(self, count: usize) -> Self {
        let count = count.min(self.count);
        Self { values: &self.values[..self.values.len() / self.count.max(1) * count], count, ..self }
    }

    /// Returns the values.
    pub(in crate::model::llama) fn values(self) -> &'a [f32] {
        self.values
    }

    /// Returns the number of tokens of the chunk before these.
    pub(in crate::model::llama) fn offset(self) -> usize {
        self.offset
    }

    /// Returns the positions of the tokens in all sections of M-RoPE, if the chunk is at the position `base`.
    pub(in crate::model::llama) fn positions(self, base: u32) -> impl Iterator<Item = [u32; MROPE_SECTIONS]> {
        (self.offset..self.offset + self.count).map(move |index| self.layout.sections(base, index as u32))
    }

    /// Returns true if a decode of these tokens alone would give other results than one of the whole chunk.
    pub(in crate::model::llama) fn is_divided(self) -> bool {
        self.non_causal && self.count != self.chunk
    }

    /// Returns the span of the chunk in a sequence in which it begins at `start`; `None` if the sequence can be cut
    /// anywhere within it.
    pub(in crate::model::llama) fn span(self, start: u32) -> Option<ImageSpan> {
        let is_separable = !self.non_causal && self.layout == ImageLayout::Line;
        (!is_separable).then_some(ImageSpan { start, tokens: self.chunk as u32, layout: self.layout })
    }
}
