//! The binary format that a replay loads first: the rows of the fold as typed columns, which a browser reads without
//! copying.
//!
//! Magic `RUNC`, u16 version, u16 flags, u32 rows, u32 events, u32 sections, then a table of `{u32 id, u32 offset, u32
//! length}`; sections begin at multiples of 8 bytes and are little-endian. `src/ui/assets/replay/columns.js` reads it.
//!
//! Version 1, which is still read, has the times of the tokens as u16 in milliseconds; since version 2, they are u32 in
//! microseconds.

use super::fold::{EventPoint, Fold, Mark, NEVER, TokenRow, flags};
use std::collections::HashMap;
use std::sync::Arc;

const MAGIC: [u8; 4] = *b"RUNC";
const VERSION: u16 = 2;
/// Version with the times of the tokens in milliseconds.
const VERSION_WITH_MS: u16 = 1;
/// Bytes of magic, version, flags and three counts.
const HEADER_BYTES: usize = 20;
/// Bytes of id, offset and length.
const ENTRY_BYTES: usize = 12;
/// Alignment of the sections, in bytes.
const ALIGNMENT: usize = 8;
/// Quantization steps per nat and per bit.
const SCALE: f32 = 2048.0;
/// Largest quantized value of a u16 column; 65535 means unknown.
const MAX_QUANTIZED: f32 = 65_534.0;

/// Ids of the sections.
mod section {
    pub const TEXT: u32 = 1;
    pub const TOKEN: u32 = 2;
    pub const POS: u32 = 3;
    pub const ADDED_AT: u32 = 4;
    pub const REMOVED_AT: u32 = 5;
    pub const LOGPROB: u32 = 6;
    pub const ENTROPY: u32 = 7;
    pub const RANK: u32 = 8;
    pub const FLAGS: u32 = 9;
    pub const DT: u32 = 10;
    pub const STRINGS: u32 = 11;
    pub const MARKS: u32 = 12;
    pub const EVENT_KIND: u32 = 13;
    pub const EVENT_STEP: u32 = 14;
    pub const EVENT_TIME: u32 = 15;
}

/// The decoded contents of a column file.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Columns {
    /// Token instances, with `logprob`, `entropy` and `rank` rounded by the format.
    pub rows: Vec<TokenRow>,
    /// Actions, exceptions, log lines and evictions.
    pub marks: Vec<Mark>,
    /// Events on the timeline.
    pub events: Vec<EventPoint>,
}

impl Columns {
    /// Returns the text of the generated tokens at the end of the run, like [`Fold::answer_text`].
    #[must_use]
    pub fn answer_text(&self) -> String {
        self.answer().filter(|row| !row.ends_generation()).map(|row| &*row.text).collect()
    }

    /// Returns the generated tokens at the end of the run, like [`Fold::answer`].
    pub fn answer(&self) -> impl Iterator<Item = &TokenRow> {
        self.rows.iter().filter(|row| row.removed_at == NEVER && row.flags & flags::PROMPT == 0)
    }
}

/// The reason why bytes are not a valid column file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ColumnsError {
    /// Another format or another version.
    #[error("the data is not a column file of version 1 or 2")]
    Format,
    /// A section is missing, lies outside the bytes or has the wrong length.
    #[error("section {0} of the column file is damaged")]
    Section(u32),
}

/// Quantizes −ln p in steps of 1/2048, saturating; 65535 for unknown.
#[must_use]
pub fn quantize_logprob(logprob: Option<f32>) -> u16 {
    quantize(logprob.map(|logprob| -logprob))
}

/// Quantizes an entropy in bits, in steps of 1/2048, saturating; 65535 for unknown.
#[must_use]
pub fn quantize_entropy(entropy: Option<f32>) -> u16 {
    quantize(entropy)
}

fn quantize(value: Option<f32>) -> u16 {
    value
        .filter(|value| !value.is_nan())
        .map_or(u16::MAX, |value| (value * SCALE).round().clamp(0.0, MAX_QUANTIZED) as u16)
}

