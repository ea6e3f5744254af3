//! Built-in mods in Rust; `support` has the parts that several of them use. Their calls take no longer than a stage of
//! the sampler chain.
//!
//! A factory validates its configuration once per run against its schema (`support::config`), with an error that names
//! the field and what is expected. An instance reads only the end of the sequence, never all of it, so a call costs the
//! same at token 10 and at token 100 000.
//!
//! Classifier-free guidance is not possible in a mod: it needs the logits of a second sequence at every step, and a run
//! has only one sequence.

mod ban_phrases;
mod bias_tokens;
mod choices;
mod force_prefix;
mod log_top;
mod replace_phrase;
mod retry_low_confidence;
mod stop_on_repetition;
mod stop_rules;
mod structured;
mod support;
mod temperature_by_entropy;
#[cfg(test)]
pub(in crate::mods) mod testing;
mod think_budget;
mod tool_guard;

use super::{ModDescription, ModFactory, ModOrigin};
use serde_json::Value;
use std::sync::Arc;

/// Returns all built-in mods.
#[must_use]
pub fn all() -> Vec<Arc<dyn ModFactory>> {
    vec![
        Arc::new(ban_phrases::BanPhrases),
        Arc::new(bias_tokens::BiasTokens),
        Arc::new(choices::Choices),
        Arc::new(force_prefix::ForcePrefix),
        Arc::new(structured::Grammar),
        Arc::new(structured::JsonSchema),
        Arc::new(log_top::LogTop),
        Arc::new(structured::Regex),
        Arc::new(replace_phrase::ReplacePhrase),
        Arc::new(retry_low_confidence::RetryLowConfidence),
        Arc::new(stop_on_repetition::StopOnRepetition),
        Arc::new(stop_rules::StopRules),
        Arc::new(temperature_by_entropy::TemperatureByEntropy),
        Arc::new(think_budget::ThinkBudget),
        Arc::new(tool_guard::ToolGuard),
    ]
}

/// Creates the description of a built-in mod. `config` is an example that the mod accepts; `schema` describes all
/// fields.
fn describe(name: &str, description: &str, documentation: &str, config: Value, schema: Value) -> ModDescription {
    ModDescription {
        name: name.into(),
        description: description.into(),
        language: "rust".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        config,
        origin: ModOrigin::Builtin,
        documentation: documentation.into(),
        schema,
    }
}

#[cfg(test)]
mod tests {
    use super::testing::run;
    use super::{ModDescription, all};
    use crate::mods::schema_check;
    use serde_json::{Value, json};

    /// Starting a mod also checks that its schema has the fields of its configuration type.
    #[test]
    fn example_configs_are_accepted() {
        for factory in all() {
            let description = factory.describe();
            assert!(factory.start(&description.config, &run()).is_ok(), "{}", description.name);
        }
    }

    #[test]
    fn schemas_match_accepted_fields() {
        for factory in all() {
            let ModDescription { name, config, schema, documentation, .. } = factory.describe();
            assert!(!documentation.is_empty(), "{name}");
            assert_eq!(schema_check::first_error(&config, &schema), None, "{name}");
            for (field, property) in schema["properties"].as_object().unwrap() {
                assert!(property["description"].is_string(), "{name}: {field}");
                if let Some(default) = property.get("default") {
                    let mut config = config.clone();
                    config[field] = default.clone();
                    assert_eq!(schema_check::first_error(&config, &schema), None, "{name}: {field}");
                    assert!(factory.start(&config, &run()).is_ok(), "{name}: {field}");
                }
            }
        }
    }

    /// Returns values that match a schema of this module.
    fn examples(schema: &Value) -> Vec<Value> {
        if let Some(values) = schema["enum"].as_array() {
            return values.clone();
        }
        let kinds = schema["type"].as_array().cloned().unwrap_or_else(|| vec![schema["type"].clone()]);
        let of_kind = |kind: &Value| match kind.as_str() {
            Some("boolean") => vec![json!(false), json!(true)],
            Some("integer") => {
                let min = schema["minimum"].as_u64().unwrap_or(0);
                vec![json!(min), json!(min as f64)]
            }
            Some("number") => {
                let min = schema["minimum"].as_f64().unwrap_or(0.0);
                vec![json!(min), json!(min + 0.5)]
            }
            Some("string") => vec![json!("a".repeat(schema["minLength"].as_u64().unwrap_or(0) as usize))],
            Some("array") => examples(&schema["items"]).into_iter().map(|item| json!([item])).collect(),
            Some("object") if schema["additionalProperties"].is_object() => {
                examples(&schema["additionalProperties"]).into_iter().map(|value| json!({"a": value})).collect()
            }
            Some("object") => vec![json!({})],
            other => panic!("no example for the type {other:?}"),
        };
        kinds.iter().flat_map(of_kind).collect()
    }

    #[test]
    fn values_that_match_the_schema_can_be_read() {
        let run = run();
        for factory in all() {
            let ModDescription { name, config, schema, .. } = factory.describe();
            for (field, property) in schema["properties"].as_object().unwrap() {
                for value in examples(property) {
                    let mut config = config.clone();
                    config[field] = value;
                    assert_eq!(schema_check::first_error(&config, &schema), None, "{name}: {config}");
                    let error = factory.start(&config, &run).err().unwrap_or_default();
                    assert!(!error.starts_with(super::support::config::UNREADABLE), "{name}: {config}: {error}");
                }
            }
        }
    }

    #[test]
    fn unknown_fields_are_rejected_by_all_mods() {
        for factory in all() {
            let mut config = factory.describe().config;
            if let Value::Object(fields) = &mut config {
                fields.insert("phrase_list".into(), json!(["a"]));
            }
            let message = factory.start(&config, &run()).err().expect("an unknown field was accepted");
            assert!(message.starts_with("unknown field `phrase_list`; known fields: "), "{message}");
        }
    }

    #[test]
    fn names_are_unique_and_sorted() {
        let names: Vec<String> = all().iter().map(|factory| factory.describe().name).collect();
        assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "{names:?}");
    }
}
