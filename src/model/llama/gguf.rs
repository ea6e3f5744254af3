//! The header of a GGUF file, validated before llama.cpp reads the file, because llama.cpp aborts the process on some
//! corrupt files.
//!
//! No count or length is trusted: each is compared with the rest of the file before memory is allocated for it.

use super::ffi::types::type_layout;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSIONS: u32 = 4;
/// llama.cpp's maximum length of tensor names in bytes.
const MAX_NAME_BYTES: u64 = 63;
/// Maximum length of stored texts in bytes; longer ones are skipped.
const MAX_TEXT_BYTES: u64 = 1 << 10;

/// Type number of 32-bit floats.
pub const F32: u32 = 0;

/// The header of a GGUF file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufHeader {
    /// Scalars and short texts, by key.
    pub metadata: HashMap<String, GgufScalar>,
    /// Number of entries of each array, by key.
    pub arrays: HashMap<String, u64>,
    /// Every tensor of this file.
    pub tensors: Vec<GgufTensor>,
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufScalar {
    /// An integer of any width and sign, or a Boolean as 0 or 1.
    Integer(i128),
    /// A float of either width.
    Float(f64),
    /// A text of up to a kilobyte.
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
        let length = file.metadata().map_err(GgufError::Io)?.len();
        Reader { file: BufReader::with_capacity(1 << 16, file), length, position: 0 }.header()
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

    /// Checks that rotary positions fit into the heads. llama.cpp does not check it, and aborts at the first token.
    ///
    /// # Errors
    /// They do not fit; the error has both sizes.
    pub fn check_rotary_positions(&self) -> Result<(), String> {
        let head_size = self.parameter("attention.key_length").or_else(|| {
            let heads = self.parameter("attention.head_count").filter(|&heads| heads > 0)?;
            Some(self.parameter("embedding_length")? / heads)
        });
        match (self.parameter("rope.dimension_count"), head_size) {
            (Some(rotated), Some(size)) if rotated > size => {
                Err(format!("`rope.dimension_count` is {rotated}, and must be at most the {size} values of a head"))
            }
            _ => Ok(()),
        }
    }
}

enum Value {
    Scalar(GgufScalar),
    Array(u64),
    LongText,
}

struct Reader<F> {
    file: F,
    length: u64,
    position: u64,
}