/// Encodes the current state of the fold.
#[must_use]
pub fn encode(fold: &Fold) -> Vec<u8> {
    let (rows, events) = (fold.rows(), fold.events());
    let (text, strings) = string_table(rows);
    let marks = serde_json::to_vec(fold.marks()).unwrap_or_else(|_| b"[]".to_vec());
    let sections = [
        (section::TEXT, text),
        (section::TOKEN, column(rows, |row| row.token.to_le_bytes())),
        (section::POS, column(rows, |row| row.pos.to_le_bytes())),
        (section::ADDED_AT, column(rows, |row| row.added_at.to_le_bytes())),
        (section::REMOVED_AT, column(rows, |row| row.removed_at.to_le_bytes())),
        (section::LOGPROB, column(rows, |row| quantize_logprob(row.logprob).to_le_bytes())),
        (section::ENTROPY, column(rows, |row| quantize_entropy(row.entropy).to_le_bytes())),
        (section::RANK, column(rows, |row| (row.rank.unwrap_or(0).min(u32::from(u16::MAX)) as u16).to_le_bytes())),
        (section::FLAGS, column(rows, |row| [row.flags])),
        (section::DT, column(rows, |row| row.dt_us.to_le_bytes())),
        (section::STRINGS, strings),
        (section::MARKS, marks),
        (section::EVENT_KIND, column(events, |event| [event.kind])),
        (section::EVENT_STEP, column(events, |event| event.step.to_le_bytes())),
        (section::EVENT_TIME, column(events, |event| event.time_ms.to_le_bytes())),
    ];

    let body: usize = sections.iter().map(|(_, bytes)| bytes.len() + ALIGNMENT).sum();
    let mut out = Vec::with_capacity(HEADER_BYTES + ENTRY_BYTES * sections.len() + body);
    out.extend(MAGIC);
    out.extend(VERSION.to_le_bytes());
    out.extend(0_u16.to_le_bytes());
    for count in [rows.len(), events.len(), sections.len()] {
        out.extend((count as u32).to_le_bytes());
    }
    let mut offset = (HEADER_BYTES + ENTRY_BYTES * sections.len()).next_multiple_of(ALIGNMENT);
    for (id, bytes) in &sections {
        for number in [*id, offset as u32, bytes.len() as u32] {
            out.extend(number.to_le_bytes());
        }
        offset = (offset + bytes.len()).next_multiple_of(ALIGNMENT);
    }
    for (_, bytes) in &sections {
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        out.extend(bytes);
    }
    out
}

fn column<T, const N: usize>(list: &[T], bytes: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    list.iter().flat_map(bytes).collect()
}

/// Builds the column of text indexes and the table they point into: u32 count, u32 offsets[count + 1], UTF-8.
fn string_table(rows: &[TokenRow]) -> (Vec<u8>, Vec<u8>) {
    let mut known: HashMap<&str, u32> = HashMap::new();
    let mut offsets = vec![0_u32];
    let mut bytes: Vec<u8> = Vec::new();
    let mut indexes = Vec::with_capacity(rows.len() * 4);
    for row in rows {
        let index = *known.entry(&*row.text).or_insert_with(|| {
            bytes.extend(row.text.as_bytes());
            offsets.push(bytes.len() as u32);
            offsets.len() as u32 - 2
        });
        indexes.extend(index.to_le_bytes());
    }
    let mut table = Vec::with_capacity(4 + offsets.len() * 4 + bytes.len());
    table.extend((known.len() as u32).to_le_bytes());
    table.extend(offsets.iter().flat_map(|offset| offset.to_le_bytes()));
    table.extend(bytes);
    (indexes, table)
}

