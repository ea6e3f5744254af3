//! `/completion`: llama-server's completion route, with details of the generation.

use super::request::{self, LlamaCompletionBody, LlamaCompletionRequest, LlamaPrompt};
use super::response::{EchoedRequest, LlamaCompletion, LlamaCompletionChunk, RunResponse};
use super::stream::LlamaChunkWriter;
use crate::api::shared::error::LlamaError;
use crate::api::shared::generation::{self, RunClient, Runs, stream_runs};
use crate::api::shared::{Fields, ModelBody};
use crate::engine::Output;
use crate::server::{ApiError, App, LoadedModel};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(super) fn router() -> OpenApiRouter<App> {
    OpenApiRouter::new().routes(routes!(completion)).route("/completions", axum::routing::post(completion))
}

/// Completes `prompt`: a string, token ids, a list of both, a string with images, or a list of prompts, which returns a list
/// of answers.
/// `"stream": true` streams token by token. Also at `/completions`.
#[utoipa::path(post, path = "/completion", tag = "llama-server",
    request_body(content = LlamaCompletionBody, content_type = "application/json"),
    responses((status = 200, description = "The answer, a list of answers, or server-sent events: chunks, the last one with the final fields and no text",
                  content((LlamaCompletion = "application/json"), (LlamaCompletionChunk = "text/event-stream"))),
              (status = 400, description = "A field is invalid; the message names it"),
              (status = 503, description = "The model is loading")))]
async fn completion(client: RunClient, body: Result<ModelBody, ApiError>) -> Result<Response, LlamaError> {
    let ModelBody { body, loaded, .. } = body?;
    let fields = Fields::new(&body)?;
    let prompts = request::parse_prompts(&client.app, fields, &loaded).await?;
    complete(&client, &loaded, fields, prompts).await
}

/// Runs the prompts of a body and returns the response.
pub(super) async fn complete(
    client: &RunClient,
    loaded: &LoadedModel,
    fields: Fields<'_>,
    prompts: Vec<LlamaPrompt>,
) -> Result<Response, LlamaError> {
    let LlamaCompletionRequest { requests, options } = request::parse(&client.app, loaded, fields, prompts)?;
    let vocabulary = loaded.vocabulary();
    let echoed: Vec<EchoedRequest> = requests.iter().map(|request| EchoedRequest::new(request, vocabulary)).collect();
    let runs = Runs::start(client, loaded, requests).await?;
    let run_id = runs.run_id();
    let responses = runs.started.iter().zip(echoed).enumerate().map(|(index, (run, echoed))| {
        RunResponse::new(index, run.clone(), echoed, options.clone(), Arc::clone(vocabulary), loaded.name().to_owned())
    });
    let responses: Vec<RunResponse> = responses.collect();
    let response = if options.reported.stream {
        stream_runs(runs, LlamaChunkWriter { responses }, options.ping)
    } else {
        ([(header::CONTENT_TYPE, "application/json")], collect(runs, responses).await?).into_response()
    };
    Ok(generation::with_run_id(response, run_id))
}

/// Returns the answer as JSON, or a list of several answers.
async fn collect(mut runs: Runs, mut responses: Vec<RunResponse>) -> Result<String, ApiError> {
    let mut answers = vec![String::new(); responses.len()];
    while let Some((index, output)) = runs.next().await? {
        let response = &mut responses[index];
        match output {
            Output::Text(delta) => response.add(delta),
            Output::Retract { tokens, .. } => response.retract(tokens),
            Output::PromptProbabilities(_) | Output::PromptProgress(_) => {}
            Output::Ended(end) => answers[index] = response.final_chunk(&end),
        }
    }
    Ok(match answers.len() {
        1 => answers.remove(0),
        _ => format!("[{}]", answers.join(",")),
    })
}
