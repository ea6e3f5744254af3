//! Attention rows of layers that run with flash attention, which never stores probabilities.
//!
//! A node of `GGML_OP_FLASH_ATTN_EXT` has its queries, keys, mask and sinks as sources, and the scale, the `ALiBi` bias
//! and the cap as parameters. A small graph multiplies the requested queries with the keys and applies the softmax.
//! ggml computes it with its own kernels where the keys are: on the decoding threads, which are idle during the callback,
//! or on the GPU, from which only the probabilities are copied. Every type of keys and every processor is supported, and
//! scores are rounded as they are without flash attention.

use super::cpu::CpuBackend;
use super::gpu_backend::{GpuBackend, buffer_of, device_of};
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

/// A query row to compute.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowTarget {
    /// Index of the captured row to which the probabilities are appended, as `[head][row_len]`.
    pub index: usize,
    /// Index of the query token within its stream.
    pub token: usize,
    /// Index of the stream.
    pub stream: usize,
    /// Number of keys, from the first on.
    pub row_len: usize,
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
    cpu: CpuBackend,
    threads: usize,
    /// One for each GPU that computed a row.
    gpus: Vec<GpuBackend>,
    /// Index of the GPU that computes the rows; `None` for the CPU.
    gpu: Option<usize>,
    /// Computed rows whose probabilities are still on that GPU, in the order of their layers.
    downloads: Vec<Download>,
}

/// Probabilities in the memory of a GPU.
#[derive(Debug)]
struct Download {
    /// Index of the captured row to which they are appended.
    index: usize,
    /// Index of the first one in the GPU's results.
    start: usize,
    len: usize,
}

impl RowGraph {
    /// Allocates the memory for the tensors of a graph. Returns `None` if ggml fails.
    pub fn new() -> Option<Self> {
        let cpu = CpuBackend::new()?;
        // SAFETY: pure functions of ggml, and the creation of a context of this size.
        let arena = unsafe {
            let mem_size =
                MAX_TENSORS * sys::ggml_tensor_overhead() + sys::ggml_graph_overhead_custom(MAX_TENSORS, false);
            sys::ggml_init(sys::ggml_init_params { mem_size, mem_buffer: null_mut(), no_alloc: true })
        };
        let arena = NonNull::new(arena)?;
        let (gpus, downloads) = (Vec::new(), Vec::new());
        Some(Self { arena, graph: None, rows: 0, products: 0, cpu, threads: 1, gpus, gpu: None, downloads })
    }

    /// Sets the threads that compute. The caller keeps the pool as long as the graph is used.
    pub fn compute_on(&mut self, pool: NonNull<sys::ggml_threadpool>, threads: usize) {
        self.threads = threads.max(1);
        // SAFETY: the caller keeps the pool, which is idle during the callback.
        unsafe { self.cpu.set_pool(pool.as_ptr()) };
    }

    /// Returns the extents of a flash attention node if its rows can be computed: its sources are in host memory or in
    /// that of one GPU, and its mask is the same for all heads.
    pub fn extents(node: &sys::ggml_tensor) -> Option<Extents> {
        let (query, keys, mask) = (source(node, QUERY)?, source(node, KEYS)?, source(node, MASK));
        let gpu = device_of(keys);
        let is_with_keys =
            |tensor: &sys::ggml_tensor| if gpu.is_null() { is_on_host(tensor) } else { device_of(tensor) == gpu };
        let fits = |mask: &sys::ggml_tensor| {
            mask.type_ == sys::GGML_TYPE_F16
                && mask.ne[0] >= keys.ne[1]
                && mask.ne[1] >= query.ne[1]
                && mask.ne[2] == 1
                && is_with_keys(mask)
        };
        let readable = query.type_ == sys::GGML_TYPE_F32 && is_with_keys(query) && is_with_keys(keys);
        let extent = |value: i64| usize::try_from(value).unwrap_or(0);
        (readable && mask.is_none_or(fits) && source(node, SINKS).is_none_or(is_with_keys)).then(|| Extents {
            n_kv: extent(keys.ne[1]),
            n_tokens: extent(query.ne[1]),
            n_head: extent(query.ne[2]),
            n_stream: extent(query.ne[3]),
        })
    }

