use super::{config::Fields, describe, phrase::Phrases};
use crate::events::{EventType, LogLevel, TokenId};
use crate::mods::{
    Action, Call, CallEvent, Description, Done, EventSet, Factory, Log, LogitEdit, Pending, Reply, RunView, Session,
};
use serde_json::{Value, json};
use std::sync::Arc;

/// `ban-phrases`: phrases that never stand in the answer, by taking them back.
///
/// `{"phrases": ["as an AI"], "case_sensitive": false, "max_retries": 16}`. When an added token completes a phrase,
/// the tokens that hold it are taken back, and at the place where it began the token that began it is banned, so
/// that the model takes another way. The answer's text is searched, not token ids, so any tokenization counts; the
/// prompt is not searched. After `max_retries` ways at one place the phrase stands, and a warning is logged.
pub struct BanPhrases;

impl Factory for BanPhrases {
    fn describe(&self) -> Description {
        describe(
            "ban-phrases",
            "Takes back phrases as soon as they are complete, and lets the model find another way.",
            json!({"phrases": ["as an AI"], "case_sensitive": false, "max_retries": 16}),
        )
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn Session>, String> {
        let fields = Fields::read(config, &["phrases", "case_sensitive", "max_retries"])?;
        let texts = fields.texts("phrases", "[\"as an AI\"]")?;
        let phrases = Phrases::new(&texts, fields.flag("case_sensitive", false)?);
        let held = phrases.bound();
        let max_retries = fields.count("max_retries", 1..=1000, 16)?;
        Ok(Box::new(Ban { phrases, max_retries, places: Vec::new(), held }))
    }
}

struct Ban {
    phrases: Phrases,
    max_retries: usize,
    /// By position, ascending; a ban holds as long as the sequence before it stands.
    places: Vec<Place>,
    /// Tokens at the end that may be the beginning of a phrase; the bound until something is known.
    held: usize,
}

/// A position in the sequence and the tokens that must not stand there.
struct Place {
    position: usize,
    tokens: Vec<TokenId>,
}

impl Ban {
    /// Forgets what was banned behind `position`: the sequence there is another one now.
    fn forget_after(&mut self, position: usize) {
        while self.places.last().is_some_and(|place| place.position > position) {
            self.places.pop();
        }
    }

    fn added(&mut self, call: &Call<'_>, count: usize) -> Reply {
        let vocabulary = &call.run.vocabulary;
        let Some(found) = self.phrases.find(vocabulary, call.generated(), count) else {
            self.held = self.phrases.held(vocabulary, call.generated());
            return Reply::noop();
        };
        let position = call.sequence.len() - found.tokens;
        self.held = self.phrases.held(vocabulary, &call.sequence[call.prompt_len..position]);
        self.forget_after(position);
        if self.places.last().is_none_or(|place| place.position < position) {
            self.places.push(Place { position, tokens: Vec::new() });
        }
        let place = self.places.last_mut().expect("one was just pushed");
        if place.tokens.len() >= self.max_retries {
            let message = format!(
                "'{}' stands: the model came back to it after {} other ways",
                self.phrases.text(found.phrase),
                self.max_retries
            );
            return Reply { logs: vec![Log { level: LogLevel::Warning, message }], ..Reply::default() };
        }
        place.tokens.push(call.sequence[position]);
        Action::Backtrack { n: u32::try_from(found.tokens).unwrap_or(u32::MAX), tokens: Vec::new() }.into()
    }
}

impl Session for Ban {
    fn handles(&self) -> EventSet {
        EventSet::of(&[EventType::ForwardPass, EventType::Added])
    }

    /// What the end of the answer may still become; before the first token, the bound of the longest phrase.
    fn holdback(&self) -> usize {
        self.held
    }

