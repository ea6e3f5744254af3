//! Tests of the validation against a JSON schema.

use super::first_error;
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::time::{Duration, Instant};

#[test]
fn error_names_field_and_expectation() {
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"enum": ["Oakford", "Zürich"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "tags": {"type": "array", "items": {"$ref": "#/$defs/a%20tag"}, "maxItems": 2, "uniqueItems": true},
            "at": {"type": ["string", "null"], "pattern": "^[0-9]+:[0-9]+$"},
            "unit": {"anyOf": [{"const": "C"}, {"const": "F"}]},
            "range": {"anyOf": [{"properties": {"from": {"type": "integer"}}, "additionalProperties": false}, {"type": "null"}]},
        },
        "required": ["city"],
        "additionalProperties": false,
        "$defs": {"a tag": {"type": "string", "minLength": 2}},
    });
    let valid = json!({"city": "Zürich", "days": 3.0, "tags": ["ab", "cd"], "at": "7:30", "unit": "F"});
    assert_eq!(first_error(&valid, &schema), None);
    assert_eq!(first_error(&json!({"city": "Oakford", "at": null, "range": null}), &schema), None);
    for (mismatch, message) in [
        (json!(3), "the value must be an object, got 3"),
        (json!({}), "`city` is missing"),
        (json!({"city": "Rome"}), "`city` must be one of \"Oakford\", \"Zürich\", got \"Rome\""),
        (json!({"city": "Oakford", "days": 1.5}), "`days` must be an integer from 1 to 7, got 1.5"),
        (json!({"city": "Oakford", "days": 9}), "`days` must be an integer from 1 to 7, got 9"),
        (json!({"city": "Oakford", "tags": ["ab", "c"]}), "`tags[1]` must have at least 2 characters, got 1"),
        (json!({"city": "Oakford", "tags": ["ab", "ab"]}), "`tags[1]` is a duplicate"),
        (json!({"city": "Oakford", "tags": ["ab", "cd", "ef"]}), "`tags` must have at most 2 items, got 3"),
        (json!({"city": "Oakford", "at": "now"}), "`at` must be a string that matches ^[0-9]+:[0-9]+$, got \"now\""),
        (json!({"city": "Oakford", "unit": "K"}), "`unit` must match one of 2 schemas but matches none, got \"K\""),
        (json!({"city": "Oakford", "range": {"form": 1}}), "`range.form` is unknown; known fields: from"),
        (json!({"city": "Oakford", "range": {"from": "a"}}), "`range.from` must be an integer, got \"a\""),
        (json!({"city": "Oakford", "x": 1}), "`x` is unknown; known fields: city, days, tags, at, unit, range"),
    ] {
        assert_eq!(first_error(&mismatch, &schema).as_deref(), Some(message));
    }
}

#[test]
fn additional_properties_apply_to_names_without_pattern() {
    let mut schema = json!({
        "properties": {"count": {"minimum": 1}},
        "patternProperties": {"^c": {"type": ["string", "integer"]}, "y$": {"minLength": 2}},
        "additionalProperties": false,
    });
    for (value, message) in [
        (json!({"city": "Paris", "count": 1}), None),
        (json!({"city": 1.5}), Some("`city` must be a string or an integer, got 1.5")),
        (json!({"city": "P"}), Some("`city` must have at least 2 characters, got 1")),
        (json!({"count": 0}), Some("`count` must be a number of at least 1, got 0")),
        (json!({"count": 1.5}), Some("`count` must be a string or an integer, got 1.5")),
        (
            json!({"city": "Paris", "x": 1}),
            Some("`x` is unknown; known fields: count, names that match ^c, names that match y$"),
        ),
    ] {
        assert_eq!(first_error(&value, &schema).as_deref(), message, "{value}");
    }
    schema["additionalProperties"] = json!({"type": "boolean"});
    assert_eq!(first_error(&json!({"city": "Paris", "x": true}), &schema), None);
    assert_eq!(first_error(&json!({"x": 1}), &schema).as_deref(), Some("`x` must be true or false, got 1"));
    // The `regex` crate does not support look-ahead, so the name may match.
    schema["patternProperties"] = json!({"(?=x)": {"type": "string"}});
    assert_eq!(first_error(&json!({"x": 1}), &schema), None);
}

#[test]
fn names_of_properties_are_checked() {
    let schema =
        json!({"properties": {"map": {"minProperties": 1, "propertyNames": {"minLength": 1, "maxLength": 3}}}});
    for (map, message) in [
        (json!({"abc": 1}), None),
        (json!({}), Some("`map` must not be empty")),
        (json!({"": 1}), Some("`map`: the name \"\" is invalid: the value must not be empty")),
        (
            json!({"ä".repeat(90): 1}),
            Some(&*format!(
                "`map`: the name \"{}… is invalid: the value must have at most 3 characters, got 90",
                "ä".repeat(39)
            )),
        ),
    ] {
        assert_eq!(first_error(&json!({"map": map}), &schema).as_deref(), message);
    }
}

