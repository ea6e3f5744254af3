//! The JSON of answers and chunks: what all of them have in common, and log-probabilities in both of OpenAI's forms.

use super::wire::{Answer, Route};
use crate::engine::Delta;
use crate::events::{Alternative, FinishReason, RunId, TokenMeasure, Usage};
use crate::model::Vocabulary;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// OpenAI's word for "no probability to speak of".
const NO_LOGPROB: f32 = -9999.0;

/// What every chunk and answer of a run repeats.
#[derive(Debug, Clone)]
pub(super) struct Head {
    pub(super) answer: Answer,
    pub(super) run_id: RunId,
    pub(super) model: String,
    pub(super) created: i64,
    pub(super) vocabulary: Arc<Vocabulary>,
}

impl Head {
    /// The object with these choices.
    pub(super) fn object(&self, choices: Value, chunk: bool) -> Map<String, Value> {
        let (id, kind) = match self.answer.route {
            Route::Chat if chunk => ("chatcmpl", "chat.completion.chunk"),
            Route::Chat => ("chatcmpl", "chat.completion"),
            Route::Completions => ("cmpl", "text_completion"),
        };
        let mut object = Map::new();
        object.insert("id".into(), format!("{id}-{}", self.run_id).into());
        object.insert("object".into(), kind.into());
        object.insert("created".into(), self.created.into());
        object.insert("model".into(), self.model.clone().into());
        object.insert("system_fingerprint".into(), concat!("thunder-", env!("CARGO_PKG_VERSION")).into());
        object.insert("choices".into(), choices);
        object
    }

    /// Where the run can be looked at.
    pub(super) fn thunder(&self) -> Value {
        json!({ "run_id": self.run_id, "replay": format!("/runs/{}", self.run_id) })
    }

    /// The log-probabilities of these tokens, where they were asked for; `offset` is the length in characters of the
    /// answer before them.
    pub(super) fn logprobs(&self, tokens: &[(TokenMeasure, Vec<Alternative>)], offset: usize) -> Value {
        let Some(top) = self.answer.logprobs.filter(|_| !tokens.is_empty()) else { return Value::Null };
        match self.answer.route {
            Route::Chat => {
                let content: Vec<Value> =
                    tokens.iter().map(|(measure, alternatives)| self.entry(measure, alternatives, top)).collect();
                json!({ "content": content, "refusal": null })
            }
            Route::Completions => legacy(tokens, top, offset),
        }
    }

    fn entry(&self, measure: &TokenMeasure, alternatives: &[Alternative], top: usize) -> Value {
        let others: Vec<Value> = alternatives
            .iter()
            .take(top)
            .map(|other| {
                let bytes = self.vocabulary.piece(other.token);
                json!({ "id": other.token, "token": other.text, "bytes": bytes, "logprob": ln(other.prob) })
            })
            .collect();
        json!({
            "id": measure.token,
            "token": String::from_utf8_lossy(self.vocabulary.piece(measure.token)),
            "bytes": self.vocabulary.piece(measure.token),
            "logprob": measure.logprob.unwrap_or(NO_LOGPROB),
            "top_logprobs": others,
        })
    }
}

/// The form of the older route: four lists of equal length.
fn legacy(tokens: &[(TokenMeasure, Vec<Alternative>)], top: usize, mut offset: usize) -> Value {
    let (mut texts, mut values, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (measure, alternatives) in tokens {
        texts.push(json!(measure.text));
        values.push(json!(measure.logprob.unwrap_or(NO_LOGPROB)));
        let others: Map<String, Value> =
            alternatives.iter().take(top).map(|other| (other.text.clone(), json!(ln(other.prob)))).collect();
        tops.push(Value::Object(others));
        offsets.push(json!(offset));
        offset += measure.text.chars().count();
    }
    json!({ "tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets })
}

fn ln(probability: f32) -> f32 {
    if probability > 0.0 { probability.ln() } else { NO_LOGPROB }
}

/// Removes the last `chars` characters' tokens from what was collected.
pub(super) fn retract(collected: &mut Vec<(TokenMeasure, Vec<Alternative>)>, chars: usize) {
    let mut left = chars;
    while left > 0 {
        let Some((measure, _)) = collected.pop() else { return };
        left = left.saturating_sub(measure.text.chars().count());
    }
}

/// Adds a delta's tokens to what was collected, when log-probabilities were asked for.
pub(super) fn collect(answer: Answer, collected: &mut Vec<(TokenMeasure, Vec<Alternative>)>, delta: Delta) {
    if answer.logprobs.is_some() {
        collected.extend(delta.tokens);
    }
}

/// The finish reason as OpenAI has it.
pub(super) fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::Stop | FinishReason::Cancelled | FinishReason::Error => "stop",
    }
}

/// Token counts.
pub(super) fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": { "cached_tokens": usage.cached_tokens },
    })
}
