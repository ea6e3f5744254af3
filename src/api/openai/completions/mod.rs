//! OpenAI's older route: texts continued, several at once, with the prompt repeated and every token's probability where that is
//! asked for.

mod read;
mod shape;

use crate::api::generation::{self, Runs, stream};
use crate::api::wire::{self, Fields};
use crate::api::{ApiError, App, Caller, OpenAiError};
use crate::engine::Output;
use axum::Extension;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use shape::{Choice, Head};
use std::collections::VecDeque;
use std::sync::Arc;

/// Continues a text, as OpenAI's older route does: `prompt` is a text, token ids, or a list of those; `n` answers to each; `echo`
/// repeats the prompt, and with `logprobs` and `max_tokens` 0 tells how probable it is; `suffix` asks for what stands between.
#[utoipa::path(post, path = "/v1/completions", tag = "openai",
    request_body(content = Value, content_type = "application/json"),
    responses((status = 200, description = "A completion, or server-sent events of its chunks"),
              (status = 400, description = "A field is wrong; `error.param` names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 where it was written for Quote"),
              (status = 503, description = "The model is being loaded")))]
pub(super) async fn completions(
    State(app): State<App>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, OpenAiError> {
    let body = wire::json(&body?)?;
    let fields = Fields::new(&body)?;
    let loaded = app.loaded(fields.text("model")?).await?;
    let read::Asked { mut requests, prompts, answer } = read::read(&app, &loaded, fields)?;
    for request in &mut requests {
        generation::note_client(request, &headers, caller.clone());
    }
    let created = app.now().timestamp();
    let ping = app.config().server.routes.sse_ping_interval;
    let runs = Runs::begin(app, &loaded, requests).await?;
    let first = runs.begun.first().map(|run| run.id);
    let choices = prompts.into_iter().enumerate().map(|(index, prompt)| Choice::new(index, prompt));
    let head = Head {
        answer,
        choices: choices.collect(),
        runs: runs.begun.clone(),
        model: loaded.name().to_owned(),
        created,
        vocabulary: Arc::clone(loaded.vocabulary()),
    };
    let response = if let Some(error) = runs.failed_at_once() {
        OpenAiError(error).into_response()
    } else if head.answer.stream {
        stream::respond(runs, Chunks { head, begun: false }, ping)
    } else {
        match whole(runs, head).await {
            Ok(answer) => Json(answer).into_response(),
            Err(error) => OpenAiError(error).into_response(),
        }
    };
    Ok(match first {
        Some(run) => generation::with_run_id(response, run),
        None => response,
    })
}

async fn whole(mut runs: Runs, mut head: Head) -> Result<Value, ApiError> {
    let mut written = vec![Value::Null; head.choices.len()];
    while let Some((index, output)) = runs.next().await? {
        let choice = &mut head.choices[index];
        match output {
            Output::Text(delta) => choice.told.add(delta),
            Output::Retract { tokens, .. } => choice.told.retract(tokens),
            Output::Prompt(measures) => choice.measures = measures,
            Output::Progress(_) => {}
            Output::Ended(end) => {
                if let Some(error) = generation::failure(&end, runs.begun[index].id) {
                    return Err(error);
                }
                choice.end = Some(end);
                written[index] = head.whole(index);
            }
        }
    }
    let mut object = head.object(Value::Array(written));
    head.end(&mut object);
    object.insert("thunder".into(), head.thunder());
    Ok(Value::Object(object))
}

/// The answer in pieces: for each choice its text, then its finish reason; counts on demand; `[DONE]`.
struct Chunks {
    head: Head,
    begun: bool,
}

impl Chunks {
    fn chunk(&mut self, choice: &Value, thunder: Option<Value>) -> String {
        let mut object = self.head.object(json!([choice]));
        // The first chunk leads to the replay.
        let thunder = thunder.or_else(|| (!self.begun).then(|| self.head.thunder()));
        self.begun = true;
        if let Some(thunder) = thunder {
            object.insert("thunder".into(), thunder);
        }
        Value::Object(object).to_string()
    }
}

impl stream::Writer for Chunks {
    fn write(&mut self, run: usize, output: Output, ready: &mut VecDeque<String>) -> Result<(), ApiError> {
        match output {
            Output::Progress(_) | Output::Retract { chars: 0, .. } => {}
            Output::Prompt(measures) => self.head.choices[run].measures = measures,
            Output::Text(delta) => {
                if let Some(echo) = self.head.echo(run) {
                    ready.push_back(self.chunk(&echo, None));
                }
                let logprobs = self.head.logprobs(run, &delta.tokens);
                if !delta.text.is_empty() || !logprobs.is_null() {
                    let piece = self.head.piece(run, &delta.text, &logprobs);
                    ready.push_back(self.chunk(&piece, None));
                }
            }
            Output::Retract { chars, .. } => {
                let choice = &mut self.head.choices[run];
                choice.chars = choice.chars.saturating_sub(chars);
                let piece = self.head.piece(run, "", &Value::Null);
                ready.push_back(self.chunk(&piece, Some(json!({ "retract": { "chars": chars } }))));
            }
            Output::Ended(end) => {
                if let Some(error) = generation::failure(&end, self.head.runs[run].id) {
                    return Err(error);
                }
                if let Some(echo) = self.head.echo(run) {
                    ready.push_back(self.chunk(&echo, None));
                }
                self.head.choices[run].end = Some(end);
                let last = self.head.finish(run);
                let thunder = self.head.thunder();
                if self.head.choices.iter().all(|choice| choice.end.is_some()) && !self.head.answer.include_usage {
                    let mut object = self.head.object(json!([last]));
                    object.insert("thunder".into(), thunder);
                    // As llama-server has it; OpenAI's counts come only where they were asked for.
                    self.head.end(&mut object);
                    ready.push_back(Value::Object(object).to_string());
                } else {
                    ready.push_back(self.chunk(&last, Some(thunder)));
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, ready: &mut VecDeque<String>) {
        if self.head.answer.include_usage {
            let mut object = self.head.object(json!([]));
            self.head.end(&mut object);
            ready.push_back(Value::Object(object).to_string());
        }
        ready.push_back("[DONE]".into());
    }

    fn error(&self, error: &ApiError) -> String {
        error.openai().to_string()
    }
}
