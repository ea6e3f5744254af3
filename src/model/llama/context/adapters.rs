//! The adapters that a context applies.

use super::Context;
use crate::model::ModelError;
use crate::model::llama::{AdapterSet, Adapters, TokenOutputs};

impl Context<'_> {
    /// Returns the model's LoRA adapters and control vectors.
    #[must_use]
    pub fn adapters(&self) -> &Adapters {
        self.adapters.known()
    }

    /// Activates exactly these LoRA adapters and control vectors from the next decode on, for all sequences. Does
    /// nothing if they are active already.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub fn set_adapters(&mut self, set: &AdapterSet) -> Result<(), ModelError> {
        self.adapters.apply(set, &mut self.llama)
    }

    /// Checks that the loaded control vectors can change the output of the model: not all architectures of llama.cpp
    /// add them. Decodes a token in sequence 0, which must be empty.
    ///
    /// # Errors
    /// [`ModelError::ControlVector`] and [`ModelError::Decode`].
    pub fn check_control_vectors(&mut self) -> Result<(), ModelError> {
        let vectors = self.adapters.known().control_vectors();
        if vectors.as_slice().is_empty() {
            return Ok(());
        }
        let plain = self.probe_logits()?;
        vectors.apply_probe(&mut self.llama)?;
        let probed = self.probe_logits()?;
        vectors.apply(&[], &mut self.llama)?;
        if plain == probed { Err(vectors.unsupported(&self.architecture)) } else { Ok(()) }
    }

    /// Returns the logits after token 0, decoded in the empty sequence 0.
    fn probe_logits(&mut self) -> Result<Vec<f32>, ModelError> {
        let index = self.add(0, 0, 0, TokenOutputs { logits: true, ..TokenOutputs::default() })?;
        self.decode()?;
        let logits = self.logits(index).to_vec();
        self.clear(0);
        Ok(logits)
    }
}
