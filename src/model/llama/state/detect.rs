//! Derivation of the state layout from a state that the context wrote itself.

use super::reader::{Reader, check_equal};
use super::recurrent::Recurrent;
use super::{Cache, MROPE_BYTES, StateError, TensorLayout};
use crate::model::llama::memory::AttentionWindow;

/// Tries all combinations of caches, optionally followed by a recurrent state, until one consumes the state exactly.
pub(super) fn detect_sections(state: &[u8], from: usize) -> Option<(Vec<Cache>, Option<Recurrent>)> {
    if from == state.len() {
        return Some((Vec::new(), None));
    }
    for has_mrope in [false, true] {
        for with_values in [true, false] {
            let mut reader = Reader::new(state, from);
            let Ok(cache) = detect_cache(&mut reader, has_mrope, with_values) else { continue };
            if let Some((mut caches, recurrent)) = detect_sections(state, reader.at) {
                caches.insert(0, cache);
                return Some((caches, recurrent));
            }
        }
    }
    Recurrent::detect(state, from).map(|recurrent| (Vec::new(), Some(recurrent)))
}

fn detect_cache(reader: &mut Reader<'_>, has_mrope: bool, with_values: bool) -> Result<Cache, StateError> {
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
        reader.take(if has_mrope { MROPE_BYTES } else { 0 })?;
        reader.take(4)?;
        let transposed = reader.u32()?;
        check_equal("the order of values", u32::from(transposed > 1), 0)?;
        let transposed = transposed == 1;
        let layers = reader.u32()?;
        let rotations = [reader.u32()?, reader.u32()?];
        let names = ["a type", "a size"];
        let mut read = |transposed| -> Result<Vec<TensorLayout>, StateError> {
            (0..layers).map(|_| reader.read_tensor(None, names, transposed, 1)).collect()
        };
        let keys = read(false)?;
        let values = if with_values { read(transposed)? } else { Vec::new() };
        check_equal("the number of sequences with cells", u32::from(found.is_some()), 0)?;
        found = Some(Cache { window: AttentionWindow::None, has_mrope, transposed, rotations, keys, values });
    }
    found.ok_or(StateError::Truncated(reader.at))
}
