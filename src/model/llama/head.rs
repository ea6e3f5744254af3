//! The classification head of a model, computed here instead of in llama.cpp's graph.
//!
//! llama.cpp applies tanh after the dense layer of every architecture except `ModernBERT`, and with its RANK pooling
//! the state for embeddings is not accessible. So the head is read from the file once and applied to the pooled state
//! here, with the activation of the architecture:
//!
//! | architecture | in the file | activation |
//! |---|---|---|
//! | `RoBERTa`, XLM-R, `NeoBERT`; BERT with its pooler | `cls` | tanh |
//! | `DistilBERT` (`bert` without `token_types`, `WordPiece`) | `cls` | `ReLU` |
//! | `ModernBERT` | `cls`, `cls.norm` | GELU, then the norm |
//! | BERT converted by llama.cpp | no `cls`: the pooler is missing | rejected, because its scores would be wrong |
//! | others, such as Qwen3 rerankers | `cls.output` | none |

use super::encoder::Pooling;
use super::gguf::{GgufError, GgufFile, Matrix};
use std::path::Path;

/// Maximum values of a head's matrix.
const MAX_VALUES: usize = 1 << 28;

/// The activation between a head's dense layer and its projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// No dense layer: the state is projected directly.
    Direct,
    /// Hyperbolic tangent, as in `RoBERTa` and in BERT's pooler.
    Tanh,
    /// Rectifier, as in `DistilBERT`.
    Relu,
    /// GELU with the error function, as in `ModernBERT`.
    Gelu,
}

/// The reason why a model cannot return classification scores.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeadError {
    /// The model is not a classifier.
    #[error("the model has no classification head: its file has no tensor cls.output.weight")]
    None,
    /// The model is split, and another file holds the head.
    #[error(
        "the model is split over several files; join them first (llama-gguf-split --merge), so that its head can be read"
    )]
    Split,
    /// BERT's pooler is missing in the file.
    #[error(
        "the file of this BERT classifier lacks the pooler's dense layer (cls.weight), which llama.cpp's converter omits, so its scores would be wrong; convert the model with pooler.dense as cls.weight, or, if it has no pooler, start the server with --classifier-head direct"
    )]
    MissingPooler,
    /// The requested activation needs a part that the file does not have.
    #[error("--classifier-head {0} needs a dense layer, and the file has no tensor cls.weight")]
    NoDense(&'static str),
    /// The file is damaged or inconsistent.
    #[error("the classification head cannot be read: {0}")]
    Unreadable(String),
}

/// The metadata needed to read a head.
#[derive(Debug, Clone)]
pub(super) struct HeadMetadata<'a> {
    /// `general.architecture`.
    pub architecture: &'a str,
    /// Type of tokenizer, e.g. `wpm`.
    pub tokenizer: &'a str,
    /// True if a token attends only to earlier tokens.
    pub causal: bool,
    /// Width of the hidden state.
    pub width: usize,
    /// Epsilon of the norms.
    pub epsilon: f32,
    /// `{architecture}.classifier.pooling_type`.
    pub classifier_pooling: Option<u32>,
    /// Number of files of the model.
    pub files: usize,
}

/// A classification head: dense layer, activation, norm, projection.
#[derive(Debug, Clone)]
pub struct Head {
    /// Pooling of the state that the head is applied to.
    pub pooling: Pooling,
    /// Name of each output, in order.
    pub labels: Vec<String>,
    /// Activation after the dense layer.
    pub activation: Activation,
    /// True if the reranking score is the softmax probability of the first label.
    pub softmax: bool,
    /// True if the model was trained with token types that distinguish the two texts of a pair; llama.cpp sets all of
    /// them to the first type.
    pub segments: bool,
    dense: Option<Layer>,
    norm: Option<(Vec<f32>, f32)>,
    output: Option<Layer>,
}

#[derive(Debug, Clone)]
struct Layer {
    weights: Matrix,
    bias: Option<Vec<f32>>,
}

