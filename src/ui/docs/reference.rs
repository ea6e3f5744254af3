//! The `OpenAPI` document as Markdown: routes by protocol, with parameters, bodies and responses, then the types.

use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Names of protocols, in the order of the page; tags that are not here follow under their own name.
const PROTOCOLS: [(&str, &str); 13] = [
    ("openai", "OpenAI"),
    ("anthropic", "Anthropic"),
    ("ollama", "Ollama"),
    ("llama-server", "llama-server"),
    ("models", "Models"),
    ("KoboldCPP", "KoboldCPP"),
    ("attention", "Attention"),
    ("streaming", "Streaming"),
    ("ingest", "Ingest"),
    ("runs", "Runs"),
    ("experiments", "Experiments"),
    ("mods", "Mods"),
    ("health", "Health"),
];

/// Writes the routes of a document, one section per protocol.
pub(super) fn markdown(document: &[u8]) -> String {
    let document: Value = serde_json::from_slice(document).unwrap_or_default();
    let mut sections: BTreeMap<(usize, String), String> = BTreeMap::new();
    for (path, item) in members(&document["paths"]) {
        for (method, operation) in members(item) {
            let Some(tag) = operation["tags"][0].as_str() else { continue };
            let known = PROTOCOLS.iter().position(|(name, _)| *name == tag);
            let title = known.map_or(tag, |at| PROTOCOLS[at].1);
            let section = sections.entry((known.unwrap_or(PROTOCOLS.len()), title.to_owned())).or_default();
            write_operation(section, &method.to_uppercase(), path, operation);
        }
    }
    let mut out = String::new();
    for ((_, title), routes) in sections {
        // Writing to a String cannot fail.
        let _ = write!(out, "## {title}\n\n{routes}");
    }
    let types = members(&document["components"]["schemas"]);
    if types.clone().next().is_some() {
        out.push_str("## Types\n\n");
    }
    for (name, schema) in types {
        let _ = write!(out, "### {name}\n\n");
        write_schema(&mut out, schema);
    }
    out
}

fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> + Clone {
    value.as_object().into_iter().flat_map(Map::iter)
}

fn write_operation(out: &mut String, method: &str, path: &str, operation: &Value) {
    let _ = write!(out, "### {method} {path}\n\n");
    for text in ["summary", "description"] {
        if let Some(text) = operation[text].as_str() {
            let _ = write!(out, "{text}\n\n");
        }
    }
    let parameters = operation["parameters"].as_array().map_or(&[][..], Vec::as_slice);
    if !parameters.is_empty() {
        out.push_str("| Parameter | In | Type | Meaning |\n|---|---|---|---|\n");
        for parameter in parameters {
            let text = |field: &str| parameter[field].as_str().unwrap_or_default();
            let name = if parameter["required"] == true { "required" } else { "" };
            let (kind, meaning) = (type_of(&parameter["schema"]), meaning(parameter, &parameter["schema"]));
            let _ = writeln!(out, "| `{}` {name} | {} | {kind} | {meaning} |", text("name"), text("in"));
        }
        out.push('\n');
    }
    for (content, body) in members(&operation["requestBody"]["content"]) {
        let _ = write!(out, "Body, `{content}`: {}\n\n", type_of(&body["schema"]));
        if body["schema"].get("properties").is_some() {
            write_schema(out, &body["schema"]);
        }
    }
    out.push_str("| Response | Body | Meaning |\n|---|---|---|\n");
    for (status, response) in members(&operation["responses"]) {
        let bodies: Vec<String> = members(&response["content"])
            .map(|(content, body)| format!("`{content}` {}", type_of(&body["schema"])))
            .collect();
        let meaning = one_line(response["description"].as_str().unwrap_or_default());
        let _ = writeln!(out, "| {status} | {} | {meaning} |", bodies.join(", "));
    }
    out.push('\n');
}

/// Writes a type: its text, then a table of its fields or the list of its values.
fn write_schema(out: &mut String, schema: &Value) {
    if let Some(text) = schema["description"].as_str() {
        let _ = write!(out, "{text}\n\n");
    }
    if schema.get("properties").is_none() {
        let _ = write!(out, "{}\n\n", type_of(schema));
        return;
    }
    out.push_str("| Field | Type | Meaning |\n|---|---|---|\n");
    let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
    for (name, field) in members(&schema["properties"]) {
        let mark = if required.iter().any(|one| one == name) { " required" } else { "" };
        let _ = writeln!(out, "| `{name}`{mark} | {} | {} |", type_of(field), meaning(field, field));
    }
    out.push('\n');
}

/// Returns the description of a field with its default.
fn meaning(described: &Value, schema: &Value) -> String {
    let text = one_line(described["description"].as_str().or(schema["description"].as_str()).unwrap_or_default());
    match schema.get("default") {
        Some(default) if !default.is_null() => {
            format!("{text}{}Default: `{default}`", if text.is_empty() { "" } else { ". " }).replace(".. ", ". ")
        }
        _ => text,
    }
}

/// Returns a text that fits into a cell of a table.
fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

/// Returns a short description of a type, with links to other types.
fn type_of(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    for variants in ["oneOf", "anyOf", "allOf"] {
        if let Some(variants) = schema[variants].as_array() {
            let mut names: Vec<String> = variants.iter().map(type_of).collect();
            names.dedup();
            return names.join(" or ");
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(|value| format!("`{value}`")).collect::<Vec<_>>().join(", ");
    }
    let named = |kind: &str| match kind {
        "array" => format!("array of {}", type_of(&schema["items"])),
        kind => kind.to_owned(),
    };
    match &schema["type"] {
        Value::String(kind) => named(kind),
        Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).map(named).collect::<Vec<_>>().join(" or "),
        _ => "JSON".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_grouped_by_protocol_with_their_types() {
        let document = serde_json::json!({
            "paths": {"/v1/x": {"post": {
                "tags": ["openai"], "summary": "Makes an x.",
                "parameters": [{"name": "n", "in": "query", "required": true, "schema": {"type": ["integer", "null"], "default": 3}, "description": "Count a|b"}],
                "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Thing"}}}},
                "responses": {"200": {"description": "OK", "content": {"application/json": {"schema": {"type": "array", "items": {"type": "string"}}}}}},
            }}},
            "components": {"schemas": {"Thing": {"type": "object", "required": ["a"], "properties": {"a": {"enum": ["p", "q"]}}}}},
        });
        let text = markdown(document.to_string().as_bytes());
        for part in [
            "## OpenAI\n\n### POST /v1/x\n\nMakes an x.\n",
            "| `n` required | query | integer or null | Count a\\|b. Default: `3` |",
            "Body, `application/json`: [Thing](#thing)",
            "| 200 | `application/json` array of string | OK |",
            "### Thing\n\n| Field | Type | Meaning |\n|---|---|---|\n| `a` required | `\"p\"`, `\"q\"` |  |",
        ] {
            assert!(text.contains(part), "{part}\n---\n{text}");
        }
    }
}
