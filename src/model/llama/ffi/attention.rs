//! Capture of attention rows while a graph runs.

use super::attention_rows::{CapturedRow, Extents, RowGraph, RowTarget};
use super::name_of;
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;
use std::ptr::NonNull;

/// Prefix of the name of the node with attention probabilities, before the layer's number.
const PROBABILITIES: &[u8] = b"kq_soft_max-";

/// A query row to capture in the current decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRequest {
    /// Physical batch within the decode.
    pub ubatch: u32,
    /// Index of the token within its sequence's part of that physical batch.
    pub token: u32,
    /// Index of the sequence's stream within that physical batch.
    pub stream: u32,
    /// Values to read: the number of positions attended to.
    pub row_len: u32,
}

/// The rows to capture in the current decode, and those captured so far.
#[derive(Debug, Default)]
pub(super) struct RowCapture {
    requested: Vec<RowRequest>,
    captured: Vec<CapturedRow>,
    ubatch: u32,
    /// Layer of the last node with a layer number in its name.
    layer: Option<u16>,
    /// Layer of the last attention node.
    last_layer: Option<u16>,
    has_uneven_heads: bool,
    layers: usize,
    /// True if a layer ran with flash attention.
    flash: bool,
    graph: Option<RowGraph>,
}

/// A node from which attention is captured.
#[derive(Clone, Copy)]
enum AttentionNode {
    /// Stored probabilities.
    Probabilities,
    /// Flash attention; the rows are computed from its sources.
    Flash,
}

impl RowCapture {
    /// Creates a capture for a model with this number of layers.
    pub fn new(layers: usize) -> Self {
        Self { layers, graph: RowGraph::new(), ..Self::default() }
    }

    /// Computes rows on the threads of a pool.
    pub fn compute_on(&mut self, pool: NonNull<sys::ggml_threadpool>, threads: usize) {
        if let Some(graph) = &mut self.graph {
            graph.compute_on(pool, threads);
        }
    }

    /// Sets the rows that the next decode captures.
    pub fn request(&mut self, requested: Vec<RowRequest>) {
        // Rows of a decode that failed.
        if let Some(graph) = &mut self.graph {
            graph.download(&mut []);
        }
        self.captured.clear();
        self.captured.resize_with(requested.len(), CapturedRow::default);
        self.requested = requested;
        self.ubatch = 0;
        self.layer = None;
        self.last_layer = None;
        self.has_uneven_heads = false;
    }

    /// Removes and returns the captured rows, in the order of their requests.
    pub fn take(&mut self) -> Vec<CapturedRow> {
        self.requested.clear();
        if let Some(graph) = &mut self.graph {
            graph.download(&mut self.captured);
        }
        std::mem::take(&mut self.captured)
    }

    /// Returns true if the current decode captures nothing.
    pub fn is_idle(&self) -> bool {
        self.requested.is_empty()
    }

    /// Returns the number of passes of the decode through the layers.
    pub fn passes(&self) -> u32 {
        self.ubatch + 1
    }

    /// Returns true if captured layers ran with flash attention.
    pub fn used_flash_attention(&self) -> bool {
        self.flash
    }

    /// Returns true if some layers were skipped because their number of heads differs from the first layer's.
    pub fn has_uneven_heads(&self) -> bool {
        self.has_uneven_heads
    }

    /// Returns true if the data of a node, which is about to be computed, is needed.
    pub fn needs(&mut self, tensor: &sys::ggml_tensor) -> bool {
        if let Some(layer) = parse_layer(tensor) {
            self.layer = Some(layer);
        }
        let (Some(node), Some(layer)) = (AttentionNode::from_tensor(tensor), self.layer) else { return false };
        // Each layer has one attention node, so a repeated layer begins another physical batch.
        if self.last_layer.is_some_and(|last| layer <= last) {
            self.ubatch += 1;
        }
        self.last_layer = Some(layer);
        self.flash |= matches!(node, AttentionNode::Flash);
        self.requested.iter().any(|row| row.ubatch == self.ubatch)
    }

    /// Captures the requested rows of a computed node if it is an attention node.
    pub fn capture(&mut self, tensor: &sys::ggml_tensor) {
        let Some(node) = AttentionNode::from_tensor(tensor) else { return };
        let extents = match node {
            AttentionNode::Probabilities => probability_extents(tensor),
            AttentionNode::Flash => RowGraph::extents(tensor),
        };
        if let (Some(extents), Some(layer)) = (extents, self.last_layer) {
            self.capture_rows(tensor, node, extents, layer);
        }
    }

