//! The forms of an object: schemas without references and combinations, for arguments that are not written as JSON.

use crate::model::grammar::schema::resolve;
use serde_json::{Map, Value, json};
use std::collections::HashSet;

/// Maximum forms of one schema; further alternatives are omitted.
const MAX_FORMS: usize = 32;
/// Maximum schemas in references and combinations that are examined for the forms of one schema.
const MAX_SCHEMAS: usize = 100;
/// Maximum nesting of references and combinations.
const MAX_DEPTH: usize = 32;

/// Reasons why a schema has no forms.
pub(super) const NO_OBJECT: &str = "the schema of the arguments permits no object";
const TOO_MANY: &str =
    "the schema of an object must not combine more than 100 schemas, nor nest more than 32; simplify it";

/// Keywords for objects that the grammar of a form does not enforce.
const UNSUPPORTED: &[&str] = &[
    "$dynamicRef",
    "$recursiveRef",
    "const",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "enum",
    "if",
    "not",
    "patternProperties",
    "propertyNames",
    "unevaluatedProperties",
];

/// One of the alternatives of an object's schema: components that all apply, without their references and combinations.
#[derive(Debug, Clone)]
pub(super) struct ObjectForm<'s>(Vec<&'s Map<String, Value>>);

impl<'s> ObjectForm<'s> {
    /// Returns the forms of an object with this schema, or the reason if there are none. `root` has the definitions.
    pub(super) fn all(schema: &'s Value, root: &'s Value) -> Result<Vec<Self>, String> {
        let mut resolver = FormResolver { root, remaining: MAX_SCHEMAS, problem: None };
        let forms = resolver.forms(schema, 0);
        if forms.is_empty() { Err(resolver.problem.unwrap_or_else(|| NO_OBJECT.to_owned())) } else { Ok(forms) }
    }

    /// Returns the form of any object.
    pub(super) fn any() -> Self {
        Self(Vec::new())
    }

    /// Returns a keyword that the grammar of a form does not enforce, except `minProperties` and `maxProperties`.
    pub(super) fn unsupported_keyword(&self) -> Option<&'static str> {
        let has = |keyword: &&str| self.0.iter().any(|component| component.contains_key(*keyword));
        UNSUPPORTED.iter().copied().find(has)
    }

    /// Returns the listed and the required properties with their schemas, and true for those that are required.
    pub(super) fn properties(&self) -> impl Iterator<Item = (&'s str, Value, bool)> {
        let listed = self.0.iter().filter_map(|component| component.get("properties")?.as_object());
        let listed = listed.flat_map(Map::keys).map(String::as_str);
        let required = self.0.iter().filter_map(|component| component.get("required")?.as_array());
        let required = required.flatten().filter_map(Value::as_str);
        let is_required: HashSet<&str> = required.clone().collect();
        let mut seen = HashSet::new();
        let names = listed.chain(required).filter(move |name| seen.insert(*name));
        names.map(move |name| (name, self.schema(Some(name)), is_required.contains(name)))
    }

    /// Returns the schema of a property, or that of additional properties.
    pub(super) fn schema(&self, name: Option<&str>) -> Value {
        let schemas = self.0.iter().filter_map(|component| {
            let listed = name.and_then(|name| component.get("properties")?.get(name));
            listed.or_else(|| component.get("additionalProperties"))
        });
        let mut different: Vec<&Value> = Vec::new();
        for schema in schemas {
            match schema {
                Value::Bool(false) => return Value::Bool(false),
                Value::Bool(true) => {}
                _ if different.contains(&schema) => {}
                _ => different.push(schema),
            }
        }
        match different[..] {
            [] => Value::Bool(true),
            [schema] => schema.clone(),
            _ => json!({ "allOf": different }),
        }
    }

    /// Returns the minimum and the maximum number of properties.
    pub(super) fn property_counts(&self) -> (usize, usize) {
        let counts = |keyword: &'static str| {
            let counts = self.0.iter().filter_map(move |component| component.get(keyword)?.as_u64());
            counts.map(|count| usize::try_from(count).unwrap_or(usize::MAX))
        };
        (counts("minProperties").max().unwrap_or(0), counts("maxProperties").min().unwrap_or(usize::MAX))
    }
}

struct FormResolver<'s> {
    root: &'s Value,
    /// Number of schemas that may still be examined.
    remaining: usize,
    /// The first reason why a schema was not examined.
    problem: Option<String>,
}

