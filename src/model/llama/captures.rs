//! Outputs that a decode is asked for, and those that it captured.

use super::layer_set::LayerSet;
use super::lens::HiddenStates;

/// Outputs of the decode of a token, besides its keys and values.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenOutputs {
    /// Logits of the next token.
    pub logits: bool,
    /// The attention row of the token.
    pub attention: bool,
    /// The hidden states that the logit lens needs.
    pub lens: bool,
    /// Layers after which the hidden state of the token is captured. Only tokens with logits have a state after the last
    /// layer.
    pub hidden_states: LayerSet,
}

impl TokenOutputs {
    /// Returns true if hidden states of the token are captured.
    pub(super) fn has_hidden_states(&self) -> bool {
        self.lens || !self.hidden_states.is_empty()
    }
}

/// The reason why hidden states cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoHiddenStates {
    /// The context has no callback.
    #[error("the server was started with --attention off; start it with --attention auto or on")]
    CaptureOff,
    /// The graph does not name the outputs of all layers.
    #[error("llama.cpp does not name the outputs of the layers of this model")]
    UnnamedLayers,
    /// The events come from a recording.
    #[error("a recorded run has none")]
    Recorded,
}

/// The captures of a decode, in the order of the tokens.
#[derive(Debug, Default)]
pub struct Decoded {
    /// Attention rows; incomplete ones are left out.
    pub attention: Vec<AttentionRow>,
    /// Hidden states.
    pub hidden_states: Vec<HiddenStates>,
}

/// A captured attention row.
#[derive(Debug, Clone)]
pub struct AttentionRow {
    /// Index of the query token in the batch.
    pub index: usize,
    /// Number of positions attended to.
    pub row_len: u32,
    /// Layers with scores, in order.
    pub layer_ids: Vec<u16>,
    /// Heads per layer.
    pub heads: u16,
    /// `[layer][head][row_len]` probabilities.
    pub values: Vec<f32>,
}
