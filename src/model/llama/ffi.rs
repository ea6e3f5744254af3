//! The only unsafe code: the evaluation callback that captures attention and hidden states while a graph runs, the state
//! of a sequence as bytes, [`attention_rows`], [`adapters`], [`cpu`], [`devices`], [`hidden_states`], [`images`],
//! [`loading`], [`memory`], [`output_head`], [`templates`], [`tensors`], [`threads`] and [`types`].
//!
//! llama-cpp-2 has no setter for `llama_context_params.cb_eval` since 0.1.140, so the parameters are cast once to the
//! raw structure; a compile-time assertion checks their size. Its safe functions for sequence states do not expose the
//! bytes, but clients receive and send states as bytes.
#![expect(unsafe_code, reason = "parts of llama.cpp have no safe binding")]

pub(super) mod adapters;
mod attention_rows;
pub(super) mod cpu;
pub(super) mod devices;
mod gpu_backend;
mod hidden_states;
pub(super) mod images;
pub(super) mod loading;
pub(super) mod memory;
pub(super) mod output_head;
pub(super) mod templates;
pub(super) mod tensors;
pub(super) mod threads;
pub(super) mod types;

use attention_rows::{Extents, RowGraph, RowTarget};
use hidden_states::HiddenCapture;
pub use hidden_states::{CapturedHiddenStates, HiddenRequest};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::params::LlamaContextParams;
use llama_cpp_2::context::session::LlamaStateSeqFlags;
use llama_cpp_sys_2 as sys;
use output_head::HeadOperations;
use std::cell::UnsafeCell;
use std::ffi::{CStr, c_void};
use std::ptr::NonNull;

const _: () = assert!(
    size_of::<LlamaContextParams>() == size_of::<sys::llama_context_params>(),
    "LlamaContextParams must only wrap llama_context_params"
);

/// Size of a [`LlamaContext`] in words: the pointer to llama.cpp's context, and a vector.
const WORDS: usize = 4;

const _: () = assert!(
    size_of::<LlamaContext<'static>>() == WORDS * size_of::<usize>(),
    "LlamaContext must consist of a pointer and a vector"
);

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

/// The scores of one captured row: `[layer][head][row_len]`, layers as in `layer_ids`.
#[derive(Debug, Clone, Default)]
pub struct CapturedRow {
    /// Layers with the node, in order.
    pub layer_ids: Vec<u16>,
    /// Heads per layer.
    pub heads: u16,
    /// The probabilities.
    pub values: Vec<f32>,
}

#[derive(Debug, Default)]
struct State {
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
    hidden: HiddenCapture,
    output_head: OutputHeadProbe,
}

/// The operations of the output head; they are read from one graph.
#[derive(Debug, Default)]
enum OutputHeadProbe {
    /// They are not read.
    #[default]
    Off,
    /// They are read from the next graph with logits.
    Requested,
    /// They were read, or the named operation is not supported.
    Read(Result<HeadOperations, String>),
}

/// A node from which attention is captured.
#[derive(Clone, Copy)]
enum AttentionNode {
    /// Stored probabilities.
    Probabilities,
    /// Flash attention; the rows are computed from its sources.
    Flash,
}

/// Evaluation callback that captures attention rows and hidden states while llama.cpp decodes. llama.cpp holds its
/// address, so it must outlive the context.
#[derive(Debug, Default)]
pub struct EvalCallback(UnsafeCell<State>);

impl EvalCallback {
    /// Creates a callback for a model with this number of layers.
    pub fn new(layers: usize) -> Self {
        Self(UnsafeCell::new(State { layers, graph: RowGraph::new(), ..State::default() }))
    }

    fn compute_on(&mut self, pool: NonNull<sys::ggml_threadpool>, count: i32) {
        if let Some(graph) = &mut self.0.get_mut().graph {
            graph.compute_on(pool, usize::try_from(count).unwrap_or(1));
        }
    }

    /// Returns true if captured layers ran with flash attention.
    pub fn used_flash_attention(&mut self) -> bool {
        self.0.get_mut().flash
    }

