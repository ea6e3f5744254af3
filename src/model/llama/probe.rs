//! A probe of a model file: the whole load by llama.cpp, and a decode of a few tokens if the file is small.
//!
//! A file can be valid and still end the process at the first token, because llama.cpp checks types, shapes and
//! parameters when it computes. So the decode is the only complete check. It reads all weights; for a large file that
//! would delay the load by minutes. Of large files, llama.cpp reads everything but the weights, and
//! [`GgufHeader::check_values`](super::GgufHeader::check_values) checks known values.

use super::ffi::loading::{self, LoadParams};
use super::images::{ImageOptions, Images};
use super::model_file::ModelFile;
use super::{ModelError, architecture, backend, devices, encoder, reason, tokenizer};
use crate::events::TokenId;
use crate::model::Vocabulary;
use llama_cpp_2::context::params::{LlamaContextParams, LlamaPoolingType};
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;

/// Start of the line that the check prints before each step.
pub const STEP_PREFIX: &str = "thunder probe: ";

/// Context size of the probe in tokens.
const TOKENS: u32 = 64;

/// Text for the probe of the tokenizer, with letters, digits, punctuation, whitespace, control characters and scripts.
const TEXT: &str = "Hello, world!  1234 it's\t\r\n\u{1} naïve Ωμέγα 日本語 한국어 😀 ﬁ e\u{301} <s></s>";

/// Maximum size of files whose weights are read for a decode, in bytes.
const MAX_DECODE_BYTES: u64 = 1 << 30;
/// Maximum size of projectors to load, in bytes. Their weights are copied into memory, not mapped.
const MAX_PROJECTOR_BYTES: u64 = 2 << 30;
/// Maximum number of tokens of the prompt to decode. A slow processor must decode it within the limit of the check.
const MAX_DECODED: usize = 2;

/// Probes the file: its header, tokenizer, tensors, the graph of its architecture, and a decode if the file has up to 1 GiB.
/// With a projector of up to 2 GiB, that is loaded, too. `on_step` receives each step before it begins. llama.cpp aborts
/// the process on some corrupt files, so run this in a separate process.
///
/// # Errors
/// [`ModelError::Unreadable`], [`ModelError::Load`], [`ModelError::Context`], [`ModelError::Projector`] and
/// [`ModelError::Decode`].
pub fn probe(path: &Path, projector: Option<&Path>, mut on_step: impl FnMut(&str)) -> Result<(), ModelError> {
    on_step("reading the header");
    let file = ModelFile::open(path)?;
    let others = devices::other_split_files(path, &file.header);
    file.check_values(&others)?;
    let load = |params: &LoadParams| {
        let model = loading::load(&file.c_path, params, |_| true);
        model.map(Arc::new).map_err(|lines| file.load_error(reason::from_log(&lines)))
    };
    on_step("loading the model without its weights");
    let model = load(&LoadParams { no_alloc: true, ..LoadParams::default() })?;
    file.check_rotary_dimensions(&model)?;
    tokenizer::check(&model).map_err(|reason| file.load_error(reason))?;
    // An invalid table of the tokenizer ends the process only when a text is tokenized.
    on_step("tokenizing a text");
    let vocabulary = Arc::new(tokenizer::read_vocabulary(&model));
    let mut tokens = vocabulary.encode_prompt(TEXT);
    tokenizer::check_tokens(&vocabulary).map_err(|reason| file.load_error(reason))?;
    on_step("creating a context");
    let generates = encoder::generates(&model, &architecture(&model));
    let context_error =
        |error: &dyn std::fmt::Display| ModelError::Context { ctx_size: TOKENS, reason: error.to_string() };
    model.new_context(backend()?, params(generates)).map(drop).map_err(|error| context_error(&error))?;
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    if let Some(projector) = projector.filter(|projector| generates && size(projector) <= MAX_PROJECTOR_BYTES) {
        on_step("loading the projector");
        probe_projector(projector, &model, &vocabulary)?;
    }
    let bytes = others.iter().map(|path| size(path)).sum::<u64>() + size(path);
    // An encoder-decoder model is rejected when it is loaded.
    if bytes > MAX_DECODE_BYTES || architecture(&model) == "t5" {
        return Ok(());
    }
    on_step("loading the weights");
    let mmap = file.check_alignment(&others).is_ok();
    let model = load(&LoadParams { mmap, no_repack: true, ..LoadParams::default() })?;
    on_step("decoding a text");
    tokens.retain(|&token| vocabulary.contains(token));
    tokens.truncate(MAX_DECODED.min(model.n_ctx_train() as usize));
    decode(&model, &tokens, generates)
}

fn params(generates: bool) -> LlamaContextParams {
    let params = LlamaContextParams::default()
        .with_n_ctx(NonZeroU32::new(TOKENS))
        .with_n_batch(TOKENS)
        .with_n_ubatch(TOKENS)
        // Waiting threads would use processor time, which is limited, while another thread reads the weights.
        .with_n_threads(1)
        .with_n_threads_batch(1);
    if generates { params } else { params.with_embeddings(true).with_pooling_type(LlamaPoolingType::None) }
}

fn probe_projector(path: &Path, model: &Arc<LlamaModel>, vocabulary: &Arc<Vocabulary>) -> Result<(), ModelError> {
    let options =
        ImageOptions { projector: path.to_owned(), gpu: false, threads: 1, min_tokens: None, max_tokens: None };
    Images::load(&options, model, vocabulary, false).map(drop)
}

/// Decodes tokens as a prompt, and then the first of them as a generated one. An encoder encodes the prompt.
fn decode(model: &LlamaModel, tokens: &[TokenId], generates: bool) -> Result<(), ModelError> {
    let failed = |error: &dyn std::fmt::Display| ModelError::Decode(error.to_string());
    let Some(&first) = tokens.first() else { return Ok(()) };
    let mut context = model
        .new_context(backend()?, params(generates))
        .map_err(|error| ModelError::Context { ctx_size: TOKENS, reason: error.to_string() })?;
    let mut batch = LlamaBatch::new(TOKENS as usize, 1);
    for (position, &token) in (0..).zip(tokens) {
        let has_output = !generates || position as usize + 1 == tokens.len();
        batch.add(LlamaToken::new(token), position, &[0], has_output).map_err(|error| failed(&error))?;
    }
    if architecture(model) == "t5encoder" {
        return context.encode(&mut batch).map_err(|error| failed(&error));
    }
    context.decode(&mut batch).map_err(|error| failed(&error))?;
    if !generates || tokens.len() >= model.n_ctx_train() as usize {
        return Ok(());
    }
    batch.clear();
    batch.add(LlamaToken::new(first), tokens.len() as i32, &[0], true).map_err(|error| failed(&error))?;
    context.decode(&mut batch).map_err(|error| failed(&error))
}
