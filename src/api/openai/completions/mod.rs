//! OpenAI's completions route: several prompts and answers, optional echo of the prompt and probabilities of every
//! token.

mod request;
mod response;

use crate::api::shared::error::OpenAiError;
use crate::api::shared::generation::{self, OutputWriter, RunClient, Runs, ThunderFields, stream_runs};
use crate::api::shared::sse::{PendingEvents, ServerEvent};
use crate::api::shared::{Fields, ModelBody};
use crate::engine::Output;
use crate::server::ApiError;
use axum::Json;
use axum::response::{IntoResponse, Response};
use request::CompletionBody;
use response::{CompletionBuilder, CompletionChoice, TextChoice, TextCompletion, TextCompletionChunk};
use std::sync::Arc;

/// Completes a prompt, like OpenAI's legacy completions API. `prompt` is a string, token ids, or a list of prompts; `n`
/// is the number of answers per prompt. `echo` repeats the prompt; with `logprobs` and `max_tokens` 0 it reports the
/// prompt's probabilities. `suffix` requests the text between `prompt` and `suffix`.
#[utoipa::path(post, path = "/v1/completions", tag = "openai",
    request_body(content = CompletionBody, content_type = "application/json"),
    responses((status = 200, description = "A completion, or server-sent events of its chunks",
                  content((TextCompletion = "application/json"), (TextCompletionChunk = "text/event-stream"))),
              (status = 400, description = "A field is invalid; `error.param` names it"),
              (status = 409, description = "Another run has this `request_id`"),
              (status = 422, description = "A mod ended the run with an error before its first token; 400 if the mod was written for Quote"),
              (status = 503, description = "The model is loading")))]
pub(super) async fn completions(client: RunClient, body: Result<ModelBody, ApiError>) -> Result<Response, OpenAiError> {
    let ModelBody { body, loaded, .. } = body?;
    let request::CompletionRequest { requests, prompts, options } =
        request::parse(&client.app, &loaded, Fields::new(&body)?)?;
    let created = client.app.now().timestamp();
    let runs = Runs::start(&client, &loaded, requests).await?;
    let run_id = runs.run_id();
    let choices = prompts.into_iter().enumerate().map(|(index, prompt)| CompletionChoice::new(index, prompt));
    let builder = CompletionBuilder {
        options,
        choices: choices.collect(),
        runs: runs.started.clone(),
        model: loaded.name().to_owned(),
        created,
        vocabulary: Arc::clone(loaded.vocabulary()),
    };
    let response = if builder.options.stream {
        let ping = builder.options.ping;
        stream_runs(runs, CompletionChunkWriter { builder, started: false }, ping)
    } else {
        complete(runs, builder).await?
    };
    Ok(generation::with_run_id(response, run_id))
}

async fn complete(mut runs: Runs, mut builder: CompletionBuilder) -> Result<Response, ApiError> {
    let mut choices: Vec<Option<TextChoice>> = builder.choices.iter().map(|_| None).collect();
    while let Some((index, output)) = runs.next().await? {
        let choice = &mut builder.choices[index];
        match output {
            Output::Text(delta) => choice.tokens.update(0, delta.tokens),
            Output::Retract { tokens, .. } => choice.tokens.update(tokens, Vec::new()),
            Output::PromptProbabilities(measurements) => choice.measurements = measurements,
            Output::PromptProgress(_) => {}
            Output::Ended(end) => choices[index] = Some(builder.complete_choice(index, end)),
        }
    }
    let choices = choices.into_iter().flatten().collect();
    Ok(Json(builder.completion(choices)).into_response())
}

/// Writer of the chunks of a completion: the text of each choice, its finish reason, optional token counts, `[DONE]`.
struct CompletionChunkWriter {
    builder: CompletionBuilder,
    started: bool,
}

impl CompletionChunkWriter {
    fn chunk(&mut self, choice: TextChoice, thunder: Option<ThunderFields>) -> ServerEvent {
        // The first chunk has the path of the replay.
        let thunder = thunder.or_else(|| (!self.started).then(|| self.builder.thunder()));
        self.started = true;
        ServerEvent::json(&self.builder.chunk(vec![choice], thunder))
    }
}

impl OutputWriter for CompletionChunkWriter {
    fn on_output(&mut self, run: usize, output: Output, pending: &mut PendingEvents) {
        match output {
            Output::PromptProgress(_) => {}
            Output::PromptProbabilities(measurements) => self.builder.choices[run].measurements = measurements,
            Output::Text(delta) => {
                if let Some(echo) = self.builder.echo_delta(run) {
                    pending.push_back(self.chunk(echo, None));
                }
                let logprobs = self.builder.logprobs(run, &delta.tokens);
                if self.builder.options.logprobs.is_some() {
                    self.builder.choices[run].count(&delta.tokens);
                }
                if !delta.text.is_empty() || logprobs.is_some() {
                    let choice = self.builder.choice_delta(run, delta.text, logprobs);
                    pending.push_back(self.chunk(choice, None));
                }
            }
            Output::Retract { chars, tokens } => {
                self.builder.choices[run].retract(tokens);
                if chars > 0 {
                    let choice = self.builder.choice_delta(run, String::new(), None);
                    pending.push_back(self.chunk(choice, Some(ThunderFields::retract_chars(chars))));
                }
            }
            Output::Ended(end) => {
                if let Some(echo) = self.builder.echo_delta(run) {
                    pending.push_back(self.chunk(echo, None));
                }
                self.builder.choices[run].end = Some(end);
                let last = self.builder.choice_end(run);
                let thunder = self.builder.thunder();
                if self.builder.choices.iter().all(|choice| choice.end.is_some()) && !self.builder.options.include_usage
                {
                    // As in llama-server, the chunk with the last finish reason has the final fields, unless a separate
                    // chunk with token counts was requested.
                    pending.push_back(ServerEvent::json(&self.builder.last_chunk(vec![last], Some(thunder))));
                } else {
                    pending.push_back(self.chunk(last, Some(thunder)));
                }
            }
        }
    }

    fn on_end(&mut self, pending: &mut PendingEvents) {
        if self.builder.options.include_usage {
            pending.push_back(ServerEvent::json(&self.builder.last_chunk(Vec::new(), None)));
        }
        pending.push_back(ServerEvent::data("[DONE]"));
    }

    fn on_error(&mut self, error: &ApiError, pending: &mut PendingEvents) {
        pending.push_back(ServerEvent::json(&error.openai()));
    }
}
