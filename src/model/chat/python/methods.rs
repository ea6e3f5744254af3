//! Methods of Python's strings, lists and dictionaries that minijinja-contrib lacks.

use super::filters::spend_method;
use minijinja::value::{Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;

pub(super) fn call(state: &mut State<'_, '_>, value: &Value, method: &str, args: &[Value]) -> Result<Value, Error> {
    match (value.as_str(), method) {
        (Some(text), _) => {
            spend_method(state, value, method, args)?;
            match call_text_method(text, method, args)? {
                Some(result) => Ok(result),
                None => unknown_method_callback(state, value, method, args),
            }
        }
        (None, "copy") if matches!(value.kind(), ValueKind::Seq | ValueKind::Map) => {
            let () = from_args(args)?;
            Ok(value.clone())
        }
        (None, "index") if value.kind() == ValueKind::Seq => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from).ok_or_else(|| invalid(format!("index: {wanted} is not in the list")))
        }
        _ => unknown_method_callback(state, value, method, args),
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn texts<'a>(texts: impl IntoIterator<Item = &'a str>) -> Value {
    texts.into_iter().map(Value::from).collect()
}

/// Splits a text at whitespace at most `limit` times. Returns the parts, the last one first.
fn rsplit_whitespace(text: &str, limit: usize) -> Vec<&str> {
    let (mut parts, mut rest) = (Vec::new(), text.trim_end());
    while !rest.is_empty() {
        let at = rest.rfind(char::is_whitespace).filter(|_| parts.len() < limit);
        let (left, part) = at.map_or(("", rest), |at| (rest[..at].trim_end(), rest[at..].trim_start()));
        parts.push(part);
        rest = left;
    }
    parts
}

fn call_text_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match method {
        "index" => {
            let (wanted,): (&str,) = from_args(args)?;
            let at = text.find(wanted).ok_or_else(|| invalid(format!("index: '{wanted}' is not in the text")))?;
            Value::from(text[..at].chars().count())
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(separator).map_or((text, None), |(a, b)| (a, Some(b)));
            texts([before, after.map_or("", |_| separator), after.unwrap_or("")])
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.rsplit_once(separator).map_or((None, text), |(a, b)| (Some(a), b));
            texts([before.unwrap_or(""), before.map_or("", |_| separator), after])
        }
        "rsplit" => {
            let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
            // A negative limit means no limit.
            let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
            let parts = match separator {
                Some(separator) => text.rsplitn(limit.saturating_add(1), separator).collect(),
                None => rsplit_whitespace(text, limit),
            };
            texts(parts.into_iter().rev())
        }
        _ => return Ok(None),
    }))
}
