//! `log-top`: logs the most probable tokens of each step, for readers of a replay.

use super::describe;
use super::support::config::{self, schema};
use crate::events::{EventType, LogLevel};
use crate::model::distribution::{TokenDistribution, top};
use crate::mods::{Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `log-top`: logs the most probable next tokens, and changes nothing.
pub struct LogTop;

impl ModFactory for LogTop {
    fn describe(&self) -> ModDescription {
        describe(
            "log-top",
            "Logs the most probable next tokens of every step.",
            "Changes nothing. Probabilities are computed at temperature 1 from the logits after the edits of earlier mods.",
            json!({"count": 5}),
            schema(
                &[],
                json!({"count": {"type": "integer", "minimum": 1, "maximum": 50, "default": 5, "description": "Number of tokens."}}),
            ),
        )
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let top: Top = config::parse(self, config)?;
        Ok(Box::new(top))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Top {
    count: usize,
}

impl ModInstance for Top {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass])
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let CallEvent::ForwardPass { logits, .. } = call.event else { return Some(Reply::noop()) };
        let distribution = TokenDistribution::new(logits);
        let most_probable: Vec<String> = top(logits, self.count)
            .into_iter()
            .map(|(token, logit)| {
                let text = call.run.vocabulary.decode(&[token]);
                format!("{text:?} {:.1}%", distribution.prob(logit) * 100.0)
            })
            .collect();
        let message: String =
            if most_probable.is_empty() { "every token is banned".into() } else { most_probable.join(" · ") };
        Some(Reply::noop().with_log(LogLevel::Info, message))
    }
}

#[cfg(test)]
mod tests {
    use super::LogTop;
    use crate::mods::builtin::testing::ModHarness;
    use serde_json::json;

    #[test]
    fn most_probable_tokens_are_logged() {
        let mut harness = ModHarness::new(&LogTop, &json!({"count": 2}));
        let mut logits = vec![f32::NEG_INFINITY; 265];
        logits[usize::from(b'a')] = 0.0;
        logits[usize::from(b'\n')] = 3.0_f32.ln();
        let reply = harness.forward(&logits);
        assert!(reply.action.is_none());
        assert_eq!(reply.logs[0].message, "\"\\n\" 75.0% · \"a\" 25.0%");
    }
}
