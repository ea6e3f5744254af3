//! Hidden states of tokens after each layer, copied while a graph runs.
//!
//! llama.cpp names the output of a layer `l_out-` with the layer's number. Its columns are the tokens of the physical
//! batch, except after the last layer, where tokens without logits may be left out.

use super::name_of;
use crate::model::llama::layer_set::LayerSet;
use crate::model::llama::ubatch::Column;
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;

/// Prefix of the name of a layer's output, before the layer's number.
const LAYER_OUTPUT: &[u8] = b"l_out-";

/// Maximum columns that are copied for each requested one, to copy all of them at once.
const MAX_COLUMNS_PER_TOKEN: usize = 8;

/// A token whose hidden states are captured in the current decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenRequest {
    /// Physical batch within the decode.
    pub ubatch: u32,
    /// Its column in nodes of that physical batch.
    pub column: Column,
    /// Layers whose states are captured.
    pub layers: LayerSet,
}

impl HiddenRequest {
    /// Returns the column of the token in a node with this number of columns: all tokens, or those with logits.
    fn column_of(&self, columns: usize) -> Option<usize> {
        let Column { column, tokens, output, outputs } = self.column;
        let found =
            if columns == tokens as usize { Some(column) } else { output.filter(|_| columns == outputs as usize) };
        found.map(|column| column as usize)
    }
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
    /// Columns of the current node.
    buffer: Vec<f32>,
}

impl HiddenCapture {
    /// Sets the tokens that the next decode captures.
    pub fn request(&mut self, requested: Vec<HiddenRequest>) {
        self.captured.clear();
        self.captured.resize_with(requested.len(), CapturedHiddenStates::default);
        self.requested = requested;
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
        // A layer with a control vector may be named twice, before and after the vector. The first layer has none.
        if self.last_layer.is_some_and(|last| layer < last || layer == 0) {
            self.ubatch += 1;
        }
        self.last_layer = Some(layer);
        self.requested.iter().any(|token| token.ubatch == self.ubatch && token.layers.contains(layer))
    }

    /// Copies the requested columns of a computed node if it is a layer's output.
    pub fn capture(&mut self, node: &sys::ggml_tensor) {
        let Some(layer) = layer_of_output(node) else { return };
        let [width, columns, planes, cubes] = node.ne.map(|extent| usize::try_from(extent).unwrap_or(0));
        let is_plain = node.type_ == sys::GGML_TYPE_F32 && node.nb[0] == size_of::<f32>() && planes * cubes == 1;
        let Self { requested, captured, ubatch, buffer, .. } = self;
        let column_of = |token: &HiddenRequest| {
            let is_captured = is_plain && token.ubatch == *ubatch && token.layers.contains(layer);
            is_captured.then(|| token.column_of(columns)).flatten()
        };
        let wanted = || requested.iter().filter_map(column_of);
        let (Some(first), Some(last)) = (wanted().min(), wanted().max()) else { return };
        let is_dense = last - first < MAX_COLUMNS_PER_TOKEN * wanted().count();
        let is_contiguous = node.nb[1] == width * size_of::<f32>();
        // Each copy from a GPU takes as long as one of some hundred kilobytes.
        let at_once = if is_dense && is_contiguous { last - first + 1 } else { 1 };
        let mut read = usize::MAX;
        for (token, captured) in requested.iter().zip(captured) {
            let Some(column) = column_of(token) else { continue };
            let start = if at_once == 1 { column } else { first };
            if start != read {
                read_columns(node, start, at_once, width, buffer);
                read = start;
            }
            if captured.layer_ids.last() == Some(&layer) {
                captured.values.truncate(captured.values.len() - width);
            } else {
                captured.layer_ids.push(layer);
            }
            captured.values.extend_from_slice(&buffer[(column - start) * width..][..width]);
        }
    }

    /// Removes and returns the captured states, in the order of their requests.
    pub fn take(&mut self) -> Vec<CapturedHiddenStates> {
        self.requested.clear();
        std::mem::take(&mut self.captured)
    }
}

/// Copies columns of a computed node with plain 32-bit floats. The node has them, and they are contiguous if there are
/// several.
fn read_columns(node: &sys::ggml_tensor, first: usize, count: usize, width: usize, buffer: &mut Vec<f32>) {
    buffer.resize(count * width, 0.0);
    let target = buffer.as_mut_ptr().cast::<c_void>();
    // SAFETY: the columns lie within the tensor, and the buffer has room for them. The node was computed before this
    // call.
    unsafe { sys::ggml_backend_tensor_get(node, target, first * node.nb[1], size_of_val(buffer.as_slice())) };
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
