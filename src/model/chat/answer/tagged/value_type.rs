//! The type of a value in tags, according to its schema.

use crate::model::grammar::schema::{resolve, restricts_text};
use serde_json::{Value, json};
use std::borrow::Cow;

/// Maximum nesting of the examined schemas.
const MAX_DEPTH: usize = 60;

/// Maximum number of followed references.
const MAX_REFERENCES: usize = 32;

/// Maximum number of different schemas of one argument.
const MAX_ALTERNATIVES: usize = 32;

/// Maximum length of the escape of a character in JSON: two units of UTF-16.
const MAX_ESCAPE: usize = 12;

/// Bits of a set of JSON types.
const NONE: u8 = 0;
const STRING: u8 = 1;
const NULL: u8 = 2;
const OTHER: u8 = 4;
const ANY: u8 = STRING | NULL | OTHER;

/// The type of a value in tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ValueType {
    /// A text, exactly as written.
    Text,
    /// A text as written, or a string in JSON. The grammar of required calls writes such a string in JSON, because its
    /// schema has more than a type.
    TextOrJson {
        /// True if the value may also be null.
        nullable: bool,
    },
    /// Another type, or an unknown one.
    Other,
}

impl ValueType {
    /// Returns the type that the schema of an argument, or of a value in it, permits.
    pub(super) fn from_schema(schema: &Value, arguments: ArgumentsSchema<'_>) -> Self {
        let is_json = arguments.strict && restricts_text(schema);
        if (schema["type"] == "string" && !is_json) || lists_quoted_text(schema) {
            return Self::Text;
        }
        let types = TypeResolver { root: arguments.root, references: 0 }.permitted(schema, 0);
        if types & STRING == 0 || types & OTHER != 0 {
            return Self::Other;
        }
        Self::TextOrJson { nullable: types & NULL != 0 }
    }

    /// Parses a complete value; `None` if it is not a text.
    pub(super) fn parse(self, written: &str) -> Option<Value> {
        let Self::TextOrJson { nullable } = self else {
            return (self == Self::Text).then(|| written.into());
        };
        let literal = written.trim();
        if nullable && literal == "null" {
            return Some(Value::Null);
        }
        Some(serde_json::from_str::<String>(literal).map_or_else(|_| written.into(), Value::from))
    }

    /// Converts the start of a value to the start of its JSON; `None` if it is not a text.
    pub(super) fn parse_start(self, written: &str) -> Option<String> {
        match self {
            Self::Text => Some(unclosed_string(written)),
            Self::TextOrJson { nullable: true } if "null".starts_with(written.trim()) => {
                Some(written.trim().to_owned())
            }
            Self::TextOrJson { .. } => {
                Some(parse_string_start(written.trim_start()).unwrap_or_else(|| unclosed_string(written)))
            }
            Self::Other => None,
        }
    }
}

/// The schema of a tool's arguments.
#[derive(Debug, Clone, Copy)]
pub(super) struct ArgumentsSchema<'s> {
    /// The schema, with the definitions.
    pub(super) root: &'s Value,
    /// True if the arguments must follow it, so that the grammar writes strings with restricted text in JSON.
    pub(super) strict: bool,
}

impl<'s> ArgumentsSchema<'s> {
    /// Returns the schema of an argument, also of additional properties and in combinations.
    pub(super) fn argument(self, key: &str) -> Cow<'s, Value> {
        let mut resolver = ArgumentResolver { root: self.root, key, found: 0, references: 0 };
        resolver.argument(self.root, 0).unwrap_or(Cow::Borrowed(&Value::Null))
    }
}

/// Combines the schemas of an argument in the schemas of the arguments.
struct ArgumentResolver<'s, 'k> {
    root: &'s Value,
    key: &'k str,
    /// Number of found schemas.
    found: usize,
    /// Number of followed references.
    references: usize,
}

