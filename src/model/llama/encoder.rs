//! Texts to vectors: a context without sampling, for encoders such as BERT and for chat models alike.
//!
//! llama.cpp gives the hidden state of every token; pooling and heads are computed here. So one context serves
//! embeddings of any pooling and a classifier's scores, each vector has the size that its reader expects, and causal
//! models may take inputs that are longer than a physical batch.

use super::adapters::Adapters;
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

/// Most inputs in one decode.
const SEQUENCES: u32 = 64;

/// Families that llama.cpp gives no KV cache: they see their input as a whole, and continue none.
const WITHOUT_CACHE: &[&str] = &[
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

/// How the states of an input's tokens become one vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// They do not: one vector for each token.
    None,
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
}

/// What a model's file says of pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeclaredPooling {
    /// It embeds, pooled like this.
    Embeds(Pooling),
    /// It scores, with its classification head.
    Ranks,
}

/// How an encoder's context is set up.
#[derive(Debug, Clone)]
pub struct EncoderOptions {
    /// Most tokens in one input.
    pub longest: u32,
    /// Tokens that are computed at once where the model allows it, and up to which short inputs share a decode.
    pub ubatch_size: u32,
    /// Threads that compute.
    pub threads: i32,
}

/// What is wanted of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EncoderOutput {
    /// A vector; for [`Pooling::None`] one for each token, one behind the other.
    Embedding(Pooling),
    /// The classification head's logits.
    Logits,
}

/// A context that encodes.
pub struct EncoderContext<'model> {
    llama: LlamaContext<'model>,
    adapters: &'model Adapters,
    batch: LlamaBatch<'static>,
    head: Option<Head>,
    width: usize,
    /// T5's encoder has another entry.
    by_encode: bool,
    sequences: usize,
    shared: usize,
}

impl Model {
    /// Whether it continues texts; if not, it can only encode.
    #[must_use]
    pub fn generates(&self) -> bool {
        self.card.generates
    }

    /// What its file says of pooling, if anything.
    #[must_use]
    pub fn declared_pooling(&self) -> Option<DeclaredPooling> {
        Some(match self.number("pooling_type")? as u32 {
            0 => DeclaredPooling::Embeds(Pooling::None),
            1 => DeclaredPooling::Embeds(Pooling::Mean),
            2 => DeclaredPooling::Embeds(Pooling::Cls),
            3 => DeclaredPooling::Embeds(Pooling::Last),
            4 => DeclaredPooling::Ranks,
            _ => return None,
        })
    }

    /// Reads its classification head. `asked` overrides what the family says of the activation.
    ///
    /// # Errors
    /// Why there is none, or none whose scores can be known to be right.
    pub fn head(&self, asked: Option<Activation>) -> Result<Head, HeadError> {
        Head::read(&self.path, &self.family(), asked)
    }

    /// Which state its classification head reads.
    #[must_use]
    pub fn ranked_pooling(&self) -> Pooling {
        head::pooling(&self.family())
    }

