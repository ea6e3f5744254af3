//! The values in a GGUF file: tensors as 32-bit floats, and texts of arrays.

use super::header_reader::HeaderReader;
use super::{F32, GgufError, GgufHeader, GgufTensor};
use crate::model::llama::ffi::tensors::convert_to_floats;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A GGUF file with a valid header.
pub struct GgufFile {
    header: GgufHeader,
    file: File,
}

/// A matrix in row-major order.
#[derive(Debug, Clone, PartialEq)]
pub struct Matrix {
    /// Number of values per row.
    pub columns: usize,
    /// `rows * columns` values.
    pub values: Vec<f32>,
}

/// Reader of single rows of a tensor.
#[derive(Debug)]
pub struct RowReader {
    file: File,
    tensor: GgufTensor,
}

impl GgufFile {
    /// Opens a file and reads its header.
    ///
    /// # Errors
    /// [`GgufError`] for the first error in the file.
    pub fn open(path: &Path) -> Result<Self, GgufError> {
        let file = File::open(path).map_err(GgufError::Io)?;
        Ok(Self { header: HeaderReader::from_file(&file)?.read_header()?, file })
    }

    /// Returns the header.
    #[must_use]
    pub fn header(&self) -> &GgufHeader {
        &self.header
    }

    /// Returns the entries of an array of texts; `None` if there is none with this key.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<String>>, GgufError> {
        let Some(array) = self.header.arrays.get(key) else { return Ok(None) };
        let Some(start) = array.texts_start else { return Ok(None) };
        HeaderReader::from_file(&self.file)?.read_texts(key, start, array.count).map(Some)
    }

    /// Reads a tensor as 32-bit floats; `None` if the file has none with this name.
    ///
    /// # Errors
    /// The file cannot be read, the tensor has more than `max` values, or its type cannot be converted.
    pub fn tensor(&self, name: &str, max: usize) -> Result<Option<Matrix>, Error> {
        self.find(name).map(|tensor| self.read(tensor, max)).transpose()
    }

    /// Reads a tensor of this file's header as 32-bit floats.
    ///
    /// # Errors
    /// The file cannot be read, the tensor has more than `max` values, or its type cannot be converted.
    pub fn read(&self, tensor: &GgufTensor, max: usize) -> Result<Matrix, Error> {
        let (name, columns, rows) = (&tensor.name, tensor.columns(), tensor.rows());
        if columns.checked_mul(rows).is_none_or(|count| count > max) {
            return Err(Error::new(ErrorKind::InvalidData, format!("tensor {name}: it is too large")));
        }
        let values = tensor
            .read_rows(&self.file, 0..rows)
            .map_err(|error| Error::new(error.kind(), format!("tensor {name}: {error}")))?;
        Ok(Matrix { columns, values })
    }

    /// Returns a reader of a tensor's rows; `None` if the file has no tensor with this name.
    ///
    /// # Errors
    /// The file cannot be opened again.
    pub fn rows(&self, name: &str) -> Result<Option<RowReader>, Error> {
        let Some(tensor) = self.find(name) else { return Ok(None) };
        Ok(Some(RowReader { file: self.file.try_clone()?, tensor: tensor.clone() }))
    }

    fn find(&self, name: &str) -> Option<&GgufTensor> {
        self.header.tensors.iter().find(|tensor| tensor.name == name)
    }
}

impl GgufTensor {
    /// Returns the number of values per row.
    fn columns(&self) -> usize {
        self.extents.first().map_or(1, |&columns| columns as usize)
    }

    /// Returns the number of rows.
    fn rows(&self) -> usize {
        self.extents.iter().skip(1).product::<u64>() as usize
    }

    /// Reads rows, which the tensor must have, as 32-bit floats.
    ///
    /// # Errors
    /// The file cannot be read, or the type of the tensor cannot be converted.
    fn read_rows(&self, file: &File, rows: Range<usize>) -> Result<Vec<f32>, Error> {
        let row_bytes = self.size_bytes as usize / self.rows();
        let mut stored = vec![0_u8; row_bytes * rows.len()];
        file.read_exact_at(&mut stored, self.offset + (row_bytes * rows.start) as u64)?;
        if self.kind == F32 {
            return Ok(stored.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect());
        }
        let mut values = vec![0.0; self.columns() * rows.len()];
        if convert_to_floats(self.kind, &stored, &mut values) {
            Ok(values)
        } else {
            Err(Error::new(ErrorKind::InvalidData, format!("values of type {} cannot be converted", self.kind)))
        }
    }
}

impl RowReader {
    /// Returns the number of values per row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.tensor.columns()
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.tensor.rows()
    }

    /// Reads a row as 32-bit floats.
    ///
    /// # Errors
    /// There is no such row, or the file cannot be read.
    pub fn row(&self, index: usize) -> Result<Vec<f32>, Error> {
        if index >= self.rows() {
            let message = format!("row {index} of a tensor with {} rows", self.rows());
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        self.tensor.read_rows(&self.file, index..index + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::GgufFile;
    use std::path::Path;

    #[test]
    fn texts_and_rows_are_read() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny.gguf");
        let file = GgufFile::open(&path).unwrap();
        let tokens = file.texts("tokenizer.ggml.tokens").unwrap().unwrap();
        assert!(tokens.iter().any(|token| token == "a"), "{tokens:?}");
        assert!(file.texts("tokenizer.ggml.token_type").unwrap().is_none() && file.texts("x").unwrap().is_none());
        let name = "token_embd.weight";
        let matrix = file.tensor(name, usize::MAX).unwrap().unwrap();
        let rows = file.rows(name).unwrap().unwrap();
        assert_eq!((rows.rows(), matrix.values.len()), (tokens.len(), tokens.len() * matrix.columns));
        let last = rows.row(tokens.len() - 1).unwrap();
        assert_eq!(last, matrix.values[matrix.values.len() - matrix.columns..]);
        assert!(last.iter().any(|&value| value != 0.0) && rows.row(tokens.len()).is_err());
        assert!(file.tensor(name, 1).is_err() && file.tensor("x", 1).unwrap().is_none());
    }
}
