//! The logit lens: the logits that the output head gives for the hidden state after each layer.
//!
//! Applying the head to intermediate states was described by nostalgebraist, "interpreting GPT: the logit lens" (2020). The
//! operations of the head are read from llama.cpp's graph, and its weights from the model's file. When a context is
//! created, the logits that this gives for the state after the last layer are compared with the model's; a model with a
//! difference is refused. Only the logits of few tokens are computed: for all, each layer would cost as much as the head.

use super::ffi::CapturedHiddenStates;
use super::ffi::output_head::{HeadOperation, HeadOperations};
use super::gguf::{GgufFile, RowReader};
use super::weights::WeightFile;
use crate::events::{LogitLens, TokenId};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Maximum values of a norm's or a bias's tensor.
const MAX_VALUES: usize = 1 << 24;
/// Maximum values of the rows that are kept in memory.
const MAX_KEPT_VALUES: usize = 4 << 20;
/// Maximum difference between the lens and the model after the last layer, relative to the largest logit. llama.cpp
/// rounds the hidden state to 8 bits if the weights of the head are quantized.
const TOLERANCE: f32 = 0.02;

/// The reason why a model has no logit lens.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum UnsupportedLens {
    /// The graph names no outputs of layers, or no logits.
    #[error("llama.cpp does not name the outputs of its layers")]
    NoLayers,
    /// An operation after the layers is not known here.
    #[error("its logits are computed from its layers with the operation {0}, which the lens does not support")]
    Operation(String),
    /// The weights of the head cannot be read.
    #[error("the weights of its output head cannot be read: {0}")]
    Weights(String),
    /// The result differs from the model's logits.
    #[error("the logits that were computed from its last layer differ from its own by {0}")]
    Inaccurate(f32),
}

/// The output head of a model.
#[derive(Debug)]
pub struct OutputHead {
    /// Operations before the projection.
    before: Vec<VectorOperation>,
    projection: Projection,
    /// Operations after the projection.
    after: Vec<LogitOperation>,
    /// Number of layers.
    layers: u16,
}

/// An operation on a hidden state.
#[derive(Debug)]
enum VectorOperation {
    RmsNorm { epsilon: f32 },
    LayerNorm { epsilon: f32 },
    Multiply(Vec<f32>),
    Add(Vec<f32>),
    Scale { factor: f32, offset: f32 },
    Tanh,
}

/// An operation on the logit of a token.
#[derive(Debug)]
enum LogitOperation {
    /// Values by token, or one for all.
    Multiply(Vec<f32>),
    /// Values by token, or one for all.
    Add(Vec<f32>),
    Scale {
        factor: f32,
        offset: f32,
    },
    Tanh,
}

/// The matrix with a row per token of the vocabulary.
#[derive(Debug)]
struct Projection {
    reader: RowReader,
    /// Rows that were read.
    kept: Mutex<HashMap<TokenId, Arc<[f32]>>>,
}

impl Projection {
    /// Returns the row of a token.
    fn row(&self, token: TokenId) -> io::Result<Arc<[f32]>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(row) = kept.get(&token) {
            return Ok(Arc::clone(row));
        }
        let index = usize::try_from(token).map_err(|_| io::Error::other("the token has no row"))?;
        let row: Arc<[f32]> = self.reader.row(index)?.into();
        if (kept.len() + 1) * row.len() > MAX_KEPT_VALUES {
            kept.clear();
        }
        kept.insert(token, Arc::clone(&row));
        Ok(row)
    }
}

