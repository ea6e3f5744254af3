//! `choices`: restricts the answer to a list of texts, for classification and multiple-choice questions.

use super::describe;
use super::support::{
    answer_tracker::AnswerTracker,
    config::{self, schema},
    constrain::GrammarInstance,
    sequence::end_token,
};
use crate::events::{EventType, LogLevel, TokenId};
use crate::model::grammar::{Constraint, GrammarSource};
use crate::mods::{
    Action, Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, ModLogLine, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// Maximum texts to choose from.
const MAX_CHOICES: usize = 1000;
/// Maximum texts to choose from with scoring, which needs a decode for each text.
const MAX_SCORED_CHOICES: usize = 64;
/// Maximum restarts of the scoring, which are needed if another mod changes the answer.
const MAX_RESTARTS: usize = 8;

/// `choices`: makes the answer one of several texts.
pub struct Choices;

impl ModFactory for Choices {
    fn describe(&self) -> ModDescription {
        describe(
            "choices",
            "Makes the answer one of several texts.",
            "With `pick` \"sample\", the answer is drawn token by token from the tokens that lead to one of the texts. With `pick` \
             \"most-probable\", every text followed by the end of the answer is evaluated, at the cost of one decode each, \
             and the one with the highest total log-probability becomes the answer; the totals are logged, and nothing is \
             sent before. If another mod removes the selected text, the next most probable one becomes the answer; after the \
             last one, the run ends with an error. If the answer begins with reasoning, the choice follows it.",
            json!({"choices": ["yes", "no"], "pick": "sample"}),
            schema(
                &["choices"],
                json!({
                    "choices": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": MAX_CHOICES,
                        "uniqueItems": true, "description": "Texts to choose from; at most 64 with `pick` \"most-probable\"."},
                    "pick": {"enum": ["sample", "most-probable"], "default": "sample",
                        "description": "Draw one of the texts, or take the most probable."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let ChoicesConfig { choices: texts, pick } = config::parse(self, config)?;
        if pick == Pick::Sample {
            let alternatives: Vec<String> = texts.into_iter().map(|text| Value::from(text).to_string()).collect();
            let grammar = GrammarSource::Lark(format!("start: {}", alternatives.join(" | ")));
            return Ok(Box::new(GrammarInstance::start(Constraint::new("choices", grammar), None, run)?));
        }
        if texts.len() > MAX_SCORED_CHOICES {
            return Err(format!("`choices` has {} texts; the maximum is {MAX_SCORED_CHOICES}", texts.len()));
        }
        let end = end_token(run)?;
        let choices = texts.into_iter().map(|text| {
            let mut tokens = run.vocabulary.encode_plain_continuation(&text);
            tokens.push(end);
            Choice { text, tokens, logprob: None }
        });
        Ok(Box::new(Scoring {
            choices: choices.collect(),
            phase: Phase::Waiting,
            restarts: 0,
            answer: AnswerTracker::new(run, None),
        }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ChoicesConfig {
    choices: Vec<String>,
    pick: Pick,
}

#[derive(Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Pick {
    Sample,
    MostProbable,
}

struct Choice {
    text: String,
    /// Tokens of the text and the end of the answer.
    tokens: Vec<TokenId>,
    logprob: Option<f64>,
}

impl Choice {
    /// Returns the number of tokens of the text.
    fn text_tokens(&self) -> usize {
        self.tokens.len() - 1
    }
}

#[derive(Clone, Copy)]
enum Phase {
    /// Waits for the end of the reasoning.
    Waiting,
    /// `choice` is about to be appended after `base` tokens of the answer: as the answer if it is selected, otherwise to
    /// be scored.
    Forcing { choice: usize, base: usize, is_selected: bool },
    /// The selected choice was appended after `base` tokens of the answer and ends it. `is_removed` is true if another mod
    /// has removed a part of its text since.
    Done { choice: usize, base: usize, is_removed: bool },
}

struct Scoring {
    choices: Vec<Choice>,
    phase: Phase,
    restarts: usize,
    answer: AnswerTracker,
}

impl Scoring {
    fn forward(&mut self, is_reasoning: bool) -> Reply {
        let length = self.answer.token_count();
        match self.phase {
            // Another mod's action won the event, so the choice was not appended. A part of the previous one may remain.
            Phase::Forcing { choice, base, is_selected } if base <= length => {
                self.force(choice, base, is_selected).into()
            }
            // The run did not end with the choice: another mod has removed it, or continues the answer after it.
            Phase::Done { choice, base, is_removed } if base <= length => {
                if !is_removed && length >= base + self.choices[choice].text_tokens() {
                    return Reply::noop();
                }
                self.choices[choice].logprob = None;
                let message = format!("another mod removed {:?}", self.choices[choice].text);
                let Some(mut reply) = self.select(base, None) else {
                    return Action::error(format!("{message}, the last one of the choices")).into();
                };
                reply.logs.insert(0, ModLogLine { level: LogLevel::Warning, message });
                reply
            }
            _ if is_reasoning => Reply::noop(),
            _ => self.restart(length),
        }
    }

    fn restart(&mut self, base: usize) -> Reply {
        self.restarts += 1;
        if self.restarts > MAX_RESTARTS {
            return Action::error("the choices cannot be compared: another mod changes the answer").into();
        }
        self.choices.iter_mut().for_each(|choice| choice.logprob = None);
        self.force(0, base, false).into()
    }

    fn added(&mut self, tokens: &[TokenId], logprobs: &[Option<f32>]) -> Reply {
        let start = self.answer.token_count() - tokens.len();
        match self.phase {
            Phase::Forcing { choice, base, is_selected }
                if base == start && self.choices[choice].tokens.starts_with(tokens) =>
            {
                if is_selected {
                    self.phase = Phase::Done { choice, base, is_removed: false };
                    return Reply::noop();
                }
                let scored = &mut self.choices[choice];
                if scored.tokens.len() == tokens.len() && logprobs.len() == tokens.len() {
                    scored.logprob = logprobs.iter().map(|logprob| logprob.map(f64::from)).sum();
                }
                if choice + 1 < self.choices.len() {
                    return self.force(choice + 1, base, false).into();
                }
                self.select(base, Some(choice))
                    .unwrap_or_else(|| Action::error("none of the choices fits into the remaining tokens").into())
            }
            Phase::Done { choice, base, is_removed } if base <= start => {
                let is_removed = is_removed || start < base + self.choices[choice].text_tokens();
                self.phase = Phase::Done { choice, base, is_removed };
                Reply::noop()
            }
            _ => {
                self.phase = Phase::Waiting;
                Reply::noop()
            }
        }
    }

    /// Returns the action that replaces the answer after the first `base` tokens with a choice.
    fn force(&mut self, choice: usize, base: usize, is_selected: bool) -> Action {
        self.phase = Phase::Forcing { choice, base, is_selected };
        let tokens = self.choices[choice].tokens.clone();
        match self.answer.token_count() - base {
            0 => Action::ForceTokens(tokens),
            count => Action::backtrack(count, tokens),
        }
    }

    /// Makes the most probable choice the answer after the first `base` tokens; `None` if no choice has a score. The
    /// answer ends with `appended` already.
    fn select(&mut self, base: usize, appended: Option<usize>) -> Option<Reply> {
        let scored = self.choices.iter().enumerate().filter_map(|(index, choice)| Some((choice.logprob?, index)));
        // Of equal scores, the first wins.
        let (_, best) = scored.reduce(|best, other| if other.0 > best.0 { other } else { best })?;
        let totals = self.choices.iter().filter_map(|choice| Some(format!("{:?} {:.3}", choice.text, choice.logprob?)));
        let message = format!("{}: {:?} is selected", totals.collect::<Vec<_>>().join(" · "), self.choices[best].text);
        let reply = if appended == Some(best) {
            self.phase = Phase::Done { choice: best, base, is_removed: false };
            Reply::noop()
        } else {
            self.force(best, base, true).into()
        };
        Some(reply.with_log(LogLevel::Info, message))
    }
}

impl ModInstance for Scoring {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass, EventType::Added])
    }

    fn holdback(&self) -> usize {
        if matches!(self.phase, Phase::Forcing { .. }) { usize::MAX } else { 0 }
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        self.answer.update(call);
        Some(match call.event {
            CallEvent::ForwardPass { .. } => self.forward(self.answer.is_reasoning()),
            CallEvent::Added { tokens, logprobs, .. } => self.added(tokens, logprobs),
            _ => Reply::noop(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Choices;
    use crate::mods::ModFactory;
    use crate::mods::builtin::ban_phrases::BanPhrases;
    use crate::mods::builtin::testing::{Simulation, run};
    use serde_json::{Value, json};

    #[test]
    fn sampled_answer_is_one_of_choices() {
        let mut seen = std::collections::BTreeSet::new();
        for seed in 0..40 {
            let result = Simulation { seed, ..Simulation::default() }
                .run_mods(&[(&Choices, json!({"choices": ["yes", "no", "may\"be\"\n"]}))]);
            assert!(result.ended, "{result:?}");
            seen.insert(result.text);
        }
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["may\"be\"\n", "no", "yes"]);
    }

    #[test]
    fn most_probable_choice_is_selected() {
        for script in ["yes", "no", "not yet"] {
            let simulation = Simulation { script: script.into(), ..Simulation::default() };
            let result = simulation
                .run_mods(&[(&Choices, json!({"choices": ["not yet", "yes", "no"], "pick": "most-probable"}))]);
            assert_eq!(result.text, script);
            assert!(result.ended);
            assert_eq!(result.retracted, 0, "nothing was sent before");
            assert!(result.logs[0].ends_with(&format!("{script:?} is selected")), "{:?}", result.logs);
        }
    }

    #[test]
    fn choice_that_does_not_fit_is_skipped() {
        let choices = json!({"choices": ["much too long a text", "x"], "pick": "most-probable"});
        let result = Simulation { script: "much too long a text".into(), max_tokens: 5, ..Simulation::default() }
            .run_mods(&[(&Choices, choices)]);
        assert_eq!(result.text, "x");
        let choices = json!({"choices": ["much too long a text"], "pick": "most-probable"});
        let result = Simulation { max_tokens: 5, ..Simulation::default() }.run_mods(&[(&Choices, choices)]);
        assert_eq!(result.error.as_deref(), Some("none of the choices fits into the remaining tokens"));
    }

    #[test]
    fn choice_follows_text_forced_by_another_mod() {
        let prefix = crate::mods::builtin::force_prefix::ForcePrefix;
        let result = Simulation { script: "So: no".into(), ..Simulation::default() }.run_mods(&[
            (&prefix, json!({"text": "So: "})),
            (&Choices, json!({"choices": ["yes", "no"], "pick": "most-probable"})),
        ]);
        assert_eq!(result.text, "So: no");
    }

    #[test]
    fn removed_choice_is_replaced_with_the_next_best() {
        let choices = |texts: &[&str]| json!({"choices": texts, "pick": "most-probable"});
        let ban = |phrases: &[&str]| json!({"phrases": phrases});
        for (texts, phrases, expected) in [
            (vec!["yes", "no", "maybe"], vec!["yes"], "no"),
            (vec!["no", "maybe", "yes"], vec!["yes"], "no"),
            (vec!["maybe", "yes", "no"], vec!["YES", "no"], "maybe"),
            // A part of the choice remains.
            (vec!["yes", "no"], vec!["es"], "no"),
        ] {
            let mut mods: [(&dyn ModFactory, Value); 2] = [(&Choices, choices(&texts)), (&BanPhrases, ban(&phrases))];
            for _ in 0..2 {
                let simulation = Simulation { script: "yes".into(), alphabet: "no", ..Simulation::default() };
                let result = simulation.run_mods(&mods);
                assert_eq!((result.text.as_str(), result.ended), (expected, true), "{texts:?} {phrases:?} {result:?}");
                assert_eq!(result.retracted, 0);
                mods.reverse();
            }
        }
        let mods: [(&dyn ModFactory, Value); 2] =
            [(&Choices, choices(&["yes", "no"])), (&BanPhrases, ban(&["yes", "no"]))];
        let result = Simulation { script: "yes".into(), ..Simulation::default() }.run_mods(&mods);
        assert_eq!(result.error.as_deref(), Some("another mod removed \"no\", the last one of the choices"));
    }

    #[test]
    fn errors_name_field() {
        let many: Vec<String> = (0..65).map(|number| number.to_string()).collect();
        for (config, message) in [
            (json!({"choices": ["a", "a"]}), "`choices[1]` is a duplicate"),
            (json!({"choices": vec!["a"; 100_000]}), "`choices` must have at most 1000 items, got 100000"),
            (
                json!({"choices": ["a"], "pick": "best"}),
                "`pick` must be one of \"sample\", \"most-probable\", got \"best\"",
            ),
            (json!({"choices": many, "pick": "most-probable"}), "`choices` has 65 texts; the maximum is 64"),
        ] {
            assert_eq!(Choices.start(&config, &run()).err().unwrap(), message);
        }
    }
}
