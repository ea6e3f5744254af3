//! Follows and controls runs of other servers through a relay to the server that generates them.

use super::connection::StreamConnection;
use super::connection_run::ConnectionRun;
use super::request::ResumeMessage;
use super::response::RunErrorMessage;
use crate::api::shared::Fields;
use crate::api::shared::sse::to_json;
use crate::server::peers::{Relay, find_peer, find_recent, relay};
use crate::server::{ApiError, ErrorKind};
use serde_json::Value;

impl StreamConnection {
    /// Follows a run on the server that generates it. Returns false if no other server generates it.
    ///
    /// # Errors
    /// 503 if that server cannot be reached.
    pub(super) async fn resume_remote(&mut self, id: &str, after: usize) -> Result<bool, ApiError> {
        let run = match find_recent(&self.app, &self.caller.scope, id).await {
            Ok(run) => run,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let Some(peer) = find_peer(&self.app, &self.caller.scope, run.run_id, &self.headers).await? else {
            return Ok(false);
        };
        let first = to_json(&ResumeMessage::new(run.run_id.to_string(), after));
        let (relay, connection) = relay(&self.app, &peer, &self.headers, first).await?;
        let (outgoing, id) = (self.outgoing.clone(), run.request_id.clone());
        let task = self.tasks.spawn(async move {
            let _activity = outgoing.mark_active();
            if let Err(error) = connection.run(&outgoing).await {
                // Sending fails only if the client has disconnected.
                let _ = outgoing.send(to_json(&RunErrorMessage::new(&error, Some(&id)))).await;
            }
        });
        self.add_run(run.request_id, ConnectionRun::remote(relay, task));
        Ok(true)
    }

    /// Returns the relay of the run that a message refers to, if another server generates the run.
    pub(super) fn relay_of(&self, fields: Fields<'_>) -> Option<Relay> {
        self.find_run(fields).ok().and_then(|(_, connection_run)| connection_run.relay())
    }

    /// Forwards a control message to the server that generates the run.
    ///
    /// # Errors
    /// 409 if the run has ended.
    pub(super) async fn control_remote(&self, relay: &Relay, message: &Value) -> Result<(), ApiError> {
        if relay.send(message.to_string()).await {
            return Ok(());
        }
        Err(ApiError::conflict("the run has ended; send a new config message to start another"))
    }
}
