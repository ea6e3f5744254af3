//! Starts a run from a configuration, for the WebSocket and for HTTP.

use super::config::{PreparedRun, RunConfig};
use super::loading;
use super::registry::StreamedRuns;
use super::response::StreamModelInfo;
use super::run::{RunProperties, StreamedRun};
use crate::api::shared::generation::{self, RunClient};
use crate::events::{Surface, system};
use crate::server::ApiError;
use crate::server::socket::Outgoing;
use std::sync::Arc;
use std::time::Duration;

/// Properties of a new run besides its configuration.
pub(super) struct NewRun {
    pub(super) request_id: String,
    pub(super) client: RunClient,
    /// The registry that the run is added to.
    pub(super) streamed_runs: StreamedRuns,
    /// Origin of the run.
    pub(super) surface: Surface,
    /// `request_id` of the run that it replaces.
    pub(super) replaces: Option<String>,
    /// Time that the run continues without a follower.
    pub(super) grace_period: Duration,
}

/// Returns a new id for a run whose client sent none.
pub(super) fn new_id() -> String {
    format!("gen_{}", system::new_id().simple())
}

/// Starts a run. `outgoing` receives the loading progress of the model.
///
/// # Errors
/// The run was not started.
pub(super) async fn start(
    config: &RunConfig,
    new_run: NewRun,
    outgoing: Option<&Outgoing>,
) -> Result<Arc<StreamedRun>, ApiError> {
    let NewRun { request_id, client, streamed_runs, surface, replaces, grace_period } = new_run;
    let app = &client.app;
    let loaded = loading::wait(app, config.model(), &request_id, outgoing).await?;
    // Reserved until the run is registered, so that two concurrent runs cannot use the same id.
    let Some(_reserved) = streamed_runs.reserve(&request_id) else {
        let detail = format!(
            "`request_id` '{request_id}' belongs to another run; send a message of type \"resume\" to receive it"
        );
        return Err(ApiError::conflict(detail).at("request_id"));
    };
    let PreparedRun { mut request, prompt_text, room } = config.prepare(app, &loaded, request_id)?;
    if config.request_id().is_some() {
        generation::check_request_id(app, &request).await?;
    }
    request.surface = surface;
    client.set_client(&mut request);
    let mut options = config.options;
    options.timeout = options.timeout.into_iter().chain(app.config().server.run_timeouts.max_duration).min();
    let properties = RunProperties {
        owner: request.owner.clone(),
        options,
        model: loaded.name().to_owned(),
        model_info: StreamModelInfo::new(&loaded),
        prompt_text,
        vocabulary: Arc::clone(loaded.vocabulary()),
        seed: request.sampling.seed,
        room,
        replaces,
    };
    let generation = loaded.engine().submit(request).await?;
    Ok(StreamedRun::start(app, &streamed_runs, generation, config.clone(), properties, grace_period))
}
