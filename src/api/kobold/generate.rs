//! Generates an answer to a prompt; polls and aborts active generations.

use super::error::KoboldError;
use super::genkeys::{GenerationEntry, Genkeys};
use super::perf::GenerationFigures;
use super::request::{self, GenkeyRequest, KoboldRequest, KoboldStreamRequest};
use super::response::{KoboldAbortResponse, KoboldLogprobs, KoboldPartialResult, KoboldResult, KoboldResults};
use crate::api::shared::generation::{self, CollectedTokens, RunClient, Runs};
use crate::api::shared::{self, Fields};
use crate::engine::{MeasuredToken, Output, TextDelta};
use crate::events::{FinishReason, RunEnd, Scope, TokenId, Usage};
use crate::model::Vocabulary;
use crate::server::ApiError;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::Value;
use std::sync::Arc;

/// Handles `POST /api/v1/generate` with a `prompt`. Returns `{results: [{text, finish_reason, prompt_tokens,
/// completion_tokens}]}`.
pub(crate) async fn generate(client: &RunClient, genkeys: &Genkeys, body: &Value) -> Response {
    answer(client, genkeys, body).await.unwrap_or_else(KoboldError::render)
}

/// Generates an answer to a `prompt`, like `/api/v1/generate`.
#[utoipa::path(post, path = "/api/latest/generate", tag = "KoboldCPP",
    request_body(content = KoboldStreamRequest, content_type = "application/json"),
    responses((status = 200, body = KoboldResults<KoboldResult>),
              (status = 400, description = "A field is invalid; the message names it"),
              (status = 503, description = "No model is loaded")))]
pub(super) async fn generate_latest(
    client: RunClient,
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, KoboldError> {
    Ok(answer(&client, &genkeys, &shared::parse_json(&body?)?).await?)
}

async fn answer(client: &RunClient, genkeys: &Genkeys, body: &Value) -> Result<Response, ApiError> {
    let mut generation = start(client, genkeys, body).await?;
    let (finish_reason, usage) = loop {
        if let GenerationEvent::Ended { finish_reason, usage } = generation.next().await? {
            break (finish_reason, usage);
        }
    };
    let result = KoboldResult {
        text: generation.entry.text(),
        finish_reason,
        logprobs: generation.logprobs(),
        prompt_tokens: usage.prompt_tokens,
        completion_tokens: usage.completion_tokens,
    };
    let response = Json(KoboldResults { results: [result] }).into_response();
    Ok(generation::with_run_id(response, generation.runs.run_id()))
}

/// An active generation.
pub(super) struct KoboldGeneration {
    pub(super) runs: Runs,
    pub(super) entry: GenerationEntry,
    vocabulary: Arc<Vocabulary>,
    seed: u32,
    render_special: bool,
    stop_tokens: Vec<TokenId>,
    /// Report each token immediately instead of holding back text that may be the start of a stop string.
    per_token: bool,
    /// Number of characters of each reported token.
    sent_chars: Vec<usize>,
    /// Number of tokens of the text.
    token_count: usize,
    /// The tokens with their measurements, if log-probabilities were requested.
    tokens: Option<CollectedTokens>,
}

/// An event of a generation.
pub(super) enum GenerationEvent {
    Text(String),
    /// The last characters of the text were retracted.
    Retract(usize),
    /// The answer is complete, or was aborted; no event follows.
    Ended {
        finish_reason: &'static str,
        usage: Usage,
    },
}

/// Parses a body and starts its run.
pub(super) async fn start(client: &RunClient, genkeys: &Genkeys, body: &Value) -> Result<KoboldGeneration, ApiError> {
    let fields = Fields::new(body)?;
    let loaded = client.app.get_or_load(fields.text("model")?).await?;
    let KoboldRequest { request, genkey, render_special, logprobs } =
        request::parse(&client.app, &loaded, fields).await?;
    let entry = genkeys.register(client.caller.tenant.as_ref(), &genkey);
    let per_token = request.report.per_token;
    let stop_tokens = request.limits.stop_tokens.clone();
    let seed = request.sampling.seed;
    let vocabulary = Arc::clone(loaded.vocabulary());
    let runs = Runs::start_cancellable(client, &loaded, vec![request], entry.aborted()).await?;
    entry.count_start();
    let tokens = logprobs.then(CollectedTokens::default);
    Ok(KoboldGeneration {
        runs,
        entry,
        vocabulary,
        seed,
        render_special,
        stop_tokens,
        per_token,
        sent_chars: Vec::new(),
        token_count: 0,
        tokens,
    })
}

impl KoboldGeneration {
    /// Returns the next event. Must not be called after the end.
    ///
    /// # Errors
    /// The run failed, or the server is stopping.
    pub(super) async fn next(&mut self) -> Result<GenerationEvent, ApiError> {
        loop {
            return Ok(match self.runs.next().await? {
                Some((_, Output::Text(delta))) => {
                    let text = self.visible_text(delta);
                    self.entry.add(&text);
                    GenerationEvent::Text(text)
                }
                Some((_, Output::Retract { chars, tokens })) => match self.retract(chars, tokens) {
                    0 => continue,
                    chars => {
                        self.entry.retract(chars);
                        GenerationEvent::Retract(chars)
                    }
                },
                Some((_, Output::PromptProbabilities(_) | Output::PromptProgress(_))) => continue,
                Some((_, Output::Ended(end))) => {
                    let figures = GenerationFigures::new(&end.finish, self.seed);
                    self.end(finish_reason(&end), end.finish.usage, figures)
                }
                None => self.end("abort", self.usage(), self.figures_so_far()),
            });
        }
    }

    fn end(&self, finish_reason: &'static str, usage: Usage, figures: GenerationFigures) -> GenerationEvent {
        self.entry.end(self.logprobs(), figures);
        GenerationEvent::Ended { finish_reason, usage }
    }

    /// Returns the figures of a generation without a complete answer.
    fn figures_so_far(&self) -> GenerationFigures {
        let prompt = self.runs.started[0].metrics.prompt.get();
        GenerationFigures::aborted(prompt, self.token_count as u32, self.seed)
    }

    /// Returns the token counts so far.
    fn usage(&self) -> Usage {
        let prompt = self.runs.started[0].metrics.prompt.get();
        Usage {
            prompt_tokens: prompt.map_or(0, |prompt| prompt.tokens),
            cached_tokens: prompt.map_or(0, |prompt| prompt.cached),
            completion_tokens: self.token_count as u32,
        }
    }

    /// Returns the log-probabilities of the tokens if they were requested.
    fn logprobs(&self) -> Option<Arc<KoboldLogprobs>> {
        self.tokens.as_ref().map(|tokens| Arc::new(KoboldLogprobs::new(tokens, &self.vocabulary)))
    }

    /// Counts the tokens of an addition and returns its text.
    fn visible_text(&mut self, delta: TextDelta) -> String {
        let mut text = delta.text;
        self.token_count += delta.tokens.len();
        if self.per_token {
            text.clear();
            for MeasuredToken { measurement, .. } in &delta.tokens {
                let visible = if self.is_hidden(measurement.token) { "" } else { measurement.text.as_str() };
                self.sent_chars.push(visible.chars().count());
                text.push_str(visible);
            }
        }
        if let Some(tokens) = &mut self.tokens {
            tokens.update(0, delta.tokens);
        }
        text
    }

    /// Returns true if the text lacks the token, as in the engine's text.
    fn is_hidden(&self, token: TokenId) -> bool {
        (self.vocabulary.is_control(token) && !self.render_special)
            || self.vocabulary.ends_answer(token, &self.stop_tokens)
    }

    /// Removes the last characters and tokens. Returns the number of characters to remove from the reported text.
    fn retract(&mut self, chars: usize, tokens: usize) -> usize {
        self.token_count = self.token_count.saturating_sub(tokens);
        if let Some(collected) = &mut self.tokens {
            collected.update(tokens, Vec::new());
        }
        if !self.per_token {
            return chars;
        }
        // The reported text lacks hidden tokens.
        self.sent_chars.split_off(self.sent_chars.len().saturating_sub(tokens)).iter().sum()
    }
}

impl Drop for KoboldGeneration {
    /// Counts a generation that failed or whose client disconnected.
    fn drop(&mut self) {
        self.entry.end_incomplete(Some(self.figures_so_far()));
    }
}

/// Returns `KoboldCPP`'s name of a finish reason.
fn finish_reason(end: &RunEnd) -> &'static str {
    if end.finish.reason == FinishReason::Length { "length" } else { "stop" }
}