#[test]
fn recursive_schema_terminates() {
    let schema = json!({"$ref": "#"});
    assert_eq!(first_error(&Value::Null, &schema), None);
}

#[test]
fn work_on_hostile_schemas_is_limited() {
    let doubled = |keyword: &str| {
        let definition = |number: usize| {
            let next = json!({"$ref": format!("#/$defs/{}", number + 1)});
            (number.to_string(), json!({keyword: [next, next]}))
        };
        let mut definitions: Map<String, Value> = (0..25).map(definition).collect();
        definitions.insert("25".into(), json!({"type": "integer"}));
        json!({"$ref": "#/$defs/0", "$defs": definitions})
    };
    let texts: Vec<String> = (0..5000).map(|number| format!("a{number}")).collect();
    let expressions = || (0..500).map(|number| format!("(a{{0,999}}){{0,{number}}}"));
    let patterns: Vec<Value> = expressions().map(|pattern| json!({"pattern": pattern})).collect();
    let names: Map<String, Value> = expressions().map(|pattern| (pattern, json!(true))).collect();
    let many_of = |keyword: &str, definition: Value| {
        let references = vec![json!({"$ref": "#/$defs/c"}); 60_000];
        json!({keyword: references, "$defs": {"c": definition}})
    };
    let many = |definition: Value| many_of("anyOf", definition);
    let long = "x".repeat(1 << 20);
    let mut names_before_missing = vec!["a"; 50_000];
    names_before_missing.push("b");
    let cases = [
        ("long const", json!(1), many(json!({"const": long}))),
        ("long enum", json!(1), many(json!({"enum": [long]}))),
        ("long reference", json!(1), json!({"allOf": vec![json!({"$ref": long}); 10]})),
        ("many types", json!(1), many(json!({"type": vec!["null"; 50_000]}))),
        ("many required", json!({"a": 1}), many(json!({"required": names_before_missing}))),
        ("long text", json!(long), many(json!({"maxLength": 1}))),
        ("long pattern", json!("a"), many_of("allOf", json!({"pattern": long}))),
        ("allOf", json!(1), doubled("allOf")),
        ("anyOf", json!("x"), doubled("anyOf")),
        ("oneOf", json!(1), doubled("oneOf")),
        ("uniqueItems", json!(texts), json!({"uniqueItems": true})),
        ("enum", json!(texts), json!({"items": {"enum": texts}})),
        ("pattern", json!("a"), json!({"allOf": patterns})),
        ("patternProperties", json!({"a": 1}), json!({"patternProperties": names})),
    ];
    for (name, value, schema) in cases {
        let start = Instant::now();
        let error = first_error(&value, &schema);
        assert!(start.elapsed() < Duration::from_secs(10), "{name}: {:?}", start.elapsed());
        assert!(error.as_ref().is_some_and(|error| error.contains("simplify")), "{name}: {error:?}");
    }
}

#[test]
fn values_in_errors_are_cut() {
    for (value, text) in [
        (json!({"a": [1, true, null, "ü\""], "b": {}}), r#"{"a":[1,true,null,"ü\""],"b":{}}"#.to_owned()),
        (json!("x".repeat(1 << 20)), format!("\"{}…", "x".repeat(39))),
        (json!(vec!["xy"; 1 << 20]), format!("[{}…", "\"xy\",".repeat(8).trim_end_matches(','))),
    ] {
        assert_eq!(super::excerpt(&value), text);
    }
}

fn values() -> impl Strategy<Value = Value> {
    let words =
        prop::sample::select(vec!["a", "b", "#", "#/$defs/a", "string", "integer", "array", "object", "(", "a+"]);
    let keywords = prop::sample::select(vec![
        "a",
        "b",
        "$ref",
        "$defs",
        "type",
        "enum",
        "const",
        "required",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "items",
        "prefixItems",
        "uniqueItems",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "pattern",
        "minimum",
        "maximum",
        "multipleOf",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        words.prop_map(Value::from),
    ];
    leaf.prop_recursive(6, 40, 4, move |inner| {
        let fields = prop::collection::vec((keywords.clone(), inner.clone()), 0..5);
        let object = fields
            .prop_map(|fields| Value::Object(fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()));
        prop_oneof![prop::collection::vec(inner, 0..4).prop_map(Value::from), object]
    })
}

proptest! {
    #[test]
    fn hostile_schemas_never_panic(schema in values(), value in values()) {
        let _ = first_error(&value, &schema);
    }
}
