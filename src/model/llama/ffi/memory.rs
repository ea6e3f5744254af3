//! Properties of a context's memory that llama-cpp-2 does not expose.

use super::raw_context;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_sys_2 as sys;

/// Returns true if keys can be shifted to other positions. llama.cpp aborts the process if it is asked to shift other
/// keys.
pub fn can_shift(context: &mut LlamaContext<'_>) -> bool {
    let Some(raw) = raw_context(context) else { return false };
    // SAFETY: `raw` is the context's own pointer, and its memory lives as long as it does.
    unsafe {
        let memory = sys::llama_get_memory(raw);
        !memory.is_null() && sys::llama_memory_can_shift(memory)
    }
}
