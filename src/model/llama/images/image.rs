//! An image that is split into tokens, and the images of a prompt.

use super::embedding_rows::EmbeddingRows;
use super::error::ImageError;
use super::grid::grid;
use super::header::ImageHeader;
use super::placeholders::Placeholders;
use crate::events::{ImageRecord, ImageTile, TokenId, hex, is_image_token};
use crate::model::Vocabulary;
use crate::model::llama::ffi::images::{ImagePart, ImageParts};
use crate::model::llama::image_spans::ImageLayout;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// File of an image.
#[derive(Debug)]
pub(super) struct ImageFileInfo {
    pub sha256: [u8; 32],
    pub header: ImageHeader,
    /// Size in bytes.
    pub bytes: usize,
}

/// Properties of all embeddings of a projector.
#[derive(Debug, Clone, Copy)]
pub(super) struct EmbeddingTraits {
    /// Values per embedding.
    pub width: usize,
    /// True if tokens of a chunk attend to later tokens of the same chunk.
    pub non_causal: bool,
}

/// An image that was split into tokens and is encoded when a run needs it.
#[derive(Debug)]
pub struct Image {
    file: ImageFileInfo,
    traits: EmbeddingTraits,
    /// Tokens of the image: placeholders, and the text that the projector puts around them.
    tokens: Vec<TokenId>,
    chunks: Vec<Chunk>,
    /// Preprocessed pixels, until they are encoded.
    parts: Mutex<Option<ImageParts>>,
    /// An embedding for each placeholder.
    embeddings: OnceLock<Vec<f32>>,
}

/// Consecutive placeholders that are encoded as one piece.
#[derive(Debug)]
struct Chunk {
    /// Indexes in the tokens of the image.
    range: Range<usize>,
    /// Columns and rows of patches.
    grid: (u32, u32),
    /// Positions of the tokens.
    layout: ImageLayout,
}

impl Image {
    /// Creates an image from its preprocessed pixels.
    ///
    /// # Errors
    /// [`ImageError::Vocabulary`] or [`ImageError::Positions`].
    pub(super) fn new(
        file: ImageFileInfo,
        parts: ImageParts,
        mut placeholders: Placeholders,
        traits: EmbeddingTraits,
        vocabulary: &Vocabulary,
    ) -> Result<Self, ImageError> {
        let (mut tokens, mut chunks) = (Vec::new(), Vec::new());
        for part in parts.list() {
            match part {
                ImagePart::Text(text) if text.iter().all(|&token| vocabulary.contains(token)) => tokens.extend(text),
                ImagePart::Text(_) | ImagePart::Other => return Err(ImageError::Vocabulary),
                ImagePart::Pixels { layout: None, .. } => return Err(ImageError::Positions),
                ImagePart::Pixels { count, grid: reported, layout: Some(layout) } => {
                    let start = tokens.len();
                    tokens.extend(placeholders.by_ref().take(count));
                    let grid = grid(count, reported, (file.header.width, file.header.height));
                    chunks.push(Chunk { range: start..tokens.len(), grid, layout });
                }
            }
        }
        Ok(Self { file, traits, tokens, chunks, parts: Mutex::new(Some(parts)), embeddings: OnceLock::new() })
    }

