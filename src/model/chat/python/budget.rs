//! Memory limit of a rendering: the texts and lists that a template creates count towards a maximum.
//!
//! They count when they are created and also after they are dropped, so that a template that doubles a value ends after
//! some steps. The limit of instructions does not prevent that, because 30 instructions can double a value to a
//! gigabyte.

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, escape_formatter};

/// Maximum bytes of the texts and lists of one rendering. Lower in tests, so that they need little memory.
pub(in crate::model::chat) const MAX_BYTES: usize = if cfg!(test) { 96 << 20 } else { 1 << 30 };

/// Bytes of a value in a list.
pub(super) const VALUE_BYTES: usize = size_of::<Value>();

/// Maximum nesting of a value that becomes text.
const MAX_DEPTH: usize = 64;

/// Bytes of the texts and lists that a rendering created.
#[derive(Debug, Default)]
struct SpentBytes(usize);

/// Counts bytes of a new text or list.
pub(super) fn spend(state: &mut State<'_, '_>, bytes: usize) -> Result<(), Error> {
    let spent = state.get_or_insert_extension_with(SpentBytes::default);
    spent.0 = spent.0.saturating_add(bytes);
    if spent.0 > MAX_BYTES { Err(too_large()) } else { Ok(()) }
}

/// Counts the text of a value, as `{{ value }}` writes it, and returns an estimate of its bytes.
pub(super) fn spend_text(state: &mut State<'_, '_>, value: &Value) -> Result<usize, Error> {
    let mut bytes = 0;
    measure(value, 0, &mut bytes)?;
    spend(state, bytes)?;
    Ok(bytes)
}

/// Writes a value to the output, which may be the text of a variable.
pub(super) fn write_value(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    spend_text(state, value)?;
    escape_formatter(out, state, value)
}

/// Adds the bytes of a value and of all values in it. Values may share parts, so the text of a small value may be long.
fn measure(value: &Value, depth: usize, bytes: &mut usize) -> Result<(), Error> {
    *bytes = bytes.saturating_add(VALUE_BYTES + value.as_str().map_or(0, str::len));
    if *bytes > MAX_BYTES {
        return Err(too_large());
    }
    let is_container = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map);
    if is_container && depth == MAX_DEPTH {
        let message = format!("a value that becomes text must not be nested more than {MAX_DEPTH} levels deep");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    if is_container {
        for item in value.try_iter()? {
            measure(&item, depth + 1, bytes)?;
            if value.kind() == ValueKind::Map {
                measure(&value.get_item(&item)?, depth + 1, bytes)?;
            }
        }
    }
    Ok(())
}

fn too_large() -> Error {
    let message = format!("the template creates texts and lists of more than {MAX_BYTES} bytes, the maximum");
    Error::new(ErrorKind::InvalidOperation, message)
}
