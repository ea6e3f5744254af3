//! Preparation of a JSON schema for llguidance.

use super::GrammarError;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Whitespace between the parts of the JSON: a space, or a line break with an indentation. The length is bounded,
/// because a model may otherwise fill its context with whitespace.
const WHITESPACE: &str = r" |\n[ \t]{0,20}";

/// Maximum nesting in which schemas are prepared.
const MAX_DEPTH: usize = 128;

/// Formats that llguidance enforces. Every other format is an annotation, as in the standard.
const FORMATS: &[&str] =
    &["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];

/// Rejects a value that is not a schema, or permits no answer.
pub(super) fn check(schema: &Value) -> Result<(), GrammarError> {
    let found = match schema {
        Value::Object(_) | Value::Bool(true) => return Ok(()),
        Value::Bool(false) => return Err(GrammarError::unsupported("the schema `false` permits no answer")),
        Value::Array(_) => "an array",
        Value::String(_) => "a string",
        Value::Number(_) => "a number",
        Value::Null => "null",
    };
    Err(GrammarError::unsupported(format!("a schema must be an object, got {found}")))
}

/// Prepares a schema for the compiler: removes annotations, restricts objects to their properties and sets options. The
/// compiler rejects keywords that it does not enforce; without `strict` it ignores them. `oneOf` has the meaning of
/// `anyOf`, as in llama.cpp. A value that is not a schema is returned unchanged.
pub(in crate::model) fn prepare(schema: &Value, strict: bool) -> Value {
    let mut prepared = match schema {
        Value::Bool(true) => json!({}),
        schema => {
            let parts = Parts {
                combined: parts_of(schema, combines_schemas),
                bounded: parts_of(schema, |keywords| combines_schemas(keywords) || restricts_number(keywords)),
            };
            simplified(schema, &parts, 0)
        }
    };
    if let Value::Object(keywords) = &mut prepared
        && let Value::Object(options) = keywords.entry("x-guidance").or_insert_with(|| json!({}))
    {
        if !options.contains_key("whitespace_pattern") && !options.contains_key("whitespace_flexible") {
            options.insert("whitespace_pattern".into(), WHITESPACE.into());
        }
        options.entry("coerce_one_of").or_insert(true.into());
        if !strict {
            options.entry("lenient").or_insert(true.into());
        }
    }
    prepared
}

/// Returns the schema at a local reference, which is a JSON pointer in a URI fragment.
pub fn resolve<'s>(reference: &str, root: &'s Value) -> Option<&'s Value> {
    let mut parts = reference.strip_prefix('#')?.split('%');
    let mut pointer = parts.next()?.as_bytes().to_vec();
    for part in parts {
        pointer.push(u8::from_str_radix(part.get(..2)?, 16).ok()?);
        pointer.extend_from_slice(&part.as_bytes()[2..]);
    }
    root.pointer(std::str::from_utf8(&pointer).ok()?)
}

/// Returns true if the schema of a string restricts its text without listing it.
pub(in crate::model) fn restricts_text(schema: &Value) -> bool {
    let has = |keyword: &&str| schema.get(*keyword).is_some();
    !["enum", "const"].iter().any(has)
        && (["pattern", "minLength", "maxLength"].iter().any(has)
            || schema["format"].as_str().is_some_and(|format| FORMATS.contains(&format)))
}

/// The schemas that apply to a value together with keywords of other schemas.
struct Parts {
    /// Their objects have properties of the other schemas too.
    combined: HashSet<*const Value>,
    /// Their numbers may have bounds of the other schemas.
    bounded: HashSet<*const Value>,
}

