//! `temperature-by-entropy`: sets the temperature by the model's uncertainty, for varied text with few errors.

use super::describe;
use super::support::config::{self, schema};
use crate::events::EventType;
use crate::model::distribution::TokenDistribution;
use crate::mods::{
    Action, Call, CallEvent, EventSet, LogitEdit, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `temperature-by-entropy`: sets the temperature of each token by the uncertainty of the model.
pub struct TemperatureByEntropy;

impl ModFactory for TemperatureByEntropy {
    fn describe(&self) -> ModDescription {
        describe(
            "temperature-by-entropy",
            "Draws each token at a temperature that follows the model's uncertainty.",
            "At an entropy (in bits, of the logits after the edits of earlier mods) of `min_entropy` or less the temperature is `low`, at \
             `max_entropy` or more it is `high`, and between them it is interpolated linearly. If `low` exceeds `high`, the model is more \
             predictable where it is unsure.",
            json!({"low": 0.2, "high": 1.0, "min_entropy": 0.5, "max_entropy": 4.0}),
            schema(
                &[],
                json!({
                    "low": {"type": "number", "minimum": 0, "maximum": 10, "default": 0.2,
                        "description": "Temperature if the model is sure; 0 takes the most probable token."},
                    "high": {"type": "number", "minimum": 0, "maximum": 10, "default": 1.0,
                        "description": "Temperature if the model is unsure."},
                    "min_entropy": {"type": "number", "minimum": 0, "maximum": 32, "default": 0.5,
                        "description": "Entropy in bits up to which the model is sure."},
                    "max_entropy": {"type": "number", "minimum": 0, "maximum": 32, "default": 4.0,
                        "description": "Entropy in bits from which the model is unsure; more than `min_entropy`."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let instance: ByEntropy = config::parse(self, config)?;
        if instance.min_entropy >= instance.max_entropy {
            return Err(format!(
                "`min_entropy` must be less than `max_entropy`, got {} and {}",
                instance.min_entropy, instance.max_entropy
            ));
        }
        Ok(Box::new(instance))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ByEntropy {
    low: f32,
    high: f32,
    min_entropy: f32,
    max_entropy: f32,
}

impl ByEntropy {
    fn temperature(&self, entropy: f32) -> f32 {
        let fraction = ((entropy - self.min_entropy) / (self.max_entropy - self.min_entropy)).clamp(0.0, 1.0);
        self.low + (self.high - self.low) * fraction
    }
}

impl ModInstance for ByEntropy {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass])
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let CallEvent::ForwardPass { logits, .. } = call.event else { return Some(Reply::noop()) };
        let temperature = Some(self.temperature(TokenDistribution::new(logits).entropy));
        Some(Action::AdjustedLogits { edit: LogitEdit::Keep, temperature }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::TemperatureByEntropy;
    use crate::mods::builtin::testing::{ModHarness, run};
    use crate::mods::{Action, LogitEdit, ModFactory};
    use serde_json::json;

    #[test]
    fn temperature_follows_entropy() {
        let config = json!({"low": 0.0, "high": 1.0, "min_entropy": 1.0, "max_entropy": 5.0});
        let mut harness = ModHarness::new(&TemperatureByEntropy, &config);
        for (choices, expected) in [(1, 0.0), (2, 0.0), (8, 0.5), (32, 1.0), (256, 1.0)] {
            let mut logits = vec![f32::NEG_INFINITY; 265];
            logits[..choices].fill(1.0);
            let Some(Action::AdjustedLogits { edit: LogitEdit::Keep, temperature: Some(temperature) }) =
                harness.forward(&logits).action
            else {
                panic!("no temperature");
            };
            assert!((temperature - expected).abs() < 1e-4, "{choices} choices: {temperature}");
        }
    }

    #[test]
    fn min_entropy_must_be_less_than_max_entropy() {
        let message = TemperatureByEntropy.start(&json!({"min_entropy": 4}), &run()).err().unwrap();
        assert_eq!(message, "`min_entropy` must be less than `max_entropy`, got 4 and 4");
    }
}
