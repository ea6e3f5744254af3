//! Reader of the header of a GGUF file.

use super::{GgufArray, GgufError, GgufHeader, GgufScalar, GgufTensor};
use crate::model::llama::ffi::model_info::type_layout;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};

const VERSIONS: std::ops::RangeInclusive<u32> = 2..=3;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSIONS: u32 = 4;
/// llama.cpp's maximum length of tensor names in bytes.
const MAX_NAME_BYTES: u64 = 63;
/// Maximum length of stored texts in bytes; longer ones are skipped. Most chat templates are shorter.
const MAX_TEXT_BYTES: u64 = 1 << 16;
/// llama.cpp's maximum number of layers, and so the maximum length of arrays with one number per layer.
const MAX_LAYERS: u64 = 512;

/// A metadata value as read.
enum Value {
    Scalar(GgufScalar),
    /// An array whose entries were skipped.
    Array(GgufArray),
    /// A text that is too long to store.
    LongText,
}

/// A reader of a file that keeps track of the position in it.
pub(super) struct HeaderReader<F> {
    file: F,
    /// Length of the file in bytes.
    length: u64,
    position: u64,
}

impl<'f> HeaderReader<BufReader<&'f File>> {
    /// Creates a reader at the start of a file.
    pub(super) fn from_file(mut file: &'f File) -> Result<Self, GgufError> {
        file.rewind().map_err(GgufError::Io)?;
        let length = file.metadata().map_err(GgufError::Io)?.len();
        Ok(Self::new(BufReader::with_capacity(1 << 16, file), length))
    }
}

impl<F: Read + Seek> HeaderReader<F> {
    pub(super) fn new(file: F, length: u64) -> Self {
        Self { file, length, position: 0 }
    }

    /// Reads and validates the header.
    pub(super) fn read_header(&mut self) -> Result<GgufHeader, GgufError> {
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
                Value::Array(array) => {
                    header.arrays.insert(key, array);
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

    /// Reads the texts of an array, which has `count` entries from `start` on. Texts that are too long become empty.
    pub(super) fn read_texts(&mut self, key: &str, start: u64, count: u64) -> Result<Vec<String>, GgufError> {
        self.file.seek(SeekFrom::Start(start)).map_err(GgufError::Io)?;
        self.position = start;
        (0..count).map(|_| Ok(self.text(key, MAX_TEXT_BYTES)?.unwrap_or_default())).collect()
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

    /// Reads an array without storing its entries.
    fn array(&mut self, within: &str) -> Result<GgufArray, GgufError> {
        let kind = self.u32(within)?;
        let count = self.u64(within)?;
        let width = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => {
                self.check_remaining(count, 8, within)?;
                let texts_start = Some(self.position);
                for _ in 0..count {
                    let length = self.u64(within)?;
                    self.skip(length, within)?;
                }
                return Ok(GgufArray { count, texts_start, maximum: None });
            }
            other => return Err(damaged(format!("{within} is an array of the unknown type {other}"))),
        };
        let bytes = count.checked_mul(width).ok_or_else(|| self.truncated(within))?;
        self.check_remaining(count, width, within)?;
        if !matches!(kind, 4 | 5) || count > MAX_LAYERS {
            self.skip(bytes, within)?;
            return Ok(GgufArray { count, texts_start: None, maximum: None });
        }
        let mut maximum = None;
        for _ in 0..count {
            let number = self.u32(within)?;
            // Negative entries of a signed array are no counts.
            maximum = maximum.max(Some(number).filter(|_| kind == 4 || i32::try_from(number).is_ok()));
        }
        Ok(GgufArray { count, texts_start: None, maximum })
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
        // The position exceeds the length if the file became shorter after its header was read.
        let left = self.length.saturating_sub(self.position);
        if count.checked_mul(bytes).is_some_and(|needed| needed <= left) { Ok(()) } else { Err(self.truncated(within)) }
    }

    fn truncated(&self, within: &str) -> GgufError {
        GgufError::Truncated { within: within.to_owned(), file_bytes: self.length }
    }
}

fn damaged(reason: String) -> GgufError {
    GgufError::Damaged(reason)
}
