//! Validation of a value against a JSON schema, with an error that names the path. Unknown keywords are ignored.
//!
//! Clients send the schemas of tools, and the decode thread checks a call's arguments, so the work is limited. The
//! crate `jsonschema` has no such limit: it takes minutes for 24 definitions that are each an `anyOf` of two references
//! to the next. It also rejects schemas that are only an error once they constrain a call, such as `"type": "int"` or
//! `"required": true` in a property.

mod shortened;

pub(super) use shortened::excerpt;

use crate::model::grammar::schema::resolve;
use regex::{Regex, RegexBuilder};
use serde_json::{Map, Value};
use shortened::{expected_value, limited};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// Maximum depth of references and nested schemas.
const MAX_DEPTH: usize = 64;
/// Maximum steps of one validation against a client's schema. A step is a schema at a value, a comparison of two values,
/// or work on [`BYTES_PER_STEP`] bytes of text.
const MAX_STEPS: usize = 100_000;
const BYTES_PER_STEP: usize = 64;
/// Bytes per step of the search for a regular expression.
const SEARCH_BYTES_PER_STEP: usize = 4;
/// Steps that the compilation of a regular expression counts as.
const PATTERN_STEPS: usize = 1000;
/// Maximum size of a compiled regular expression in bytes.
const MAX_PATTERN_BYTES: usize = 1 << 18;

/// Returns the first problem of the value, if any, with the path, the found and the expected value.
pub fn first_error(value: &Value, schema: &Value) -> Option<String> {
    first_error_within(value, schema, MAX_STEPS)
}

/// Returns the first problem of a value. The schema is part of the program, so the work is not limited.
pub fn first_error_unlimited(value: &Value, schema: &Value) -> Option<String> {
    first_error_within(value, schema, usize::MAX)
}

fn first_error_within(value: &Value, schema: &Value, max_steps: usize) -> Option<String> {
    let check = Validator { root: schema, max_steps, steps: Cell::new(0), patterns: RefCell::default() };
    let result = check.value(value, schema, "", 0);
    // `anyOf`, `oneOf` and `not` may have discarded the error that the steps are exhausted.
    check.count_steps(0).and(result).err()
}

/// Returns the fields of a mod's configuration; `null` has no fields.
///
/// # Errors
/// The configuration is not an object, or has a field that the schema does not list.
pub fn known_fields(config: &Value, schema: &Value) -> Result<Map<String, Value>, String> {
    let fields = match config {
        Value::Null => Map::new(),
        Value::Object(fields) => fields.clone(),
        other => return Err(format!("the configuration must be an object, got {}", excerpt(other))),
    };
    let known: Vec<&str> =
        schema["properties"].as_object().into_iter().flat_map(Map::keys).map(String::as_str).collect();
    match fields.keys().find(|name| !known.contains(&name.as_str())) {
        None => Ok(fields),
        Some(name) if known.is_empty() => Err(format!("unknown field `{name}`; this mod has no configuration")),
        Some(name) => Err(format!("unknown field `{name}`; known fields: {}", known.join(", "))),
    }
}

struct Validator<'a> {
    root: &'a Value,
    max_steps: usize,
    steps: Cell<usize>,
    /// The compiled expressions; `None` for those in a syntax that the `regex` crate does not support.
    patterns: RefCell<HashMap<String, Option<Regex>>>,
}

