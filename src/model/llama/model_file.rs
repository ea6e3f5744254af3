//! A model file, validated before llama.cpp loads it.

use super::gguf::{GgufError, GgufHeader};
use crate::model::ModelError;
use llama_cpp_2::model::LlamaModel;
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

    /// Checks the values of the header, and the types of the tensors in the other files of a split model. Files that cannot
    /// be read are left to the load.
    ///
    /// # Errors
    /// [`ModelError::Load`] for a value with which llama.cpp would abort the process at the first token.
    pub fn check_values(&self, others: &[PathBuf]) -> Result<(), ModelError> {
        self.header.check_values().map_err(|reason| self.load_error(reason))?;
        check_others(others, GgufHeader::check_types)
    }

    /// Checks that the files of the model can be mapped.
    ///
    /// # Errors
    /// [`ModelError::Load`] for weights that are not aligned, with which llama.cpp would abort the process.
    pub fn check_alignment(&self, others: &[PathBuf]) -> Result<(), ModelError> {
        self.header.check_alignment().map_err(|reason| self.load_error(reason))?;
        check_others(others, GgufHeader::check_alignment)
    }

    /// Checks the rotary dimensions in the header if the architecture rotates.
    ///
    /// # Errors
    /// [`ModelError::Load`] for a number with which llama.cpp would abort the process at the first token.
    pub fn check_rotary_dimensions(&self, llama: &LlamaModel) -> Result<(), ModelError> {
        if llama.rope_type().is_none() {
            return Ok(());
        }
        self.header.check_rotary_dimensions().map_err(|reason| self.load_error(reason))
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

/// Checks the headers of the other files of a split model, except of those that cannot be read.
fn check_others(others: &[PathBuf], check: impl Fn(&GgufHeader) -> Result<(), String>) -> Result<(), ModelError> {
    others.iter().try_for_each(|other| match GgufHeader::read(other) {
        Ok(header) => check(&header).map_err(|reason| load_error(other, reason)),
        Err(_) => Ok(()),
    })
}

fn unreadable(path: &Path, source: std::io::Error) -> ModelError {
    ModelError::Unreadable { path: path.display().to_string(), source }
}

fn load_error(path: &Path, reason: String) -> ModelError {
    ModelError::Load { path: path.display().to_string(), reason }
}
