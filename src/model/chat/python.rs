//! What templates expect of Python: methods, `raise_exception`, `tojson` as `json.dumps` writes it, `strftime`.

use chrono::{DateTime, Utc};
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io;

/// Widest indent of `tojson`; a template may not blow up a short conversation by asking for more.
const WIDEST_INDENT: usize = 16;

/// How the message of `raise_exception` is told from minijinja's own errors.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct Raised;

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message).with_source(Raised))
    });
}

/// Whether the error came from `raise_exception`.
pub(super) fn is_raised(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(<dyn std::error::Error>::is::<Raised>)
}

/// `datetime.now().strftime(format)`.
pub(super) fn strftime(now: DateTime<Utc>, format: &str) -> Result<String, Error> {
    use chrono::format::{Item, StrftimeItems};
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("'{format}' is no format of a time")));
    }
    Ok(now.format_with_items(items.iter()).to_string())
}

/// `json.dumps`: a space after comma and colon, no HTML escapes. Other keyword arguments change nothing that a model sees.
#[expect(clippy::needless_pass_by_value, reason = "filters get their keyword arguments so")]
fn tojson(value: &Value, arguments: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = arguments.get::<Option<usize>>("indent").unwrap_or(None);
    let failed = |error: serde_json::Error| {
        Error::new(ErrorKind::InvalidOperation, format!("the value cannot be written as JSON: {error}"))
    };
    let mut out = Vec::new();
    match indent {
        Some(width) => {
            let spaces = vec![b' '; width.min(WIDEST_INDENT)];
            let formatter = PrettyFormatter::with_indent(&spaces);
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter)).map_err(failed)?;
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)).map_err(failed)?,
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// `, ` and `: `, as Python separates by default.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
