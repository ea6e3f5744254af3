//! Initialization of llama.cpp.

use super::ffi;
use crate::model::ModelError;
use llama_cpp_2::llama_backend::LlamaBackend;
use std::sync::OnceLock;

/// Returns llama.cpp's backend, which can be initialized only once per process.
///
/// # Errors
/// [`ModelError::Backend`] if llama.cpp cannot be initialized.
pub fn backend() -> Result<&'static LlamaBackend, ModelError> {
    static BACKEND: OnceLock<Result<LlamaBackend, String>> = OnceLock::new();
    BACKEND
        .get_or_init(|| {
            llama_cpp_2::send_logs_to_tracing(llama_cpp_2::LogOptions::default());
            ffi::loading::capture_error_lines();
            #[cfg(feature = "portable")]
            load_libraries()?;
            LlamaBackend::init().map_err(|error| error.to_string())
        })
        .as_ref()
        .map_err(|reason| ModelError::Backend(reason.clone()))
}

/// Loads llama.cpp's CPU backend for this processor, and the backends of other devices, from the folder `lib` next to
/// the program.
#[cfg(feature = "portable")]
fn load_libraries() -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| format!("the program's own path is unknown: {error}"))?;
    let folder = program.with_file_name("lib");
    if folder.to_str().is_none() {
        return Err(format!("the path {} is not valid UTF-8; install Thunder elsewhere", folder.display()));
    }
    llama_cpp_2::llama_backend::load_backends_from_path(&folder);
    if ffi::cpu::device().is_null() {
        let folder = folder.display();
        return Err(format!("no usable libggml-cpu-*.so in {folder}; keep the folder `lib` next to the program"));
    }
    Ok(())
}
