//! Images in prompts: the projector that turns an image into embeddings, and the placeholder tokens of images.
//!
//! In a sequence of tokens, each embedding has a placeholder: a negative id derived from the image, the projector and
//! the index of the embedding. So every comparison of tokens compares images, too: the prefix match, histories of
//! slots, the host cache and snapshots need no other code for images.

use super::ffi::images::{ImagePart, ImageParts, Projector, ProjectorParams};
use super::image_header::ImageHeader;
use super::image_placeholders::Placeholders;
use super::image_spans::{ImageLayout, ImageSpan, MROPE_SECTIONS};
use super::{Model, fingerprint, image_grid, image_header, reason};
use crate::events::{ImageRecord, ImageTile, TokenId, hex, is_image_token};
use crate::model::{ModelError, Vocabulary};
use llama_cpp_2::model::LlamaModel;
use sha2::{Digest, Sha256};
use std::ffi::CString;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Maximum bytes of embeddings of recent images that are kept for later requests of the same conversation.
const MAX_CACHE_BYTES: usize = 256 << 20;
/// Maximum number of these images.
const MAX_CACHED: usize = 256;

/// Architecture whose images are preceded by padding, which depends on the number of tokens before them.
const PADDED_ARCHITECTURE: &str = "deepseek4";

/// Sizes of images, in pixels, for which projectors with a limit of tokens give about the maximum.
const LARGE_SIZES: [(u32, u32); 5] = [(4096, 4096), (4096, 3072), (3072, 4096), (4096, 2304), (2304, 4096)];

/// Settings of the image encoder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOptions {
    /// Path of the projector.
    pub projector: PathBuf,
    /// True to use a GPU, if the model uses one.
    pub gpu: bool,
    /// Number of threads.
    pub threads: i32,
    /// Minimum tokens of an image; `None` for the projector's.
    pub min_tokens: Option<u32>,
    /// Maximum tokens of an image; `None` for the projector's.
    pub max_tokens: Option<u32>,
}

/// The reason why an image cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// Not an image, or an image in a format that is not supported.
    #[error("the data is not an image in a supported format; send a PNG, JPEG, GIF or BMP image")]
    Format,
    /// llama.cpp decodes images with `stb_image`, which does not know `WebP`.
    #[error(
        "WebP images are not supported, because llama.cpp's decoder (stb_image) does not read them; convert the image to PNG or JPEG"
    )]
    WebP,
    /// The header has no valid size.
    #[error("the header of the {format} image is damaged; send a complete image")]
    Damaged {
        /// Name of the format.
        format: &'static str,
    },
    /// Too many pixels.
    #[error(
        "the image has {width} × {height} pixels; an image may have up to {max} pixels on each edge and {all} pixels in all: send a smaller one",
        max = image_header::MAX_EDGE, all = image_header::MAX_PIXELS
    )]
    TooLarge {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
    },
    /// Too many bytes.
    #[error(
        "the image has {bytes} bytes; an image may have up to {} bytes: send a smaller one",
        image_header::MAX_BYTES
    )]
    TooManyBytes {
        /// Size of the file.
        bytes: usize,
    },
    /// llama.cpp cannot decode it.
    #[error("the image cannot be decoded; it is damaged or of an unusual kind: send a complete PNG or JPEG image")]
    Decode,
    /// The projector surrounds images with tokens that the model lacks.
    #[error(
        "the projector (--mmproj) needs tokens that the model lacks; start the server with the model's own projector"
    )]
    Vocabulary,
    /// The tokens of the image have unknown positions.
    #[error("the projector (--mmproj) gives the tokens of the image positions that are not supported")]
    Positions,
    /// llama.cpp cannot encode it.
    #[error("llama.cpp cannot encode the image; see llama.cpp's log")]
    Encode,
}

/// The image encoder of a model.
#[derive(Debug)]
pub struct Images {
    projector: Projector,
    vocabulary: Arc<Vocabulary>,
    /// Hash of the projector and of the settings that change embeddings.
    fingerprint: u128,
    /// True if tokens of an image attend to later tokens of the same image.
    non_causal: bool,
    /// Maximum tokens of an image that are decoded together; 0 if images can be divided.
    max_undivided: u32,
    /// Recent images, the most recently used last.
    recent: Mutex<Vec<Arc<Image>>>,
}

