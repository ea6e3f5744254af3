//! Copies of schemas in other root schemas, with references that are adjusted to their place.

use super::object_forms::unresolved;
use crate::model::grammar::schema::resolve;
use serde_json::{Map, Value};
use std::collections::HashMap;

/// Keywords with values that are not schemas.
const VALUES: [&str; 5] = ["const", "default", "enum", "example", "examples"];

/// Keywords with schemas under arbitrary names.
const NAMED_SCHEMAS: [&str; 5] = ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];

/// Returns a subschema as a root schema, with the compiler's options of its root schema. Its definitions are the parts
/// of its root that it refers to, directly or through each other.
///
/// # Errors
/// The root has no schema for a reference; the message contains the reference.
pub(super) fn standalone(schema: &Value, root: &Value) -> Result<Value, String> {
    let mut parts = ReferencedParts { root, schemas: Vec::new(), indices: HashMap::new(), problem: None };
    let mut result = parts.copy(schema).as_object().cloned().unwrap_or_default();
    let mut definitions = Map::new();
    while parts.problem.is_none()
        && let Some(&part) = parts.schemas.get(definitions.len())
    {
        definitions.insert(definitions.len().to_string(), parts.copy(part));
    }
    if let Some(problem) = parts.problem {
        return Err(problem);
    }
    if !definitions.is_empty() {
        result.insert("$defs".to_owned(), Value::Object(definitions));
    }
    if let Some(options) = root.get("x-guidance") {
        result.insert("x-guidance".to_owned(), options.clone());
    }
    Ok(Value::Object(result))
}

/// Returns a root schema as the subschema of another root at this reference, such as `#/$defs/name`.
pub(super) fn embedded(root: &Value, place: &str) -> Value {
    let mut schema = without_root_keywords(root);
    rewrite_references(&mut schema, &mut |reference| {
        let pointer = reference.strip_prefix('#').filter(|pointer| pointer.is_empty() || pointer.starts_with('/'))?;
        Some(format!("{place}{pointer}"))
    });
    schema
}

/// The parts of a root schema that contain the targets of references: the root itself and its named schemas, which do
/// not overlap. So the copies are at most twice as long as the root, wherever the references point.
struct ReferencedParts<'s> {
    root: &'s Value,
    schemas: Vec<&'s Value>,
    /// Positions in `schemas`, because several references may point into one part.
    indices: HashMap<*const Value, usize>,
    /// The first error.
    problem: Option<String>,
}

impl<'s> ReferencedParts<'s> {
    /// Returns a copy of a schema whose references point into the parts, which are stored as numbered definitions.
    fn copy(&mut self, schema: &Value) -> Value {
        let mut copy = without_root_keywords(schema);
        rewrite_references(&mut copy, &mut |reference| self.rewrite(reference));
        copy
    }

    /// Returns the reference to the same schema in the copies; `None` if it stays.
    fn rewrite(&mut self, reference: &str) -> Option<String> {
        if resolve(reference, self.root).is_some() {
            let (part, rest) = split_reference(reference);
            return Some(format!("#/$defs/{}{rest}", self.add(resolve(part, self.root)?)));
        }
        if reference.starts_with('#') && !reference.contains('/') {
            // The name of an anchor, which may be anywhere in the root.
            self.add(self.root);
        } else {
            self.problem.get_or_insert_with(|| unresolved(reference));
        }
        None
    }

    /// Adds a part. Returns its position.
    fn add(&mut self, part: &'s Value) -> usize {
        let schemas = &mut self.schemas;
        *self.indices.entry(std::ptr::from_ref(part)).or_insert_with(|| {
            schemas.push(part);
            schemas.len() - 1
        })
    }
}

/// Splits a local reference into that of a named schema of the root, such as `#/$defs/name`, or of the root itself, and
/// the rest of the pointer.
fn split_reference(reference: &str) -> (&str, &str) {
    let slashes: Vec<usize> = reference.match_indices('/').map(|(at, _)| at).take(3).collect();
    if let [1, name, ref rest @ ..] = slashes[..]
        && NAMED_SCHEMAS.contains(&&reference[2..name])
    {
        let end = rest.first().copied().unwrap_or(reference.len());
        // `%2F` is a slash.
        if !reference[name..end].to_ascii_uppercase().contains("%2F") {
            return reference.split_at(end);
        }
    }
    reference.split_at("#".len())
}

/// Returns a copy without the keywords that are only valid in a root schema, or change the target of references.
fn without_root_keywords(schema: &Value) -> Value {
    let mut copy = schema.clone();
    if let Some(keywords) = copy.as_object_mut() {
        keywords.remove("$id");
        keywords.remove("x-guidance");
    }
    copy
}

/// Replaces the references in a schema for which `rewrite` returns another one.
fn rewrite_references(schema: &mut Value, rewrite: &mut dyn FnMut(&str) -> Option<String>) {
    match schema {
        Value::Array(schemas) => schemas.iter_mut().for_each(|schema| rewrite_references(schema, rewrite)),
        Value::Object(keywords) => {
            for (keyword, value) in keywords {
                match (keyword.as_str(), value) {
                    ("$ref", Value::String(reference)) => {
                        if let Some(rewritten) = rewrite(reference) {
                            *reference = rewritten;
                        }
                    }
                    (keyword, _) if VALUES.contains(&keyword) => {}
                    (keyword, Value::Object(named)) if NAMED_SCHEMAS.contains(&keyword) => {
                        named.values_mut().for_each(|schema| rewrite_references(schema, rewrite));
                    }
                    (_, value) => rewrite_references(value, rewrite),
                }
            }
        }
        _ => {}
    }
}
