//! Decoding of embeddings, which are the tokens of an image.

use super::Context;
use super::pending_batch::DECODE_OUT_OF_MEMORY;
use crate::model::ModelError;
use crate::model::llama::ffi::images::{self, Embeddings};
use crate::model::llama::image_spans::ImageSpan;
use crate::model::llama::images::EmbeddingRows;

/// Embeddings of consecutive tokens of a sequence, which are decoded without other tokens.
pub(super) struct EmbeddingBatch {
    width: usize,
    rows: Vec<f32>,
    /// Positions, one section after the other.
    positions: Vec<i32>,
    sequence: i32,
    /// Nonzero for each token whose logits are requested.
    outputs: Vec<i8>,
    non_causal: bool,
    /// The image, if the sequence cannot be cut within it.
    span: Option<ImageSpan>,
}

impl Context<'_> {
    /// Sets embeddings, of the tokens from `index` of a sequence on, that the next decode processes in place of the
    /// batch, which must be empty. `outputs` has one entry per token: true requests its logits. Attention is not
    /// captured.
    ///
    /// # Errors
    /// [`ModelError::Decode`] for a part of an image that must be decoded as a whole.
    pub fn set_embeddings(
        &mut self,
        rows: EmbeddingRows<'_>,
        index: u32,
        sequence: i32,
        outputs: &[bool],
    ) -> Result<(), ModelError> {
        if rows.is_divided() || outputs.len() != rows.count() || outputs.is_empty() {
            return Err(ModelError::Decode("the tokens of an image must be decoded together".into()));
        }
        let start = index - rows.offset() as u32;
        let base = self.position(sequence, start);
        let by_token: Vec<_> = rows.positions(base).collect();
        let section = |section: usize| by_token.iter().map(move |sections| sections[section] as i32);
        self.embeddings = Some(EmbeddingBatch {
            width: rows.values().len() / rows.count(),
            rows: rows.values().to_vec(),
            positions: (0..self.position_sections).flat_map(section).collect(),
            sequence,
            outputs: outputs.iter().copied().map(i8::from).collect(),
            non_causal: rows.is_undivided(),
            span: rows.span(start),
        });
        Ok(())
    }

    pub(super) fn decode_embeddings(&mut self, batch: EmbeddingBatch) -> Result<(), ModelError> {
        let EmbeddingBatch { width, mut rows, mut positions, sequence, mut outputs, non_causal, span } = batch;
        if let Some(callback) = self.llama.callback() {
            callback.request_rows(Vec::new());
            callback.request_hidden_states(Vec::new());
        }
        let embeddings = Embeddings {
            width,
            rows: &mut rows,
            positions: &mut positions,
            sequence,
            outputs: &mut outputs,
            non_causal,
        };
        match images::decode_embeddings(&mut self.llama, self.position_sections, embeddings) {
            0 => {
                if let Some(span) = span {
                    self.metadata[sequence as usize].images.record(span);
                }
                Ok(())
            }
            DECODE_OUT_OF_MEMORY => Err(ModelError::OutOfMemory),
            code => Err(ModelError::Decode(format!("the embeddings of an image were rejected with code {code}"))),
        }
    }
}
