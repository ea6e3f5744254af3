//! Reads a JSON object field by field, so that every error names the field, the expected value and the value received.
//!
//! `null` counts as absent and unknown fields are ignored, as clients of OpenAI and llama-server expect.

use crate::server::{ApiError, App};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The fields of a body, with the server's defaults for absent ones. A default out of range is clamped, because
/// llama-server accepts such values of its flags.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    body: &'a Map<String, Value>,
    aliases: Option<&'a Map<String, Value>>,
    defaults: Option<&'a Map<String, Value>>,
    lenient: bool,
}

impl<'a> Fields<'a> {
    /// Returns the fields of a JSON object.
    pub(crate) fn new(body: &'a Value) -> Result<Self, ApiError> {
        body.as_object()
            .map(|body| Self { body, aliases: None, defaults: None, lenient: false })
            .ok_or_else(|| ApiError::bad_request(format!("the body must be a JSON object, got {}", abbreviate(body))))
    }

    /// Returns the same fields with those that the body contains under another name.
    pub(crate) fn with_aliases(self, aliases: &'a Map<String, Value>) -> Self {
        Self { aliases: Some(aliases), ..self }
    }

    /// Returns the same fields with defaults for those absent from the body.
    pub(crate) fn with_defaults(self, defaults: &'a Map<String, Value>) -> Self {
        Self { defaults: Some(defaults), ..self }
    }

    /// Returns the fields that the defaults contain, then those of the body, which override them.
    pub(crate) fn layers(self) -> impl Iterator<Item = Self> {
        let defaults = self.defaults.map(|body| Self { body, aliases: None, defaults: None, ..self });
        defaults.into_iter().chain([Self { defaults: None, ..self }])
    }

    /// Returns the same fields with the server's defaults for parameters absent from the body. Recorded parameters must not
    /// get them.
    pub(crate) fn with_server_defaults(self, app: &'a App) -> Self {
        self.with_defaults(&app.config().server.request_defaults)
    }

    /// Returns the same fields in llama-server's mode: numbers that need not be integers are clamped to their
    /// range, and sampling parameters have llama-server's limits instead of OpenAI's.
    pub(crate) fn lenient(self) -> Self {
        Self { lenient: true, ..self }
    }

    /// Returns true in llama-server's mode; see [`Fields::lenient`].
    pub(crate) fn is_lenient(self) -> bool {
        self.lenient
    }

    /// Returns the value of a field, or its default.
    pub(crate) fn get(self, name: &str) -> Option<&'a Value> {
        self.sent(name).or_else(|| self.defaults.and_then(|defaults| defaults.get(name)))
    }

    /// Returns true if the body has a field, so that its default is not used.
    pub(crate) fn is_sent(self, name: &str) -> bool {
        self.sent(name).is_some()
    }

    fn sent(self, name: &str) -> Option<&'a Value> {
        let present = self.body.get(name).filter(|value| !value.is_null());
        present.or_else(|| self.aliases.and_then(|aliases| aliases.get(name)))
    }

    /// Returns the named fields that are present.
    pub(crate) fn present_fields(self, names: &[&str]) -> Map<String, Value> {
        names.iter().filter_map(|&name| Some((name.to_owned(), self.get(name)?.clone()))).collect()
    }

    /// Returns a copy of the body without the named fields.
    pub(crate) fn without(self, names: &[&str]) -> Map<String, Value> {
        let kept = self.body.iter().filter(|(name, _)| !names.contains(&name.as_str()));
        kept.map(|(name, value)| (name.clone(), value.clone())).collect()
    }

    /// Returns the name and value of the first named field in the body, or otherwise of the first that has a default.
    pub(crate) fn first_present<'n>(self, names: &[&'n str]) -> Option<(&'n str, &'a Value)> {
        let first = |fields: Self| names.iter().find_map(|&name| fields.get(name).map(|value| (name, value)));
        first(Self { defaults: None, ..self }).or_else(|| first(self))
    }

    pub(crate) fn flag(self, name: &str) -> Result<Option<bool>, ApiError> {
        self.parse_as(name, "true or false", Value::as_bool)
    }

    pub(crate) fn text(self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.parse_as(name, "a string", Value::as_str)
    }

    pub(crate) fn list(self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.parse_as(name, "a list", Value::as_array)
    }

    pub(crate) fn object(self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.parse_as(name, "an object", Value::as_object)
    }

    pub(crate) fn integer(self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = format!("an integer between {} and {}", range.start(), range.end());
        self.parse_as(name, &expected, |value| {
            let number = integer(value)?;
            let number = if self.is_sent(name) { number } else { number.max(*range.start()).min(*range.end()) };
            range.contains(&number).then_some(number)
        })
    }

    /// Returns a number within the range; see [`Fields::lenient`].
    pub(crate) fn number(self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number between {} and {}", range.start(), range.end());
        self.parse_as(name, &expected, |value| {
            let number = value.as_f64()? as f32;
            let number =
                if self.lenient || !self.is_sent(name) { number.clamp(*range.start(), *range.end()) } else { number };
            range.contains(&number).then_some(number)
        })
    }

    fn parse_as<T>(
        self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| invalid_value(name, expected, value))
    }
}

