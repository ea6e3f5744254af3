//! Derivation of the state layout from a state that the context wrote itself.

use super::reader::{Reader, check_equal};
use super::recurrent::Recurrent;
use super::{Cache, EXTENSION, Rows, StateError};

/// Parses the rest of a state in every possible way until one consumes it exactly: caches, then optionally a recurrent
/// state.
pub(super) fn sections(state: &[u8], from: usize) -> Option<(Vec<Cache>, Option<Recurrent>)> {
    if from == state.len() {
        return Some((Vec::new(), None));
    }
    for extended in [false, true] {
        for with_values in [true, false] {
            let mut reader = Reader::new(state, from);
            let Ok(cache) = learn_cache(&mut reader, extended, with_values) else { continue };
            if let Some((mut caches, recurrent)) = sections(state, reader.at) {
                caches.insert(0, cache);
                return Some((caches, recurrent));
            }
        }
    }
    Recurrent::learn(state, from).map(|recurrent| (Vec::new(), Some(recurrent)))
}

fn learn_cache(reader: &mut Reader<'_>, extended: bool, with_values: bool) -> Result<Cache, StateError> {
    let streams = reader.u32()?;
    check_equal("the number of sequences", u32::from((1..=4096).contains(&streams)), 1)?;
    let mut found = None;
    for _ in 0..streams {
        let cells = reader.u32()?;
        if cells == 0 {
            continue;
        }
        check_equal("the number of cells", cells, 1)?;
        check_equal("the position", reader.u32()?, 0)?;
        check_equal("the number of sequences of a cell", reader.u32()?, 1)?;
        reader.take(if extended { EXTENSION } else { 0 })?;
        reader.take(4)?;
        let transposed = reader.u32()?;
        check_equal("the order of values", transposed.min(2) & 2, 0)?;
        let transposed = transposed == 1;
        let layers = reader.u32()?;
        let rotations = [reader.u32()?, reader.u32()?];
        let names = ["a type", "a size"];
        let mut read = |transposed| -> Result<Vec<Rows>, StateError> {
            (0..layers).map(|_| reader.rows(None, names, transposed, 1)).collect()
        };
        let keys = read(false)?;
        let values = if with_values { read(transposed)? } else { Vec::new() };
        check_equal("the number of sequences with cells", u32::from(found.is_some()), 0)?;
        found = Some(Cache { window: 0, extended, transposed, rotations, keys, values });
    }
    found.ok_or(StateError::Truncated(reader.at))
}
