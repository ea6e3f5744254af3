//! Properties of a model's and a context's memory that llama-cpp-2 does not expose.

use super::raw;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_sys_2 as sys;

/// Returns the width of the sliding attention window, even if it follows from the architecture and the file does not
/// state it; 0 if all layers attend to all tokens.
pub fn window(model: &LlamaModel) -> u32 {
    // SAFETY: `LlamaModel` is a transparent wrapper around this pointer, as asserted in `loading`.
    let width = unsafe {
        let model: *const sys::llama_model = std::mem::transmute_copy(model);
        sys::llama_model_n_swa(model)
    };
    u32::try_from(width).unwrap_or(0)
}

/// Returns true if keys can be shifted to other positions. llama.cpp aborts the process if it is asked to shift other
/// keys.
pub fn can_shift(context: &mut LlamaContext<'_>) -> bool {
    let Some(raw) = raw(context) else { return false };
    // SAFETY: `raw` is the context's own pointer, and its memory lives as long as it does.
    unsafe {
        let memory = sys::llama_get_memory(raw);
        !memory.is_null() && sys::llama_memory_can_shift(memory)
    }
}