    /// Captures the requested rows of a computed node.
    fn capture_rows(&mut self, tensor: &sys::ggml_tensor, node: AttentionNode, extents: Extents, layer: u16) {
        let Self { requested, captured, ubatch, has_uneven_heads, layers, graph, .. } = self;
        let Extents { n_kv, n_tokens, n_head, n_stream } = extents;
        let mut complete = true;
        for (index, row) in requested.iter().enumerate() {
            let (token, stream, row_len) = (row.token as usize, row.stream as usize, row.row_len as usize);
            if row.ubatch != *ubatch || row_len > n_kv || token >= n_tokens || stream >= n_stream {
                continue;
            }
            let target = &mut captured[index];
            if target.heads != 0 && usize::from(target.heads) != n_head {
                *has_uneven_heads = true;
                continue;
            }
            if target.layer_ids.is_empty() {
                target.values.reserve_exact(*layers * n_head * row_len);
            }
            target.layer_ids.push(layer);
            target.heads = n_head as u16;
            match (node, graph.as_mut()) {
                (AttentionNode::Probabilities, _) => {
                    let start = target.values.len();
                    target.values.resize(start + n_head * row_len, 0.0);
                    copy_probabilities(tensor, token, stream, row_len, &mut target.values[start..]);
                }
                (AttentionNode::Flash, Some(graph)) => {
                    let target = RowTarget { index, token, stream, row_len };
                    // SAFETY: the row is within the extents, as checked above. The node's sources live until the
                    // callback returns, and the values of a captured row are not touched before the rows are computed
                    // below, because each request adds one row.
                    complete &= unsafe { graph.add(tensor, target, captured) };
                }
                (AttentionNode::Flash, None) => complete = false,
            }
        }
        complete &= graph.as_mut().is_none_or(RowGraph::compute);
        if !complete {
            // `Context::decode` reports rows without this layer as incomplete.
            self.captured.iter_mut().for_each(|row| row.layer_ids.clear());
        }
    }
}

impl AttentionNode {
    fn from_tensor(tensor: &sys::ggml_tensor) -> Option<Self> {
        match tensor.op {
            sys::GGML_OP_FLASH_ATTN_EXT => Some(Self::Flash),
            sys::GGML_OP_SOFT_MAX if name_of(tensor).starts_with(PROBABILITIES) => Some(Self::Probabilities),
            _ => None,
        }
    }
}

/// Returns the extents of a node with probabilities.
fn probability_extents(tensor: &sys::ggml_tensor) -> Option<Extents> {
    let [n_kv, n_tokens, n_head, n_stream] = tensor.ne.map(|n| usize::try_from(n).unwrap_or(0));
    let is_plain = tensor.type_ == sys::GGML_TYPE_F32 && tensor.nb[0] == size_of::<f32>();
    is_plain.then_some(Extents { n_kv, n_tokens, n_head, n_stream })
}

/// Copies a row of stored probabilities, which must be within the extents, to `[head][row_len]` values.
fn copy_probabilities(tensor: &sys::ggml_tensor, token: usize, stream: usize, row_len: usize, values: &mut [f32]) {
    let (offset, row_bytes) = (token * tensor.nb[1] + stream * tensor.nb[3], row_len * size_of::<f32>());
    let heads = values.len() / row_len.max(1);
    let target = values.as_mut_ptr().cast::<c_void>();
    // SAFETY: token, stream and `row_len` are within the extents, so the bytes read of each head lie within the tensor;
    // `target` has room for exactly `row_len` floats of each. The node was computed before this call.
    unsafe { sys::ggml_backend_tensor_get_2d(tensor, target, offset, row_bytes, heads, tensor.nb[2], row_bytes) };
}

/// Returns the layer of a node. llama.cpp appends it to the names of a layer's nodes, except flash attention; its
/// queries, which have the number, come directly before it.
fn parse_layer(tensor: &sys::ggml_tensor) -> Option<u16> {
    let name = name_of(tensor);
    let at = name.iter().rposition(|&byte| byte == b'-')?;
    std::str::from_utf8(&name[at + 1..]).ok()?.parse().ok()
}
