//! LoRA adapters and control vectors. llama-cpp-2 sets one adapter at a time, replacing all others, and hides its
//! pointers; it does not support control vectors.

use super::{loading, raw_context, raw_model};
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;
use std::ffi::CStr;
use std::ptr::NonNull;

/// An adapter loaded by llama.cpp. The model owns and frees it.
#[derive(Debug)]
pub struct AdapterHandle(NonNull<sys::llama_adapter_lora>);

// SAFETY: an adapter does not change after loading.
unsafe impl Send for AdapterHandle {}
// SAFETY: as above.
unsafe impl Sync for AdapterHandle {}

/// Loads an adapter for a model without contexts.
///
/// # Errors
/// llama.cpp's error lines; empty if it logged none.
pub fn load(model: &mut LlamaModel, path: &CStr) -> Result<AdapterHandle, Vec<String>> {
    // SAFETY: the pointer is the model's own, the path is zero-terminated, and the model is borrowed mutably.
    loading::with_error_lines(|| unsafe {
        NonNull::new(sys::llama_adapter_lora_init(raw_model(model), path.as_ptr())).map(AdapterHandle)
    })
}

/// Returns true if the adapter is activated by tokens of the prompt (aLoRA).
pub fn needs_activation(adapter: &AdapterHandle) -> bool {
    // SAFETY: the adapter lives as long as its model, which the caller holds.
    unsafe { sys::llama_adapter_get_alora_n_invocation_tokens(adapter.0.as_ptr()) > 0 }
}

/// Activates exactly these adapters in the context from the next decode on. Returns `false` if the context is not
/// accessible.
pub fn set(context: &mut LlamaContext<'_>, adapters: &[(&AdapterHandle, f32)]) -> bool {
    let Some(raw) = raw_context(context) else { return false };
    let mut handles: Vec<_> = adapters.iter().map(|(handle, _)| handle.0.as_ptr()).collect();
    let mut scales: Vec<f32> = adapters.iter().map(|&(_, scale)| scale).collect();
    // SAFETY: `raw` is the context's own pointer; both lists have the given number of entries.
    unsafe { sys::llama_set_adapters_lora(raw, handles.as_mut_ptr(), handles.len(), scales.as_mut_ptr()) == 0 }
}

/// Adds directions to the output of the layers `first` to `last` of the context from the next decode on. `values` has
/// `width` values for each layer but the first. Returns `false` if llama.cpp rejects them, or the context is not
/// accessible.
pub fn set_control(context: &mut LlamaContext<'_>, values: &[f32], width: usize, first: i32, last: i32) -> bool {
    let (Some(raw), Ok(width)) = (raw_context(context), i32::try_from(width)) else { return false };
    // SAFETY: `raw` is the context's own pointer; llama.cpp compares the width with the model's, and reads no more than
    // the given number of values. The last decode, which may still read the previous values, ends first.
    unsafe {
        sys::llama_synchronize(raw);
        sys::llama_set_adapter_cvec(raw, values.as_ptr(), values.len(), width, first, last) == 0
    }
}

/// Removes the directions of [`set_control`] from the next decode on. Returns `false` if the context is not accessible.
pub fn clear_control(context: &mut LlamaContext<'_>) -> bool {
    let Some(raw) = raw_context(context) else { return false };
    // SAFETY: `raw` is the context's own pointer; without values llama.cpp removes the directions.
    unsafe { sys::llama_set_adapter_cvec(raw, std::ptr::null(), 0, 0, -1, -1) == 0 }
}