impl<'s> ArgumentResolver<'s, '_> {
    /// Returns the schema of the argument in this schema; `None` if it has none.
    fn argument(&mut self, schema: &'s Value, depth: usize) -> Option<Cow<'s, Value>> {
        let additional = schema.get("additionalProperties").filter(|additional| additional.is_object());
        let own = schema["properties"].get(self.key).or(additional).filter(|_| self.found < MAX_ALTERNATIVES);
        self.found += usize::from(own.is_some());
        let mut all: Vec<_> = own.map(Cow::Borrowed).into_iter().collect();
        if depth < MAX_DEPTH {
            if let Some(target) = schema["$ref"].as_str().and_then(|reference| resolve(reference, self.root))
                && self.references < MAX_REFERENCES
            {
                self.references += 1;
                all.extend(self.argument(target, depth + 1));
            }
            let lists = ["allOf", "anyOf", "oneOf"].map(|keyword| {
                let list = schema[keyword].as_array().into_iter().flatten();
                list.filter_map(|schema| self.argument(schema, depth + 1)).collect()
            });
            let [components, any, one] = lists;
            all.extend(components);
            all.extend([any, one].into_iter().filter_map(|alternatives| combined("anyOf", alternatives)));
        }
        // As in the grammar, a schema that permits every value adds nothing.
        if all.iter().any(|schema| **schema != Value::Bool(true)) {
            all.retain(|schema| **schema != Value::Bool(true));
        }
        combined("allOf", all)
    }
}

/// Combines different schemas with this keyword.
fn combined<'s>(keyword: &str, schemas: Vec<Cow<'s, Value>>) -> Option<Cow<'s, Value>> {
    let mut different: Vec<Cow<'s, Value>> = Vec::new();
    for schema in schemas {
        if !different.contains(&schema) {
            different.push(schema);
        }
    }
    if different.len() < 2 {
        return different.pop();
    }
    let list: Vec<Value> = different.into_iter().map(Cow::into_owned).collect();
    Some(Cow::Owned(json!({ keyword: list })))
}

/// Collects the types that schemas permit.
struct TypeResolver<'s> {
    root: &'s Value,
    /// Number of followed references.
    references: usize,
}

impl TypeResolver<'_> {
    /// Returns the set of types that a schema permits; all types beyond the limits.
    fn permitted(&mut self, schema: &Value, depth: usize) -> u8 {
        let Some(keywords) = schema.as_object().filter(|_| depth <= MAX_DEPTH) else { return ANY };
        let mut types = ANY;
        for (keyword, value) in keywords {
            types &= match (keyword.as_str(), value) {
                ("$ref", Value::String(reference)) => self.referenced(reference, depth),
                ("type", Value::String(name)) => named_type(name),
                ("type", Value::Array(names)) => {
                    names.iter().fold(NONE, |types, name| types | named_type(name.as_str().unwrap_or_default()))
                }
                ("enum", Value::Array(values)) => values.iter().fold(NONE, |types, value| types | type_of(value)),
                ("const", value) => type_of(value),
                ("anyOf" | "oneOf", Value::Array(schemas)) => {
                    schemas.iter().fold(NONE, |types, schema| types | self.permitted(schema, depth + 1))
                }
                ("allOf", Value::Array(schemas)) => {
                    schemas.iter().fold(ANY, |types, schema| types & self.permitted(schema, depth + 1))
                }
                _ => ANY,
            };
        }
        types
    }

    /// Returns the set of types that the schema at a local reference permits.
    fn referenced(&mut self, reference: &str, depth: usize) -> u8 {
        let Some(schema) = resolve(reference, self.root) else { return ANY };
        if self.references == MAX_REFERENCES {
            return ANY;
        }
        self.references += 1;
        self.permitted(schema, depth + 1)
    }
}

/// Returns the schema that describes an object or a list: the schema itself, one that it refers to, or one of its
/// alternatives. Of several, one of the kind that was written is preferred: a list if `is_list`. Returns the schema itself
/// if none does.
pub(super) fn container_schema<'s>(schema: &'s Value, root: &'s Value, is_list: bool) -> &'s Value {
    let is_kind =
        |found: &Value| found["type"].as_str().map_or(found["items"].is_object(), |it| it == "array") == is_list;
    let found = find_container(schema, root, &is_kind, 0, &mut 0);
    found.or_else(|| find_container(schema, root, &|_| true, 0, &mut 0)).unwrap_or(schema)
}

