//! The state of a sequence as llama.cpp writes it, read before llama.cpp reads it.
//!
//! llama.cpp trusts such bytes: on wrong ones it fails half way, or aborts the process. [`StateLayout`] is learned from a
//! state that the context itself wrote, and [`StateLayout::unpack`] compares every number of a foreign state with it.
//! Follows `llama_kv_cache::state_write`, `llama_kv_cache_iswa::state_write` and `llama_memory_hybrid::state_write` of the
//! pinned llama-cpp-sys-2. A model that keeps anything else has no layout, and its states stay inside the process.

mod learn;
mod reader;
mod recurrent;
#[cfg(test)]
mod tests;

use super::cache_type::CacheType;
use crate::events::TokenId;
use reader::{Reader, differs};
use recurrent::Recurrent;
use std::ops::Range;

/// `llama_context`'s magic and the id of the sequence, before everything else.
const HEAD: usize = 8;
/// A cell without its M-RoPE place: position, number of sequences, sequence.
const CELL: usize = 12;
/// What M-RoPE models add to a cell: x, y, token.
const EXTENSION: usize = 12;

/// What the state of a sequence looks like in one context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateLayout {
    magic: [u8; 4],
    streams: u32,
    caches: Vec<Cache>,
    /// What layers keep that do not attend; it stands behind the caches.
    recurrent: Option<Recurrent>,
    /// Tokens of a sequence.
    context: usize,
}

/// One KV cache; models with window layers have two.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cache {
    /// Width of the attention window of its layers; 0 where they see everything.
    window: usize,
    extended: bool,
    transposed: bool,
    rotations: [u32; 2],
    keys: Vec<Rows>,
    values: Vec<Rows>,
}

/// The rows of a layer: one for each cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rows {
    kind: i32,
    /// Bytes of a row, or of an element where values are transposed.
    unit: u64,
    /// Elements of a row where values are transposed, else 1.
    width: u32,
}

/// Why a state does not fit a context.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// It ends too early.
    #[error("the KV data ends at byte {0}, in the middle")]
    Truncated(usize),
    /// It goes on behind its end.
    #[error("the KV data has {0} bytes too many")]
    TooLong(usize),
    /// Not what the context would have written.
    #[error("the KV data does not fit: {what} is {found}, here it is {expected}")]
    Differs {
        /// The number.
        what: &'static str,
        /// In the state.
        found: String,
        /// In the context.
        expected: String,
    },
    /// The cells are not those of these tokens.
    #[error("the KV data holds {cells} cells for {tokens} tokens")]
    Cells {
        /// In the KV data.
        cells: usize,
        /// Tokens that came with it.
        tokens: usize,
    },
    /// A recurrent state that is not one.
    #[error("the KV data holds {0} recurrent states, and a sequence has one")]
    Summaries(usize),
    /// A cell at the wrong place.
    #[error("cell {cell} of the KV data has position {position}; the cells must stand in the order of the tokens")]
    Position {
        /// Index of the cell.
        cell: usize,
        /// Its position.
        position: i32,
    },
    /// A key, value or recurrent state that cannot be one.
    #[error("the KV data has values that are no numbers, or larger than any that a model has")]
    Number,
    /// A cell of another token.
    #[error("cell {0} of the KV data belongs to another token than the list of tokens says")]
    Token(usize),
}

impl StateLayout {
    /// Learns from the state of one token at position 0 in a context. `None` when its state is made of anything but KV caches
    /// and recurrent states.
    #[must_use]
    pub(super) fn learn(state: &[u8], context: usize, window: usize) -> Option<Self> {
        let magic = state.get(..4)?.try_into().ok()?;
        let streams = u32::from_le_bytes(state.get(HEAD..HEAD + 4)?.try_into().ok()?);
        let (mut caches, recurrent) = learn::sections(state, HEAD)?;
        // Layers with a window have the last cache.
        if let Some(last) = caches.last_mut() {
            last.window = window;
        }
        Some(Self { magic, streams, caches, recurrent, context })
    }

    /// Tokens that a sequence holds.
    #[must_use]
    pub const fn context(&self) -> usize {
        self.context
    }

    /// Bytes that a token's state takes.
    #[must_use]
    pub fn bytes_per_token(&self) -> usize {
        let row = |rows: &Rows| rows.unit as usize * rows.width as usize;
        self.caches
            .iter()
            .map(|cache| {
                let cell = CELL + if cache.extended { EXTENSION } else { 0 };
                cell + cache.keys.iter().chain(&cache.values).map(row).sum::<usize>()
            })
            .sum()
    }

    /// Bytes that a state takes beside those of its tokens.
    #[must_use]
    pub fn fixed_bytes(&self) -> usize {
        self.recurrent.as_ref().map_or(0, Recurrent::bytes)
    }

    /// Types of the keys and values of the first layer, for people; those of its state where no layer attends.
    #[must_use]
    pub fn types(&self) -> (String, String) {
        let name = |rows: &[Rows]| rows.first().map_or_else(|| "none".into(), |rows| CacheType::name_of(rows.kind));
        match (self.caches.first(), &self.recurrent) {
            (Some(cache), _) => (name(&cache.keys), name(&cache.values)),
            (None, Some(recurrent)) => recurrent.types(),
            (None, None) => Default::default(),
        }
    }

