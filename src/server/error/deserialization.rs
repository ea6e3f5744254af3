//! Errors for bodies and parameters that cannot be deserialized.
//!
//! serde's messages name Rust types, and not always the field. [`describe`] replaces them with errors in the usual form,
//! which name the field, the expected value and the value received.

use super::ApiError;
use std::error::Error;
use std::iter::successors;

/// A failed deserialization: the path of the value, and serde's message.
#[derive(Debug)]
pub(super) struct Failure {
    path: String,
    message: String,
}

impl Failure {
    /// Finds the failure that caused a rejection.
    pub(super) fn find(rejection: &(dyn Error + 'static)) -> Option<Self> {
        successors(Some(rejection), |&error| error.source()).find_map(|error| {
            let json = error.downcast_ref::<serde_path_to_error::Error<serde_json::Error>>().map(Self::from);
            json.or_else(|| error.downcast_ref::<serde_path_to_error::Error<serde::de::value::Error>>().map(Self::from))
        })
    }

    /// Returns the path of the value; empty for the whole input.
    pub(super) fn path(&self) -> &str {
        &self.path
    }

    /// Returns serde's message.
    pub(super) fn message(&self) -> &str {
        &self.message
    }

    /// Returns the 400 error. `received` is the text of a query parameter.
    pub(super) fn to_error(&self, received: Option<&str>) -> ApiError {
        let (path, detail) = describe(&self.path, &self.message, received);
        if path.is_empty() { ApiError::bad_request(detail) } else { ApiError::invalid(path, detail) }
    }
}

impl<E: std::fmt::Display> From<&serde_path_to_error::Error<E>> for Failure {
    fn from(error: &serde_path_to_error::Error<E>) -> Self {
        let path = error.path().to_string();
        Self { path: if path == "." { String::new() } else { path }, message: error.inner().to_string() }
    }
}

impl ApiError {
    /// Converts an error of [`serde_path_to_error::deserialize`].
    pub(crate) fn from_deserialization<E: std::fmt::Display>(error: &serde_path_to_error::Error<E>) -> Self {
        Failure::from(error).to_error(None)
    }

    /// Converts an error of [`serde_path_to_error::deserialize`] for the value of a field.
    pub(crate) fn from_field_deserialization<E: std::fmt::Display>(
        field: &str,
        error: &serde_path_to_error::Error<E>,
    ) -> Self {
        let Failure { path, message } = Failure::from(error);
        let path = match path.as_str() {
            "" => field.to_owned(),
            path if path.starts_with('[') => format!("{field}{path}"),
            path => format!("{field}.{path}"),
        };
        Failure { path, message }.to_error(None)
    }
}

/// Returns the path of the invalid field, and the text of the error.
fn describe(path: &str, message: &str, received: Option<&str>) -> (String, String) {
    let message = without_position(message);
    if let Some(name) = message.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`')) {
        let path = join(path, name);
        return (path.clone(), format!("`{path}` is missing"));
    }
    if let Some((name, known)) = message.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
        let path = join(path, name);
        let known: Vec<&str> = quoted(known).collect();
        return (path.clone(), format!("unknown field `{path}`; known fields: {}", known.join(", ")));
    }
    if let Some(name) = message.strip_prefix("duplicate field `").and_then(|rest| rest.strip_suffix('`')) {
        let path = join(path, name);
        return (path.clone(), format!("`{path}` is given more than once"));
    }
    let subject = if path.is_empty() { "the body".to_owned() } else { format!("`{path}`") };
    let mismatch = |expected: &str, got: &str| format!("{subject} must be {expected}, got {got}");
    let got = received.map(|text| format!("{text:?}"));
    let detail =
        if let Some((name, known)) = message.strip_prefix("unknown variant `").and_then(|rest| rest.split_once('`')) {
            mismatch(&alternatives(quoted(known)), &format!("{name:?}"))
        } else if let Some((found, expected)) = ["invalid type: ", "invalid value: "]
            .into_iter()
            .find_map(|prefix| message.strip_prefix(prefix))
            .and_then(|rest| rest.rsplit_once(", expected "))
        {
            mismatch(&expected_value(expected), &got.unwrap_or_else(|| received_value(found)))
        } else if let Some((length, expected)) =
            message.strip_prefix("invalid length ").and_then(|rest| rest.split_once(", expected "))
        {
            mismatch(&expected_value(expected), &format!("a list of length {length}"))
        } else if let Some(expected) = expected_parameter(message, received) {
            let got = got.map(|got| format!(", got {got}")).unwrap_or_default();
            format!("{subject} must be {expected}{got}")
        } else if message.starts_with('`') {
            // A complete message of our own.
            message.to_owned()
        } else {
            format!("{subject} is invalid: {message}")
        };
    (path.to_owned(), detail)
}

/// Removes the position that `serde_json` appends to a message.
fn without_position(message: &str) -> &str {
    message.rsplit_once(" at line ").filter(|(_, rest)| rest.contains(" column ")).map_or(message, |(text, _)| text)
}

