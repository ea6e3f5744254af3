//! Reading a JSON object field by field, so that every error names the field, what it takes and what was there.
//!
//! `null` counts as absent and unknown fields are ignored, as clients of OpenAI and llama-server expect.

use crate::api::ApiError;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// The fields of a body, and what holds for those that are absent.
#[derive(Debug, Clone, Copy)]
pub(in crate::api) struct Fields<'a> {
    body: &'a Map<String, Value>,
    defaults: Option<&'a Map<String, Value>>,
    clamps: bool,
}

impl<'a> Fields<'a> {
    pub(in crate::api) fn new(body: &'a Value) -> Result<Self, ApiError> {
        body.as_object()
            .map(|body| Self { body, defaults: None, clamps: false })
            .ok_or_else(|| ApiError::bad_request(format!("the body must be a JSON object, got {}", shown(body))))
    }

    /// The same fields, with values for those that the body does not have.
    pub(in crate::api) fn or(self, defaults: &'a Map<String, Value>) -> Self {
        Self { defaults: Some(defaults), ..self }
    }

    /// The same fields; a number outside of its range becomes the nearest one within, as llama-server has it.
    pub(in crate::api) fn clamping(self) -> Self {
        Self { clamps: true, ..self }
    }

    /// Whether this is llama-server's dialect, see [`Fields::clamping`].
    pub(in crate::api) fn clamps(self) -> bool {
        self.clamps
    }

    /// The value, where there is one.
    pub(in crate::api) fn get(self, name: &str) -> Option<&'a Value> {
        let said = self.body.get(name).filter(|value| !value.is_null());
        said.or_else(|| self.defaults.and_then(|defaults| defaults.get(name)))
    }

    /// Those of these fields that are there.
    pub(in crate::api) fn said(self, names: &[&str]) -> Map<String, Value> {
        names.iter().filter_map(|&name| Some((name.to_owned(), self.get(name)?.clone()))).collect()
    }

    /// The first of these fields that the body has, else the first that has a default, with its name.
    pub(in crate::api) fn first<'n>(self, names: &[&'n str]) -> Option<(&'n str, &'a Value)> {
        let first = |fields: Self| names.iter().find_map(|&name| fields.get(name).map(|value| (name, value)));
        first(Self { defaults: None, ..self }).or_else(|| first(self))
    }

    pub(in crate::api) fn flag(self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(in crate::api) fn text(self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.typed(name, "a text", Value::as_str)
    }

    pub(in crate::api) fn list(self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.typed(name, "a list", Value::as_array)
    }

    pub(in crate::api) fn object(self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.typed(name, "an object", Value::as_object)
    }

    pub(in crate::api) fn integer(self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let expected = format!("a whole number between {} and {}", range.start(), range.end());
        self.typed(name, &expected, |value| integer(value).filter(|number| range.contains(number)))
    }

    /// A number within the range; see [`Fields::clamping`].
    pub(in crate::api) fn number(self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        let expected = format!("a number between {} and {}", range.start(), range.end());
        self.typed(name, &expected, |value| {
            let number = value.as_f64()? as f32;
            let number = if self.clamps { number.clamp(*range.start(), *range.end()) } else { number };
            range.contains(&number).then_some(number)
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
pub(in crate::api) fn integer(value: &Value) -> Option<i64> {
    value.as_i64().or_else(|| {
        let number = value.as_f64()?;
        (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
    })
}

/// The field has a value that it does not take.
pub(in crate::api) fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    ApiError::invalid(name, format!("{name} must be {expected}, got {}", shown(found)))
}

/// A text, or the texts of its parts, a line each; `text` is what a part says.
pub(in crate::api) fn text_parts<'a>(
    value: &'a Value,
    at: &str,
    text: impl Fn(&'a Value) -> Option<&'a str>,
) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        other => return Err(wrong(at, "a text or a list of parts with text", other)),
    };
    let expected = "a part with text; the model takes text only";
    let texts: Result<Vec<&str>, ApiError> = parts
        .iter()
        .enumerate()
        .map(|(index, part)| text(part).ok_or_else(|| wrong(&format!("{at}[{index}]"), expected, part)))
        .collect();
    Ok(texts?.join("\n"))
}

/// A value for a person to recognise it by.
pub(in crate::api) fn shown(value: &Value) -> String {
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

    #[test]
    fn numbers_are_clamped_where_llama_server_does() {
        let body = json!({"top_p": 3, "n": 3.5});
        let fields = Fields::new(&body).unwrap().clamping();
        assert_eq!(fields.number("top_p", 0.0..=1.0).unwrap(), Some(1.0));
        assert!(fields.integer("n", 0..=9).is_err());
    }

    #[test]
    fn a_default_stands_for_what_is_absent() {
        let (body, defaults) = (json!({"a": 1, "b": null}), json!({"a": 2, "b": 3}));
        let fields = Fields::new(&body).unwrap().or(defaults.as_object().unwrap());
        assert_eq!((fields.integer("a", 0..=9).unwrap(), fields.integer("b", 0..=9).unwrap()), (Some(1), Some(3)));
        assert_eq!(fields.first(&["b", "a"]).unwrap().0, "a", "what was said goes before what was not");
        assert_eq!(fields.first(&["c", "b"]).unwrap().0, "b");
    }
}
