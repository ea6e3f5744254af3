//! Mods in Rust, in the engine: one file each, no slower than the sampler chain.
//!
//! A factory reads its configuration once per run (`config`) and refuses what it does not know, naming the field
//! and what would be right. A session looks only at the end of the sequence, never at all of it: a call costs the
//! same at token 10 and at token 100 000.

mod ban_phrases;
mod bias_tokens;
mod config;
mod distribution;
mod force_prefix;
mod log_top;
mod phrase;
mod replace_phrase;
mod stop_on_repetition;
mod temperature_by_entropy;
#[cfg(test)]
pub(in crate::mods) mod testing;

use super::{Description, Factory, Origin};
use serde_json::Value;
use std::sync::Arc;

/// Every built-in mod.
#[must_use]
pub fn all() -> Vec<Arc<dyn Factory>> {
    vec![
        Arc::new(ban_phrases::BanPhrases),
        Arc::new(bias_tokens::BiasTokens),
        Arc::new(force_prefix::ForcePrefix),
        Arc::new(log_top::LogTop),
        Arc::new(replace_phrase::ReplacePhrase),
        Arc::new(stop_on_repetition::StopOnRepetition),
        Arc::new(temperature_by_entropy::TemperatureByEntropy),
    ]
}

/// A built-in mod's description; `config` is an example that the mod accepts.
fn describe(name: &str, description: &str, config: Value) -> Description {
    Description {
        name: name.into(),
        description: description.into(),
        language: "rust".into(),
        version: env!("CARGO_PKG_VERSION").into(),
        config,
        origin: Origin::Builtin,
    }
}

#[cfg(test)]
mod tests {
    use super::all;
    use super::testing::run;
    use serde_json::{Value, json};

    #[test]
    fn every_mod_accepts_the_example_of_its_description() {
        for factory in all() {
            let description = factory.describe();
            assert!(factory.start(&description.config, &run()).is_ok(), "{}", description.name);
        }
    }

    #[test]
    fn every_mod_refuses_fields_that_it_does_not_know() {
        for factory in all() {
            let mut config = factory.describe().config;
            if let Value::Object(fields) = &mut config {
                fields.insert("phrase_list".into(), json!(["a"]));
            }
            let message = factory.start(&config, &run()).err().expect("an unknown field was accepted");
            assert!(message.starts_with("unknown field 'phrase_list'; known fields: "), "{message}");
        }
    }

    #[test]
    fn names_are_unique_and_in_order() {
        let names: Vec<String> = all().iter().map(|factory| factory.describe().name).collect();
        assert!(names.windows(2).all(|pair| pair[0] < pair[1]), "{names:?}");
    }
}
