//! llama-server's completion and the chunks of its stream.

use super::request::LlamaResponseOptions;
use crate::api::shared::generation::runs::StartedRun;
use crate::api::shared::generation::{
    CollectedTokens, ProbabilityFormatter, PromptProgressResponse, RunTimings, ThunderFields, TokenProbabilities,
};
use crate::api::shared::llama_completion::LlamaCompletionFields;
use crate::api::shared::settings::GenerationSettings;
use crate::api::shared::sse::to_json;
use crate::engine::{Limits, MeasuredToken, PromptProgress, Request, SamplingParams, TextDelta};
use crate::events::{Finish, FinishReason, RunEnd, TokenId};
use crate::model::Vocabulary;
use serde::Serialize;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::sync::Arc;
use utoipa::ToSchema;

/// llama-server's value for the logarithm of 0, because JSON has no infinity.
const NO_LOGPROB: f32 = f32::MIN;

/// A complete answer, or the last chunk of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct LlamaCompletion<'a> {
    #[serde(flatten)]
    fields: LlamaCompletionFields<'a>,
    /// Probabilities of the tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Vec<TokenProbabilities>>,
    /// The run.
    thunder: ThunderFields,
}

/// A chunk of a stream.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct LlamaCompletionChunk<'a> {
    /// Index of the answer.
    index: usize,
    /// An addition to the text.
    content: &'a str,
    /// Ids of the added tokens.
    tokens: Vec<TokenId>,
    /// Always false.
    stop: bool,
    /// The slot; -1 for none.
    id_slot: i64,
    tokens_predicted: usize,
    tokens_evaluated: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<RunTimings>,
    /// Probabilities of the added tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_probabilities: Option<Vec<TokenProbabilities>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgressResponse>,
    /// A retraction.
    #[serde(skip_serializing_if = "Option::is_none")]
    thunder: Option<ThunderFields>,
}

