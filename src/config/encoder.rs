//! What is said of embeddings and scores.

use clap::{Args, ValueEnum};

/// Embeddings and scores.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Embeddings and scores")]
pub struct EncoderFlags {
    /// Give embeddings, beside generation where the model generates. Without this and --reranking an encoder gives what it can
    #[arg(long, alias = "embeddings", env = "THUNDER_EMBEDDING", value_parser = clap::builder::FalseyValueParser::new())]
    pub embedding: bool,
    /// Rank documents and classify texts; needs a model with a classification head
    #[arg(long, alias = "rerank", env = "THUNDER_RERANKING", value_parser = clap::builder::FalseyValueParser::new())]
    pub reranking: bool,
    /// How the tokens of a text become one embedding; without it as the model says, else their mean
    #[arg(long, env = "THUNDER_POOLING", value_name = "none|mean|cls|last|rank")]
    pub pooling: Option<PoolingFlag>,
    /// What stands behind the dense layer of the classification head; without it as in the model's family
    #[arg(long, env = "THUNDER_CLASSIFIER_HEAD", value_name = "direct|tanh|relu|gelu")]
    pub classifier_head: Option<HeadFlag>,
}

/// How the tokens of a text become one embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PoolingFlag {
    /// Not at all: one for each token.
    None,
    /// Their mean.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
    /// None: scores instead.
    Rank,
}

/// What stands behind the dense layer of a classification head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HeadFlag {
    /// No dense layer: the state is projected as it is.
    Direct,
    /// Hyperbolic tangent.
    Tanh,
    /// Rectifier.
    Relu,
    /// GELU.
    Gelu,
}
