//! Rows of the heads that a request selects, in f16.
//!
//! `ATTH`, u16 version, u16 rows, u32 positions; then u16 layer and u16 head of every row; then the rows, each f16 per
//! position. All numbers are little-endian. Every value has a fixed offset, so that a single value can be read from the
//! database.

use super::{AttentionCodecError, MAX_POSITIONS, VERSION, pairs, u32_at};
use crate::events::StoredHeads;
use half::f16;
use half::slice::HalfFloatSliceExt;

const MAGIC: [u8; 4] = *b"ATTH";
/// Bytes before the table of rows.
pub const HEADER: usize = 12;
/// Bytes of a row in the table.
pub const ENTRY: usize = 4;

/// Encodes the selected rows of `[layer][head][position]` probabilities; empty if none is selected, or if
/// there are too many rows or positions.
#[must_use]
pub fn encode_heads(values: &[f32], layer_ids: &[u16], heads: u16, selected: &StoredHeads) -> Vec<u8> {
    let all = layer_ids.iter().flat_map(|&layer| (0..heads).map(move |head| (layer, head)));
    let row_len = values.len().checked_div(layer_ids.len() * usize::from(heads)).unwrap_or(0);
    if row_len == 0 || row_len > MAX_POSITIONS {
        return Vec::new();
    }
    let rows: Vec<_> =
        all.zip(values.chunks_exact(row_len)).filter(|((layer, head), _)| selected.has(*layer, *head)).collect();
    let Some(count) = u16::try_from(rows.len()).ok().filter(|&count| count > 0) else { return Vec::new() };
    let mut out = Vec::with_capacity(HEADER + rows.len() * (ENTRY + 2 * row_len));
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend((row_len as u32).to_le_bytes());
    out.extend(rows.iter().flat_map(|((layer, head), _)| [layer.to_le_bytes(), head.to_le_bytes()].concat()));
    let mut halves = vec![f16::ZERO; row_len];
    for (_, row) in rows {
        halves.convert_from_f32_slice(row);
        out.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
    }
    out
}

/// Decodes the table of rows: layer and head of each.
///
/// # Errors
/// [`AttentionCodecError::DamagedHeads`].
pub fn decode_head_table(bytes: &[u8]) -> Result<Vec<(u16, u16)>, AttentionCodecError> {
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    table(bytes).ok_or(AttentionCodecError::DamagedHeads)
}

fn table(bytes: &[u8]) -> Option<Vec<(u16, u16)>> {
    let header = bytes.get(..HEADER).filter(|header| header[..4] == MAGIC && header[4..6] == VERSION.to_le_bytes())?;
    let rows = usize::from(u16::from_le_bytes([header[6], header[7]]));
    let entries = bytes.get(HEADER..HEADER + rows * ENTRY)?.as_chunks::<ENTRY>().0;
    Some(entries.iter().map(|&[a, b, c, d]| (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]))).collect())
}

/// The location of a head in the stored rows. It is the same at every step of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeadLocation {
    /// The first bytes of the encoded rows: magic, version and number of rows.
    pub start: [u8; 8],
    /// The entry of the head in the table.
    pub entry: [u8; ENTRY],
    /// Offset of the entry.
    pub entry_at: usize,
    /// Offset of the rows.
    pub rows_at: usize,
    /// Number of rows before that of the head.
    pub index: usize,
}

/// Finds a head in the table of rows; `None` if it is not stored.
///
/// # Errors
/// [`AttentionCodecError::DamagedHeads`].
pub fn find_head(bytes: &[u8], layer: u16, head: u16) -> Result<Option<HeadLocation>, AttentionCodecError> {
    let table = decode_head_table(bytes)?;
    let Some(index) = table.iter().position(|&stored| stored == (layer, head)) else { return Ok(None) };
    let (entry_at, rows_at) = (HEADER + ENTRY * index, HEADER + ENTRY * table.len());
    let parts = || Some((bytes.first_chunk().copied()?, bytes.get(entry_at..)?.first_chunk().copied()?));
    let (start, entry) = parts().ok_or(AttentionCodecError::DamagedHeads)?;
    Ok(Some(HeadLocation { start, entry, entry_at, rows_at, index }))
}

/// Decodes the row of one head, one value per position; `None` if it is not stored.
///
/// # Errors
/// [`AttentionCodecError::DamagedHeads`].
pub fn decode_head(bytes: &[u8], layer: u16, head: u16) -> Result<Option<Vec<f32>>, AttentionCodecError> {
    let rows = decode_head_table(bytes)?.len();
    let Some(place) = find_head(bytes, layer, head)? else { return Ok(None) };
    let row_len = u32_at(bytes, 8).map_or(0, |len| len as usize);
    let expected = row_len.checked_mul(2 * rows).and_then(|len| len.checked_add(place.rows_at));
    if row_len == 0 || expected != Some(bytes.len()) {
        return Err(AttentionCodecError::DamagedHeads);
    }
    let from = place.rows_at + 2 * row_len * place.index;
    let values: Vec<f16> = pairs(&bytes[from..from + 2 * row_len]).map(f16::from_le_bytes).collect();
    Ok(Some(values.to_f32_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers 1 and 4, two heads, three positions.
    const VALUES: [f32; 12] = [0.5, 0.25, 0.25, 0.0, 1.0, 0.0, 0.125, 0.125, 0.75, 0.25, 0.5, 0.25];

    #[test]
    fn selected_rows_are_stored_and_others_are_not() {
        let bytes = encode_heads(&VALUES, &[1, 4], 2, &StoredHeads::Listed([(4, 0), (1, 1), (9, 9)].into()));
        assert_eq!(decode_head_table(&bytes), Ok(vec![(1, 1), (4, 0)]));
        assert_eq!(decode_head(&bytes, 1, 1), Ok(Some(vec![0.0, 1.0, 0.0])));
        assert_eq!(decode_head(&bytes, 4, 0), Ok(Some(vec![0.125, 0.125, 0.75])));
        assert_eq!(decode_head(&bytes, 1, 0), Ok(None));
        let all = encode_heads(&VALUES, &[1, 4], 2, &StoredHeads::All);
        assert_eq!(decode_head_table(&all), Ok(vec![(1, 0), (1, 1), (4, 0), (4, 1)]));
        assert_eq!(decode_head(&all, 4, 1), Ok(Some(vec![0.25, 0.5, 0.25])));
        assert_eq!(all.len(), HEADER + 4 * (ENTRY + 6));
    }

    #[test]
    fn empty_selection_stores_nothing_and_damage_is_reported() {
        assert!(encode_heads(&VALUES, &[1, 4], 2, &StoredHeads::None).is_empty());
        assert!(encode_heads(&VALUES, &[1, 4], 2, &StoredHeads::Listed([(2, 0)].into())).is_empty());
        assert_eq!(decode_head(&[], 1, 1), Ok(None));
        let bytes = encode_heads(&VALUES, &[1, 4], 2, &StoredHeads::All);
        for len in 1..bytes.len() {
            assert!(decode_head(&bytes[..len], 1, 0).is_err(), "{len} bytes");
        }
    }
}