/// The response of a run.
pub(super) struct RunResponse {
    index: usize,
    run: StartedRun,
    vocabulary: Arc<Vocabulary>,
    model: String,
    prompt: String,
    sampling: SamplingParams,
    limits: Limits,
    options: LlamaResponseOptions,
    /// Tokens of the answer; empty with a stream.
    tokens: CollectedTokens,
    /// The last token, unless it was retracted. It shows whether a token ended the answer.
    last_token: Option<TokenId>,
    /// Number of tokens of the answer.
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
        limits.ban_end_tokens(&mut sampling, vocabulary);
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
            tokens: CollectedTokens::default(),
            last_token: None,
            generated: 0,
        }
    }

    /// Adds generated tokens.
    pub(super) fn add(&mut self, delta: TextDelta) {
        self.count(&delta);
        self.tokens.update(0, delta.tokens);
    }

    fn count(&mut self, delta: &TextDelta) {
        self.generated += delta.tokens.len();
        self.last_token = delta.tokens.last().map(|token| token.measurement.token).or(self.last_token);
    }

    /// Removes retracted tokens.
    pub(super) fn retract(&mut self, tokens: usize) {
        if tokens == 0 {
            return;
        }
        self.tokens.update(tokens, Vec::new());
        self.last_token = self.tokens.last().map(|token| token.measurement.token);
        self.generated = self.generated.saturating_sub(tokens);
    }

    /// Counts tokens and returns their stream chunk.
    pub(super) fn chunk<'a>(&mut self, delta: &'a TextDelta) -> LlamaCompletionChunk<'a> {
        self.count(delta);
        LlamaCompletionChunk {
            completion_probabilities: self.probabilities(&delta.tokens),
            ..self.chunk_fields(&delta.text, token_ids(&delta.tokens))
        }
    }

    /// Returns the stream chunk with the prompt's progress.
    pub(super) fn progress_chunk(&self, progress: PromptProgress) -> LlamaCompletionChunk<'_> {
        let mut chunk = self.chunk_fields("", Vec::new());
        chunk.prompt_progress = Some(progress.into());
        if self.options.reported.timings_per_token {
            chunk.timings = Some(RunTimings::from_prompt(progress));
        }
        chunk
    }

    /// Returns the stream chunk that retracts the last characters sent.
    pub(super) fn retraction_chunk(&self, chars: usize) -> LlamaCompletionChunk<'_> {
        let thunder = Some(ThunderFields::retract_chars(chars));
        LlamaCompletionChunk { thunder, ..self.chunk_fields("", Vec::new()) }
    }

    fn chunk_fields<'a>(&self, content: &'a str, tokens: Vec<TokenId>) -> LlamaCompletionChunk<'a> {
        let prompt = self.run.metrics.prompt.get();
        let timed = prompt.filter(|_| self.options.reported.timings_per_token);
        LlamaCompletionChunk {
            index: self.index,
            content,
            tokens,
            stop: false,
            id_slot: self.slot(),
            tokens_predicted: self.generated,
            tokens_evaluated: prompt.map_or(0, |prompt| prompt.tokens),
            timings: timed.map(|prompt| RunTimings::partial(prompt, self.generated as u32)),
            completion_probabilities: None,
            prompt_progress: None,
            thunder: None,
        }
    }

    fn slot(&self) -> i64 {
        self.run.metrics.slot().map_or(-1, i64::from)
    }

    /// Returns the last chunk of a stream, or without a stream the complete response, as JSON.
    pub(super) fn final_chunk(&self, end: &RunEnd) -> String {
        let last = self.completion(end);
        if self.options.response_fields.is_empty() { to_json(&last) } else { self.select_fields(&last).to_string() }
    }

    fn completion<'a>(&'a self, end: &'a RunEnd) -> LlamaCompletion<'a> {
        let (finish, usage) = (&end.finish, end.finish.usage);
        let ended_by_token = finish.reason == FinishReason::Stop
            && finish.stop_string.is_none()
            && self.last_token.is_some_and(|token| self.vocabulary.ends_answer(token, &self.limits.stop_tokens));
        let predicted = usage.completion_tokens + u32::from(ended_by_token);
        let stream = self.options.reported.stream;
        let mut tokens = if self.options.return_tokens { token_ids(&self.tokens) } else { Vec::new() };
        // Every chunk of a stream has its tokens, and the last one those without a text.
        if stream || self.options.return_tokens {
            tokens.extend(self.run.metrics.tokens_after_text.get().into_iter().flatten());
        }
        let settings = GenerationSettings::new(&self.sampling, &self.limits, &self.options.reported);
        let (metrics, model, prompt) = (&self.run.metrics, self.model.as_str(), self.prompt.as_str());
        let fields = LlamaCompletionFields {
            index: self.index,
            content: if stream { "" } else { finish.text.as_str() },
            tokens,
            id_slot: Some(self.slot()),
            truncated: self.is_truncated(finish),
            ..LlamaCompletionFields::new(finish, predicted, metrics, model, prompt, Cow::Owned(settings))
        };
        LlamaCompletion {
            fields,
            completion_probabilities: if stream { None } else { self.probabilities(&self.tokens) },
            thunder: ThunderFields::run(self.run.id).with_tool_calls(finish.tool_calls.as_ref()),
        }
    }

    /// Returns true if the context ended the answer before a requested limit did.
    fn is_truncated(&self, finish: &Finish) -> bool {
        let requested = u32::try_from(self.options.reported.n_predict).unwrap_or(u32::MAX);
        finish.truncated
            || finish.reason == FinishReason::Length
                && finish.usage.completion_tokens < requested
                && finish.usage.completion_tokens >= self.limits.max_tokens
    }

    /// Returns only the paths named in `response_fields`.
    fn select_fields(&self, completion: &LlamaCompletion<'_>) -> Value {
        // The client chooses the fields, so the result has no type.
        let whole = serde_json::to_value(completion).unwrap_or_default();
        let found = self.options.response_fields.iter().filter_map(|path| {
            let found = path.split('/').try_fold(&whole, |value, name| value.get(name));
            Some((path.clone(), found?.clone()))
        });
        Value::Object(found.collect::<Map<_, _>>())
    }

    /// Returns the probabilities of tokens if the client requested them.
    fn probabilities(&self, tokens: &[MeasuredToken]) -> Option<Vec<TokenProbabilities>> {
        let formatter = ProbabilityFormatter {
            vocabulary: &self.vocabulary,
            top: self.options.reported.n_probs,
            after_sampler: self.options.reported.after_sampler,
            no_logprob: NO_LOGPROB,
        };
        let entries = tokens.iter().map(|token| formatter.sampled_token(token));
        (self.options.reported.n_probs > 0).then(|| entries.collect())
    }
}

fn token_ids(tokens: &[MeasuredToken]) -> Vec<TokenId> {
    tokens.iter().map(|token| token.measurement.token).collect()
}
