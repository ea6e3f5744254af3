//! The layout of tensor types, and the names of file types.

use llama_cpp_sys_2 as sys;
use std::ffi::CStr;

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

/// Returns the name of a file type.
pub fn file_type_name(number: u32) -> String {
    // SAFETY: llama.cpp accepts every number; the name is a constant.
    unsafe {
        let name = sys::llama_ftype_name(number);
        if name.is_null() { String::new() } else { CStr::from_ptr(name).to_string_lossy().into_owned() }
    }
}
