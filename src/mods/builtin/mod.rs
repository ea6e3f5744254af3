//! Built-in mods in Rust, one file each. Their calls take no longer than a stage of the sampler chain.
//!
//! A factory reads its configuration once per run (`config`) and rejects unknown fields, with an error that names the
//! field and what is expected. An instance reads only the end of the sequence, never all of it, so a call costs the
//! same at token 10 and at token 100 000.
//!
//! Classifier-free guidance is not possible in a mod: it needs the logits of a second sequence at every step, and a run
//! has only one sequence.

mod answer_text;
mod avoided;
mod ban_phrases;
mod bias_tokens;
mod choices;
mod config;
mod constrain;
mod force_prefix;
mod log_top;
mod phrase;
mod reasoning;
mod replace_phrase;
mod retry;
mod sentences;
mod sequence;
mod stop_on_repetition;
mod stop_rules;
mod structured;
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
        Arc::new(retry::RetryLowConfidence),
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
            // Each listed field is known to the mod, and its default is accepted.
            for (field, property) in schema["properties"].as_object().unwrap() {
                assert!(property["description"].is_string(), "{name}: {field}");
                if let Some(default) = property.get("default") {
                    let mut config = config.clone();
                    config[field] = default.clone();
                    assert_eq!(schema_check::first_error(&config, &schema), None, "{name}: {field}");
                    assert!(factory.start(&config, &run()).is_ok(), "{name}: {field}");
                }
            }
            // Each field known to the mod is listed.
            let mut unknown = config.clone();
            unknown["no_such_field"] = json!(1);
            let message = factory.start(&unknown, &run()).err().unwrap();
            let known: Vec<&str> = message.split_once("known fields: ").unwrap().1.split(", ").collect();
            let listed: Vec<&str> = schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            assert_eq!(known, listed, "{name}");
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
