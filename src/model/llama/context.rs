//! A context of llama.cpp: its batch, and the capture of attention and hidden states.

mod adapters;
mod capture;
mod embeddings;
mod pending_batch;
mod sequences;

use super::adapters::{Adapters, ContextAdapters};
use super::attention_capture::AttentionCapture;
use super::cache_type::CacheType;
use super::captures::{Decoded, TokenOutputs};
use super::devices::Placement;
use super::ffi::{EvalCallback, NativeContext};
use super::image_spans::MROPE_SECTIONS;
use super::lens::OutputHead;
use super::memory::{self, MemoryCapabilities};
use super::tuning::Tuning;
use super::weights::WeightFile;
use super::{ModelError, backend};
use crate::events::TokenId;
pub use capture::ContextCapabilities;
use embeddings::EmbeddingBatch;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::model::{LlamaModel, RopeType};
use pending_batch::PendingBatch;
pub use sequences::SequenceMetadata;
use std::num::NonZeroU32;
use std::rc::Rc;
use std::sync::Arc;

/// Settings of a context.
#[derive(Debug, Clone)]
pub struct ContextOptions {
    /// Tokens per sequence.
    pub context_per_sequence: u32,
    /// Number of sequences. Each has its own stream of the KV cache, in which the cell of a token is its index.
    pub sequences: u32,
    /// Maximum tokens per decode.
    pub batch_size: u32,
    /// Maximum tokens per physical batch.
    pub ubatch_size: u32,
    /// Threads for generation.
    pub threads: i32,
    /// Threads for prompt processing.
    pub threads_batch: i32,
    /// Capture of attention.
    pub attention: AttentionCapture,
    /// Data type of keys.
    pub cache_type_k: CacheType,
    /// Data type of values; quantized types need flash attention, which [`AttentionCapture::On`] excludes.
    pub cache_type_v: CacheType,
    /// Memory in bytes for the checkpoints of all sequences, 0 for none; models with only a KV cache need none.
    pub checkpoint_bytes: usize,
}

/// A context of llama.cpp and its current batch.
///
/// Callers identify tokens by their index in the sequence. It is also the token's position in the model, except during
/// and after an image with M-RoPE, whose positions [`ImageSpans`](super::ImageSpans) gives. With one stream per sequence
/// the cell of a token equals its index, so index `i` of an attention row is token `i`: tokens are added and removed at
/// the end, and a removal from the middle also closes the gap in the cells.
pub struct Context<'model> {
    llama: NativeContext<'model>,
    adapters: ContextAdapters<'model>,
    has_gpu: bool,
    batch: PendingBatch,
    /// Embeddings to decode in place of the batch.
    embeddings: Option<EmbeddingBatch>,
    /// Files of the model.
    files: &'model [WeightFile],
    capabilities: ContextCapabilities,
    /// The output head that the logit lens applies; `None` if the model has no lens or was not probed.
    output_head: Option<Arc<OutputHead>>,
    /// Maximum tokens of a sequence.
    max_sequence_tokens: u32,
    memory: MemoryCapabilities,
    /// Positions of each embedding.
    position_sections: usize,
    /// Data about each sequence.
    metadata: Vec<SequenceMetadata>,
    checkpoint_bytes: usize,
    architecture: String,
}

