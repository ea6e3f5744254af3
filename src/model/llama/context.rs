use super::Error;
use super::ffi::{self, CapturedRow, Tap, WantedRow};
use super::ubatch;
use crate::events::TokenId;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::llama_backend::LlamaBackend;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use std::num::NonZeroU32;

/// How a context is set up.
#[derive(Debug, Clone)]
pub struct ContextOptions {
    /// Tokens per sequence.
    pub context_per_sequence: u32,
    /// Sequences; each has its own stream of the KV cache, in which a token's cell is its position.
    pub sequences: u32,
    /// Most tokens in one decode.
    pub batch_size: u32,
    /// Most tokens in one physical batch.
    pub ubatch_size: u32,
    /// Threads for decoding tokens.
    pub threads: i32,
    /// Threads for decoding prompts.
    pub threads_batch: i32,
    /// Whether attention can be captured; flash attention is then off.
    pub attention: bool,
}

/// A context of llama.cpp and the batch that goes through it.
///
/// Positions of a sequence are contiguous from 0, and only its end is ever removed. With one stream per sequence this
/// keeps the cell of a token at its position, which is what makes index `i` of an attention row mean token `i`.
pub struct Context<'model> {
    // Dropped before `tap`, whose address llama.cpp holds.
    llama: LlamaContext<'model>,
    batch: LlamaBatch<'static>,
    tap: Option<Box<Tap>>,
    sequences: Vec<i32>,
    wanted: Vec<(usize, u32)>,
    several_streams: bool,
}

/// An attention row that a decode captured.
#[derive(Debug, Clone)]
pub struct Captured {
    /// Index of the query token in the batch.
    pub index: usize,
    /// Positions attended to.
    pub row_len: u32,
    /// Layers that have scores, in order.
    pub layer_ids: Vec<u16>,
    /// Heads per layer.
    pub heads: u16,
    /// `[layer][head][row_len]` probabilities.
    pub values: Vec<f32>,
}

impl<'model> Context<'model> {
    pub(super) fn new(
        model: &'model LlamaModel,
        backend: &LlamaBackend,
        options: &ContextOptions,
    ) -> Result<Self, Error> {
        let n_ctx = options.context_per_sequence.saturating_mul(options.sequences);
        let tap = options.attention.then(Box::<Tap>::default);
        let mut params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(n_ctx))
            .with_n_batch(options.batch_size)
            .with_n_ubatch(options.ubatch_size.min(options.batch_size))
            .with_n_seq_max(options.sequences)
            .with_n_threads(options.threads)
            .with_n_threads_batch(options.threads_batch)
            .with_kv_unified(false)
            .with_no_perf(true)
            .with_flash_attention_policy(if options.attention {
                llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_DISABLED
            } else {
                llama_cpp_sys_2::LLAMA_FLASH_ATTN_TYPE_AUTO
            });
        if let Some(tap) = &tap {
            ffi::set_tap(&mut params, tap);
        }
        let llama = model
            .new_context(backend, params)
            .map_err(|error| Error::Context { ctx_size: n_ctx, reason: error.to_string() })?;
        Ok(Self {
            batch: LlamaBatch::new(options.batch_size as usize, 1),
            llama,
            tap,
            sequences: Vec::new(),
            wanted: Vec::new(),
            several_streams: options.sequences > 1,
        })
    }

    /// Adds a token to the batch and returns its index there. `output` asks for its logits, `capture` for its attention row.
    ///
    /// # Errors
    /// [`Error::Decode`] when the batch is full.
    pub fn add(
        &mut self,
        token: TokenId,
        position: u32,
        sequence: i32,
        output: bool,
        capture: bool,
    ) -> Result<usize, Error> {
        self.batch
            .add(LlamaToken::new(token), position as i32, &[sequence], output)
            .map_err(|error| Error::Decode(error.to_string()))?;
        let index = self.sequences.len();
        self.sequences.push(sequence);
        if capture {
            self.wanted.push((index, position + 1));
        }
        Ok(index)
    }

    /// Decodes the batch and empties it. Attention rows that were asked for come back in the order of their tokens.
    ///
    /// # Errors
    /// [`Error::Decode`]; the sequences of the batch are then in no known state and must be cleared.
    pub fn decode(&mut self) -> Result<Vec<Captured>, Error> {
        if let Some(tap) = &mut self.tap {
            let rows = if self.wanted.is_empty() {
                Vec::new()
            } else {
                let places = ubatch::places(&self.sequences, self.llama.n_ubatch() as usize, self.several_streams);
                self.wanted
                    .iter()
                    .map(|&(index, row_len)| {
                        let place = places[index];
                        WantedRow { ubatch: place.ubatch, token: place.token, stream: place.stream, row_len }
                    })
                    .collect()
            };
            tap.want(rows);
        }
        let result = self.llama.decode(&mut self.batch);
        self.batch.clear();
        self.sequences.clear();
        let wanted = std::mem::take(&mut self.wanted);
        let rows = self.tap.as_mut().map(|tap| tap.take()).unwrap_or_default();
        result.map_err(|error| Error::Decode(error.to_string()))?;
        Ok(wanted
            .into_iter()
            .zip(rows)
            .map(|((index, row_len), CapturedRow { layer_ids, heads, values })| Captured {
                index,
                row_len,
                layer_ids,
                heads,
                values,
            })
            .collect())
    }

    /// The logits of the token at `index` of the batch that was decoded last; it must have been added with `output`.
    #[must_use]
    pub fn logits(&self, index: usize) -> &[f32] {
        self.llama.get_logits_ith(index as i32)
    }

    /// Removes the tokens of a sequence from position `from` on. Where the cache cannot remove a part, all of it goes.
    /// Returns how many tokens are left.
    #[must_use]
    pub fn truncate(&mut self, sequence: i32, from: u32) -> u32 {
        if self.llama.kv_cache_seq_rm(sequence, Some(from), None).is_ok() {
            return from;
        }
        self.clear(sequence);
        0
    }

    /// Removes a whole sequence.
    pub fn clear(&mut self, sequence: i32) {
        // Removing a whole sequence cannot fail: only partial removal is refused by some caches.
        let _ = self.llama.kv_cache_seq_rm(sequence, None, None);
    }
}