    fn call(&mut self, call: &Call<'_>, done: Done) -> Result<Reply, Pending> {
        done.disarm();
        Ok(match call.event {
            CallEvent::Added { tokens, .. } => self.added(call, tokens.len()),
            CallEvent::ForwardPass { .. } => {
                self.forget_after(call.sequence.len());
                match self.places.last() {
                    Some(place) if place.position == call.sequence.len() => Action::AdjustedLogits {
                        edit: LogitEdit::Set(place.tokens.iter().map(|&t| (t, f32::NEG_INFINITY)).collect()),
                        temperature: None,
                    }
                    .into(),
                    _ => Reply::noop(),
                }
            }
            _ => Reply::noop(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::BanPhrases;
    use crate::mods::builtin::testing::{PROMPT, Scene, word};
    use crate::mods::{Action, LogitEdit};
    use serde_json::json;

    fn banned(scene: &mut Scene) -> Vec<i32> {
        match scene.forward(&[0.0; 4]).action {
            Some(Action::AdjustedLogits { edit: LogitEdit::Set(entries), temperature: None }) => {
                assert!(entries.iter().all(|(_, value)| *value == f32::NEG_INFINITY));
                entries.into_iter().map(|(token, _)| token).collect()
            }
            None => Vec::new(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn takes_back_exactly_the_phrase_and_bans_its_first_token_there() {
        let mut scene = Scene::new(&BanPhrases, &json!({"phrases": ["bad idea"]}));
        assert!(banned(&mut scene).is_empty());
        let reply = scene.say("Hello a bad idea").expect("the phrase is noticed");
        assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
        assert_eq!(scene.text(), "Hello a");
        assert_eq!(banned(&mut scene), [word(" bad")]);
        // Another tokenization of the same phrase is taken back as well, and both ways are then banned.
        scene.say(" ");
        assert!(banned(&mut scene).is_empty(), "the ban is for one position");
        let reply = scene.say("bad idea").expect("the phrase is noticed again");
        assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
        assert_eq!(banned(&mut scene), [word("bad")]);
        scene.say("\n");
        assert_eq!(scene.text(), "Hello a \n");
    }

    #[test]
    fn bans_add_up_at_one_place_and_end_with_max_retries() {
        let mut scene = Scene::new(&BanPhrases, &json!({"phrases": ["ab"], "max_retries": 2}));
        for (first, expected) in [("a", 1), ("A", 2)] {
            scene.say(first);
            assert!(matches!(scene.say("b").unwrap().action, Some(Action::Backtrack { n: 2, .. })));
            assert_eq!(banned(&mut scene).len(), expected);
        }
        scene.say("a");
        let reply = scene.add(i32::from(b'b'));
        assert!(reply.action.is_none());
        assert_eq!(reply.logs[0].message, "'ab' stands: the model came back to it after 2 other ways");
        assert!(scene.say("ab").is_some(), "other places have their own ways");
    }

    #[test]
    fn an_earlier_change_lifts_later_bans() {
        let mut scene = Scene::new(&BanPhrases, &json!({"phrases": ["ab"]}));
        scene.say("xxab");
        assert_eq!(scene.text(), "xx");
        assert_eq!(banned(&mut scene).len(), 1);
        scene.sequence.truncate(PROMPT + 1);
        assert!(banned(&mut scene).is_empty());
        scene.say("y");
        assert!(banned(&mut scene).is_empty(), "the ban was for 'xx', and this is 'xy'");
    }

    #[test]
    fn forced_lists_and_the_prompt() {
        let mut scene = Scene::new(&BanPhrases, &json!({"phrases": ["bad"], "case_sensitive": true}));
        let tokens = scene.run.vocabulary.encode("Hello bad the", false, false);
        let reply = scene.append(&tokens, true);
        assert_eq!(reply.action, Some(Action::Backtrack { n: 2, tokens: vec![] }));
        assert_eq!(scene.text(), "Hello");
        let mut scene = Scene::new(&BanPhrases, &json!({"phrases": ["> x"]}));
        assert!(scene.say("x").is_none(), "it begins in the prompt");
    }

    #[test]
    fn the_stream_lags_only_by_what_may_become_a_phrase() {
        let mut scene = Scene::new(&BanPhrases, &json!({"phrases": ["a very bad idea"]}));
        assert_eq!(scene.session.holdback(), 15);
        scene.say("Hello");
        assert_eq!(scene.session.holdback(), 0);
        scene.say(" a very");
        assert_eq!(scene.session.holdback(), 2);
    }
}