impl OutputHead {
    /// Reads the weights of a head from the files of a model.
    pub(super) fn read<'a>(
        operations: &HeadOperations,
        files: impl Iterator<Item = &'a Path>,
    ) -> Result<Self, UnsupportedLens> {
        let unreadable = |error: io::Error| UnsupportedLens::Weights(error.to_string());
        let files = files.map(GgufFile::open).collect::<Result<Vec<_>, _>>();
        let files = files.map_err(|error| UnsupportedLens::Weights(error.to_string()))?;
        let missing = |name: &str| UnsupportedLens::Weights(format!("the file has no tensor {name}"));
        let values = |name: &str| {
            let found = files.iter().find_map(|file| file.tensor(name, MAX_VALUES).transpose());
            found.ok_or_else(|| missing(name))?.map(|matrix| matrix.values).map_err(unreadable)
        };
        let (mut before, mut after) = (Vec::new(), Vec::new());
        let mut projection = None;
        for operation in &operations.operations {
            let is_logit = projection.is_some();
            match operation {
                HeadOperation::Project { tensor } if !is_logit => {
                    let found = files.iter().find_map(|file| file.rows(tensor).transpose());
                    let reader = found.ok_or_else(|| missing(tensor))?.map_err(unreadable)?;
                    projection = Some(Projection { reader, kept: Mutex::default() });
                }
                HeadOperation::Multiply { tensor } if is_logit => after.push(LogitOperation::Multiply(values(tensor)?)),
                HeadOperation::Add { tensor } if is_logit => after.push(LogitOperation::Add(values(tensor)?)),
                &HeadOperation::Scale { factor, offset } if is_logit => {
                    after.push(LogitOperation::Scale { factor, offset });
                }
                HeadOperation::Tanh if is_logit => after.push(LogitOperation::Tanh),
                HeadOperation::Multiply { tensor } => before.push(VectorOperation::Multiply(values(tensor)?)),
                HeadOperation::Add { tensor } => before.push(VectorOperation::Add(values(tensor)?)),
                &HeadOperation::Scale { factor, offset } => before.push(VectorOperation::Scale { factor, offset }),
                HeadOperation::Tanh => before.push(VectorOperation::Tanh),
                &HeadOperation::RmsNorm { epsilon } if !is_logit => before.push(VectorOperation::RmsNorm { epsilon }),
                &HeadOperation::LayerNorm { epsilon } if !is_logit => {
                    before.push(VectorOperation::LayerNorm { epsilon });
                }
                other => return Err(UnsupportedLens::Operation(format!("{other:?} after the projection"))),
            }
        }
        let projection = projection.ok_or_else(|| UnsupportedLens::Operation("no projection".into()))?;
        let width = projection.reader.columns();
        let fits = |operation: &VectorOperation| match operation {
            VectorOperation::Multiply(values) | VectorOperation::Add(values) => values.len() == width,
            _ => true,
        };
        let tokens = projection.reader.rows();
        let fits_logits = |operation: &LogitOperation| match operation {
            LogitOperation::Multiply(values) | LogitOperation::Add(values) => [1, tokens].contains(&values.len()),
            _ => true,
        };
        if !before.iter().all(fits) || !after.iter().all(fits_logits) {
            return Err(UnsupportedLens::Weights("the tensors differ in size".into()));
        }
        Ok(Self { before, projection, after, layers: operations.layer + 1 })
    }

    /// Reads the output head of a model, and checks it with the hidden states and the logits of one token.
    pub(super) fn probe(
        operations: Option<Result<HeadOperations, String>>,
        states: Option<&HiddenStates>,
        logits: &[f32],
        files: &[WeightFile],
    ) -> Result<Self, UnsupportedLens> {
        let operations = operations.ok_or(UnsupportedLens::NoLayers)?.map_err(UnsupportedLens::Operation)?;
        let head = Self::read(&operations, files.iter().map(WeightFile::path))?;
        let states = states.filter(|states| states.count_layers() == Some(head.layers));
        let last = states.and_then(|states| states.state(head.layers - 1));
        // The states of all layers have the width of the last.
        let last = last.filter(|last| last.len() == head.projection.reader.columns());
        head.check(last.ok_or(UnsupportedLens::NoLayers)?, logits)?;
        Ok(head)
    }

    /// Returns the number of layers.
    pub(super) fn layers(&self) -> u16 {
        self.layers
    }

    /// Compares the logits for a state after the last layer with the model's.
    pub(super) fn check(&self, last: &[f32], logits: &[f32]) -> Result<(), UnsupportedLens> {
        const COMPARED: usize = 32;
        let unreadable = |error: io::Error| UnsupportedLens::Weights(error.to_string());
        let step = (logits.len() / COMPARED).max(1);
        let tokens: Vec<TokenId> = (0..logits.len()).step_by(step).map(|token| token as TokenId).collect();
        let rows = self.rows(&tokens).map_err(unreadable)?;
        let computed = self.logits(last, &tokens, &rows);
        let expected = tokens.iter().map(|&token| logits[token as usize]);
        let largest = expected.clone().fold(1.0, |largest: f32, logit| largest.max(logit.abs()));
        let differences = computed.iter().zip(expected).map(|(computed, expected)| (computed - expected).abs());
        // A difference that is not a number is the largest.
        let difference = differences.max_by(f32::total_cmp).unwrap_or(f32::NAN);
        if difference <= TOLERANCE * largest { Ok(()) } else { Err(UnsupportedLens::Inaccurate(difference)) }
    }

    fn rows(&self, tokens: &[TokenId]) -> io::Result<Vec<Arc<[f32]>>> {
        tokens.iter().map(|&token| self.projection.row(token)).collect()
    }

    /// Returns the logits of `tokens`, whose rows are `rows`, for a hidden state.
    fn logits(&self, state: &[f32], tokens: &[TokenId], rows: &[Arc<[f32]>]) -> Vec<f32> {
        let mut state = state.to_vec();
        self.before.iter().for_each(|operation| operation.apply(&mut state));
        let logit = |(&token, row): (&TokenId, &Arc<[f32]>)| {
            let product = dot(row, &state);
            self.after.iter().fold(product, |logit, operation| operation.apply(logit, token))
        };
        tokens.iter().zip(rows).map(logit).collect()
    }
}