/// Returns an integer. Accepts 5.0, which languages without an integer type send.
pub(crate) fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
    })
}

/// Returns true for null and for an empty list.
pub(crate) fn is_null_or_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

/// Returns the error for a field with an invalid value.
pub(crate) fn invalid_value(name: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::invalid(name, format!("`{name}` must be {expected}, got {}", abbreviate(value)))
}

/// Returns a string, or the joined texts of a list of parts, one line each. `text` extracts the text of a part.
pub(crate) fn join_text_parts<'a>(
    value: &'a Value,
    at: &str,
    text: impl Fn(&'a Value) -> Option<&'a str>,
) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => return Err(invalid_value(at, "a string or a list of parts with text", other)),
    };
    let expected = "a part with text";
    let texts: Result<Vec<&str>, ApiError> = parts
        .iter()
        .enumerate()
        .map(|(index, part)| text(part).ok_or_else(|| invalid_value(&format!("{at}[{index}]"), expected, part)))
        .collect();
    Ok(texts?.join("\n"))
}

/// Returns a required string of an object that is part of a body, at the path `at`.
pub(crate) fn required_text(object: &Value, field: &str, at: &str) -> Result<String, ApiError> {
    let value = &object[field];
    value.as_str().map(str::to_owned).ok_or_else(|| invalid_value(&format!("{at}.{field}"), "a string", value))
}

/// Returns the start of a value's JSON, short enough for an error message.
pub(crate) fn abbreviate(value: &Value) -> String {
    const MAX_CHARS: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::Fields;
    use serde_json::json;

    #[test]
    fn invalid_field_reports_expected_value() {
        let body = json!({"a": 3.5, "b": null, "c": "x", "d": 4.0});
        let fields = Fields::new(&body).unwrap();
        let error = fields.integer("a", 0..=9).unwrap_err().problem();
        assert_eq!(error.detail, "`a` must be an integer between 0 and 9, got 3.5");
        assert_eq!(error.pointer.as_deref(), Some("a"));
        assert_eq!(fields.flag("b").unwrap(), None);
        assert_eq!(fields.integer("d", 0..=9).unwrap(), Some(4));
        assert!(fields.number("c", 0.0..=1.0).is_err());
    }

    #[test]
    fn numbers_are_clamped_in_llama_server_mode() {
        let body = json!({"top_p": 3, "n": 3.5});
        let fields = Fields::new(&body).unwrap().lenient();
        assert_eq!(fields.number("top_p", 0.0..=1.0).unwrap(), Some(1.0));
        assert!(fields.integer("n", 0..=9).is_err());
    }

    #[test]
    fn absent_fields_use_defaults() {
        let (body, defaults) = (json!({"a": 1, "b": null}), json!({"a": 2, "b": 3}));
        let fields = Fields::new(&body).unwrap().with_defaults(defaults.as_object().unwrap());
        assert_eq!((fields.integer("a", 0..=9).unwrap(), fields.integer("b", 0..=9).unwrap()), (Some(1), Some(3)));
        assert_eq!(fields.first_present(&["b", "a"]).unwrap().0, "a", "a value of the body precedes a default");
        assert_eq!(fields.first_present(&["c", "b"]).unwrap().0, "b");
    }

    #[test]
    fn only_defaults_are_clamped() {
        let (body, alias) = (json!({"sent": 7}), json!({"alias": 7}));
        let defaults = json!({"sent": 1, "alias": 1, "default": 7, "low": -7, "text": "x"});
        let fields = Fields::new(&body).unwrap().with_aliases(alias.as_object().unwrap());
        let fields = fields.with_defaults(defaults.as_object().unwrap());
        for (name, expected) in
            [("sent", None), ("alias", None), ("default", Some(2)), ("low", Some(-1)), ("text", None)]
        {
            assert_eq!(fields.integer(name, -1..=2).ok().flatten(), expected, "{name}");
            assert_eq!(fields.number(name, -1.0..=2.0).ok().flatten(), expected.map(|number| number as f32), "{name}");
        }
        assert_eq!(fields.first_present(&["default", "alias"]).unwrap().0, "alias");
    }
}
