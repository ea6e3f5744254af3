//! `think-budget`: ends reasoning after a number of tokens, for clients that limit time and cost.

use super::describe;
use super::support::{
    answer_tracker::AnswerTracker,
    config::{self, schema},
};
use crate::events::{EventType, LogLevel};
use crate::mods::{
    Action, Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Maximum additional reasoning tokens, to complete a character or an end marker that the model has begun.
const GRACE_TOKENS: usize = 16;
/// Maximum number of times that reasoning is ended in one answer.
const MAX_ENDS: usize = 8;

/// `think-budget`: ends reasoning that is too long.
pub struct ThinkBudget;

impl ModFactory for ThinkBudget {
    fn describe(&self) -> ModDescription {
        describe(
            "think-budget",
            "Ends the model's reasoning after a number of tokens.",
            "When the reasoning reaches the number in `tokens`, its end is forced in the format of the model's family, and the model continues \
             with its answer. Reasoning begins at the end of the prompt or at the beginning of the answer. If a \
             family reasons in channels, all of them share the budget. Markers other than the family's can be set \
             as `begin` and `end`. Has no effect on a model that does not reason.",
            json!({"tokens": 1024, "message": "I have thought enough."}),
            schema(
                &[],
                json!({
                    "tokens": {"type": "integer", "minimum": 0, "maximum": 1_000_000, "default": 1024,
                        "description": "Maximum tokens of reasoning; up to 16 more to complete a character or an end marker."},
                    "message": {"type": "string", "minLength": 1, "description": "Text that is inserted before the end of the reasoning."},
                    "begin": {"type": "string", "minLength": 1, "description": "Marker that begins reasoning; requires `end`."},
                    "end": {"type": "string", "minLength": 1, "description": "Marker that ends reasoning; requires `begin`."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let config: BudgetConfig = config::parse(self, config)?;
        let markers = match (config.begin, config.end) {
            (Some(begin), Some(end)) => Some((begin, end)),
            (None, None) => None,
            (Some(_), None) => return Err("`end` is missing; `begin` requires it, e.g. \"</think>\"".into()),
            (None, Some(_)) => return Err("`begin` is missing; `end` requires it, e.g. \"<think>\"".into()),
        };
        Ok(Box::new(Budget {
            tokens: config.tokens,
            message: config.message,
            end_marker: markers.as_ref().map(|(_, end)| end.clone()),
            answer: AnswerTracker::new(run, markers),
            ends: 0,
        }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BudgetConfig {
    tokens: usize,
    #[serde(default)]
    message: String,
    begin: Option<String>,
    end: Option<String>,
}

struct Budget {
    tokens: usize,
    message: String,
    /// End marker that replaces the one of the model's family.
    end_marker: Option<String>,
    answer: AnswerTracker,
    /// Number of times that reasoning was ended.
    ends: usize,
}

impl Budget {
    /// Returns the text that ends reasoning.
    fn end(&self, call: &Call<'_>) -> String {
        self.end_marker.clone().unwrap_or_else(|| call.run.answer_format.syntax.closing_text(self.ends))
    }
}

impl ModInstance for Budget {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass, EventType::Added])
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        self.answer.update(call);
        // Another mod may remove an added token, so the budget is checked before the next step.
        let is_step = matches!(call.event, CallEvent::ForwardPass { .. });
        let Some(reasoning) = self.answer.reasoning().filter(|reasoning| is_step && reasoning.is_within()) else {
            return Some(Reply::noop());
        };
        let reasoning_tokens = reasoning.reasoning_tokens(self.answer.token_count());
        let text = self.answer.text();
        let is_incomplete = !text.ends_at_char_boundary() || reasoning.may_be_closing(text);
        let has_grace = is_incomplete && reasoning_tokens < self.tokens + GRACE_TOKENS;
        if reasoning_tokens < self.tokens || has_grace || self.ends == MAX_ENDS {
            return Some(Reply::noop());
        }
        let vocabulary = &call.run.vocabulary;
        let mut tokens = vocabulary.encode_plain_continuation(&self.message);
        tokens.extend(vocabulary.encode_markup_continuation(&self.end(call)));
        self.ends += 1;
        let message = format!("reasoning ended after {reasoning_tokens} tokens");
        Some(Reply::from(Action::ForceTokens(tokens)).with_log(LogLevel::Info, message))
    }
}

#[cfg(test)]
mod tests {
    use super::ThinkBudget;
    use crate::model::chat::family::ModelFamily;
    use crate::mods::ModFactory;
    use crate::mods::builtin::force_prefix::ForcePrefix;
    use crate::mods::builtin::testing::{Simulation, run};
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn reasoning_ends_and_answer_continues() {
        let result = Simulation { script: "<think>abcdefgh".into(), ..Simulation::default() }
            .run_mods(&[(&ThinkBudget, json!({"tokens": 5, "message": "Enough."}))]);
        let (reasoning, answer) = result.text.split_once("Enough.\n</think>\n\n").expect("the reasoning ends");
        assert_eq!(reasoning, "<think>abcde");
        assert!(!answer.is_empty());
        assert_eq!(result.logs, ["reasoning ended after 5 tokens"]);
    }

    #[test]
    fn short_or_no_reasoning_is_unchanged() {
        for script in ["<think>abc</think>Hello", "Hello <think>abcdefghijk", "abcdefghijk"] {
            let result = Simulation { script: script.into(), max_tokens: 40, ..Simulation::default() }
                .run_mods(&[(&ThinkBudget, json!({"tokens": 5}))]);
            assert!(result.text.starts_with(script) && result.logs.is_empty(), "{result:?}");
        }
    }

    #[test]
    fn budget_applies_to_all_families_and_open_prompts() {
        for (family, end) in [
            (ModelFamily::Hermes, "\n</think>\n\n"),
            (ModelFamily::Mistral, "[/THINK]"),
            (ModelFamily::CommandR, "<|END_THINKING|>"),
        ] {
            let mut view = (*run()).clone();
            let mut answer_format = (*view.answer_format).clone();
            answer_format.syntax = family.syntax().into();
            answer_format.thinking = true;
            view.answer_format = answer_format.into();
            let simulation = Simulation { run: view.into(), script: "abcdef".into(), ..Simulation::default() };
            let result = simulation.run_mods(&[(&ThinkBudget, json!({"tokens": 3}))]);
            assert!(result.text.starts_with(&format!("abc{end}")), "{result:?}");
        }
        let own = json!({"tokens": 0, "begin": "((", "end": "))"});
        let result = Simulation { prompt: "> ((".into(), ..Simulation::default() }.run_mods(&[(&ThinkBudget, own)]);
        assert!(result.text.starts_with("))"), "{result:?}");
    }

    #[test]
    fn reasoning_does_not_end_within_character() {
        let result = Simulation { script: "<think>aä".into(), ..Simulation::default() }
            .run_mods(&[(&ThinkBudget, json!({"tokens": 2}))]);
        assert!(result.text.starts_with("<think>aä\n</think>"), "{result:?}");
    }

    #[test]
    fn errors_name_field() {
        for (config, message) in [
            (json!({"tokens": -1}), "`tokens` must be an integer from 0 to 1000000, got -1"),
            (json!({"begin": "<a>"}), "`end` is missing; `begin` requires it, e.g. \"</think>\""),
        ] {
            assert_eq!(ThinkBudget.start(&config, &run()).err().unwrap(), message);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn reasoning_never_exceeds_budget(seed: u64, tokens in 0usize..20) {
            let result = Simulation { seed, max_tokens: 60, ..Simulation::default() }
                .run_mods(&[(&ForcePrefix, json!({"text": "<think>"})), (&ThinkBudget, json!({"tokens": tokens}))]);
            if let Some((reasoning, _)) = result.text["<think>".len()..].split_once("</think>") {
                prop_assert!(reasoning.len() <= tokens * 5 + 5);
            } else {
                prop_assert!(result.ended && result.tokens.len() <= 8 + tokens + super::GRACE_TOKENS, "{:?}", result);
            }
        }
    }
}