fn find_container<'s>(
    schema: &'s Value,
    root: &'s Value,
    is_accepted: &dyn Fn(&Value) -> bool,
    depth: usize,
    references: &mut usize,
) -> Option<&'s Value> {
    let is_container = matches!(schema["type"].as_str(), Some("object" | "array"))
        || schema["properties"].is_object()
        || schema["items"].is_object();
    if is_container || depth > MAX_DEPTH {
        return Some(schema).filter(|schema| is_container && is_accepted(schema));
    }
    if let Some(target) = schema["$ref"].as_str().and_then(|reference| resolve(reference, root))
        && *references < MAX_REFERENCES
    {
        *references += 1;
        if let Some(found) = find_container(target, root, is_accepted, depth + 1, references) {
            return Some(found);
        }
    }
    let alternatives = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|keyword| schema[keyword].as_array());
    let mut alternatives = alternatives.flatten();
    alternatives.find_map(|alternative| find_container(alternative, root, is_accepted, depth + 1, references))
}

fn named_type(name: &str) -> u8 {
    match name {
        "string" => STRING,
        "null" => NULL,
        _ => OTHER,
    }
}

fn type_of(value: &Value) -> u8 {
    match value {
        Value::String(_) => STRING,
        Value::Null => NULL,
        _ => OTHER,
    }
}

/// Returns true if a schema lists only texts, and one starts with a quote. The grammar of required calls does not write
/// listed texts in JSON.
fn lists_quoted_text(schema: &Value) -> bool {
    let listed = match &schema["enum"] {
        Value::Array(values) => values.as_slice(),
        _ => std::slice::from_ref(&schema["const"]),
    };
    listed.iter().all(Value::is_string)
        && listed.iter().filter_map(Value::as_str).any(|text| text.trim_start().starts_with('"'))
}

/// Converts a string in JSON, or the start of one, to the same JSON as a complete value; `None` for other texts.
fn parse_string_start(text: &str) -> Option<String> {
    if !text.starts_with('"') {
        return None;
    }
    match serde_json::from_str::<String>(text) {
        Ok(string) => Some(Value::from(string).to_string()),
        Err(error) if error.is_eof() => {
            // Omits an incomplete escape at the end.
            let ends = std::iter::once(text.len()).chain(text.char_indices().rev().map(|(at, _)| at));
            let decoded = ends
                .take(MAX_ESCAPE + 1)
                .find_map(|end| serde_json::from_str::<String>(&format!("{}\"", &text[..end])).ok());
            Some(unclosed_string(&decoded.unwrap_or_default()))
        }
        Err(_) => None,
    }
}

/// Returns a text as a string in JSON without the quote at its end.
pub(super) fn unclosed_string(text: &str) -> String {
    let mut quoted = Value::from(text).to_string();
    quoted.pop();
    quoted
}

#[cfg(test)]
mod tests {
    use super::{ArgumentsSchema, ValueType};
    use serde_json::{Value, json};

    const OPTIONAL: ValueType = ValueType::TextOrJson { nullable: true };
    const REQUIRED: ValueType = ValueType::TextOrJson { nullable: false };

