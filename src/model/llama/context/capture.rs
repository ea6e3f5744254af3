//! Capture of attention rows and hidden states in a decode, and the probe that determines what a model supports.

use super::Context;
use super::pending_batch::RequestedCaptures;
use crate::model::ModelError;
use crate::model::llama::attention_capture::AttentionCapture;
use crate::model::llama::attention_support::{AttentionSupport, UnsupportedAttention};
use crate::model::llama::captures::{AttentionRow, Decoded, NoHiddenStates, TokenOutputs};
use crate::model::llama::ffi::CapturedRow;
use crate::model::llama::ffi::sequence_state::{StateExtent, sequence_state};
use crate::model::llama::layer_set::LayerSet;
use crate::model::llama::lens::{HiddenStates, OutputHead, UnsupportedLens};
use crate::model::llama::state::StateLayout;
use std::sync::Arc;

/// The properties that [`Context::probe_capabilities`] has found. The default describes a context that was not probed.
#[derive(Debug, Clone)]
pub struct ContextCapabilities {
    /// Layout of saved states; `None` if they cannot be validated.
    pub layout: Option<StateLayout>,
    /// Capture mode that takes effect; never [`AttentionCapture::Auto`].
    pub attention_capture: AttentionCapture,
    /// Attention that can be captured from the model; `None` if capture is off.
    pub attention_support: Option<Result<AttentionSupport, UnsupportedAttention>>,
    /// The reason if the model has no logit lens; `None` if capture is off.
    pub lens_support: Option<Result<(), UnsupportedLens>>,
    /// Number of layers whose hidden states can be captured.
    pub hidden_layers: Result<u16, NoHiddenStates>,
}

impl Default for ContextCapabilities {
    fn default() -> Self {
        Self {
            layout: None,
            attention_capture: AttentionCapture::Off,
            attention_support: None,
            lens_support: None,
            hidden_layers: Err(NoHiddenStates::CaptureOff),
        }
    }
}

impl Context<'_> {
    /// Passes the requests of the batch to the callback.
    pub(super) fn request_captures(&mut self) {
        let has_multiple_streams = self.has_multiple_streams();
        let ubatch_size = self.llama.n_ubatch();
        let Some(callback) = self.llama.callback() else { return };
        // The lens does not need the state after the last layer: it gives the model's logits.
        let lens_layers =
            self.output_head.as_ref().map_or(LayerSet::default(), |head| LayerSet::first(head.layers() - 1));
        let (rows, states) = self.batch.capture_requests(ubatch_size, has_multiple_streams, lens_layers);
        callback.request_rows(rows);
        callback.request_hidden_states(states);
    }

    /// Takes the captures of the decoded batch from the callback.
    pub(super) fn take_captures(&mut self, requested: RequestedCaptures) -> Decoded {
        let Some(callback) = self.llama.callback() else { return Decoded::default() };
        let support = self.capabilities.attention_support.as_ref().and_then(|support| support.as_ref().ok());
        let is_complete = |row: &CapturedRow| {
            let complete = support.is_none_or(|support| support.is_complete(row));
            if !complete {
                tracing::error!(layers = ?row.layer_ids, row.heads, "incomplete attention row dropped");
            }
            complete
        };
        let attention = requested
            .attention
            .into_iter()
            .zip(callback.take_rows())
            .filter(|(_, row)| is_complete(row))
            .map(|((index, row_len), CapturedRow { layer_ids, heads, values })| AttentionRow {
                index,
                row_len,
                layer_ids,
                heads,
                values,
            })
            .collect();
        let head = self.output_head.as_ref();
        let captured = requested.hidden_states.into_iter().zip(callback.take_hidden_states());
        let hidden_states = captured
            .map(|((index, outputs), states)| HiddenStates::new(index, states, head.filter(|_| outputs.lens)))
            .collect();
        Decoded { attention, hidden_states }
    }

    /// Determines the layout of sequence states, and what can be captured, by decoding a token in sequence 0, which must
    /// be empty.
    ///
    /// # Errors
    /// [`ModelError::Decode`].
    pub fn probe_capabilities(&mut self) -> Result<ContextCapabilities, ModelError> {
        let callback = self.llama.callback();
        let captures = callback.is_some();
        if let Some(callback) = callback {
            callback.request_output_head();
        }
        let all_layers = if captures { LayerSet::first(u16::MAX) } else { LayerSet::default() };
        let outputs = TokenOutputs { logits: captures, attention: captures, lens: false, hidden_states: all_layers };
        let index = self.add(0, 0, 0, outputs)?;
        let Decoded { attention: rows, mut hidden_states } = self.decode()?;
        let mut capabilities = ContextCapabilities::default();
        if let Some(callback) = self.llama.callback() {
            capabilities.attention_capture =
                if callback.used_flash_attention() { AttentionCapture::Flash } else { AttentionCapture::On };
            capabilities.attention_support = Some(AttentionSupport::from_first_row(
                &self.architecture,
                rows.first(),
                callback.passes(),
                callback.has_uneven_heads(),
            ));
            let (operations, states) = (callback.take_output_head(), hidden_states.pop());
            let logits = self.llama.get_logits_ith(index as i32);
            capabilities.hidden_layers =
                states.as_ref().and_then(HiddenStates::count_layers).ok_or(NoHiddenStates::UnnamedLayers);
            let head = OutputHead::probe(operations, states.as_ref(), logits, self.files);
            capabilities.lens_support = Some(head.map(|head| self.output_head = Some(Arc::new(head))));
        }
        capabilities.layout = sequence_state(&self.llama, 0, StateExtent::Full)
            .and_then(|state| StateLayout::from_state(&state, self.max_sequence_tokens as usize, self.memory.window));
        self.clear(0);
        self.capabilities.clone_from(&capabilities);
        Ok(capabilities)
    }
}
