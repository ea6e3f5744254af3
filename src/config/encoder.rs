//! Flags for embeddings and scores.

use clap::{Args, ValueEnum};

/// Maximum bytes of the output buffer of an encoder. BGE-M3 needs 7.7 GiB for its 8192 tokens.
const MAX_OUTPUT_BYTES: usize = 8 << 30;

/// Flags for embeddings and scores.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Embeddings and scores")]
pub struct EncoderFlags {
    /// Embeddings and hidden states, also for a generative model; with neither this flag nor --reranking, an encoder model
    /// serves everything it supports
    #[arg(long, alias = "embeddings", env = "THUNDER_EMBEDDING", value_parser = clap::builder::FalseyValueParser::new())]
    pub embedding: bool,
    /// Reranking and classification; needs a model with a classification head
    #[arg(long, alias = "rerank", env = "THUNDER_RERANKING", value_parser = clap::builder::FalseyValueParser::new())]
    pub reranking: bool,
    /// Pooling of token embeddings into one embedding; default: the model's, else mean
    #[arg(long, env = "THUNDER_POOLING", value_name = "none|mean|cls|last|rank")]
    pub pooling: Option<PoolingFlag>,
    /// Activation after the dense layer of the classification head; default: that of the model's family
    #[arg(long, env = "THUNDER_CLASSIFIER_HEAD", value_name = "direct|tanh|relu|gelu")]
    pub classifier_head: Option<HeadFlag>,
}

impl EncoderFlags {
    /// Returns the maximum bytes of the logits and states that an encoder reserves for its inputs: half of the machine's
    /// memory, and at most 8 GiB.
    #[must_use]
    pub fn max_output_bytes() -> usize {
        max_output_bytes(super::defaults::memory_bytes())
    }
}

fn max_output_bytes(memory: Option<usize>) -> usize {
    memory.map_or(MAX_OUTPUT_BYTES / 2, |memory| MAX_OUTPUT_BYTES.min(memory / 2))
}

/// Pooling of token embeddings into one embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PoolingFlag {
    /// No pooling: one embedding per token.
    None,
    /// Mean of all tokens.
    Mean,
    /// The first token.
    Cls,
    /// The last token.
    Last,
    /// Scores instead of embeddings.
    Rank,
}

/// Activation after the dense layer of a classification head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HeadFlag {
    /// No dense layer: the hidden state is projected directly.
    Direct,
    /// Hyperbolic tangent.
    Tanh,
    /// Rectified linear unit.
    Relu,
    /// Gaussian error linear unit.
    Gelu,
}

#[cfg(test)]
mod tests {
    use super::max_output_bytes;

    #[test]
    fn output_buffer_takes_half_of_the_memory_at_most() {
        assert_eq!(max_output_bytes(Some(6 << 30)), 3 << 30);
        assert_eq!(max_output_bytes(Some(1 << 40)), 8 << 30);
        assert_eq!(max_output_bytes(None), 4 << 30);
    }
}