    #[test]
    fn type_is_derived_from_schema() {
        let root = json!({
            "$defs": {
                "name": {"type": "string"},
                "unit": {"enum": ["C", "F"]},
                "count": {"type": "integer"},
                "alias": {"$ref": "#/$defs/optional"},
                "optional": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]},
                "loop": {"$ref": "#/$defs/loop"},
                "loops": {"anyOf": [{"$ref": "#/$defs/loops"}, {"$ref": "#/$defs/loops"}, {"$ref": "#/$defs/loops"}]},
            },
            "definitions": {"a/b": {"const": "x"}},
        });
        for (schema, expected) in [
            (json!({"type": "string"}), ValueType::Text),
            (json!({"type": "string", "enum": [1]}), ValueType::Text),
            (json!({"enum": ["\"a\"", "b"]}), ValueType::Text),
            (json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), OPTIONAL),
            (json!({"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 9}], "default": null}), OPTIONAL),
            (json!({"type": ["string", "null"]}), OPTIONAL),
            (json!({"type": ["string"]}), REQUIRED),
            (json!({"enum": ["1", "2"]}), REQUIRED),
            (json!({"enum": ["1", null]}), OPTIONAL),
            (json!({"const": "5"}), REQUIRED),
            (json!({"$ref": "#/$defs/name"}), REQUIRED),
            (json!({"$ref": "#/$defs/unit", "description": "a unit"}), REQUIRED),
            (json!({"$ref": "#/$defs/alias"}), OPTIONAL),
            (json!({"$ref": "#/definitions/a~1b"}), REQUIRED),
            (json!({"allOf": [{"$ref": "#/$defs/name"}, {"minLength": 1}]}), REQUIRED),
            (json!({"allOf": [{"type": ["string", "null", "integer"]}, {"type": ["string", "null"]}]}), OPTIONAL),
            (json!({"anyOf": [{"type": "string"}, {"type": "integer"}]}), ValueType::Other),
            (json!({"anyOf": [{"type": "string"}, {}]}), ValueType::Other),
            (json!({"type": ["string", "object", "null"]}), ValueType::Other),
            (json!({"enum": ["1", 2]}), ValueType::Other),
            (json!({"const": null}), ValueType::Other),
            (json!({"type": "null"}), ValueType::Other),
            (json!({"$ref": "#/$defs/count"}), ValueType::Other),
            (json!({"$ref": "#/$defs/missing"}), ValueType::Other),
            (json!({"$ref": "https://example.org/schema"}), ValueType::Other),
            (json!({"$ref": "#/$defs/loop"}), ValueType::Other),
            (json!({"$ref": "#/$defs/loops"}), ValueType::Other),
            (json!({"anyOf": []}), ValueType::Other),
            (json!({}), ValueType::Other),
            (json!(true), ValueType::Other),
            (Value::Null, ValueType::Other),
        ] {
            assert_eq!(
                ValueType::from_schema(&schema, ArgumentsSchema { root: &root, strict: false }),
                expected,
                "{schema}"
            );
        }
    }

    #[test]
    fn complete_text_is_parsed() {
        for (kind, written, value) in [
            (ValueType::Text, "\"a\"", Some(json!("\"a\""))),
            (ValueType::Text, "null", Some(json!("null"))),
            (OPTIONAL, "null", Some(Value::Null)),
            (OPTIONAL, "\"null\"", Some(json!("null"))),
            (OPTIONAL, "nullable", Some(json!("nullable"))),
            (OPTIONAL, "None", Some(json!("None"))),
            (REQUIRED, "null", Some(json!("null"))),
            (REQUIRED, " \"a\\n\\u00e9\" ", Some(json!("a\né"))),
            (REQUIRED, "\"a\" b", Some(json!("\"a\" b"))),
            (REQUIRED, " 5551234", Some(json!(" 5551234"))),
            (REQUIRED, "", Some(json!(""))),
            (ValueType::Other, "a", None),
        ] {
            assert_eq!(kind.parse(written), value, "{kind:?} {written}");
        }
    }

    #[test]
    fn start_of_text_becomes_start_of_its_json() {
        for (kind, written, start) in [
            (ValueType::Text, "say \"hi\"", Some(r#""say \"hi\""#)),
            (ValueType::Text, "\"\"", Some(r#""\"\""#)),
            (ValueType::Text, "nul", Some("\"nul")),
            (ValueType::Text, "", Some("\"")),
            (OPTIONAL, "", Some("")),
            (OPTIONAL, "nul", Some("nul")),
            (OPTIONAL, "555", Some("\"555")),
            (OPTIONAL, "\"a b ", Some("\"a b ")),
            (OPTIONAL, "\"a\\", Some("\"a")),
            (OPTIONAL, "\"a\\\\", Some("\"a\\\\")),
            (OPTIONAL, "\"a\\\"", Some("\"a\\\"")),
            (OPTIONAL, "\"a\\u00", Some("\"a")),
            (OPTIONAL, "\"a\\u00e9\\/", Some("\"aé/")),
            (OPTIONAL, "\"é\\ud83d\\ude0", Some("\"é")),
            (OPTIONAL, "\"é\\ud83d\\ude00", Some("\"é😀")),
            (OPTIONAL, "\"", Some("\"")),
            (OPTIONAL, "\"a\"", Some("\"a\"")),
            (OPTIONAL, "\"a\" b", Some(r#""\"a\" b"#)),
            (OPTIONAL, "\"a\nb", Some(r#""\"a\nb"#)),
            (REQUIRED, "", Some("\"")),
            (REQUIRED, "nul", Some("\"nul")),
            (ValueType::Other, "1", None),
        ] {
            assert_eq!(kind.parse_start(written).as_deref(), start, "{kind:?} {written}");
        }
    }
}
