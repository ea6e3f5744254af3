//! Hidden states of tokens after each layer, copied while a graph runs.
//!
//! llama.cpp names the output of a layer `l_out-` with the layer's number. Its columns are the tokens of the physical
//! batch, except after the last layer, where tokens without logits may be left out.

use super::name_of;
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;

/// Prefix of the name of a layer's output, before the layer's number.
const LAYER_OUTPUT: &[u8] = b"l_out-";

/// A token whose hidden states are captured in the current decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenRequest {
    /// Physical batch within the decode.
    pub ubatch: u32,
    /// Index of the token within that physical batch.
    pub column: u32,
}

/// The hidden states of one token.
#[derive(Debug, Clone, Default)]
pub struct CapturedHiddenStates {
    /// Layers, in order.
    pub layer_ids: Vec<u16>,
    /// `[layer][width]` values.
    pub values: Vec<f32>,
}

/// Capture of hidden states.
#[derive(Debug, Default)]
pub(super) struct HiddenCapture {
    requested: Vec<HiddenRequest>,
    captured: Vec<CapturedHiddenStates>,
    ubatch: u32,
    /// Layer of the last layer output.
    last_layer: Option<u16>,
    /// Number of the layers that are captured, from the first on.
    layers: u16,
}

impl HiddenCapture {
    /// Sets the tokens that the next decode captures, and the number of layers.
    pub fn request(&mut self, requested: Vec<HiddenRequest>, layers: u16) {
        self.captured.clear();
        self.captured.resize_with(requested.len(), CapturedHiddenStates::default);
        self.requested = requested;
        self.layers = layers;
        self.ubatch = 0;
        self.last_layer = None;
    }

    /// Returns true if the current decode captures nothing.
    pub fn is_idle(&self) -> bool {
        self.requested.is_empty()
    }

    /// Returns true if the data of a node, which is about to be computed, is needed.
    pub fn needs(&mut self, node: &sys::ggml_tensor) -> bool {
        let Some(layer) = layer_of_output(node).filter(|_| !self.is_idle()) else { return false };
        if self.last_layer.is_some_and(|last| layer <= last) {
            self.ubatch += 1;
        }
        self.last_layer = Some(layer);
        layer < self.layers && self.requested.iter().any(|token| token.ubatch == self.ubatch)
    }

    /// Copies the requested columns of a computed node if it is a layer's output.
    pub fn capture(&mut self, node: &sys::ggml_tensor) {
        let Some(layer) = layer_of_output(node) else { return };
        let [width, columns, ..] = node.ne.map(|extent| usize::try_from(extent).unwrap_or(0));
        let is_plain = node.type_ == sys::GGML_TYPE_F32 && node.nb[0] == size_of::<f32>();
        for (token, captured) in self.requested.iter().zip(&mut self.captured) {
            let column = token.column as usize;
            if token.ubatch != self.ubatch || column >= columns || !is_plain {
                continue;
            }
            captured.layer_ids.push(layer);
            let start = captured.values.len();
            captured.values.resize(start + width, 0.0);
            let target = captured.values[start..].as_mut_ptr().cast::<c_void>();
            // SAFETY: the column lies within the tensor, whose values are contiguous 32-bit floats; `target` has room
            // for `width` of them. The node was computed before this call.
            unsafe { sys::ggml_backend_tensor_get(node, target, column * node.nb[1], width * size_of::<f32>()) };
        }
    }

    /// Removes and returns the captured states, in the order of their requests.
    pub fn take(&mut self) -> Vec<CapturedHiddenStates> {
        self.requested.clear();
        std::mem::take(&mut self.captured)
    }
}

/// Returns the name of a tensor, or of the original if ggml's scheduler has copied it to another device: the name of a
/// copy is `device#original#number`.
pub(super) fn original_name(tensor: &sys::ggml_tensor) -> &[u8] {
    let name = name_of(tensor);
    name.split(|&byte| byte == b'#').nth(1).unwrap_or(name)
}

/// Returns the layer whose output the node is.
pub(super) fn layer_of_output(node: &sys::ggml_tensor) -> Option<u16> {
    let number = original_name(node).strip_prefix(LAYER_OUTPUT)?;
    std::str::from_utf8(number).ok()?.parse().ok()
}
