//! The list of devices with what llama-cpp-2 leaves out of it: which of them are the same.

use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString, c_char};

/// Something that llama.cpp can compute on.
pub struct RawDevice {
    /// llama.cpp's name.
    pub name: String,
    /// What a person knows it by.
    pub description: String,
    /// The backend that drives it, e.g. `CUDA`.
    pub backend: String,
    /// llama.cpp's name of its memory.
    pub buffer: String,
    /// What it is.
    pub kind: sys::ggml_backend_dev_type,
    /// Whether a weight can be cut into rows for several of them.
    pub cuts_rows: bool,
    /// The same for all backends that drive the same device; `None` when it does not tell.
    pub id: Option<String>,
    /// Bytes of its memory; 0 when it does not tell.
    pub memory_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
}

/// All devices, in llama.cpp's order.
pub fn list() -> Vec<RawDevice> {
    let text = |text: *const c_char| {
        // SAFETY: names are zero-terminated and live as long as the program.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned())
    };
    // SAFETY: every index below the count is a device, devices live as long as the program, and `props` is theirs to fill.
    unsafe {
        (0..sys::ggml_backend_dev_count())
            .map(|index| {
                let device = sys::ggml_backend_dev_get(index);
                let mut props: sys::ggml_backend_dev_props = std::mem::zeroed();
                sys::ggml_backend_dev_get_props(device, &raw mut props);
                let backend = sys::ggml_backend_dev_backend_reg(device);
                let cut = sys::ggml_backend_reg_get_proc_address(backend, c"ggml_backend_split_buffer_type".as_ptr());
                RawDevice {
                    name: text(props.name).unwrap_or_default(),
                    description: text(props.description).unwrap_or_default(),
                    backend: text(sys::ggml_backend_reg_name(backend)).unwrap_or_default(),
                    buffer: text(sys::ggml_backend_buft_name(sys::ggml_backend_dev_buffer_type(device)))
                        .unwrap_or_default(),
                    cuts_rows: !cut.is_null(),
                    kind: props.type_,
                    id: text(props.device_id),
                    memory_bytes: props.memory_total as u64,
                    free_bytes: props.memory_free as u64,
                }
            })
            .collect()
    }
}

/// The devices of these names and a null, as llama.cpp takes them; names that there are not are left out.
pub(super) fn handles(names: &[String]) -> Vec<sys::ggml_backend_dev_t> {
    let names = names.iter().filter_map(|name| CString::new(name.as_str()).ok());
    // SAFETY: the name is zero-terminated.
    let found = names.map(|name| unsafe { sys::ggml_backend_dev_by_name(name.as_ptr()) });
    found.filter(|device| !device.is_null()).chain([std::ptr::null_mut()]).collect()
}

/// The memory of that name; the processor's when there is none.
pub(super) fn buffer(name: &str) -> sys::ggml_backend_buffer_type_t {
    // SAFETY: every index below the count is a device; devices, their buffer types and the names of those live as long as the
    // program.
    unsafe {
        (0..sys::ggml_backend_dev_count())
            .map(|index| sys::ggml_backend_dev_buffer_type(sys::ggml_backend_dev_get(index)))
            .find(|&buffer| CStr::from_ptr(sys::ggml_backend_buft_name(buffer)).to_bytes() == name.as_bytes())
            .unwrap_or_else(|| sys::ggml_backend_cpu_buffer_type())
    }
}
