//! The state of a sequence as llama.cpp writes it, read before llama.cpp reads it.
//!
//! llama.cpp trusts such bytes: on wrong ones it fails half way, or aborts the process. [`Layout`] is learned from a
//! state that the context itself wrote, and [`Layout::unpack`] compares every number of a foreign state with it.
//! Follows `llama_kv_cache::state_write` and `llama_kv_cache_iswa::state_write` of the pinned llama-cpp-sys-2. Models
//! that keep anything but such caches (recurrent ones) have no layout, and their states stay inside the process.

use super::cache_type::CacheType;
use crate::events::TokenId;
use std::ops::Range;

/// `llama_context`'s magic and the id of the sequence, before everything else.
const HEAD: usize = 8;
/// A cell without its M-RoPE place: position, number of sequences, sequence.
const CELL: usize = 12;
/// What M-RoPE models add to a cell: x, y, token.
const EXTENSION: usize = 12;

/// What the state of a sequence looks like in one context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    magic: [u8; 4],
    streams: u32,
    caches: Vec<Cache>,
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
pub enum Flaw {
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
    /// A cell at the wrong place.
    #[error("cell {cell} of the KV data has position {position}; the cells must stand in the order of the tokens")]
    Position {
        /// Index of the cell.
        cell: usize,
        /// Its position.
        position: i32,
    },
    /// A key or value that cannot be one.
    #[error("the KV data has values that are no numbers, or larger than any that a model has")]
    Number,
    /// A cell of another token.
    #[error("cell {0} of the KV data belongs to another token than the list of tokens says")]
    Token(usize),
}

