//! Model loading with all parameters of llama.cpp, and the error lines of a failed load.
//!
//! llama-cpp-2 cannot pass `tensor_split`, and writes the reason of a failed load only to the log.

use super::devices::{buffer, handles};
use crate::model::llama::MetadataValue;
use crate::model::llama::devices::TensorRule;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;
use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_void};
use std::ptr::{NonNull, null, null_mut};
use std::sync::OnceLock;

/// Maximum error lines kept per load.
const MAX_LINES: usize = 16;

/// Parameters of a load in llama.cpp's terms.
#[derive(Debug, Clone, Default)]
pub struct LoadParams {
    /// Names of the GPUs, in order; empty for CPU only.
    pub devices: Vec<String>,
    /// Number of layers on GPUs; negative for all.
    pub gpu_layers: i32,
    /// Split over several GPUs; `None` for llama.cpp's default.
    pub split_mode: Option<sys::llama_split_mode>,
    /// Share of each GPU, as proportions; empty for llama.cpp's choice.
    pub tensor_split: Vec<f32>,
    /// Tensors that are not placed with their layers.
    pub tensors: Vec<TensorRule>,
    /// True to map the file instead of reading it.
    pub mmap: bool,
    /// True to lock the weights in memory.
    pub mlock: bool,
    /// True to check the weights for invalid numbers.
    pub check_tensors: bool,
    /// True to keep weights in the layout of the file.
    pub no_repack: bool,
    /// True to leave the host buffers of GPUs unused, so that weights on the CPU can have CPU-specific layouts.
    pub no_host: bool,
    /// Metadata overrides, by key.
    pub overrides: Vec<(String, MetadataValue)>,
    /// True to read everything but the weights.
    pub no_alloc: bool,
}

/// Loads a model. `progress` receives 0 … 1 and cancels the load by returning false.
///
/// # Errors
/// llama.cpp's error lines; empty if it logged none.
pub fn load<F: FnMut(f32) -> bool>(
    path: &CStr,
    loading: &LoadParams,
    mut progress: F,
) -> Result<LlamaModel, Vec<String>> {
    unsafe extern "C" fn on_progress<F: FnMut(f32) -> bool>(done: f32, user_data: *mut c_void) -> bool {
        // SAFETY: `user_data` is the closure below, which outlives the load and is not accessed elsewhere during it.
        let progress = unsafe { &mut *user_data.cast::<F>() };
        // A panic must not unwind into C++.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| progress(done))).unwrap_or(false)
    }
    let mut shares = loading.tensor_split.clone();
    // SAFETY: plain functions without preconditions.
    let (mut params, max_devices) = unsafe { (sys::llama_model_default_params(), sys::llama_max_devices()) };
    // llama.cpp reads as many entries as the maximum number of devices.
    shares.resize(max_devices.max(shares.len()), 0.0);
    let mut devices = handles(&loading.devices);
    params.devices = devices.as_mut_ptr();
    params.n_gpu_layers = loading.gpu_layers;
    if let Some(mode) = loading.split_mode {
        params.split_mode = mode;
    }
    params.tensor_split = if loading.tensor_split.is_empty() { null() } else { shares.as_ptr() };
    params.load_mode = match (loading.mmap, loading.mlock) {
        (false, false) => sys::LLAMA_LOAD_MODE_NONE,
        // Some GPUs cannot load weights from a mapping.
        (true, false) if !loading.devices.is_empty() => sys::LLAMA_LOAD_MODE_AUTO,
        (true, false) => sys::LLAMA_LOAD_MODE_MMAP,
        (false, true) => sys::LLAMA_LOAD_MODE_MLOCK,
        (true, true) => sys::LLAMA_LOAD_MODE_MMAP_MLOCK,
    };
    if loading.no_alloc {
        params.no_alloc = true;
        params.load_mode = sys::LLAMA_LOAD_MODE_NONE;
    }
    params.check_tensors = loading.check_tensors;
    params.use_extra_bufts = !loading.no_repack;
    params.no_host = loading.no_host;
    // llama.cpp reads entries up to one without a key.
    let overrides: Vec<_> = loading.overrides.iter().map(Some).chain([None]).map(raw_override).collect();
    if !loading.overrides.is_empty() {
        params.kv_overrides = overrides.as_ptr();
    }
    // llama.cpp reads entries up to one without a pattern.
    let rules = loading.tensors.iter().map(|rule| (rule.pattern.as_ptr(), buffer(&rule.buffer)));
    let rules = rules.chain([(null(), null_mut())]);
    let rules: Vec<_> = rules.map(|(pattern, buft)| sys::llama_model_tensor_buft_override { pattern, buft }).collect();
    if !loading.tensors.is_empty() {
        params.tensor_buft_overrides = rules.as_ptr();
    }
    params.progress_callback = Some(on_progress::<F>);
    params.progress_callback_user_data = (&raw mut progress).cast();
    // SAFETY: the path is zero-terminated, and everything that `params` points to outlives the call.
    let model = with_error_lines(|| NonNull::new(unsafe { sys::llama_model_load_from_file(path.as_ptr(), params) }))?;
    // SAFETY: `LlamaModel` is a transparent wrapper around exactly this pointer, as asserted in `ffi`, and owns it from
    // here on.
    Ok(unsafe { std::mem::transmute::<NonNull<sys::llama_model>, LlamaModel>(model) })
}

