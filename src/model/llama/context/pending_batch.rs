//! The tokens of the next decode, with the outputs that are requested for each.

use crate::events::TokenId;
use crate::model::ModelError;
use crate::model::llama::captures::TokenOutputs;
use crate::model::llama::ffi::{HiddenRequest, RowRequest};
use crate::model::llama::layer_set::LayerSet;
use crate::model::llama::ubatch;
use llama_cpp_2::DecodeError;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;

/// Return value of `llama_decode` when the memory for a graph is not available.
pub(super) const DECODE_OUT_OF_MEMORY: i32 = -2;

/// A batch that is being filled.
pub(super) struct PendingBatch {
    tokens: LlamaBatch<'static>,
    /// The sequence of each token.
    sequences: Vec<i32>,
    /// True for each token with logits.
    has_logits: Vec<bool>,
    requested: RequestedCaptures,
}

/// The requested captures of a batch, in the order of its tokens.
#[derive(Default)]
pub(super) struct RequestedCaptures {
    /// Index and length of each attention row.
    pub(super) attention: Vec<(usize, u32)>,
    /// Indexes of the tokens whose hidden states are captured, with their outputs.
    pub(super) hidden_states: Vec<(usize, TokenOutputs)>,
}

impl PendingBatch {
    /// Creates an empty batch with room for `size` tokens.
    pub(super) fn new(size: u32) -> Self {
        Self {
            tokens: LlamaBatch::new(size as usize, 1),
            sequences: Vec::new(),
            has_logits: Vec::new(),
            requested: RequestedCaptures::default(),
        }
    }

    /// Adds the token at `index` of a sequence, whose position in the model is `position`. Returns its index in the
    /// batch.
    ///
    /// # Errors
    /// [`ModelError::Decode`] if the batch is full.
    pub(super) fn add(
        &mut self,
        token: TokenId,
        index: u32,
        position: u32,
        sequence: i32,
        outputs: TokenOutputs,
    ) -> Result<usize, ModelError> {
        self.tokens
            .add(LlamaToken::new(token), position as i32, &[sequence], outputs.logits)
            .map_err(|error| ModelError::Decode(error.to_string()))?;
        let in_batch = self.sequences.len();
        self.sequences.push(sequence);
        self.has_logits.push(outputs.logits);
        if outputs.attention {
            self.requested.attention.push((in_batch, index + 1));
        }
        if outputs.has_hidden_states() {
            self.requested.hidden_states.push((in_batch, outputs));
        }
        Ok(in_batch)
    }

    /// Returns the requests for the captures, with the places of the tokens in the physical batches. The logit lens
    /// needs the states after `lens_layers`.
    pub(super) fn capture_requests(
        &self,
        ubatch_size: u32,
        has_multiple_streams: bool,
        lens_layers: LayerSet,
    ) -> (Vec<RowRequest>, Vec<HiddenRequest>) {
        let RequestedCaptures { attention, hidden_states } = &self.requested;
        if attention.is_empty() && hidden_states.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let positions = ubatch::ubatch_positions(&self.sequences, ubatch_size as usize, has_multiple_streams);
        let row = |&(index, row_len): &(usize, u32)| {
            let position = positions[index];
            RowRequest { ubatch: position.ubatch, token: position.token, stream: position.stream, row_len }
        };
        let rows = attention.iter().map(row).collect();
        if hidden_states.is_empty() {
            return (rows, Vec::new());
        }
        let columns = ubatch::columns(&positions, &self.has_logits);
        let state = |&(index, outputs): &(usize, TokenOutputs)| HiddenRequest {
            ubatch: positions[index].ubatch,
            column: columns[index],
            layers: if outputs.lens { outputs.hidden_states.union(lens_layers) } else { outputs.hidden_states },
        };
        (rows, hidden_states.iter().map(state).collect())
    }

    /// Decodes and empties the batch. Returns the captures that were requested, also if the decode fails.
    pub(super) fn decode(&mut self, llama: &mut LlamaContext<'_>) -> (Result<(), ModelError>, RequestedCaptures) {
        let result = llama.decode(&mut self.tokens).map_err(|error| match error {
            DecodeError::Unknown(DECODE_OUT_OF_MEMORY) => ModelError::OutOfMemory,
            other => ModelError::Decode(other.to_string()),
        });
        self.tokens.clear();
        self.sequences.clear();
        self.has_logits.clear();
        (result, std::mem::take(&mut self.requested))
    }
}
