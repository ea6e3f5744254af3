//! A backend instance of a GPU, which computes small graphs on tensors in the GPU's memory, and memory for their results.
//! Results stay on the GPU until [`GpuBackend::download`] copies all of them at once.

use llama_cpp_sys_2 as sys;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};

/// Size of the memory for results in bytes: at first, and at most. It doubles whenever it is full, so that the results of
/// a decode soon fit.
const MIN_RESULTS: usize = 1 << 20;
const MAX_RESULTS: usize = 64 << 20;

/// Returns the GPU in whose memory a tensor is; null for host memory, and for memory of other devices.
pub(super) fn device_of(tensor: &sys::ggml_tensor) -> sys::ggml_backend_dev_t {
    let buffer = buffer_of(tensor);
    if buffer.is_null() || tensor.data.is_null() {
        return null_mut();
    }
    // SAFETY: the buffer exists; its type and its device live as long as the program.
    unsafe {
        if sys::ggml_backend_buffer_is_host(buffer) {
            return null_mut();
        }
        let device = sys::ggml_backend_buft_get_device(sys::ggml_backend_buffer_get_type(buffer));
        let kinds = [sys::GGML_BACKEND_DEVICE_TYPE_GPU, sys::GGML_BACKEND_DEVICE_TYPE_IGPU];
        let is_gpu = !device.is_null() && kinds.contains(&sys::ggml_backend_dev_type(device));
        if is_gpu { device } else { null_mut() }
    }
}

/// Returns the buffer of a tensor; a view has the buffer of its source.
pub(super) fn buffer_of(tensor: &sys::ggml_tensor) -> sys::ggml_backend_buffer_t {
    // SAFETY: a view's source lives as long as the view.
    unsafe { tensor.view_src.as_ref() }.unwrap_or(tensor).buffer
}

/// A buffer of ggml.
#[derive(Debug)]
struct Buffer {
    raw: NonNull<sys::ggml_backend_buffer>,
    base: NonNull<f32>,
}