impl VectorOperation {
    fn apply(&self, state: &mut [f32]) {
        let count = state.len() as f32;
        match self {
            Self::RmsNorm { epsilon } => {
                let mean_square = dot(state, state) / count;
                let factor = (mean_square + epsilon).sqrt().recip();
                state.iter_mut().for_each(|value| *value *= factor);
            }
            Self::LayerNorm { epsilon } => {
                let mean = state.iter().sum::<f32>() / count;
                state.iter_mut().for_each(|value| *value -= mean);
                let variance = dot(state, state) / count;
                let factor = (variance + epsilon).sqrt().recip();
                state.iter_mut().for_each(|value| *value *= factor);
            }
            Self::Multiply(factors) => state.iter_mut().zip(factors).for_each(|(value, factor)| *value *= factor),
            Self::Add(addends) => state.iter_mut().zip(addends).for_each(|(value, addend)| *value += addend),
            Self::Scale { factor, offset } => state.iter_mut().for_each(|value| *value = *value * factor + offset),
            Self::Tanh => state.iter_mut().for_each(|value| *value = value.tanh()),
        }
    }
}

impl LogitOperation {
    fn apply(&self, logit: f32, token: TokenId) -> f32 {
        let of_token = |values: &[f32]| if values.len() == 1 { values[0] } else { values[token as usize] };
        match self {
            Self::Multiply(factors) => logit * of_token(factors),
            Self::Add(addends) => logit + of_token(addends),
            Self::Scale { factor, offset } => logit * factor + offset,
            Self::Tanh => logit.tanh(),
        }
    }
}

/// Returns the dot product. Several sums run in parallel, because the compiler does not reorder a single one.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    const LANES: usize = 16;
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0_f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

/// The captured hidden states of a token.
#[derive(Debug, Clone)]
pub struct HiddenStates {
    /// Index of the token in the batch.
    pub index: usize,
    states: CapturedHiddenStates,
    /// The head of the logit lens, if it was requested.
    head: Option<Arc<OutputHead>>,
}

impl HiddenStates {
    pub(super) fn new(index: usize, states: CapturedHiddenStates, head: Option<&Arc<OutputHead>>) -> Self {
        Self { index, states, head: head.cloned() }
    }

    /// Returns the number of layers if the states of all layers, from the first to the last, were captured.
    pub(super) fn count_layers(&self) -> Option<u16> {
        let CapturedHiddenStates { layer_ids, values } = &self.states;
        let is_complete = !values.is_empty() && layer_ids.iter().copied().eq(0..layer_ids.len() as u16);
        is_complete.then_some(layer_ids.len() as u16)
    }

    /// Returns the hidden state after a layer, if it was captured.
    #[must_use]
    pub fn state(&self, layer: u16) -> Option<&[f32]> {
        let CapturedHiddenStates { layer_ids, values } = &self.states;
        let index = layer_ids.binary_search(&layer).ok()?;
        values.chunks_exact(values.len() / layer_ids.len()).nth(index)
    }

    /// Returns true if the logit lens was requested.
    #[must_use]
    pub fn has_lens(&self) -> bool {
        self.head.is_some()
    }

    /// Returns the logits of `tokens` after every layer; `last` are those after the last layer.
    ///
    /// # Errors
    /// The model's file cannot be read, a layer was not captured, or a logit is not a number.
    pub fn lens(&self, tokens: &[TokenId], last: Vec<f32>) -> io::Result<LogitLens> {
        let head = self.head.as_ref().ok_or_else(|| io::Error::other("the lens was not requested"))?;
        let layers = 0..head.layers - 1;
        let states: Option<Vec<&[f32]>> = layers.clone().map(|layer| self.state(layer)).collect();
        let states = states
            .ok_or_else(|| io::Error::other(format!("only the layers {:?} were captured", self.states.layer_ids)))?;
        let rows = head.rows(tokens)?;
        let before = states.into_iter().map(|state| head.logits(state, tokens, &rows));
        let round = |layer: Vec<f32>| layer.into_iter().map(|logit| LogitLens::round(logit).to_f32()).collect();
        let logits: Vec<Vec<f32>> = before.chain([last]).map(round).collect();
        if logits.iter().flatten().any(|logit| logit.is_nan()) {
            return Err(io::Error::other("a logit is not a number"));
        }
        Ok(LogitLens { layers: layers.chain([head.layers - 1]).collect(), logits })
    }
}