/// Appends the name of a field to a path that may end with it already.
fn join(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else if path == name || path.ends_with(&format!(".{name}")) {
        path.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

/// Returns the names in backticks.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Returns the texts as alternatives: `"a", "b" or "c"`.
fn alternatives<'a>(texts: impl Iterator<Item = &'a str>) -> String {
    let texts: Vec<String> = texts.map(|text| format!("{text:?}")).collect();
    match texts.as_slice() {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => texts.concat(),
    }
}

/// Returns the words for serde's name of an expected type.
pub(super) fn expected_value(expected: &str) -> String {
    match expected {
        "a boolean" | "bool" => "true or false".into(),
        "u8" => "an integer between 0 and 255".into(),
        "u16" => "an integer between 0 and 65535".into(),
        "u32" => "an integer between 0 and 4294967295".into(),
        "u64" | "usize" => "an integer of 0 or more".into(),
        "i8" | "i16" | "i64" | "isize" => "an integer".into(),
        "i32" => "an integer between -2147483648 and 2147483647".into(),
        "f32" | "f64" => "a number".into(),
        "a sequence" => "a list".into(),
        "a map" => "an object".into(),
        "string or map" => "a string or an object".into(),
        _ if expected.starts_with("struct ") => "an object".into(),
        _ => expected.into(),
    }
}

/// Returns the words for serde's description of a received value.
fn received_value(found: &str) -> String {
    match found {
        "sequence" => return "a list".into(),
        "map" => return "an object".into(),
        "unit value" => return "null".into(),
        _ => {}
    }
    let value = ["boolean ", "integer ", "floating point "].into_iter().find_map(|kind| found.strip_prefix(kind));
    match value {
        Some(value) => value.trim_matches('`').into(),
        None => found.strip_prefix("string ").unwrap_or(found).into(),
    }
}

/// Returns the expected value for an error of the standard library or of `uuid` about the text of a parameter.
fn expected_parameter(message: &str, received: Option<&str>) -> Option<&'static str> {
    match message {
        "invalid digit found in string" if received.is_some_and(|text| text.starts_with('-')) => {
            Some("an integer of 0 or more")
        }
        "invalid digit found in string" | "cannot parse integer from empty string" => Some("an integer"),
        "number too large to fit in target type" => Some("a smaller integer"),
        "number too small to fit in target type" => Some("a larger integer"),
        "invalid float literal" | "cannot parse float from empty string" => Some("a number"),
        "provided string was not `true` or `false`" => Some("true or false"),
        _ => message.starts_with("UUID parsing failed").then_some("a UUID"),
    }
}

#[cfg(test)]
mod tests {
    use super::ApiError;
    use serde::Deserialize;
    use serde_json::{Value, json};

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Outer {
        #[expect(dead_code, reason = "only its deserialization is tested")]
        list: Vec<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only its deserialization is tested")]
    struct Inner {
        count: u32,
        #[serde(default)]
        unit: Unit,
        #[serde(default)]
        on: bool,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Unit {
        #[default]
        Hour,
        Day,
        Week,
    }

    fn error(body: &Value) -> String {
        let problem = ApiError::from_deserialization(&serde_path_to_error::deserialize::<_, Outer>(body).unwrap_err());
        let problem = problem.problem();
        format!("{}: {}", problem.pointer.unwrap_or_default(), problem.detail)
    }

    #[test]
    fn deserialization_errors_name_field_and_expected_value() {
        let inner = |inner: Value| error(&json!({ "list": [inner] }));
        insta::assert_snapshot!(error(&json!([])), @": the body must be an object, got a list of length 0");
        insta::assert_snapshot!(error(&json!({})), @"list: `list` is missing");
        insta::assert_snapshot!(error(&json!({"lst": []})), @"lst: unknown field `lst`; known fields: list");
        insta::assert_snapshot!(error(&json!({"list": 5})), @"list: `list` must be a list, got 5");
        insta::assert_snapshot!(inner(json!({})), @"list[0].count: `list[0].count` is missing");
        insta::assert_snapshot!(
            inner(json!({"count": -1})),
            @"list[0].count: `list[0].count` must be an integer between 0 and 4294967295, got -1"
        );
        insta::assert_snapshot!(
            inner(json!({"count": "three, expected"})),
            @r#"list[0].count: `list[0].count` must be an integer between 0 and 4294967295, got "three, expected""#
        );
        insta::assert_snapshot!(
            inner(json!({"count": 1, "unit": "month"})),
            @r#"list[0].unit: `list[0].unit` must be "hour", "day" or "week", got "month""#
        );
        insta::assert_snapshot!(
            inner(json!({"count": 1, "on": {}})),
            @"list[0].on: `list[0].on` must be true or false, got an object"
        );
        insta::assert_snapshot!(
            inner(json!({"count": 1, "of": 2})),
            @"list[0].of: unknown field `list[0].of`; known fields: count, unit, on"
        );
        let of_field = serde_path_to_error::deserialize::<_, Inner>(&json!({"count": true})).unwrap_err();
        let of_field = ApiError::from_field_deserialization("list[1]", &of_field).problem().detail;
        insta::assert_snapshot!(of_field, @"`list[1].count` must be an integer between 0 and 4294967295, got true");
        insta::assert_snapshot!(super::describe("", "duplicate field `limit`", None).1, @"`limit` is given more than once");
    }
}
