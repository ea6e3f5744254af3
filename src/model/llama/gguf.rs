//! The header of a GGUF file, validated before llama.cpp reads the file, because llama.cpp aborts the process on some
//! corrupt files.
//!
//! No count or length is trusted: each is compared with the rest of the file before memory is allocated for it.

mod checks;
mod file;
mod header_reader;

pub use file::{GgufFile, Matrix, RowReader};

use super::ffi::model_info;
use header_reader::HeaderReader;
use std::collections::HashMap;
use std::fs::File;
use std::path::Path;

/// Type number of 32-bit floats.
pub const F32: u32 = 0;

/// The header of a GGUF file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufHeader {
    /// Scalars and short texts, by key.
    pub metadata: HashMap<String, GgufScalar>,
    /// Arrays without their entries, by key.
    pub arrays: HashMap<String, GgufArray>,
    /// Every tensor of this file.
    pub tensors: Vec<GgufTensor>,
}

/// An array without its entries.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GgufArray {
    /// Number of entries.
    pub count: u64,
    /// Position of the first entry in the file if the entries are texts.
    pub texts_start: Option<u64>,
    /// Largest entry if the entries are integers of 32 bits, as in lists with one number per layer.
    pub maximum: Option<u32>,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufScalar {
    /// An integer of any width and sign, or a Boolean as 0 or 1.
    Integer(i128),
    /// A float of either width.
    Float(f64),
    /// A text of up to 64 KiB.
    Text(String),
}

/// A tensor without its values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GgufTensor {
    /// Name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Type number of its values, e.g. [`F32`].
    pub kind: u32,
    /// Number of values along each axis, innermost first.
    pub extents: Vec<u64>,
    /// Offset of its values in the file, in bytes.
    pub offset: u64,
    /// Size of its values in bytes.
    pub size_bytes: u64,
}

/// The reason why a file is not a loadable GGUF file.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(std::io::Error),
    /// The file has another format.
    #[error("the file does not begin with 'GGUF'")]
    Magic,
    /// The file ends too early.
    #[error("the file ends in the middle of {within}; it has {file_bytes} bytes and is incomplete")]
    Truncated {
        /// The part being read.
        within: String,
        /// Size of the file in bytes.
        file_bytes: u64,
    },
    /// The file is inconsistent or violates the format.
    #[error("{0}")]
    Damaged(String),
}

