//! LoRA adapters and control vectors. llama-cpp-2 sets one adapter at a time, in place of all others, and keeps its pointers to itself;
//! of control vectors it knows nothing.

use super::{loading, raw};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;
use std::ffi::CStr;
use std::ptr::NonNull;

/// An adapter that llama.cpp has loaded. It belongs to its model, which frees it.
#[derive(Debug)]
pub struct AdapterHandle(NonNull<sys::llama_adapter_lora>);

// SAFETY: an adapter does not change after it was loaded.
unsafe impl Send for AdapterHandle {}
// SAFETY: as above.
unsafe impl Sync for AdapterHandle {}

/// Loads an adapter for a model of which no context was made yet.
///
/// # Errors
/// The error lines that llama.cpp wrote meanwhile; none when it was silent.
pub fn load(model: &mut LlamaModel, path: &CStr) -> Result<AdapterHandle, Vec<String>> {
    // SAFETY: `LlamaModel` is a transparent wrapper around this pointer, as asserted in `loading`; the path is
    // zero-terminated, and nobody else has the model while it is borrowed mutably.
    loading::with_error_lines(|| unsafe {
        let model: *mut sys::llama_model = std::mem::transmute_copy(model);
        NonNull::new(sys::llama_adapter_lora_init(model, path.as_ptr())).map(AdapterHandle)
    })
}

/// Whether the adapter holds only behind certain tokens.
pub fn is_activated(adapter: &AdapterHandle) -> bool {
    // SAFETY: the adapter lives as long as its model, which whoever asks holds.
    unsafe { sys::llama_adapter_get_alora_n_invocation_tokens(adapter.0.as_ptr()) > 0 }
}

/// Makes exactly these adapters hold in the context from the next decode on. `false` when the context cannot be reached.
pub fn set(context: &mut LlamaContext<'_>, adapters: &[(&AdapterHandle, f32)]) -> bool {
    let Some(raw) = raw(context) else { return false };
    let mut handles: Vec<_> = adapters.iter().map(|(handle, _)| handle.0.as_ptr()).collect();
    let mut scales: Vec<f32> = adapters.iter().map(|&(_, scale)| scale).collect();
    // SAFETY: `raw` is the context's own pointer; both lists have as many entries as is said.
    unsafe { sys::llama_set_adapters_lora(raw, handles.as_mut_ptr(), handles.len(), scales.as_mut_ptr()) == 0 }
}

/// Adds directions to what comes out of the layers `first` to `last` of the context from the next decode on. `values` has one
/// of `width` values for each layer but the first. `false` when llama.cpp refuses, or the context cannot be reached.
pub fn set_control(context: &mut LlamaContext<'_>, values: &[f32], width: usize, first: i32, last: i32) -> bool {
    let (Some(raw), Ok(width)) = (raw(context), i32::try_from(width)) else { return false };
    // SAFETY: `raw` is the context's own pointer; llama.cpp compares the width with the model's, and reads at most as many
    // values as is said.
    unsafe { sys::llama_set_adapter_cvec(raw, values.as_ptr(), values.len(), width, first, last) == 0 }
}
