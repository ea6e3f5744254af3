//! Weights and their text conventions: loading, vocabulary, chat templates.
//!
//! [`llama`] is the only place that names `llama_cpp`, and `llama/ffi.rs` with its two parts the only one with unsafe code. What
//! comes out of here is plain numbers and text; nothing here knows of runs or mods.

pub mod chat;
pub mod grammar;
pub mod llama;
mod vocabulary;

pub use llama::Model;
pub use vocabulary::{InfillTokens, SpecialTokens, Vocabulary, common_prefix, complete_prefix, printable};

/// What an error says where memory is what was missing.
pub const OUT_OF_MEMORY: &str = "out of memory";

/// Why a model or its context could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The file is not there or cannot be read.
    #[error("cannot read the model {path}: {source}")]
    Unreadable {
        /// Path given.
        path: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// It cannot be put where it was wanted.
    #[error(transparent)]
    Placement(#[from] llama::PlacementError),
    /// llama.cpp refused the file.
    #[error(
        "llama.cpp cannot load {path}: {reason}; a GGUF model of an architecture that llama.cpp supports is needed"
    )]
    Load {
        /// Path given.
        path: String,
        /// llama.cpp's reason.
        reason: String,
    },
    /// There was no memory for the weights.
    #[error("llama.cpp cannot load {path}: {reason}; fewer --gpu-layers, or a smaller model, need less memory")]
    NoMemory {
        /// Path given.
        path: String,
        /// llama.cpp's reason.
        reason: String,
    },
    /// A LoRA adapter cannot be used with the model.
    #[error("cannot load the LoRA adapter {path}: {reason}")]
    Adapter {
        /// Path given.
        path: String,
        /// Why.
        reason: String,
    },
    /// A control vector cannot be used with the model.
    #[error("cannot load the control vector {path}: {reason}")]
    ControlVector {
        /// Path given.
        path: String,
        /// Why.
        reason: String,
    },
    /// The bundled model cannot be written.
    #[error("cannot unpack the bundled model into {folder}: {source}")]
    Unpack {
        /// Folder it was to go to.
        folder: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// llama.cpp refused the context.
    #[error("llama.cpp cannot make a context of {ctx_size} tokens: {reason}; a smaller --ctx-size needs less memory")]
    Context {
        /// Tokens asked for.
        ctx_size: u32,
        /// The reason.
        reason: String,
    },
    /// Values cannot be quantised without flash attention.
    #[error(
        "a KV cache with {cache_type} values needs flash attention, which is off while attention can be captured; give --attention off, or --cache-type-v f16"
    )]
    QuantisedValues {
        /// The type.
        cache_type: &'static str,
    },
    /// The model's heads cannot be cut into the blocks of a quantised type.
    #[error(
        "a KV cache of {cache_type} keeps values in blocks of 32, and the heads of this model have {width}, which is no multiple of that; take f16, bf16 or f32"
    )]
    QuantisedHeads {
        /// The type.
        cache_type: &'static str,
        /// Values of a head.
        width: u32,
    },
    /// The state of a sequence could not be written or read.
    #[error("llama.cpp cannot {doing} the state of a sequence; its log says why")]
    State {
        /// `write` or `read`.
        doing: &'static str,
    },
    /// A decode found no memory.
    #[error("llama.cpp cannot decode: {OUT_OF_MEMORY}; a smaller --ctx-size, --parallel or --ubatch-size needs less")]
    OutOfMemory,
    /// A decode failed.
    #[error("llama.cpp cannot decode: {0}")]
    Decode(String),
}

/// Why tokens could not be removed from a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ShiftError {
    /// The model's cache cannot do it; nothing has changed.
    #[error("{0}")]
    Fixed(&'static str),
    /// llama.cpp failed; the sequence is empty.
    #[error("llama.cpp cannot move the rest of the sequence")]
    Failed,
}
