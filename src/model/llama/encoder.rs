//! Encoding of texts to vectors: a context without sampling, for encoders such as BERT and for chat models.
//!
//! llama.cpp returns the hidden state of every token; pooling and heads are computed here. So one context serves
//! embeddings with any pooling and classifier scores. A causal model decodes a long input in pieces: for each token of a
//! decode, llama.cpp reserves a logit of every token of the vocabulary, even if it computes only states, and keeps this
//! memory.

mod output;

use super::adapters::ContextAdapters;
use super::captures::NoHiddenStates;
use super::ffi::{EvalCallback, HiddenRequest, NativeContext};
use super::head::{self, Activation, Head, HeadError, HeadMetadata};
use super::layer_set::LayerSet;
use super::ubatch;
use super::{GgufHeader, Model, ModelError, backend};
use crate::events::TokenId;
use llama_cpp_2::context::params::{LlamaContextParams, LlamaPoolingType};
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
pub use output::Pooling;
use output::{PartialOutput, PooledStates};
use std::num::NonZeroU32;
use std::sync::PoisonError;

/// Maximum inputs per decode.
const MAX_INPUTS_PER_DECODE: u32 = 64;

/// Architectures without a KV cache in llama.cpp: they process their input as a whole and cannot continue it.
const CACHELESS_ARCHITECTURES: &[&str] = &[
    "bert",
    "clef",
    "dream",
    "eurobert",
    "gemma-embedding",
    "jina-bert-v2",
    "jina-bert-v3",
    "llada",
    "llada-moe",
    "modern-bert",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "rnd1",
    "t5encoder",
    "wavtokenizer-dec",
];

/// The pooling that a model's file declares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeclaredPooling {
    /// Embeddings with this pooling.
    Embedding(Pooling),
    /// Scores of the classification head.
    Scores,
}

/// Settings of an encoder context.
#[derive(Debug, Clone)]
pub struct EncoderOptions {
    /// Maximum tokens of an input.
    pub max_input_tokens: u32,
    /// Maximum tokens per physical batch, and maximum total tokens of inputs that share a decode. Models that process
    /// their input as a whole ignore the first limit.
    pub ubatch_size: u32,
    /// Maximum bytes of the logits and states that llama.cpp reserves for the tokens of a decode. Decodes that can be
    /// smaller are limited to it.
    pub max_output_bytes: usize,
    /// Number of threads.
    pub threads: i32,
}

/// The kind of output for an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncoderOutput {
    /// An embedding; for [`Pooling::None`] the concatenated vectors of all tokens.
    Embedding(Pooling),
    /// The classification head's logits.
    Logits,
    /// The hidden states of all tokens after these layers, as `[token][layer][width]`.
    HiddenStates(LayerSet),
}

/// The output of an input. Only hidden states can be unavailable.
pub type EncodedOutput = Result<Vec<f32>, NoHiddenStates>;

/// A context for encoding.
pub struct EncoderContext<'model> {
    llama: NativeContext<'model>,
    adapters: ContextAdapters<'model>,
    batch: LlamaBatch<'static>,
    head: Option<Head>,
    /// Number of values of a hidden state.
    hidden_width: usize,
    /// True for T5's encoder, which llama.cpp computes with a separate call.
    uses_encode_call: bool,
    sequences: usize,
    /// Maximum total tokens of inputs that share a decode.
    max_shared_tokens: usize,
    /// Maximum tokens of a decode. Longer inputs are decoded in pieces.
    max_decode_tokens: usize,
}

impl Model {
    /// Returns true if the model generates text; otherwise it can only encode.
    #[must_use]
    pub fn generates(&self) -> bool {
        self.card.generates
    }

    /// Returns the pooling that the file declares, if any.
    #[must_use]
    pub fn declared_pooling(&self) -> Option<DeclaredPooling> {
        Some(match self.metadata_number("pooling_type")? as u32 {
            0 => DeclaredPooling::Embedding(Pooling::None),
            1 => DeclaredPooling::Embedding(Pooling::Mean),
            2 => DeclaredPooling::Embedding(Pooling::Cls),
            3 => DeclaredPooling::Embedding(Pooling::Last),
            4 => DeclaredPooling::Scores,
            _ => return None,
        })
    }

