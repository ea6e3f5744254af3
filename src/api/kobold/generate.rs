//! A whole answer to a prompt, a look at one that is under way, and its end.

use super::ask::{self, Asked};
use super::error::KoboldError;
use super::genkeys::{Entry, Genkeys};
use super::logprobs;
use crate::api::generation::{self, Runs, SentTokens};
use crate::api::shared::{self, Fields};
use crate::api::{ApiError, App, Caller};
use crate::engine::{Output, TextDelta};
use crate::events::{FinishReason, RunEnd, Usage};
use crate::model::Vocabulary;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Value, json};
use std::sync::Arc;

/// `POST /api/v1/generate` with a `prompt`: `{results: [{text, finish_reason, prompt_tokens, completion_tokens}]}`.
pub(in crate::api) async fn generate(
    app: App,
    genkeys: &Genkeys,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: &Value,
) -> Response {
    match answer(app, genkeys, caller, headers, body).await {
        Ok(response) => response,
        Err(error) => KoboldError(error).into_response(),
    }
}

async fn answer(
    app: App,
    genkeys: &Genkeys,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: &Value,
) -> Result<Response, ApiError> {
    let mut generation = begin(app, genkeys, caller, headers, body).await?;
    let (mut finish_reason, mut usage) = ("abort", Usage::default());
    while let Some(piece) = generation.next().await? {
        match piece {
            Piece::Text(_) | Piece::Retract(_) => {}
            Piece::Aborted => break,
            Piece::Ended(end) => (finish_reason, usage) = (reason(&end), end.finish.usage),
        }
    }
    let result = json!({
        "text": generation.entry.text(),
        "finish_reason": finish_reason,
        "logprobs": generation.logprobs(),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    });
    let run_id = generation.runs.started[0].id;
    Ok(generation::with_run_id(Json(json!({ "results": [result] })).into_response(), run_id))
}

/// A generation under way.
pub(super) struct Generation {
    pub(super) runs: Runs,
    pub(super) entry: Entry,
    vocabulary: Arc<Vocabulary>,
    render_special: bool,
    /// Whether each token is told, or only text behind which no stop string can begin.
    per_token: bool,
    /// Characters of each token that was told of, where each is.
    told: Vec<usize>,
    /// Its tokens, where their log-probabilities were asked for.
    tokens: Option<SentTokens>,
}

/// What became of it.
pub(super) enum Piece {
    Text(String),
    /// So many characters of the text are gone.
    Retract(usize),
    Ended(Arc<RunEnd>),
    Aborted,
}

/// Reads a body and begins its run.
pub(super) async fn begin(
    app: App,
    genkeys: &Genkeys,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: &Value,
) -> Result<Generation, ApiError> {
    let fields = Fields::new(body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let Asked { mut request, genkey, render_special, logprobs } = ask::read(&app, &loaded, fields)?;
    generation::set_client(&mut request, headers, caller);
    let entry = genkeys.enter(&genkey);
    let per_token = request.report.per_token;
    let vocabulary = Arc::clone(loaded.vocabulary());
    let runs = Runs::start(app, &loaded, vec![request]).await?;
    if let Some(error) = runs.initial_error() {
        return Err(error);
    }
    let tokens = logprobs.then(SentTokens::default);
    Ok(Generation { runs, entry, vocabulary, render_special, per_token, told: Vec::new(), tokens })
}

impl Generation {
    /// What happened next; `None` behind the end.
    ///
    /// # Errors
    /// The run failed, or the server stops.
    pub(super) async fn next(&mut self) -> Result<Option<Piece>, ApiError> {
        loop {
            let output = tokio::select! {
                output = self.runs.next() => output?,
                () = self.entry.aborted() => {
                    self.entry.keep_logprobs(self.logprobs());
                    return Ok(Some(Piece::Aborted));
                }
            };
            let Some((_, output)) = output else { return Ok(None) };
            if let (Some(known), Output::Retract { tokens, .. }) = (&mut self.tokens, &output) {
                known.retract(*tokens);
            }
            let piece = match output {
                Output::Text(delta) => self.of(delta),
                Output::Prompt(_) | Output::Progress(_) | Output::Retract { chars: 0, .. } => continue,
                Output::Retract { chars, .. } => Piece::Retract(chars),
                Output::Ended(end) => match generation::failure(&end, self.runs.started[0].id) {
                    Some(error) => return Err(error),
                    None => Piece::Ended(end),
                },
            };
            match &piece {
                Piece::Text(text) => self.entry.add(text),
                Piece::Retract(chars) => self.entry.retract(*chars),
                Piece::Ended(_) => self.entry.keep_logprobs(self.logprobs()),
                Piece::Aborted => {}
            }
            return Ok(Some(piece));
        }
    }

    /// Returns the log-probabilities of its tokens, null unless they were asked for.
    fn logprobs(&self) -> Value {
        self.tokens.as_ref().map_or(Value::Null, |told| logprobs::of(told, &self.vocabulary))
    }

    fn of(&mut self, delta: TextDelta) -> Piece {
        if let Some(known) = &mut self.tokens {
            known.retract(delta.retracted);
            known.tokens.extend(delta.tokens.iter().cloned());
        }
        if delta.retracted > 0 {
            let gone = self.told.split_off(self.told.len().saturating_sub(delta.retracted));
            return Piece::Retract(gone.iter().sum());
        }
        if !self.per_token {
            return Piece::Text(delta.text);
        }
        let mut text = String::new();
        for (measure, _) in &delta.tokens {
            let shown = self.render_special || !self.vocabulary.is_control(measure.token);
            let piece = if shown { measure.text.as_str() } else { "" };
            self.told.push(piece.chars().count());
            text.push_str(piece);
        }
        Piece::Text(text)
    }
}

/// Why a run ended, in `KoboldCPP`'s words.
pub(super) fn reason(end: &RunEnd) -> &'static str {
    if end.finish.reason == FinishReason::Length { "length" } else { "stop" }
}

/// The text so far of the generation that `genkey` names.
#[utoipa::path(post, path = "/api/extra/generate/check", tag = "KoboldCPP",
    request_body(content = Value, content_type = "application/json", description = "`{genkey?}`"),
    responses((status = 200, description = "`{results: [{text}]}`")))]
pub(super) async fn check(
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, KoboldError> {
    Ok(Json(json!({ "results": [{ "text": genkeys.text(&genkey(&body?)?) }] })))
}

/// Ends the generations that `genkey` names; without one, those that have none.
#[utoipa::path(post, path = "/api/extra/abort", tag = "KoboldCPP",
    request_body(content = Value, content_type = "application/json", description = "`{genkey?}`"),
    responses((status = 200, description = "`{success: \"true\" | \"false\", done: \"true\" | \"false\"}`")))]
pub(super) async fn abort(
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Json<Value>, KoboldError> {
    let found = if genkeys.abort(&genkey(&body?)?) { "true" } else { "false" };
    Ok(Json(json!({ "success": found, "done": found })))
}

/// The key in a body, which may be empty.
pub(super) fn genkey(body: &[u8]) -> Result<String, ApiError> {
    if body.is_empty() {
        return Ok(String::new());
    }
    let body = shared::parse_json(body)?;
    Ok(Fields::new(&body)?.text("genkey")?.unwrap_or_default().to_owned())
}