impl Validator<'_> {
    fn count_steps(&self, steps: usize) -> Result<(), String> {
        self.steps.set(self.steps.get().saturating_add(steps));
        if self.steps.get() <= self.max_steps {
            return Ok(());
        }
        Err(format!("the value cannot be checked in {} steps; simplify its schema", self.max_steps))
    }

    fn value(&self, value: &Value, schema: &Value, at: &str, depth: usize) -> Result<(), String> {
        let mismatch = |expected: String| Err(format!("{} must be {expected}, got {}", subject(at), excerpt(value)));
        let schema = match schema {
            Value::Bool(false) => return Err(format!("{} is not allowed", subject(at))),
            Value::Object(schema) => schema,
            _ => return Ok(()),
        };
        self.count_steps(1 + at.len() / BYTES_PER_STEP)?;
        if depth > MAX_DEPTH {
            return Ok(());
        }
        if let Some(target) = schema.get("$ref").and_then(Value::as_str) {
            self.count_steps(target.len() / BYTES_PER_STEP)?;
            if let Some(referenced) = resolve(target, self.root) {
                self.value(value, referenced, at, depth + 1)?;
            }
        }
        if let Some(kinds) = schema.get("type") {
            self.count_steps(kinds.as_array().map_or(0, Vec::len))?;
            if !type_names(kinds).any(|kind| is_a(value, kind)) {
                let kinds = || limited(type_names(kinds).map(kind_with_article), " or ");
                return mismatch(bounded_number(schema).unwrap_or_else(kinds));
            }
        }
        if let Some(Value::Array(allowed)) = schema.get("enum") {
            self.count_steps(allowed.len() * comparison_steps(value))?;
            if !allowed.contains(value) {
                return mismatch(format!("one of {}", limited(allowed.iter().map(expected_value), ", ")));
            }
        }
        if let Some(only) = schema.get("const") {
            self.count_steps(comparison_steps(value))?;
            if only != value {
                return mismatch(expected_value(only));
            }
        }
        match value {
            Value::Object(object) => self.object(object, schema, at, depth)?,
            Value::Array(items) => self.array(items, schema, at, depth)?,
            Value::String(text) => self.string(text, schema, at)?.map_or(Ok(()), mismatch)?,
            Value::Number(number) => range(number.as_f64().unwrap_or(0.0), schema).map_or(Ok(()), mismatch)?,
            Value::Null | Value::Bool(_) => {}
        }
        self.check_combinators(value, schema, at, depth)
    }

    fn object(
        &self,
        object: &Map<String, Value>,
        schema: &Map<String, Value>,
        at: &str,
        depth: usize,
    ) -> Result<(), String> {
        let child_path = |name: &str| if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") };
        let required = schema.get("required").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        self.count_steps(required.len())?;
        if let Some(missing) = required.iter().filter_map(Value::as_str).find(|name| !object.contains_key(*name)) {
            self.count_steps(missing.len() / BYTES_PER_STEP)?;
            return Err(format!("{} is missing", subject(&child_path(missing))));
        }
        let known = schema.get("properties").and_then(Value::as_object);
        let patterns = schema.get("patternProperties").and_then(Value::as_object);
        for (name, value) in object {
            if let Some(names) = schema.get("propertyNames") {
                let name = Value::from(name.as_str());
                self.value(&name, names, "", depth + 1)
                    .map_err(|error| format!("{}: the name {} is invalid: {error}", subject(at), excerpt(&name)))?;
            }
            self.count_steps((at.len() + name.len()) / BYTES_PER_STEP)?;
            let path = child_path(name);
            let own = known.and_then(|known| known.get(name));
            if let Some(own) = own {
                self.value(value, own, &path, depth + 1)?;
            }
            let mut is_known = own.is_some();
            for (pattern, schema) in patterns.into_iter().flatten() {
                let is_match = self.is_match(pattern, name)?;
                is_known |= is_match != Some(false);
                if is_match == Some(true) {
                    self.value(value, schema, &path, depth + 1)?;
                }
            }
            match schema.get("additionalProperties").filter(|_| !is_known) {
                Some(Value::Bool(false)) => {
                    let names = known.into_iter().flat_map(Map::keys).map(|name| Cow::from(name.as_str()));
                    let matching = patterns.into_iter().flat_map(Map::keys);
                    let expected = names.chain(matching.map(|pattern| format!("names that match {pattern}").into()));
                    return Err(format!("{} is unknown; known fields: {}", subject(&path), limited(expected, ", ")));
                }
                Some(other) => self.value(value, other, &path, depth + 1)?,
                None => {}
            }
        }
        check_count(object.len(), schema, ("minProperties", "maxProperties"), "properties", at)
    }

    fn array(&self, items: &[Value], schema: &Map<String, Value>, at: &str, depth: usize) -> Result<(), String> {
        check_count(items.len(), schema, ("minItems", "maxItems"), "items", at)?;
        let first = schema.get("prefixItems").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        for (index, item) in items.iter().enumerate() {
            if let Some(own) = first.get(index).or_else(|| schema.get("items")) {
                self.value(item, own, &format!("{at}[{index}]"), depth + 1)?;
            }
        }
        if schema.get("uniqueItems") == Some(&Value::Bool(true)) {
            for (index, item) in items.iter().enumerate() {
                self.count_steps(index * comparison_steps(item))?;
                if items[..index].contains(item) {
                    return Err(format!("{} is a duplicate", subject(&format!("{at}[{index}]"))));
                }
            }
        }
        Ok(())
    }

    /// Checks the length of a text. Returns the pattern that it does not match, in words, or `None` if it matches.
    fn string(&self, text: &str, schema: &Map<String, Value>, at: &str) -> Result<Option<String>, String> {
        self.count_steps(text.len() / BYTES_PER_STEP)?;
        check_count(text.chars().count(), schema, ("minLength", "maxLength"), "characters", at)?;
        let Some(pattern) = schema.get("pattern").and_then(Value::as_str) else { return Ok(None) };
        let is_mismatch = self.is_match(pattern, text)? == Some(false);
        Ok(is_mismatch.then(|| format!("a string that matches {}", limited([pattern], ""))))
    }

    /// Returns true if the text matches the expression; `None` if the `regex` crate does not support its syntax.
    fn is_match(&self, pattern: &str, text: &str) -> Result<Option<bool>, String> {
        self.count_steps(1 + text.len() / SEARCH_BYTES_PER_STEP + pattern.len() / BYTES_PER_STEP)?;
        let mut patterns = self.patterns.borrow_mut();
        if !patterns.contains_key(pattern) {
            self.count_steps(PATTERN_STEPS)?;
            let expression = RegexBuilder::new(pattern).size_limit(MAX_PATTERN_BYTES).build().ok();
            patterns.insert(pattern.to_owned(), expression);
        }
        Ok(patterns[pattern].as_ref().map(|expression| expression.is_match(text)))
    }

    fn check_combinators(
        &self,
        value: &Value,
        schema: &Map<String, Value>,
        at: &str,
        depth: usize,
    ) -> Result<(), String> {
        let part = |name: &str| schema.get(name).and_then(Value::as_array).filter(|parts| !parts.is_empty());
        let matches = |part: &&Value| self.value(value, part, at, depth + 1).is_ok();
        for every in part("allOf").into_iter().flatten() {
            self.value(value, every, at, depth + 1)?;
        }
        if let Some(parts) = part("anyOf") {
            let mut errors = Vec::new();
            let is_match = parts.iter().any(|part| {
                let error = self.value(value, part, at, depth + 1).err();
                let is_match = error.is_none();
                errors.extend(error.filter(|_| part["type"] != "null"));
                is_match
            });
            match &mut errors[..] {
                _ if is_match => {}
                // A schema that also permits null. Its error may name a nested field.
                [only] => return Err(std::mem::take(only)),
                _ => {
                    return Err(format!(
                        "{} must match one of {} schemas but matches none, got {}",
                        subject(at),
                        parts.len(),
                        excerpt(value)
                    ));
                }
            }
        }
        if let Some(parts) = part("oneOf") {
            let count = parts.iter().filter(matches).count();
            if count != 1 {
                return Err(format!(
                    "{} must match exactly one of {} schemas but matches {count}, got {}",
                    subject(at),
                    parts.len(),
                    excerpt(value)
                ));
            }
        }
        match schema.get("not") {
            Some(not) if matches(&not) => {
                Err(format!("{} matches a schema that is excluded, got {}", subject(at), excerpt(value)))
            }
            _ => Ok(()),
        }
    }
}