    /// Computes the embeddings with `encode`, unless they are available already.
    ///
    /// # Errors
    /// [`ImageError::Encode`].
    pub(super) fn encode(&self, encode: impl Fn(&ImageParts) -> Option<Vec<f32>>) -> Result<(), ImageError> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(pixels) = parts.as_ref() else { return Ok(()) };
        let embeddings = encode(pixels).filter(|values| values.len() == self.placeholders() * self.traits.width);
        // The cell is empty, because the pixels are removed with the first encoding.
        let _ = self.embeddings.set(embeddings.ok_or(ImageError::Encode)?);
        *parts = None;
        Ok(())
    }

    /// Returns the SHA-256 of the file.
    #[must_use]
    pub fn sha256(&self) -> &[u8; 32] {
        &self.file.sha256
    }

    /// Returns the media type of the file.
    #[must_use]
    pub fn media_type(&self) -> &'static str {
        self.file.header.media_type
    }

    /// Returns the tokens of the image in a prompt.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Returns true if the embeddings are available.
    #[must_use]
    pub fn is_encoded(&self) -> bool {
        self.embeddings.get().is_some()
    }

    /// Returns the embeddings for the placeholders from `position` on, up to the end of their chunk. `None` if the
    /// token at `position` is not a placeholder of this image, or if the image is not encoded.
    #[must_use]
    pub fn embeddings_at(&self, sequence: &[TokenId], position: usize) -> Option<EmbeddingRows<'_>> {
        let ChunkRows { chunk, offset, rows } = self.chunk_at(sequence, position)?;
        let values = self.embeddings.get()?.get(rows.start * self.traits.width..rows.end * self.traits.width)?;
        Some(EmbeddingRows {
            values,
            count: rows.len(),
            offset,
            chunk: chunk.range.len(),
            layout: chunk.layout,
            non_causal: self.traits.non_causal,
        })
    }

    /// Returns the number of tokens of the largest chunk that is decoded as a whole; 0 if chunks can be divided.
    #[must_use]
    pub fn undivided_tokens(&self) -> usize {
        if self.traits.non_causal { self.chunks.iter().map(|chunk| chunk.range.len()).max().unwrap_or(0) } else { 0 }
    }

    /// Returns the record of the image, without its positions in a prompt.
    fn record(&self) -> ImageRecord {
        ImageRecord {
            sha256: hex(&self.file.sha256),
            media_type: self.file.header.media_type.to_owned(),
            bytes: self.file.bytes as u64,
            width: self.file.header.width,
            height: self.file.header.height,
            ..ImageRecord::default()
        }
    }

    /// Returns the index of the chunk that begins at `position`.
    fn chunk_start(&self, sequence: &[TokenId], position: usize) -> Option<usize> {
        let rest = sequence.get(position..)?;
        self.chunks
            .iter()
            .position(|chunk| !chunk.range.is_empty() && rest.starts_with(&self.tokens[chunk.range.clone()]))
    }

    /// Returns the number of placeholders.
    fn placeholders(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.range.len()).sum()
    }

    /// Returns the size of the embeddings.
    pub(super) fn bytes(&self) -> usize {
        self.placeholders() * self.traits.width * size_of::<f32>()
    }

    /// Returns true if the token at `position` is a placeholder of this image, and the sequence has its whole chunk.
    pub(super) fn has_placeholder_at(&self, sequence: &[TokenId], position: usize) -> bool {
        self.chunk_at(sequence, position).is_some()
    }

    /// Finds the embeddings for the placeholders from `position` on, up to the end of their chunk. The sequence must
    /// have the whole chunk.
    fn chunk_at(&self, sequence: &[TokenId], position: usize) -> Option<ChunkRows<'_>> {
        let token = *sequence.get(position)?;
        let mut first_row = 0;
        for chunk in &self.chunks {
            let ids = &self.tokens[chunk.range.clone()];
            for (offset, _) in ids.iter().enumerate().filter(|&(_, &id)| id == token) {
                let whole = position.checked_sub(offset).and_then(|start| sequence.get(start..start + ids.len()));
                if whole == Some(ids) {
                    return Some(ChunkRows { chunk, offset, rows: first_row + offset..first_row + ids.len() });
                }
            }
            first_row += ids.len();
        }
        None
    }
}

/// Embeddings of a chunk from one of its tokens on.
struct ChunkRows<'a> {
    chunk: &'a Chunk,
    /// Tokens of the chunk before these.
    offset: usize,
    /// Indexes of the embeddings in those of the image.
    rows: Range<usize>,
}

/// Returns the position of the first placeholder in a prompt that belongs to none of the images.
#[must_use]
pub fn first_unknown(images: &[Arc<Image>], prompt: &[TokenId]) -> Option<usize> {
    let mut at = 0;
    while let Some(&token) = prompt.get(at) {
        if is_image_token(token) {
            let chunk = images.iter().find_map(|image| image.chunk_at(prompt, at));
            let Some(chunk) = chunk else { return Some(at) };
            at += chunk.rows.len();
        } else {
            at += 1;
        }
    }
    None
}