    /// Adds a row of a node. All rows until the next [`RowGraph::compute`] belong to the same node. The probabilities are
    /// in `captured` after [`RowGraph::compute`] and [`RowGraph::download`].
    ///
    /// # Safety
    /// The row is within the node's [`RowGraph::extents`]. The node's sources, and the values of the captured rows, stay
    /// alive and in place until the next [`RowGraph::compute`], which must run before the callback returns.
    pub unsafe fn add(&mut self, node: &sys::ggml_tensor, row: RowTarget, captured: &mut [CapturedRow]) -> bool {
        if self.rows == MAX_ROWS && !self.compute() {
            return false;
        }
        let Some(query) = source(node, QUERY) else { return false };
        let len = query.ne[2].unsigned_abs() as usize * row.row_len;
        let Some(memory) = self.result_memory(node, row.index, len, captured) else { return false };
        let arena = self.arena.as_ptr();
        // SAFETY: the arena has room for a graph with `MAX_ROWS` rows, and a previous graph was computed. The caller
        // ensures the rest.
        let graph = *self.graph.get_or_insert_with(|| unsafe {
            sys::ggml_reset(arena);
            NonNull::new_unchecked(sys::ggml_new_graph_custom(arena, MAX_TENSORS, false))
        });
        // SAFETY: as above.
        let Some(probabilities) = (unsafe { add_row(arena, node, row, memory) }) else { return false };
        // SAFETY: the graph has room for the tensors of `MAX_ROWS` rows.
        unsafe { sys::ggml_build_forward_expand(graph.as_ptr(), probabilities) };
        self.rows += 1;
        self.products += len * query.ne[0].unsigned_abs() as usize;
        true
    }

    /// Returns the memory for the scores of a row: the end of the captured row, or memory of the GPU that has the keys.
    fn result_memory(
        &mut self,
        node: &sys::ggml_tensor,
        index: usize,
        len: usize,
        captured: &mut [CapturedRow],
    ) -> Option<ResultMemory> {
        let device = device_of(source(node, KEYS)?);
        let gpu = self.gpu_index(device)?;
        if gpu != self.gpu {
            // The values of a captured row are in the order of the layers.
            self.download(captured);
            self.gpu = gpu;
        }
        let Some(gpu) = gpu else {
            let values = &mut captured.get_mut(index)?.values;
            let start = values.len();
            values.resize(start + len, 0.0);
            return Some(ResultMemory { buffer: null_mut(), data: values[start..].as_mut_ptr().cast() });
        };
        let mut reserved = self.gpus[gpu].reserve(len);
        if reserved.is_none() && self.compute() {
            self.download(captured);
            reserved = self.gpus[gpu].reserve(len);
        }
        let reserved = reserved?;
        self.downloads.push(Download { index, start: reserved.start, len });
        Some(ResultMemory { buffer: reserved.buffer, data: reserved.data })
    }

    /// Returns the index of this device in `gpus`, or `Some(None)` for the CPU. Returns `None` if ggml fails.
    #[expect(clippy::option_option, reason = "failure, the CPU, or a GPU")]
    fn gpu_index(&mut self, device: sys::ggml_backend_dev_t) -> Option<Option<usize>> {
        if device.is_null() {
            return Some(None);
        }
        let found = self.gpus.iter().position(|gpu| gpu.is_for(device));
        if found.is_none() {
            self.gpus.push(GpuBackend::new(device)?);
        }
        Some(found.or(Some(self.gpus.len() - 1)))
    }

    /// Computes the added rows. Returns `false` if ggml fails.
    pub fn compute(&mut self) -> bool {
        let products = std::mem::take(&mut self.products);
        self.rows = 0;
        let Some(graph) = self.graph.take() else { return true };
        if let Some(gpu) = self.gpu {
            // SAFETY: `add` built the graph from tensors in this GPU's memory, and its caller keeps the data.
            return unsafe { self.gpus[gpu].compute(graph) };
        }
        // Other threads of the pool stay asleep.
        let threads = (products / WORK_PER_THREAD).clamp(1, self.threads);
        self.cpu.set_threads(threads as i32);
        // SAFETY: `add` built the graph, and its caller keeps the data.
        unsafe { self.cpu.compute(graph) }
    }

    /// Copies computed rows from the GPU to the captured rows.
    pub fn download(&mut self, captured: &mut [CapturedRow]) {
        let Some(gpu) = self.gpu.and_then(|gpu| self.gpus.get_mut(gpu)) else { return };
        let results = gpu.download();
        for Download { index, start, len } in self.downloads.drain(..) {
            if let (Some(row), Some(values)) = (captured.get_mut(index), results.get(start..start + len)) {
                row.values.extend_from_slice(values);
            }
        }
    }
}

