//! Reads single tensors, rows of tensors, and string arrays from a GGUF file.

use llama_cpp_sys_2 as sys;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;

/// The header of a GGUF file, with access to its tensors.
pub struct Gguf {
    header: NonNull<sys::gguf_context>,
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

impl Gguf {
    /// Reads the header.
    ///
    /// # Errors
    /// The file cannot be read or is not a GGUF file.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = File::open(path)?;
        let name = CString::new(path.as_os_str().as_bytes())?;
        let params = sys::gguf_init_params { no_alloc: true, ctx: std::ptr::null_mut() };
        // SAFETY: the name is zero-terminated, and without `ctx` only the header is read.
        let header = unsafe { sys::gguf_init_from_file(name.as_ptr(), params) };
        let header = NonNull::new(header).ok_or_else(|| Error::new(ErrorKind::InvalidData, "not a GGUF file"))?;
        Ok(Self { header, file })
    }

    /// Returns the strings of a string array, if there is one with this key.
    #[must_use]
    pub fn texts(&self, key: &str) -> Option<Vec<String>> {
        let key = CString::new(key).ok()?;
        let header = self.header.as_ptr();
        // SAFETY: `header` lives as long as `self`; type and length are queried before a text is read, and texts are
        // zero-terminated and live as long as the header.
        unsafe {
            let id = sys::gguf_find_key(header, key.as_ptr());
            if id < 0
                || sys::gguf_get_kv_type(header, id) != sys::GGUF_TYPE_ARRAY
                || sys::gguf_get_arr_type(header, id) != sys::GGUF_TYPE_STRING
            {
                return None;
            }
            let text = |index| CStr::from_ptr(sys::gguf_get_arr_str(header, id, index)).to_string_lossy().into_owned();
            Some((0..sys::gguf_get_arr_n(header, id)).map(text).collect())
        }
    }

    /// Reads a tensor as 32-bit floats, converting from its stored type; `None` if the file has none with this name.
    ///
    /// # Errors
    /// The file ends before the tensor does, the tensor has more than `max` values, or its type is unknown.
    pub fn tensor(&self, name: &str, max: usize) -> Result<Option<Matrix>, Error> {
        let Some(place) = self.find(name)? else { return Ok(None) };
        let count = place.columns.checked_mul(place.rows).filter(|&count| count <= max);
        count.ok_or_else(|| invalid(name, "it is too large"))?;
        let values = place
            .read(&self.file, 0, place.rows)
            .map_err(|error| Error::new(error.kind(), format!("tensor {name}: {error}")))?;
        Ok(Some(Matrix { columns: place.columns, values }))
    }

    /// Returns a reader of a tensor's rows; `None` if the file has no tensor with this name.
    ///
    /// # Errors
    /// The type of the tensor is unknown, or the file cannot be opened again.
    pub fn rows(&self, name: &str) -> Result<Option<RowReader>, Error> {
        let Some(place) = self.find(name)? else { return Ok(None) };
        Ok(Some(RowReader { file: self.file.try_clone()?, place }))
    }

    fn find(&self, name: &str) -> Result<Option<TensorPlace>, Error> {
        let c_name = CString::new(name)?;
        let header = self.header.as_ptr();
        // SAFETY: `header` lives as long as `self`, and `id` is one of its tensors if it is not negative; `ne` has four
        // extents.
        let (kind, extents, bytes, start) = unsafe {
            let id = sys::gguf_find_tensor(header, c_name.as_ptr());
            if id < 0 {
                return Ok(None);
            }
            let extents = std::slice::from_raw_parts(sys::gguf_get_tensor_ne(header, id), 4);
            let start = sys::gguf_get_data_offset(header) + sys::gguf_get_tensor_offset(header, id);
            (sys::gguf_get_tensor_type(header, id), extents, sys::gguf_get_tensor_size(header, id), start)
        };
        let product = |extents: &[i64]| {
            extents.iter().try_fold(1_usize, |product, &extent| product.checked_mul(usize::try_from(extent).ok()?))
        };
        let (columns, rows) = (product(&extents[..1]), product(&extents[1..]));
        let (columns, rows) = columns.zip(rows).ok_or_else(|| invalid(name, "it is too large"))?;
        // SAFETY: ggml rejected unknown types when it read the header.
        let row_bytes = unsafe { sys::ggml_row_size(kind, extents[0]) };
        if row_bytes.checked_mul(rows) != Some(bytes) {
            return Err(invalid(name, "its type cannot be read"));
        }
        Ok(Some(TensorPlace { start: start as u64, kind, columns, rows, row_bytes }))
    }
}

fn invalid(name: &str, reason: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("tensor {name}: {reason}"))
}

/// Place and shape of a tensor in a file.
#[derive(Debug, Clone, Copy)]
struct TensorPlace {
    start: u64,
    kind: sys::ggml_type,
    columns: usize,
    rows: usize,
    row_bytes: usize,
}

impl TensorPlace {
    /// Reads `count` rows from `first` on, which the tensor must have, as 32-bit floats.
    fn read(&self, file: &File, first: usize, count: usize) -> Result<Vec<f32>, Error> {
        let mut stored = vec![0_u8; self.row_bytes * count];
        file.read_exact_at(&mut stored, self.start + (self.row_bytes * first) as u64)?;
        let mut values = vec![0.0_f32; self.columns * count];
        if self.kind == sys::GGML_TYPE_F32 {
            for (value, bytes) in values.iter_mut().zip(stored.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
            return Ok(values);
        }
        // SAFETY: ggml rejected unknown types when it read the header.
        let convert = unsafe { (*sys::ggml_get_type_traits(self.kind)).to_float };
        let convert = convert.ok_or_else(|| Error::new(ErrorKind::InvalidData, "its type cannot be read"))?;
        // SAFETY: `stored` has the bytes of these rows, whose size ggml computed from type and width, and `values` has
        // room for them.
        unsafe { convert(stored.as_ptr().cast(), values.as_mut_ptr(), values.len() as i64) };
        Ok(values)
    }
}

/// Reader of single rows of a tensor.
#[derive(Debug)]
pub struct RowReader {
    file: File,
    place: TensorPlace,
}

impl RowReader {
    /// Returns the number of values per row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.place.columns
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.place.rows
    }

    /// Reads a row as 32-bit floats.
    ///
    /// # Errors
    /// There is no such row, or the file cannot be read.
    pub fn row(&self, index: usize) -> Result<Vec<f32>, Error> {
        if index >= self.place.rows {
            let message = format!("row {index} of a tensor with {} rows", self.place.rows);
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        self.place.read(&self.file, index, 1)
    }
}

impl Drop for Gguf {
    fn drop(&mut self) {
        // SAFETY: created by `gguf_init_from_file`, and freed once.
        unsafe { sys::gguf_free(self.header.as_ptr()) };
    }
}
