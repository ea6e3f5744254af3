//! Properties of a model that llama-cpp-2 does not expose, the layout of tensor types, and the names of file types.

use super::raw_model;
use llama_cpp_2::model::LlamaModel;
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

/// Returns the name of a model's file type, e.g. `Q8_0`.
pub fn file_type(model: &LlamaModel) -> String {
    // SAFETY: the pointer is the model's own.
    file_type_name(unsafe { sys::llama_model_ftype(raw_model(model)) })
}

/// Returns llama.cpp's number of a model's tokenizer type.
pub fn tokenizer_type(model: &LlamaModel) -> u32 {
    // SAFETY: the pointer is the model's own.
    unsafe { sys::llama_vocab_type(sys::llama_model_get_vocab(raw_model(model))) as u32 }
}

/// Returns the width of the sliding attention window, even if it follows from the architecture and the file does not
/// state it; 0 if all layers attend to all tokens.
pub fn window(model: &LlamaModel) -> u32 {
    // SAFETY: the pointer is the model's own.
    let width = unsafe { sys::llama_model_n_swa(raw_model(model)) };
    u32::try_from(width).unwrap_or(0)
}
