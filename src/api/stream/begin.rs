//! From a configuration to a run that goes on, the same for the WebSocket and for HTTP.

use super::read::{Config, Prepared};
use super::run::{Head, Run};
use super::{loading, message};
use crate::api::socket::Outgoing;
use crate::api::{ApiError, App, Caller, generation};
use crate::events::Surface;
use std::sync::Arc;
use std::time::Duration;
use uuid::Uuid;

/// What a run is begun with, besides its configuration.
pub(super) struct Beginning {
    pub(super) request_id: String,
    pub(super) caller: Option<Caller>,
    /// Where it comes from.
    pub(super) surface: Surface,
    /// The run in whose place it comes.
    pub(super) replaces: Option<String>,
    /// How long it goes on without anybody who hears it.
    pub(super) keep: Duration,
}

/// An id for a run whose client has none for it.
pub(super) fn new_id() -> String {
    format!("gen_{}", Uuid::now_v7().simple())
}

/// Begins a run. `client` hears how far its model is.
///
/// # Errors
/// The run does not exist then.
pub(super) async fn begin(
    app: &App,
    config: &Config,
    beginning: Beginning,
    client: Option<&Outgoing>,
) -> Result<Arc<Run>, ApiError> {
    let Beginning { request_id, caller, surface, replaces, keep } = beginning;
    let loaded = loading::wait(app, config.model(), &request_id, client).await?;
    // Held until the run is known by it: two that begin at once cannot both have it.
    let Some(_name) = app.streams().take(&request_id) else {
        let detail = format!("request_id '{request_id}' belongs to another run; a message of type \"resume\" hears it");
        return Err(ApiError::conflict(detail).at("request_id"));
    };
    if config.request_id().is_some() {
        generation::check_request_id(app, Some(&request_id)).await?;
    }
    let Prepared { mut request, prompt_text, room } = config.prepare(app, &loaded, request_id)?;
    request.surface = surface;
    if let Some(caller) = caller {
        request.user_label.get_or_insert(caller.label);
    }
    let mut options = config.options;
    options.timeout = options.timeout.into_iter().chain(app.config().server.run_timeouts.max_duration).min();
    let head = Head {
        options,
        model: loaded.name().to_owned(),
        model_info: message::model_info(&loaded),
        prompt_text,
        vocabulary: Arc::clone(loaded.vocabulary()),
        seed: request.sampling.seed,
        room,
        replaces,
    };
    let generation = loaded.engine().submit(request).await?;
    Ok(Run::start(app, generation, config.clone(), head, keep))
}
