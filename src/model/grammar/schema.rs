//! Preparation of a JSON schema for llguidance.

use super::GrammarError;
use serde_json::{Map, Value, json};

/// Whitespace between the parts of the JSON: a space, or a line break with an indentation. The length is bounded,
/// because a model may otherwise fill its context with whitespace.
const WHITESPACE: &str = r" |\n[ \t]{0,20}";

/// Maximum nesting in which annotations are removed.
const MAX_DEPTH: usize = 128;

/// Formats that llguidance enforces. Every other format is an annotation, as in the standard.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Validates the schema, removes annotations and sets the layout of the JSON.
pub(super) fn prepare(schema: &Value) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Object(object) => object.clone(),
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return Err(GrammarError::unsupported("the schema `false` permits no answer")),
        other => {
            let found = match other {
                Value::Array(_) => "an array",
                Value::String(_) => "a string",
                Value::Number(_) => "a number",
                _ => "null",
            };
            return Err(GrammarError::unsupported(format!("a schema must be an object, got {found}")));
        }
    };
    simplify(&mut schema, true, 0);
    let options = schema.entry("x-guidance").or_insert_with(|| json!({}));
    if let Value::Object(options) = options
        && !options.contains_key("whitespace_pattern")
        && !options.contains_key("whitespace_flexible")
    {
        options.insert("whitespace_pattern".into(), WHITESPACE.into());
    }
    Ok(Value::Object(schema))
}

/// Removes annotations, and restricts objects to the listed properties unless the schema permits others. `alone` is
/// false inside combinations such as `anyOf`, whose objects are not restricted. llama.cpp does the same, because models
/// otherwise invent properties.
fn simplify(schema: &mut Map<String, Value>, alone: bool, depth: usize) {
    if depth > MAX_DEPTH {
        return;
    }
    schema.shift_remove("deprecated");
    if schema.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
        schema.shift_remove("format");
    }
    if alone && lists_required_properties(schema) {
        schema.insert("additionalProperties".into(), false.into());
    }
    let below = |value: &mut Value, alone| {
        if let Value::Object(inner) = value {
            simplify(inner, alone, depth + 1);
        }
    };
    for (keyword, value) in schema {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().for_each(|value| below(value, keyword != "$defs" && keyword != "definitions"));
            }
            ("anyOf" | "allOf" | "oneOf", Value::Array(list)) => list.iter_mut().for_each(|value| below(value, false)),
            ("prefixItems" | "items", Value::Array(list)) => list.iter_mut().for_each(|value| below(value, true)),
            ("items" | "additionalItems" | "additionalProperties", value) => below(value, true),
            _ => {}
        }
    }
}

fn lists_required_properties(schema: &Map<String, Value>) -> bool {
    const OPEN_KEYWORDS: &[&str] = &[
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "minProperties",
        "allOf",
        "anyOf",
        "oneOf",
        "$ref",
    ];
    let Some(Value::Object(properties)) = schema.get("properties") else { return false };
    let required = schema.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    required.iter().all(|name| name.as_str().is_some_and(|name| properties.contains_key(name)))
        && !OPEN_KEYWORDS.iter().any(|keyword| schema.contains_key(*keyword))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prepared(schema: &Value) -> Value {
        let mut prepared = prepare(schema).unwrap();
        prepared.as_object_mut().unwrap().remove("x-guidance");
        prepared
    }

    #[test]
    fn objects_have_only_listed_properties() {
        let of = |schema: Value| prepared(&schema).get("additionalProperties").cloned();
        assert_eq!(of(json!({"properties": {"a": {}}, "required": ["a"]})), Some(false.into()));
        assert_eq!(of(json!({"properties": {"a": {}}, "required": ["b"]})), None);
        assert_eq!(of(json!({"properties": {"a": {}}, "additionalProperties": true})), Some(true.into()));
        assert_eq!(of(json!({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]})), None);
        assert_eq!(of(json!({"type": "object"})), None);
    }

    #[test]
    fn annotations_are_removed_but_property_names_kept() {
        let schema = json!({
            "properties": {"format": {"type": "integer", "format": "int64", "deprecated": true}, "deprecated": true},
            "items": [{"format": "email"}], "enum": [{"format": "x"}],
        });
        let wanted = json!({
            "properties": {"format": {"type": "integer"}, "deprecated": true},
            "items": [{"format": "email"}], "enum": [{"format": "x"}], "additionalProperties": false,
        });
        assert_eq!(prepared(&schema), wanted);
    }
}
