//! llama-server's JSON of a run: the complete response and the chunks of a stream.

use crate::api::shared::generation;
use crate::api::shared::generation::runs::StartedRun;
use crate::api::shared::generation::{ProbabilityFormatter, SentTokens};
use crate::api::shared::settings::LlamaResponseOptions;
use crate::api::shared::settings::generation_settings;
use crate::engine::{Limits, PromptProgress, Request, SamplingParams};
use crate::events::{Alternative, Finish, FinishReason, RunEnd, RunId, TokenMeasurement};
use crate::model::Vocabulary;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use utoipa::ToSchema;

/// llama-server's value for the logarithm of 0, because JSON has no infinity.
const NO_LOGPROB: f32 = f32::MIN;

/// The response to a change without a result.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct SuccessResponse {
    /// Always true.
    success: bool,
}

impl Default for SuccessResponse {
    fn default() -> Self {
        Self { success: true }
    }
}

/// A run with the part of its answer that was already sent.
pub(super) struct RunResponse {
    index: usize,
    run: StartedRun,
    vocabulary: Arc<Vocabulary>,
    model: String,
    prompt: String,
    sampling: SamplingParams,
    limits: Limits,
    options: LlamaResponseOptions,
    sent: SentTokens,
    generated: usize,
}

/// The parts of a request that the response needs.
pub(super) struct EchoedRequest {
    prompt: String,
    sampling: SamplingParams,
    limits: Limits,
}

impl EchoedRequest {
    pub(super) fn new(request: &Request, vocabulary: &Vocabulary) -> Self {
        let (mut sampling, limits) = (request.sampling.clone(), request.limits.clone());
        if limits.ignore_eos {
            let bans = vocabulary.end_of_generation().iter().map(|&token| (token, f32::NEG_INFINITY));
            sampling.logit_bias.extend(bans);
        }
        Self { prompt: vocabulary.decode(&request.prompt), sampling, limits }
    }
}

impl RunResponse {
    pub(super) fn new(
        index: usize,
        run: StartedRun,
        echoed: EchoedRequest,
        options: LlamaResponseOptions,
        vocabulary: Arc<Vocabulary>,
        model: String,
    ) -> Self {
        let EchoedRequest { prompt, sampling, limits } = echoed;
        Self {
            index,
            run,
            vocabulary,
            model,
            prompt,
            sampling,
            limits,
            options,
            sent: SentTokens::default(),
            generated: 0,
        }
    }

    pub(super) fn run_id(&self) -> RunId {
        self.run.id
    }

    /// Adds generated tokens.
    pub(super) fn add(&mut self, delta: crate::engine::TextDelta) {
        self.generated += delta.tokens.len();
        self.sent.add(delta);
    }

    /// Removes retracted tokens.
    pub(super) fn retract(&mut self, tokens: usize) {
        self.sent.retract(tokens);
        self.generated = self.generated.saturating_sub(tokens);
    }

    /// Returns the stream chunk for these tokens.
    pub(super) fn chunk(&mut self, delta: crate::engine::TextDelta) -> Value {
        let tokens: Vec<_> = delta.tokens.iter().map(|(measure, _)| measure.token).collect();
        self.generated += tokens.len();
        let mut chunk = self.chunk_fields(&delta.text, json!(tokens));
        if self.options.n_probs > 0 {
            chunk.insert("completion_probabilities".into(), self.probabilities(&delta.tokens));
        }
        // Only the last sent token is needed again, to find out how the answer ended.
        self.sent.tokens = delta
            .tokens
            .into_iter()
            .next_back()
            .map_or_else(|| std::mem::take(&mut self.sent.tokens), |last| vec![last]);
        Value::Object(chunk)
    }

    /// Returns the stream chunk with the prompt's progress.
    pub(super) fn progress_chunk(&self, progress: PromptProgress) -> Value {
        let mut chunk = self.chunk_fields("", json!([]));
        chunk.insert("prompt_progress".into(), generation::prompt_progress(progress));
        if self.options.timings_per_token {
            chunk.insert("timings".into(), generation::prompt_timings(progress));
        }
        Value::Object(chunk)
    }

