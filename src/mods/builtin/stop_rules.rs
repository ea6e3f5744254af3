use super::{
    answer_text::AnswerText,
    config::{ConfigFields, schema},
    describe,
    reasoning::ReasoningState,
    sentences::SentenceDetector,
    sequence::{SequenceTracker, end_token, ends_answer},
};
use crate::events::{EventType, LogLevel, TokenId};
use crate::model::complete_prefix;
use crate::mods::{
    Action, Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, ModLogLine, Reply, ReplySender, RunView,
};
use regex::bytes::Regex;
use serde_json::{Value, json};
use std::sync::Arc;

/// Maximum bytes before a new token that a match of the expression may include.
const MAX_MATCH_BYTES: usize = 1024;
/// Maximum memory of a compiled expression, in bytes.
const MAX_REGEX_BYTES: usize = 1 << 20;

/// `stop-rules`: ends an answer that meets a rule.
pub struct StopRules;

impl ModFactory for StopRules {
    fn describe(&self) -> ModDescription {
        describe(
            "stop-rules",
            "Ends the answer at a number of tokens or sentences, a match, a repeated line, or when the model becomes unsure.",
            "At least one rule is required. The first rule that is met ends the run with finish reason stop and is logged. The \
            rules apply to the answer after its reasoning. A sentence is complete when a space follows it; the space is then removed. A full stop \
             after a single letter or after the number of a list item does not end a sentence. The expression may match anywhere within the last \
             1024 bytes, and the answer ends after the match. Lines are compared without surrounding spaces; empty lines \
             do not count.",
            json!({"sentences": 3, "repeated_lines": 3}),
            schema(
                &[],
                json!({
                    "tokens": {"type": "integer", "minimum": 1, "maximum": 1_000_000, "description": "Number of tokens of the answer."},
                    "sentences": {"type": "integer", "minimum": 1, "maximum": 100_000, "description": "Number of sentences of the answer."},
                    "regex": {"type": "string", "minLength": 1,
                        "description": "Regular expression; the answer ends as soon as it matches."},
                    "repeated_lines": {"type": "integer", "minimum": 2, "maximum": 1000,
                        "description": "Number of consecutive identical lines that ends the answer."},
                    "mean_logprob": {"type": "number", "minimum": -100, "maximum": 0,
                        "description": "Minimum mean log-probability of the last `window` drawn tokens."},
                    "window": {"type": "integer", "minimum": 1, "maximum": 4096, "default": 16,
                        "description": "Number of tokens in the mean of `mean_logprob`."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        const RULES: [&str; 5] = ["tokens", "sentences", "regex", "repeated_lines", "mean_logprob"];
        let known = [&RULES[..], &["window"]].concat();
        let fields = ConfigFields::parse(config, &known)?;
        if RULES.iter().all(|rule| fields.get(rule).is_none()) {
            return Err(format!("no rule is set; at least one of {} is required", RULES.join(", ")));
        }
        let count = |name: &str, range: std::ops::RangeInclusive<usize>| {
            fields.get(name).map(|_| fields.count(name, range, 0)).transpose()
        };
        let expression = fields.text("regex")?.map(|text| {
            regex::bytes::RegexBuilder::new(text)
                .size_limit(MAX_REGEX_BYTES)
                .dfa_size_limit(MAX_REGEX_BYTES)
                .build()
                .map_err(|error| {
                    // The last line has the error, the lines before it show the position.
                    let message = error.to_string();
                    let reason = message.lines().last().unwrap_or_default().trim_start_matches("error: ");
                    format!("`regex` is not a valid regular expression: {reason}")
                })
        });
        let expression = expression.transpose()?;
        if expression.as_ref().is_some_and(|expression| expression.is_match(b"")) {
            return Err("`regex` matches the empty string, so every answer would end before it begins".into());
        }
        let min_mean_logprob =
            fields.get("mean_logprob").map(|_| fields.number("mean_logprob", -100.0..=0.0, 0.0)).transpose()?;
        Ok(Box::new(Rules {
            tokens: count("tokens", 1..=1_000_000)?,
            sentences: count("sentences", 1..=100_000)?,
            expression,
            repeated_lines: count("repeated_lines", 2..=1000)?,
            min_mean_logprob: min_mean_logprob.map(f64::from),
            window: fields.count("window", 1..=4096, 16)?,
            end: end_token(run)?,
            tracker: SequenceTracker::default(),
            answer: AnswerText::new(run),
            reasoning: None,
            states: vec![CheckState::default()],
        }))
    }
}

struct Rules {
    tokens: Option<usize>,
    sentences: Option<usize>,
    expression: Option<Regex>,
    repeated_lines: Option<usize>,
    min_mean_logprob: Option<f64>,
    window: usize,
    end: TokenId,
    tracker: SequenceTracker,
    answer: AnswerText,
    reasoning: Option<ReasoningState>,
    /// State after each token of the answer; the first entry is the state before the first token.
    states: Vec<CheckState>,
}

#[derive(Debug, Clone, Copy, Default)]
struct CheckState {
    /// Number of bytes that were checked.
    bytes: usize,
    sentences: SentenceDetector,
    lines: Lines,
    /// Sum of the log-probabilities of sampled tokens, and their number.
    logprobs: (f64, usize),
    met: Option<RuleMatch>,
}

/// A rule that is met, and the byte at which the answer ends.
#[derive(Debug, Clone, Copy)]
struct RuleMatch {
    rule: &'static str,
    end: usize,
}

/// Positions of lines in the text.
#[derive(Debug, Clone, Copy, Default)]
struct Lines {
    /// Start of the current line.
    from: usize,
    /// Start and end of the last line that is not empty.
    last: (usize, usize),
    /// Consecutive occurrences of the last line.
    times: usize,
}

impl Lines {
    /// Ends a line before the byte `at`.
    fn end(&mut self, text: &[u8], at: usize) {
        let line = text[self.from..at].trim_ascii();
        self.from = at + 1;
        if line.is_empty() {
            return;
        }
        let is_repetition = &text[self.last.0..self.last.1] == line;
        self.times = if is_repetition { self.times + 1 } else { 1 };
        let from = at - text[..at].iter().rev().take_while(|byte| byte.is_ascii_whitespace()).count() - line.len();
        self.last = (from, from + line.len());
    }
}

impl Rules {
    fn update(&mut self, call: &Call<'_>) {
        let delta = self.tracker.update(call);
        let kept = self.answer.apply(&delta, &call.run.vocabulary);
        let reasoning = self.reasoning.get_or_insert_with(|| ReasoningState::new(call, None));
        reasoning.apply(&delta, &self.answer, kept);
        let before = self.answer.token_count() - delta.added.len();
        let state = self.states.get(before).or(self.states.last()).copied().unwrap_or_default();
        self.states.resize(before + 1, state);
        let forced = matches!(call.event, CallEvent::Added { forced: true, .. });
        for (index, logprob) in delta.logprobs_or_none().enumerate() {
            let mut state = self.states.last().copied().unwrap_or_default();
            if let (false, Some(logprob)) = (forced, logprob) {
                state.logprobs = (state.logprobs.0 + f64::from(logprob), state.logprobs.1 + 1);
            }
            self.check(&mut state, before + index + 1);
            self.states.push(state);
        }
    }

    /// Checks the rules after the first `tokens` tokens of the answer.
    fn check(&self, state: &mut CheckState, tokens: usize) {
        let end = self.answer.end_of(tokens);
        let Some(reasoning) = self.reasoning.as_ref().filter(|reasoning| !reasoning.is_within()) else {
            state.bytes = end;
            return;
        };
        if state.met.is_some() || reasoning.may_begin() {
            return;
        }
        let (answer_from, reasoning_tokens) = reasoning.answer_from();
        if state.bytes < answer_from {
            state.bytes = answer_from.min(end);
            state.lines = Lines { from: state.bytes, last: (state.bytes, state.bytes), times: 0 };
        }
        let text = &self.answer.bytes()[..end];
        let from = state.bytes;
        let complete = from + complete_prefix(&text[from..]);
        for (at, c) in characters(text, from, complete) {
            let sentence = state.sentences.push(c, at);
            if let (Some(end), true) = (sentence, self.sentences.is_some_and(|max| state.sentences.count >= max)) {
                state.met = Some(RuleMatch { rule: "sentences", end });
                return;
            }
            if c == '\n' {
                state.lines.end(text, at);
                if self.repeated_lines.is_some_and(|max| state.lines.times >= max) {
                    state.met = Some(RuleMatch { rule: "repeated_lines", end: at });
                    return;
                }
            }
        }
        state.bytes = complete;
        let start = answer_from.max(from.saturating_sub(MAX_MATCH_BYTES)).min(end);
        let found = self.expression.as_ref().and_then(|expression| expression.find_at(text, start));
        let (sum, count) = state.logprobs;
        let unsure = self.min_mean_logprob.is_some_and(|min| {
            let earlier = tokens.checked_sub(self.window).map(|earlier| self.states[earlier].logprobs);
            earlier.is_some_and(|(before, drawn)| {
                count - drawn == self.window && (sum - before) / (self.window as f64) < min
            })
        });
        state.met = match found {
            Some(found) => Some(RuleMatch { rule: "regex", end: found.end() }),
            None if unsure => Some(RuleMatch { rule: "mean_logprob", end }),
            None if self.tokens.is_some_and(|max| tokens.saturating_sub(reasoning_tokens) >= max) => {
                Some(RuleMatch { rule: "tokens", end })
            }
            None => None,
        };
    }
}

/// Returns the characters of a range of text, which ends at a character boundary, with their positions; invalid bytes
/// become replacement characters.
fn characters(text: &[u8], from: usize, end: usize) -> impl Iterator<Item = (usize, char)> {
    let mut at = from;
    text[from..end].utf8_chunks().flat_map(move |chunk| {
        let begins = at;
        at += chunk.valid().len() + chunk.invalid().len();
        let broken =
            (!chunk.invalid().is_empty()).then_some((begins + chunk.valid().len(), char::REPLACEMENT_CHARACTER));
        chunk.valid().char_indices().map(move |(index, c)| (begins + index, c)).chain(broken)
    })
}

impl ModInstance for Rules {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::Added])
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        self.update(call);
        let CallEvent::Added { tokens, .. } = call.event else { return Some(Reply::noop()) };
        let ended = tokens.last().is_some_and(|&last| ends_answer(call.run, last));
        let Some(met) = self.states.last().and_then(|state| state.met).filter(|_| !ended) else {
            return Some(Reply::noop());
        };
        let cut = self.answer.cut(met.end);
        let mut tokens = call.run.vocabulary.encode_continuation(&cut.before, false);
        tokens.push(self.end);
        let action = match u32::try_from(cut.tokens).unwrap_or(u32::MAX) {
            0 => Action::ForceTokens(tokens),
            n => Action::Backtrack { n, tokens },
        };
        let logs = vec![ModLogLine { level: LogLevel::Info, message: format!("answer ended by rule '{}'", met.rule) }];
        Some(Reply { action: Some(action), logs, ..Reply::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::StopRules;
    use crate::mods::ModFactory;
    use crate::mods::builtin::testing::{Simulation, SimulationResult, run};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn simulate(script: &str, rules: Value) -> SimulationResult {
        Simulation { script: script.into(), max_tokens: 200, ..Simulation::default() }.run_mods(&[(&StopRules, rules)])
    }

    #[test]
    fn each_rule_ends_answer() {
        for (script, rules, text, rule) in [
            ("Hello the bad idea", json!({"tokens": 2}), "Hello the", "tokens"),
            ("One two. Three! Four? Five", json!({"sentences": 2}), "One two. Three!", "sentences"),
            ("One two.\n\nThree!", json!({"sentences": 1}), "One two.", "sentences"),
            ("abc 42 def", json!({"regex": "[0-9]{2}"}), "abc 42", "regex"),
            ("a very bad idea", json!({"regex": "ve"}), "a ve", "regex"),
            ("x\n- a\n- a \n\n- a\nb", json!({"repeated_lines": 3}), "x\n- a\n- a \n\n- a", "repeated_lines"),
        ] {
            let result = simulate(script, rules);
            assert_eq!((result.text.as_str(), result.ended, result.retracted), (text, true, 0), "{result:?}");
            assert_eq!(result.logs, [format!("answer ended by rule '{rule}'")]);
        }
    }

    #[test]
    fn non_adjacent_lines_may_repeat() {
        let result = simulate("}\na\n}\nb\n}\n", json!({"repeated_lines": 2, "regex": "b\\n}"}));
        assert_eq!(result.text, "}\na\n}\nb\n}");
    }

    #[test]
    fn unsure_model_ends_answer() {
        let result = simulate("Hello the bad idea", json!({"mean_logprob": -1.0, "window": 3}));
        assert!(result.text.starts_with("Hello the bad idea") && result.tokens.len() < 10, "{result:?}");
    }

    #[test]
    fn reasoning_does_not_count() {
        let result =
            simulate("<think>One. Two. Three.</think>Four. Five. Six. ", json!({"sentences": 2, "tokens": 100}));
        assert_eq!(result.text, "<think>One. Two. Three.</think>Four. Five.");
        let result = simulate("<think>abcdef</think>abcdef", json!({"tokens": 3}));
        assert_eq!(result.text, "<think>abcdef</think>abc");
    }

    #[test]
    fn errors_name_field() {
        for (config, message) in [
            (
                json!({"window": 3}),
                "no rule is set; at least one of tokens, sentences, regex, repeated_lines, mean_logprob is required",
            ),
            (json!({"tokens": 0}), "`tokens` must be an integer from 1 to 1000000, got 0"),
            (json!({"regex": "("}), "`regex` is not a valid regular expression: unclosed group"),
            (json!({"regex": "a*"}), "`regex` matches the empty string, so every answer would end before it begins"),
            (json!({"mean_logprob": 1}), "`mean_logprob` must be a number from -100 to 0, got 1"),
        ] {
            assert_eq!(StopRules.start(&config, &run()).err().unwrap(), message);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn answer_ends_after_first_match(seed: u64) {
            let result = Simulation { seed, alphabet: "abc. ", max_tokens: 60, ..Simulation::default() }
                .run_mods(&[(&StopRules, json!({"regex": "b[ac]", "sentences": 3}))]);
            let first = ["ba", "bc"].iter().filter_map(|pair| result.text.find(pair)).min();
            if let Some(at) = first {
                prop_assert_eq!(at + 2, result.text.len());
            }
            prop_assert_eq!(result.retracted, 0);
        }
    }
}
