//! Python features that templates use: methods, tests, `raise_exception`, `tojson`, `strftime`, mutable lists.

pub(super) mod budget;
mod filters;
mod json;
mod list;
mod methods;
mod operators;

use chrono::{DateTime, Utc};
use minijinja::value::{Kwargs, Object, Rest, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum spaces of an indent, so that a template cannot make a short conversation very long.
const MAX_INDENT: usize = 16;

/// The error type of `raise_exception`, which distinguishes it from minijinja's own errors.
#[derive(Debug, thiserror::Error)]
#[error("raised by the template")]
struct TemplateException;

pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(budget::write_value);
    // It writes all variables without a limit.
    environment.remove_global("debug");
    filters::install(environment);
    operators::install(environment);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function(super::jinja_syntax::LIST, |values: &Value| list::list_of(values));
    environment.add_function("joiner", |separator: Option<String>| {
        let separator = separator.unwrap_or_else(|| ", ".to_owned());
        Value::from_object(Joiner { separator, calls: AtomicUsize::new(0) })
    });
    environment.add_function("cycler", |values: Rest<Value>| {
        if values.is_empty() {
            return Err(Error::new(ErrorKind::MissingArgument, "cycler needs at least one value"));
        }
        Ok(Value::from_object(Cycler { values: values.0, at: AtomicUsize::new(0) }))
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message).with_source(TemplateException))
    });
}

/// Returns true if the error came from `raise_exception`.
pub(super) fn is_raised(error: &Error) -> bool {
    std::error::Error::source(error).is_some_and(<dyn std::error::Error>::is::<TemplateException>)
}

/// Returns `datetime.now().strftime(format)`.
pub(super) fn strftime(now: DateTime<Utc>, format: &str) -> Result<String, Error> {
    use chrono::format::{Item, StrftimeItems};
    let items: Vec<Item<'_>> = StrftimeItems::new(format).collect();
    if items.contains(&Item::Error) {
        return Err(Error::new(ErrorKind::InvalidOperation, format!("'{format}' is not a valid time format")));
    }
    Ok(now.format_with_items(items.iter()).to_string())
}

/// Indents every line, or all but the first; blank lines stay blank unless `blank` is true. minijinja
/// drops a final line break, which Python keeps.
#[expect(clippy::needless_pass_by_value, reason = "minijinja passes keyword arguments by value")]
fn indent(
    text: &str,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    named: Kwargs,
) -> Result<String, Error> {
    let flag = |given: Option<bool>, name: &str| {
        given.map_or_else(|| named.get::<Option<bool>>(name).map(Option::unwrap_or_default), Ok)
    };
    let (first, blank) = (flag(first, "first")?, flag(blank, "blank")?);
    let width = width.map_or_else(|| named.get::<Option<Value>>("width"), |width| Ok(Some(width)))?;
    named.assert_all_used()?;
    let spaces = match width {
        Some(width) => match width.as_str() {
            Some(text) => text.chars().take(MAX_INDENT).collect(),
            None => " ".repeat(width.as_usize().unwrap_or(0).min(MAX_INDENT)),
        },
        None => " ".repeat(4),
    };
    let mut result = String::with_capacity(text.len());
    for (index, line) in text.split('\n').enumerate() {
        if index > 0 {
            result.push('\n');
        }
        if if index == 0 { first } else { blank || !line.is_empty() } {
            result.push_str(&spaces);
        }
        result.push_str(line);
    }
    Ok(result)
}

/// Returns true if `iter(value)` works in Python. Unlike in minijinja, `None` is not iterable.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Returns true if the value has a length and elements, like strings, lists and mappings. Jinja also counts undefined
/// values, which are empty.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

/// `joiner`: returns an empty text at the first call, and the separator at every later call.
#[derive(Debug)]
struct Joiner {
    separator: String,
    calls: AtomicUsize,
}

impl Object for Joiner {
    fn call(self: &Arc<Self>, _state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let () = minijinja::value::from_args(args)?;
        let is_first = self.calls.fetch_add(1, Ordering::Relaxed) == 0;
        Ok(Value::from(if is_first { "" } else { &self.separator }))
    }
}

/// `cycler`: returns the values in turn.
#[derive(Debug)]
struct Cycler {
    values: Vec<Value>,
    at: AtomicUsize,
}

impl Cycler {
    fn current(&self) -> Value {
        self.values[self.at.load(Ordering::Relaxed) % self.values.len()].clone()
    }
}

impl Object for Cycler {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str()? == "current").then(|| self.current())
    }

    fn call_method(self: &Arc<Self>, _state: &mut State<'_, '_>, method: &str, args: &[Value]) -> Result<Value, Error> {
        let () = minijinja::value::from_args(args)?;
        match method {
            "next" => {
                let value = self.current();
                self.at.fetch_add(1, Ordering::Relaxed);
                Ok(value)
            }
            "reset" => {
                self.at.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}

#[cfg(test)]
mod tests;