/// Returns a schema without annotations. Objects only permit the listed properties, unless the schema permits others or
/// is combined with other schemas. llama.cpp does the same, because models otherwise invent properties.
fn simplified(schema: &Value, parts: &Parts, depth: usize) -> Value {
    let Value::Object(keywords) = schema else { return schema.clone() };
    if depth > MAX_DEPTH {
        return schema.clone();
    }
    let below = |value: &Value| simplified(value, parts, depth + 1);
    let mut result = Map::new();
    for (keyword, value) in keywords {
        let value = match (keyword.as_str(), value) {
            ("deprecated", _) => continue,
            ("format", Value::String(format)) if !FORMATS.contains(&format.as_str()) => continue,
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                named.iter().map(|(name, value)| (name.clone(), below(value))).collect::<Map<_, _>>().into()
            }
            ("anyOf" | "allOf" | "oneOf" | "prefixItems" | "items", Value::Array(list)) => {
                list.iter().map(below).collect()
            }
            ("items" | "additionalItems" | "additionalProperties", value) => below(value),
            (_, value) => value.clone(),
        };
        result.insert(keyword.clone(), value);
    }
    if lists_required_properties(&result) && !parts.combined.contains(&std::ptr::from_ref(schema)) {
        result.insert("additionalProperties".into(), false.into());
    }
    if !parts.bounded.contains(&std::ptr::from_ref(schema)) {
        bound_integer(&mut result);
    }
    Value::Object(result)
}

const MINIMA: [&str; 2] = ["minimum", "exclusiveMinimum"];
const MAXIMA: [&str; 2] = ["maximum", "exclusiveMaximum"];

/// Bounds an integer to 64 bits, because a model may otherwise fill its context with digits.
fn bound_integer(schema: &mut Map<String, Value>) {
    /// The largest float that a signed 64-bit integer can hold: the compiler's bounds are floats.
    const LIMIT: i64 = 0x7fff_ffff_ffff_fc00;
    /// Keywords that list the values, or whose schemas may permit larger ones. Multiples in a range can have too many states
    /// for the compiler.
    const OTHER_LIMITS: [&str; 7] = ["enum", "const", "multipleOf", "$ref", "anyOf", "allOf", "oneOf"];
    let is_integer = match schema.get("type") {
        Some(Value::Array(types)) => types.contains(&"integer".into()) && !types.contains(&"number".into()),
        Some(name) => name == "integer",
        None => false,
    };
    if !is_integer || OTHER_LIMITS.iter().any(|name| schema.contains_key(*name)) {
        return;
    }
    let bounds = |names: [&str; 2]| names.into_iter().filter_map(|name| schema.get(name)?.as_f64()).collect::<Vec<_>>();
    let (minima, maxima) = (bounds(MINIMA), bounds(MAXIMA));
    // A bound must not contradict the one on the other side.
    let needs_minimum = minima.is_empty() && maxima.iter().all(|&maximum| maximum > -(LIMIT as f64));
    let needs_maximum = maxima.is_empty() && minima.iter().all(|&minimum| minimum < LIMIT as f64);
    if needs_minimum {
        schema.insert("minimum".into(), (-LIMIT).into());
    }
    if needs_maximum {
        schema.insert("maximum".into(), LIMIT.into());
    }
}

/// Returns true if a schema's keywords restrict a number.
fn restricts_number(keywords: &Map<String, Value>) -> bool {
    MINIMA.iter().chain(&MAXIMA).chain(&["enum", "const", "multipleOf"]).any(|name| keywords.contains_key(*name))
}

/// Returns the schemas that apply to a value together with the keywords for which `combines` is true, such as the components
/// of `allOf`.
fn parts_of(root: &Value, combines: impl Fn(&Map<String, Value>) -> bool) -> HashSet<*const Value> {
    let mut seen = HashSet::new();
    let mut todo = vec![(root, false)];
    while let Some((schema, is_combined)) = todo.pop() {
        let Value::Object(keywords) = schema else { continue };
        if !seen.insert((std::ptr::from_ref(schema), is_combined)) {
            continue;
        }
        let is_combined = is_combined || combines(keywords);
        for (keyword, value) in keywords {
            match (keyword.as_str(), value) {
                ("$ref", Value::String(reference)) if is_combined => {
                    todo.extend(referenced(reference, root).into_iter().map(|schema| (schema, true)));
                }
                ("anyOf" | "allOf" | "oneOf", Value::Array(list)) => {
                    todo.extend(list.iter().map(|schema| (schema, is_combined)));
                }
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                    todo.extend(named.values().map(|schema| (schema, false)));
                }
                ("prefixItems" | "items", Value::Array(list)) => todo.extend(list.iter().map(|schema| (schema, false))),
                ("items" | "additionalItems" | "additionalProperties", schema) => todo.push((schema, false)),
                _ => {}
            }
        }
    }
    seen.into_iter().filter_map(|(schema, is_combined)| is_combined.then_some(schema)).collect()
}