impl Head {
    /// Reads the head from the model's file. `requested` overrides the architecture's activation.
    pub(super) fn read(
        path: &Path,
        metadata: &HeadMetadata<'_>,
        requested: Option<Activation>,
    ) -> Result<Self, HeadError> {
        let unreadable = |error: std::io::Error| HeadError::Unreadable(error.to_string());
        let damaged = |error: GgufError| HeadError::Unreadable(error.to_string());
        let file = GgufFile::open(path).map_err(damaged)?;
        let layer = |name: &str, columns: usize| -> Result<Option<Layer>, HeadError> {
            let Some(weights) = file.tensor(&format!("{name}.weight"), MAX_VALUES).map_err(unreadable)? else {
                return Ok(None);
            };
            let bias = file.tensor(&format!("{name}.bias"), MAX_VALUES).map_err(unreadable)?;
            let rows = weights.values.len() / weights.columns.max(1);
            if weights.columns != columns || bias.as_ref().is_some_and(|bias| bias.values.len() != rows) {
                return Err(HeadError::Unreadable(format!("{name} does not match a state of {columns} values")));
            }
            Ok(Some(Layer { weights, bias: bias.map(|bias| bias.values) }))
        };
        let dense = layer("cls", metadata.width)?;
        let output = layer("cls.output", dense.as_ref().map_or(metadata.width, Layer::rows))?;
        // Jina's rerankers have their projection in `cls`.
        let Some(outputs) = output.as_ref().or(dense.as_ref().filter(|dense| dense.rows() == 1)).map(Layer::rows)
        else {
            return Err(if metadata.files > 1 { HeadError::Split } else { HeadError::None });
        };
        let norm = file.tensor("cls.norm.weight", MAX_VALUES).map_err(unreadable)?;
        if norm.as_ref().is_some_and(|norm| dense.as_ref().is_none_or(|dense| dense.rows() != norm.values.len())) {
            return Err(HeadError::Unreadable("cls.norm does not match cls".into()));
        }
        let types = file.tensor("token_types.weight", MAX_VALUES).map_err(unreadable)?;
        let activation = activation(metadata, dense.is_some(), types.is_some(), requested)?;
        let labels = file
            .texts(&format!("{}.classifier.output_labels", metadata.architecture))
            .map_err(damaged)?
            .filter(|labels| labels.len() == outputs)
            .unwrap_or_else(|| (0..outputs).map(|index| format!("LABEL_{index}")).collect());
        Ok(Self {
            pooling: pooling(metadata),
            labels,
            activation,
            softmax: outputs > 1 && metadata.architecture.starts_with("qwen3"),
            dense: dense.filter(|_| activation != Activation::Direct || output.is_none()),
            segments: types.is_some_and(|types| types.values.len() > types.columns),
            norm: norm.map(|norm| (norm.values, metadata.epsilon)),
            output,
        })
    }

    /// Returns the logits, one per label.
    #[must_use]
    pub fn logits(&self, state: &[f32]) -> Vec<f32> {
        let mut state = state.to_vec();
        if let Some(dense) = &self.dense {
            state = dense.apply(&state);
            for value in &mut state {
                *value = self.activation.apply(*value);
            }
            if let Some((weights, epsilon)) = &self.norm {
                normalize(&mut state, weights, *epsilon);
            }
        }
        match &self.output {
            Some(output) => output.apply(&state),
            None => state,
        }
    }
}

fn activation(
    metadata: &HeadMetadata<'_>,
    dense: bool,
    has_token_types: bool,
    requested: Option<Activation>,
) -> Result<Activation, HeadError> {
    match requested {
        Some(Activation::Direct) => Ok(Activation::Direct),
        Some(activation) if dense => Ok(activation),
        Some(activation) => Err(HeadError::NoDense(activation.name())),
        None if !dense && metadata.architecture == "bert" => Err(HeadError::MissingPooler),
        None if !dense => Ok(Activation::Direct),
        None if metadata.architecture == "modern-bert" => Ok(Activation::Gelu),
        None if metadata.architecture == "bert" && metadata.tokenizer == "wpm" && !has_token_types => {
            Ok(Activation::Relu)
        }
        None => Ok(Activation::Tanh),
    }
}

pub(super) fn pooling(metadata: &HeadMetadata<'_>) -> Pooling {
    const MEAN: u32 = 1;
    match metadata.classifier_pooling {
        Some(MEAN) => Pooling::Mean,
        None if metadata.architecture == "modern-bert" => Pooling::Mean,
        _ if metadata.causal => Pooling::Last,
        _ => Pooling::Cls,
    }
}

impl Layer {
    fn rows(&self) -> usize {
        self.weights.values.len() / self.weights.columns
    }