    /// Reads the classification head. `requested` overrides the architecture's activation.
    ///
    /// # Errors
    /// [`HeadError`] if the model has no head, or its scores would be wrong.
    pub fn head(&self, requested: Option<Activation>) -> Result<Head, HeadError> {
        Head::read(&self.path, &self.head_metadata(), requested)
    }

    /// Returns the pooling of the state that the classification head reads.
    #[must_use]
    pub fn head_pooling(&self) -> Pooling {
        head::pooling(&self.head_metadata())
    }

    fn head_metadata(&self) -> HeadMetadata<'_> {
        HeadMetadata {
            architecture: &self.card.architecture,
            tokenizer: self.card.tokenizer,
            causal: is_causal(&self.llama, &self.card.architecture),
            width: self.width(),
            epsilon: self.metadata_number("attention.layer_norm_epsilon").unwrap_or(1e-5) as f32,
            classifier_pooling: self.metadata_number("classifier.pooling_type").map(|number| number as u32),
            files: self.llama.meta_val_str("split.count").ok().and_then(|count| count.parse().ok()).unwrap_or(1),
        }
    }

    /// Returns the number of values of an embedding.
    #[must_use]
    pub fn width(&self) -> usize {
        usize::try_from(self.llama.n_embd_out()).unwrap_or(0)
    }

    /// Returns the maximum tokens of an input whose outputs fit into `max_output_bytes`. Returns `None` for a model that
    /// decodes longer inputs in pieces.
    #[must_use]
    pub fn max_whole_input(&self, max_output_bytes: usize) -> Option<u32> {
        (!self.generates()).then(|| self.max_output_tokens(max_output_bytes))
    }

    /// Returns the maximum tokens of a decode whose outputs fit into `max_output_bytes`; at least 1.
    fn max_output_tokens(&self, max_output_bytes: usize) -> u32 {
        let bytes_per_token = (self.vocabulary.len() + self.width()) * size_of::<f32>();
        u32::try_from(max_output_bytes / bytes_per_token.max(1)).unwrap_or(u32::MAX).max(1)
    }

    /// Creates a context for encoding. It returns logits only with a `head`.
    ///
    /// # Errors
    /// [`ModelError::Context`], usually due to a lack of memory.
    pub fn encoder(&self, options: &EncoderOptions, head: Option<Head>) -> Result<EncoderContext<'_>, ModelError> {
        let ubatch_size = options.ubatch_size.min(self.max_output_tokens(options.max_output_bytes));
        let context_size = options.max_input_tokens.max(ubatch_size);
        // Only a causal model with a KV cache can continue an input.
        let max_decode_tokens = if self.generates() { ubatch_size } else { context_size };
        // A recurrent state costs memory for every sequence. llama.cpp requires room for one output of each sequence.
        let sequences = if self.is_recurrent() { 1 } else { MAX_INPUTS_PER_DECODE.min(max_decode_tokens) };
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(context_size))
            .with_n_batch(max_decode_tokens)
            .with_n_ubatch(max_decode_tokens)
            .with_n_seq_max(sequences)
            .with_n_threads(options.threads)
            .with_n_threads_batch(options.threads)
            // All sequences share the cells, so one may be as long as all together.
            .with_kv_unified(true)
            .with_no_perf(true)
            .with_embeddings(true)
            .with_pooling_type(LlamaPoolingType::None);
        let callback = EvalCallback::new(self.card.layers as usize);
        let _one_at_a_time = self.context_creation.lock().unwrap_or_else(PoisonError::into_inner);
        let llama = NativeContext::new(&self.llama, backend()?, self.tuning.apply(params), Some(callback), None)
            .map_err(|error| ModelError::Context { ctx_size: context_size, reason: error.to_string() })?;
        Ok(EncoderContext {
            batch: LlamaBatch::new(max_decode_tokens as usize, 1),
            llama,
            adapters: ContextAdapters::new(self.adapters()),
            head,
            hidden_width: self.card.embedding as usize,
            uses_encode_call: self.card.architecture == "t5encoder",
            sequences: sequences as usize,
            max_shared_tokens: ubatch_size as usize,
            max_decode_tokens: max_decode_tokens as usize,
        })
    }

    /// Returns true if some layers have a state that represents the whole sequence.
    fn is_recurrent(&self) -> bool {
        self.llama.is_recurrent() || self.llama.is_hybrid()
    }

    /// Returns a numeric metadata value of this architecture.
    fn metadata_number(&self, key: &str) -> Option<f64> {
        self.llama.meta_val_str(&format!("{}.{key}", self.card.architecture)).ok()?.parse().ok()
    }
}

