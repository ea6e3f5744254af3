//! A model file, validated before llama.cpp loads it.

use super::gguf::{GgufError, GgufHeader};
use crate::model::ModelError;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A GGUF file with a valid header.
pub struct ModelFile {
    path: PathBuf,
    /// The path for llama.cpp.
    pub c_path: CString,
    pub header: GgufHeader,
}

impl ModelFile {
    /// Reads and validates the header of a file.
    ///
    /// # Errors
    /// [`ModelError::Unreadable`] and [`ModelError::Load`].
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let c_path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| load_error(path, "its path contains a NUL byte".into()))?;
        let header = GgufHeader::read(path).map_err(|error| match error {
            GgufError::Io(source) => unreadable(path, source),
            other => load_error(path, other.to_string()),
        })?;
        Ok(Self { path: path.to_owned(), c_path, header })
    }

    /// Returns the error for a file that cannot be read.
    pub fn unreadable(&self, source: std::io::Error) -> ModelError {
        unreadable(&self.path, source)
    }

    /// Returns the error for a file that cannot be loaded.
    pub fn load_error(&self, reason: String) -> ModelError {
        load_error(&self.path, reason)
    }

    /// Returns the error for a load without enough memory.
    pub fn no_memory(&self, reason: String) -> ModelError {
        ModelError::NoMemory { path: self.path.display().to_string(), reason }
    }
}

fn unreadable(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::Unreadable { path: path.display().to_string(), source }
}

fn load_error(path: &Path, reason: String) -> ModelError {
    ModelError::Load { path: path.display().to_string(), reason }
}
