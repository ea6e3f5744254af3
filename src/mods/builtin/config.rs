//! Parsing of a mod's configuration field by field. Every error names the field, the expected and the actual value.

use serde_json::{Map, Value, json};
use std::ops::RangeInclusive;

/// Returns the JSON schema of a configuration: an object with these properties and no others.
#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
pub fn schema(required: &[&str], properties: Value) -> Value {
    let mut schema = json!({ "type": "object", "properties": properties, "additionalProperties": false });
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

/// Fields of a configuration that has no unknown fields.
pub struct ConfigFields<'a> {
    map: Option<&'a Map<String, Value>>,
}

impl<'a> ConfigFields<'a> {
    /// Parses an object; `null` is an object without fields.
    pub fn parse(config: &'a Value, known: &[&str]) -> Result<Self, String> {
        let map = match config {
            Value::Null => None,
            Value::Object(map) => Some(map),
            other => {
                return Err(format!(
                    "the configuration must be an object with the fields {}, got {other}",
                    known.join(", ")
                ));
            }
        };
        if let Some(name) = map.and_then(|map| map.keys().find(|name| !known.contains(&name.as_str()))) {
            return Err(format!("unknown field `{name}`; known fields: {}", known.join(", ")));
        }
        Ok(Self { map })
    }

    /// Returns the value of a field; `null` counts as absent.
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.and_then(|map| map.get(name)).filter(|value| !value.is_null())
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool, String> {
        match self.get(name) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(format!("`{name}` must be true or false, got {other}")),
        }
    }

    pub fn number(&self, name: &str, range: RangeInclusive<f32>, default: f32) -> Result<f32, String> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value
            .as_f64()
            .map(|number| number as f32)
            .filter(|number| range.contains(number))
            .ok_or_else(|| format!("`{name}` must be a number from {} to {}, got {value}", range.start(), range.end()))
    }

    pub fn count(&self, name: &str, range: RangeInclusive<usize>, default: usize) -> Result<usize, String> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value
            .as_u64()
            .and_then(|number| usize::try_from(number).ok())
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                format!("`{name}` must be an integer from {} to {}, got {value}", range.start(), range.end())
            })
    }

    /// Returns a non-empty string.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, String> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(text)),
            Some(other) => Err(format!("`{name}` must be a non-empty string, got {other}")),
        }
    }

    /// Returns one of these words; the first if the field is absent.
    pub fn word(&self, name: &str, words: &[&'static str]) -> Result<&'static str, String> {
        let Some(value) = self.get(name) else { return Ok(words[0]) };
        let found = value.as_str().and_then(|word| words.iter().find(|known| **known == word));
        found.copied().ok_or_else(|| format!("`{name}` must be one of {}, got {value}", words.join(", ")))
    }

    /// Returns a non-empty list of non-empty strings.
    pub fn texts(&self, name: &str, example: &str) -> Result<Vec<&'a str>, String> {
        let expected = format!("`{name}` must be a list of non-empty strings, e.g. {example}");
        let Some(value) = self.get(name) else { return Err(format!("`{name}` is missing; {expected}")) };
        let texts: Option<Vec<&str>> =
            value.as_array().and_then(|list| list.iter().map(Value::as_str).collect::<Option<_>>());
        match texts {
            Some(texts) if !texts.is_empty() && texts.iter().all(|text| !text.is_empty()) => Ok(texts),
            _ => Err(format!("{expected}, got {value}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ConfigFields;
    use serde_json::json;

    #[test]
    fn errors_name_field_and_expectation() {
        let config = json!({"on": 1, "heat": "hot", "count": -1, "texts": ["", "a"]});
        let fields = ConfigFields::parse(&config, &["on", "heat", "count", "texts", "more"]).unwrap();
        assert_eq!(fields.flag("on", false).unwrap_err(), "`on` must be true or false, got 1");
        assert_eq!(
            fields.number("heat", 0.0..=2.0, 1.0).unwrap_err(),
            "`heat` must be a number from 0 to 2, got \"hot\""
        );
        assert_eq!(fields.count("count", 1..=9, 3).unwrap_err(), "`count` must be an integer from 1 to 9, got -1");
        assert_eq!(
            fields.texts("texts", "[\"x\"]").unwrap_err(),
            "`texts` must be a list of non-empty strings, e.g. [\"x\"], got [\"\",\"a\"]"
        );
        assert!(fields.texts("more", "[\"x\"]").unwrap_err().starts_with("`more` is missing; "));
        assert_eq!(fields.count("more", 1..=9, 3), Ok(3));
    }

    #[test]
    fn unknown_fields_and_types_are_rejected() {
        assert_eq!(
            ConfigFields::parse(&json!({"bann": []}), &["ban", "bias"]).err().unwrap(),
            "unknown field `bann`; known fields: ban, bias"
        );
        assert_eq!(
            ConfigFields::parse(&json!([1]), &["ban"]).err().unwrap(),
            "the configuration must be an object with the fields ban, got [1]"
        );
        assert!(ConfigFields::parse(&json!(null), &["ban"]).is_ok());
    }
}