    /// A state without what only this context knows: its sequences and where the state's is among them.
    ///
    /// # Errors
    /// [`StateError`] when `state` was not written by this context.
    pub fn pack(&self, state: &[u8], tokens: &[TokenId]) -> Result<Vec<u8>, StateError> {
        let mut reader = Reader::new(state, HEAD);
        let mut packed = Vec::with_capacity(state.len());
        for cache in &self.caches {
            let body = Self::cache(&mut reader, cache, tokens, self.streams)?;
            packed.extend_from_slice(&state[body]);
        }
        packed.extend_from_slice(&state[self.summaries(&mut reader, tokens)?]);
        reader.end()?;
        Ok(packed)
    }

    /// Checks what [`StateLayout::pack`] made, here or elsewhere, and makes it into a state for this context.
    ///
    /// # Errors
    /// [`StateError`]: the first number that is not as it must be.
    pub fn unpack(&self, packed: &[u8], tokens: &[TokenId]) -> Result<Vec<u8>, StateError> {
        let mut reader = Reader::new(packed, 0);
        let idle = 4 * (self.streams as usize - 1);
        let mut state = Vec::with_capacity(HEAD + packed.len() + self.caches.len() * (4 + idle));
        state.extend_from_slice(&self.magic);
        state.extend_from_slice(&0i32.to_le_bytes());
        for cache in &self.caches {
            let body = Self::cache(&mut reader, cache, tokens, 0)?;
            state.extend_from_slice(&self.streams.to_le_bytes());
            state.extend_from_slice(&packed[body]);
            state.resize(state.len() + idle, 0);
        }
        state.extend_from_slice(&packed[self.summaries(&mut reader, tokens)?]);
        reader.end()?;
        // Cells that are free again are read all the same: one value that is no number would spoil the slot for others.
        let sound = |(kind, rows): &(i32, Range<usize>)| {
            CacheType::of_ggml(*kind).is_some_and(|kind| kind.is_sound(&packed[rows.clone()]))
        };
        if reader.rows.iter().all(sound) { Ok(state) } else { Err(StateError::Number) }
    }

    /// A state that this context wrote, with nothing but zeroes in its keys, values and recurrent states.
    ///
    /// # Errors
    /// [`StateError`] when `state` was not written by this context.
    pub fn zeroed(&self, mut state: Vec<u8>, tokens: &[TokenId]) -> Result<Vec<u8>, StateError> {
        let mut reader = Reader::new(&state, HEAD);
        for cache in &self.caches {
            Self::cache(&mut reader, cache, tokens, self.streams)?;
        }
        self.summaries(&mut reader, tokens)?;
        for (_, rows) in std::mem::take(&mut reader.rows) {
            state[rows].fill(0);
        }
        Ok(state)
    }

    /// Reads the recurrent states and returns where they stand.
    fn summaries(&self, reader: &mut Reader<'_>, tokens: &[TokenId]) -> Result<Range<usize>, StateError> {
        self.recurrent.as_ref().map_or(Ok(reader.at..reader.at), |recurrent| recurrent.read(reader, tokens))
    }

    /// Reads one cache and returns where its only stream stands. `streams` is 0 for a packed state.
    fn cache(
        reader: &mut Reader<'_>,
        cache: &Cache,
        tokens: &[TokenId],
        streams: u32,
    ) -> Result<Range<usize>, StateError> {
        if streams == 0 {
            let start = reader.at;
            Self::stream(reader, cache, tokens)?;
            return Ok(start..reader.at);
        }
        differs("the number of sequences", reader.u32()?, streams)?;
        let mut body = None;
        for _ in 0..streams {
            let start = reader.at;
            if reader.u32()? != 0 && body.is_none() {
                reader.at = start;
                Self::stream(reader, cache, tokens)?;
                body = Some(start..reader.at);
            }
        }
        body.ok_or(StateError::Cells { cells: 0, tokens: tokens.len() })
    }

    fn stream(reader: &mut Reader<'_>, cache: &Cache, tokens: &[TokenId]) -> Result<(), StateError> {
        let cells = reader.u32()? as usize;
        // Cells that no token will look at any more are left out where all it looks at is a window.
        let enough = if cache.window == 0 { tokens.len() } else { tokens.len().min(cache.window) };
        if cells > tokens.len() || cells < enough {
            return Err(StateError::Cells { cells, tokens: tokens.len() });
        }
        let first = tokens.len() - cells;
        for index in 0..cells {
            let position = reader.i32()?;
            if usize::try_from(position) != Ok(first + index) {
                return Err(StateError::Position { cell: index, position });
            }
            differs("the number of sequences of a cell", reader.u32()?, 1)?;
            if cache.extended {
                reader.take(8)?;
                if reader.i32()? != tokens[first + index] {
                    return Err(StateError::Token(index));
                }
            }
            reader.take(4)?;
        }
        differs("the order of values (flash attention on or off)", reader.u32()?, u32::from(cache.transposed))?;
        differs("the number of layers", reader.u32()?, cache.keys.len() as u32)?;
        differs("the rotation of keys", reader.u32()?, cache.rotations[0])?;
        differs("the rotation of values", reader.u32()?, cache.rotations[1])?;
        for &rows in &cache.keys {
            reader.rows(Some(rows), ["the type of keys", "the size of a key"], false, cells)?;
        }
        for &rows in &cache.values {
            let names = ["the type of values", "the size of a value"];
            reader.rows(Some(rows), names, cache.transposed, cells)?;
        }
        Ok(())
    }
}
