//! A writer of Parquet files with flat, nullable columns.
//!
//! The crate `parquet` would bring Arrow and its dependencies, which only reading and nested types need.
//! Each row group has one page per column: definition levels, then plain values, compressed with zstd. The file ends
//! with the metadata in Thrift's compact protocol.

const MAGIC: &[u8; 4] = b"PAR1";
const ZSTD_LEVEL: i32 = 3;

/// Codes of the format.
mod code {
    pub const PLAIN: i64 = 0;
    pub const RLE: i64 = 3;
    pub const ZSTD: i64 = 6;
    pub const OPTIONAL: i64 = 1;
    pub const UTF8: i64 = 0;
    pub const DATA_PAGE: i64 = 0;
}

/// Type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnType {
    /// 64-bit integers.
    Integer,
    /// 64-bit floats.
    Float,
    /// UTF-8 texts.
    Text,
}

impl ColumnType {
    /// Returns the number of the physical type.
    const fn physical(self) -> i64 {
        match self {
            Self::Integer => 2,
            Self::Float => 5,
            Self::Text => 6,
        }
    }
}

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub enum ColumnValue {
    /// A value of a column of integers.
    Integer(i64),
    /// A value of a column of floats.
    Float(f64),
    /// A value of a column of texts.
    Text(String),
}

impl ColumnValue {
    /// Appends the plain encoding.
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            Self::Integer(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::Float(value) => out.extend_from_slice(&value.to_le_bytes()),
            Self::Text(value) => {
                out.extend_from_slice(&length(value.len()).to_le_bytes());
                out.extend_from_slice(value.as_bytes());
            }
        }
    }
}

/// A writer that returns the bytes of each part of the file.
#[derive(Debug)]
pub struct ParquetWriter {
    columns: Vec<(String, ColumnType)>,
    /// Bytes written so far.
    offset: usize,
    rows: usize,
    /// Metadata of the row groups.
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    rows: usize,
    chunks: Vec<Chunk>,
}

/// The page of a column in a row group.
#[derive(Debug)]
struct Chunk {
    offset: usize,
    /// Bytes with the header.
    size: usize,
    uncompressed_size: usize,
}

impl ParquetWriter {
    /// Creates a writer for columns with these names and types.
    #[must_use]
    pub fn new(columns: &[(&str, ColumnType)]) -> Self {
        let columns = columns.iter().map(|(name, kind)| ((*name).to_owned(), *kind)).collect();
        Self { columns, offset: 0, rows: 0, groups: Vec::new() }
    }

    /// Returns the bytes of a row group. `rows` have one value per column, of the column's type.
    ///
    /// # Errors
    /// The compression failed.
    pub fn row_group(&mut self, rows: &[Vec<Option<ColumnValue>>]) -> std::io::Result<Vec<u8>> {
        let mut out = self.start();
        let mut chunks = Vec::new();
        for column in 0..self.columns.len() {
            let values = || rows.iter().map(move |row| row.get(column).and_then(Option::as_ref));
            let mut page = levels(values().map(|value| value.is_some()));
            values().flatten().for_each(|value| value.put(&mut page));
            let packed = zstd::encode_all(page.as_slice(), ZSTD_LEVEL)?;
            let header = page_header(rows.len(), page.len(), packed.len());
            let offset = self.offset + out.len();
            let size = header.len() + packed.len();
            chunks.push(Chunk { offset, size, uncompressed_size: header.len() + page.len() });
            out.extend_from_slice(&header);
            out.extend_from_slice(&packed);
        }
        self.offset += out.len();
        self.rows += rows.len();
        self.groups.push(Group { rows: rows.len(), chunks });
        Ok(out)
    }

    /// Returns the bytes of the end of the file.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        let mut out = self.start();
        let metadata = self.metadata();
        out.extend_from_slice(&metadata);
        out.extend_from_slice(&length(metadata.len()).to_le_bytes());
        out.extend_from_slice(MAGIC);
        out
    }

    /// Returns the magic number at the beginning of the file, else nothing.
    fn start(&self) -> Vec<u8> {
        if self.offset > 0 { Vec::new() } else { MAGIC.to_vec() }
    }

    fn metadata(&self) -> Vec<u8> {
        let mut out = Thrift::default();
        out.integer(1, thrift::I32, 1);
        out.list(2, thrift::STRUCT, self.columns.len() + 1);
        out.open();
        out.text(4, "schema");
        out.integer(5, thrift::I32, count(self.columns.len()));
        out.close();
        for (name, kind) in &self.columns {
            out.open();
            out.integer(1, thrift::I32, kind.physical());
            out.integer(3, thrift::I32, code::OPTIONAL);
            out.text(4, name);
            if *kind == ColumnType::Text {
                out.integer(6, thrift::I32, code::UTF8);
            }
            out.close();
        }
        out.integer(3, thrift::I64, count(self.rows));
        out.list(4, thrift::STRUCT, self.groups.len());
        for group in &self.groups {
            out.open();
            self.group(&mut out, group);
            out.close();
        }
        out.text(6, concat!("thunder ", env!("CARGO_PKG_VERSION")));
        out.end()
    }

    fn group(&self, out: &mut Thrift, group: &Group) {
        out.list(1, thrift::STRUCT, group.chunks.len());
        for (chunk, (name, kind)) in group.chunks.iter().zip(&self.columns) {
            out.open();
            out.integer(2, thrift::I64, count(chunk.offset));
            out.structure(3);
            out.integer(1, thrift::I32, kind.physical());
            out.list(2, thrift::I32, 2);
            out.number(code::PLAIN);
            out.number(code::RLE);
            out.list(3, thrift::BINARY, 1);
            out.bytes(name);
            out.integer(4, thrift::I32, code::ZSTD);
            out.integer(5, thrift::I64, count(group.rows));
            out.integer(6, thrift::I64, count(chunk.uncompressed_size));
            out.integer(7, thrift::I64, count(chunk.size));
            out.integer(9, thrift::I64, count(chunk.offset));
            out.close();
            out.close();
        }
        out.integer(2, thrift::I64, group.chunks.iter().map(|chunk| count(chunk.uncompressed_size)).sum());
        out.integer(3, thrift::I64, count(group.rows));
    }
}