    fn apply(&self, state: &[f32]) -> Vec<f32> {
        let rows = self.weights.values.chunks_exact(self.weights.columns);
        rows.enumerate()
            .map(|(row, weights)| {
                let product: f32 = weights.iter().zip(state).map(|(weight, value)| weight * value).sum();
                product + self.bias.as_ref().map_or(0.0, |bias| bias[row])
            })
            .collect()
    }
}

impl Activation {
    const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Tanh => "tanh",
            Self::Relu => "relu",
            Self::Gelu => "gelu",
        }
    }

    fn apply(self, value: f32) -> f32 {
        match self {
            // Jina's rerankers and llama.cpp apply tanh to the single projection.
            Self::Direct | Self::Tanh => value.tanh(),
            Self::Relu => value.max(0.0),
            Self::Gelu => 0.5 * value * (1.0 + erf(value * std::f32::consts::FRAC_1_SQRT_2)),
        }
    }
}

/// Returns the error function with an absolute error below 2e-7 (Abramowitz and Stegun 7.1.26).
fn erf(value: f32) -> f32 {
    const TERMS: [f64; 5] = [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let x = f64::from(value.abs());
    let t = 1.0 / (1.0 + 0.327_591_1 * x);
    let sum = TERMS.iter().fold(0.0, |sum, term| (sum + term) * t);
    ((1.0 - sum * (-x * x).exp()) as f32).copysign(value)
}

fn normalize(state: &mut [f32], weights: &[f32], epsilon: f32) {
    let count = state.len() as f32;
    let mean = state.iter().sum::<f32>() / count;
    let variance = state.iter().map(|value| (value - mean).powi(2)).sum::<f32>() / count;
    let scale = 1.0 / (variance + epsilon).sqrt();
    for (value, weight) in state.iter_mut().zip(weights) {
        *value = (*value - mean) * scale * weight;
    }
}

#[cfg(test)]
mod tests {
    use super::{Activation, HeadError, HeadMetadata, Pooling, activation, erf, pooling};

    fn family(architecture: &'static str, tokenizer: &'static str) -> HeadMetadata<'static> {
        HeadMetadata {
            architecture,
            tokenizer,
            causal: false,
            width: 8,
            epsilon: 1e-5,
            classifier_pooling: None,
            files: 1,
        }
    }

    #[test]
    fn family_determines_the_activation() {
        let of = |family: &HeadMetadata<'_>, dense, typed| activation(family, dense, typed, None);
        assert_eq!(of(&family("bert", "wpm"), true, true), Ok(Activation::Tanh));
        assert_eq!(of(&family("bert", "wpm"), true, false), Ok(Activation::Relu), "DistilBERT has no token types");
        assert_eq!(of(&family("bert", "ugm"), true, false), Ok(Activation::Tanh), "XLM-R");
        assert_eq!(of(&family("bert", "wpm"), false, true), Err(HeadError::MissingPooler));
        assert_eq!(of(&family("modern-bert", "bpe"), true, false), Ok(Activation::Gelu));
        assert_eq!(of(&family("qwen3", "bpe"), false, false), Ok(Activation::Direct));
    }

    #[test]
    fn requested_activation_takes_precedence() {
        let bert = family("bert", "wpm");
        assert_eq!(activation(&bert, false, true, Some(Activation::Direct)), Ok(Activation::Direct));
        assert_eq!(activation(&bert, true, true, Some(Activation::Relu)), Ok(Activation::Relu));
        assert_eq!(activation(&bert, false, true, Some(Activation::Tanh)), Err(HeadError::NoDense("tanh")));
    }

    #[test]
    fn family_determines_the_pooled_state() {
        assert_eq!(pooling(&family("bert", "wpm")), Pooling::Cls);
        assert_eq!(pooling(&family("modern-bert", "bpe")), Pooling::Mean);
        assert_eq!(
            pooling(&HeadMetadata { classifier_pooling: Some(2), ..family("modern-bert", "bpe") }),
            Pooling::Cls
        );
        assert_eq!(pooling(&HeadMetadata { causal: true, ..family("qwen3", "bpe") }), Pooling::Last);
    }

    #[test]
    fn error_function_is_exact_to_2e_7() {
        for (x, expected) in [(0.0, 0.0), (0.5, 0.520_499_9), (1.0, 0.842_700_8), (-2.0, -0.995_322_3), (9.0, 1.0)] {
            assert!((erf(x) - expected).abs() < 3e-7, "erf({x}) = {}", erf(x));
        }
    }
}
