//! Outputs that a decode is asked for, and those that it captured.

use super::lens::HiddenStates;

/// Outputs of the decode of a token, besides its keys and values.
#[derive(Debug, Clone, Copy, Default)]
pub struct TokenOutputs {
    /// Logits of the next token.
    pub logits: bool,
    /// The attention row of the token.
    pub attention: bool,
    /// The hidden states of the token.
    pub hidden_states: bool,
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