/// Decodes the output of [`encode`].
///
/// # Errors
/// The bytes are damaged or have another format.
pub fn decode(bytes: &[u8]) -> Result<Columns, ColumnsError> {
    let header = bytes.get(..HEADER_BYTES).ok_or(ColumnsError::Format)?;
    let version = u16::from_le_bytes([header[4], header[5]]);
    if header[..4] != MAGIC || ![VERSION, VERSION_WITH_MS].contains(&version) {
        return Err(ColumnsError::Format);
    }
    let counts = numbers(&header[8..]);
    let (rows, events) = (counts[0] as usize, counts[1] as usize);
    let table_end = (counts[2] as usize).checked_mul(ENTRY_BYTES).and_then(|table| table.checked_add(HEADER_BYTES));
    let table = table_end.and_then(|end| bytes.get(HEADER_BYTES..end)).ok_or(ColumnsError::Format)?;
    let file = File { bytes, table: numbers(table) };

    let strings: Vec<Arc<str>> = file.strings()?.into_iter().map(Arc::from).collect();
    let text = file.u32s(section::TEXT, rows)?;
    let token = file.u32s(section::TOKEN, rows)?;
    let pos = file.u32s(section::POS, rows)?;
    let added_at = file.u32s(section::ADDED_AT, rows)?;
    let removed_at = file.u32s(section::REMOVED_AT, rows)?;
    let logprob = file.u16s(section::LOGPROB, rows)?;
    let entropy = file.u16s(section::ENTROPY, rows)?;
    let rank = file.u16s(section::RANK, rows)?;
    let flags = file.section(section::FLAGS, Some(rows))?;
    let dt: Vec<u32> = if version == VERSION_WITH_MS {
        file.u16s(section::DT, rows)?.into_iter().map(|ms| u32::from(ms) * 1000).collect()
    } else {
        file.u32s(section::DT, rows)?
    };
    let known = |value: u16| (value != u16::MAX).then(|| f32::from(value) / SCALE);
    let rows = (0..rows)
        .map(|i| {
            Ok(TokenRow {
                token: token[i] as i32,
                text: strings.get(text[i] as usize).ok_or(ColumnsError::Section(section::TEXT))?.clone(),
                pos: pos[i],
                added_at: added_at[i],
                removed_at: removed_at[i],
                logprob: known(logprob[i]).map(|nats| -nats),
                rank: (rank[i] != 0).then(|| rank[i].into()),
                entropy: known(entropy[i]),
                flags: flags[i],
                dt_us: dt[i],
            })
        })
        .collect::<Result<_, _>>()?;

    let marks = serde_json::from_slice(file.section(section::MARKS, None)?);
    let kind = file.section(section::EVENT_KIND, Some(events))?;
    let step = file.u32s(section::EVENT_STEP, events)?;
    let time = file.u32s(section::EVENT_TIME, events)?;
    Ok(Columns {
        rows,
        marks: marks.map_err(|_| ColumnsError::Section(section::MARKS))?,
        events: (0..events).map(|i| EventPoint { kind: kind[i], step: step[i], time_ms: time[i] }).collect(),
    })
}

struct File<'a> {
    bytes: &'a [u8],
    /// Id, offset and length of each section.
    table: Vec<u32>,
}

impl<'a> File<'a> {
    fn section(&self, id: u32, length: Option<usize>) -> Result<&'a [u8], ColumnsError> {
        let entry = self.table.chunks_exact(3).find(|entry| entry[0] == id).ok_or(ColumnsError::Section(id))?;
        let (from, len) = (entry[1] as usize, entry[2] as usize);
        let bytes = from.checked_add(len).and_then(|to| self.bytes.get(from..to)).ok_or(ColumnsError::Section(id))?;
        if length.is_some_and(|length| length != len) { Err(ColumnsError::Section(id)) } else { Ok(bytes) }
    }

    fn u32s(&self, id: u32, count: usize) -> Result<Vec<u32>, ColumnsError> {
        let length = count.checked_mul(4).ok_or(ColumnsError::Section(id))?;
        Ok(numbers(self.section(id, Some(length))?))
    }

    fn u16s(&self, id: u32, count: usize) -> Result<Vec<u16>, ColumnsError> {
        let length = count.checked_mul(2).ok_or(ColumnsError::Section(id))?;
        let bytes = self.section(id, Some(length))?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair)).collect())
    }

    fn strings(&self) -> Result<Vec<&'a str>, ColumnsError> {
        let damaged = || ColumnsError::Section(section::STRINGS);
        let bytes = self.section(section::STRINGS, None)?;
        let count = numbers(bytes.get(..4).ok_or_else(damaged)?)[0] as usize;
        let texts_at = count.checked_add(2).and_then(|n| n.checked_mul(4)).ok_or_else(damaged)?;
        let offsets = numbers(bytes.get(4..texts_at).ok_or_else(damaged)?);
        let texts = std::str::from_utf8(&bytes[texts_at..]).map_err(|_| damaged())?;
        offsets.windows(2).map(|ends| texts.get(ends[0] as usize..ends[1] as usize).ok_or_else(damaged)).collect()
    }
}

fn numbers(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|four| u32::from_le_bytes(*four)).collect()
}

#[cfg(test)]
mod tests {
    use super::{ColumnsError, decode, encode, quantize_entropy, quantize_logprob};
    use crate::events::{Event, EventType, Measurements, TokenMeasurement, TraceItem};
    use crate::trace::document::Document;
    use crate::trace::fold::{Fold, TokenRow};
    use proptest::prelude::*;

