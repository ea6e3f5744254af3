//! ggml's CPU backend, through ggml's registry. With feature `portable`, backends are loaded at run time: the functions
//! are in a library that is chosen for the processor, so the program cannot link to them.

use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;

type NewPool = unsafe extern "C" fn(*mut sys::ggml_threadpool_params) -> *mut sys::ggml_threadpool;
type FreePool = unsafe extern "C" fn(*mut sys::ggml_threadpool);
type SetPool = unsafe extern "C" fn(sys::ggml_backend_t, *mut sys::ggml_threadpool);
type SetThreads = unsafe extern "C" fn(sys::ggml_backend_t, c_int);

/// Functions of the backend that are not part of ggml's common interface.
struct Functions {
    device: sys::ggml_backend_dev_t,
    new_pool: NewPool,
    free_pool: FreePool,
    set_pool: SetPool,
    set_threads: SetThreads,
}

// SAFETY: a device lives as long as the program, and ggml's functions may be called from any thread.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}

/// Returns the CPU device. It is null if no CPU backend is loaded.
pub fn device() -> sys::ggml_backend_dev_t {
    // SAFETY: reads ggml's registry.
    unsafe { sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU) }
}

fn functions() -> Option<&'static Functions> {
    static FUNCTIONS: OnceLock<Option<Functions>> = OnceLock::new();
    FUNCTIONS.get_or_init(find_functions).as_ref()
}

fn find_functions() -> Option<Functions> {
    let device = device();
    if device.is_null() {
        return None;
    }
    let find = |name: &CStr| {
        // SAFETY: the device exists, and the name is zero-terminated.
        let found: *mut c_void =
            unsafe { sys::ggml_backend_reg_get_proc_address(sys::ggml_backend_dev_backend_reg(device), name.as_ptr()) };
        NonNull::new(found)
    };
    let (new_pool, free_pool) = (find(c"ggml_threadpool_new")?, find(c"ggml_threadpool_free")?);
    let (set_pool, set_threads) = (find(c"ggml_backend_cpu_set_threadpool")?, find(c"ggml_backend_set_n_threads")?);
    // SAFETY: in the CPU backend, these names belong to functions of these types.
    unsafe {
        Some(Functions {
            device,
            new_pool: std::mem::transmute::<NonNull<c_void>, NewPool>(new_pool),
            free_pool: std::mem::transmute::<NonNull<c_void>, FreePool>(free_pool),
            set_pool: std::mem::transmute::<NonNull<c_void>, SetPool>(set_pool),
            set_threads: std::mem::transmute::<NonNull<c_void>, SetThreads>(set_threads),
        })
    }
}

/// Starts a pool of threads. Returns `None` if ggml fails.
pub(super) fn new_pool(params: &mut sys::ggml_threadpool_params) -> Option<NonNull<sys::ggml_threadpool>> {
    // SAFETY: `params` is a valid structure.
    NonNull::new(unsafe { (functions()?.new_pool)(params) })
}

/// Stops the threads of a pool and frees it.
///
/// # Safety
/// The pool was created by [`new_pool`], is freed once, and is not used afterwards.
pub(super) unsafe fn free_pool(pool: NonNull<sys::ggml_threadpool>) {
    if let Some(functions) = functions() {
        // SAFETY: ensured by the caller.
        unsafe { (functions.free_pool)(pool.as_ptr()) };
    }
}

/// An instance of the CPU backend, which computes graphs whose tensors are in host memory.
#[derive(Debug)]
pub(super) struct CpuBackend {
    backend: NonNull<sys::ggml_backend>,
    functions: &'static Functions,
}

// SAFETY: an instance may be used by any thread, but only by one at a time.
unsafe impl Send for CpuBackend {}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Functions")
    }
}

impl CpuBackend {
    /// Creates an instance. Returns `None` if ggml fails.
    pub fn new() -> Option<Self> {
        let functions = functions()?;
        // SAFETY: the device exists; the backend takes no parameters.
        let backend = unsafe { sys::ggml_backend_dev_init(functions.device, std::ptr::null()) };
        NonNull::new(backend).map(|backend| Self { backend, functions })
    }

    /// Sets the thread pool, and parks the threads of the previous one. Null removes the pool.
    ///
    /// # Safety
    /// The pool outlives its use here, and computes nothing else at the same time.
    pub unsafe fn set_pool(&self, pool: *mut sys::ggml_threadpool) {
        // SAFETY: the backend is the CPU's; the rest is ensured by the caller.
        unsafe { (self.functions.set_pool)(self.backend.as_ptr(), pool) };
    }

    /// Sets the number of threads that compute.
    pub fn set_threads(&self, threads: i32) {
        // SAFETY: the backend is the CPU's.
        unsafe { (self.functions.set_threads)(self.backend.as_ptr(), threads) };
    }

    /// Computes a graph. Returns false if ggml fails.
    ///
    /// # Safety
    /// The graph and the memory of its tensors are valid, in host memory, and not used elsewhere.
    pub unsafe fn compute(&self, graph: NonNull<sys::ggml_cgraph>) -> bool {
        // SAFETY: ensured by the caller.
        unsafe { sys::ggml_backend_graph_compute(self.backend.as_ptr(), graph.as_ptr()) == sys::GGML_STATUS_SUCCESS }
    }
}

impl Drop for CpuBackend {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and freed once. A pool that is set is not touched.
        unsafe { sys::ggml_backend_free(self.backend.as_ptr()) };
    }
}

/// Returns the CPU's buffer type; null without a CPU backend.
pub(super) fn buffer_type() -> sys::ggml_backend_buffer_type_t {
    let device = device();
    if device.is_null() {
        return null_mut();
    }
    // SAFETY: the device exists.
    unsafe { sys::ggml_backend_dev_buffer_type(device) }
}