fn raw_override(entry: Option<&(String, MetadataValue)>) -> sys::llama_model_kv_override {
    // SAFETY: the structure consists of numbers and texts, for which zero is a valid value.
    let mut raw: sys::llama_model_kv_override = unsafe { std::mem::zeroed() };
    let Some((key, value)) = entry else { return raw };
    write_text(&mut raw.key, key);
    match value {
        MetadataValue::Int(number) => {
            raw.tag = sys::LLAMA_KV_OVERRIDE_TYPE_INT;
            raw.__bindgen_anon_1.val_i64 = *number;
        }
        MetadataValue::Float(number) => {
            raw.tag = sys::LLAMA_KV_OVERRIDE_TYPE_FLOAT;
            raw.__bindgen_anon_1.val_f64 = *number;
        }
        MetadataValue::Bool(yes) => {
            raw.tag = sys::LLAMA_KV_OVERRIDE_TYPE_BOOL;
            raw.__bindgen_anon_1.val_bool = *yes;
        }
        MetadataValue::Text(text) => {
            raw.tag = sys::LLAMA_KV_OVERRIDE_TYPE_STR;
            let mut bytes = [0; 128];
            write_text(&mut bytes, text);
            raw.__bindgen_anon_1.val_str = bytes;
        }
    }
    raw
}

/// Writes as much as fits before the final zero.
fn write_text(to: &mut [c_char; 128], text: &str) {
    for (to, &byte) in to[..127].iter_mut().zip(text.as_bytes()) {
        *to = byte as c_char;
    }
}

/// Returns the result of llama.cpp, or the error lines it logged instead.
pub(super) fn with_error_lines<T>(make: impl FnOnce() -> Option<T>) -> Result<T, Vec<String>> {
    LINES.with_borrow_mut(Vec::clear);
    make().ok_or_else(|| LINES.take())
}

/// The previous destination of log lines.
struct Sink {
    callback: sys::ggml_log_callback,
    user_data: *mut c_void,
}

// SAFETY: llama.cpp calls the callback from any thread, with this data.
unsafe impl Send for Sink {}
// SAFETY: as above; a sink never changes.
unsafe impl Sync for Sink {}

thread_local! {
    /// Error lines of the load on this thread.
    static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Records the error lines of loads, and forwards every line to its previous destination. Call it once, after the log
/// is set up.
pub fn capture_error_lines() {
    static LLAMA: OnceLock<Sink> = OnceLock::new();
    static GGML: OnceLock<Sink> = OnceLock::new();
    let mut llama = Sink { callback: None, user_data: null_mut() };
    let mut ggml = Sink { callback: None, user_data: null_mut() };
    // SAFETY: the pointers are valid for writes; the sinks are never freed.
    unsafe {
        sys::llama_log_get(&raw mut llama.callback, &raw mut llama.user_data);
        sys::ggml_log_get(&raw mut ggml.callback, &raw mut ggml.user_data);
        let address = |sink: &'static Sink| std::ptr::from_ref(sink).cast_mut().cast::<c_void>();
        sys::llama_log_set(Some(on_line), address(LLAMA.get_or_init(|| llama)));
        // Setting llama.cpp's log also sets ggml's, so this comes second.
        sys::ggml_log_set(Some(on_line), address(GGML.get_or_init(|| ggml)));
        // The image encoder's log has no getter; its lines go to llama.cpp's destination.
        if let Some(llama) = LLAMA.get() {
            sys::mtmd_helper_log_set(Some(on_line), address(llama));
        }
    }
}

unsafe extern "C" fn on_line(level: sys::ggml_log_level, text: *const c_char, user_data: *mut c_void) {
    if level == sys::GGML_LOG_LEVEL_ERROR && !text.is_null() {
        // SAFETY: llama.cpp's lines are zero-terminated.
        let line = unsafe { CStr::from_ptr(text) }.to_string_lossy().trim_end().to_owned();
        LINES.with_borrow_mut(|lines| {
            if lines.len() < MAX_LINES {
                lines.push(line);
            }
        });
    }
    // SAFETY: `user_data` is one of the sinks set above.
    let sink = unsafe { &*user_data.cast::<Sink>() };
    if let Some(callback) = sink.callback {
        // SAFETY: the arguments are those of the original callback.
        unsafe { callback(level, text, sink.user_data) };
    }
}
