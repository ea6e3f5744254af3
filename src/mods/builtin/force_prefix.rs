//! `force-prefix`: writes the beginning of the answer, for clients that need a fixed start.

use super::describe;
use super::support::config::{self, schema};
use crate::events::{EventType, LogLevel, TokenId};
use crate::mods::{
    Action, Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Maximum number of times that the tokens are forced; they are forced again if the action of an earlier mod wins.
const MAX_ATTEMPTS: usize = 8;

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
        let PrefixConfig { text, tokens } = config::parse(self, config)?;
        let tokens = match (text, tokens) {
            (Some(text), None) => run.vocabulary.encode_markup_continuation(&text),
            (None, Some(ids)) => known_tokens(&ids, run)?,
            (None, None) => return Err("`text` or `tokens` is missing, e.g. {\"text\": \"Sure: \"}".into()),
            (Some(_), Some(_)) => return Err("`text` and `tokens` are mutually exclusive; set one of them".into()),
        };
        Ok(Box::new(Prefix { tokens, attempts: 0, is_done: false, is_warned: false }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PrefixConfig {
    text: Option<String>,
    tokens: Option<Vec<Value>>,
}

fn known_tokens(ids: &[Value], run: &RunView) -> Result<Vec<TokenId>, String> {
    ids.iter()
        .map(|id| {
            let token = id.as_i64().and_then(|id| TokenId::try_from(id).ok());
            token.filter(|&token| run.vocabulary.contains(token)).ok_or_else(|| {
                let last = run.vocabulary.len().saturating_sub(1);
                format!("`tokens` must be a list of token ids from 0 to {last}, got {id}")
            })
        })
        .collect()
}

struct Prefix {
    /// Tokens to force.
    tokens: Vec<TokenId>,
    /// Number of times that the tokens were forced; the actions of earlier mods may have won.
    attempts: usize,
    /// True if the tokens were appended, or if they are no longer forced.
    is_done: bool,
    /// True if the log has the reason why the tokens are missing.
    is_warned: bool,
}

impl Prefix {
    fn force(&mut self) -> Reply {
        if self.attempts == MAX_ATTEMPTS {
            self.is_done = true;
            return self.warn(format!("the prefix was not forced: other mods acted first {MAX_ATTEMPTS} times"));
        }
        self.attempts += 1;
        Action::ForceTokens(self.tokens.clone()).into()
    }

    /// Processes added tokens after an attempt.
    fn check_added(&mut self, call: &Call<'_>, added: &[TokenId], is_forced: bool) -> Reply {
        // The engine truncates tokens that do not fit, and those after an end-of-generation token.
        let is_prefix = added == self.tokens || (call.is_last_event() && self.tokens.starts_with(added));
        // After a sampled token, the prefix would not be the beginning of the model's text.
        self.is_done = !is_forced || is_prefix;
        if self.is_done || !call.is_last_event() {
            return Reply::noop();
        }
        self.warn("the prefix was not forced: another mod ended the answer first".into())
    }

    fn warn(&mut self, message: String) -> Reply {
        if self.is_warned {
            return Reply::noop();
        }
        self.is_warned = true;
        Reply::noop().with_log(LogLevel::Warning, message)
    }
}

impl ModInstance for Prefix {
    fn handles(&self) -> EventSet {
        match (self.is_done, self.attempts) {
            (true, _) => EventSet::NONE,
            (false, 0) => EventSet::new(&[EventType::ForwardPass]),
            (false, _) => EventSet::new(&[EventType::ForwardPass, EventType::Added]),
        }
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        if self.is_done {
            return Some(Reply::noop());
        }
        Some(match call.event {
            CallEvent::ForwardPass { .. } => self.force(),
            CallEvent::Added { tokens, forced, .. } => self.check_added(call, tokens, forced),
            _ => Reply::noop(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{ForcePrefix, MAX_ATTEMPTS};
    use crate::mods::builtin::choices::Choices;
    use crate::mods::builtin::testing::{EOG, ModHarness, Simulation, run, word};
    use crate::mods::builtin::think_budget::ThinkBudget;
    use crate::mods::{Action, ModFactory};
    use serde_json::json;

    #[test]
    fn prefix_is_forced_once() {
        let mut harness = ModHarness::new(&ForcePrefix, &json!({"text": "Hello the<end>"}));
        let action = harness.forward(&[0.0; 4]).action;
        assert_eq!(action, Some(Action::ForceTokens(vec![word("Hello"), word(" the"), EOG])));
        harness.append(&[word("Hello"), word(" the"), EOG], true);
        assert_eq!(harness.forward(&[0.0; 4]).action, None);
    }

    #[test]
    fn truncated_prefix_is_forced_once() {
        let mut harness = ModHarness::new(&ForcePrefix, &json!({"text": "Hello<end> the"}));
        assert!(harness.forward(&[0.0; 4]).action.is_some());
        assert!(harness.append(&[word("Hello"), EOG], true).logs.is_empty());
        assert_eq!(harness.forward(&[0.0; 4]).action, None);
    }

    #[test]
    fn superseded_prefix_is_forced_again() {
        let prefix = Action::ForceTokens(vec![word("Hello"), word(" the")]);
        let mut harness = ModHarness::new(&ForcePrefix, &json!({"text": "Hello the"}));
        for _ in 0..3 {
            assert_eq!(harness.forward(&[0.0; 4]).action, Some(prefix.clone()));
            // A part of the prefix that another mod forces is not the prefix.
            assert_eq!(harness.append(&[word("Hello")], true).action, None);
        }
        assert_eq!(harness.forward(&[0.0; 4]).action, Some(prefix));
        assert_eq!(harness.add(word(" a")).action, None);
        assert_eq!(harness.forward(&[0.0; 4]).action, None, "the model has begun its answer");
    }

    #[test]
    fn attempts_are_limited_and_logged() {
        let mut harness = ModHarness::new(&ForcePrefix, &json!({"text": "Hello"}));
        for _ in 0..MAX_ATTEMPTS {
            assert!(harness.forward(&[0.0; 4]).action.is_some());
        }
        let reply = harness.forward(&[0.0; 4]);
        assert_eq!(reply.action, None);
        assert_eq!(reply.logs[0].message, "the prefix was not forced: other mods acted first 8 times");
        assert!(harness.forward(&[0.0; 4]).logs.is_empty());
    }

    #[test]
    fn prefix_follows_forced_tokens_of_earlier_mods() {
        let result = Simulation::default()
            .run_mods(&[(&ForcePrefix, json!({"text": "One. "})), (&ForcePrefix, json!({"text": "Two. "}))]);
        assert!(result.text.starts_with("One. Two. ") && result.logs.is_empty(), "{result:?}");
        let budget = json!({"tokens": 0, "begin": "((", "end": "))"});
        let result = Simulation { prompt: "> ((".into(), ..Simulation::default() }
            .run_mods(&[(&ThinkBudget, budget), (&ForcePrefix, json!({"text": "Sure: "}))]);
        assert!(result.text.starts_with("))Sure: "), "{result:?}");
    }

    #[test]
    fn answer_of_earlier_mod_is_kept_and_logged() {
        let choices = json!({"choices": ["yes", "no", "maybe"], "pick": "most-probable"});
        let result = Simulation { script: "no".into(), ..Simulation::default() }
            .run_mods(&[(&Choices, choices), (&ForcePrefix, json!({"text": "Sure: "}))]);
        assert_eq!(result.text, "no");
        let message = "the prefix was not forced: another mod ended the answer first";
        assert_eq!(result.logs.iter().filter(|log| *log == message).count(), 1, "{result:?}");
    }

    #[test]
    fn token_ids_must_be_in_vocabulary() {
        let mut harness = ModHarness::new(&ForcePrefix, &json!({"tokens": [104, 105.0]}));
        assert_eq!(harness.forward(&[0.0; 4]).action, Some(Action::ForceTokens(vec![104, 105])));
        let message = ForcePrefix.start(&json!({"tokens": [104, 9999]}), &run()).err().unwrap();
        assert_eq!(message, "`tokens` must be a list of token ids from 0 to 264, got 9999");
    }

    #[test]
    fn error_names_missing_field() {
        for (config, message) in [
            (json!(null), "`text` or `tokens` is missing, e.g. {\"text\": \"Sure: \"}"),
            (json!({"text": "a", "tokens": [1]}), "`text` and `tokens` are mutually exclusive; set one of them"),
            (json!({"text": ""}), "`text` must not be empty"),
        ] {
            assert_eq!(ForcePrefix.start(&config, &run()).err().unwrap(), message);
        }
    }
}
