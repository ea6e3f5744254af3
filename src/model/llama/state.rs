//! The state of a sequence in llama.cpp's format, validated before llama.cpp reads it.
//!
//! llama.cpp trusts these bytes: invalid bytes make it fail with a part restored, or abort the process. [`StateLayout`]
//! is derived from a state that the context itself wrote; [`StateLayout::unpack`] compares every number of an untrusted
//! state with it. The format follows `llama_kv_cache::state_write`, `llama_kv_cache_iswa::state_write` and
//! `llama_memory_hybrid::state_write` of the pinned llama-cpp-sys-2. A model with another kind of memory has no layout;
//! its states are not saved outside the process.

mod cells;
mod detect;
mod reader;
mod recurrent;
#[cfg(test)]
mod tests;

use super::cache_type::CacheType;
use super::image_spans::ImageSpans;
use super::memory::AttentionWindow;
use crate::events::TokenId;
use cells::read_cells;
use detect::detect_sections;
use reader::{Reader, check_equal};
use recurrent::Recurrent;
use std::ops::Range;

/// Size of `llama_context`'s magic and the sequence id, at the start.
const HEADER_BYTES: usize = 8;
/// Size of a cell without M-RoPE data: position, number of sequences, sequence.
const CELL_BYTES: usize = 12;
/// Additional size of a cell in M-RoPE models: x, y, token.
const MROPE_BYTES: usize = 12;

/// The layout of a sequence's state in one context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    magic: [u8; 4],
    streams: u32,
    caches: Vec<Cache>,
    /// State of recurrent layers, after the caches.
    recurrent: Option<Recurrent>,
    /// Maximum tokens of a sequence.
    context: usize,
}

/// A KV cache. Models with window layers have two.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cache {
    /// Attention window of its layers.
    window: AttentionWindow,
    has_mrope: bool,
    transposed: bool,
    rotations: [u32; 2],
    /// The keys of each layer.
    keys: Vec<TensorLayout>,
    /// The values of each layer.
    values: Vec<TensorLayout>,
}

/// The layout of a layer's keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct TensorLayout {
    kind: i32,
    /// Size of a cell's row, or of an element if values are transposed.
    unit: u64,
    /// Elements of a row if values are transposed, else 1.
    width: u32,
}

/// The reason why a state does not match a context.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The state ends too early.
    #[error("the KV data is truncated after byte {0}")]
    Truncated(usize),
    /// The state has bytes after its end.
    #[error("the KV data has {0} extra bytes at its end")]
    TooLong(usize),
    /// A number differs from the context's.
    #[error("the KV data does not match this context: {name} is {found}, expected {expected}")]
    Differs {
        /// The name of the number.
        name: &'static str,
        /// The value in the state.
        found: String,
        /// The value in the context.
        expected: String,
    },
    /// The number of cells differs from the number of tokens.
    #[error("the KV data has {cells} cells for {tokens} tokens")]
    Cells {
        /// Cells in the KV data.
        cells: usize,
        /// Number of tokens.
        tokens: usize,
    },
    /// A wrong number of recurrent states.
    #[error("the KV data has {0} recurrent states, expected one")]
    RecurrentStates(usize),
    /// A cell at the wrong position.
    #[error("cell {cell} of the KV data has position {position}; the cells must be in the order of the tokens")]
    Position {
        /// Index of the cell.
        cell: usize,
        /// Its position.
        position: i32,
    },
    /// A key, value or recurrent state with an invalid number.
    #[error("the KV data has values that are NaN or too large")]
    Number,
    /// A cell of an image at an impossible row or column.
    #[error("cell {0} of the KV data is not at its place in an image")]
    Image(usize),
    /// A cell holds a different token than the token list.
    #[error("cell {0} of the KV data does not belong to the token in the list")]
    Token(usize),
}

impl StateLayout {
    /// Derives the layout from the state of one token at position 0 in a context. Returns `None` if the state contains
    /// other parts than KV caches and recurrent states.
    #[must_use]
    pub(crate) fn from_state(state: &[u8], context: usize, window: AttentionWindow) -> Option<Self> {
        let magic = state.get(..4)?.try_into().ok()?;
        let streams = u32::from_le_bytes(state.get(HEADER_BYTES..HEADER_BYTES + 4)?.try_into().ok()?);
        let (mut caches, recurrent) = detect_sections(state, HEADER_BYTES)?;
        // Layers with a window use the last cache.
        if let Some(last) = caches.last_mut() {
            last.window = window;
        }
        Some(Self { magic, streams, caches, recurrent, context })
    }

    /// Returns the maximum tokens of a sequence.
    #[must_use]
    pub const fn context(&self) -> usize {
        self.context
    }