    /// Returns the stream chunk that retracts the last characters sent.
    pub(super) fn retraction_chunk(&mut self, chars: usize) -> Value {
        let mut chunk = self.chunk_fields("", json!([]));
        chunk.insert("thunder".into(), json!({ "retract": { "chars": chars } }));
        Value::Object(chunk)
    }

    fn chunk_fields(&self, content: &str, tokens: Value) -> Map<String, Value> {
        let prompt = self.run.metrics.prompt.get();
        let mut chunk = Map::new();
        chunk.insert("index".into(), self.index.into());
        chunk.insert("content".into(), content.into());
        chunk.insert("tokens".into(), tokens);
        chunk.insert("stop".into(), false.into());
        chunk.insert("id_slot".into(), self.slot());
        chunk.insert("tokens_predicted".into(), self.generated.into());
        chunk.insert("tokens_evaluated".into(), prompt.map_or(0, |prompt| prompt.tokens).into());
        if let (true, Some(prompt)) = (self.options.timings_per_token, prompt) {
            chunk.insert("timings".into(), generation::partial_timings(prompt, self.generated as u32));
        }
        chunk
    }

    fn slot(&self) -> Value {
        self.run.metrics.slot.get().map_or(json!(-1), |slot| json!(slot))
    }

    /// Returns the last chunk of a stream, or without a stream the complete response.
    pub(super) fn final_chunk(&self, end: &RunEnd) -> Value {
        let (finish, usage) = (&end.finish, end.finish.usage);
        let ended_by_token = finish.reason == FinishReason::Stop
            && finish.stop_string.is_none()
            && self.sent.tokens.last().is_some_and(|(measure, _)| self.is_end_token(measure));
        let predicted = usage.completion_tokens + u32::from(ended_by_token);
        let stream = self.options.stream;
        let returns_tokens = self.options.return_tokens && !stream;
        let tokens: Vec<_> = if returns_tokens {
            self.sent.tokens.iter().map(|(measure, _)| measure.token).collect()
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
            "generation_settings": generation_settings(&self.sampling, &self.limits, &self.options),
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
        if !stream && self.options.n_probs > 0 {
            last.insert("completion_probabilities".into(), self.probabilities(&self.sent.tokens));
        }
        last.insert("thunder".into(), json!({ "run_id": self.run.id, "replay": format!("/runs/{}", self.run.id) }));
        if self.options.response_fields.is_empty() {
            Value::Object(last)
        } else {
            self.select_fields(&Value::Object(last))
        }
    }

    fn is_end_token(&self, measure: &TokenMeasurement) -> bool {
        self.vocabulary.is_end_of_generation(measure.token) || self.limits.stop_tokens.contains(&measure.token)
    }

    /// Returns true if the context ended the answer before a requested limit did.
    fn is_truncated(&self, finish: &Finish) -> bool {
        let requested = u32::try_from(self.options.n_predict).unwrap_or(u32::MAX);
        finish.truncated
            || finish.reason == FinishReason::Length
                && finish.usage.completion_tokens < requested
                && finish.usage.completion_tokens >= self.limits.max_tokens
    }

    /// Returns only the paths named in `response_fields`.
    fn select_fields(&self, whole: &Value) -> Value {
        let mut chosen = Map::new();
        for path in &self.options.response_fields {
            let found = path.split('/').try_fold(whole, |value, name| value.get(name));
            if let Some(value) = found {
                chosen.insert(path.clone(), value.clone());
            }
        }
        Value::Object(chosen)
    }

    fn probabilities(&self, tokens: &[(TokenMeasurement, Vec<Alternative>)]) -> Value {
        let formatter = ProbabilityFormatter {
            vocabulary: &self.vocabulary,
            top: self.options.n_probs,
            after_sampler: self.options.post_sampling,
            no_logprob: NO_LOGPROB,
        };
        tokens.iter().map(|(measure, others)| formatter.drawn_token(measure, others)).collect()
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
