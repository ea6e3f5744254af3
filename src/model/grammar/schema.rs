//! A JSON schema as llguidance takes it.

use super::GrammarError;
use serde_json::{Map, Value, json};

/// White space between the parts of the JSON: a blank, or a line break with what indents the next line. Without a bound a
/// model that has nothing to say fills its context with it.
const WHITE_SPACE: &str = r" |\n[ \t]{0,20}";

/// Deepest nesting that is looked into for annotations.
const MAX_DEPTH: usize = 128;

/// Formats that llguidance holds a text to. Any other is an annotation, as the standard has it.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Checks that it is a schema, takes out what only annotates, and says how the JSON is to be laid out.
pub(super) fn prepare(schema: &Value) -> Result<Value, GrammarError> {
    let mut schema = match schema {
        Value::Object(object) => object.clone(),
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return Err(GrammarError::unsupported("the schema false allows no answer at all")),
        other => {
            let found = match other {
                Value::Array(_) => "a list",
                Value::String(_) => "a text",
                _ => "something else",
            };
            return Err(GrammarError::unsupported(format!("a schema is an object, got {found}")));
        }
    };
    simplify(&mut schema, true, 0);
    let options = schema.entry("x-guidance").or_insert_with(|| json!({}));
    if let Value::Object(options) = options
        && !options.contains_key("whitespace_pattern")
        && !options.contains_key("whitespace_flexible")
    {
        options.insert("whitespace_pattern".into(), WHITE_SPACE.into());
    }
    Ok(Value::Object(schema))
}

/// Takes out annotations. Where a schema stands `alone`, an object has the properties that it lists and no others, unless it
/// says otherwise: as in llama.cpp, since a model that may go on inventing properties does.
fn simplify(schema: &mut Map<String, Value>, alone: bool, depth: usize) {
    if depth > MAX_DEPTH {
        return;
    }
    schema.shift_remove("deprecated");
    if schema.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
        schema.shift_remove("format");
    }
    if alone && lists_all_it_needs(schema) {
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

fn lists_all_it_needs(schema: &Map<String, Value>) -> bool {
    const OTHERWISE: &[&str] = &[
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
        && !OTHERWISE.iter().any(|keyword| schema.contains_key(*keyword))
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
    fn objects_have_what_they_list() {
        let of = |schema: Value| prepared(&schema).get("additionalProperties").cloned();
        assert_eq!(of(json!({"properties": {"a": {}}, "required": ["a"]})), Some(false.into()));
        assert_eq!(of(json!({"properties": {"a": {}}, "required": ["b"]})), None);
        assert_eq!(of(json!({"properties": {"a": {}}, "additionalProperties": true})), Some(true.into()));
        assert_eq!(of(json!({"properties": {"a": {}}, "allOf": [{"properties": {"b": {}}}]})), None);
        assert_eq!(of(json!({"type": "object"})), None);
    }

    #[test]
    fn what_only_annotates_is_taken_out_and_names_are_not() {
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