impl<'model> Context<'model> {
    pub(super) fn new(
        model: &'model LlamaModel,
        files: &'model [WeightFile],
        adapters: &'model Adapters,
        placement: &Placement,
        options: &ContextOptions,
        tuning: &Tuning,
        threads_of: Option<&Context<'_>>,
    ) -> Result<Self, ModelError> {
        let attention = options.attention.resolve(options.cache_type_k, options.cache_type_v);
        if attention == AttentionCapture::On && options.cache_type_v.is_quantized() {
            return Err(ModelError::QuantizedValues { cache_type: options.cache_type_v.as_str() });
        }
        memory::check_cache_types(model, options.cache_type_k, options.cache_type_v)?;
        let n_ctx = options.context_per_sequence.saturating_mul(options.sequences);
        let callback = attention.is_enabled().then(|| EvalCallback::new(model.n_layer() as usize));
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(n_ctx))
            // llama.cpp requires room for one output of each sequence.
            .with_n_batch(options.batch_size.max(options.sequences))
            .with_n_ubatch(options.ubatch_size.min(options.batch_size))
            .with_n_seq_max(options.sequences)
            .with_n_threads(options.threads)
            .with_n_threads_batch(options.threads_batch)
            .with_kv_unified(false)
            .with_no_perf(true)
            .with_type_k(options.cache_type_k.to_llama())
            .with_type_v(options.cache_type_v.to_llama())
            .with_flash_attention_policy(if attention == AttentionCapture::On {
                llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_DISABLED
            } else if options.cache_type_v.is_quantized() {
                llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_ENABLED
            } else {
                llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_AUTO
            });
        let pool = match threads_of.and_then(|other| other.llama.pool()) {
            Some(pool) => Some(Rc::clone(pool)),
            None => tuning.pool(options.threads.max(options.threads_batch)).map(Rc::new),
        };
        let mut llama = NativeContext::new(model, backend()?, tuning.apply(params), callback, pool)
            .map_err(|error| ModelError::Context { ctx_size: n_ctx, reason: error.to_string() })?;
        let memory = MemoryCapabilities::new(model, &mut llama, options.cache_type_k);
        let has_mrope = matches!(model.rope_type(), Some(RopeType::MRope | RopeType::IMRope));
        Ok(Self {
            batch: PendingBatch::new(options.batch_size),
            embeddings: None,
            llama,
            adapters: ContextAdapters::new(adapters),
            has_gpu: !placement.devices.is_empty(),
            files,
            capabilities: ContextCapabilities::default(),
            output_head: None,
            max_sequence_tokens: options.context_per_sequence,
            memory,
            position_sections: if has_mrope { MROPE_SECTIONS } else { 1 },
            metadata: vec![SequenceMetadata::default(); options.sequences as usize],
            checkpoint_bytes: options.checkpoint_bytes,
            architecture: model.meta_val_str("general.architecture").unwrap_or_default(),
        })
    }

    /// Returns true if a GPU is used. Prompts use it even if it has no layers.
    #[must_use]
    pub fn has_gpu(&self) -> bool {
        self.has_gpu
    }

    /// Adds the token at `index` of a sequence to the batch, and returns its index in the batch.
    ///
    /// # Errors
    /// [`ModelError::Decode`] if the batch is full.
    pub fn add(
        &mut self,
        token: TokenId,
        index: u32,
        sequence: i32,
        outputs: TokenOutputs,
    ) -> Result<usize, ModelError> {
        let position = self.position(sequence, index);
        self.batch.add(token, index, position, sequence, outputs)
    }

    /// Decodes the batch and empties it. Returns the requested captures.
    ///
    /// # Errors
    /// [`ModelError::Decode`]; the sequences of the batch are then undefined and must be cleared.
    pub fn decode(&mut self) -> Result<Decoded, ModelError> {
        if let Some(embeddings) = self.embeddings.take() {
            return self.decode_embeddings(embeddings).map(|()| Decoded::default());
        }
        self.request_captures();
        let (result, requested) = self.batch.decode(&mut self.llama);
        // Captures of a failed decode are taken and dropped, so that the next decode does not return them.
        let decoded = self.take_captures(requested);
        result.map(|()| decoded)
    }

    /// Returns true if the context has several sequences, each with its own stream of the KV cache.
    fn has_multiple_streams(&self) -> bool {
        self.metadata.len() > 1
    }

    /// Parks the decoding threads to free their cores until the next decode.
    pub fn park_threads(&self) {
        if let Some(pool) = self.llama.pool() {
            pool.park();
        }
    }

    /// Returns the logits of the token at `index` in the last decoded batch; the token must have been added with
    /// [`TokenOutputs::logits`].
    #[must_use]
    pub fn logits(&self, index: usize) -> &[f32] {
        self.llama.get_logits_ith(index as i32)
    }
}
