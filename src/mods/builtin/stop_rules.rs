//! `stop-rules`: ends the answer by rules, for limits that stop strings cannot express.

use super::describe;
use super::support::{
    answer_tracker::AnswerTracker,
    config::{self, schema},
    sentences::SentenceDetector,
    sequence::end_token,
};
use crate::events::{EventType, LogLevel, TokenId};
use crate::model::complete_prefix;
use crate::mods::{
    Action, Call, CallEvent, EventSet, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use regex::bytes::{Regex, RegexBuilder};
use serde::Deserialize;
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
            "At least one rule is required. The first rule that is met ends the run with the finish reason `stop` and is logged. The \
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
        let rules: RulesConfig = config::parse(self, config)?;
        if rules.is_empty() {
            return Err(
                "no rule is set; at least one of tokens, sentences, regex, repeated_lines, mean_logprob is required"
                    .into(),
            );
        }
        let expression = rules.regex.as_deref().map(compile).transpose()?;
        Ok(Box::new(Rules {
            rules,
            expression,
            end: end_token(run)?,
            answer: AnswerTracker::new(run, None),
            states: vec![CheckState::default()],
        }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RulesConfig {
    tokens: Option<usize>,
    sentences: Option<usize>,
    regex: Option<String>,
    repeated_lines: Option<usize>,
    mean_logprob: Option<f64>,
    window: usize,
}

impl RulesConfig {
    fn is_empty(&self) -> bool {
        let Self { tokens, sentences, regex, repeated_lines, mean_logprob, .. } = self;
        let has_count = [tokens, sentences, repeated_lines].iter().any(|rule| rule.is_some());
        !has_count && regex.is_none() && mean_logprob.is_none()
    }
}

/// Compiles the expression of a rule.
fn compile(text: &str) -> Result<Regex, String> {
    let expression = RegexBuilder::new(text).size_limit(MAX_REGEX_BYTES).dfa_size_limit(MAX_REGEX_BYTES).build();
    let expression = expression.map_err(|error| {
        // The last line has the error, the lines before it show the position.
        let message = error.to_string();
        let reason = message.lines().last().unwrap_or_default().trim_start_matches("error: ");
        format!("`regex` is not a valid regular expression: {reason}")
    })?;
    if expression.is_match(b"") {
        return Err("`regex` matches the empty string, so every answer would end before it begins".into());
    }
    Ok(expression)
}

struct Rules {
    rules: RulesConfig,
    expression: Option<Regex>,
    end: TokenId,
    answer: AnswerTracker,
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
        let delta = self.answer.update(call);
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
        let end = self.answer.text().end_of(tokens);
        let Some(reasoning) = self.answer.reasoning().filter(|reasoning| !reasoning.is_within()) else {
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
        let text = &self.answer.text().bytes()[..end];
        let from = state.bytes;
        let complete = from + complete_prefix(&text[from..]);
        for (at, c) in characters(text, from, complete) {
            let sentence = state.sentences.push(c, at);
            if let (Some(end), true) = (sentence, self.rules.sentences.is_some_and(|max| state.sentences.count >= max))
            {
                state.met = Some(RuleMatch { rule: "sentences", end });
                return;
            }
            if c == '\n' {
                state.lines.end(text, at);
                if self.rules.repeated_lines.is_some_and(|max| state.lines.times >= max) {
                    state.met = Some(RuleMatch { rule: "repeated_lines", end: at });
                    return;
                }
            }
        }
        state.bytes = complete;
        let start = answer_from.max(from.saturating_sub(MAX_MATCH_BYTES)).min(end);
        let found = self.expression.as_ref().and_then(|expression| expression.find_at(text, start));
        let (sum, count) = state.logprobs;
        let unsure = self.rules.mean_logprob.is_some_and(|min| {
            let earlier = tokens.checked_sub(self.rules.window).map(|earlier| self.states[earlier].logprobs);
            earlier.is_some_and(|(before, drawn)| {
                count - drawn == self.rules.window && (sum - before) / (self.rules.window as f64) < min
            })
        });
        state.met = match found {
            Some(found) => Some(RuleMatch { rule: "regex", end: found.end() }),
            None if unsure => Some(RuleMatch { rule: "mean_logprob", end }),
            None if self.rules.tokens.is_some_and(|max| tokens.saturating_sub(reasoning_tokens) >= max) => {
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
        let is_added = matches!(call.event, CallEvent::Added { .. });
        let met = self.states.last().and_then(|state| state.met).filter(|_| is_added && !call.ends_answer());
        let Some(met) = met else { return Some(Reply::noop()) };
        let cut = self.answer.text().cut(met.end);
        let mut tokens = call.run.vocabulary.encode_plain_continuation(&cut.before);
        tokens.push(self.end);
        let action = match cut.tokens {
            0 => Action::ForceTokens(tokens),
            count => Action::backtrack(count, tokens),
        };
        Some(Reply::from(action).with_log(LogLevel::Info, format!("answer ended by rule '{}'", met.rule)))
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
