//! The output of an input, computed from the states of its tokens, which may come in pieces.

use crate::model::ModelError;
use crate::model::llama::ffi::CapturedHiddenStates;

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

/// The output of the first pieces of an input.
pub(super) enum PartialOutput {
    /// An embedding.
    Embedding(PooledStates),
    /// The state that the classification head reads.
    Logits(PooledStates),
    /// The states of some layers were not captured.
    NoHiddenStates,
    /// Hidden states.
    HiddenStates {
        /// Number of requested layers, multiplied by the number of values of a state.
        values_per_token: usize,
        /// `[token][layer][width]` values.
        values: Vec<f32>,
    },
}

/// Pooled states of the first tokens of an input.
pub(super) struct PooledStates {
    pooling: Pooling,
    tokens: usize,
    vector: Vec<f32>,
}

impl PartialOutput {
    /// Adds the next tokens. `state` returns the state of one of them, counted from 0; `captured` begins with their
    /// hidden states if these are requested.
    ///
    /// # Errors
    /// The error of `state`.
    pub(super) fn add_piece<'state>(
        &mut self,
        tokens: usize,
        state: impl Fn(usize) -> Result<&'state [f32], ModelError>,
        captured: &mut impl Iterator<Item = CapturedHiddenStates>,
    ) -> Result<(), ModelError> {
        match self {
            Self::Embedding(states) | Self::Logits(states) => states.add_piece(tokens, state),
            Self::NoHiddenStates => {
                captured.take(tokens).for_each(drop);
                Ok(())
            }
            Self::HiddenStates { values_per_token, values } => {
                let captured: Vec<_> = captured.take(tokens).collect();
                let is_complete = |states: &CapturedHiddenStates| states.values.len() == *values_per_token;
                if captured.len() < tokens || !captured.iter().all(is_complete) {
                    *self = Self::NoHiddenStates;
                    return Ok(());
                }
                values.extend(captured.into_iter().flat_map(|states| states.values));
                Ok(())
            }
        }
    }
}

impl PooledStates {
    pub(super) fn new(pooling: Pooling) -> Self {
        Self { pooling, tokens: 0, vector: Vec::new() }
    }

    fn add_piece<'state>(
        &mut self,
        tokens: usize,
        state: impl Fn(usize) -> Result<&'state [f32], ModelError>,
    ) -> Result<(), ModelError> {
        match self.pooling {
            _ if tokens == 0 => {}
            Pooling::Cls if self.tokens > 0 => {}
            Pooling::Cls => self.vector = state(0)?.to_vec(),
            Pooling::Last => self.vector = state(tokens - 1)?.to_vec(),
            Pooling::None => {
                for token in 0..tokens {
                    self.vector.extend_from_slice(state(token)?);
                }
            }
            Pooling::Mean => {
                for token in 0..tokens {
                    let values = state(token)?;
                    self.vector.resize(values.len(), 0.0);
                    for (sum, value) in self.vector.iter_mut().zip(values) {
                        *sum += value;
                    }
                }
            }
        }
        self.tokens += tokens;
        Ok(())
    }

    /// Returns the embedding; for [`Pooling::None`] the concatenated vectors of all tokens.
    pub(super) fn finish(mut self) -> Vec<f32> {
        if self.pooling == Pooling::Mean {
            let count = self.tokens as f32;
            self.vector.iter_mut().for_each(|value| *value /= count);
        }
        self.vector
    }
}

#[cfg(test)]
mod tests {
    use super::{PartialOutput, PooledStates, Pooling};
    use crate::model::ModelError;
    use crate::model::llama::ffi::CapturedHiddenStates;

    const STATES: [[f32; 2]; 5] = [[1.0, -1.0], [2.0, 0.0], [3.0, 5.0], [4.0, 1.0], [5.0, 0.0]];

    fn pooled(pooling: Pooling, piece_len: usize) -> Vec<f32> {
        let mut states = PooledStates::new(pooling);
        for piece in STATES.chunks(piece_len) {
            states.add_piece(piece.len(), |token| Ok(&piece[token][..])).unwrap();
        }
        states.finish()
    }

    #[test]
    fn pooling_does_not_depend_on_the_pieces() {
        for piece_len in 1..=STATES.len() {
            assert_eq!(pooled(Pooling::Mean, piece_len), [3.0, 1.0], "{piece_len}");
            assert_eq!(pooled(Pooling::Cls, piece_len), STATES[0], "{piece_len}");
            assert_eq!(pooled(Pooling::Last, piece_len), STATES[4], "{piece_len}");
            assert_eq!(pooled(Pooling::None, piece_len), STATES.concat(), "{piece_len}");
        }
    }

    #[test]
    fn hidden_states_of_pieces_are_joined_and_must_be_complete() {
        let mut output = PartialOutput::HiddenStates { values_per_token: 2, values: Vec::new() };
        let captured = |values: &[f32]| CapturedHiddenStates { layer_ids: vec![0], values: values.to_vec() };
        let no_state = |_: usize| -> Result<&'static [f32], ModelError> { Ok(&[]) };
        let mut first = STATES[..2].iter().map(|state| captured(state));
        output.add_piece(1, no_state, &mut first).unwrap();
        output.add_piece(1, no_state, &mut first).unwrap();
        let PartialOutput::HiddenStates { values, .. } = &output else { panic!("the kind of the output has changed") };
        assert_eq!(*values, STATES[..2].concat());
        for incomplete in [vec![captured(&STATES[2])], vec![captured(&STATES[2]), captured(&[1.0])]] {
            let mut output = PartialOutput::HiddenStates { values_per_token: 2, values: Vec::new() };
            output.add_piece(2, no_state, &mut incomplete.into_iter()).unwrap();
            assert!(matches!(output, PartialOutput::NoHiddenStates));
        }
    }
}
