//! Images in prompts: the projector that turns an image into embeddings, and the placeholder tokens of images.
//!
//! In a sequence of tokens, each embedding has a placeholder: a negative id derived from the image, the projector and
//! the index of the embedding. So every comparison of tokens compares images, too: the prefix match, histories of
//! slots, the host cache and snapshots need no other code for images.

mod embedding_rows;
mod error;
mod grid;
mod header;
mod image;
mod placeholders;
mod png;

pub use embedding_rows::EmbeddingRows;
pub use error::ImageError;
pub use header::MAX_BYTES as MAX_IMAGE_BYTES;
pub use image::{Image, first_unknown, records};

use super::ffi::images::{ImagePart, Projector, ProjectorParams};
use super::{GgufHeader, Model, fingerprint, reason};
use crate::events::TokenId;
use crate::model::{ModelError, Vocabulary};
use image::{EmbeddingTraits, ImageFileInfo};
use llama_cpp_2::model::LlamaModel;
use placeholders::Placeholders;
use sha2::{Digest, Sha256};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

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
    /// Images that requests and runs use.
    in_use: Mutex<Vec<Weak<Image>>>,
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
        let header = GgufHeader::read(&options.projector).map_err(|problem| error(problem.to_string()))?;
        header.check_projector().map_err(error)?;
        let limit = |tokens: Option<u32>| tokens.and_then(|tokens| i32::try_from(tokens).ok());
        let params = ProjectorParams {
            gpu: options.gpu && has_gpu,
            threads: options.threads,
            min_tokens: limit(options.min_tokens),
            max_tokens: limit(options.max_tokens),
        };
        let projector = Projector::load(&file, llama, &params).map_err(|lines| error(reason::from_log(&lines)))?;
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
        Ok(Self {
            projector,
            vocabulary,
            fingerprint,
            non_causal,
            max_undivided,
            recent: Mutex::default(),
            in_use: Mutex::default(),
        })
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
        if let Some(known) = self.take_recent(|image| *image.sha256() == sha256) {
            return Ok(known);
        }
        let header = header::check(file)?;
        let parts = self.projector.tokenize(file).ok_or(ImageError::Decode)?;
        let mut seed = Sha256::new();
        seed.update(sha256);
        seed.update(self.fingerprint.to_le_bytes());
        let placeholders = Placeholders::new(seed.finalize().into());
        let file = ImageFileInfo { sha256, header, bytes: file.len() };
        let traits = EmbeddingTraits { width: self.projector.width(), non_causal: self.non_causal };
        Ok(self.share(Image::new(file, parts, placeholders, traits, &self.vocabulary)?))
    }

    /// Returns the image that another request or a run uses for the same file, so that the file is encoded once; else
    /// `image`.
    fn share(&self, image: Image) -> Arc<Image> {
        let mut in_use = self.in_use.lock().unwrap_or_else(PoisonError::into_inner);
        in_use.retain(|other| other.strong_count() > 0);
        let same = in_use.iter().filter_map(Weak::upgrade).find(|other| other.sha256() == image.sha256());
        if let Some(same) = same {
            if same.is_encoded() {
                self.keep(&same);
            }
            return same;
        }
        let image = Arc::new(image);
        in_use.push(Arc::downgrade(&image));
        image
    }

    /// Encodes an image, unless that was done before, and keeps it for later requests. Takes seconds for a large
    /// projector; concurrent calls take turns.
    ///
    /// # Errors
    /// [`ImageError::Encode`].
    pub fn encode(&self, image: &Arc<Image>) -> Result<(), ImageError> {
        image.encode(|pixels| self.projector.encode(pixels))?;
        self.keep(image);
        Ok(())
    }

    /// Adds recent images until `images` has one for every placeholder of a prompt. Returns `false` if an image is no
    /// longer cached.
    #[must_use]
    pub fn complete(&self, images: &mut Vec<Arc<Image>>, prompt: &[TokenId]) -> bool {
        while let Some(at) = first_unknown(images, prompt) {
            let Some(image) = self.take_recent(|image| image.has_placeholder_at(prompt, at)) else { return false };
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
        recent.retain(|other| other.sha256() != image.sha256());
        recent.push(Arc::clone(image));
        let mut bytes: usize = recent.iter().map(|image| image.bytes()).sum();
        while recent.len() > 1 && (recent.len() > MAX_CACHED || bytes > MAX_CACHE_BYTES) {
            bytes -= recent.remove(0).bytes();
        }
    }
}

impl Model {
    /// Returns the image encoder, if a projector is loaded.
    #[must_use]
    pub fn images(&self) -> Option<&Arc<Images>> {
        self.images.as_ref()
    }
}
