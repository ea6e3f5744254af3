//! `stop-on-repetition`: ends an answer that repeats itself, for models that fall into loops.

use super::describe;
use super::support::{
    config::{self, schema},
    sequence::end_token,
};
use crate::events::{EventType, LogLevel, TokenId};
use crate::mods::{Action, Call, EventSet, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `stop-on-repetition`: ends an answer that repeats itself.
pub struct StopOnRepetition;

impl ModFactory for StopOnRepetition {
    fn describe(&self) -> ModDescription {
        describe(
            "stop-on-repetition",
            "Ends an answer that repeats itself.",
            "When the last `ngram` × `times` tokens of the answer repeat one block of at most `ngram` tokens, an \
             end-of-generation token is forced and the run ends with the finish reason `stop`. The repeated text is kept, since a client has \
             already read it; with `cut`, all blocks except the first are removed, and the stream is delayed by `ngram` × `times` tokens.",
            json!({"ngram": 16, "times": 3, "cut": false}),
            schema(
                &[],
                json!({
                    "ngram": {"type": "integer", "minimum": 1, "maximum": 256, "default": 16,
                        "description": "Maximum tokens of the repeated block."},
                    "times": {"type": "integer", "minimum": 2, "maximum": 64, "default": 3,
                        "description": "Number of occurrences of a block of `ngram` tokens that ends the answer; shorter blocks must repeat for as many tokens."},
                    "cut": {"type": "boolean", "default": false,
                        "description": "True if all blocks except the first are removed."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, run: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        let RepetitionConfig { ngram, times, cut } = config::parse(self, config)?;
        Ok(Box::new(Repetition { ngram, times, cut, end: end_token(run)? }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RepetitionConfig {
    ngram: usize,
    times: usize,
    cut: bool,
}

struct Repetition {
    ngram: usize,
    times: usize,
    cut: bool,
    end: TokenId,
}

impl Repetition {
    /// Returns the length of the shortest block that the end of `generated` repeats.
    fn block(&self, generated: &[TokenId]) -> Option<usize> {
        let start = generated.len().checked_sub(self.ngram * self.times)?;
        let tail = &generated[start..];
        (1..=self.ngram).find(|&block| tail[block..].iter().rev().eq(tail[..tail.len() - block].iter().rev()))
    }
}

impl ModInstance for Repetition {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::Added])
    }

    fn holdback(&self) -> usize {
        if self.cut { self.ngram * self.times } else { 0 }
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        let Some(block) = self.block(call.generated_in_context()) else { return Some(Reply::noop()) };
        let repeated = self.ngram * self.times;
        let text = call.run.vocabulary.decode(&call.sequence[call.sequence.len() - block..]);
        let message = format!("the last {repeated} tokens repeat {text:?}; the answer ends here");
        let action = if self.cut {
            Action::backtrack(repeated - block, vec![self.end])
        } else {
            Action::ForceTokens(vec![self.end])
        };
        Some(Reply::from(action).with_log(LogLevel::Warning, message))
    }
}

#[cfg(test)]
mod tests {
    use super::StopOnRepetition;
    use crate::mods::Action;
    use crate::mods::builtin::testing::{EOG, ModHarness};
    use serde_json::json;

    #[test]
    fn repetition_up_to_ngram_ends_answer() {
        for block in ["x", "ab", "abc", "abcd"] {
            let mut harness = ModHarness::new(&StopOnRepetition, &json!({"ngram": 4, "times": 3}));
            assert!(harness.write_text("Well: ").is_none());
            let looped = block.repeat(12);
            assert!(harness.write_text(&looped[..11]).is_none(), "{block}");
            let reply = harness.write_text(&looped[11..12]).expect("the loop is noticed");
            assert_eq!(reply.action, Some(Action::ForceTokens(vec![EOG])));
            assert!(reply.logs[0].message.starts_with("the last 12 tokens repeat "));
        }
    }

    #[test]
    fn longer_blocks_and_prompt_are_ignored() {
        let mut harness = ModHarness::new(&StopOnRepetition, &json!({"ngram": 4, "times": 3}));
        assert!(harness.write_text(&"abcde".repeat(6)).is_none());
        let mut harness = ModHarness::new(&StopOnRepetition, &json!({"ngram": 1, "times": 3}));
        assert!(harness.write_text("  ").is_none(), "the prompt ends with a space");
    }

    #[test]
    fn cut_keeps_the_first_block() {
        let mut harness = ModHarness::new(&StopOnRepetition, &json!({"ngram": 3, "times": 2, "cut": true}));
        assert_eq!(harness.instance.holdback(), 6);
        let reply = harness.write_text("So:abcabc").expect("the loop is noticed");
        assert_eq!(reply.action, Some(Action::Backtrack { n: 3, tokens: vec![EOG] }));
        assert_eq!(harness.text(), "So:abc<end>");
    }
}
