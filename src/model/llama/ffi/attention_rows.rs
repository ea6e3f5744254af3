//! Attention rows of layers that run with flash attention, which never stores probabilities.
//!
//! A node of `GGML_OP_FLASH_ATTN_EXT` has its queries, keys, mask and sinks as sources, and the scale, the `ALiBi` bias
//! and the cap as parameters. A small graph multiplies the requested queries with the keys and applies the softmax.
//! ggml computes it with its own kernels on the decoding threads, which are idle during the callback: every type of
//! keys and every processor is supported, and scores are rounded as they are without flash attention.

use super::cpu::CpuBackend;
use llama_cpp_sys_2 as sys;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// Maximum number of rows in one graph.
const MAX_ROWS: usize = 16;
/// Maximum number of a row's tensors: query, keys, mask, sinks, scores, scale, cap, shape and probabilities.
const TENSORS_PER_ROW: usize = 9;
/// Maximum number of tensors in one graph.
const MAX_TENSORS: usize = MAX_ROWS * TENSORS_PER_ROW;
/// Minimum multiplications per thread; fewer do not justify waking another thread.
const WORK_PER_THREAD: usize = 1 << 17;

/// A query row to compute, and its destination.
pub(super) struct RowTarget<'a> {
    /// Index of the query token within its stream.
    pub token: usize,
    /// Index of the stream.
    pub stream: usize,
    /// Number of keys, from the first on.
    pub row_len: usize,
    /// `[head][row_len]` probabilities.
    pub values: &'a mut [f32],
}

/// Extents of the attention of one layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extents {
    pub n_kv: usize,
    pub n_tokens: usize,
    pub n_head: usize,
    pub n_stream: usize,
}

/// A graph that computes attention rows from the sources of flash attention nodes.
#[derive(Debug)]
pub(super) struct RowGraph {
    arena: NonNull<sys::ggml_context>,
    /// The graph in the arena, while it has rows.
    graph: Option<NonNull<sys::ggml_cgraph>>,
    rows: usize,
    /// Multiplications of the rows.
    products: usize,
    backend: CpuBackend,
    threads: usize,
}

impl RowGraph {
    /// Allocates the memory for the tensors of a graph. Returns `None` if ggml fails.
    pub fn new() -> Option<Self> {
        let backend = CpuBackend::new()?;
        // SAFETY: pure functions of ggml, and the creation of a context of this size.
        let arena = unsafe {
            let mem_size =
                MAX_TENSORS * sys::ggml_tensor_overhead() + sys::ggml_graph_overhead_custom(MAX_TENSORS, false);
            sys::ggml_init(sys::ggml_init_params { mem_size, mem_buffer: null_mut(), no_alloc: true })
        };
        let arena = NonNull::new(arena)?;
        Some(Self { arena, graph: None, rows: 0, products: 0, backend, threads: 1 })
    }

    /// Sets the threads that compute. The caller keeps the pool as long as the graph is used.
    pub fn compute_on(&mut self, pool: NonNull<sys::ggml_threadpool>, threads: usize) {
        self.threads = threads.max(1);
        // SAFETY: the caller keeps the pool, which is idle during the callback.
        unsafe { self.backend.set_pool(pool.as_ptr()) };
    }

    /// Returns the extents of a flash attention node if its rows can be computed: its sources are in host memory, and
    /// its mask is the same for all heads.
    pub fn extents(node: &sys::ggml_tensor) -> Option<Extents> {
        let (query, keys, mask) = (source(node, QUERY)?, source(node, KEYS)?, source(node, MASK));
        let fits = |mask: &sys::ggml_tensor| {
            mask.type_ == sys::GGML_TYPE_F16
                && mask.ne[0] >= keys.ne[1]
                && mask.ne[1] >= query.ne[1]
                && mask.ne[2] == 1
                && is_on_host(mask)
        };
        let readable = query.type_ == sys::GGML_TYPE_F32 && is_on_host(query) && is_on_host(keys);
        let extent = |value: i64| usize::try_from(value).unwrap_or(0);
        (readable && mask.is_none_or(fits) && source(node, SINKS).is_none_or(is_on_host)).then(|| Extents {
            n_kv: extent(keys.ne[1]),
            n_tokens: extent(query.ne[1]),
            n_head: extent(query.ne[2]),
            n_stream: extent(query.ne[3]),
        })
    }

    /// Adds a row of a node. Returns `false` if ggml fails or the node lacks a source.
    ///
    /// # Safety
    /// The row is within the node's [`RowGraph::extents`], and `values` has the length `n_head * row_len`. The node's
    /// sources and `values` stay alive and in place until the next [`RowGraph::compute`], which must run before the
    /// callback returns.
    pub unsafe fn add(&mut self, node: &sys::ggml_tensor, row: &mut RowTarget<'_>) -> bool {
        if self.rows == MAX_ROWS && !self.compute() {
            return false;
        }
        let arena = self.arena.as_ptr();
        // SAFETY: the arena has room for a graph with `MAX_ROWS` rows, and a previous graph was computed. The caller
        // ensures the rest.
        let graph = *self.graph.get_or_insert_with(|| unsafe {
            sys::ggml_reset(arena);
            NonNull::new_unchecked(sys::ggml_new_graph_custom(arena, MAX_TENSORS, false))
        });
        // SAFETY: as above.
        let Some(probabilities) = (unsafe { add_row(arena, node, row) }) else { return false };
        // SAFETY: the graph has room for the tensors of `MAX_ROWS` rows.
        unsafe { sys::ggml_build_forward_expand(graph.as_ptr(), probabilities) };
        self.rows += 1;
        self.products += row.values.len() * source(node, QUERY).map_or(0, |query| query.ne[0].unsigned_abs() as usize);
        true
    }