impl GgufHeader {
    /// Reads and validates the header of a file.
    ///
    /// # Errors
    /// [`GgufError`] for the first error in the file.
    pub fn read(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path).map_err(GgufError::Io)?;
        HeaderReader::from_file(&file)?.read_header()
    }

    /// Returns the integer with this key.
    #[must_use]
    pub fn integer(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key)? {
            GgufScalar::Integer(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// Returns the text with this key.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key)? {
            GgufScalar::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Returns the integer `key` of the file's architecture, e.g. `block_count`.
    #[must_use]
    pub fn parameter(&self, key: &str) -> Option<u64> {
        self.integer(&format!("{}.{key}", self.text("general.architecture")?))
    }

    /// Returns the largest number in the array `key` of the file's architecture, e.g. `attention.head_count_kv`.
    #[must_use]
    pub fn array_maximum(&self, key: &str) -> Option<u32> {
        self.arrays.get(&format!("{}.{key}", self.text("general.architecture")?))?.maximum
    }

    /// Returns the number of weights in this file.
    #[must_use]
    pub fn parameter_count(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.extents.iter().product::<u64>()).sum()
    }

    /// Returns the name of the file type, e.g. `Q8_0`; empty if the file has none.
    #[must_use]
    pub fn file_type(&self) -> String {
        let number = self.integer("general.file_type").and_then(|number| u32::try_from(number).ok());
        number.map(model_info::file_type_name).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::{GgufError, GgufHeader, HeaderReader};
    use proptest::prelude::*;
    use std::io::Cursor;
    use std::path::{Path, PathBuf};

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models").join(name)
    }

    #[test]
    fn header_is_parsed() {
        let header = GgufHeader::read(&fixture("tiny.gguf")).unwrap();
        assert!(header.parameter("block_count").unwrap() > 0);
        assert!(header.tensors.iter().any(|tensor| tensor.name == "token_embd.weight" && tensor.size_bytes > 0));
    }

    #[test]
    fn array_with_one_number_per_layer_has_maximum() {
        let header = GgufHeader::read(&fixture("../memories/hybrid.gguf")).unwrap();
        assert_eq!(header.array_maximum("attention.head_count_kv"), Some(1));
        assert_eq!(header.array_maximum("attention.head_count"), None, "it is a single number");
    }

    #[test]
    fn rotary_dimensions_must_fit_into_the_heads() {
        let whole = std::fs::read(fixture("tiny.gguf")).unwrap();
        let with_rotated = |rotated: u32| {
            let mut bytes = whole[..16].to_vec();
            bytes.extend((u64::from_le_bytes(whole[16..24].try_into().unwrap()) + 1).to_le_bytes());
            let name = "qwen2.rope.dimension_count";
            bytes.extend((name.len() as u64).to_le_bytes());
            bytes.extend(name.as_bytes());
            bytes.extend(4_u32.to_le_bytes());
            bytes.extend(rotated.to_le_bytes());
            bytes.extend(&whole[24..]);
            // The weights begin at a multiple of 32 bytes, and end later by as much.
            bytes.extend([0; 32]);
            let length = bytes.len() as u64;
            HeaderReader::new(Cursor::new(bytes), length).read_header().unwrap().check_rotary_dimensions()
        };
        assert_eq!(with_rotated(16), Ok(()));
        let error = with_rotated(18).unwrap_err();
        assert_eq!(error, "`rope.dimension_count` must be at most 16, the size of a head, got 18");
    }

    #[test]
    fn every_truncation_is_reported() {
        let whole = std::fs::read(fixture("tiny.gguf")).unwrap();
        let path = std::env::temp_dir().join(format!("thunder-truncated-{}.gguf", std::process::id()));
        // Every byte of the beginning, then in steps that cover all parts.
        let lengths = (0..4096).chain((4096..whole.len()).step_by(997)).chain([whole.len() - 1]);
        for length in lengths {
            std::fs::write(&path, &whole[..length]).unwrap();
            let error = GgufHeader::read(&path).unwrap_err();
            assert!(matches!(error, GgufError::Truncated { .. } | GgufError::Magic), "{length}: {error}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn texts_after_the_end_are_reported() {
        let error = HeaderReader::new(Cursor::new([0; 4]), 4).read_texts("key", 9, 1).unwrap_err();
        assert!(matches!(error, GgufError::Truncated { .. }), "{error}");
    }

    proptest! {
        /// A modified header is either parsed or rejected, and parsed offsets lie within the file.
        #[test]
        fn changed_bytes_are_parsed_or_rejected(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            long in prop::option::of((any::<prop::sample::Index>(), any::<u64>())),
        ) {
            static WHOLE: std::sync::LazyLock<Vec<u8>> =
                std::sync::LazyLock::new(|| std::fs::read(fixture("tiny.gguf")).unwrap());
            let length = WHOLE.len() as u64;
            let size: u64 = GgufHeader::read(&fixture("tiny.gguf")).unwrap().tensors.iter().map(|tensor| tensor.size_bytes).sum();
            let mut bytes = WHOLE.clone();
            let header = bytes.len() - size as usize;
            for (at, byte) in changes {
                bytes[at.index(header)] = byte;
            }
            if let Some((at, number)) = long {
                bytes[at.index(header)..][..8].copy_from_slice(&number.to_le_bytes());
            }
            if let Ok(header) = HeaderReader::new(Cursor::new(bytes), length).read_header() {
                prop_assert!(header.tensors.iter().all(|tensor| tensor.size_bytes <= length));
                prop_assert!(header.metadata.len() as u64 <= length / 14);
            }
        }
    }
}
