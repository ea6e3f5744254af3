//! What a client thinks of an answer.

use super::message;
use super::session::Session;
use crate::api::ApiError;
use crate::api::native::feedback;
use crate::api::shared::Fields;

/// Keeps what a feedback message says with the run that it means.
///
/// # Errors
/// There is no such run, the message is wrong, or the database is away.
pub(super) fn hear(session: &mut Session, fields: Fields<'_>) -> Result<(), ApiError> {
    let given = feedback::read(fields)?;
    let (id, known) = match (session.meant(fields), fields.text("request_id")?) {
        (Ok((id, going)), _) => {
            let known = going.begun.get().map_or_else(|| id.clone(), |run| run.id.to_string());
            (id, known)
        }
        // Of an earlier connection.
        (Err(_), Some(id)) => (id.to_owned(), id.to_owned()),
        (Err(error), None) => return Err(error),
    };
    let (app, outgoing, caller) = (session.app.clone(), session.outgoing.clone(), session.caller.clone());
    // The run may have to be stored first; what else the client says does not wait for that.
    session.tasks.spawn(async move {
        let _at_work = outgoing.at_work();
        let said = match feedback::keep(&app, &known, given, caller).await {
            Ok(_) => message::status("feedback", 100, "kept with the run", Some(&id)),
            Err(error) => message::error(&error, Some(&id)),
        };
        // When the client has gone, there is nobody to tell.
        let _ = outgoing.send(said.to_string()).await;
    });
    Ok(())
}