/// An image that was split into tokens and is encoded when a run needs it.
#[derive(Debug)]
pub struct Image {
    /// SHA-256 of the file.
    sha256: [u8; 32],
    header: ImageHeader,
    /// Size of the file in bytes.
    file_bytes: usize,
    /// Tokens of the image: placeholders, and the text that the projector puts around them.
    tokens: Vec<TokenId>,
    /// Ranges of placeholders in the tokens; each is encoded as one piece.
    chunks: Vec<Range<usize>>,
    /// Columns and rows of patches of each chunk.
    grids: Vec<(u32, u32)>,
    /// Positions of the tokens of each chunk.
    layouts: Vec<ImageLayout>,
    /// True if tokens of a chunk attend to later tokens of the same chunk.
    non_causal: bool,
    /// Values per embedding.
    width: usize,
    /// Preprocessed pixels, until they are encoded.
    parts: Mutex<Option<ImageParts>>,
    /// An embedding for each placeholder.
    embeddings: OnceLock<Vec<f32>>,
}

/// Embeddings of consecutive tokens of an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EmbeddingRows<'a> {
    values: &'a [f32],
    count: usize,
    /// Tokens of the chunk before these.
    offset: usize,
    /// Tokens of the whole chunk.
    chunk: usize,
    /// Positions of the chunk's tokens.
    layout: ImageLayout,
    /// True if tokens of the chunk attend to later ones.
    non_causal: bool,
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
    pub(super) fn values(self) -> &'a [f32] {
        self.values
    }

    /// Returns the number of tokens of the chunk before these.
    pub(super) fn offset(self) -> usize {
        self.offset
    }

    /// Returns the positions of the tokens in all sections of M-RoPE, if the chunk is at the position `base`.
    pub(super) fn positions(self, base: u32) -> impl Iterator<Item = [u32; MROPE_SECTIONS]> {
        (self.offset..self.offset + self.count).map(move |index| self.layout.sections(base, index as u32))
    }

    /// Returns true if a decode of these tokens alone would give other results than one of the whole chunk.
    pub(super) fn is_divided(self) -> bool {
        self.non_causal && self.count != self.chunk
    }

    /// Returns the span of the chunk in a sequence in which it begins at `start`; `None` if the sequence can be cut
    /// anywhere within it.
    pub(super) fn span(self, start: u32) -> Option<ImageSpan> {
        let is_separable = !self.non_causal && self.layout == ImageLayout::Line;
        (!is_separable).then_some(ImageSpan { start, tokens: self.chunk as u32, layout: self.layout })
    }
}

impl Images {
    /// Loads the projector of a model.
    ///
    /// # Errors
    /// [`ModelError::Projector`].
    pub(super) fn load(
        options: &ImageOptions,
        llama: &Arc<LlamaModel>,
        vocabulary: &Arc<Vocabulary>,
        has_gpu: bool,
    ) -> Result<Self, ModelError> {
        let path = options.projector.display().to_string();
        let error = |reason: String| ModelError::Projector { path: path.clone(), reason };
        let unreadable = |source: std::io::Error| error(source.to_string());
        let hash = fingerprint::hash_file(&options.projector).map_err(unreadable)?;
        let file = CString::new(options.projector.as_os_str().as_bytes())
            .map_err(|_| error("its path has a zero byte".into()))?;
        let limit = |tokens: Option<u32>| tokens.and_then(|tokens| i32::try_from(tokens).ok());
        let params = ProjectorParams {
            gpu: options.gpu && has_gpu,
            threads: options.threads,
            min_tokens: limit(options.min_tokens),
            max_tokens: limit(options.max_tokens),
        };
        let projector = Projector::load(&file, llama, &params).map_err(|lines| error(reason::reason(&lines)))?;
        if !projector.has_vision() {
            return Err(error("it has no image encoder; sound is not supported".into()));
        }
        if llama.meta_val_str("general.architecture").is_ok_and(|name| name == PADDED_ARCHITECTURE) {
            return Err(error("it pads images depending on the text before them, which is not supported".into()));
        }
        let non_causal = projector.is_non_causal();
        let mut max_undivided = 0;
        if projector.has_mrope() || non_causal {
            let parts: Vec<ImagePart> = LARGE_SIZES
                .iter()
                .filter_map(|&(width, height)| projector.tokenize_size(width, height))
                .flat_map(|parts| parts.list())
                .collect();
            for part in parts {
                match part {
                    ImagePart::Pixels { layout: None, .. } => return Err(error(ImageError::Positions.to_string())),
                    ImagePart::Pixels { count, .. } if non_causal => max_undivided = max_undivided.max(count as u32),
                    _ => {}
                }
            }
        }
        let settings = format!("{:?} {:?}", options.min_tokens, options.max_tokens);
        let fingerprint = hash ^ fingerprint::hash_text(&settings);
        let vocabulary = Arc::clone(vocabulary);
        Ok(Self { projector, vocabulary, fingerprint, non_causal, max_undivided, recent: Mutex::default() })
    }

