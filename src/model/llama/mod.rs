//! llama.cpp behind plain Rust types.

use super::{Error, Vocabulary};
use std::path::Path;
use std::sync::Arc;

/// A loaded model.
pub struct Model {
    vocabulary: Arc<Vocabulary>,
    name: String,
}

/// What a person wants to know of a model.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Card {
    /// File name without folder and extension.
    pub name: String,
    /// `general.architecture`.
    pub architecture: String,
    /// Number of weights.
    pub parameters: u64,
    /// Bytes of the weights.
    pub size_bytes: u64,
    /// Context it was trained with, in tokens.
    pub context_train: u32,
    /// Tokens of the vocabulary.
    pub vocabulary: usize,
    /// Layers.
    pub layers: u32,
    /// Attention heads per layer.
    pub heads: u32,
    /// Width of the hidden state.
    pub embedding: u32,
    /// The chat template inside the file, if any.
    pub chat_template: Option<String>,
}

impl Model {
    /// Loads a GGUF file; `progress` is called with 0 … 1.
    ///
    /// # Errors
    /// [`Error::Unreadable`] and [`Error::Load`].
    pub fn load(_path: &Path, _gpu_layers: u32, _progress: impl FnMut(f32) + 'static) -> Result<Self, Error> {
        todo!()
    }

    /// Its name: the file's, without folder and extension.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its vocabulary.
    #[must_use]
    pub fn vocabulary(&self) -> &Arc<Vocabulary> {
        &self.vocabulary
    }

    /// What a person wants to know of it.
    #[must_use]
    pub fn card(&self) -> &Card {
        todo!()
    }
}
