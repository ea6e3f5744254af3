//! Positions of images in a sequence, for models in which these differ from the indexes of the tokens.
//!
//! With M-RoPE, all tokens of an image have the same temporal position, and differ in row and column; the text after
//! the image continues after its longer edge. Other models attend within an image in both directions. In both cases
//! the tokens of an image cannot be separated: a sequence is only cut before or after the image.

use crate::events::{TokenId, is_image_token};
use std::ops::Range;

/// Number of positions of an embedding in a model with M-RoPE.
pub const MROPE_SECTIONS: usize = 4;

/// Positions of the tokens of an image, relative to the position of its first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageLayout {
    /// One position per token.
    Line,
    /// One temporal position for all tokens, which differ in row and column (M-RoPE).
    Grid {
        /// Tokens in a row.
        columns: u32,
    },
}

impl ImageLayout {
    /// Returns the number of positions that an image of `tokens` tokens takes up.
    #[must_use]
    pub fn positions(self, tokens: u32) -> u32 {
        match self {
            Self::Line => tokens,
            Self::Grid { columns } => columns.max(tokens.div_ceil(columns.max(1))),
        }
    }

    /// Returns the positions of token `index` in all sections of M-RoPE (time, row, column, unused) for an image at
    /// the position `base`. Models without M-RoPE only use the first one.
    #[must_use]
    pub fn sections(self, base: u32, index: u32) -> [u32; MROPE_SECTIONS] {
        match self {
            Self::Line => [base + index; MROPE_SECTIONS],
            Self::Grid { columns } => [base, base + index / columns.max(1), base + index % columns.max(1), 0],
        }
    }

    /// Returns the layout with these positions for an image at the position 1. `None` if there is none.
    pub(super) fn from_sections(found: &[[u32; MROPE_SECTIONS]]) -> Option<Self> {
        let first_row = found.iter().take_while(|sections| sections[1] == 1).count() as u32;
        let layouts = [Self::Line, Self::Grid { columns: first_row.max(1) }];
        layouts.into_iter().find(|layout| (0..).zip(found).all(|(index, found)| layout.sections(1, index) == *found))
    }
}

/// An image in a sequence whose tokens cannot be separated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ImageSpan {
    /// Index of its first token.
    pub start: u32,
    /// Number of tokens of the whole image, of which the sequence may still lack some.
    pub tokens: u32,
    /// Positions of the tokens.
    pub layout: ImageLayout,
}

impl ImageSpan {
    fn end(&self) -> u32 {
        self.start + self.tokens
    }
}

/// The images of a sequence whose tokens cannot be separated, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageSpans(Vec<ImageSpan>);

impl ImageSpans {
    /// Returns the images in runs of placeholders, if each token has its index as its position.
    #[must_use]
    pub fn from_placeholders(tokens: &[TokenId]) -> Self {
        let mut spans = Self::default();
        for (index, _) in (0..).zip(tokens).filter(|&(_, &token)| is_image_token(token)) {
            spans.extend_line(index);
        }
        spans
    }

    /// Returns the position of the token at `index`: its temporal one with M-RoPE.
    #[must_use]
    pub fn position(&self, index: u32) -> u32 {
        let mut position = index;
        for span in self.0.iter().take_while(|span| span.start < index) {
            position -= if span.end() <= index {
                span.tokens - span.layout.positions(span.tokens)
            } else {
                index - span.start - (span.layout.sections(0, index - span.start)[0])
            };
        }
        position
    }

    /// Returns the positions of the first `len` tokens.
    #[must_use]
    pub fn positions(&self, len: usize) -> Vec<u32> {
        let (mut positions, mut next) = (Vec::with_capacity(len), 0);
        let mut spans = self.0.iter().peekable();
        while positions.len() < len {
            if let Some(span) = spans.next_if(|span| span.start as usize == positions.len()) {
                positions.extend((0..span.tokens).map(|index| span.layout.sections(next, index)[0]));
                next += span.layout.positions(span.tokens);
            } else {
                positions.push(next);
                next += 1;
            }
        }
        positions.truncate(len);
        positions
    }

    /// Returns the position of the last of the first `len` tokens; `None` for an empty sequence.
    #[must_use]
    pub fn last_position(&self, len: u32) -> Option<u32> {
        len.checked_sub(1).map(|last| self.position(last))
    }