    /// Returns the number of tokens up to which an image must fit into a physical batch, because its tokens attend to
    /// each other; 0 if images can be divided.
    #[must_use]
    pub fn max_undivided_tokens(&self) -> u32 {
        self.max_undivided
    }

    /// Decodes an image file and splits it into tokens, unless it was encoded recently. Takes up to a second for a
    /// large image.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn tokenize(&self, file: &[u8]) -> Result<Arc<Image>, ImageError> {
        let sha256: [u8; 32] = Sha256::digest(file).into();
        if let Some(known) = self.take_recent(|image| image.sha256 == sha256) {
            return Ok(known);
        }
        let header = image_header::check(file)?;
        let parts = self.projector.tokenize(file).ok_or(ImageError::Decode)?;
        let mut seed = Sha256::new();
        seed.update(sha256);
        seed.update(self.fingerprint.to_le_bytes());
        let mut placeholders = Placeholders::new(seed.finalize().into());
        let (mut tokens, mut chunks, mut grids, mut layouts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for part in parts.list() {
            match part {
                ImagePart::Text(text) if text.iter().all(|&token| self.vocabulary.contains(token)) => {
                    tokens.extend(text);
                }
                ImagePart::Text(_) | ImagePart::Other => return Err(ImageError::Vocabulary),
                ImagePart::Pixels { layout: None, .. } => return Err(ImageError::Positions),
                ImagePart::Pixels { count, grid, layout: Some(layout) } => {
                    let start = tokens.len();
                    tokens.extend(placeholders.by_ref().take(count));
                    chunks.push(start..tokens.len());
                    grids.push(image_grid::grid(count, grid, (header.width, header.height)));
                    layouts.push(layout);
                }
            }
        }
        Ok(Arc::new(Image {
            sha256,
            header,
            file_bytes: file.len(),
            tokens,
            chunks,
            grids,
            layouts,
            non_causal: self.non_causal,
            width: self.projector.width(),
            parts: Mutex::new(Some(parts)),
            embeddings: OnceLock::new(),
        }))
    }

    /// Encodes an image, unless that was done before, and keeps it for later requests. Takes seconds for a large
    /// projector; concurrent calls take turns.
    ///
    /// # Errors
    /// [`ImageError::Encode`].
    pub fn encode(&self, image: &Arc<Image>) -> Result<(), ImageError> {
        let mut parts = image.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(pixels) = parts.as_ref() else { return Ok(()) };
        let embeddings = self.projector.encode(pixels).ok_or(ImageError::Encode)?;
        if embeddings.len() != image.placeholders() * image.width {
            return Err(ImageError::Encode);
        }
        // The cell is empty, because the pixels are removed with the first encoding.
        let _ = image.embeddings.set(embeddings);
        *parts = None;
        self.keep(image);
        Ok(())
    }

    /// Adds recent images until `images` has one for every placeholder of a prompt. Returns `false` if an image is no
    /// longer cached.
    #[must_use]
    pub fn complete(&self, images: &mut Vec<Arc<Image>>, prompt: &[TokenId]) -> bool {
        while let Some(at) = first_unknown(images, prompt) {
            let Some(image) = self.take_recent(|image| image.chunk_at(prompt, at).is_some()) else { return false };
            images.push(image);
        }
        true
    }

    /// Returns the cached image that fulfills a condition, and marks it as the most recently used.
    fn take_recent(&self, matches: impl Fn(&Image) -> bool) -> Option<Arc<Image>> {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let at = recent.iter().position(|image| matches(image))?;
        let image = recent.remove(at);
        recent.push(Arc::clone(&image));
        Some(image)
    }

    /// Adds an encoded image to the cache, and removes those that were not used for the longest time.
    fn keep(&self, image: &Arc<Image>) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.push(Arc::clone(image));
        let mut bytes: usize = recent.iter().map(|image| image.bytes()).sum();
        while recent.len() > 1 && (recent.len() > MAX_CACHED || bytes > MAX_CACHE_BYTES) {
            bytes -= recent.remove(0).bytes();
        }
    }
}

