//! Settings for loading a model.

use super::{CacheType, ControlVectors, ImageOptions, TensorPlacement, Tuning};
use std::path::PathBuf;

/// Settings for loading a model.
#[derive(Debug, Clone, Default)]
pub struct ModelOptions {
    /// Name of the model; `None` for the file's name without folder and extension.
    pub name: Option<String>,
    /// Layers to put on GPUs.
    pub gpu_layers: GpuLayers,
    /// The GPUs to use, by llama.cpp's names, in order; empty for CPU only, `None` for all.
    pub devices: Option<Vec<String>>,
    /// Split of a model over several GPUs.
    pub split_mode: SplitMode,
    /// Share of each GPU, as proportions; empty for llama.cpp's choice.
    pub tensor_split: Vec<f32>,
    /// Index of the GPU to use when the model is not split, from 0.
    pub main_gpu: usize,
    /// Tensors that are not placed with their layers.
    pub tensors: TensorPlacement,
    /// True to read the file into memory instead of mapping it.
    pub no_mmap: bool,
    /// True to lock the weights in memory.
    pub mlock: bool,
    /// The context for which [`GpuLayers::Auto`] leaves memory.
    pub context: ContextRequirements,
    /// LoRA adapters, each with its default scale.
    pub adapters: Vec<(PathBuf, f32)>,
    /// Control vectors, each with its default scale.
    pub control: ControlVectors,
    /// The image encoder; `None` for a text-only model.
    pub images: Option<ImageOptions>,
    /// Compute settings.
    pub tuning: Tuning,
}

/// The memory that a context needs in addition to the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextRequirements {
    /// Tokens per sequence.
    pub context_per_sequence: u32,
    /// True to limit `context_per_sequence` to the training context.
    pub limit_to_training_context: bool,
    /// Number of sequences.
    pub sequences: u32,
    /// Maximum tokens per physical batch.
    pub ubatch_size: u32,
    /// True if attention is computed with all scores in memory, that is, without flash attention.
    pub stores_scores: bool,
    /// Data type of keys.
    pub keys: CacheType,
    /// Data type of values.
    pub values: CacheType,
}

impl Default for ContextRequirements {
    fn default() -> Self {
        Self {
            context_per_sequence: 4096,
            limit_to_training_context: true,
            sequences: 1,
            ubatch_size: 512,
            stores_scores: true,
            keys: CacheType::F16,
            values: CacheType::F16,
        }
    }
}

/// Number of layers to place on GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GpuLayers {
    /// All that fit together with the context.
    #[default]
    Auto,
    /// All layers.
    All,
    /// This number of layers, or all if the model has fewer.
    Count(u32),
}

/// Split of a model over several GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SplitMode {
    /// No split.
    None,
    /// By whole layers with their part of the KV cache.
    #[default]
    Layer,
    /// By rows of each weight.
    Row,
}