impl<F: Read + Seek> Reader<F> {
    fn header(&mut self) -> Result<GgufHeader, GgufError> {
        if self.length < 4 || &self.bytes::<4>("the magic")? != b"GGUF" {
            return Err(GgufError::Magic);
        }
        let version = self.u32("the version")?;
        if !VERSIONS.contains(&version) {
            let other =
                if VERSIONS.contains(&version.swap_bytes()) { ", or a file with the other byte order" } else { "" };
            return Err(damaged(format!("it is GGUF version {version}{other}; expected version 2 or 3")));
        }
        let tensors = self.u64("the number of tensors")?;
        let pairs = self.u64("the number of keys")?;
        // The smallest key has 8 + 1 + 4 + 1 bytes, the smallest tensor 8 + 4 + 4 + 8.
        self.check_remaining(pairs, 14, "keys")?;
        self.check_remaining(tensors, 24, "tensors")?;
        let mut header = GgufHeader::default();
        for number in 0..pairs {
            let key = self.text(&format!("key {number}"), u64::from(u16::MAX))?;
            let key = key.ok_or_else(|| damaged(format!("key {number} is longer than 65535 bytes")))?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind)?;
            if key.is_empty() || header.metadata.contains_key(&key) || header.arrays.contains_key(&key) {
                return Err(damaged(format!("key {number} is empty or a duplicate: '{key}'")));
            }
            match value {
                Value::Scalar(value) => {
                    header.metadata.insert(key, value);
                }
                Value::Array(count) => {
                    header.arrays.insert(key, count);
                }
                Value::LongText => {}
            }
        }
        let alignment = match header.metadata.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(GgufScalar::Integer(value)) if *value > 0 && *value <= 1 << 20 && value.count_ones() == 1 => {
                *value as u64
            }
            Some(other) => return Err(damaged(format!("general.alignment is {other:?}; it must be a power of 2"))),
        };
        for number in 0..tensors {
            let tensor = self.tensor(number)?;
            if tensor.offset.checked_add(tensor.size_bytes).is_none() {
                return Err(damaged(format!("tensor '{}' exceeds the maximum file size", tensor.name)));
            }
            header.tensors.push(tensor);
        }
        // Offsets are relative to the start of the data.
        let data = self.position.next_multiple_of(alignment);
        for tensor in &mut header.tensors {
            if data.checked_add(tensor.offset + tensor.size_bytes).is_none_or(|end| end > self.length) {
                return Err(self.truncated(&format!("tensor '{}'", tensor.name)));
            }
            tensor.offset += data;
        }
        Ok(header)
    }

    /// Reads the description of a tensor. Its offset is relative to the start of the data.
    fn tensor(&mut self, number: u64) -> Result<GgufTensor, GgufError> {
        let within = format!("tensor {number}");
        let name = self.text(&within, MAX_NAME_BYTES)?;
        let name = name.ok_or_else(|| damaged(format!("the name of tensor {number} is longer than 63 bytes")))?;
        let dimensions = self.u32(&within)?;
        if dimensions > MAX_DIMENSIONS {
            return Err(damaged(format!(
                "tensor '{name}' has {dimensions} dimensions; the maximum is {MAX_DIMENSIONS}"
            )));
        }
        let mut extents = Vec::new();
        let mut elements = 1u64;
        for _ in 0..dimensions {
            let extent = self.u64(&within)?;
            extents.push(extent);
            let product = elements.checked_mul(extent).filter(|&count| extent > 0 && i64::try_from(count).is_ok());
            elements = product.ok_or_else(|| damaged(format!("tensor '{name}' has an impossible shape")))?;
        }
        let kind = self.u32(&within)?;
        let (block, bytes) =
            type_layout(kind).ok_or_else(|| damaged(format!("tensor '{name}' is of unknown type {kind}")))?;
        let row = extents.first().copied().unwrap_or(1);
        if row % block != 0 {
            return Err(damaged(format!(
                "tensor '{name}' has rows of {row} values, which is not a multiple of {block}"
            )));
        }
        let size_bytes = (elements / block).checked_mul(bytes);
        let size_bytes = size_bytes.ok_or_else(|| damaged(format!("tensor '{name}' has an impossible size")))?;
        let offset = self.u64(&within)?;
        Ok(GgufTensor { name, kind, extents, offset, size_bytes })
    }

    /// Reads a value; entries of arrays and long texts are skipped.
    fn value(&mut self, key: &str, kind: u32) -> Result<Value, GgufError> {
        let within = format!("the value of '{key}'");
        let within = within.as_str();
        Ok(Value::Scalar(match kind {
            0 => GgufScalar::Integer(i128::from(self.bytes::<1>(within)?[0])),
            1 => GgufScalar::Integer(i128::from(self.bytes::<1>(within)?[0] as i8)),
            2 => GgufScalar::Integer(i128::from(u16::from_le_bytes(self.bytes(within)?))),
            3 => GgufScalar::Integer(i128::from(i16::from_le_bytes(self.bytes(within)?))),
            4 => GgufScalar::Integer(i128::from(self.u32(within)?)),
            5 => GgufScalar::Integer(i128::from(i32::from_le_bytes(self.bytes(within)?))),
            6 => GgufScalar::Float(f64::from(f32::from_le_bytes(self.bytes(within)?))),
            7 => match self.bytes::<1>(within)?[0] {
                bit @ (0 | 1) => GgufScalar::Integer(i128::from(bit)),
                other => return Err(damaged(format!("{within} is a Boolean, which must be 0 or 1, got {other}"))),
            },
            8 => match self.text(within, MAX_TEXT_BYTES)? {
                Some(text) => GgufScalar::Text(text),
                None => return Ok(Value::LongText),
            },
            9 => return Ok(Value::Array(self.array(within)?)),
            10 => GgufScalar::Integer(i128::from(self.u64(within)?)),
            11 => GgufScalar::Integer(i128::from(i64::from_le_bytes(self.bytes(within)?))),
            12 => GgufScalar::Float(f64::from_le_bytes(self.bytes(within)?)),
            other => return Err(damaged(format!("{within} is of unknown type {other}"))),
        }))
    }

    /// Skips the entries of an array and returns their number.
    fn array(&mut self, within: &str) -> Result<u64, GgufError> {
        let kind = self.u32(within)?;
        let count = self.u64(within)?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                self.check_remaining(count, 8, within)?;
                for _ in 0..count {
                    let length = self.u64(within)?;
                    self.skip(length, within)?;
                }
                return Ok(count);
            }
            other => return Err(damaged(format!("{within} is an array of the unknown type {other}"))),
        };
        let bytes = count.checked_mul(width).ok_or_else(|| self.truncated(within))?;
        self.skip(bytes, within)?;
        Ok(count)
    }

    /// Reads a text of up to `max` bytes; a longer one is skipped.
    fn text(&mut self, within: &str, max: u64) -> Result<Option<String>, GgufError> {
        let length = self.u64(within)?;
        if length > max {
            self.skip(length, within)?;
            return Ok(None);
        }
        self.check_remaining(length, 1, within)?;
        let mut bytes = vec![0; length as usize];
        self.fill(&mut bytes, within)?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn u32(&mut self, within: &str) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.bytes(within)?))
    }

    fn u64(&mut self, within: &str) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.bytes(within)?))
    }

    fn bytes<const N: usize>(&mut self, within: &str) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, within)?;
        Ok(bytes)
    }

    fn fill(&mut self, bytes: &mut [u8], within: &str) -> Result<(), GgufError> {
        self.check_remaining(bytes.len() as u64, 1, within)?;
        self.file.read_exact(bytes).map_err(GgufError::Io)?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn skip(&mut self, bytes: u64, within: &str) -> Result<(), GgufError> {
        self.check_remaining(bytes, 1, within)?;
        let offset = i64::try_from(bytes).map_err(|_| self.truncated(within))?;
        self.file.seek_relative(offset).map_err(GgufError::Io)?;
        self.position += bytes;
        Ok(())
    }

    /// Checks that the rest of the file can hold `count` items of `bytes` bytes each.
    fn check_remaining(&self, count: u64, bytes: u64, within: &str) -> Result<(), GgufError> {
        let left = self.length - self.position;
        if count.checked_mul(bytes).is_some_and(|needed| needed <= left) { Ok(()) } else { Err(self.truncated(within)) }
    }

    fn truncated(&self, within: &str) -> GgufError {
        GgufError::Truncated { within: within.to_owned(), file_bytes: self.length }
    }
}

fn damaged(reason: String) -> GgufError {
    GgufError::Damaged(reason)
}

#[cfg(test)]
mod tests {
    use super::{GgufError, GgufHeader, Reader};
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
    fn rotary_positions_must_fit_into_the_heads() {
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
            Reader { file: Cursor::new(bytes), length, position: 0 }.header().unwrap().check_rotary_positions()
        };
        assert_eq!(with_rotated(16), Ok(()));
        let error = with_rotated(17).unwrap_err();
        assert_eq!(error, "`rope.dimension_count` is 17, and must be at most the 16 values of a head");
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
            if let Ok(header) = (Reader { file: Cursor::new(bytes), length, position: 0 }).header() {
                prop_assert!(header.tensors.iter().all(|tensor| tensor.size_bytes <= length));
                prop_assert!(header.metadata.len() as u64 <= length / 14);
            }
        }
    }
}
