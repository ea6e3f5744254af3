use super::{
    config::{ConfigFields, schema},
    describe,
};
use crate::events::{EventType, TokenId};
use crate::mods::{
    Action, Call, EventSet, ModDescription, ModFactory, ModInstance, Pending, Reply, ReplySender, RunView,
};
use serde_json::{Value, json};
use std::sync::Arc;

/// `force-prefix`: begins the answer with a given text.
pub struct ForcePrefix;

impl ModFactory for ForcePrefix {
    fn describe(&self) -> ModDescription {
        describe(
            "force-prefix",
            "Begins the answer with a given text.",
            "Either `text` or `tokens` is required. The tokens are forced once, before the first token is sampled, in one decode. In `text`, the \
             names of special tokens become those tokens, so that \"<think>\" works.",
            json!({"text": "Sure: "}),
            schema(
                &[],
                json!({
                    "text": {"type": "string", "minLength": 1, "description": "Beginning of the answer."},
                    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1,
                        "description": "Beginning of the answer as token ids."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let fields = ConfigFields::parse(config, &["text", "tokens"])?;
        let tokens = match (fields.get("text"), fields.get("tokens")) {
            (Some(Value::String(text)), None) if !text.is_empty() => run.vocabulary.encode(text, false, true),
            (Some(other), None) => return Err(format!("`text` must be a non-empty string, got {other}")),
            (None, Some(list)) => ids(list, run)?,
            (None, None) => return Err("`text` or `tokens` is missing, e.g. {\"text\": \"Sure: \"}".into()),
            (Some(_), Some(_)) => return Err("`text` and `tokens` are mutually exclusive; set one of them".into()),
        };
        Ok(Box::new(Prefix { tokens }))
    }
}

fn ids(list: &Value, run: &RunView) -> Result<Vec<TokenId>, String> {
    let expected = format!("`tokens` must be a list of token ids from 0 to {}", run.vocabulary.len().saturating_sub(1));
    let ids = list.as_array().filter(|ids| !ids.is_empty()).ok_or_else(|| format!("{expected}, got {list}"))?;
    ids.iter()
        .map(|id| {
            let token = id.as_i64().and_then(|id| TokenId::try_from(id).ok());
            token.filter(|&token| run.vocabulary.contains(token)).ok_or_else(|| format!("{expected}, got {id}"))
        })
        .collect()
}

struct Prefix {
    /// Tokens to force; empty once they were forced.
    tokens: Vec<TokenId>,
}

impl ModInstance for Prefix {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass])
    }

    fn call(&mut self, _: &Call<'_>, done: ReplySender) -> Result<Reply, Pending> {
        done.disarm();
        if self.tokens.is_empty() {
            return Ok(Reply::noop());
        }
        Ok(Action::ForceTokens(std::mem::take(&mut self.tokens)).into())
    }
}

#[cfg(test)]
mod tests {
    use super::ForcePrefix;
    use crate::mods::builtin::testing::{EOG, ModHarness, run, word};
    use crate::mods::{Action, ModFactory};
    use serde_json::json;

    #[test]
    fn prefix_is_forced_once() {
        let mut harness = ModHarness::new(&ForcePrefix, &json!({"text": "Hello the<end>"}));
        let action = harness.forward(&[0.0; 4]).action;
        assert_eq!(action, Some(Action::ForceTokens(vec![word("Hello"), word(" the"), EOG])));
        assert_eq!(harness.forward(&[0.0; 4]).action, None);
    }

    #[test]
    fn token_ids_must_be_in_vocabulary() {
        let mut harness = ModHarness::new(&ForcePrefix, &json!({"tokens": [104, 105]}));
        assert_eq!(harness.forward(&[0.0; 4]).action, Some(Action::ForceTokens(vec![104, 105])));
        let message = ForcePrefix.start(&json!({"tokens": [104, 9999]}), &run()).err().unwrap();
        assert_eq!(message, "`tokens` must be a list of token ids from 0 to 264, got 9999");
    }

    #[test]
    fn error_names_missing_field() {
        for (config, message) in [
            (json!(null), "`text` or `tokens` is missing, e.g. {\"text\": \"Sure: \"}"),
            (json!({"text": "a", "tokens": [1]}), "`text` and `tokens` are mutually exclusive; set one of them"),
            (json!({"text": ""}), "`text` must be a non-empty string, got \"\""),
        ] {
            assert_eq!(ForcePrefix.start(&config, &run()).err().unwrap(), message);
        }
    }
}