fn subject(at: &str) -> String {
    if at.is_empty() { "the value".into() } else { format!("`{at}`") }
}

/// Returns the steps that a comparison with another value counts as.
fn comparison_steps(value: &Value) -> usize {
    1 + match value {
        Value::String(text) => text.len() / BYTES_PER_STEP,
        Value::Array(items) => items.len(),
        Value::Object(object) => object.len(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

fn type_names(kinds: &Value) -> impl Iterator<Item = &str> {
    let one = kinds.as_str();
    one.into_iter().chain(kinds.as_array().into_iter().flatten().filter_map(Value::as_str))
}

fn is_a(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => true,
    }
}

fn kind_with_article(kind: &str) -> String {
    match kind {
        "string" => "a string".into(),
        "boolean" => "true or false".into(),
        "null" => "null".into(),
        "integer" => "an integer".into(),
        "array" => "an array".into(),
        "object" => "an object".into(),
        other => format!("a {other}"),
    }
}

fn range(number: f64, schema: &Map<String, Value>) -> Option<String> {
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    let mismatch = |name: &str, holds: fn(f64, f64) -> bool, words: &str| {
        bound(name).filter(|bound| !holds(number, *bound)).map(|bound| format!("a number {words} {bound}"))
    };
    mismatch("minimum", |a, b| a >= b, "of at least")
        .or_else(|| mismatch("maximum", |a, b| a <= b, "of at most"))
        .map(|expected| bounded_number(schema).unwrap_or(expected))
        .or_else(|| mismatch("exclusiveMinimum", |a, b| a > b, "above"))
        .or_else(|| mismatch("exclusiveMaximum", |a, b| a < b, "below"))
        .or_else(|| {
            mismatch("multipleOf", |a, b| b == 0.0 || ((a / b) - (a / b).round()).abs() < 1e-9, "that is a multiple of")
        })
}

/// Returns the expected number of a schema that has a minimum and a maximum.
fn bounded_number(schema: &Map<String, Value>) -> Option<String> {
    let bound = |name: &str| schema.get(name).and_then(Value::as_f64);
    let kind = schema.get("type")?.as_str().filter(|kind| ["integer", "number"].contains(kind))?;
    Some(format!("{} from {} to {}", kind_with_article(kind), bound("minimum")?, bound("maximum")?))
}

/// Checks a number of `unit` against the keywords of the schema for its minimum and maximum.
fn check_count(
    count: usize,
    schema: &Map<String, Value>,
    (min, max): (&str, &str),
    unit: &str,
    at: &str,
) -> Result<(), String> {
    let bound = |name: &str| schema.get(name).and_then(Value::as_u64).and_then(|bound| usize::try_from(bound).ok());
    let expected = match (bound(min), bound(max)) {
        (Some(1), _) if count == 0 => return Err(format!("{} must not be empty", subject(at))),
        (Some(min), _) if count < min => format!("at least {min} {unit}"),
        (_, Some(max)) if count > max => format!("at most {max} {unit}"),
        _ => return Ok(()),
    };
    Err(format!("{} must have {expected}, got {count}", subject(at)))
}

#[cfg(test)]
mod tests;
