//! `ban-phrases`: removes phrases from the answer, for clients that reject stock phrases.

use super::describe;
use super::support::{
    avoided::AvoidedTokens,
    config::{self, schema},
    phrase::{self, Phrases},
    phrase_search::PhraseSearch,
};
use crate::events::{EventType, LogLevel};
use crate::mods::{
    Action, Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `ban-phrases`: removes phrases from the answer by backtracking.
pub struct BanPhrases;

impl ModFactory for BanPhrases {
    fn describe(&self) -> ModDescription {
        describe(
            "ban-phrases",
            "Removes phrases as soon as they are complete, so that the model continues differently.",
            "When an added token completes a phrase, the tokens of the phrase are removed, and the first of them is avoided at its \
            position, so that the model continues differently. The text of the answer is searched, not token ids, so \
             any tokenization is found; the prompt is not searched. After `max_retries` attempts at one position, or if no other \
             token is possible, the phrase is kept and a warning is logged. Only text that may become a phrase is held back.",
            json!({"phrases": ["as an AI"], "case_sensitive": false, "max_retries": 16}),
            schema(
                &["phrases"],
                json!({
                    "phrases": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": phrase::MAX_PHRASE_CHARS},
                        "minItems": 1, "maxItems": phrase::MAX_PHRASES,
                        "description": "Phrases to remove from the answer."},
                    "case_sensitive": {"type": "boolean", "default": false,
                        "description": "`true` for case-sensitive matching."},
                    "whole_words": {"type": "boolean", "default": false,
                        "description": "`true` if a phrase must not be part of a longer word."},
                    "max_retries": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 16,
                        "description": "Maximum attempts at one position before the phrase is kept."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let config: BanConfig = config::parse(self, config)?;
        let search = PhraseSearch::new(Phrases::new(&config.phrases, config.case_sensitive, config.whole_words));
        Ok(Box::new(BanInstance { search, max_retries: config.max_retries, bans_by_position: Vec::new() }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BanConfig {
    phrases: Vec<String>,
    case_sensitive: bool,
    whole_words: bool,
    max_retries: usize,
}

struct BanInstance {
    search: PhraseSearch,
    max_retries: usize,
    /// Bans by position, ascending; a ban applies while the answer before it is unchanged.
    bans_by_position: Vec<PositionBans>,
}

/// The tokens that are avoided at a position, and the number of phrases that were removed there.
struct PositionBans {
    avoided: AvoidedTokens,
    tries: usize,
}

impl BanInstance {
    /// Removes the bans after `position`, because the answer before them has changed.
    fn remove_bans_after(&mut self, position: usize) {
        while self.bans_by_position.last().is_some_and(|entry| entry.avoided.position() > position) {
            self.bans_by_position.pop();
        }
    }

    fn added(&mut self, call: &Call<'_>, count: usize) -> Reply {
        let (generated, length) = (call.generated_in_context(), call.answer_len());
        self.remove_bans_after(length - count);
        if let Some(entry) = self.bans_by_position.last_mut() {
            entry.avoided.observe(call);
        }
        let Some(found) = self.search.find(call, count) else { return Reply::noop() };
        let position = length - found.tokens;
        self.remove_bans_after(position);
        if self.bans_by_position.last().is_none_or(|entry| entry.avoided.position() < position) {
            self.bans_by_position.push(PositionBans { avoided: AvoidedTokens::new(position), tries: 0 });
        }
        let entry = self.bans_by_position.last_mut().expect("one was just pushed");
        if entry.avoided.is_unavoidable() || entry.tries >= self.max_retries {
            self.search.keep(call);
            let reason = if entry.avoided.is_unavoidable() {
                "no other token is possible at its beginning".to_owned()
            } else {
                format!("the model repeated it after {} other attempts", self.max_retries)
            };
            let message = format!("'{}' is kept: {reason}", self.search.phrase(found.phrase));
            return Reply::noop().with_log(LogLevel::Warning, message);
        }
        entry.tries += 1;
        entry.avoided.insert(generated[generated.len() - found.tokens]);
        self.search.remove(call, found.tokens);
        Action::backtrack(found.tokens, Vec::new()).into()
    }

    fn forward(&mut self, length: usize) -> Reply {
        self.remove_bans_after(length);
        let entry = self.bans_by_position.last().filter(|entry| entry.avoided.position() == length);
        entry.map_or_else(Reply::noop, |entry| entry.avoided.action().into())
    }
}

impl ModInstance for BanInstance {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass, EventType::Added])
    }

    fn holdback(&self) -> usize {
        self.search.holdback()
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        Some(match call.event {
            CallEvent::Added { tokens, .. } => self.added(call, tokens.len()),
            CallEvent::ForwardPass { .. } => self.forward(call.answer_len()),
            _ => Reply::noop(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::BanPhrases;
    use crate::model::llama::AVOIDED_TOKEN_BIAS;
    use crate::mods::builtin::stop_rules::StopRules;
    use crate::mods::builtin::structured::Regex;
    use crate::mods::builtin::testing::{EOG, ModHarness, PROMPT, Simulation, word};
    use crate::mods::{Action, CallEvent, LogitEdit, ModFactory};
    use proptest::prelude::*;
    use serde_json::json;

    fn banned(harness: &mut ModHarness) -> Vec<i32> {
        match harness.forward(&[0.0; 300]).action {
            Some(Action::AdjustedLogits { edit: LogitEdit::Add(entries), temperature: None }) => {
                assert!(entries.iter().all(|(_, value)| *value == AVOIDED_TOKEN_BIAS));
                entries.into_iter().map(|(token, _)| token).collect()
            }
            None => Vec::new(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn phrase_is_removed_and_its_first_token_banned() {
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["bad idea"]}));
        assert!(banned(&mut harness).is_empty());
        let reply = harness.write_text("Hello a bad idea").expect("the phrase is noticed");
        assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
        assert_eq!(harness.text(), "Hello a");
        assert_eq!(banned(&mut harness), [word(" bad")]);
        // Another tokenization of the same phrase, at the next position, is removed as well.
        harness.write_text(" ");
        assert!(banned(&mut harness).is_empty(), "the ban is for one position");
        let reply = harness.write_text("bad idea").expect("the phrase is noticed again");
        assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
        assert_eq!(banned(&mut harness), [word("bad")]);
        harness.write_text("\n");
        assert_eq!(harness.text(), "Hello a \n");
    }

    #[test]
    fn bans_accumulate_at_one_position_up_to_max_retries() {
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["ab", "bc"], "max_retries": 2}));
        for (first, expected) in [("a", 1), ("A", 2)] {
            harness.write_text(first);
            assert!(matches!(harness.write_text("b").unwrap().action, Some(Action::Backtrack { n: 2, .. })));
            assert_eq!(banned(&mut harness).len(), expected);
        }
        let reply = harness.append(&[i32::from(b'a'), i32::from(b'b')], true);
        assert!(reply.action.is_none());
        assert_eq!(reply.logs[0].message, "'ab' is kept: the model repeated it after 2 other attempts");
        assert_eq!(harness.instance.holdback(), 1, "its end may begin 'bc'");
        assert!(harness.write_text("ab").is_some(), "other positions have their own attempts");
    }

    #[test]
    fn earlier_change_lifts_later_bans() {
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["ab"]}));
        harness.write_text("xxab");
        assert_eq!(harness.text(), "xx");
        assert_eq!(banned(&mut harness).len(), 1);
        harness.sequence.truncate(PROMPT + 1);
        assert!(banned(&mut harness).is_empty());
        harness.write_text("y");
        assert!(banned(&mut harness).is_empty(), "the ban was for 'xx', and this is 'xy'");
    }

    #[test]
    fn phrase_kept_by_another_mod_is_removed_later() {
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["ab"]}));
        harness.write_text("xa");
        let tokens = [i32::from(b'b')];
        harness.sequence.extend(tokens);
        let reply = harness.call(CallEvent::Added { tokens: &tokens, logprobs: &[None], forced: false });
        assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
        // Another mod's action won instead, and the answer ended.
        let reply = harness.append(&[EOG], true);
        assert_eq!(reply.action, Some(Action::Backtrack { n: 3, tokens: vec![] }));
        assert_eq!(harness.text(), "x");
    }

    #[test]
    fn whole_words_ignores_parts_of_words() {
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["bad"], "whole_words": true}));
        assert!(harness.write_text("a badly").is_none());
        harness.write_text("; bad");
        assert_eq!(harness.instance.holdback(), 1);
        assert!(harness.append(&[EOG], true).action.is_some(), "nothing follows");
    }

    #[test]
    fn phrase_is_kept_if_no_other_token_is_possible() {
        let ban = json!({"phrases": ["xa", "b"]});
        let regex = json!({"pattern": "xxa(b|c)b"});
        let mut mods: [(&dyn ModFactory, serde_json::Value); 2] = [(&BanPhrases, ban), (&Regex, regex)];
        for _ in 0..2 {
            let result = Simulation { script: "xxabb".into(), ..Simulation::default() }.run_mods(&mods);
            assert_eq!((result.text.as_str(), result.ended), ("xxacb", true), "{result:?}");
            let kept =
                ["'xa'", "'b'"].map(|phrase| format!("{phrase} is kept: no other token is possible at its beginning"));
            assert_eq!(result.logs, kept);
            // Each phrase that is kept was removed once.
            assert!(result.controls <= 4, "{result:?}");
            mods.reverse();
        }
    }

    #[test]
    fn forced_phrase_is_removed_and_prompt_is_not_searched() {
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["bad"], "case_sensitive": true}));
        let tokens = harness.run.vocabulary.encode_plain("Hello bad the");
        let reply = harness.append(&tokens, true);
        assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
        assert_eq!(harness.text(), "Hello");
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["> x"]}));
        assert!(harness.write_text("x").is_none(), "it begins in the prompt");
    }

    #[test]
    fn holdback_covers_only_possible_phrases() {
        let mut harness = ModHarness::new(&BanPhrases, &json!({"phrases": ["a very bad idea"]}));
        assert_eq!(harness.instance.holdback(), 15);
        harness.write_text("Hello");
        assert_eq!(harness.instance.holdback(), 0);
        harness.write_text(" a very");
        assert_eq!(harness.instance.holdback(), 2);
    }
    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn banned_phrase_never_remains_in_answer(
            seed: u64, phrase in "[abB ]{2,4}", whole_words: bool, last: bool, script in "[ab ]{0,30}",
        ) {
            let ban = json!({"phrases": [phrase], "whole_words": whole_words, "max_retries": 200});
            let stop = json!({"regex": "b a|aab"});
            let mut mods: Vec<(&dyn ModFactory, serde_json::Value)> = vec![(&BanPhrases, ban), (&StopRules, stop)];
            if last {
                mods.reverse();
            }
            let result = Simulation { seed, script, alphabet: "ab .", max_tokens: 60, ..Simulation::default() }.run_mods(&mods);
            let text = result.text.to_lowercase();
            let is_word = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
            let banned = phrase.to_lowercase();
            let is_present = text.match_indices(&banned).any(|(at, found)| {
                let (before, following) = (text[..at].chars().next_back(), text[at + found.len()..].chars().next());
                !whole_words
                    || !(is_word(before) && is_word(found.chars().next())
                        || is_word(following) && is_word(found.chars().next_back()))
            });
            prop_assert!(!is_present || result.reached_max_steps || result.error.is_some(), "{:?}", result);
        }
    }
}
