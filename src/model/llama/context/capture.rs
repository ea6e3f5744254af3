//! Capture of attention rows and hidden states in a decode, and the probe that determines what a model supports.

use super::Context;
use crate::model::ModelError;
use crate::model::llama::attention_capture::AttentionCapture;
use crate::model::llama::attention_support::{AttentionSupport, UnsupportedAttention};
use crate::model::llama::captures::{AttentionRow, Decoded, NoHiddenStates, TokenOutputs};
use crate::model::llama::ffi::{self, CapturedRow, HiddenRequest, RowRequest, StateExtent};
use crate::model::llama::layer_set::LayerSet;
use crate::model::llama::lens::{HiddenStates, OutputHead, UnsupportedLens};
use crate::model::llama::state::StateLayout;
use crate::model::llama::ubatch;
use std::sync::Arc;

impl Context<'_> {
    /// Passes the requests of the batch to the callback.
    pub(super) fn request_captures(&mut self) {
        let Some(callback) = &mut self.callback else { return };
        let (mut rows, mut states) = (Vec::new(), Vec::new());
        if !self.requested.is_empty() || !self.requested_states.is_empty() {
            let positions =
                ubatch::ubatch_positions(&self.sequences, self.llama.n_ubatch() as usize, self.has_multiple_streams);
            rows.extend(self.requested.iter().map(|&(index, row_len)| {
                let position = positions[index];
                RowRequest { ubatch: position.ubatch, token: position.token, stream: position.stream, row_len }
            }));
            if !self.requested_states.is_empty() {
                // The lens does not need the state after the last layer: it gives the model's logits.
                let lens_layers = match &self.output_head {
                    Some(Ok(head)) => LayerSet::first(head.layers() - 1),
                    _ => LayerSet::default(),
                };
                let columns = ubatch::columns(&positions, &self.has_logits);
                let request = |&(index, outputs): &(usize, TokenOutputs)| HiddenRequest {
                    ubatch: positions[index].ubatch,
                    column: columns[index],
                    layers: if outputs.lens { outputs.hidden_states.union(lens_layers) } else { outputs.hidden_states },
                };
                states.extend(self.requested_states.iter().map(request));
            }
        }
        callback.request_rows(rows);
        callback.request_hidden_states(states);
    }

    /// Takes the captures of the decoded batch from the callback.
    pub(super) fn take_captures(&mut self) -> Decoded {
        let requested = std::mem::take(&mut self.requested);
        let requested_states = std::mem::take(&mut self.requested_states);
        let Some(callback) = &mut self.callback else { return Decoded::default() };
        let support = self.attention_support.as_ref().and_then(|support| support.as_ref().ok());
        let is_complete = |row: &CapturedRow| {
            let complete = support.is_none_or(|support| support.is_complete(row));
            if !complete {
                tracing::error!(layers = ?row.layer_ids, row.heads, "incomplete attention row dropped");
            }
            complete
        };
        let attention = requested
            .into_iter()
            .zip(callback.take())
            .filter(|(_, row)| is_complete(row))
            .map(|((index, row_len), CapturedRow { layer_ids, heads, values })| AttentionRow {
                index,
                row_len,
                layer_ids,
                heads,
                values,
            })
            .collect();
        let head = self.output_head.as_ref().and_then(|head| head.as_ref().ok());
        let captured = requested_states.into_iter().zip(callback.take_hidden_states());
        let hidden_states = captured
            .map(|((index, outputs), states)| HiddenStates::new(index, states, head.filter(|_| outputs.lens)))
            .collect();
        Decoded { attention, hidden_states }
    }

    /// Determines the layout of sequence states, and what can be captured, by decoding a token in sequence 0, which must
    /// be empty. Returns `None` for a model whose states cannot be validated.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub fn detect_layout(&mut self) -> Result<Option<StateLayout>, ModelError> {
        let captures = self.callback.is_some();
        if let Some(callback) = &mut self.callback {
            callback.request_output_head();
        }
        let all_layers = if captures { LayerSet::first(u16::MAX) } else { LayerSet::default() };
        let outputs = TokenOutputs { logits: captures, attention: captures, lens: false, hidden_states: all_layers };
        let index = self.add(0, 0, 0, outputs)?;
        let Decoded { attention: rows, mut hidden_states } = self.decode()?;
        if let Some(callback) = &mut self.callback {
            self.attention_support = Some(AttentionSupport::from_first_row(
                &self.architecture,
                rows.first(),
                callback.passes(),
                callback.has_uneven_heads(),
            ));
            let (operations, states) = (callback.take_output_head(), hidden_states.pop());
            let logits = self.llama.get_logits_ith(index as i32);
            self.hidden_layers =
                states.as_ref().and_then(HiddenStates::count_layers).ok_or(NoHiddenStates::UnnamedLayers);
            let head = OutputHead::probe(operations, states.as_ref(), logits, self.files);
            self.output_head = Some(head.map(Arc::new));
        }
        let layout = ffi::sequence_state(&self.llama, 0, StateExtent::Full)
            .and_then(|state| StateLayout::from_state(&state, self.max_sequence_tokens as usize, self.memory.window));
        self.clear(0);
        self.layout.clone_from(&layout);
        Ok(layout)
    }

    /// Returns the capture mode that [`Context::detect_layout`] observed.
    #[must_use]
    pub fn attention_capture(&mut self) -> AttentionCapture {
        match &mut self.callback {
            None => AttentionCapture::Off,
            Some(callback) => {
                if callback.used_flash_attention() {
                    AttentionCapture::Flash
                } else {
                    AttentionCapture::On
                }
            }
        }
    }

    /// Returns the attention support; `None` if capture is off or [`Context::detect_layout`] was not called.
    #[must_use]
    pub fn attention_support(&self) -> Option<&Result<AttentionSupport, UnsupportedAttention>> {
        self.attention_support.as_ref()
    }

    /// Returns the number of layers whose hidden states can be captured, as [`Context::detect_layout`] observed.
    ///
    /// # Errors
    /// The reason why there are none.
    pub fn hidden_layers(&self) -> Result<u16, NoHiddenStates> {
        self.hidden_layers
    }

    /// Returns the reason if the model has no logit lens; `None` if capture is off or [`Context::detect_layout`] was not called.
    #[must_use]
    pub fn lens_support(&self) -> Option<Result<(), UnsupportedLens>> {
        Some(self.output_head.as_ref()?.as_ref().map(|_| ()).map_err(Clone::clone))
    }
}
