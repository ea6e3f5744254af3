//! `/api/v1/reruns`: repeats a recorded run with the same seed, model, mods and parameters.

use super::recorded_request::{self, recorded_model};
use crate::api::shared::generation::RunClient;
use crate::api::shared::images::restore_images;
use crate::engine::Output;
use crate::events::{FinishReason, PromptRecord, RunId};
use crate::server::extract::Json;
use crate::server::{ApiError, Problem, note_started_run};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The run to repeat.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RerunRequest {
    /// The object `prompt` from the first event's `details`, as recorded.
    prompt: PromptRecord,
    /// Use the current versions of mods, even if they differ from those of the recorded run.
    #[serde(default)]
    any_version: bool,
}

/// The new run.
#[derive(Debug, Serialize, ToSchema)]
pub struct RerunResponse {
    /// Id of the new run.
    #[schema(value_type = String)]
    run_id: RunId,
    /// Reason why it ended.
    #[schema(value_type = String)]
    finish_reason: FinishReason,
    /// Explanation of the finish reason; `null` if it needs none.
    message: Option<String>,
}

/// Repeats a recorded run and responds when the new run has ended. The new run is recorded as usual.
#[utoipa::path(post, path = "/api/v1/reruns", tag = "runs", request_body = RerunRequest, responses(
    (status = 200, body = RerunResponse),
    (status = 400, body = Problem, description = "The recording is incomplete or does not fit this model"),
    (status = 404, body = Problem, description = "Unknown model"),
    (status = 409, body = Problem, description = "The model or a mod differs from the recorded one")))]
pub async fn run(client: RunClient, Json(rerun): Json<RerunRequest>) -> Result<axum::Json<RerunResponse>, ApiError> {
    let recorded = rerun.prompt.parameters.clone().unwrap_or_default();
    if !recorded["fork"].is_null() {
        let detail = "the run is a fork, which its prompt alone does not reproduce; fork it again with POST \
             /api/v1/runs/{id}/forks";
        return Err(ApiError::conflict(detail).at("prompt.parameters.fork"));
    }
    let loaded = recorded_model(&client.app, &recorded).await?;
    let mods = recorded_request::mods(&client.app, &recorded["mods"], rerun.any_version).await?;
    let images = rerun.prompt.images.clone();
    let mut request = recorded_request::request(rerun.prompt, &recorded, &loaded)?;
    restore_images(&client.app, &client.caller.scope, &loaded, &images, &mut request).await?;
    request.mods = mods;
    client.set_client(&mut request);
    let mut generation = loaded.engine().submit(request).await?;
    note_started_run(generation.run_id);
    loop {
        let output = tokio::select! {
            output = generation.output.recv() => output,
            () = client.app.wait_until_stopped() => return Err(ApiError::unavailable("the server is stopping").retry_after(1)),
        };
        match output {
            Some(Output::Ended(end)) => {
                let (finish_reason, message) = (end.finish.reason, end.finish.message.clone());
                return Ok(axum::Json(RerunResponse { run_id: generation.run_id, finish_reason, message }));
            }
            Some(_) => {}
            None => return Err(ApiError::internal("the engine dropped a run")),
        }
    }
}
