//! Model weights and their text conventions: loading, vocabulary, chat templates, grammars.
//!
//! Only [`llama`] uses `llama_cpp`, and only `llama/ffi.rs` and its submodules contain unsafe code. This module
//! returns plain numbers and text and does not depend on runs or mods.

pub mod chat;
pub(crate) mod distribution;
pub mod grammar;
pub mod llama;
mod split;
mod vocabulary;

pub use llama::Model;
pub use split::{SplitName, split_name};
pub use vocabulary::{
    InfillTokens, SpecialTokens, TokenizeOptions, Vocabulary, common_prefix, complete_prefix, without_nul,
};

/// The reason why a model or a context cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// llama.cpp cannot be used in this process.
    #[error("cannot initialize llama.cpp: {0}")]
    Backend(String),
    /// The file does not exist or cannot be read.
    #[error("cannot read the model {path}: {source}")]
    Unreadable {
        /// The path.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The requested placement is impossible.
    #[error(transparent)]
    Placement(#[from] llama::PlacementError),
    /// llama.cpp rejected the file.
    #[error("llama.cpp cannot load {path}: {reason}; expected a GGUF model of an architecture that llama.cpp supports")]
    Load {
        /// The path.
        path: String,
        /// llama.cpp's error.
        reason: String,
    },
    /// The weights do not fit in memory.
    #[error("llama.cpp cannot load {path}: {reason}; use fewer --gpu-layers or a smaller model")]
    NoMemory {
        /// The path.
        path: String,
        /// llama.cpp's error.
        reason: String,
    },
    /// A LoRA adapter cannot be used with the model.
    #[error("cannot load the LoRA adapter {path}: {reason}")]
    Adapter {
        /// The path.
        path: String,
        /// The reason.
        reason: String,
    },
    /// A projector for images cannot be used with the model.
    #[error("cannot load the projector {path} (--mmproj): {reason}")]
    Projector {
        /// The path.
        path: String,
        /// The reason.
        reason: String,
    },
    /// A control vector cannot be used with the model.
    #[error("cannot load the control vector {path}: {reason}")]
    ControlVector {
        /// The path.
        path: String,
        /// The reason.
        reason: String,
    },
    /// A model cannot draft tokens for the main model.
    #[error("cannot use {path} as the draft model: {reason}")]
    Draft {
        /// The path of the draft model.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The bundled model cannot be written.
    #[error("cannot unpack the bundled model into {folder}: {source}")]
    Unpack {
        /// The target folder.
        folder: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// llama.cpp rejected the context.
    #[error("llama.cpp cannot create a context of {ctx_size} tokens: {reason}; use a smaller --ctx-size")]
    Context {
        /// The requested number of tokens.
        ctx_size: u32,
        /// The reason.
        reason: String,
    },
    /// Quantized values without flash attention.
    #[error(
        "a KV cache with {cache_type} values needs flash attention, which --attention on turns off; set --attention auto or --cache-type-v f16"
    )]
    QuantizedValues {
        /// The type.
        cache_type: &'static str,
    },
    /// The model's head size is not a multiple of the block size of the quantized type.
    #[error(
        "a KV cache of {cache_type} stores blocks of 32 values, but the heads of this model have {width} values, which is not a multiple of 32; use f16, bf16 or f32"
    )]
    QuantizedHeads {
        /// The type.
        cache_type: &'static str,
        /// Values per head.
        width: u32,
    },
    /// The state of a sequence cannot be written or read.
    #[error("llama.cpp cannot {operation} the state of a sequence; see llama.cpp's log")]
    State {
        /// `write` or `read`.
        operation: &'static str,
    },
    /// A decode ran out of memory.
    #[error("llama.cpp cannot decode: out of memory; use a smaller --ctx-size, --parallel or --ubatch-size")]
    OutOfMemory,
    /// A decode failed.
    #[error("llama.cpp cannot decode: {0}")]
    Decode(String),
}

/// The reason why tokens cannot be removed from a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShiftError {
    /// The KV cache cannot remove these tokens; the sequence is unchanged.
    #[error("{0}")]
    NotRemovable(&'static str),
    /// llama.cpp failed; the sequence is empty.
    #[error("llama.cpp cannot shift the remaining tokens of the sequence")]
    Failed,
}