impl GgufHeader {
    /// Returns true if the model of the file generates text.
    #[must_use]
    pub fn generates(&self) -> bool {
        let architecture = self.text("general.architecture").unwrap_or_default();
        !CACHELESS_ARCHITECTURES.contains(&architecture) && self.parameter("attention.causal") != Some(0)
    }
}

/// Returns true if a model generates text.
pub(super) fn generates(llama: &LlamaModel, architecture: &str) -> bool {
    !CACHELESS_ARCHITECTURES.contains(&architecture) && is_causal(llama, architecture)
}

fn is_causal(llama: &LlamaModel, architecture: &str) -> bool {
    let declared = llama.meta_val_str(&format!("{architecture}.attention.causal"));
    declared.map_or(!CACHELESS_ARCHITECTURES.contains(&architecture), |declared| declared == "true")
}

impl EncoderContext<'_> {
    /// Returns the number of inputs with these lengths, in order, that fit into one decode; at least 1.
    pub fn count_fitting(&self, lengths: impl Iterator<Item = usize>) -> usize {
        let mut tokens = 0;
        let fitting = lengths.take(self.sequences).take_while(|length| {
            tokens += length;
            tokens <= self.max_shared_tokens
        });
        fitting.count().max(1)
    }

    /// Returns the maximum tokens of a decode. A longer input is decoded in pieces.
    #[must_use]
    pub fn max_decode_tokens(&self) -> usize {
        self.max_decode_tokens
    }

    /// Encodes inputs as sequences of one decode with the model's default LoRA adapters and control vectors, and returns
    /// the requested outputs in order. A single input may take several decodes.
    ///
    /// Every input must have 1 to `max_input_tokens` tokens of the vocabulary, and there must not be more inputs than
    /// [`Self::count_fitting`] returned.
    ///
    /// # Errors
    /// [`ModelError::Decode`]; later calls are not affected.
    pub fn encode(&mut self, inputs: &[(&[TokenId], EncoderOutput)]) -> Result<Vec<EncodedOutput>, ModelError> {
        self.adapters.apply(&self.adapters.known().default_set(), &mut self.llama)?;
        self.clear_memory()?;
        let outputs = inputs.iter().map(|&(_, output)| self.empty_output(output));
        let mut outputs = outputs.collect::<Result<Vec<_>, _>>()?;
        let longest = inputs.iter().map(|(tokens, _)| tokens.len()).max().unwrap_or(0);
        for start in (0..longest).step_by(self.max_decode_tokens) {
            let piece = |tokens: &&[TokenId]| start.min(tokens.len())..tokens.len().min(start + self.max_decode_tokens);
            let pieces: Vec<_> = inputs.iter().map(|(tokens, output)| (&tokens[piece(tokens)], *output)).collect();
            self.decode(start, &pieces)?;
            self.add_states(&pieces, &mut outputs)?;
        }
        Ok(outputs.into_iter().map(|output| self.finish_output(output)).collect())
    }

    /// Removes all sequences.
    fn clear_memory(&mut self) -> Result<(), ModelError> {
        // A recurrent memory rejects the removal of all sequences with one call. Here it has only one.
        let sequence = (self.sequences == 1).then_some(0);
        match self.llama.clear_kv_cache_seq(sequence, None, None) {
            Ok(true) => Ok(()),
            Ok(false) => Err(ModelError::Decode("the states of earlier inputs could not be removed".into())),
            Err(error) => Err(decode_error(&error)),
        }
    }

    /// Decodes pieces of inputs, which begin at this position, as sequences of one batch.
    fn decode(&mut self, start: usize, pieces: &[(&[TokenId], EncoderOutput)]) -> Result<(), ModelError> {
        self.batch.clear();
        for (sequence, (tokens, _)) in (0..).zip(pieces) {
            for (position, &token) in (start as i32..).zip(*tokens) {
                let added = self.batch.add(LlamaToken::new(token), position, &[sequence], true);
                added.map_err(|error| decode_error(&error))?;
            }
        }
        self.request_hidden_states(pieces);
        if self.uses_encode_call {
            self.llama.encode(&mut self.batch).map_err(|error| decode_error(&error))
        } else {
            self.llama.decode(&mut self.batch).map_err(|error| decode_error(&error))
        }
    }

    /// Passes the tokens of inputs whose hidden states are requested to the callback.
    fn request_hidden_states(&mut self, inputs: &[(&[TokenId], EncoderOutput)]) {
        let ubatch_size = self.llama.n_ubatch() as usize;
        let Some(callback) = self.llama.callback() else { return };
        if !inputs.iter().any(|(_, output)| matches!(output, EncoderOutput::HiddenStates(_))) {
            return callback.request_hidden_states(Vec::new());
        }
        let sequences: Vec<i32> =
            (0..).zip(inputs).flat_map(|(sequence, (tokens, _))| std::iter::repeat_n(sequence, tokens.len())).collect();
        let layers = inputs.iter().flat_map(|(tokens, output)| {
            let layers = match output {
                EncoderOutput::HiddenStates(layers) => *layers,
                EncoderOutput::Embedding(_) | EncoderOutput::Logits => LayerSet::default(),
            };
            std::iter::repeat_n(layers, tokens.len())
        });
        // All tokens have outputs, and all sequences share one stream.
        let positions = ubatch::ubatch_positions(&sequences, ubatch_size, false);
        let columns = ubatch::columns(&positions, &vec![true; sequences.len()]);
        let request = |((layers, position), column): ((LayerSet, &ubatch::UbatchPosition), &ubatch::Column)| {
            HiddenRequest { ubatch: position.ubatch, column: *column, layers }
        };
        let requests = layers.zip(&positions).zip(&columns).map(request).filter(|request| !request.layers.is_empty());
        callback.request_hidden_states(requests.collect());
    }

    /// Returns the output of an input before its first token.
    fn empty_output(&self, output: EncoderOutput) -> Result<PartialOutput, ModelError> {
        Ok(match (output, &self.head) {
            (EncoderOutput::Embedding(pooling), _) => PartialOutput::Embedding(PooledStates::new(pooling)),
            (EncoderOutput::Logits, Some(head)) => PartialOutput::Logits(PooledStates::new(head.pooling)),
            (EncoderOutput::Logits, None) => {
                return Err(ModelError::Decode("the model has no classification head".into()));
            }
            (EncoderOutput::HiddenStates(layers), _) => {
                PartialOutput::HiddenStates { values_per_token: layers.len() * self.hidden_width, values: Vec::new() }
            }
        })
    }

    /// Adds the states of the decoded pieces to the outputs of their inputs.
    fn add_states(
        &mut self,
        pieces: &[(&[TokenId], EncoderOutput)],
        outputs: &mut [PartialOutput],
    ) -> Result<(), ModelError> {
        let mut captured = self.llama.callback().map_or_else(Vec::new, EvalCallback::take_hidden_states).into_iter();
        let mut first = 0;
        for ((tokens, _), output) in pieces.iter().zip(outputs) {
            output.add_piece(tokens.len(), |token| self.state(first + token), &mut captured)?;
            first += tokens.len();
        }
        Ok(())
    }

    fn finish_output(&self, output: PartialOutput) -> EncodedOutput {
        Ok(match (output, &self.head) {
            (PartialOutput::Logits(states), Some(head)) => head.logits(&states.finish()),
            (PartialOutput::Embedding(states) | PartialOutput::Logits(states), _) => states.finish(),
            (PartialOutput::HiddenStates { values, .. }, _) => values,
            (PartialOutput::NoHiddenStates, _) => return Err(NoHiddenStates::UnnamedLayers),
        })
    }

    fn state(&self, row: usize) -> Result<&[f32], ModelError> {
        self.llama.embeddings_ith(row as i32).map_err(|error| decode_error(&error))
    }
}

fn decode_error(error: &dyn std::fmt::Display) -> ModelError {
    ModelError::Decode(error.to_string())
}
