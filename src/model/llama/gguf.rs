//! The header of a GGUF: read and checked before llama.cpp sees the file, which ends the process over some damages.
//!
//! Nothing here trusts a count or a length: each is held against what is left of the file before memory is taken for it.

use super::ffi::loading::type_layout;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSIONS: u32 = 4;
/// llama.cpp's names of tensors have at most this many bytes.
const MAX_NAME: u64 = 63;
/// Texts longer than this are skipped and not kept.
const MAX_KEPT_BYTES: u64 = 1 << 10;

/// The number of the type of 32-bit floats.
pub const F32: u32 = 0;

/// What a GGUF says about itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufHeader {
    /// Scalars and short texts, by key.
    pub metadata: HashMap<String, GgufScalar>,
    /// How many entries each array has, by key.
    pub arrays: HashMap<String, u64>,
    /// Every tensor of this file.
    pub tensors: Vec<GgufTensor>,
}

/// A value of the metadata.
#[derive(Debug, Clone, PartialEq)]
pub enum GgufScalar {
    /// Of any width and sign, also true (1) and false (0).
    Integer(i128),
    /// Of either width.
    Float(f64),
    /// At most a kilobyte.
    Text(String),
}

/// A tensor, without its values.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GgufTensor {
    /// E.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Number of the type of its values, e.g. [`F32`].
    pub kind: u32,
    /// How many values it has along each axis, the innermost first.
    pub extents: Vec<u64>,
    /// Where in the file its values begin, in bytes.
    pub begins: u64,
    /// Bytes of its values.
    pub size_bytes: u64,
}

/// Why a file is not a GGUF that can be loaded.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The file cannot be read.
    #[error(transparent)]
    Io(std::io::Error),
    /// The file is something else.
    #[error("the file does not begin with 'GGUF'")]
    Magic,
    /// The file ends too early.
    #[error("the file ends in the middle of {within}; it has {file_bytes} bytes and is incomplete")]
    Truncated {
        /// What was being read.
        within: String,
        /// Bytes of the file.
        file_bytes: u64,
    },
    /// The file contradicts itself, or the format.
    #[error("{0}")]
    Damaged(String),
}