    /// Computes the added rows. Returns `false` if ggml fails.
    pub fn compute(&mut self) -> bool {
        let products = std::mem::take(&mut self.products);
        self.rows = 0;
        let Some(graph) = self.graph.take() else { return true };
        // Other threads of the pool stay asleep.
        let threads = (products / WORK_PER_THREAD).clamp(1, self.threads);
        self.backend.set_threads(threads as i32);
        // SAFETY: `add` built the graph, and its caller keeps the data.
        unsafe { self.backend.compute(graph) }
    }
}

impl Drop for RowGraph {
    fn drop(&mut self) {
        // SAFETY: created by `ggml_init`, and freed once.
        unsafe { sys::ggml_free(self.arena.as_ptr()) };
    }
}

/// Index of the queries in a flash attention node's sources.
const QUERY: usize = 0;
/// Index of the keys.
const KEYS: usize = 1;
/// Index of the mask.
const MASK: usize = 3;
/// Index of the sinks.
const SINKS: usize = 4;

fn source(node: &sys::ggml_tensor, index: usize) -> Option<&sys::ggml_tensor> {
    // SAFETY: a source is null or a tensor that lives as long as its graph.
    unsafe { node.src[index].as_ref() }
}

fn is_on_host(tensor: &sys::ggml_tensor) -> bool {
    // SAFETY: a view's source lives as long as the view.
    let owner = unsafe { tensor.view_src.as_ref() }.unwrap_or(tensor);
    // SAFETY: the pointers are checked before the call.
    !owner.buffer.is_null() && !tensor.data.is_null() && unsafe { sys::ggml_backend_buffer_is_host(owner.buffer) }
}

/// Adds a tensor of this shape without sources, at `data`.
///
/// # Safety
/// The arena has room for it, and `data` holds such a tensor until the graph is computed.
unsafe fn add_leaf(
    arena: *mut sys::ggml_context,
    kind: sys::ggml_type,
    ne: [usize; 3],
    strides: Option<[usize; 2]>,
    data: *mut c_void,
) -> *mut sys::ggml_tensor {
    let [columns, rows, planes] = ne.map(|extent| extent as i64);
    // SAFETY: see above; the strides of a new tensor are those of contiguous data.
    unsafe {
        let tensor = sys::ggml_new_tensor_4d(arena, kind, columns, rows, planes, 1);
        (*tensor).data = data;
        if let Some([row, plane]) = strides {
            (*tensor).nb = [(*tensor).nb[0], row, plane, plane * ne[2]];
        }
        tensor
    }
}

/// Adds the tensors of a row and returns its probabilities.
///
/// # Safety
/// The arena has room for them; the row is within the node's extents, and its `values` outlive the graph.
unsafe fn add_row(
    arena: *mut sys::ggml_context,
    node: &sys::ggml_tensor,
    row: &mut RowTarget<'_>,
) -> Option<*mut sys::ggml_tensor> {
    let [scale, max_bias, cap] = [0, 1, 2].map(|index| f32::from_bits(node.op_params[index].cast_unsigned()));
    let (query, keys) = (source(node, QUERY)?, source(node, KEYS)?);
    let (width, heads) = (query.ne[0] as usize, query.ne[2] as usize);
    // SAFETY: offsets are within the tensors, because token, stream and length are within the extents. A mask has one
    // row for each token and one plane for each stream or for all.
    unsafe {
        let at = |tensor: &sys::ggml_tensor, offset: usize| tensor.data.cast::<u8>().add(offset).cast::<c_void>();
        let first = at(query, row.token * query.nb[1] + row.stream * query.nb[3]);
        let q = add_leaf(arena, query.type_, [width, 1, heads], Some([query.nb[1], query.nb[2]]), first);
        let first = at(keys, row.stream * keys.nb[3]);
        let shape = [width, row.row_len, keys.ne[2] as usize];
        let k = add_leaf(arena, keys.type_, shape, Some([keys.nb[1], keys.nb[2]]), first);

        let mut scores = sys::ggml_mul_mat(arena, k, q);
        (*scores).data = row.values.as_mut_ptr().cast();
        let mut factor = scale;
        if cap != 0.0 {
            scores = sys::ggml_tanh_inplace(arena, sys::ggml_scale_inplace(arena, scores, scale / cap));
            factor = cap;
        }
        let first = source(node, MASK).map(|mask| {
            let stream = row.stream % mask.ne[3].max(1) as usize;
            at(mask, row.token * mask.nb[1] + stream * mask.nb[3])
        });
        let masks = first.is_some_and(|first| {
            std::slice::from_raw_parts(first.cast::<u16>(), row.row_len).iter().any(|&half| half != 0)
        });
        let mask = match first {
            Some(first) if masks => add_leaf(arena, sys::GGML_TYPE_F16, [row.row_len, 1, 1], None, first),
            _ => null_mut(),
        };
        let sinks = source(node, SINKS);
        if mask.is_null() && sinks.is_none() {
            // ggml spreads the rows of a plane over the threads, but not planes.
            scores = sys::ggml_reshape_2d(arena, scores, row.row_len as i64, heads as i64);
        }
        let max_bias = if mask.is_null() { 0.0 } else { max_bias };
        let probabilities = sys::ggml_soft_max_ext_inplace(arena, scores, mask, factor, max_bias);
        if let Some(sinks) = sinks {
            sys::ggml_soft_max_add_sinks(probabilities, add_leaf(arena, sinks.type_, [heads, 1, 1], None, sinks.data));
        }
        Some(probabilities)
    }
}
