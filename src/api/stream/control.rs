//! What a client says to a run that goes on.

use super::begin::new_id;
use super::message;
use super::run::{EndedBy, Run};
use super::session::{Going, Session};
use crate::api::ApiError;
use crate::api::shared::Fields;
use crate::api::shared::fields::invalid_value;
use crate::engine::{RunActivity, RunOver, RunProgress};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

const ACTIONS: &str = "\"stop\", \"pause\", \"resume\", \"regenerate\" or \"modify\"";

/// Does what a control message says.
///
/// # Errors
/// There is no such run, it is over, or the message is wrong.
pub(super) async fn obey(session: &mut Session, fields: Fields<'_>) -> Result<(), ApiError> {
    let Some(action) = fields.text("action")? else {
        return Err(ApiError::invalid("action", format!("action is missing: {ACTIONS}")));
    };
    if !matches!(action, "stop" | "pause" | "resume" | "regenerate" | "modify") {
        return Err(invalid_value("action", ACTIONS, &Value::from(action)));
    }
    let (id, going) = session.meant(fields)?;
    let done = match going.begun.get() {
        None => before_it_begins(&id, action, &going).await,
        Some(run) => {
            let run = Arc::clone(run);
            match action {
                "stop" => stop(&run).await,
                "pause" => pause(session, &run).await,
                "resume" => resume(session, &run).await,
                "modify" => modify(session, &run, fields).await,
                _ => regenerate(session, &run, &going).await,
            }
        }
    };
    match done {
        Ok(()) => Ok(()),
        // It is clear which run is meant, so that the error may say so.
        Err(error) => session.say(message::error(&error, Some(&id))).await,
    }
}

async fn before_it_begins(id: &str, action: &str, going: &Going) -> Result<(), ApiError> {
    if action != "stop" {
        let detail = format!("run '{id}' has not begun: {action} takes a run after its init message");
        return Err(ApiError::conflict(detail));
    }
    going.unwanted.send_replace(true);
    // It may have begun meanwhile.
    if let Some(run) = going.begun.get() {
        run.stop(EndedBy::Client).await;
    }
    Ok(())
}

async fn stop(run: &Arc<Run>) -> Result<(), ApiError> {
    if run.is_over() {
        return Err(over(run));
    }
    run.stop(EndedBy::Client).await;
    Ok(())
}

async fn pause(session: &mut Session, run: &Arc<Run>) -> Result<(), ApiError> {
    let slot_for = session.app.config().server.run_timeouts.paused_slot;
    let standing = run.control.pause(slot_for).await.map_err(|RunOver| over(run))?;
    let kept = match standing.activity {
        RunActivity::Finished => return Err(over(run)),
        RunActivity::Preempted | RunActivity::Queued => "it has no slot".to_owned(),
        _ => format!("its slot is kept for {} s", slot_for.as_secs_f32()),
    };
    tell(session, run, "pause", &format!("paused after {} tokens; {kept}", standing.generated), &json!(null)).await?;
    if standing.activity == RunActivity::Paused {
        let (run, outgoing) = (Arc::clone(run), session.outgoing.clone());
        session.tasks.spawn(async move {
            // A little later than the engine, which looks when it has nothing else to do.
            tokio::time::sleep(slot_for + Duration::from_millis(200)).await;
            if run.control.progress().await.is_ok_and(|standing| standing.activity == RunActivity::Preempted) {
                let text = "paused for long: the slot went to others; resume waits for one";
                let status = message::status("pause", 100, text, Some(&run.request_id));
                // When the client has gone, there is nobody to tell.
                let _ = outgoing.send(status.to_string()).await;
            }
        });
    }
    Ok(())
}

async fn resume(session: &Session, run: &Arc<Run>) -> Result<(), ApiError> {
    let standing = run.control.resume().await.map_err(|RunOver| over(run))?;
    let said = match standing.activity {
        RunActivity::Finished => return Err(over(run)),
        RunActivity::Queued => "it goes on as soon as there is a slot",
        _ => "it goes on",
    };
    tell(session, run, "resume", said, &json!(null)).await
}

async fn modify(session: &Session, run: &Arc<Run>, fields: Fields<'_>) -> Result<(), ApiError> {
    let Some(parameters) = fields.object("parameters")?.filter(|parameters| !parameters.is_empty()) else {
        return Err(ApiError::invalid("parameters", "parameters is missing: an object with what is to change"));
    };
    let (config, said) = run.config().modified(parameters)?;
    let head = &run.head;
    let (sampling, mut limits) = config.drawing(&session.app, &head.vocabulary, head.room, Some(head.seed))?;
    limits.apply_server_limit(session.app.config().server.max_tokens)?;
    let note = format!("the client changed {said}");
    let RunProgress { generated, activity, .. } =
        run.control.modify(sampling, limits, note).await.map_err(|RunOver| over(run))?;
    if activity == RunActivity::Finished {
        return Err(over(run));
    }
    run.set_config(config);
    let text = format!("{said} from token {} on", generated + 1);
    tell(session, run, "modify", &text, &Value::Object(parameters.clone())).await
}

async fn regenerate(session: &mut Session, run: &Arc<Run>, going: &Going) -> Result<(), ApiError> {
    session.begin(run.config().again(), new_id(), Some(run.request_id.clone()))?;
    // Nobody is to hear the end of the old one: the new one's init says that it is gone.
    going.task.abort();
    run.stop(EndedBy::Regenerate).await;
    Ok(())
}

async fn tell(
    session: &Session,
    run: &Arc<Run>,
    operation: &str,
    text: &str,
    parameters: &Value,
) -> Result<(), ApiError> {
    let mut status = message::status(operation, 100, text, Some(&run.request_id));
    if !parameters.is_null() {
        status["parameters"] = parameters.clone();
    }
    session.say(status).await
}

fn over(run: &Run) -> ApiError {
    ApiError::conflict(format!("run '{}' is over; regenerate, or a new config message, begins another", run.request_id))
}
