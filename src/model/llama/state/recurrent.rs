//! The state of recurrent layers, which keep one summary per sequence instead of a cell per token; it represents only
//! the end of the sequence. Follows `llama_memory_recurrent::state_write` of the pinned llama-cpp-sys-2.

use super::reader::{Reader, check_equal};
use super::{CacheType, StateError};
use std::ops::Range;

/// Maximum tensors of a layer.
const MAX_TENSORS: usize = 3;
/// Maximum layers; no model has more.
const MAX_LAYERS: usize = 1024;

/// The recurrent layers of a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Recurrent {
    /// Number of layers of the model, including those that attend.
    layers: u32,
    tensors: Vec<RecurrentTensor>,
}

/// A tensor of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RecurrentTensor {
    kind: i32,
    /// True if the state names the type of the tensor; otherwise it has the type of the previous tensor.
    has_type: bool,
    bytes: u64,
}

impl Recurrent {
    /// Derives the layout from the rest of the state of one token at position 0.
    pub fn detect(state: &[u8], from: usize) -> Option<Self> {
        let mut reader = Reader::new(state, from);
        let layers = Self::head(&mut reader, Some(0)).ok()?;
        let max = MAX_TENSORS * (layers as usize).min(MAX_LAYERS);
        find_tensors(state, reader.at, None, max).map(|tensors| Self { layers, tensors })
    }

    /// Reads the state after a token at the position `last`, compares it with the layout, and returns its range.
    pub fn read(&self, reader: &mut Reader<'_>, last: Option<u32>) -> Result<Range<usize>, StateError> {
        let start = reader.at;
        check_equal("the number of layers", Self::head(reader, last)?, self.layers)?;
        for tensor in &self.tensors {
            if tensor.has_type {
                let kind = CacheType::name_of(reader.i32()?);
                check_equal("the type of a recurrent state", kind, CacheType::name_of(tensor.kind))?;
            }
            check_equal("the size of a recurrent state", reader.array().map(u64::from_le_bytes)?, tensor.bytes)?;
            reader.read_recurrent_tensor(tensor.kind, tensor.bytes)?;
        }
        Ok(start..reader.at)
    }

    /// Returns the bytes of its tensors, which do not depend on the length of the sequence.
    pub fn bytes(&self) -> usize {
        self.tensors.iter().map(|tensor| tensor.bytes as usize + size_of::<i32>() + size_of::<u64>()).sum()
    }

    /// Returns the types of the first and the last tensor.
    pub fn types(&self) -> (String, String) {
        let name = |tensor: Option<&RecurrentTensor>| {
            tensor.map_or_else(|| "none".into(), |tensor| CacheType::name_of(tensor.kind))
        };
        (name(self.tensors.first()), name(self.tensors.last()))
    }

    /// Reads the header before the tensors. Returns the number of layers.
    fn head(reader: &mut Reader<'_>, last: Option<u32>) -> Result<u32, StateError> {
        let cells = reader.u32()? as usize;
        if cells != 1 {
            return Err(StateError::RecurrentStates(cells));
        }
        let position = reader.i32()?;
        if last.is_none() || u32::try_from(position).ok() != last {
            return Err(StateError::Position { cell: 0, position });
        }
        check_equal("the number of sequences of a cell", reader.u32()?, 0)?;
        check_equal("the order of recurrent states", reader.u32()?, 0)?;
        reader.u32()
    }
}

/// Tries all combinations of up to `max` tensors until one consumes the state exactly. `before` is the type of the
/// previous tensor.
fn find_tensors(state: &[u8], from: usize, before: Option<i32>, max: usize) -> Option<Vec<RecurrentTensor>> {
    if from == state.len() {
        return Some(Vec::new());
    }
    let max = max.checked_sub(1)?;
    for has_type in [true, false] {
        let mut reader = Reader::new(state, from);
        let Some(tensor) = read_tensor(&mut reader, has_type, before).ok().flatten() else { continue };
        if let Some(mut rest) = find_tensors(state, reader.at, Some(tensor.kind), max) {
            rest.insert(0, tensor);
            return Some(rest);
        }
    }
    None
}

/// Reads a tensor; `None` if the state has none with such a type at this place.
fn read_tensor(
    reader: &mut Reader<'_>,
    has_type: bool,
    before: Option<i32>,
) -> Result<Option<RecurrentTensor>, StateError> {
    let Some(kind) = (if has_type { Some(reader.i32()?) } else { before }) else { return Ok(None) };
    let bytes = reader.array().map(u64::from_le_bytes)?;
    // Layers with only a convolution have an empty state.
    if CacheType::from_ggml(kind).is_none() || (bytes == 0 && !has_type) {
        return Ok(None);
    }
    reader.read_recurrent_tensor(kind, bytes)?;
    Ok(Some(RecurrentTensor { kind, has_type, bytes }))
}
