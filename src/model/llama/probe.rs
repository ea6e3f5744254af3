//! A probe of a model file: the whole load by llama.cpp, except reading the weights.

use super::ffi::loading::{self, LoadParams};
use super::model_file::ModelFile;
use super::{ModelError, backend, reason, tokenizer};
use llama_cpp_2::context::params::LlamaContextParams;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

/// Context size of the probe in tokens.
const TOKENS: u32 = 64;

/// Text for the probe of the tokenizer, with letters, digits, punctuation, whitespace, control characters and scripts.
const TEXT: &str = "Hello, world!  1234 it's\t\r\n\u{1} naïve Ωμέγα 日本語 한국어 😀 ﬁ e\u{301} <s></s>";

/// Probes the file: its header, tokenizer, tensors and the graph of its architecture. llama.cpp aborts the process on
/// some corrupt files, so run this in a separate process.
///
/// # Errors
/// [`ModelError::Unreadable`], [`ModelError::Load`] and [`ModelError::Context`].
pub fn probe(path: &Path) -> Result<(), ModelError> {
    let file = ModelFile::open(path)?;
    let backend = backend()?;
    let loading = LoadParams { no_alloc: true, ..LoadParams::default() };
    let model =
        loading::load(&file.c_path, &loading, |_| true).map_err(|lines| file.load_error(reason::from_log(&lines)))?;
    tokenizer::check(&model).map_err(|reason| file.load_error(reason))?;
    let model = Arc::new(model);
    // An invalid table of the tokenizer ends the process only when a text is tokenized.
    let _tokens = tokenizer::read_vocabulary(&model).encode_prompt(TEXT);
    let params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(TOKENS))
        .with_n_batch(TOKENS)
        .with_n_ubatch(TOKENS)
        .with_n_threads(1)
        .with_n_threads_batch(1);
    model
        .new_context(backend, params)
        .map(drop)
        .map_err(|error| ModelError::Context { ctx_size: TOKENS, reason: error.to_string() })
}
