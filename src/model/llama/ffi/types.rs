//! The layout of tensor types.

use llama_cpp_sys_2 as sys;

/// Returns the number of values and of bytes in a block of a tensor type; `None` for an unknown type.
pub fn type_layout(kind: u32) -> Option<(u64, u64)> {
    if kind >= sys::GGML_TYPE_COUNT {
        return None;
    }
    // SAFETY: the type is within llama.cpp's table.
    let (block, bytes) = unsafe { (sys::ggml_blck_size(kind), sys::ggml_type_size(kind)) };
    // Removed types have neither.
    (block > 0 && bytes > 0).then_some((block as u64, bytes as u64))
}
