//! A JSON schema as llguidance takes it.

use super::Error;
use serde_json::{Map, Value, json};

/// White space between the parts of the JSON: a blank, or a line break with what indents the next line. Without a bound a
/// model that has nothing to say fills its context with it.
const WHITE_SPACE: &str = r" |\n[ \t]{0,20}";

/// Checks that it is a schema and says how the JSON is to be laid out.
pub(super) fn prepare(schema: &Value) -> Result<Value, Error> {
    let mut schema = match schema {
        Value::Object(object) => object.clone(),
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return Err(Error::unsupported("the schema false allows no answer at all")),
        other => {
            let found = match other {
                Value::Array(_) => "a list",
                Value::String(_) => "a text",
                _ => "something else",
            };
            return Err(Error::unsupported(format!("a schema is an object, got {found}")));
        }
    };
    let options = schema.entry("x-guidance").or_insert_with(|| json!({}));
    if let Value::Object(options) = options
        && !options.contains_key("whitespace_pattern")
        && !options.contains_key("whitespace_flexible")
    {
        options.insert("whitespace_pattern".into(), WHITE_SPACE.into());
    }
    Ok(Value::Object(schema))
}