/// Returns the records of the images of a prompt, in order of their positions.
#[must_use]
pub fn records(images: &[Arc<Image>], prompt: &[TokenId]) -> Vec<ImageRecord> {
    let mut records: Vec<ImageRecord> = Vec::new();
    // The image of the last chunk that was found, and the index of the chunk after it.
    let mut next: Option<(&Arc<Image>, usize)> = None;
    let mut at = 0;
    while at < prompt.len() {
        let found = is_image_token(prompt[at])
            .then(|| images.iter().find_map(|image| Some((image, image.chunk_start(prompt, at)?))));
        let Some((image, chunk)) = found.flatten() else {
            at += 1;
            continue;
        };
        let (columns, rows) = image.chunks[chunk].grid;
        let tile = ImageTile { start: at as u32, columns, rows };
        match (next, records.last_mut()) {
            (Some((last, expected)), Some(record)) if Arc::ptr_eq(last, image) && expected == chunk => {
                record.tiles.push(tile);
            }
            _ => records.push(ImageRecord { tiles: vec![tile], ..image.record() }),
        }
        next = Some((image, chunk + 1));
        at += image.chunks[chunk].range.len();
    }
    records
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an image of two chunks, of 3 and 2 placeholders, whose embeddings are the numbers from 0.
    fn image(seed: u8) -> Image {
        let ids: Vec<TokenId> = Placeholders::new([seed; 32]).take(5).collect();
        let tokens = [&[7], &ids[..3], &[8, 9], &ids[3..], &[7]].concat();
        let embeddings = OnceLock::from((0..10u8).map(f32::from).collect::<Vec<_>>());
        let chunk = |range: Range<usize>| {
            let grid = (range.len() as u32, 1);
            Chunk { range, grid, layout: ImageLayout::Line }
        };
        Image {
            file: ImageFileInfo {
                sha256: [seed; 32],
                header: ImageHeader { media_type: "image/png", width: 9, height: 6 },
                bytes: 100,
            },
            traits: EmbeddingTraits { width: 2, non_causal: false },
            tokens,
            chunks: vec![chunk(1..4), chunk(6..8)],
            parts: Mutex::default(),
            embeddings,
        }
    }

    #[test]
    fn embeddings_are_found_from_any_placeholder() {
        let (one, other) = (image(1), image(2));
        let sequence = [&[5, 5], one.tokens(), other.tokens(), one.tokens()].concat();
        let values = |image: &Image, at| image.embeddings_at(&sequence, at).map(|rows| rows.values().to_vec());
        assert_eq!(values(&one, 3).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(values(&one, 4).unwrap(), [2.0, 3.0, 4.0, 5.0]);
        assert_eq!(values(&one, 8).unwrap(), [6.0, 7.0, 8.0, 9.0]);
        assert_eq!(values(&other, 12).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!(one.embeddings_at(&sequence, 3).unwrap().first(1).values(), [0.0, 1.0]);
        assert_eq!(values(&one, 12), None, "a placeholder of the other image");
        assert_eq!(values(&one, 2), None, "text of the image");
        assert_eq!(values(&one, 99), None);
        assert_eq!(one.embeddings_at(&sequence[..5], 3), None, "a part of a chunk");
        assert_eq!(one.embeddings_at(&sequence[4..], 0), None, "a part of a chunk");
    }

    #[test]
    fn placeholders_without_an_image_are_found() {
        let (one, other) = (Arc::new(image(1)), Arc::new(image(2)));
        let prompt = [&[5, 5], one.tokens(), other.tokens()].concat();
        assert_eq!(first_unknown(&[Arc::clone(&one)], &prompt), Some(12));
        assert_eq!(first_unknown(&[other, Arc::clone(&one)], &prompt), None);
        assert_eq!(first_unknown(&[], &prompt), Some(3));
        assert_eq!(first_unknown(&[one], &prompt[..5]), Some(3), "a part of a chunk");
    }

    #[test]
    fn images_are_described_with_their_tiles() {
        let (one, other) = (Arc::new(image(1)), Arc::new(image(2)));
        let prompt = [&[5, 5], one.tokens(), &[6], other.tokens(), other.tokens()].concat();
        let found = records(&[Arc::clone(&one), other], &prompt);
        let tile = |start, columns| ImageTile { start, columns, rows: 1 };
        let tiles: Vec<_> = found.iter().map(|record| record.tiles.clone()).collect();
        assert_eq!(tiles, [[tile(3, 3), tile(8, 2)], [tile(13, 3), tile(18, 2)], [tile(22, 3), tile(27, 2)]]);
        assert_eq!((found[0].sha256.as_str(), found[0].width, found[0].bytes), (&*hex(&[1; 32]), 9, 100));
        assert!(records(&[one], &[1, 2]).is_empty());
    }
}