impl Buffer {
    /// Allocates a buffer of this type. Returns `None` if ggml fails, or if there is no type.
    fn new(kind: sys::ggml_backend_buffer_type_t, size: usize) -> Option<Self> {
        if kind.is_null() {
            return None;
        }
        // SAFETY: buffer types live as long as the program.
        let raw = NonNull::new(unsafe { sys::ggml_backend_buft_alloc_buffer(kind, size) })?;
        // SAFETY: the buffer exists.
        let base = NonNull::new(unsafe { sys::ggml_backend_buffer_get_base(raw.as_ptr()) }.cast());
        let Some(base) = base else {
            // SAFETY: allocated above, and freed once.
            unsafe { sys::ggml_backend_buffer_free(raw.as_ptr()) };
            return None;
        };
        Some(Self { raw, base })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`, and freed once.
        unsafe { sys::ggml_backend_buffer_free(self.raw.as_ptr()) };
    }
}

/// Host memory to which results are copied.
#[derive(Debug)]
enum Staging {
    /// Memory that the GPU can access, which makes copies faster.
    Pinned(Buffer),
    Pageable(Vec<f32>),
}

/// Memory for results on the GPU, and host memory of the same size.
#[derive(Debug)]
struct Results {
    gpu: Buffer,
    staging: Staging,
    size: usize,
}

impl Results {
    fn new(device: sys::ggml_backend_dev_t, size: usize) -> Option<Self> {
        // SAFETY: devices and their buffer types live as long as the program.
        let (gpu, host) =
            unsafe { (sys::ggml_backend_dev_buffer_type(device), sys::ggml_backend_dev_host_buffer_type(device)) };
        let gpu = Buffer::new(gpu, size)?;
        let staging = match Buffer::new(host, size) {
            Some(buffer) => Staging::Pinned(buffer),
            None => Staging::Pageable(vec![0.0; size / size_of::<f32>()]),
        };
        Some(Self { gpu, staging, size })
    }
}

/// An instance of a GPU's backend. Its work is not ordered with that of other instances.
#[derive(Debug)]
pub(super) struct GpuBackend {
    device: sys::ggml_backend_dev_t,
    backend: NonNull<sys::ggml_backend>,
    results: Option<Results>,
    /// Bytes of results in use.
    used: usize,
    /// Size of the next memory for results.
    next_size: usize,
    alignment: usize,
}

// SAFETY: an instance may be used by any thread, but only by one at a time.
unsafe impl Send for GpuBackend {}

impl GpuBackend {
    /// Creates an instance for a device that [`device_of`] returned. Returns `None` if ggml fails.
    pub fn new(device: sys::ggml_backend_dev_t) -> Option<Self> {
        // SAFETY: devices live as long as the program; the backend takes no parameters.
        let backend = NonNull::new(unsafe { sys::ggml_backend_dev_init(device, std::ptr::null()) })?;
        // SAFETY: the device exists.
        let alignment = unsafe { sys::ggml_backend_buft_get_alignment(sys::ggml_backend_dev_buffer_type(device)) };
        let alignment = alignment.max(size_of::<f32>());
        Some(Self { device, backend, results: None, used: 0, next_size: MIN_RESULTS, alignment })
    }

    pub fn is_for(&self, device: sys::ggml_backend_dev_t) -> bool {
        self.device == device
    }

    /// Reserves memory for this number of results. Returns `None` if it is full; there is room after
    /// [`GpuBackend::download`], unless ggml fails.
    pub fn reserve(&mut self, count: usize) -> Option<Reserved> {
        let bytes = (count * size_of::<f32>()).next_multiple_of(self.alignment);
        if self.used == 0 && self.results.as_ref().is_none_or(|results| results.size < bytes.max(self.next_size)) {
            self.results = None;
            let size = bytes.next_power_of_two().max(self.next_size);
            self.results = Some(Results::new(self.device, size)?);
            self.next_size = size;
        }
        let results = self.results.as_ref()?;
        if self.used + bytes > results.size {
            self.next_size = (2 * results.size).min(MAX_RESULTS);
            return None;
        }
        let start = self.used;
        self.used += bytes;
        let start = start / size_of::<f32>();
        // SAFETY: the offset is within the buffer.
        let data = unsafe { results.gpu.base.add(start) }.as_ptr().cast();
        Some(Reserved { buffer: results.gpu.raw.as_ptr(), data, start })
    }

    /// Computes a graph and waits for it. Returns false if the GPU does not support an operation, or if ggml fails.
    ///
    /// # Safety
    /// The graph is valid, its tensors are in this GPU's memory, and nothing else uses them.
    pub unsafe fn compute(&self, graph: NonNull<sys::ggml_cgraph>) -> bool {
        let (backend, graph) = (self.backend.as_ptr(), graph.as_ptr());
        // SAFETY: ensured by the caller; the indexes are those of nodes.
        unsafe {
            (0..sys::ggml_graph_n_nodes(graph))
                .all(|index| sys::ggml_backend_supports_op(backend, sys::ggml_graph_node(graph, index)))
                && sys::ggml_backend_graph_compute(backend, graph) == sys::GGML_STATUS_SUCCESS
        }
    }

    /// Copies all results and makes their memory available again. The slice begins with the first result.
    pub fn download(&mut self) -> &[f32] {
        let bytes = std::mem::take(&mut self.used);
        let Some(Results { gpu, staging, .. }) = &mut self.results else { return &[] };
        let count = bytes / size_of::<f32>();
        let target = match staging {
            Staging::Pinned(buffer) => buffer.base.as_ptr(),
            Staging::Pageable(values) => values.as_mut_ptr(),
        };
        if count > 0 {
            // SAFETY: a structure of numbers and pointers, for which zeros are valid; it describes the results as one row.
            // They are within the buffer, and `target` has room for them.
            unsafe {
                let mut tensor: sys::ggml_tensor = std::mem::zeroed();
                tensor.type_ = sys::GGML_TYPE_F32;
                tensor.ne = [count as i64, 1, 1, 1];
                tensor.nb = [size_of::<f32>(), bytes, bytes, bytes];
                tensor.buffer = gpu.raw.as_ptr();
                tensor.data = gpu.base.as_ptr().cast();
                sys::ggml_backend_tensor_get(&raw const tensor, target.cast(), 0, bytes);
            }
        }
        // SAFETY: `count` values were copied, and the memory stays in place while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(target, count) }
    }
}

/// Reserved memory for results.
#[derive(Clone, Copy)]
pub(super) struct Reserved {
    pub buffer: sys::ggml_backend_buffer_t,
    pub data: *mut c_void,
    /// Index of the first result in [`GpuBackend::download`].
    pub start: usize,
}

impl Drop for GpuBackend {
    fn drop(&mut self) {
        self.results = None;
        // SAFETY: created by `new`, and freed once.
        unsafe { sys::ggml_backend_free(self.backend.as_ptr()) };
    }
}
