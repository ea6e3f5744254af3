//! Constraints on the answer: a grammar, a JSON schema, or any JSON object.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::model::grammar::{Constraint, GrammarSource};
use crate::server::{ApiError, ErrorCode};
use serde_json::Value;

/// Prefix of a grammar in llguidance's Lark format, as in llama-server.
const LARK: &str = "%llguidance";

/// Effect of a body with more than one constraint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SeveralConstraints {
    /// They are an error, as on llama-server's chat routes.
    Reject,
    /// The first one applies, as on llama-server's own routes.
    TakeFirst,
}

/// Parses `grammar`, `json_schema` and `response_format`, in this order.
pub(crate) fn parse_constraint(
    fields: Fields<'_>,
    several: SeveralConstraints,
) -> Result<Option<Constraint>, ApiError> {
    let grammar = fields.text("grammar")?.filter(|text| !text.trim().is_empty()).map(|text| {
        let source = if text.trim_start().starts_with(LARK) { GrammarSource::Lark } else { GrammarSource::Gbnf };
        Constraint::new("grammar", source(text.to_owned()))
    });
    let schema = fields
        .get("json_schema")
        .map(|schema| Constraint::new("json_schema", GrammarSource::JsonSchema(schema.clone())));
    let format = response_format(fields)?;
    let mut requested = [grammar, schema, format].into_iter().flatten();
    let (first, second) = (requested.next(), requested.next());
    if several == SeveralConstraints::Reject
        && let (Some(first), Some(second)) = (&first, &second)
    {
        let message =
            format!("`{}` and `{}` both constrain the answer; send only one of them", first.field, second.field);
        return Err(ApiError::invalid(second.field.as_str(), message));
    }
    Ok(first)
}

/// Rejects a grammar that begins at a trigger in the answer, as llama-server's completion routes accept it.
pub(crate) fn reject_lazy_grammar(fields: Fields<'_>) -> Result<(), ApiError> {
    const FIELD: &str = "grammar_lazy";
    if !fields.flag(FIELD)?.unwrap_or(false) || parse_constraint(fields, SeveralConstraints::TakeFirst)?.is_none() {
        return Ok(());
    }
    let detail = "`grammar_lazy`: a grammar that begins at a trigger is not supported; omit it, and constrain the answer \
                  from its first token, or send tools to /v1/chat/completions";
    Err(ApiError::invalid(FIELD, detail).code(ErrorCode::Unsupported))
}

/// Parses `response_format`: `{"type": "text"}`, `{"type": "json_object"}`, llama-server's `{"type": "json_object",
/// "schema": …}`, or `{"type": "json_schema", "json_schema": {"schema": …}}`.
fn response_format(fields: Fields<'_>) -> Result<Option<Constraint>, ApiError> {
    const FIELD: &str = "response_format";
    const EXPECTED: &str = "an object with type \"text\", \"json_object\" or \"json_schema\"";
    let Some(format) = fields.object(FIELD)? else { return Ok(None) };
    let source = match format.get("type").and_then(Value::as_str) {
        Some("text") => return Ok(None),
        Some("json_object") => match format.get("schema").filter(|schema| !schema.is_null()) {
            Some(schema) => GrammarSource::JsonSchema(schema.clone()),
            None => GrammarSource::JsonObject,
        },
        Some("json_schema") => {
            let named = format.get("json_schema").and_then(|named| named.get("schema"));
            let schema = named.or(format.get("schema")).ok_or_else(|| {
                ApiError::invalid(
                    "response_format.json_schema.schema",
                    "`response_format.json_schema.schema` is missing",
                )
            })?;
            GrammarSource::JsonSchema(schema.clone())
        }
        _ => return Err(invalid_value(FIELD, EXPECTED, &Value::Object(format.clone()))),
    };
    Ok(Some(Constraint::new(FIELD, source)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(body: &Value, several: SeveralConstraints) -> Result<Option<Constraint>, String> {
        parse_constraint(Fields::new(body).unwrap(), several).map_err(|error| error.problem().detail)
    }

    #[test]
    fn constraints_are_parsed_in_every_format() {
        let source = |body: Value| read(&body, SeveralConstraints::Reject).unwrap().map(|constraint| constraint.source);
        assert_eq!(source(json!({"grammar": ""})), None);
        assert_eq!(source(json!({"response_format": {"type": "text"}})), None);
        assert_eq!(source(json!({"response_format": {"type": "json_object"}})), Some(GrammarSource::JsonObject));
        assert_eq!(source(json!({"grammar": "root ::= \"a\""})), Some(GrammarSource::Gbnf("root ::= \"a\"".into())));
        let lark = "%llguidance {}\nstart: \"a\"";
        assert_eq!(source(json!({"grammar": lark})), Some(GrammarSource::Lark(lark.into())));
        let schema = json!({"type": "integer"});
        for body in [
            json!({"json_schema": schema}),
            json!({"response_format": {"type": "json_object", "schema": schema}}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}),
        ] {
            assert_eq!(source(body), Some(GrammarSource::JsonSchema(schema.clone())));
        }
    }

    #[test]
    fn lazy_grammar_is_rejected() {
        let rejected =
            |body: Value| reject_lazy_grammar(Fields::new(&body).unwrap()).map_err(|error| error.problem().detail);
        assert_eq!(rejected(json!({"grammar_lazy": false, "grammar_triggers": []})), Ok(()));
        assert_eq!(rejected(json!({"grammar_lazy": true, "grammar": ""})), Ok(()));
        assert!(rejected(json!({"grammar_lazy": true, "json_schema": {}})).unwrap_err().contains("`grammar_lazy`"));
        assert!(rejected(json!({"grammar_lazy": 1})).unwrap_err().contains("true or false"));
    }

    #[test]
    fn chat_rejects_several_constraints() {
        let body = json!({"grammar": "root ::= \"a\"", "json_schema": {}});
        assert!(read(&body, SeveralConstraints::Reject).unwrap_err().contains("`grammar` and `json_schema`"));
        assert_eq!(read(&body, SeveralConstraints::TakeFirst).unwrap().unwrap().field, "grammar");
        assert!(
            read(&json!({"response_format": {"type": "xml"}}), SeveralConstraints::Reject)
                .unwrap_err()
                .contains("json_object")
        );
    }
}
