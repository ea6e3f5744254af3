//! llama-server's JSON of a run: the whole answer, and the pieces of a stream.

use super::ask::Answer;
use super::settings::settings;
use crate::api::generation::runs::StartedRun;
use crate::api::generation::{self, ProbabilityFormatter, SentTokens};
use crate::engine::{Limits, PromptProgress, Request, SamplingParams};
use crate::events::{Alternative, Finish, FinishReason, RunEnd, RunId, TokenMeasurement};
use crate::model::Vocabulary;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// What llama-server writes for the logarithm of 0: JSON has no infinity.
const NO_LOGPROB: f32 = f32::MIN;

/// A run, and what of its answer was told so far.
pub(super) struct Line {
    index: usize,
    run: StartedRun,
    vocabulary: Arc<Vocabulary>,
    model: String,
    prompt: String,
    sampling: SamplingParams,
    limits: Limits,
    answer: Answer,
    told: SentTokens,
    generated: usize,
}

/// What is needed of a request after it was handed over.
pub(super) struct Kept {
    prompt: String,
    sampling: SamplingParams,
    limits: Limits,
}

impl Kept {
    pub(super) fn of(request: &Request, vocabulary: &Vocabulary) -> Self {
        let (mut sampling, limits) = (request.sampling.clone(), request.limits.clone());
        if limits.ignore_eos {
            let bans = vocabulary.end_of_generation().iter().map(|&token| (token, f32::NEG_INFINITY));
            sampling.logit_bias.extend(bans);
        }
        Self { prompt: vocabulary.decode(&request.prompt), sampling, limits }
    }
}

impl Line {
    pub(super) fn new(
        index: usize,
        run: StartedRun,
        kept: Kept,
        answer: Answer,
        vocabulary: Arc<Vocabulary>,
        model: String,
    ) -> Self {
        let Kept { prompt, sampling, limits } = kept;
        Self {
            index,
            run,
            vocabulary,
            model,
            prompt,
            sampling,
            limits,
            answer,
            told: SentTokens::default(),
            generated: 0,
        }
    }

    pub(super) fn run_id(&self) -> RunId {
        self.run.id
    }

    /// Takes what was appended.
    pub(super) fn add(&mut self, delta: crate::engine::TextDelta) {
        self.generated += delta.tokens.len();
        self.told.add(delta);
    }

    /// Takes what was taken back.
    pub(super) fn retract(&mut self, tokens: usize) {
        self.told.retract(tokens);
        self.generated = self.generated.saturating_sub(tokens);
    }

    /// The piece of a stream that these tokens are.
    pub(super) fn piece(&mut self, delta: crate::engine::TextDelta) -> Value {
        let tokens: Vec<_> = delta.tokens.iter().map(|(measure, _)| measure.token).collect();
        self.generated += tokens.len();
        let mut piece = self.partial(&delta.text, json!(tokens));
        if self.answer.n_probs > 0 {
            piece.insert("completion_probabilities".into(), self.probabilities(&delta.tokens));
        }
        // What was sent is not needed again, but for its end.
        self.told.tokens = delta
            .tokens
            .into_iter()
            .next_back()
            .map_or_else(|| std::mem::take(&mut self.told.tokens), |last| vec![last]);
        Value::Object(piece)
    }

    /// The piece of a stream that says how far the prompt is.
    pub(super) fn progress(&self, progress: PromptProgress) -> Value {
        let mut piece = self.partial("", json!([]));
        piece.insert("prompt_progress".into(), generation::prompt_progress(progress));
        if self.answer.timings_per_token {
            piece.insert("timings".into(), generation::prompt_timings(progress));
        }
        Value::Object(piece)
    }

    /// The piece of a stream that voids the last characters of what was sent.
    pub(super) fn retraction(&mut self, chars: usize) -> Value {
        let mut piece = self.partial("", json!([]));
        piece.insert("thunder".into(), json!({ "retract": { "chars": chars } }));
        Value::Object(piece)
    }