impl Image {
    /// Returns the SHA-256 of the file.
    #[must_use]
    pub fn sha256(&self) -> &[u8; 32] {
        &self.sha256
    }

    /// Returns the media type of the file.
    #[must_use]
    pub fn media_type(&self) -> &'static str {
        self.header.media_type
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
        let values = self.embeddings.get()?.get(rows.start * self.width..rows.end * self.width)?;
        Some(EmbeddingRows {
            values,
            count: rows.len(),
            offset,
            chunk: self.chunks[chunk].len(),
            layout: self.layouts[chunk],
            non_causal: self.non_causal,
        })
    }

    /// Returns the number of tokens of the largest chunk that is decoded as a whole; 0 if chunks can be divided.
    #[must_use]
    pub fn undivided_tokens(&self) -> usize {
        if self.non_causal { self.chunks.iter().map(Range::len).max().unwrap_or(0) } else { 0 }
    }

    /// Returns the record of the image, without its positions in a prompt.
    fn record(&self) -> ImageRecord {
        ImageRecord {
            sha256: hex(&self.sha256),
            media_type: self.header.media_type.to_owned(),
            bytes: self.file_bytes as u64,
            width: self.header.width,
            height: self.header.height,
            ..ImageRecord::default()
        }
    }

    /// Returns the index of the chunk that begins at `position`.
    fn chunk_start(&self, sequence: &[TokenId], position: usize) -> Option<usize> {
        let rest = sequence.get(position..)?;
        self.chunks.iter().position(|chunk| !chunk.is_empty() && rest.starts_with(&self.tokens[chunk.clone()]))
    }

    /// Returns the number of placeholders.
    fn placeholders(&self) -> usize {
        self.chunks.iter().map(Range::len).sum()
    }

    /// Returns the size of the embeddings.
    fn bytes(&self) -> usize {
        self.placeholders() * self.width * size_of::<f32>()
    }

    /// Finds the embeddings for the placeholders from `position` on, up to the end of their chunk. The sequence must
    /// have the whole chunk.
    fn chunk_at(&self, sequence: &[TokenId], position: usize) -> Option<ChunkRows> {
        let token = *sequence.get(position)?;
        let mut first_row = 0;
        for (chunk, range) in self.chunks.iter().enumerate() {
            let ids = &self.tokens[range.clone()];
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
struct ChunkRows {
    /// Index of the chunk.
    chunk: usize,
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
        let (columns, rows) = image.grids[chunk];
        let tile = ImageTile { start: at as u32, columns, rows };
        match (next, records.last_mut()) {
            (Some((last, expected)), Some(record)) if Arc::ptr_eq(last, image) && expected == chunk => {
                record.tiles.push(tile);
            }
            _ => records.push(ImageRecord { tiles: vec![tile], ..image.record() }),
        }
        next = Some((image, chunk + 1));
        at += image.chunks[chunk].len();
    }
    records
}

impl Model {
    /// Returns the image encoder, if a projector is loaded.
    #[must_use]
    pub fn images(&self) -> Option<&Arc<Images>> {
        self.images.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an image of two chunks, of 3 and 2 placeholders, whose embeddings are the numbers from 0.
    fn image(seed: u8) -> Image {
        let ids: Vec<TokenId> = Placeholders::new([seed; 32]).take(5).collect();
        let tokens = [&[7], &ids[..3], &[8, 9], &ids[3..], &[7]].concat();
        let embeddings = OnceLock::from((0..10u8).map(f32::from).collect::<Vec<_>>());
        let parts = Mutex::default();
        Image {
            sha256: [seed; 32],
            header: ImageHeader { media_type: "image/png", width: 9, height: 6 },
            file_bytes: 100,
            tokens,
            chunks: vec![1..4, 6..8],
            grids: vec![(3, 1), (2, 1)],
            layouts: vec![ImageLayout::Line; 2],
            non_causal: false,
            width: 2,
            parts,
            embeddings,
        }
    }

    #[test]
    fn embeddings_are_found_from_any_placeholder() {
        let (one, other) = (image(1), image(2));
        let sequence = [&[5, 5], one.tokens(), other.tokens(), one.tokens()].concat();
        let values = |image: &Image, at| image.embeddings_at(&sequence, at).map(|rows| rows.values.to_vec());
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