    /// Sets the rows that the next decode captures.
    pub fn request_rows(&mut self, requested: Vec<RowRequest>) {
        let state = self.0.get_mut();
        // Rows of a decode that failed.
        if let Some(graph) = &mut state.graph {
            graph.download(&mut []);
        }
        state.captured.clear();
        state.captured.resize_with(requested.len(), CapturedRow::default);
        state.requested = requested;
        state.ubatch = 0;
        state.layer = None;
        state.last_layer = None;
        state.has_uneven_heads = false;
    }

    /// Sets the tokens whose hidden states the next decode captures.
    pub fn request_hidden_states(&mut self, requested: Vec<HiddenRequest>) {
        self.0.get_mut().hidden.request(requested);
    }

    /// Makes the next decode that captures something read the operations of the output head.
    pub fn request_output_head(&mut self) {
        self.0.get_mut().output_head = OutputHeadProbe::Requested;
    }

    /// Removes and returns the operations of the output head, or the name of an operation that is not supported. Returns
    /// `None` if no graph had logits.
    pub fn take_output_head(&mut self) -> Option<Result<HeadOperations, String>> {
        match std::mem::take(&mut self.0.get_mut().output_head) {
            OutputHeadProbe::Read(result) => Some(result),
            OutputHeadProbe::Off | OutputHeadProbe::Requested => None,
        }
    }

    /// Removes and returns the captured hidden states, in the order of their requests.
    pub fn take_hidden_states(&mut self) -> Vec<CapturedHiddenStates> {
        self.0.get_mut().hidden.take()
    }

    /// Returns the number of passes of the decode through the layers.
    pub fn passes(&mut self) -> u32 {
        self.0.get_mut().ubatch + 1
    }

    /// Returns true if some layers were skipped because their number of heads differs from the first layer's.
    pub fn has_uneven_heads(&mut self) -> bool {
        self.0.get_mut().has_uneven_heads
    }

    /// Removes and returns the captured rows, in the order of their requests.
    pub fn take(&mut self) -> Vec<CapturedRow> {
        let state = self.0.get_mut();
        state.requested.clear();
        if let Some(graph) = &mut state.graph {
            graph.download(&mut state.captured);
        }
        std::mem::take(&mut state.captured)
    }
}

/// Makes llama.cpp call `callback` for every graph node of contexts created with `params`.
///
/// While such a context exists, the caller must not move `callback`, and must access it only between decodes.
pub fn set_callback(params: &mut LlamaContextParams, callback: &EvalCallback) {
    // SAFETY: the assertion above ensures that the wrapper has the size of its only field, which is therefore at offset
    // 0.
    let raw = unsafe { &mut *std::ptr::from_mut(params).cast::<sys::llama_context_params>() };
    raw.cb_eval = Some(on_node);
    raw.cb_eval_user_data = callback.0.get().cast::<c_void>();
}

/// The extent of a sequence's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateExtent {
    /// Everything.
    Full,
    /// Everything except the cells of a plain KV cache, that is, the part that represents only the end of the sequence.
    Partial,
}

impl StateExtent {
    const fn flags(self) -> LlamaStateSeqFlags {
        match self {
            Self::Full => LlamaStateSeqFlags::empty(),
            Self::Partial => LlamaStateSeqFlags::PARTIAL_ONLY,
        }
    }
}

/// Returns the state of a sequence in llama.cpp's format; `None` if llama.cpp cannot write it.
pub fn sequence_state(context: &LlamaContext<'_>, sequence: i32, extent: StateExtent) -> Option<Vec<u8>> {
    let flags = extent.flags();
    let size = context.state_seq_get_size_ext(sequence, flags);
    let mut state: Vec<u8> = Vec::with_capacity(size);
    // SAFETY: the vector has room for `size` bytes, the size that llama.cpp reported; nothing decodes in between,
    // because the context is borrowed.
    let written = unsafe { context.state_seq_get_data_ext(state.as_mut_ptr(), sequence, flags) };
    if written != size || size == 0 {
        return None;
    }
    // SAFETY: llama.cpp has just written these bytes.
    unsafe { state.set_len(size) };
    Some(state)
}