    fn fold_of(tokens: &[(i32, String, Option<f32>, Option<u32>)]) -> Fold {
        let mut fold = Fold::new();
        for (seq, (token, text, logprob, rank)) in tokens.iter().enumerate() {
            let mut event = Event::new(EventType::Added, seq as i32, seq as i32, None);
            event.added_tokens = Some(vec![*token]);
            let measure = TokenMeasurement {
                token: *token,
                text: text.clone(),
                logprob: *logprob,
                rank: *rank,
                entropy: logprob.map(|logprob| -logprob),
            };
            event.measured = Some(Box::new(Measurements {
                tokens: vec![measure],
                elapsed_us: Some(seq as u64 * 2500),
                ..Measurements::default()
            }));
            fold.apply(&TraceItem::Event(event));
        }
        fold
    }

    #[test]
    fn quantization_rounds_and_saturates() {
        assert_eq!(quantize_logprob(Some(-0.5)), 1024);
        assert_eq!(quantize_logprob(Some(f32::NEG_INFINITY)), 65_534);
        assert_eq!(quantize_logprob(Some(f32::NAN)), 65_535);
        assert_eq!(quantize_entropy(Some(0.0)), 0);
        assert_eq!(quantize_entropy(None), 65_535);
    }

    #[test]
    fn sections_are_aligned_and_strings_shared() {
        let fold = fold_of(&[(1, "a".into(), None, None), (2, "ß".into(), None, None), (1, "a".into(), None, None)]);
        let bytes = encode(&fold);
        for entry in bytes[20..20 + 15 * 12].chunks_exact(12) {
            assert_eq!(entry[4] % 8, 0);
        }
        assert_eq!(bytes.windows(3).filter(|window| window == b"a\xc3\x9f").count(), 1);
        assert_eq!(decode(&bytes).unwrap().rows, fold.rows());
        assert_eq!(decode(b"RUNC\x03\0"), Err(ColumnsError::Format));
    }

    #[test]
    fn times_of_version_1_are_milliseconds() {
        let fold = fold_of(&[(1, "a".into(), None, None), (2, "b".into(), None, None)]);
        let mut bytes = encode(&fold);
        let entry = 20 + bytes[20..].chunks_exact(12).position(|entry| entry[0] == 10).unwrap() * 12;
        let at = u32::from_le_bytes(bytes[entry + 4..entry + 8].try_into().unwrap()) as usize;
        bytes[4] = 1;
        bytes[entry + 8] = 4;
        bytes[at..at + 4].copy_from_slice(&[0, 0, 2, 0]);
        let times = |bytes: &[u8]| decode(bytes).unwrap().rows.iter().map(|row| row.dt_us).collect::<Vec<_>>();
        assert_eq!(times(&bytes), [0, 2000]);
        assert_eq!(times(&encode(&fold)), [0, 2500]);
    }

    #[test]
    fn empty_fold_round_trips() {
        assert_eq!(decode(&encode(&Fold::new())).unwrap(), super::Columns::default());
    }

    proptest! {
        #[test]
        fn encoded_columns_decode_to_the_fold(tokens in prop::collection::vec(
            (any::<i32>(), ".{0,4}", prop::option::of(-31.0_f32..0.0), prop::option::of(1_u32..100_000)), 0..40))
        {
            let fold = fold_of(&tokens);
            let columns = decode(&encode(&fold)).unwrap();
            prop_assert_eq!(&columns.events, fold.events());
            for (found, row) in columns.rows.iter().zip(fold.rows()) {
                let close = |a: Option<f32>, b: Option<f32>| match (a, b) {
                    (Some(a), Some(b)) => (a - b).abs() <= 1.0 / 4096.0,
                    (a, b) => a == b,
                };
                prop_assert!(close(found.logprob, row.logprob) && close(found.entropy, row.entropy));
                let exact = |row: &TokenRow| TokenRow { logprob: None, entropy: None, rank: row.rank.map(|rank| rank.min(65_535)), ..row.clone() };
                prop_assert_eq!(exact(found), exact(row));
            }
        }

        #[test]
        fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = decode(&bytes);
            let _ = decode(&[b"RUNC\x01\0\0\0", &bytes[..]].concat());
        }

        #[test]
        fn damaged_columns_never_panic(at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
            let document = Document::parse(include_bytes!("../../fixtures/sample_payload.json")).unwrap();
            let mut fold = Fold::new();
            document.items().iter().for_each(|item| fold.apply(item));
            let mut bytes = encode(&fold);
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = decode(&bytes);
            let _ = decode(&bytes[..cut.index(bytes.len())]);
        }
    }
}
