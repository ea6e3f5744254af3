//! Configurations of built-in mods: each is described by a JSON schema, validated against it, and read into a type.

use crate::mods::{ModFactory, schema_check};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Beginning of the error for a configuration that matches the schema but not the type, which is a bug.
pub const UNREADABLE: &str = "the configuration cannot be read";

/// Returns the JSON schema of a configuration: an object with these properties and no others.
#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
pub fn schema(required: &[&str], properties: Value) -> Value {
    let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

/// Validates a configuration against the mod's schema and reads it, with the schema's defaults for fields that are
/// missing or `null`.
///
/// # Errors
/// The field that is unknown, missing or invalid, and what is expected.
pub fn parse<T: DeserializeOwned>(factory: &dyn ModFactory, config: &Value) -> Result<T, String> {
    let schema = factory.describe().schema;
    #[cfg(test)]
    tests::assert_same_fields::<T>(&schema);
    let mut fields = schema_check::known_fields(config, &schema)?;
    fields.retain(|_, value| !value.is_null());
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        if let (false, Some(default)) = (fields.contains_key(name), property.get("default")) {
            fields.insert(name.clone(), default.clone());
        }
    }
    let mut fields = Value::Object(fields);
    if let Some(error) = schema_check::first_error_unlimited(&fields, &schema) {
        return Err(error);
    }
    for (name, value) in fields.as_object_mut().into_iter().flatten() {
        normalize_integers(value, &schema["properties"][name]);
    }
    serde_json::from_value(fields).map_err(|error| format!("{UNREADABLE}: {error}"))
}

/// Removes the fraction of integers such as 3.0, which JSON schema accepts and integer types do not.
fn normalize_integers(value: &mut Value, schema: &Value) {
    let kinds = &schema["type"];
    let is_integer = || kinds == "integer" || kinds.as_array().is_some_and(|kinds| kinds.contains(&"integer".into()));
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| normalize_integers(item, &schema["items"])),
        Value::Number(number) if is_integer() => {
            if let Some(whole) = number.as_f64().filter(|whole| whole.fract() == 0.0 && whole.abs() < 1e15) {
                *number = (whole as i64).into();
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::{parse, schema};
    use crate::mods::builtin::{retry_low_confidence::RetryLowConfidence, tool_guard::ToolGuard};
    use serde::de::value::Error;
    use serde::de::{DeserializeOwned, Deserializer, Error as _, Visitor};
    use serde::forward_to_deserialize_any;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;

    /// A deserializer that stores the field names of a struct.
    #[derive(Default)]
    struct FieldNames(Option<&'static [&'static str]>);

    impl<'de> Deserializer<'de> for &mut FieldNames {
        type Error = Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(Error::custom("not a struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Error> {
            self.0 = Some(fields);
            Err(Error::custom("only the names are read"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    /// Checks that a schema has the properties that are fields of the type, if the type is a struct.
    pub(super) fn assert_same_fields<T: DeserializeOwned>(schema: &Value) {
        let mut names = FieldNames::default();
        let _ = T::deserialize(&mut names);
        let Some(fields) = names.0 else { return };
        let fields: BTreeSet<&str> = fields.iter().copied().collect();
        let properties: BTreeSet<&str> = schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(fields, properties, "{}", std::any::type_name::<T>());
    }

    #[test]
    #[should_panic(expected = "Fields")]
    fn missing_property_is_found() {
        #[derive(serde::Deserialize)]
        struct Fields {
            _known: bool,
            _unknown: bool,
        }
        assert_same_fields::<Fields>(&schema(&[], json!({"_known": {"type": "boolean"}})));
    }

    #[test]
    fn missing_fields_have_the_defaults_of_the_schema() {
        let config: Value = parse(&RetryLowConfidence, &json!({"window": 9.0, "tries": null})).unwrap();
        assert_eq!(config, json!({"window": 9, "mean_logprob": -2.5, "tries": 3, "temperature": 1.0}));
        let config: Value = parse(&ToolGuard, &Value::Null).unwrap();
        assert_eq!(config, json!({"max_retries": 3, "temperature": 1.0, "then": "text"}));
    }

    #[test]
    fn errors_name_field_and_expectation() {
        for (config, message) in [
            (json!({"windows": 1}), "unknown field `windows`; known fields: window, mean_logprob, tries, temperature"),
            (json!({"window": 0}), "`window` must be an integer from 1 to 256, got 0"),
            (json!({"window": "many"}), "`window` must be an integer from 1 to 256, got \"many\""),
            (json!([1]), "the configuration must be an object, got [1]"),
        ] {
            assert_eq!(parse::<Value>(&RetryLowConfidence, &config).unwrap_err(), message);
        }
    }
}