impl GgufHeader {
    /// Reads and checks the header of a file.
    ///
    /// # Errors
    /// What was wrong with the file.
    pub fn read(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path).map_err(GgufError::Io)?;
        let length = file.metadata().map_err(GgufError::Io)?.len();
        Reader { file: BufReader::with_capacity(1 << 16, file), length, position: 0 }.header()
    }

    /// The integer of that key.
    #[must_use]
    pub fn integer(&self, key: &str) -> Option<u64> {
        match self.metadata.get(key)? {
            GgufScalar::Integer(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// The text of that key.
    #[must_use]
    pub fn text(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key)? {
            GgufScalar::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The integer `key` of the file's architecture, e.g. `block_count`.
    #[must_use]
    pub fn parameter(&self, key: &str) -> Option<u64> {
        self.integer(&format!("{}.{key}", self.text("general.architecture")?))
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
                if VERSIONS.contains(&version.swap_bytes()) { ", or a file of the other byte order" } else { "" };
            return Err(damaged(format!("it is GGUF of version {version}{other}; 2 and 3 are known")));
        }
        let tensors = self.u64("the number of tensors")?;
        let pairs = self.u64("the number of keys")?;
        // The smallest key has 8 + 1 + 4 + 1 bytes, the smallest tensor 8 + 4 + 4 + 8.
        self.plausible(pairs, 14, "keys")?;
        self.plausible(tensors, 24, "tensors")?;
        let mut header = GgufHeader::default();
        for number in 0..pairs {
            let key = self.text(&format!("key {number}"), u64::from(u16::MAX))?;
            let key = key.ok_or_else(|| damaged(format!("key {number} is longer than 65535 bytes")))?;
            let kind = self.u32(&key)?;
            let value = self.value(&key, kind)?;
            if key.is_empty() || header.metadata.contains_key(&key) || header.arrays.contains_key(&key) {
                return Err(damaged(format!("key {number} is empty or there twice: '{key}'")));
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
            if tensor.begins.checked_add(tensor.size_bytes).is_none() {
                return Err(damaged(format!("tensor '{}' ends beyond any file", tensor.name)));
            }
            header.tensors.push(tensor);
        }
        // Places are told from where the data begins.
        let data = self.position.next_multiple_of(alignment);
        for tensor in &mut header.tensors {
            if data.checked_add(tensor.begins + tensor.size_bytes).is_none_or(|end| end > self.length) {
                return Err(self.truncated(&format!("tensor '{}'", tensor.name)));
            }
            tensor.begins += data;
        }
        Ok(header)
    }

    /// A tensor, whose place is told from where the data begins.
    fn tensor(&mut self, number: u64) -> Result<GgufTensor, GgufError> {
        let within = format!("tensor {number}");
        let name = self.text(&within, MAX_NAME)?;
        let name = name.ok_or_else(|| damaged(format!("the name of tensor {number} is longer than 63 bytes")))?;
        let dimensions = self.u32(&within)?;
        if dimensions > MAX_DIMENSIONS {
            return Err(damaged(format!("tensor '{name}' has {dimensions} dimensions; {MAX_DIMENSIONS} are possible")));
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
            return Err(damaged(format!("tensor '{name}' has rows of {row} values, which is no multiple of {block}")));
        }
        let size_bytes = (elements / block).checked_mul(bytes);
        let size_bytes = size_bytes.ok_or_else(|| damaged(format!("tensor '{name}' has an impossible size")))?;
        let begins = self.u64(&within)?;
        Ok(GgufTensor { name, kind, extents, begins, size_bytes })
    }

    /// Reads a value; the entries of arrays, and long texts, are passed over.
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
                other => return Err(damaged(format!("{within} is neither true nor false but {other}"))),
            },
            8 => match self.text(within, MAX_KEPT_BYTES)? {
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

    /// Passes over the entries of an array, and counts them.
    fn array(&mut self, within: &str) -> Result<u64, GgufError> {
        let kind = self.u32(within)?;
        let count = self.u64(within)?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                self.plausible(count, 8, within)?;
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

    /// A text of at most `longest` bytes; a longer one is passed over.
    fn text(&mut self, within: &str, longest: u64) -> Result<Option<String>, GgufError> {
        let length = self.u64(within)?;
        if length > longest {
            self.skip(length, within)?;
            return Ok(None);
        }
        self.plausible(length, 1, within)?;
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
        self.plausible(bytes.len() as u64, 1, within)?;
        self.file.read_exact(bytes).map_err(GgufError::Io)?;
        self.position += bytes.len() as u64;
        Ok(())
    }

    fn skip(&mut self, bytes: u64, within: &str) -> Result<(), GgufError> {
        self.plausible(bytes, 1, within)?;
        let offset = i64::try_from(bytes).map_err(|_| self.truncated(within))?;
        self.file.seek_relative(offset).map_err(GgufError::Io)?;
        self.position += bytes;
        Ok(())
    }

    /// Whether what is left of the file can hold so many things of so many bytes.
    fn plausible(&self, count: u64, bytes: u64, within: &str) -> Result<(), GgufError> {
        let left = self.length - self.position;
        if count.checked_mul(bytes).is_some_and(|needed| needed <= left) { Ok(()) } else { Err(self.truncated(within)) }
    }

    fn truncated(&self, within: &str) -> GgufError {
        GgufError::Truncated { within: within.to_owned(), file_bytes: self.length }
    }
}

fn damaged(what: String) -> GgufError {
    GgufError::Damaged(what)
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
    fn a_header_is_read() {
        let header = GgufHeader::read(&fixture("tiny.gguf")).unwrap();
        assert!(header.parameter("block_count").unwrap() > 0);
        assert!(header.tensors.iter().any(|tensor| tensor.name == "token_embd.weight" && tensor.size_bytes > 0));
    }

    #[test]
    fn every_truncation_is_an_error_that_says_so() {
        let whole = std::fs::read(fixture("tiny.gguf")).unwrap();
        let path = std::env::temp_dir().join(format!("thunder-truncated-{}.gguf", std::process::id()));
        // Every byte of the beginning, then in steps that meet all parts.
        let lengths = (0..4096).chain((4096..whole.len()).step_by(997)).chain([whole.len() - 1]);
        for length in lengths {
            std::fs::write(&path, &whole[..length]).unwrap();
            let error = GgufHeader::read(&path).unwrap_err();
            assert!(matches!(error, GgufError::Truncated { .. } | GgufError::Magic), "{length}: {error}");
        }
        std::fs::remove_file(&path).unwrap();
    }

    proptest! {
        /// Whatever has become of a header, it is read or refused, and what was read stands in the file.
        #[test]
        fn changed_bytes_are_read_or_refused(
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