/// Returns the definition levels: runs of equal bits, after their length in bytes.
fn levels(present: impl Iterator<Item = bool>) -> Vec<u8> {
    let mut runs: Vec<(u64, bool)> = Vec::new();
    for is_present in present {
        match runs.last_mut() {
            Some((length, value)) if *value == is_present => *length += 1,
            _ => runs.push((1, is_present)),
        }
    }
    let mut out = vec![0; 4];
    for (length, value) in runs {
        varint(&mut out, length << 1);
        out.push(u8::from(value));
    }
    let bytes = length(out.len() - 4).to_le_bytes();
    out[..4].copy_from_slice(&bytes);
    out
}

fn page_header(values: usize, size: usize, packed: usize) -> Vec<u8> {
    let mut out = Thrift::default();
    out.integer(1, thrift::I32, code::DATA_PAGE);
    out.integer(2, thrift::I32, count(size));
    out.integer(3, thrift::I32, count(packed));
    out.structure(5);
    out.integer(1, thrift::I32, count(values));
    out.integer(2, thrift::I32, code::PLAIN);
    out.integer(3, thrift::I32, code::RLE);
    out.integer(4, thrift::I32, code::RLE);
    out.close();
    out.end()
}

/// Types of Thrift's compact protocol.
mod thrift {
    pub const I32: u8 = 5;
    pub const I64: u8 = 6;
    pub const BINARY: u8 = 8;
    pub const LIST: u8 = 9;
    pub const STRUCT: u8 = 12;
}

/// A writer of Thrift's compact protocol.
#[derive(Default)]
struct Thrift {
    out: Vec<u8>,
    /// Number of the last field of the current structure.
    last: u8,
    /// The same for the structures around it.
    outer: Vec<u8>,
}

impl Thrift {
    /// Begins a field. `number` exceeds the number of the last field by 1 to 15.
    fn field(&mut self, number: u8, kind: u8) {
        self.out.push((number - self.last) << 4 | kind);
        self.last = number;
    }

    fn integer(&mut self, number: u8, kind: u8, value: i64) {
        self.field(number, kind);
        self.number(value);
    }

    fn text(&mut self, number: u8, text: &str) {
        self.field(number, thrift::BINARY);
        self.bytes(text);
    }

    fn list(&mut self, number: u8, kind: u8, length: usize) {
        self.field(number, thrift::LIST);
        if let Ok(length @ ..15) = u8::try_from(length) {
            self.out.push(length << 4 | kind);
        } else {
            self.out.push(0xf0 | kind);
            varint(&mut self.out, length as u64);
        }
    }

    /// Begins a structure as a field.
    fn structure(&mut self, number: u8) {
        self.field(number, thrift::STRUCT);
        self.open();
    }

    /// Begins a structure as an element of a list.
    fn open(&mut self) {
        self.outer.push(std::mem::take(&mut self.last));
    }

    /// Ends a structure.
    fn close(&mut self) {
        self.out.push(0);
        self.last = self.outer.pop().unwrap_or(0);
    }

    /// Ends the outermost structure.
    fn end(mut self) -> Vec<u8> {
        self.out.push(0);
        self.out
    }

    /// Appends a zigzag number.
    fn number(&mut self, value: i64) {
        varint(&mut self.out, (value << 1 ^ value >> 63).cast_unsigned());
    }

    fn bytes(&mut self, text: &str) {
        varint(&mut self.out, text.len() as u64);
        self.out.extend_from_slice(text.as_bytes());
    }
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn count(value: usize) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Returns a length as the format stores it. Texts and pages of exports are far smaller than `u32::MAX` bytes.
fn length(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_runs_of_equal_bits() {
        assert_eq!(levels([true, true, false].into_iter()), [4, 0, 0, 0, 4, 1, 2, 0]);
        assert_eq!(levels(std::iter::repeat_n(true, 200)), [3, 0, 0, 0, 0x90, 3, 1]);
    }

    #[test]
    fn file_begins_and_ends_with_the_magic_number() {
        let mut writer = ParquetWriter::new(&[("a", ColumnType::Integer), ("b", ColumnType::Text)]);
        let row = vec![Some(ColumnValue::Integer(-1)), None];
        let mut file = writer.row_group(&[row]).unwrap();
        file.extend(writer.finish());
        assert!(file.starts_with(MAGIC) && file.ends_with(MAGIC));
        let size = u32::from_le_bytes(file[file.len() - 8..file.len() - 4].try_into().unwrap()) as usize;
        let metadata = &file[file.len() - 8 - size..file.len() - 8];
        // version 1, then a list of three elements of the schema
        assert_eq!(metadata[..4], [0x15, 2, 0x19, 0x3c]);
    }
}