/// Replaces the state of a sequence. `state` must have been written by a context of this layout, or validated with
/// [`super::StateLayout::unpack`]. Returns `false` if llama.cpp rejects it; the sequence is then empty.
pub fn set_sequence_state(context: &mut LlamaContext<'_>, sequence: i32, state: &[u8], extent: StateExtent) -> bool {
    // SAFETY: llama.cpp reads only the slice, and every count in it was compared with the context's.
    unsafe { context.state_seq_set_data_ext(state, sequence, extent.flags()) }
}

/// Returns the pointer to llama.cpp's context. Rust does not specify the order of fields. The vector, which only GPU
/// samplers fill, is empty: its words are 0, 0 and an alignment. So the only word that can be an address is the
/// pointer.
fn raw(context: &mut LlamaContext<'_>) -> Option<*mut sys::llama_context> {
    const MIN_ADDRESS: usize = 4096;
    // SAFETY: the assertion above ensures the number of words, and a pointer with a vector has no padding.
    let words: [usize; WORDS] = unsafe { std::ptr::from_mut(context).cast::<[usize; WORDS]>().read() };
    let mut addresses = words.into_iter().filter(|&word| word >= MIN_ADDRESS);
    match (addresses.next(), addresses.next()) {
        (Some(address), None) => Some(std::ptr::with_exposed_provenance_mut(address)),
        _ => None,
    }
}

/// Handles a call of ggml's scheduler: first with `ask`, which queries whether a node is needed; then, for a needed
/// node, with its data.
unsafe extern "C" fn on_node(tensor: *mut sys::ggml_tensor, ask: bool, user_data: *mut c_void) -> bool {
    // SAFETY: `user_data` is the state of the callback given in `set_callback`, which outlives the context; llama.cpp
    // calls from the thread that runs llama_decode, during which nothing else accesses the callback.
    let state = unsafe { &mut *user_data.cast::<State>() };
    // SAFETY: the scheduler passes a live node.
    let tensor_ref = unsafe { &*tensor };
    if state.requested.is_empty() && state.hidden.is_idle() {
        return !ask;
    }
    let node = AttentionNode::from_tensor(tensor_ref);
    if ask {
        if matches!(state.output_head, OutputHeadProbe::Requested) && output_head::has_logits(tensor_ref) {
            // SAFETY: the graph lives as long as its nodes.
            state.output_head = OutputHeadProbe::Read(unsafe { output_head::read(tensor_ref) });
        }
        if state.hidden.needs(tensor_ref) {
            return true;
        }
        if let Some(layer) = parse_layer(tensor_ref) {
            state.layer = Some(layer);
        }
        let (Some(node), Some(layer)) = (node, state.layer) else { return false };
        if state.last_layer.is_some_and(|last| layer <= last) {
            state.ubatch += 1;
        }
        state.last_layer = Some(layer);
        state.flash |= matches!(node, AttentionNode::Flash);
        return state.requested.iter().any(|row| row.ubatch == state.ubatch);
    }
    state.hidden.capture(tensor_ref);
    let extents = match node {
        Some(AttentionNode::Probabilities) => probability_extents(tensor_ref),
        Some(AttentionNode::Flash) => RowGraph::extents(tensor_ref),
        None => None,
    };
    if let (Some(node), Some(extents), Some(layer)) = (node, extents, state.last_layer) {
        state.capture(tensor_ref, node, extents, layer);
    }
    true
}

impl State {
    /// Captures the requested rows of a computed node.
    fn capture(&mut self, tensor: &sys::ggml_tensor, node: AttentionNode, extents: Extents, layer: u16) {
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

fn name_of(tensor: &sys::ggml_tensor) -> &[u8] {
    // SAFETY: ggml keeps names zero-terminated within their 64 bytes.
    unsafe { CStr::from_ptr(tensor.name.as_ptr()) }.to_bytes()
}

/// Returns the layer of a node. llama.cpp appends it to the names of a layer's nodes, except flash attention; its
/// queries, which have the number, come directly before it.
fn parse_layer(tensor: &sys::ggml_tensor) -> Option<u16> {
    let name = name_of(tensor);
    let at = name.iter().rposition(|&byte| byte == b'-')?;
    std::str::from_utf8(&name[at + 1..]).ok()?.parse().ok()
}