/// Returns true if several of a schema's keywords contribute to the properties of an object.
fn combines_schemas(keywords: &Map<String, Value>) -> bool {
    const CONTRIBUTING: &[&str] = &[
        "$ref",
        "anyOf",
        "oneOf",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
    ];
    let components = keywords.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    components + CONTRIBUTING.iter().filter(|keyword| keywords.contains_key(**keyword)).count() > 1
}

/// Returns the schema at a reference, or all definitions for a reference that is not a JSON pointer.
fn referenced<'s>(reference: &str, root: &'s Value) -> Vec<&'s Value> {
    if let Some(schema) = resolve(reference, root) {
        return vec![schema];
    }
    let definitions = ["$defs", "definitions"].into_iter().filter_map(|section| root.get(section)?.as_object());
    definitions.flat_map(Map::values).collect()
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
        let mut prepared = prepare(schema, true);
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
    fn only_combined_objects_are_open() {
        let object = |name: &str| json!({"properties": {name: {"type": "integer"}}});
        let is_closed = |schema: &Value, path: &str| {
            prepared(schema).pointer(path).unwrap().get("additionalProperties") == Some(&false.into())
        };
        let definitions =
            json!({"A": object("a"), "B": object("b"), "C": {"anyOf": [object("c"), {"$ref": "#/$defs/B"}]}});
        let alternatives = json!({"anyOf": [object("a"), object("b")], "oneOf": []});
        for (schema, path, closed) in [
            (json!({"anyOf": [object("x"), object("y")]}), "/anyOf/1", true),
            (json!({"type": "object", "oneOf": [object("x"), object("y")]}), "/oneOf/0", true),
            (json!({"properties": {"z": true}, "anyOf": [object("x"), object("y")]}), "/anyOf/0", false),
            (json!({"required": ["z"], "anyOf": [object("x"), object("y")]}), "/anyOf/0", false),
            (alternatives, "/anyOf/0", false),
            (json!({"allOf": [object("x"), object("y")]}), "/allOf/0", false),
            (json!({"allOf": [object("x")]}), "/allOf/0", true),
            (json!({"allOf": [{"anyOf": [object("x")]}, object("y")]}), "/allOf/0/anyOf/0", false),
            (json!({"allOf": [{"properties": {"p": object("x")}}, object("y")]}), "/allOf/0/properties/p", true),
            (json!({"properties": {"p": {"$ref": "#/$defs/A"}}, "$defs": definitions}), "/$defs/A", true),
            (json!({"allOf": [{"$ref": "#/$defs/A"}], "$defs": definitions}), "/$defs/A", true),
            (json!({"allOf": [{"$ref": "#/$defs/A"}, object("x")], "$defs": definitions}), "/$defs/A", false),
            (json!({"allOf": [{"$ref": "#/$defs/A"}, object("x")], "$defs": definitions}), "/$defs/B", true),
            (json!({"allOf": [{"$ref": "#/$defs/C"}, object("x")], "$defs": definitions}), "/$defs/B", false),
            (json!({"allOf": [{"$ref": "#a"}, object("x")], "$defs": definitions}), "/$defs/A", false),
            (json!({"$ref": "#/$defs/A", "properties": {"x": true}, "$defs": definitions}), "/$defs/A", false),
        ] {
            assert_eq!(is_closed(&schema, path), closed, "{schema} {path}");
        }
    }

    #[test]
    fn integers_with_listed_values_or_multiples_get_no_bounds() {
        for (name, value) in [("const", json!(5)), ("enum", json!([1, 2])), ("multipleOf", json!(86400))] {
            let schema = json!({"type": "integer", name: value});
            assert_eq!(prepared(&schema), schema);
        }
    }

    #[test]
    fn annotations_are_removed_but_property_names_kept() {
        let schema = json!({
            "properties": {"format": {"type": "string", "format": "int64", "deprecated": true}, "deprecated": true},
            "items": [{"format": "email"}], "enum": [{"format": "x"}],
        });
        let wanted = json!({
            "properties": {"format": {"type": "string"}, "deprecated": true},
            "items": [{"format": "email"}], "enum": [{"format": "x"}], "additionalProperties": false,
        });
        assert_eq!(prepared(&schema), wanted);
    }
}
