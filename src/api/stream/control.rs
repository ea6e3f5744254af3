//! Control messages for active runs.

use super::connection::StreamConnection;
use super::connection_run::{ConnectionRun, ReplacedRun};
use super::request::ControlAction;
use super::response::{RunErrorMessage, StatusMessage, StatusOperation, StreamMessage};
use super::run::StreamedRun;
use super::start::new_id;
use crate::api::shared::Fields;
use crate::api::shared::fields::invalid_value;
use crate::api::shared::sse::to_json;
use crate::engine::{RunActivity, RunOver, RunProgress};
use crate::events::EndCause;
use crate::server::ApiError;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;

const ACTIONS: &str = "\"stop\", \"pause\", \"resume\", \"regenerate\" or \"modify\"";

impl ControlAction {
    fn from_name(name: &str) -> Result<Self, ApiError> {
        match name {
            "stop" => Ok(Self::Stop),
            "pause" => Ok(Self::Pause),
            "resume" => Ok(Self::Resume),
            "regenerate" => Ok(Self::Regenerate),
            "modify" => Ok(Self::Modify),
            _ => Err(invalid_value("action", ACTIONS, &Value::from(name))),
        }
    }
}

/// Executes a control message.
///
/// # Errors
/// The run is unknown or has ended, or the message is invalid.
pub(super) async fn handle(connection: &mut StreamConnection, fields: Fields<'_>) -> Result<(), ApiError> {
    let Some(name) = fields.text("action")? else {
        return Err(ApiError::invalid("action", format!("`action` is missing; expected {ACTIONS}")));
    };
    let action = ControlAction::from_name(name)?;
    let (id, connection_run) = connection.find_run(fields)?;
    let is_stop = action == ControlAction::Stop;
    let run = if is_stop { connection_run.cancel_start() } else { connection_run.started() };
    let result = match run {
        None if is_stop => Ok(()),
        None => Err(ApiError::conflict(format!("run '{id}' has not started; send {name} after its init message"))),
        Some(run) => match action {
            ControlAction::Stop => stop(&run).await,
            ControlAction::Pause => pause(connection, &run).await,
            ControlAction::Resume => resume(connection, &run).await,
            ControlAction::Modify => modify(connection, &run, fields).await,
            ControlAction::Regenerate => regenerate(connection, run, connection_run),
        },
    };
    match result {
        Ok(()) => Ok(()),
        // The run is known here, so the error can name it.
        Err(error) => connection.send_message(RunErrorMessage::new(&error, Some(&id))).await,
    }
}

async fn stop(run: &Arc<StreamedRun>) -> Result<(), ApiError> {
    if run.has_ended() {
        return Err(ended_error(run));
    }
    run.stop(EndCause::ClientStop).await;
    Ok(())
}

async fn pause(connection: &mut StreamConnection, run: &Arc<StreamedRun>) -> Result<(), ApiError> {
    let slot_timeout = connection.app.config().server.run_timeouts.paused_slot;
    let progress = run.control.pause(slot_timeout).await.map_err(|RunOver| ended_error(run))?;
    let slot = match progress.activity {
        RunActivity::Finished => return Err(ended_error(run)),
        RunActivity::Preempted | RunActivity::Queued => "it has no slot".to_owned(),
        _ => format!("its slot is kept for {} s", slot_timeout.as_secs_f32()),
    };
    let text = format!("paused after {} tokens; {slot}", progress.generated);
    connection.send_message(StatusMessage::complete(StatusOperation::Pause, text, Some(&run.request_id))).await?;
    if progress.activity == RunActivity::Paused {
        let (run, outgoing) = (Arc::clone(run), connection.outgoing.clone());
        let id = run.request_id.clone();
        let watcher = connection.tasks.spawn(async move {
            // The engine checks its timeout between two decodes.
            tokio::time::sleep(slot_timeout).await;
            let mut interval = Duration::from_millis(50);
            let activity = loop {
                match run.control.progress().await {
                    Ok(progress) if progress.activity == RunActivity::Paused => {}
                    Ok(progress) => break progress.activity,
                    Err(RunOver) => return,
                }
                tokio::time::sleep(interval).await;
                interval = (2 * interval).min(Duration::from_secs(1));
            };
            if activity == RunActivity::Preempted {
                let text = "the slot was released; resume waits for a free slot";
                let preempted = StatusMessage::complete(StatusOperation::Pause, text, Some(&run.request_id));
                // Sending fails only if the client has disconnected.
                let _ = outgoing.send(to_json(&StreamMessage::from(preempted))).await;
            }
        });
        connection.replace_slot_watcher(&id, watcher);
    }
    Ok(())
}

async fn resume(connection: &StreamConnection, run: &Arc<StreamedRun>) -> Result<(), ApiError> {
    let progress = run.control.resume().await.map_err(|RunOver| ended_error(run))?;
    let text = match progress.activity {
        RunActivity::Finished => return Err(ended_error(run)),
        RunActivity::Queued => "the run continues when a slot is free",
        _ => "the run continues",
    };
    connection.send_message(StatusMessage::complete(StatusOperation::Resume, text, Some(&run.request_id))).await
}

async fn modify(connection: &StreamConnection, run: &Arc<StreamedRun>, fields: Fields<'_>) -> Result<(), ApiError> {
    let Some(parameters) = fields.object("parameters")?.filter(|parameters| !parameters.is_empty()) else {
        return Err(ApiError::invalid(
            "parameters",
            "`parameters` is missing; send an object with the parameters to change",
        ));
    };
    let (config, changes) = run.config().modified(parameters)?;
    let properties = &run.properties;
    // A random seed is drawn only if the client changes the seed.
    let kept_seed = parameters.get("seed").is_none_or(Value::is_null).then(|| run.seed());
    let (sampling, mut limits) =
        config.sampling_and_limits(&connection.app, &properties.vocabulary, properties.room, kept_seed)?;
    let seed = sampling.seed;
    limits.apply_server_limit(connection.app.config().server.max_tokens)?;
    let note = format!("the client changed {changes}");
    if run.has_ended() {
        return Err(ended_error(run));
    }
    let _status = run.change_status.lock().await;
    let RunProgress { generated, activity, .. } =
        run.control.modify(sampling, limits, note).await.map_err(|RunOver| ended_error(run))?;
    let text = match activity {
        RunActivity::Finished => format!("{changes}; the run ends after {generated} tokens"),
        _ => format!("{changes} from token {} on", generated + 1),
    };
    run.set_config(config, seed);
    let status = StatusMessage::complete(StatusOperation::Modify, text, Some(&run.request_id));
    connection.send_message(StatusMessage { parameters: Some(parameters), ..status }).await
}

fn regenerate(
    connection: &mut StreamConnection,
    run: Arc<StreamedRun>,
    connection_run: ConnectionRun,
) -> Result<(), ApiError> {
    let config = run.config().without_request_id();
    let replaced = ReplacedRun { run, follower: connection_run.task };
    connection.start_run(config, new_id(), Some(replaced))
}

fn ended_error(run: &StreamedRun) -> ApiError {
    ApiError::conflict(format!(
        "run '{}' has ended; send regenerate or a new config message to start another",
        run.request_id
    ))
}
