//! A reader of numbers and tensors from untrusted bytes.

use super::{CacheType, StateError, TensorLayout};
use std::ops::Range;

#[expect(clippy::needless_pass_by_value, reason = "mostly numbers")]
pub(super) fn check_equal<T: PartialEq + ToString>(
    name: &'static str,
    found: T,
    expected: T,
) -> Result<(), StateError> {
    if found == expected {
        return Ok(());
    }
    Err(StateError::Differs { name, found: found.to_string(), expected: expected.to_string() })
}

/// A reader at the position `at`.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    pub at: usize,
    /// Types and ranges of keys, values and recurrent states.
    pub number_ranges: Vec<(i32, Range<usize>)>,
}

impl<'a> Reader<'a> {
    pub const fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at, number_ranges: Vec::new() }
    }

    pub fn take(&mut self, count: usize) -> Result<&[u8], StateError> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or(StateError::Truncated(self.bytes.len()))?;
        self.at += count;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], StateError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub fn u32(&mut self) -> Result<u32, StateError> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn i32(&mut self) -> Result<i32, StateError> {
        self.array().map(i32::from_le_bytes)
    }

    /// Reads the keys or values of a layer. Compares their type and size with the expected ones first.
    pub fn read_tensor(
        &mut self,
        expected: Option<TensorLayout>,
        [kind_name, size_name]: [&'static str; 2],
        transposed: bool,
        cells: usize,
    ) -> Result<TensorLayout, StateError> {
        let kind = self.i32()?;
        if let Some(expected) = expected {
            check_equal(kind_name, CacheType::name_of(kind), CacheType::name_of(expected.kind))?;
        }
        let (unit, width) =
            if transposed { (u64::from(self.u32()?), self.u32()?) } else { (self.array().map(u64::from_le_bytes)?, 1) };
        if let Some(expected) = expected {
            check_equal(size_name, unit, expected.unit)?;
            check_equal("the number of elements of a value", width, expected.width)?;
        }
        let bytes = usize::try_from(unit).ok().and_then(|unit| unit.checked_mul(width as usize)?.checked_mul(cells));
        let start = self.at;
        self.take(bytes.ok_or(StateError::Truncated(self.bytes.len()))?)?;
        self.number_ranges.push((kind, start..self.at));
        Ok(TensorLayout { kind, unit, width })
    }

    /// Reads the numbers of a recurrent state, which have this type and size.
    pub fn read_recurrent_tensor(&mut self, kind: i32, bytes: u64) -> Result<(), StateError> {
        let start = self.at;
        self.take(usize::try_from(bytes).map_err(|_| StateError::Truncated(self.bytes.len()))?)?;
        self.number_ranges.push((kind, start..self.at));
        Ok(())
    }

    pub fn expect_end(&self) -> Result<(), StateError> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            left => Err(StateError::TooLong(left)),
        }
    }
}