/// Returns the text of the newest generation with this `genkey`: the text so far, or the complete text if it has ended.
/// The texts of the last ended generations are kept.
#[utoipa::path(post, path = "/api/extra/generate/check", tag = "KoboldCPP",
    request_body(content = GenkeyRequest, content_type = "application/json"),
    responses((status = 200, body = KoboldResults<KoboldPartialResult>)))]
pub(super) async fn check(
    scope: Scope,
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<KoboldResults<KoboldPartialResult>>, KoboldError> {
    let text = genkeys.text(&scope, &parse_genkey(&body?)?);
    Ok(Json(KoboldResults { results: [KoboldPartialResult { text }] }))
}

/// Returns the text of the newest generation without a `genkey`, like `POST`.
#[utoipa::path(get, path = "/api/extra/generate/check", tag = "KoboldCPP",
    responses((status = 200, body = KoboldResults<KoboldPartialResult>)))]
pub(super) async fn check_without_key(
    scope: Scope,
    genkeys: Extension<Genkeys>,
) -> Json<KoboldResults<KoboldPartialResult>> {
    Json(KoboldResults { results: [KoboldPartialResult { text: genkeys.text(&scope, "") }] })
}

/// Ends the generations with this `genkey`. An absent `genkey` selects the generations without a key.
#[utoipa::path(post, path = "/api/extra/abort", tag = "KoboldCPP",
    request_body(content = GenkeyRequest, content_type = "application/json"),
    responses((status = 200, body = KoboldAbortResponse)))]
pub(super) async fn abort(
    scope: Scope,
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<KoboldAbortResponse>, KoboldError> {
    let found = if genkeys.abort(&scope, &parse_genkey(&body?)?) { "true" } else { "false" };
    Ok(Json(KoboldAbortResponse { success: found, done: found }))
}

/// Parses the key in a body, which may be empty.
pub(super) fn parse_genkey(body: &[u8]) -> Result<String, ApiError> {
    if body.is_empty() {
        return Ok(String::new());
    }
    let body = shared::parse_json(body)?;
    Ok(Fields::new(&body)?.text("genkey")?.unwrap_or_default().to_owned())
}
