//! What a request says the answer's text must be: `response_format`, `json_schema`, `grammar`.

use crate::api::ApiError;
use crate::api::wire::fields::{Fields, wrong};
use crate::model::grammar::Source;
use serde_json::{Value, json};

/// A form that the answer's text must have.
#[derive(Debug, Clone)]
pub(super) struct Form {
    /// The field that asked for it.
    pub(super) field: &'static str,
    pub(super) source: Source,
}

impl Form {
    /// The form that the request asks for.
    pub(super) fn read(fields: Fields<'_>) -> Result<Option<Self>, ApiError> {
        let grammar = fields.text("grammar")?.filter(|grammar| !grammar.trim().is_empty());
        let schema = fields.get("json_schema");
        if grammar.is_some() && schema.is_some() {
            return Err(ApiError::invalid("grammar", "grammar and json_schema exclude each other; give one of them"));
        }
        if let Some(grammar) = grammar {
            return Ok(Some(Self { field: "grammar", source: Source::Gbnf(grammar.to_owned()) }));
        }
        if let Some(schema) = schema {
            return Ok(Some(Self { field: "json_schema", source: Source::JsonSchema(schema.clone()) }));
        }
        let Some(format) = fields.object("response_format")? else { return Ok(None) };
        let form = |source| Ok(Some(Self { field: "response_format", source }));
        match format.get("type").and_then(Value::as_str) {
            Some("text") | None => Ok(None),
            Some("json_object") => match format.get("schema").filter(|schema| !schema.is_null()) {
                Some(schema) => form(Source::JsonSchema(schema.clone())),
                None => form(Source::JsonObject),
            },
            Some("json_schema") => {
                let schema = format.get("json_schema").and_then(|named| named.get("schema"));
                match schema.or_else(|| format.get("schema")) {
                    Some(schema) => form(Source::JsonSchema(schema.clone())),
                    None => Err(ApiError::invalid(
                        "response_format.json_schema.schema",
                        "response_format.json_schema.schema is missing; it takes a JSON schema",
                    )),
                }
            }
            Some(_) => {
                Err(wrong("response_format.type", "\"text\", \"json_object\" or \"json_schema\"", &format["type"]))
            }
        }
    }

    /// The schema, where the answer is JSON.
    pub(super) fn schema(&self) -> Option<Value> {
        match &self.source {
            Source::JsonSchema(schema) => Some(schema.clone()),
            Source::JsonObject => Some(json!({ "type": "object" })),
            Source::Gbnf(_) | Source::Lark(_) | Source::Regex(_) => None,
        }
    }
}