    fn family(&self) -> HeadMetadata<'_> {
        HeadMetadata {
            architecture: &self.card.architecture,
            tokenizer: self.card.tokenizer,
            causal: is_causal(&self.llama, &self.card.architecture),
            width: self.width(),
            epsilon: self.number("attention.layer_norm_epsilon").unwrap_or(1e-5) as f32,
            classifier_pooling: self.number("classifier.pooling_type").map(|number| number as u32),
            files: self.llama.meta_val_str("split.count").ok().and_then(|count| count.parse().ok()).unwrap_or(1),
        }
    }

    /// Values of an embedding.
    #[must_use]
    pub fn width(&self) -> usize {
        usize::try_from(self.llama.n_embd_out()).unwrap_or(0)
    }

    /// Makes a context to encode in. Only with a `head` does it give logits.
    ///
    /// # Errors
    /// [`ModelError::Context`], usually because the memory could not be had.
    pub fn encoder(&self, options: &EncoderOptions, head: Option<Head>) -> Result<EncoderContext<'_>, ModelError> {
        let whole = !self.generates() || !is_causal(&self.llama, &self.card.architecture);
        let batch = options.longest.max(options.ubatch_size);
        // A recurrent state costs its memory for every sequence.
        let sequences = if self.llama.is_recurrent() || self.llama.is_hybrid() { 1 } else { SEQUENCES };
        let params = LlamaContextParams::default()
            .with_n_ctx(NonZeroU32::new(batch))
            .with_n_batch(batch)
            .with_n_ubatch(if whole { batch } else { options.ubatch_size })
            .with_n_seq_max(sequences)
            .with_n_threads(options.threads)
            .with_n_threads_batch(options.threads)
            // All sequences share the cells, so that one may be as long as all of them.
            .with_kv_unified(true)
            .with_no_perf(true)
            .with_embeddings(true)
            .with_pooling_type(LlamaPoolingType::None);
        let params = self.tuning.apply(params);
        let _one_at_a_time = self.making_context.lock().unwrap_or_else(PoisonError::into_inner);
        let mut llama = self
            .llama
            .new_context(backend()?, params)
            .map_err(|error| ModelError::Context { ctx_size: batch, reason: error.to_string() })?;
        if let Some(control) = &self.control {
            control.apply(&mut llama)?;
        }
        Ok(EncoderContext {
            batch: LlamaBatch::new(batch as usize, 1),
            llama,
            adapters: self.adapters(),
            head,
            width: self.width(),
            by_encode: self.card.architecture == "t5encoder",
            sequences: sequences as usize,
            shared: options.ubatch_size as usize,
        })
    }

    /// A number that the file says of this architecture.
    fn number(&self, key: &str) -> Option<f64> {
        self.llama.meta_val_str(&format!("{}.{key}", self.card.architecture)).ok()?.parse().ok()
    }
}

/// Whether a model continues texts.
pub(super) fn generates(llama: &LlamaModel, architecture: &str) -> bool {
    !WITHOUT_CACHE.contains(&architecture) && is_causal(llama, architecture)
}

fn is_causal(llama: &LlamaModel, architecture: &str) -> bool {
    let said = llama.meta_val_str(&format!("{architecture}.attention.causal"));
    said.map_or(!WITHOUT_CACHE.contains(&architecture), |said| said == "true")
}

impl EncoderContext<'_> {
    /// How many of these inputs, of so many tokens, go into one decode together; at least one.
    pub fn fitting(&self, lengths: impl Iterator<Item = usize>) -> usize {
        let mut tokens = 0;
        let fitting = lengths.take(self.sequences).take_while(|length| {
            tokens += length;
            tokens <= self.shared
        });
        fitting.count().max(1)
    }

    /// Encodes inputs as sequences of one decode, with the model's usual LoRA adapters; what was wanted of each, in order.
    ///
    /// Every input has at least one token and at most `longest`, all of the vocabulary, and there are no more of them
    /// than [`Self::fitting`] said.
    ///
    /// # Errors
    /// [`ModelError::Decode`]; the next call starts afresh.
    pub fn encode(&mut self, inputs: &[(&[TokenId], EncoderOutput)]) -> Result<Vec<Vec<f32>>, ModelError> {
        self.adapters.apply(&self.adapters.usual(), &mut self.llama)?;
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
        if self.by_encode {
            self.llama.encode(&mut self.batch).map_err(|error| failed(&error))?;
        } else {
            self.llama.decode(&mut self.batch).map_err(|error| failed(&error))?;
        }
        let mut first = 0;
        inputs
            .iter()
            .map(|&(tokens, wanted)| {
                let rows = first..first + tokens.len();
                first = rows.end;
                self.read(rows, wanted)
            })
            .collect()
    }

    fn read(&self, rows: std::ops::Range<usize>, wanted: EncoderOutput) -> Result<Vec<f32>, ModelError> {
        match (wanted, &self.head) {
            (EncoderOutput::Embedding(pooling), _) => self.pooled(rows, pooling),
            (EncoderOutput::Logits, Some(head)) => Ok(head.logits(&self.pooled(rows, head.pooling)?)),
            (EncoderOutput::Logits, None) => Err(ModelError::Decode("the model has no classification head".into())),
        }
    }

    fn pooled(&self, rows: std::ops::Range<usize>, pooling: Pooling) -> Result<Vec<f32>, ModelError> {
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