    fn partial(&self, content: &str, tokens: Value) -> Map<String, Value> {
        let prompt = self.run.metrics.prompt.get();
        let mut piece = Map::new();
        piece.insert("index".into(), self.index.into());
        piece.insert("content".into(), content.into());
        piece.insert("tokens".into(), tokens);
        piece.insert("stop".into(), false.into());
        piece.insert("id_slot".into(), self.slot());
        piece.insert("tokens_predicted".into(), self.generated.into());
        piece.insert("tokens_evaluated".into(), prompt.map_or(0, |prompt| prompt.tokens).into());
        if let (true, Some(prompt)) = (self.answer.timings_per_token, prompt) {
            piece.insert("timings".into(), generation::partial_timings(prompt, self.generated as u32));
        }
        piece
    }

    fn slot(&self) -> Value {
        self.run.metrics.slot.get().map_or(json!(-1), |slot| json!(slot))
    }

    /// The end of a stream, or, where nothing was streamed, the whole answer.
    pub(super) fn last(&self, end: &RunEnd) -> Value {
        let (finish, usage) = (&end.finish, end.finish.usage);
        let ended_by_token = finish.reason == FinishReason::Stop
            && finish.stop_string.is_none()
            && self.told.tokens.last().is_some_and(|(measure, _)| self.ends(measure));
        let predicted = usage.completion_tokens + u32::from(ended_by_token);
        let stream = self.answer.stream;
        let returns_tokens = self.answer.return_tokens && !stream;
        let tokens: Vec<_> = if returns_tokens {
            self.told.tokens.iter().map(|(measure, _)| measure.token).collect()
        } else {
            Vec::new()
        };
        let Value::Object(mut last) = json!({
            "index": self.index,
            "content": if stream { "" } else { finish.text.as_str() },
            "tokens": tokens,
            "id_slot": self.slot(),
            "stop": true,
            "model": self.model,
            "tokens_predicted": predicted,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": settings(&self.sampling, &self.limits, &self.answer),
            "prompt": self.prompt,
            "has_new_line": finish.text.contains('\n'),
            "truncated": self.is_truncated(finish),
            "stop_type": stop_type(finish),
            "stopping_word": finish.stop_string.as_deref().unwrap_or_default(),
            "tokens_cached": (usage.prompt_tokens + predicted)
                .saturating_sub(u32::from(predicted > 0) + generation::shifted_tokens(finish)),
            "timings": generation::timings_with(finish, predicted),
        }) else {
            return Value::Null;
        };
        if !stream && self.answer.n_probs > 0 {
            last.insert("completion_probabilities".into(), self.probabilities(&self.told.tokens));
        }
        last.insert("thunder".into(), json!({ "run_id": self.run.id, "replay": format!("/runs/{}", self.run.id) }));
        if self.answer.response_fields.is_empty() { Value::Object(last) } else { self.chosen(&Value::Object(last)) }
    }

    fn ends(&self, measure: &TokenMeasurement) -> bool {
        self.vocabulary.is_end_of_generation(measure.token) || self.limits.stop_tokens.contains(&measure.token)
    }

    /// Whether the context ended the answer before anything that was asked for.
    fn is_truncated(&self, finish: &Finish) -> bool {
        let asked = u32::try_from(self.answer.n_predict).unwrap_or(u32::MAX);
        finish.truncated
            || finish.reason == FinishReason::Length
                && finish.usage.completion_tokens < asked
                && finish.usage.completion_tokens >= self.limits.max_tokens
    }

    /// Only what `response_fields` names, under the paths it uses.
    fn chosen(&self, whole: &Value) -> Value {
        let mut chosen = Map::new();
        for path in &self.answer.response_fields {
            let found = path.split('/').try_fold(whole, |value, name| value.get(name));
            if let Some(value) = found {
                chosen.insert(path.clone(), value.clone());
            }
        }
        Value::Object(chosen)
    }

    fn probabilities(&self, tokens: &[(TokenMeasurement, Vec<Alternative>)]) -> Value {
        let told = ProbabilityFormatter {
            vocabulary: &self.vocabulary,
            top: self.answer.n_probs,
            after_sampler: self.answer.post_sampling,
            no_logprob: NO_LOGPROB,
        };
        tokens.iter().map(|(measure, others)| told.drawn_token(measure, others)).collect()
    }
}

fn stop_type(finish: &Finish) -> &'static str {
    match finish.reason {
        FinishReason::Length => "limit",
        FinishReason::Stop if finish.stop_string.is_some() => "word",
        FinishReason::Stop | FinishReason::ToolCalls => "eos",
        FinishReason::Cancelled | FinishReason::Error => "none",
    }
}
