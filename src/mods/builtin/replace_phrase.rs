//! `replace-phrase`: replaces phrases while the answer is written, for clients with a fixed terminology.

use super::describe;
use super::support::{
    config::{self, schema},
    phrase::{self, Phrases},
    phrase_search::PhraseSearch,
};
use crate::events::{EventType, LogLevel};
use crate::mods::{
    Action, Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Maximum consecutive replacements without a token from the model between them.
const MAX_CONSECUTIVE: usize = 32;

/// `replace-phrase`: replaces a phrase with another text as soon as it is complete.
pub struct ReplacePhrase;

impl ModFactory for ReplacePhrase {
    fn describe(&self) -> ModDescription {
        describe(
            "replace-phrase",
            "Replaces a phrase with another text as soon as it is complete.",
            "The tokens of the phrase are removed, and the replacement is appended. Text of these tokens that is not part of the \
             phrase is kept. The model continues from there as if it had written it. The text is searched, not token ids; \
             the prompt is not searched. A replacement that contains a phrase is rejected.",
            json!({"replace": {"utilize": "use"}, "case_sensitive": false}),
            schema(
                &["replace"],
                json!({
                    "replace": {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1,
                        "maxProperties": phrase::MAX_PHRASES,
                        "propertyNames": {"minLength": 1, "maxLength": phrase::MAX_PHRASE_CHARS},
                        "description": "Replacement for each phrase; an empty string removes it."},
                    "case_sensitive": {"type": "boolean", "default": false,
                        "description": "`true` for case-sensitive matching."},
                    "whole_words": {"type": "boolean", "default": false,
                        "description": "`true` if a phrase must not be part of a longer word."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let config: ReplaceConfig = config::parse(self, config)?;
        let from: Vec<&str> = config.replace.keys().map(String::as_str).collect();
        let to: Vec<&str> = config.replace.values().filter_map(Value::as_str).collect();
        let phrases = Phrases::new(&from, config.case_sensitive, config.whole_words);
        for replacement in &to {
            if let Some(index) = phrases.find_in(replacement) {
                let phrase = from[index];
                return Err(format!("`replace`: '{replacement}' contains '{phrase}' and would be replaced endlessly"));
            }
        }
        let to = to.into_iter().map(str::to_owned).collect();
        Ok(Box::new(Replace { search: PhraseSearch::new(phrases), to, consecutive: 0 }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReplaceConfig {
    /// Strings, in the order of the request.
    replace: Map<String, Value>,
    case_sensitive: bool,
    whole_words: bool,
}

struct Replace {
    search: PhraseSearch,
    /// Replacement of each phrase.
    to: Vec<String>,
    consecutive: usize,
}

impl ModInstance for Replace {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::Added])
    }

    fn holdback(&self) -> usize {
        self.search.holdback()
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let CallEvent::Added { tokens, forced, .. } = call.event else { return Some(Reply::noop()) };
        if !forced {
            self.consecutive = 0;
        }
        let Some(found) = self.search.find(call, tokens.len()) else { return Some(Reply::noop()) };
        if found.is_cut && !call.is_last_event() {
            // The rest of the character could not be encoded without its first bytes.
            self.search.postpone(call, &found);
            return Some(Reply::noop());
        }
        if self.consecutive == MAX_CONSECUTIVE {
            self.search.keep(call);
            let message =
                format!("{MAX_CONSECUTIVE} consecutive replacements triggered each other; the current text is kept");
            return Some(Reply::noop().with_log(LogLevel::Warning, message));
        }
        self.consecutive += 1;
        self.search.replace();
        let text = format!("{}{}{}", found.before, self.to[found.phrase], found.after);
        let mut replacement = call.run.vocabulary.encode_plain_continuation(&text);
        // The token that ended the answer remains its end.
        replacement.extend(tokens.last().filter(|_| call.ends_answer()));
        Some(Action::backtrack(found.tokens_from_char_boundary, replacement).into())
    }
}

#[cfg(test)]
mod tests {
    use super::ReplacePhrase;
    use crate::mods::builtin::testing::{EOG, ModHarness, Simulation, run};
    use crate::mods::{Action, ModFactory};
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn phrase_within_tokens_is_replaced() {
        let mut harness = ModHarness::new(&ReplacePhrase, &json!({"replace": {"bad": "good", "very ": ""}}));
        harness.write_text("Hello a bad idea");
        assert_eq!(harness.text(), "Hello a good idea");
        let mut harness = ModHarness::new(&ReplacePhrase, &json!({"replace": {"the b": "a b"}}));
        let tokens = harness.run.vocabulary.encode_plain("Hello the bad");
        harness.append(&tokens, true);
        assert_eq!(harness.text(), "Hello a bad", "the end of the last token stays");
    }

    #[test]
    fn character_after_the_phrase_is_completed_first() {
        let mut harness = ModHarness::new(&ReplacePhrase, &json!({"replace": {"bad": "good"}}));
        let mut tokens = harness.run.vocabulary.encode_plain("a bad");
        tokens.push(0xe2);
        assert_eq!(harness.append(&tokens, true).action, None);
        assert_eq!(harness.instance.holdback(), 2, "' bad' and the first byte of '€'");
        assert_eq!(harness.add(0x82).action, None);
        harness.add(0xac);
        assert_eq!(harness.text(), "a good€");
    }

    #[test]
    fn whole_word_is_replaced_after_word_boundary() {
        let mut harness = ModHarness::new(&ReplacePhrase, &json!({"replace": {"bad": "good"}, "whole_words": true}));
        harness.write_text("bad badly bad.");
        assert_eq!(harness.text(), "good badly good.");
        harness.write_text(" bad");
        assert_eq!(harness.text(), "good badly good. bad");
        harness.append(&[EOG], false);
        assert_eq!(harness.text(), "good badly good. good<end>");
    }

    #[test]
    fn cyclic_replacements_stop_at_the_limit() {
        let mut harness = ModHarness::new(&ReplacePhrase, &json!({"replace": {"xy": "yyxx"}}));
        harness.write_text("xxx");
        let mut reply = harness.add(i32::from(b'y'));
        let mut count = 0;
        while let Some(Action::Backtrack { tokens, .. }) = reply.action {
            count += 1;
            harness.sequence.truncate(harness.sequence.len() - tokens.len());
            reply = harness.append(&tokens, true);
        }
        assert_eq!(count, super::MAX_CONSECUTIVE);
        assert!(reply.logs[0].message.starts_with("32 consecutive replacements"), "{}", reply.logs[0].message);
    }

    #[test]
    fn endless_replacement_is_rejected() {
        let message = ReplacePhrase.start(&json!({"replace": {"a": "b", "B": "c"}}), &run()).err().unwrap();
        assert_eq!(message, "`replace`: 'b' contains 'B' and would be replaced endlessly");
        let message = ReplacePhrase.start(&json!({"replace": {"a": 1}}), &run()).err().unwrap();
        assert_eq!(message, "`replace.a` must be a string, got 1");
        let message = ReplacePhrase.start(&json!({"replace": {"": "a"}}), &run()).err().unwrap();
        assert_eq!(message, "`replace`: the name \"\" is invalid: the value must not be empty");
    }
    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn replaced_phrase_never_remains_in_answer(seed: u64, from in "[ab]{2,3}", to in "[xy ]{0,4}", script in "[ab ]{0,30}") {
            let mut replace = serde_json::Map::new();
            replace.insert(from.clone(), json!(to));
            let result = Simulation { seed, script, alphabet: "ab ", max_tokens: 60, ..Simulation::default() }
                .run_mods(&[(&ReplacePhrase, json!({"replace": replace}))]);
            prop_assert!(result.reached_max_steps || !result.text.to_lowercase().contains(&from), "{:?}", result);
        }
    }
}
