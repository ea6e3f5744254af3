//! Reading a JSON object field by field, so that every error names the field, what it takes and what was there.
//!
//! `null` counts as absent and unknown fields are ignored, as clients of this API expect.

use crate::api::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The fields of a body.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn new(body: &'a Value) -> Result<Self, ApiError> {
        body.as_object()
            .map(Self)
            .ok_or_else(|| ApiError::bad_request(format!("the body must be a JSON object, got {}", shown(body))))
    }

    /// The value, where there is one.
    pub(super) fn get(self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// The first of these fields that is there, with its name.
    pub(super) fn first<'n>(self, names: &[&'n str]) -> Option<(&'n str, &'a Value)> {
        names.iter().find_map(|&name| self.get(name).map(|value| (name, value)))
    }

    pub(super) fn flag(self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(super) fn text(self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a text", Value::as_str)
    }

    pub(super) fn list(self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.typed(name, "a list", Value::as_array)
    }

    pub(super) fn object(self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(name, "an object", Value::as_object)
    }

    pub(super) fn integer(self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = format!("a whole number between {} and {}", range.start(), range.end());
        self.typed(name, &expected, |value| integer(value).filter(|number| range.contains(number)))
    }

    /// A number within the range.
    pub(super) fn number(self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number between {} and {}", range.start(), range.end());
        self.typed(name, &expected, |value| {
            value.as_f64().map(|number| number as f32).filter(|number| range.contains(number))
        })
    }

    fn typed<T>(
        self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(name, expected, value))
    }
}

/// A whole number; clients in languages without integers write 5.0.
pub(super) fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
    })
}

/// The field has a value that it does not take.
pub(super) fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::invalid(name, format!("{name} must be {expected}, got {}", shown(found)))
}

/// A value for a person to recognise it by.
pub(super) fn shown(value: &Value) -> String {
    const LONGEST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::Fields;
    use serde_json::json;

    #[test]
    fn a_wrong_field_says_what_would_be_right() {
        let body = json!({"a": 3.5, "b": null, "c": "x", "d": 4.0});
        let fields = Fields::new(&body).unwrap();
        let error = fields.integer("a", 0..=9).unwrap_err().problem();
        assert_eq!(error.detail, "a must be a whole number between 0 and 9, got 3.5");
        assert_eq!(error.pointer.as_deref(), Some("a"));
        assert_eq!(fields.flag("b").unwrap(), None);
        assert_eq!(fields.integer("d", 0..=9).unwrap(), Some(4));
        assert!(fields.number("c", 0.0..=1.0).is_err());
    }
}
