//! `retry-low-confidence`: samples improbable passages again, for answers in which the model must be certain.

use super::describe;
use super::support::{
    config::{self, schema},
    sequence::SequenceTracker,
};
use crate::events::{EventType, LogLevel, TokenId};
use crate::mods::{
    Action, Call, CallEvent, EventSet, LogitEdit, ModDescription, ModFactory, ModInstance, Reply, ReplySender, RunView,
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;

/// `retry-low-confidence`: samples low-confidence tokens again and keeps the best attempt.
pub struct RetryLowConfidence;

impl ModFactory for RetryLowConfidence {
    fn describe(&self) -> ModDescription {
        describe(
            "retry-low-confidence",
            "Draws low-confidence tokens again and keeps the best attempt.",
            "When the mean log-probability of the last `window` drawn tokens is below `mean_logprob`, they are removed and drawn \
             again at `temperature`, until the mean is high enough or `tries` is reached; then the best attempt is kept. A kept \
             attempt is final, so a run draws up to 1 + `tries` times the tokens of its answer. Forced tokens are not changed. \
             The stream is delayed by up to `window` tokens.",
            json!({"window": 8, "mean_logprob": -2.5, "tries": 3}),
            schema(
                &[],
                json!({
                    "window": {"type": "integer", "minimum": 1, "maximum": 256, "default": 8,
                        "description": "Number of tokens that are evaluated and removed together."},
                    "mean_logprob": {"type": "number", "minimum": -100, "maximum": 0, "default": -2.5,
                        "description": "Minimum mean of their natural log-probabilities, in the model's full distribution."},
                    "tries": {"type": "integer", "minimum": 1, "maximum": 32, "default": 3,
                        "description": "Maximum additional attempts per window."},
                    "temperature": {"type": "number", "minimum": 0, "maximum": 10, "default": 1.0,
                        "description": "Temperature of the retries; at 0 all attempts are equal."},
                }),
            ),
        )
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(Retry {
            config: config::parse(self, config)?,
            tracker: SequenceTracker::default(),
            sums: vec![0.0],
            final_tokens: 0,
            retry: None,
        }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RetryConfig {
    window: usize,
    mean_logprob: f64,
    tries: usize,
    temperature: f32,
}

struct Retry {
    config: RetryConfig,
    tracker: SequenceTracker,
    /// Cumulative log-probabilities of the tokens of the answer.
    sums: Vec<f64>,
    /// Number of tokens that are final.
    final_tokens: usize,
    /// Window that is being sampled again.
    retry: Option<RetryWindow>,
}

struct RetryWindow {
    /// Tokens before the window.
    at: usize,
    /// Attempts with their mean log-probability.
    attempts: Vec<(Vec<TokenId>, f64)>,
}

impl Retry {
    fn update(&mut self, call: &Call<'_>) {
        let delta = self.tracker.update(call);
        let kept = self.tracker.token_count() - delta.added.len();
        let mut sum = self.sums.get(kept).or(self.sums.last()).copied().unwrap_or(0.0);
        self.sums.resize(kept + 1, sum);
        for logprob in delta.logprobs_or_none() {
            sum += f64::from(logprob.unwrap_or(0.0));
            self.sums.push(sum);
        }
        self.final_tokens = self.final_tokens.min(kept);
        if self.retry.as_ref().is_some_and(|retry| retry.at > kept) {
            self.retry = None;
        }
    }

    fn mean(&self, from: usize) -> f64 {
        let length = self.tracker.token_count();
        (self.sums[length] - self.sums[from]) / (length - from) as f64
    }

    fn added(&mut self, call: &Call<'_>) -> Reply {
        let length = self.tracker.token_count();
        let at = match &self.retry {
            Some(retry) if length >= retry.at + self.config.window || call.is_last_event() => retry.at,
            None if length >= self.final_tokens + self.config.window
                && self.mean(length - self.config.window) < self.config.mean_logprob =>
            {
                length - self.config.window
            }
            _ => return Reply::noop(),
        };
        let mean = self.mean(at);
        let mut retry = self.retry.take().unwrap_or(RetryWindow { at, attempts: Vec::new() });
        if mean >= self.config.mean_logprob {
            self.final_tokens = length;
            let message = format!("mean log-probability {mean:.2} after {} tries", retry.attempts.len());
            return Reply::noop().with_log(LogLevel::Info, message);
        }
        let generated = call.generated_in_context();
        let count = (length - at).min(generated.len());
        retry.attempts.push((generated[generated.len() - count..].to_vec(), mean));
        if retry.attempts.len() <= self.config.tries {
            self.retry = Some(retry);
            let message = format!("mean log-probability {mean:.2}: retrying");
            return Reply::from(Action::backtrack(count, Vec::new())).with_log(LogLevel::Info, message);
        }
        self.final_tokens = length;
        let last = retry.attempts.len() - 1;
        let better =
            |best: usize, other: usize| if retry.attempts[other].1 > retry.attempts[best].1 { other } else { best };
        let best = (0..=last).rev().reduce(better).unwrap_or(last);
        let (tokens, mean) = retry.attempts.swap_remove(best);
        let reply = if best == last { Reply::noop() } else { Action::backtrack(count, tokens).into() };
        reply.with_log(LogLevel::Info, format!("mean log-probability {mean:.2} is the best of {}", last + 1))
    }
}

impl ModInstance for Retry {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::ForwardPass, EventType::Added])
    }

    fn holdback(&self) -> usize {
        let length = self.tracker.token_count();
        match &self.retry {
            Some(retry) => length - retry.at,
            None => (length - self.final_tokens).min(self.config.window - 1),
        }
    }

    fn call(&mut self, call: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        self.update(call);
        Some(match call.event {
            CallEvent::Added { forced: true, .. } => {
                self.final_tokens = self.tracker.token_count();
                self.retry = None;
                Reply::noop()
            }
            CallEvent::Added { .. } => self.added(call),
            CallEvent::ForwardPass { .. } if self.retry.is_some() => {
                Action::AdjustedLogits { edit: LogitEdit::Keep, temperature: Some(self.config.temperature) }.into()
            }
            _ => Reply::noop(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::RetryLowConfidence;
    use crate::mods::builtin::testing::Simulation;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn confident_answer_is_unchanged() {
        let result = Simulation { script: "Hello the bad idea".into(), max_tokens: 4, ..Simulation::default() }
            .run_mods(&[(&RetryLowConfidence, json!({"window": 2, "mean_logprob": -1.0}))]);
        assert_eq!((result.text.as_str(), result.controls), ("Hello the bad idea", 0));
    }

    #[test]
    fn unsure_answer_is_retried_and_best_attempt_kept() {
        let result = Simulation { max_tokens: 8, alphabet: "abc", seed: 5, ..Simulation::default() }
            .run_mods(&[(&RetryLowConfidence, json!({"window": 4, "mean_logprob": -0.01, "tries": 2}))]);
        // Two windows, each sampled again twice; if the last attempt was not the best, the best is restored.
        let retries = result.logs.iter().filter(|line| line.ends_with("retrying")).count();
        assert_eq!(retries, 4, "{result:?}");
        assert_eq!(result.logs.iter().filter(|line| line.ends_with("best of 3")).count(), 2);
        assert_eq!((result.tokens.len(), result.retracted), (8, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn retries_stop_and_never_retract_sent_text(
            seed: u64, window in 1usize..9, tries in 1usize..5, min_mean in -6.0..0.0f64,
        ) {
            let config = json!({"window": window, "mean_logprob": min_mean, "tries": tries});
            let result = Simulation { seed, max_tokens: 40, alphabet: "abcd ", ..Simulation::default() }.run_mods(&[(&RetryLowConfidence, config)]);
            prop_assert!(result.ended || result.tokens.len() == 40);
            prop_assert_eq!(result.retracted, 0);
            prop_assert!(result.draws <= (tries + 1) * 40 + window * (tries + 1), "{:?}", result);
        }
    }
}