/// Memory for the scores of a row.
#[derive(Clone, Copy)]
struct ResultMemory {
    /// Buffer of a GPU; null for host memory.
    buffer: sys::ggml_backend_buffer_t,
    data: *mut c_void,
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

/// Adds a tensor of this shape without sources, at `data` in the buffer of `owner`.
///
/// # Safety
/// The arena has room for it, and `data` holds such a tensor until the graph is computed.
unsafe fn add_leaf(
    arena: *mut sys::ggml_context,
    owner: &sys::ggml_tensor,
    ne: [usize; 3],
    strides: Option<[usize; 2]>,
    data: *mut c_void,
) -> *mut sys::ggml_tensor {
    let [columns, rows, planes] = ne.map(|extent| extent as i64);
    // SAFETY: see above; the strides of a new tensor are those of contiguous data.
    unsafe {
        let tensor = sys::ggml_new_tensor_4d(arena, owner.type_, columns, rows, planes, 1);
        (*tensor).data = data;
        (*tensor).buffer = buffer_of(owner);
        if let Some([row, plane]) = strides {
            (*tensor).nb = [(*tensor).nb[0], row, plane, plane * ne[2]];
        }
        tensor
    }
}

/// Adds the tensors of a row and returns its probabilities.
///
/// # Safety
/// The arena has room for them; the row is within the node's extents, and `memory`, which has room for its values,
/// outlives the graph.
unsafe fn add_row(
    arena: *mut sys::ggml_context,
    node: &sys::ggml_tensor,
    row: RowTarget,
    memory: ResultMemory,
) -> Option<*mut sys::ggml_tensor> {
    let [scale, max_bias, cap] = [0, 1, 2].map(|index| f32::from_bits(node.op_params[index].cast_unsigned()));
    let (query, keys) = (source(node, QUERY)?, source(node, KEYS)?);
    let (width, heads) = (query.ne[0] as usize, query.ne[2] as usize);
    // SAFETY: offsets are within the tensors, because token, stream and length are within the extents. A mask has one
    // row for each token and one plane for each stream or for all.
    unsafe {
        let at = |tensor: &sys::ggml_tensor, offset: usize| tensor.data.cast::<u8>().add(offset).cast::<c_void>();
        let first = at(query, row.token * query.nb[1] + row.stream * query.nb[3]);
        let q = add_leaf(arena, query, [width, 1, heads], Some([query.nb[1], query.nb[2]]), first);
        let first = at(keys, row.stream * keys.nb[3]);
        let shape = [width, row.row_len, keys.ne[2] as usize];
        let k = add_leaf(arena, keys, shape, Some([keys.nb[1], keys.nb[2]]), first);

        // Results of operations in place are at the address of the scores, but ggml leaves their buffers empty.
        let in_memory = |tensor: *mut sys::ggml_tensor| {
            (*tensor).buffer = memory.buffer;
            tensor
        };
        let mut scores = in_memory(sys::ggml_mul_mat(arena, k, q));
        (*scores).data = memory.data;
        let mut factor = scale;
        if cap != 0.0 {
            let scaled = in_memory(sys::ggml_scale_inplace(arena, scores, scale / cap));
            scores = in_memory(sys::ggml_tanh_inplace(arena, scaled));
            factor = cap;
        }
        let first = source(node, MASK).map(|mask| {
            let stream = row.stream % mask.ne[3].max(1) as usize;
            at(mask, row.token * mask.nb[1] + stream * mask.nb[3])
        });
        // The CPU does not add a mask of zeros. That of a GPU is not copied to find out.
        let masks = |first: *mut c_void| {
            !memory.buffer.is_null()
                || std::slice::from_raw_parts(first.cast::<u16>(), row.row_len).iter().any(|&half| half != 0)
        };
        let mask = match (source(node, MASK), first.filter(|&first| masks(first))) {
            (Some(mask), Some(first)) => add_leaf(arena, mask, [row.row_len, 1, 1], None, first),
            _ => null_mut(),
        };
        let sinks = source(node, SINKS);
        if mask.is_null() && sinks.is_none() {
            // ggml spreads the rows of a plane over the threads, but not planes.
            scores = in_memory(sys::ggml_reshape_2d(arena, scores, row.row_len as i64, heads as i64));
        }
        let max_bias = if mask.is_null() { 0.0 } else { max_bias };
        let probabilities = in_memory(sys::ggml_soft_max_ext_inplace(arena, scores, mask, factor, max_bias));
        if let Some(sinks) = sinks {
            sys::ggml_soft_max_add_sinks(probabilities, add_leaf(arena, sinks, [heads, 1, 1], None, sinks.data));
        }
        Some(probabilities)
    }
}
