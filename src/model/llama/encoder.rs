//! Encoding of texts to vectors: a context without sampling, for encoders such as BERT and for chat models.
//!
//! llama.cpp returns the hidden state of every token; pooling and heads are computed here. So one context serves
//! embeddings with any pooling and classifier scores, and causal models accept inputs longer than a physical batch.

use super::adapters::ContextAdapters;
use super::head::{self, Activation, Head, HeadError, HeadMetadata};
use super::{Model, ModelError, backend};
use crate::events::TokenId;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::{LlamaContextParams, LlamaPoolingType};
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
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

/// Pooling of the states of an input's tokens into one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// No pooling: one vector per token.
    None,
    /// Mean of all tokens.
    Mean,
    /// The first token.
    Cls,
    /// The last token.
    Last,
}

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
}

/// A context for encoding.
pub struct EncoderContext<'model> {
    llama: LlamaContext<'model>,
    adapters: ContextAdapters<'model>,
    batch: LlamaBatch<'static>,
    head: Option<Head>,
    width: usize,
    /// True for T5's encoder, which llama.cpp computes with a separate call.
    uses_encode_call: bool,
    sequences: usize,
    max_shared_tokens: usize,
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

    /// Creates a context for encoding. It returns logits only with a `head`.
    ///
    /// # Errors
    /// [`ModelError::Context`], usually due to a lack of memory.
    pub fn encoder(&self, options: &EncoderOptions, head: Option<Head>) -> Result<EncoderContext<'_>, ModelError> {
        let takes_whole_input = !self.generates() || !is_causal(&self.llama, &self.card.architecture);
        let batch = options.max_input_tokens.max(options.ubatch_size);
        // A recurrent state costs memory for every sequence.
        let sequences = if self.llama.is_recurrent() || self.llama.is_hybrid() { 1 } else { MAX_INPUTS_PER_DECODE };
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(batch))
            .with_n_batch(batch)
            .with_n_ubatch(if takes_whole_input { batch } else { options.ubatch_size })
            .with_n_seq_max(sequences)
            .with_n_threads(options.threads)
            .with_n_threads_batch(options.threads)
            // All sequences share the cells, so one may be as long as all together.
            .with_kv_unified(true)
            .with_no_perf(true)
            .with_embeddings(true)
            .with_pooling_type(LlamaPoolingType::None);
        let params = self.tuning.apply(params);
        let _one_at_a_time = self.context_creation.lock().unwrap_or_else(PoisonError::into_inner);
        let llama = self
            .llama
            .new_context(backend()?, params)
            .map_err(|error| ModelError::Context { ctx_size: batch, reason: error.to_string() })?;
        Ok(EncoderContext {
            batch: LlamaBatch::new(batch as usize, 1),
            llama,
            adapters: ContextAdapters::new(self.adapters()),
            head,
            width: self.width(),
            uses_encode_call: self.card.architecture == "t5encoder",
            sequences: sequences as usize,
            max_shared_tokens: options.ubatch_size as usize,
        })
    }

    /// Returns a numeric metadata value of this architecture.
    fn metadata_number(&self, key: &str) -> Option<f64> {
        self.llama.meta_val_str(&format!("{}.{key}", self.card.architecture)).ok()?.parse().ok()
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

    /// Encodes inputs as sequences of one decode with the model's default LoRA adapters and control vectors, and returns
    /// the requested outputs in order.
    ///
    /// Every input must have 1 to `max_input_tokens` tokens of the vocabulary, and there must not be more inputs than
    /// [`Self::count_fitting`] returned.
    ///
    /// # Errors
    /// [`ModelError::Decode`]; later calls are not affected.
    pub fn encode(&mut self, inputs: &[(&[TokenId], EncoderOutput)]) -> Result<Vec<Vec<f32>>, ModelError> {
        self.adapters.apply(&self.adapters.known().default_set(), &mut self.llama)?;
        self.batch.clear();
        for (sequence, (tokens, _)) in (0..).zip(inputs) {
            for (position, &token) in (0..).zip(*tokens) {
                self.batch
                    .add(LlamaToken::new(token), position, &[sequence], true)
                    .map_err(|error| ModelError::Decode(error.to_string()))?;
            }
        }
        let failed = |error: &dyn std::fmt::Display| ModelError::Decode(error.to_string());
        self.llama.clear_kv_cache_seq(None, None, None).map_err(|error| failed(&error))?;
        if self.uses_encode_call {
            self.llama.encode(&mut self.batch).map_err(|error| failed(&error))?;
        } else {
            self.llama.decode(&mut self.batch).map_err(|error| failed(&error))?;
        }
        let mut first = 0;
        inputs
            .iter()
            .map(|&(tokens, output)| {
                let rows = first..first + tokens.len();
                first = rows.end;
                self.compute_output(rows, output)
            })
            .collect()
    }

    fn compute_output(&self, rows: std::ops::Range<usize>, output: EncoderOutput) -> Result<Vec<f32>, ModelError> {
        match (output, &self.head) {
            (EncoderOutput::Embedding(pooling), _) => self.pool(rows, pooling),
            (EncoderOutput::Logits, Some(head)) => Ok(head.logits(&self.pool(rows, head.pooling)?)),
            (EncoderOutput::Logits, None) => Err(ModelError::Decode("the model has no classification head".into())),
        }
    }

    fn pool(&self, rows: std::ops::Range<usize>, pooling: Pooling) -> Result<Vec<f32>, ModelError> {
        match pooling {
            Pooling::Cls => self.state(rows.start).map(<[f32]>::to_vec),
            Pooling::Last => self.state(rows.end - 1).map(<[f32]>::to_vec),
            Pooling::None => {
                let mut all = Vec::with_capacity(rows.len() * self.width);
                for row in rows {
                    all.extend_from_slice(self.state(row)?);
                }
                Ok(all)
            }
            Pooling::Mean => {
                let count = rows.len() as f32;
                let mut sum = vec![0.0_f32; self.width];
                for row in rows {
                    for (sum, value) in sum.iter_mut().zip(self.state(row)?) {
                        *sum += value;
                    }
                }
                sum.iter_mut().for_each(|value| *value /= count);
                Ok(sum)
            }
        }
    }

    fn state(&self, row: usize) -> Result<&[f32], ModelError> {
        self.llama.embeddings_ith(row as i32).map_err(|error| ModelError::Decode(error.to_string()))
    }
}
