//! `/completion`: llama-server's own way to continue a text, with everything it can say about how that was done.

use super::answer::{Kept, Line};
use super::ask::{self, Asked};
use crate::api::generation::{self, Runs, stream};
use crate::api::shared::{self, Fields};
use crate::api::{ApiError, App, Caller, LlamaError, Loaded};
use crate::engine::Output;
use crate::events::TokenId;
use axum::Extension;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(completion)).route("/completions", axum::routing::post(completion))
}

/// Continues `prompt`: a text, token ids, a mixed list, or a list of those, which is answered by a list. With
/// `"stream": true` token by token. `/completions` is the same.
#[utoipa::path(post, path = "/completion", tag = "llama-server",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "The answer, a list of answers, or server-sent events of its pieces"),
              (status = 400, description = "A field is wrong; the message names it"),
              (status = 503, description = "The model is being loaded")))]
async fn completion(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, LlamaError> {
    answer(app, caller, &headers, body, ask::prompts).await
}

/// Reads a body, runs the prompts that `prompts` finds in it, and writes the answer.
pub(super) async fn answer(
    app: App,
    caller: Option<Extension<Caller>>,
    headers: &HeaderMap,
    body: Result<Bytes, BytesRejection>,
    prompts: impl FnOnce(Fields<'_>, &Loaded) -> Result<Vec<Vec<TokenId>>, ApiError>,
) -> Result<Response, LlamaError> {
    let body = shared::parse_json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let mut asked = ask::read(&app, &loaded, fields, prompts(fields, &loaded)?)?;
    for request in &mut asked.requests {
        generation::set_client(request, headers, caller.clone());
    }
    Ok(respond(app, &loaded, asked).await?)
}

/// Runs what was asked for and writes the answer.
async fn respond(app: App, loaded: &Loaded, asked: Asked) -> Result<Response, ApiError> {
    let Asked { requests, answer } = asked;
    let vocabulary = loaded.vocabulary();
    let kept: Vec<Kept> = requests.iter().map(|request| Kept::of(request, vocabulary)).collect();
    let runs = Runs::start(app, loaded, requests).await?;
    let run_id = runs.started.first().map(|run| run.id);
    let lines = runs.started.iter().zip(kept).enumerate().map(|(index, (run, kept))| {
        Line::new(index, run.clone(), kept, answer.clone(), Arc::clone(vocabulary), loaded.name().to_owned())
    });
    let lines: Vec<Line> = lines.collect();
    let response = if let Some(error) = runs.initial_error() {
        LlamaError(error).into_response()
    } else if answer.stream {
        stream::respond(runs, Pieces { lines }, answer.ping)
    } else {
        match whole(runs, lines).await {
            Ok(answer) => Json(answer).into_response(),
            Err(error) => LlamaError(error).into_response(),
        }
    };
    Ok(match run_id {
        Some(run_id) => generation::with_run_id(response, run_id),
        None => response,
    })
}

async fn whole(mut runs: Runs, mut lines: Vec<Line>) -> Result<Value, ApiError> {
    let mut answers = vec![Value::Null; lines.len()];
    while let Some((index, output)) = runs.next().await? {
        let line = &mut lines[index];
        match output {
            Output::Text(delta) => line.add(delta),
            Output::Retract { tokens, .. } => line.retract(tokens),
            Output::Prompt(_) | Output::Progress(_) => {}
            Output::Ended(end) => match generation::failure(&end, runs.started[index].id) {
                Some(error) => return Err(error),
                None => answers[index] = line.last(&end),
            },
        }
    }
    Ok(match answers.len() {
        1 => answers.remove(0),
        _ => Value::Array(answers),
    })
}

/// The pieces of a stream. There is no `[DONE]` behind them.
struct Pieces {
    lines: Vec<Line>,
}

impl stream::OutputWriter for Pieces {
    fn write(&mut self, run: usize, output: Output, ready: &mut VecDeque<String>) -> Result<(), ApiError> {
        let line = &mut self.lines[run];
        let piece = match output {
            Output::Text(delta) => line.piece(delta),
            Output::Retract { chars, tokens } => {
                line.retract(tokens);
                if chars == 0 {
                    return Ok(());
                }
                line.retraction(chars)
            }
            Output::Progress(progress) => line.progress(progress),
            Output::Prompt(_) => return Ok(()),
            Output::Ended(end) => match generation::failure(&end, line.run_id()) {
                Some(error) => return Err(error),
                None => line.last(&end),
            },
        };
        ready.push_back(piece.to_string());
        Ok(())
    }

    fn end(&mut self, _: &mut VecDeque<String>) {}

    fn error(&self, error: &ApiError) -> String {
        error.llama().to_string()
    }
}
