//! Conversion of stored tensor values.

use super::model_info::type_layout;
use llama_cpp_sys_2 as sys;

/// Converts values of a tensor type, which are whole blocks, to 32-bit floats. Returns false if their number does not
/// match or the type has no conversion.
pub fn convert_to_floats(kind: u32, stored: &[u8], values: &mut [f32]) -> bool {
    let Some((block, bytes)) = type_layout(kind) else { return false };
    let blocks = values.len() as u64 / block;
    if blocks * block != values.len() as u64 || blocks.checked_mul(bytes) != Some(stored.len() as u64) {
        return false;
    }
    // SAFETY: `type_layout` knows the type, so it is within llama.cpp's table.
    let Some(convert) = (unsafe { (*sys::ggml_get_type_traits(kind)).to_float }) else { return false };
    // SAFETY: `stored` has the blocks of as many values as `values` has room for.
    unsafe { convert(stored.as_ptr().cast(), values.as_mut_ptr(), values.len() as i64) };
    true
}