    /// Returns the size of a token's state in bytes.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        let row = |tensor: &TensorLayout| tensor.unit as usize * tensor.width as usize;
        self.caches
            .iter()
            .map(|cache| {
                let cell = CELL_BYTES + if cache.has_mrope { MROPE_BYTES } else { 0 };
                cell + cache.keys.iter().chain(&cache.values).map(row).sum::<usize>()
            })
            .sum()
    }

    /// Returns the size of the part of a state that does not depend on its tokens, in bytes.
    #[must_use]
    pub fn fixed_bytes(&self) -> usize {
        self.recurrent.as_ref().map_or(0, Recurrent::bytes)
    }

    /// Returns the names of the first layer's key and value types, or of the recurrent state's types if no layer
    /// attends.
    #[must_use]
    pub fn types(&self) -> (String, String) {
        let name = |tensors: &[TensorLayout]| {
            tensors.first().map_or_else(|| "none".into(), |tensor| CacheType::name_of(tensor.kind))
        };
        match (self.caches.first(), &self.recurrent) {
            (Some(cache), _) => (name(&cache.keys), name(&cache.values)),
            (None, Some(recurrent)) => recurrent.types(),
            (None, None) => Default::default(),
        }
    }

    /// Removes the data that is specific to this context: the header, the number of sequences and the empty streams of
    /// other sequences.
    ///
    /// # Errors
    /// [`StateError`] if `state` was not written by this context.
    pub fn pack(&self, state: &[u8], tokens: &[TokenId]) -> Result<Vec<u8>, StateError> {
        let mut reader = Reader::new(state, HEADER_BYTES);
        let mut packed = Vec::with_capacity(state.len());
        let mut images = None;
        for cache in &self.caches {
            let body = self.read_cache(&mut reader, cache, tokens, &mut images)?;
            packed.extend_from_slice(&state[body]);
        }
        packed.extend_from_slice(&state[self.recurrent_states(&mut reader, tokens, images.as_ref())?]);
        reader.expect_end()?;
        Ok(packed)
    }

    /// Validates the output of [`StateLayout::pack`], from this or another process, and converts it to a state of this
    /// context. Returns the state and its images.
    ///
    /// # Errors
    /// [`StateError`] for the first number that does not match.
    pub fn unpack(&self, packed: &[u8], tokens: &[TokenId]) -> Result<(Vec<u8>, ImageSpans), StateError> {
        let mut reader = Reader::new(packed, 0);
        // Each of the other streams has only its number of cells, which is 0.
        let other_streams = 4 * (self.streams as usize - 1);
        let mut state = Vec::with_capacity(HEADER_BYTES + packed.len() + self.caches.len() * (4 + other_streams));
        state.extend_from_slice(&self.magic);
        state.extend_from_slice(&0i32.to_le_bytes());
        let mut images = None;
        for cache in &self.caches {
            let body = Self::read_stream(&mut reader, cache, tokens, &mut images)?;
            state.extend_from_slice(&self.streams.to_le_bytes());
            state.extend_from_slice(&packed[body]);
            state.resize(state.len() + other_streams, 0);
        }
        state.extend_from_slice(&packed[self.recurrent_states(&mut reader, tokens, images.as_ref())?]);
        reader.expect_end()?;
        // Free cells are masked but still read, so a NaN would make later runs of the slot invalid.
        let is_valid = |(kind, range): &(i32, Range<usize>)| {
            CacheType::from_ggml(*kind).is_some_and(|kind| kind.has_valid_numbers(&packed[range.clone()]))
        };
        let images = images.unwrap_or_else(|| ImageSpans::from_placeholders(tokens));
        if reader.number_ranges.iter().all(is_valid) { Ok((state, images)) } else { Err(StateError::Number) }
    }

    /// Returns a state written by this context with zeroed keys, values and recurrent states.
    ///
    /// # Errors
    /// [`StateError`] if `state` was not written by this context.
    pub fn zeroed(&self, mut state: Vec<u8>, tokens: &[TokenId]) -> Result<Vec<u8>, StateError> {
        let mut reader = Reader::new(&state, HEADER_BYTES);
        let mut images = None;
        for cache in &self.caches {
            self.read_cache(&mut reader, cache, tokens, &mut images)?;
        }
        self.recurrent_states(&mut reader, tokens, images.as_ref())?;
        for (_, range) in std::mem::take(&mut reader.number_ranges) {
            state[range].fill(0);
        }
        Ok(state)
    }

    /// Reads the recurrent states and returns their range.
    fn recurrent_states(
        &self,
        reader: &mut Reader<'_>,
        tokens: &[TokenId],
        images: Option<&ImageSpans>,
    ) -> Result<Range<usize>, StateError> {
        let len = tokens.len() as u32;
        let last = images.map_or(len.checked_sub(1), |images| images.last_position(len));
        self.recurrent.as_ref().map_or(Ok(reader.at..reader.at), |recurrent| recurrent.read(reader, last))
    }

    /// Reads the streams of a cache, of which one has cells. Returns the range of that stream. `images` are those of the
    /// caches before it, and are set by the first.
    fn read_cache(
        &self,
        reader: &mut Reader<'_>,
        cache: &Cache,
        tokens: &[TokenId],
        images: &mut Option<ImageSpans>,
    ) -> Result<Range<usize>, StateError> {
        check_equal("the number of sequences", reader.u32()?, self.streams)?;
        let mut body = None;
        for _ in 0..self.streams {
            let start = reader.at;
            if reader.u32()? != 0 && body.is_none() {
                reader.at = start;
                body = Some(Self::read_stream(reader, cache, tokens, images)?);
            }
        }
        body.ok_or(StateError::Cells { cells: 0, tokens: tokens.len() })
    }

    /// Reads a stream of a cache, which is all of the cache in a packed state. Returns its range.
    fn read_stream(
        reader: &mut Reader<'_>,
        cache: &Cache,
        tokens: &[TokenId],
        images: &mut Option<ImageSpans>,
    ) -> Result<Range<usize>, StateError> {
        let start = reader.at;
        let cells = read_cells(reader, cache, tokens, images)?;
        check_equal("the order of values (flash attention on or off)", reader.u32()?, u32::from(cache.transposed))?;
        check_equal("the number of layers", reader.u32()?, cache.keys.len() as u32)?;
        check_equal("the rotation of keys", reader.u32()?, cache.rotations[0])?;
        check_equal("the rotation of values", reader.u32()?, cache.rotations[1])?;
        for &keys in &cache.keys {
            reader.read_tensor(Some(keys), ["the type of keys", "the size of a key"], false, cells)?;
        }
        for &values in &cache.values {
            let names = ["the type of values", "the size of a value"];
            reader.read_tensor(Some(values), names, cache.transposed, cells)?;
        }
        Ok(start..reader.at)
    }
}