impl<'s> FormResolver<'s> {
    fn forms(&mut self, schema: &'s Value, depth: usize) -> Vec<ObjectForm<'s>> {
        let keywords = match schema {
            Value::Object(keywords) if permits_object(keywords) => keywords,
            Value::Bool(true) => return vec![ObjectForm(Vec::new())],
            _ => return Vec::new(),
        };
        if depth > MAX_DEPTH || self.remaining == 0 {
            self.problem.get_or_insert_with(|| TOO_MANY.to_owned());
            return Vec::new();
        }
        self.remaining -= 1;
        let mut forms = vec![ObjectForm(vec![keywords])];
        for (keyword, value) in keywords {
            let combined: Vec<Vec<&Value>> = match (keyword.as_str(), value) {
                ("$ref", Value::String(reference)) => {
                    let target = resolve(reference, self.root);
                    if target.is_none() {
                        self.problem.get_or_insert_with(|| unresolved(reference));
                    }
                    vec![target.into_iter().collect()]
                }
                ("allOf", Value::Array(list)) => list.iter().map(|schema| vec![schema]).collect(),
                ("anyOf" | "oneOf", Value::Array(list)) => vec![list.iter().collect()],
                _ => continue,
            };
            for alternatives in combined {
                let others: Vec<_> =
                    alternatives.into_iter().flat_map(|schema| self.forms(schema, depth + 1)).collect();
                let pairs = forms.iter().flat_map(|form| others.iter().map(move |other| (form, other)));
                forms = pairs.take(MAX_FORMS).map(|(form, other)| ObjectForm([&*form.0, &*other.0].concat())).collect();
            }
        }
        forms
    }
}

/// Returns the reason why a schema with this reference is rejected.
pub(super) fn unresolved(reference: &str) -> String {
    let start: String = reference.chars().take(100).collect();
    format!("`$ref` must be a JSON pointer to a schema, such as \"#/$defs/name\", got {start:?}")
}

fn permits_object(keywords: &Map<String, Value>) -> bool {
    match keywords.get("type") {
        Some(Value::Array(types)) => types.iter().any(|name| name == "object"),
        Some(name) => name == "object",
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_FORMS, ObjectForm};
    use serde_json::{Value, json};

    fn properties(schema: &Value) -> Vec<Value> {
        let forms = ObjectForm::all(schema, schema).unwrap_or_default();
        forms.iter().map(|form| json!([form.properties().collect::<Vec<_>>(), form.schema(None)])).collect()
    }

    #[test]
    fn references_and_combinations_become_forms() {
        let city = json!({"properties": {"city": {"type": "string"}}, "required": ["city"]});
        let flag = json!({"properties": {"dry": {"type": "boolean"}}, "additionalProperties": false});
        let (string, boolean) = (json!({"type": "string"}), json!({"type": "boolean"}));
        for (schema, expected) in [
            (json!({"$ref": "#/$defs/Q", "$defs": {"Q": city}}), json!([[[["city", string, true]], true]])),
            (
                json!({"allOf": [city, {"properties": {"dry": boolean}, "required": ["id"]}]}),
                json!([[[["city", string, true], ["dry", boolean, false], ["id", true, true]], true]]),
            ),
            (
                json!({"oneOf": [city, flag, {"type": "null"}], "type": "object"}),
                json!([[[["city", string, true]], true], [[["dry", boolean, false]], false]]),
            ),
            (json!({"allOf": [city, flag]}), json!([[[["city", false, true], ["dry", boolean, false]], false]])),
            (json!({"$ref": "#/$defs/Q%3CR%3E", "$defs": {"Q<R>": city}}), json!([[[["city", string, true]], true]])),
            (json!({"additionalProperties": string}), json!([[[], string]])),
            (json!({"type": "string"}), json!([])),
            (json!({"$ref": "#"}), json!([])),
        ] {
            assert_eq!(Value::from(properties(&schema)), expected, "{schema}");
        }
    }

    #[test]
    fn number_of_forms_is_bounded() {
        let list: Vec<Value> = (0..6).map(|index| json!({"properties": {format!("p{index}"): true}})).collect();
        let all: Vec<Value> = (0..9).map(|_| json!({"anyOf": list})).collect();
        assert_eq!(ObjectForm::all(&json!({"allOf": all}), &Value::Null).unwrap().len(), MAX_FORMS);
    }
}
