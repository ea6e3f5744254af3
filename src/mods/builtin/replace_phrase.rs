use super::{config::Fields, describe, phrase::Phrases};
use crate::events::EventType;
use crate::mods::{Action, Call, CallEvent, Description, Done, EventSet, Factory, Pending, Reply, RunView, Session};
use serde_json::{Value, json};
use std::sync::Arc;

/// `replace-phrase`: another text in the place of a phrase, as soon as the phrase is complete.
///
/// `{"replace": {"utilize": "use"}, "case_sensitive": false}`. The tokens that hold the phrase are taken back, and
/// the replacement is appended with what stood around the phrase in its first and last token. The model goes on
/// from there as if it had written it.
pub struct ReplacePhrase;

impl Factory for ReplacePhrase {
    fn describe(&self) -> Description {
        describe(
            "replace-phrase",
            "Puts another text in the place of a phrase as soon as it is complete.",
            json!({"replace": {"utilize": "use"}, "case_sensitive": false}),
        )
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn Session>, String> {
        let fields = Fields::read(config, &["replace", "case_sensitive"])?;
        let right = "'replace' must be an object of texts, e.g. {\"utilize\": \"use\"}";
        let pairs = fields.get("replace").ok_or_else(|| format!("'replace' is missing; {right}"))?;
        let entries =
            pairs.as_object().filter(|map| !map.is_empty()).ok_or_else(|| format!("{right}, found {pairs}"))?;
        let mut from = Vec::new();
        let mut to = Vec::new();
        for (phrase, replacement) in entries {
            let replacement =
                replacement.as_str().ok_or_else(|| format!("{right}, found {replacement} for '{phrase}'"))?;
            if phrase.is_empty() {
                return Err(format!("{right}; an empty phrase cannot be replaced"));
            }
            from.push(phrase.as_str());
            to.push(replacement.to_owned());
        }
        let case_sensitive = fields.flag("case_sensitive", false)?;
        let fold = |text: &str| if case_sensitive { text.to_owned() } else { text.to_lowercase() };
        for replacement in &to {
            if let Some(phrase) = from.iter().find(|phrase| fold(replacement).contains(&fold(phrase))) {
                return Err(format!("'replace': '{replacement}' holds '{phrase}', and would be replaced for ever"));
            }
        }
        let phrases = Phrases::new(&from, case_sensitive);
        let held = phrases.bound();
        Ok(Box::new(Replace { phrases, to, held }))
    }
}

struct Replace {
    phrases: Phrases,
    to: Vec<String>,
    held: usize,
}

impl Session for Replace {
    fn handles(&self) -> EventSet {
        EventSet::of(&[EventType::Added])
    }

    /// What the end of the answer may still become; before the first token, the bound of the longest phrase.
    fn holdback(&self) -> usize {
        self.held
    }

    fn call(&mut self, call: &Call<'_>, done: Done) -> Result<Reply, Pending> {
        done.disarm();
        let CallEvent::Added { tokens, .. } = call.event else { return Ok(Reply::noop()) };
        let vocabulary = &call.run.vocabulary;
        let Some(found) = self.phrases.find(vocabulary, call.generated(), tokens.len()) else {
            self.held = self.phrases.held(vocabulary, call.generated());
            return Ok(Reply::noop());
        };
        self.held = self.phrases.bound();
        let text = format!("{}{}{}", found.before, self.to[found.phrase], found.after);
        Ok(Action::Backtrack {
            n: u32::try_from(found.tokens).unwrap_or(u32::MAX),
            tokens: vocabulary.encode(&text, false, false),
        }
        .into())
    }
}

#[cfg(test)]
mod tests {
    use super::ReplacePhrase;
    use crate::mods::Factory;
    use crate::mods::builtin::testing::{Scene, run};
    use serde_json::json;

    #[test]
    fn replaces_within_tokens() {
        let mut scene = Scene::new(&ReplacePhrase, &json!({"replace": {"bad": "good", "very ": ""}}));
        scene.say("Hello a bad idea");
        assert_eq!(scene.text(), "Hello a good idea");
        let mut scene = Scene::new(&ReplacePhrase, &json!({"replace": {"the b": "a b"}}));
        let tokens = scene.run.vocabulary.encode("Hello the bad", false, false);
        scene.append(&tokens, true);
        assert_eq!(scene.text(), "Hello a bad", "the end of the last token stays");
    }

    #[test]
    fn refuses_what_would_go_on_for_ever() {
        let message = ReplacePhrase.start(&json!({"replace": {"a": "b", "B": "c"}}), &run()).err().unwrap();
        assert_eq!(message, "'replace': 'b' holds 'B', and would be replaced for ever");
        let message = ReplacePhrase.start(&json!({"replace": {"a": 1}}), &run()).err().unwrap();
        assert!(message.ends_with("found 1 for 'a'"), "{message}");
    }
}