impl Layout {
    /// Learns from the state of one token at position 0 in a context. `None` when its state is not made of KV caches.
    #[must_use]
    pub(super) fn learn(state: &[u8], context: usize, window: usize) -> Option<Self> {
        let magic = state.get(..4)?.try_into().ok()?;
        let streams = u32::from_le_bytes(state.get(HEAD..HEAD + 4)?.try_into().ok()?);
        let mut caches = learn_caches(state, HEAD)?;
        // Layers with a window have the last cache.
        if let Some(last) = caches.last_mut() {
            last.window = window;
        }
        Some(Self { magic, streams, caches, context })
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

    /// Types of the keys and values of the first layer, for people.
    #[must_use]
    pub fn types(&self) -> (String, String) {
        let name = |rows: &[Rows]| rows.first().map_or_else(|| "none".into(), |rows| CacheType::name_of(rows.kind));
        self.caches.first().map_or_else(Default::default, |cache| (name(&cache.keys), name(&cache.values)))
    }

    /// A state without what only this context knows: its sequences and where the state's is among them.
    ///
    /// # Errors
    /// [`Flaw`] when `state` was not written by this context.
    pub fn pack(&self, state: &[u8], tokens: &[TokenId]) -> Result<Vec<u8>, Flaw> {
        let mut reader = Reader::new(state, HEAD);
        let mut packed = Vec::with_capacity(state.len());
        for cache in &self.caches {
            let body = Self::cache(&mut reader, cache, tokens, self.streams)?;
            packed.extend_from_slice(&state[body]);
        }
        reader.end()?;
        Ok(packed)
    }

    /// Checks what [`Layout::pack`] made, here or elsewhere, and makes it into a state for this context.
    ///
    /// # Errors
    /// [`Flaw`]: the first number that is not as it must be.
    pub fn unpack(&self, packed: &[u8], tokens: &[TokenId]) -> Result<Vec<u8>, Flaw> {
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
        reader.end()?;
        // Cells that are free again are read all the same: one value that is no number would spoil the slot for others.
        let sound = |(kind, rows): &(i32, Range<usize>)| {
            CacheType::of_ggml(*kind).is_some_and(|kind| kind.is_sound(&packed[rows.clone()]))
        };
        if reader.rows.iter().all(sound) { Ok(state) } else { Err(Flaw::Number) }
    }

    /// A state that this context wrote, with nothing but zeroes in its keys and values.
    ///
    /// # Errors
    /// [`Flaw`] when `state` was not written by this context.
    pub fn zeroed(&self, mut state: Vec<u8>, tokens: &[TokenId]) -> Result<Vec<u8>, Flaw> {
        let mut reader = Reader::new(&state, HEAD);
        for cache in &self.caches {
            Self::cache(&mut reader, cache, tokens, self.streams)?;
        }
        for (_, rows) in std::mem::take(&mut reader.rows) {
            state[rows].fill(0);
        }
        Ok(state)
    }

    /// Reads one cache and returns where its only stream stands. `streams` is 0 for a packed state.
    fn cache(reader: &mut Reader<'_>, cache: &Cache, tokens: &[TokenId], streams: u32) -> Result<Range<usize>, Flaw> {
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
        body.ok_or(Flaw::Cells { cells: 0, tokens: tokens.len() })
    }

    fn stream(reader: &mut Reader<'_>, cache: &Cache, tokens: &[TokenId]) -> Result<(), Flaw> {
        let cells = reader.u32()? as usize;
        // Cells that no token will look at any more are left out where all it looks at is a window.
        let enough = if cache.window == 0 { tokens.len() } else { tokens.len().min(cache.window) };
        if cells > tokens.len() || cells < enough {
            return Err(Flaw::Cells { cells, tokens: tokens.len() });
        }
        let first = tokens.len() - cells;
        for index in 0..cells {
            let position = reader.i32()?;
            if usize::try_from(position) != Ok(first + index) {
                return Err(Flaw::Position { cell: index, position });
            }
            differs("the number of sequences of a cell", reader.u32()?, 1)?;
            if cache.extended {
                reader.take(8)?;
                if reader.i32()? != tokens[first + index] {
                    return Err(Flaw::Token(index));
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

/// The caches that make up the rest of a state, whichever way of reading them comes out even.
fn learn_caches(state: &[u8], from: usize) -> Option<Vec<Cache>> {
    if from == state.len() {
        return Some(Vec::new());
    }
    for extended in [false, true] {
        for with_values in [true, false] {
            let mut reader = Reader::new(state, from);
            let Ok(cache) = learn_cache(&mut reader, extended, with_values) else { continue };
            if let Some(mut rest) = learn_caches(state, reader.at) {
                rest.insert(0, cache);
                return Some(rest);
            }
        }
    }
    None
}

fn learn_cache(reader: &mut Reader<'_>, extended: bool, with_values: bool) -> Result<Cache, Flaw> {
    let streams = reader.u32()?;
    differs("the number of sequences", u32::from((1..=4096).contains(&streams)), 1)?;
    let mut found = None;
    for _ in 0..streams {
        let cells = reader.u32()?;
        if cells == 0 {
            continue;
        }
        differs("the number of cells", cells, 1)?;
        differs("the position", reader.u32()?, 0)?;
        differs("the number of sequences of a cell", reader.u32()?, 1)?;
        reader.take(if extended { EXTENSION } else { 0 })?;
        reader.take(4)?;
        let transposed = reader.u32()?;
        differs("the order of values", transposed.min(2) & 2, 0)?;
        let transposed = transposed == 1;
        let layers = reader.u32()?;
        let rotations = [reader.u32()?, reader.u32()?];
        let names = ["a type", "a size"];
        let mut read = |transposed| -> Result<Vec<Rows>, Flaw> {
            (0..layers).map(|_| reader.rows(None, names, transposed, 1)).collect()
        };
        let keys = read(false)?;
        let values = if with_values { read(transposed)? } else { Vec::new() };
        differs("the number of sequences with cells", u32::from(found.is_some()), 0)?;
        found = Some(Cache { window: 0, extended, transposed, rotations, keys, values });
    }
    found.ok_or(Flaw::Truncated(reader.at))
}

#[expect(clippy::needless_pass_by_value, reason = "mostly numbers")]
fn differs<T: PartialEq + ToString>(what: &'static str, found: T, expected: T) -> Result<(), Flaw> {
    if found == expected {
        return Ok(());
    }
    Err(Flaw::Differs { what, found: found.to_string(), expected: expected.to_string() })
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Where keys and values stand, and of which type they are.
    rows: Vec<(i32, Range<usize>)>,
}

impl<'a> Reader<'a> {
    const fn new(bytes: &'a [u8], at: usize) -> Self {
        Self { bytes, at, rows: Vec::new() }
    }

    fn take(&mut self, count: usize) -> Result<&[u8], Flaw> {
        let taken = self.at.checked_add(count).and_then(|end| self.bytes.get(self.at..end));
        let taken = taken.ok_or(Flaw::Truncated(self.bytes.len()))?;
        self.at += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Flaw> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn u32(&mut self) -> Result<u32, Flaw> {
        self.array().map(u32::from_le_bytes)
    }

    fn i32(&mut self) -> Result<i32, Flaw> {
        self.array().map(i32::from_le_bytes)
    }

    /// The rows of a layer; compared with those that are expected before their length is believed.
    fn rows(
        &mut self,
        expected: Option<Rows>,
        [kind_name, size_name]: [&'static str; 2],
        transposed: bool,
        cells: usize,
    ) -> Result<Rows, Flaw> {
        let kind = self.i32()?;
        if let Some(expected) = expected {
            differs(kind_name, CacheType::name_of(kind), CacheType::name_of(expected.kind))?;
        }
        let (unit, width) =
            if transposed { (u64::from(self.u32()?), self.u32()?) } else { (self.array().map(u64::from_le_bytes)?, 1) };
        if let Some(expected) = expected {
            differs(size_name, unit, expected.unit)?;
            differs("the number of elements of a value", width, expected.width)?;
        }
        let bytes = usize::try_from(unit).ok().and_then(|unit| unit.checked_mul(width as usize)?.checked_mul(cells));
        let start = self.at;
        self.take(bytes.ok_or(Flaw::Truncated(self.bytes.len()))?)?;
        self.rows.push((kind, start..self.at));
        Ok(Rows { kind, unit, width })
    }

    fn end(&self) -> Result<(), Flaw> {
        match self.bytes.len() - self.at {
            0 => Ok(()),
            left => Err(Flaw::TooLong(left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What llama.cpp writes for `tokens` in stream `stream` of `streams`, with two layers.
    fn written(tokens: &[TokenId], stream: u32, streams: u32, transposed: bool, extended: bool) -> Vec<u8> {
        let mut out = vec![1, 2, 3, 4];
        out.extend(stream.to_le_bytes());
        out.extend(streams.to_le_bytes());
        for at in 0..streams {
            if at != stream {
                out.extend(0u32.to_le_bytes());
                continue;
            }
            out.extend((tokens.len() as u32).to_le_bytes());
            for (position, token) in (0u32..).zip(tokens) {
                out.extend(position.to_le_bytes());
                out.extend(1u32.to_le_bytes());
                if extended {
                    out.extend([0; 8]);
                    out.extend(token.to_le_bytes());
                }
                out.extend(stream.to_le_bytes());
            }
            for number in [u32::from(transposed), 2, 0, 0] {
                out.extend(number.to_le_bytes());
            }
            for layer in 0..2u8 {
                out.extend(1i32.to_le_bytes());
                out.extend(16u64.to_le_bytes());
                out.extend(std::iter::repeat_n(layer, 16 * tokens.len()));
            }
            for layer in 2..4u8 {
                out.extend(1i32.to_le_bytes());
                if transposed {
                    out.extend(2u32.to_le_bytes());
                    out.extend(8u32.to_le_bytes());
                } else {
                    out.extend(16u64.to_le_bytes());
                }
                out.extend(std::iter::repeat_n(layer, 16 * tokens.len()));
            }
        }
        out
    }

    fn layout(streams: u32, transposed: bool, extended: bool) -> Layout {
        Layout::learn(&written(&[9], 0, streams, transposed, extended), 64, 0).unwrap()
    }

    #[test]
    fn a_state_moves_between_contexts_of_other_sizes() {
        let tokens: Vec<TokenId> = (0..20).collect();
        for (transposed, extended) in [(false, false), (true, false), (false, true), (true, true)] {
            let packed =
                layout(3, transposed, extended).pack(&written(&tokens, 2, 3, transposed, extended), &tokens).unwrap();
            let state = layout(2, transposed, extended).unpack(&packed, &tokens).unwrap();
            let mut expected = written(&tokens, 0, 2, transposed, extended);
            // The id inside a cell is that of the sequence it came from; llama.cpp reads over it.
            let (cell, first) = (CELL + if extended { EXTENSION } else { 0 }, HEAD + 8);
            for index in 0..tokens.len() {
                let id = first + (index + 1) * cell - 4;
                expected[id..id + 4].copy_from_slice(&2u32.to_le_bytes());
            }
            assert_eq!(state, expected);
        }
    }

    #[test]
    fn only_layers_with_a_window_may_lack_old_tokens() {
        // One cache without a window, then one with it.
        let both = |tokens: &[TokenId], in_window: &[TokenId]| {
            let mut out = written(tokens, 0, 1, false, false);
            let second = written(in_window, 0, 1, false, false);
            let (first, positions) = (out.len() + 8, tokens.len() - in_window.len());
            out.extend_from_slice(&second[HEAD..]);
            for index in 0..in_window.len() {
                let at = first + index * CELL;
                out[at..at + 4].copy_from_slice(&((positions + index) as u32).to_le_bytes());
            }
            out
        };
        let layout = Layout::learn(&both(&[9], &[9]), 64, 4).unwrap();
        assert_eq!((layout.caches.len(), layout.caches[0].window, layout.caches[1].window), (2, 0, 4));
        let tokens: Vec<TokenId> = (0..10).collect();
        let packed = layout.pack(&both(&tokens, &tokens[6..]), &tokens).unwrap();
        assert_eq!(layout.unpack(&packed, &tokens).unwrap(), both(&tokens, &tokens[6..]));
        let too_few = layout.pack(&both(&tokens, &tokens[7..]), &tokens).unwrap_err();
        assert_eq!(too_few, Flaw::Cells { cells: 3, tokens: 10 });
        let plain = Layout::learn(&written(&[9], 0, 1, false, false), 64, 0).unwrap();
        let mut short = vec![0; 8];
        short.extend_from_slice(&both(&tokens, &tokens[6..])[written(&tokens, 0, 1, false, false).len()..]);
        assert_eq!(plain.pack(&short, &tokens).unwrap_err(), Flaw::Cells { cells: 4, tokens: 10 });
    }

    #[test]
    fn flaws_are_named() {
        let (layout, tokens) = (layout(1, false, false), [5, 6, 7]);
        let packed = layout.pack(&written(&tokens, 0, 1, false, false), &tokens).unwrap();
        let told = |bytes: &[u8], tokens: &[TokenId]| layout.unpack(bytes, tokens).unwrap_err().to_string();
        assert_eq!(told(&packed, &[5, 6]), "the KV data holds 3 cells for 2 tokens");
        assert_eq!(
            told(&packed[..packed.len() - 1], &tokens),
            format!("the KV data ends at byte {}, in the middle", packed.len() - 1)
        );
        let mut longer = packed.clone();
        longer.push(0);
        assert_eq!(told(&longer, &tokens), "the KV data has 1 bytes too many");
        let mut quantised = packed.clone();
        let keys = 4 + 3 * CELL + 16;
        quantised[keys] = 8;
        assert_eq!(told(&quantised, &tokens), "the KV data does not fit: the type of keys is q8_0, here it is f16");
        let mut moved = packed;
        moved[4] = 1;
        assert!(told(&moved, &tokens).starts_with("cell 0 of the KV data has position 1"));
    }

    proptest! {
        /// Whatever bytes come: never a panic, never more memory than the input, and what is taken is what was meant.
        #[test]
        fn hostile_bytes_are_refused(
            count in 0usize..12, transposed: bool, extended: bool,
            edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            cut in proptest::option::of(any::<prop::sample::Index>()),
        ) {
            let tokens: Vec<TokenId> = (0..count as i32).collect();
            let layout = layout(2, transposed, extended);
            let written = written(&tokens, 1, 2, transposed, extended);
            let Ok(packed) = layout.pack(&written, &tokens) else {
                prop_assert_eq!(count, 0);
                return Ok(());
            };
            let mut hostile = packed.clone();
            for (at, byte) in &edits {
                let at = at.index(hostile.len());
                hostile[at] = *byte;
            }
            if let Some(cut) = cut {
                hostile.truncate(cut.index(hostile.len()));
            }
            if let Ok(state) = layout.unpack(&hostile, &tokens) {
                prop_assert_eq!(hostile.len(), packed.len());
                // Only keys, values, and numbers that llama.cpp reads over may differ from what was written.
                prop_assert_eq!(layout.pack(&state, &tokens).unwrap(), hostile);
            }
        }

        #[test]
        fn noise_is_refused(noise: Vec<u8>, count in 0usize..40) {
            let tokens: Vec<TokenId> = (0..count as i32).collect();
            prop_assert!(layout(2, true, false).unpack(&noise, &tokens).is_err());
            prop_assert!(Layout::learn(&noise, 64, 0).is_none_or(|layout| layout.caches.is_empty() || noise.len() > 40));
        }
    }
}
