//! Subschemas of a tool's parameters, with the definitions that they refer to.

use serde_json::{Map, Value};
use std::collections::HashSet;

/// Keywords of a schema with definitions.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Keywords of a schema with references.
const REFERENCES: [&str; 3] = ["$ref", "$dynamicRef", "$recursiveRef"];

/// Returns a subschema with the compiler's options of the root schema, and the definitions that it refers to, directly or
/// through each other.
pub(super) fn standalone(schema: &Value, root: &Value) -> Value {
    let mut result = schema.as_object().cloned().unwrap_or_default();
    let mut needed: Vec<Definition<'_>> = Vec::new();
    let mut is_needed = HashSet::new();
    let mut has_all = false;
    let mut todo = vec![schema];
    while let Some(value) = todo.pop() {
        let members = match value {
            Value::Array(items) => {
                todo.extend(items);
                continue;
            }
            Value::Object(members) => members,
            _ => continue,
        };
        todo.extend(members.values());
        for target in REFERENCES.iter().filter_map(|key| members.get(*key)?.as_str()) {
            let found: Vec<Definition<'_>> = match pointer(target) {
                Some(path) => definition(path, root).into_iter().collect(),
                None if has_all => continue,
                None => {
                    has_all = true;
                    all_definitions(root)
                }
            };
            for (section, name, schema) in found {
                if is_needed.insert((section, name)) {
                    needed.push((section, name, schema));
                    todo.push(schema);
                }
            }
        }
    }
    for section in DEFINITIONS {
        let definitions = needed.iter().filter(|(found, ..)| *found == section);
        let definitions: Map<String, Value> =
            definitions.map(|(_, name, schema)| ((*name).clone(), (*schema).clone())).collect();
        if !definitions.is_empty() {
            result.insert(section.to_owned(), Value::Object(definitions));
        }
    }
    if let Some(options) = root.get("x-guidance") {
        result.insert("x-guidance".to_owned(), options.clone());
    }
    Value::Object(result)
}

/// A definition of a root schema: its section, its name and its schema.
type Definition<'a> = (&'static str, &'a String, &'a Value);

/// Returns the path of a JSON pointer, e.g. `$defs/name`. Returns `None` for other references, which may refer to any
/// definition.
fn pointer(target: &str) -> Option<&str> {
    if target == "#" { Some("") } else { target.strip_prefix("#/").filter(|path| !path.contains('%')) }
}

/// Returns the definition at this path of a JSON pointer.
fn definition<'a>(path: &str, root: &'a Value) -> Option<Definition<'a>> {
    let mut parts = path.split('/');
    let first = parts.next()?;
    let key = parts.next()?.replace("~1", "/").replace("~0", "~");
    let section = DEFINITIONS.into_iter().find(|section| *section == first)?;
    let (name, schema) = root.get(section)?.as_object()?.get_key_value(&key)?;
    Some((section, name, schema))
}

/// Returns all definitions of a root schema.
fn all_definitions(root: &Value) -> Vec<Definition<'_>> {
    let sections = DEFINITIONS.into_iter().filter_map(|section| Some((section, root.get(section)?.as_object()?)));
    sections
        .flat_map(|(section, definitions)| definitions.iter().map(move |(name, schema)| (section, name, schema)))
        .collect()
}
