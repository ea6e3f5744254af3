//! The list of devices with a field that llama-cpp-2 omits: the id, which identifies a device across backends.

use super::cpu;
use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString, c_char};

/// A device that llama.cpp can compute on.
pub struct RawDevice {
    /// llama.cpp's name.
    pub name: String,
    /// Human-readable name.
    pub description: String,
    /// The backend of the device, e.g. `CUDA`.
    pub backend: String,
    /// llama.cpp's name of its buffer type.
    pub buffer: String,
    /// Type of the device.
    pub kind: sys::ggml_backend_dev_type,
    /// True if the backend can split weights by rows over several devices.
    pub splits_rows: bool,
    /// Id that is the same for all backends of a device; `None` if unknown.
    pub id: Option<String>,
    /// Total memory in bytes; 0 if unknown.
    pub memory_bytes: u64,
    /// Free memory in bytes.
    pub free_bytes: u64,
}

/// Returns all devices in llama.cpp's order.
pub fn list() -> Vec<RawDevice> {
    let text = |text: *const c_char| {
        // SAFETY: names are zero-terminated and live as long as the program.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned())
    };
    // SAFETY: every index below the count is a device, devices live as long as the program, and the call fills `props`.
    unsafe {
        (0..sys::ggml_backend_dev_count())
            .map(|index| {
                let device = sys::ggml_backend_dev_get(index);
                let mut props: sys::ggml_backend_dev_props = std::mem::zeroed();
                sys::ggml_backend_dev_get_props(device, &raw mut props);
                let backend = sys::ggml_backend_dev_backend_reg(device);
                let split_buffer_type =
                    sys::ggml_backend_reg_get_proc_address(backend, c"ggml_backend_split_buffer_type".as_ptr());
                RawDevice {
                    name: text(props.name).unwrap_or_default(),
                    description: text(props.description).unwrap_or_default(),
                    backend: text(sys::ggml_backend_reg_name(backend)).unwrap_or_default(),
                    buffer: text(sys::ggml_backend_buft_name(sys::ggml_backend_dev_buffer_type(device)))
                        .unwrap_or_default(),
                    splits_rows: !split_buffer_type.is_null(),
                    kind: props.type_,
                    id: text(props.device_id),
                    memory_bytes: props.memory_total as u64,
                    free_bytes: props.memory_free as u64,
                }
            })
            .collect()
    }
}

/// Returns the devices with these names and a final null, as llama.cpp expects; unknown names are left out.
pub(super) fn handles(names: &[String]) -> Vec<sys::ggml_backend_dev_t> {
    let names = names.iter().filter_map(|name| CString::new(name.as_str()).ok());
    // SAFETY: the name is zero-terminated.
    let found = names.map(|name| unsafe { sys::ggml_backend_dev_by_name(name.as_ptr()) });
    found.filter(|device| !device.is_null()).chain([std::ptr::null_mut()]).collect()
}

/// Returns the buffer type with this name; the CPU's if no other has this name.
pub(super) fn buffer(name: &str) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: every index below the count is a device; devices, their buffer types and the names of those live as long
    // as the program.
    unsafe {
        (0..sys::ggml_backend_dev_count())
            .map(|index| sys::ggml_backend_dev_buffer_type(sys::ggml_backend_dev_get(index)))
            .find(|&buffer| CStr::from_ptr(sys::ggml_backend_buft_name(buffer)).to_bytes() == name.as_bytes())
            .unwrap_or_else(cpu::buffer_type)
    }
}
