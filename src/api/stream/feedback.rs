//! Feedback on an answer.

use super::connection::StreamConnection;
use super::response::{RunErrorMessage, StatusMessage, StatusOperation, StreamMessage};
use crate::api::shared::Fields;
use crate::api::shared::feedback;
use crate::api::shared::sse::to_json;
use crate::server::ApiError;
use std::sync::Arc;

/// Maximum feedback messages of a connection that are stored or answered concurrently.
pub(super) const MAX_CONCURRENT: usize = 16;

/// Stores feedback with its run. Waits while [`MAX_CONCURRENT`] other messages are being stored or answered.
///
/// # Errors
/// The run is unknown, the message is invalid, or the database is unavailable.
pub(super) async fn submit(connection: &mut StreamConnection, fields: Fields<'_>) -> Result<(), ApiError> {
    let request = feedback::parse(fields)?;
    let (id, run_id) = match (connection.find_run(fields), fields.text("request_id")?) {
        (Ok((id, connection_run)), _) => {
            let run_id = connection_run.started().map_or_else(|| id.clone(), |run| run.id.to_string());
            (id, run_id)
        }
        // A run of an earlier connection.
        (Err(_), Some(id)) => (id.to_owned(), id.to_owned()),
        (Err(error), None) => return Err(error),
    };
    // A client that does not read its replies is not read from, either. The task that writes to it continues.
    let permit = Arc::clone(&connection.feedback_permits)
        .acquire_owned()
        .await
        .map_err(|error| ApiError::unavailable(error.to_string()))?;
    let (app, outgoing, caller) = (connection.app.clone(), connection.outgoing.clone(), connection.caller.clone());
    // Other messages of the client are handled meanwhile, because the run may have to be stored first.
    connection.tasks.spawn(async move {
        let _permit = permit;
        let _activity = outgoing.mark_active();
        let message = match feedback::store(&app, &run_id, request, &caller).await {
            Ok(_) => StatusMessage::complete(StatusOperation::Feedback, "stored with the run", Some(&id)).into(),
            Err(error) => StreamMessage::Error(RunErrorMessage::new(&error, Some(&id))),
        };
        // Sending fails only if the client has disconnected.
        let _ = outgoing.send(to_json(&message)).await;
    });
    Ok(())
}
