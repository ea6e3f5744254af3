//! LoRA adapters. llama-cpp-2 sets one adapter at a time, in place of all others, and keeps its pointers to itself.

use super::loading;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;
use std::ffi::CStr;
use std::ptr::NonNull;

/// The words of a [`LlamaContext`]: the pointer to llama.cpp's context, and a vector.
const WORDS: usize = 4;

const _: () = assert!(
    size_of::<LlamaContext<'static>>() == WORDS * size_of::<usize>(),
    "LlamaContext must be nothing but a pointer and a vector"
);

/// An adapter that llama.cpp has loaded. It belongs to its model, which frees it.
#[derive(Debug)]
pub struct Handle(NonNull<sys::llama_adapter_lora>);

// SAFETY: an adapter does not change after it was loaded.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Loads an adapter for a model of which no context was made yet.
///
/// # Errors
/// The error lines that llama.cpp wrote meanwhile; none when it was silent.
pub fn load(model: &mut LlamaModel, path: &CStr) -> Result<Handle, Vec<String>> {
    // SAFETY: `LlamaModel` is a transparent wrapper around this pointer, as asserted in `loading`; the path is
    // zero-terminated, and nobody else has the model while it is borrowed mutably.
    loading::with_error_lines(|| unsafe {
        let model: *mut sys::llama_model = std::mem::transmute_copy(model);
        NonNull::new(sys::llama_adapter_lora_init(model, path.as_ptr())).map(Handle)
    })
}

/// Whether the adapter holds only behind certain tokens.
pub fn is_activated(adapter: &Handle) -> bool {
    // SAFETY: the adapter lives as long as its model, which whoever asks holds.
    unsafe { sys::llama_adapter_get_alora_n_invocation_tokens(adapter.0.as_ptr()) > 0 }
}

/// Makes exactly these adapters hold in the context from the next decode on. `false` when the context cannot be reached.
pub fn set(context: &mut LlamaContext<'_>, adapters: &[(&Handle, f32)]) -> bool {
    let Some(raw) = raw(context) else { return false };
    let mut handles: Vec<_> = adapters.iter().map(|(handle, _)| handle.0.as_ptr()).collect();
    let mut scales: Vec<f32> = adapters.iter().map(|&(_, scale)| scale).collect();
    // SAFETY: `raw` is the context's own pointer; both lists have as many entries as is said.
    unsafe { sys::llama_set_adapters_lora(raw, handles.as_mut_ptr(), handles.len(), scales.as_mut_ptr()) == 0 }
}

/// llama.cpp's context. Rust does not say in which order the fields lie; but the vector, which only samplers on a GPU
/// fill, is empty, and its words are 0, 0 and an alignment, so that the only word which can be an address is the pointer.
pub(super) fn raw(context: &mut LlamaContext<'_>) -> Option<*mut sys::llama_context> {
    const LEAST_ADDRESS: usize = 4096;
    // SAFETY: the assertion above holds that there are that many words, and a pointer with a vector leaves no padding.
    let words: [usize; WORDS] = unsafe { std::ptr::from_mut(context).cast::<[usize; WORDS]>().read() };
    let mut addresses = words.into_iter().filter(|&word| word >= LEAST_ADDRESS);
    match (addresses.next(), addresses.next()) {
        (Some(address), None) => Some(std::ptr::with_exposed_provenance_mut(address)),
        _ => None,
    }
}