    /// Returns the length of the longest prefix of up to `len` tokens that ends outside of all images.
    #[must_use]
    pub fn undivided_prefix(&self, len: u32) -> u32 {
        self.0.iter().find(|span| span.start < len && len < span.end()).map_or(len, |span| span.start)
    }

    /// Adds an image after all others, or sets the number of tokens and the layout of the last one.
    pub fn record(&mut self, span: ImageSpan) {
        self.0.retain(|other| other.start < span.start);
        self.0.push(span);
    }

    /// Appends a token to the last image, whose tokens have one position each, or begins a new image.
    pub(super) fn extend_line(&mut self, index: u32) {
        match self.0.last_mut().filter(|last| last.layout == ImageLayout::Line && last.end() == index) {
            Some(last) => last.tokens += 1,
            None => self.0.push(ImageSpan { start: index, tokens: 1, layout: ImageLayout::Line }),
        }
    }

    /// Removes the images after the first `len` tokens.
    pub fn truncate(&mut self, len: u32) {
        self.0.retain(|span| span.start < len);
    }

    /// Removes ordered ranges of tokens, which contain only whole images.
    pub fn remove_ranges(&mut self, ranges: &[Range<u32>]) {
        self.0.retain(|span| !ranges.iter().any(|range| range.contains(&span.start)));
        for span in &mut self.0 {
            let before = ranges.iter().take_while(|range| range.start < span.start);
            span.start -= before.map(|range| range.end - range.start).sum::<u32>();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn grid(start: u32, columns: u32, rows: u32) -> ImageSpan {
        ImageSpan { start, tokens: columns * rows, layout: ImageLayout::Grid { columns } }
    }

    fn spans(images: &[ImageSpan]) -> ImageSpans {
        ImageSpans(images.to_vec())
    }

    #[test]
    fn text_continues_after_the_longer_edge() {
        let images = spans(&[grid(2, 3, 2), grid(9, 1, 4)]);
        assert_eq!(images.positions(15), (0..15).map(|index| images.position(index)).collect::<Vec<_>>());
        assert_eq!(images.positions(15), [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 10, 11]);
        assert_eq!(
            (images.last_position(0), images.last_position(8), images.last_position(9)),
            (None, Some(2), Some(5))
        );
        let line = spans(&[ImageSpan { start: 2, tokens: 4, layout: ImageLayout::Line }]);
        assert!((0..9).all(|index| line.position(index) == index));
    }

    #[test]
    fn sequence_is_cut_outside_of_images() {
        let mut images = spans(&[grid(2, 3, 2), grid(8, 2, 2)]);
        let prefixes = [0, 1, 2, 3, 7, 8, 9, 11, 12, 13].map(|len| images.undivided_prefix(len));
        assert_eq!(prefixes, [0, 1, 2, 2, 2, 8, 8, 8, 12, 13]);
        images.truncate(8);
        assert_eq!(images, spans(&[grid(2, 3, 2)]));
        images.record(grid(2, 2, 5));
        images.record(grid(20, 1, 1));
        assert_eq!(images, spans(&[grid(2, 2, 5), grid(20, 1, 1)]), "the whole image replaces its part");
    }

    #[test]
    fn images_shift_with_their_tokens() {
        let line = |start, tokens| ImageSpan { start, tokens, layout: ImageLayout::Line };
        let mut images = spans(&[line(2, 4), line(8, 4), line(20, 3)]);
        images.remove_ranges(&[1..6, 12..13]);
        assert_eq!(images, spans(&[line(3, 4), line(14, 3)]));
        assert_eq!(ImageSpans::from_placeholders(&[1, -5, -6, 2, -7]), spans(&[line(1, 2), line(4, 1)]));
    }

    proptest! {
        #[test]
        fn layout_follows_from_its_positions(columns in 1u32..9, rows in 1u32..9, is_line: bool) {
            let layout = if is_line { ImageLayout::Line } else { ImageLayout::Grid { columns } };
            let tokens = columns * rows;
            let mut sections: Vec<_> = (0..tokens).map(|index| layout.sections(1, index)).collect();
            prop_assert_eq!(ImageLayout::from_sections(&sections), Some(layout));
            sections[tokens as usize / 2][1] += 7;
            prop_assert_eq!(ImageLayout::from_sections(&sections), None);
        }
    }
}
