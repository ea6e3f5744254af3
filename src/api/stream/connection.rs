//! A connection: its concurrent runs, identified by `request_id`, and their control messages.

use super::config::RunConfig;
use super::connection_run::{ConnectionRun, ReplacedRun};
use super::registry::StreamedRuns;
use super::response::{RunErrorMessage, StatusMessage, StatusOperation, StreamMessage};
use super::start::{NewRun, new_id};
use super::{control, feedback, stored};
use crate::api::shared::generation::RunClient;
use crate::api::shared::sse::to_json;
use crate::api::shared::{Fields, parameters};
use crate::events::Surface;
use crate::server::peers::ForwardHeaders;
use crate::server::socket::{Close, Message, Outgoing, Socket};
use crate::server::{ApiError, App, Caller, ErrorKind};
use serde_json::Value;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};

/// Maximum concurrent runs of a connection.
const MAX_RUNS: usize = 16;

/// Maximum ended runs that a connection keeps for control messages.
const MAX_ENDED_RUNS: usize = 32;

/// A connection of the streaming protocol.
pub(super) struct StreamConnection {
    pub(super) app: App,
    streamed_runs: StreamedRuns,
    pub(super) caller: Caller,
    address: Option<SocketAddr>,
    /// Headers for requests to another server that generates a run of this connection.
    pub(super) headers: ForwardHeaders,
    pub(super) outgoing: Outgoing,
    pub(super) tasks: JoinSet<()>,
    /// Permits of feedback messages that are being stored or answered.
    pub(super) feedback_permits: Arc<Semaphore>,
    /// Tasks that report the lost slot of a paused run, by `request_id`.
    slot_watchers: HashMap<String, AbortHandle>,
    /// Runs by `request_id`, newest last.
    runs: Vec<(String, ConnectionRun)>,
}

/// Serves a connection.
pub(super) async fn serve(app: App, streamed_runs: StreamedRuns, socket: Socket) -> Close {
    let Socket { caller, address, headers, mut incoming, outgoing } = socket;
    let mut connection = StreamConnection {
        app,
        streamed_runs,
        caller,
        address,
        headers,
        outgoing,
        tasks: JoinSet::new(),
        feedback_permits: Arc::new(Semaphore::new(feedback::MAX_CONCURRENT)),
        slot_watchers: HashMap::new(),
        runs: Vec::new(),
    };
    let mut is_open = false;
    loop {
        let received = tokio::select! {
            received = incoming.next() => received,
            Some(_) = connection.tasks.join_next() => continue,
        };
        let message = read(received);
        let request_id = message.as_ref().ok().and_then(client_request_id);
        let handled = match message {
            // A key that is not required or was already sent as a header is accepted.
            Ok(message) if !is_open && message["type"] == "auth" => continue,
            Ok(message) if !is_open && !can_open(&message) => Err(ApiError::bad_request(
                "the first message must be config, resume or feedback, such as {\"type\": \"config\", \"prompt\": …}",
            )),
            Ok(message) => {
                is_open = true;
                connection.handle(&message).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = handled
            && connection.send_message(RunErrorMessage::new(&error, request_id.as_deref())).await.is_err()
        {
            return Close::normal();
        }
        if !is_open {
            return Close::policy("the first message must be config, resume or feedback");
        }
    }
}

fn read(message: Message) -> Result<Value, ApiError> {
    let Message::Text(text) = message else {
        return Err(ApiError::bad_request("expected a text frame with a JSON object, got a binary frame"));
    };
    let value: Value = serde_json::from_str(&text)
        .map_err(|error| ApiError::bad_request(format!("the message is not JSON: {error}")))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(ApiError::bad_request("the message must be a JSON object with the field `type`"))
    }
}

/// Returns the `request_id` of a message, unless it is invalid.
fn client_request_id(message: &Value) -> Option<String> {
    parameters::request_id(Fields::new(message).ok()?).ok().flatten()
}

/// Returns true if this may be the first message of a connection.
fn can_open(message: &Value) -> bool {
    matches!(message["type"].as_str(), Some("config" | "resume" | "feedback"))
}

impl StreamConnection {
    async fn handle(&mut self, message: &Value) -> Result<(), ApiError> {
        let fields = Fields::new(message)?;
        match fields.text("type")? {
            Some("config") if is_resume(fields) => self.resume(fields).await,
            Some("config") => self.configure(message),
            Some("resume") => self.resume(fields).await,
            Some("control") => match self.relay_of(fields) {
                Some(relay) => self.control_remote(&relay, message).await,
                None => control::handle(self, fields).await,
            },
            Some("feedback") => feedback::submit(self, fields).await,
            Some("ping") => self.send_message(StatusMessage::complete(StatusOperation::Ping, "pong", None)).await,
            Some("auth") => Ok(()),
            Some(other) => Err(ApiError::invalid(
                "type",
                format!("unknown message type '{other}'; expected config, control, feedback, resume, ping or auth"),
            )),
            None => Err(ApiError::invalid(
                "type",
                "`type` is missing; expected config, control, feedback, resume, ping or auth",
            )),
        }
    }

    fn configure(&mut self, message: &Value) -> Result<(), ApiError> {
        let config = RunConfig::parse(message, true)?;
        let request_id = config.request_id().map_or_else(new_id, str::to_owned);
        self.start_run(config, request_id, None)
    }

    /// Starts a run in a task that sends its messages. `replaced` continues if the new run does not start.
    pub(super) fn start_run(
        &mut self,
        config: RunConfig,
        request_id: String,
        replaced: Option<ReplacedRun>,
    ) -> Result<(), ApiError> {
        self.app.rate_limits().check(Some(&self.caller), self.address)?;
        self.check_count()?;
        if self.runs.iter().any(|(id, connection_run)| *id == request_id && connection_run.is_active()) {
            return Err(ApiError::conflict(format!(
                "`request_id` '{request_id}' belongs to an active run of this connection"
            ))
            .at("request_id"));
        }
        let new_run = NewRun {
            request_id: request_id.clone(),
            client: RunClient::socket(self.app.clone(), self.caller.clone()),
            streamed_runs: self.streamed_runs.clone(),
            surface: Surface::Websocket,
            replaces: replaced.as_ref().map(|replaced| replaced.run.request_id.clone()),
            grace_period: self.app.config().server.run_timeouts.disconnected,
        };
        let run = ConnectionRun::start(&mut self.tasks, config, new_run, replaced, self.outgoing.clone());
        self.add_run(request_id, run);
        Ok(())
    }

    /// Follows a run that this or another connection has started.
    async fn resume(&mut self, fields: Fields<'_>) -> Result<(), ApiError> {
        let Some(id) = parameters::request_id(fields)? else {
            return Err(ApiError::invalid("request_id", "`request_id` is missing; send the one from the init message"));
        };
        let after = fields.integer("after", 0..=i64::from(u32::MAX))?.unwrap_or(0) as usize;
        self.check_count()?;
        let Some(run) = self.streamed_runs.find(&self.caller.scope, &id) else {
            if self.resume_remote(&id, after).await? {
                return Ok(());
            }
            for message in stored::messages(&self.app, &self.caller.scope, &id).await? {
                self.send_message(message).await?;
            }
            return Ok(());
        };
        let request_id = run.request_id.clone();
        let resumed = ConnectionRun::resume(&mut self.tasks, run.follow(after), self.outgoing.clone());
        self.add_run(request_id, resumed);
        Ok(())
    }

    pub(super) fn add_run(&mut self, id: String, connection_run: ConnectionRun) {
        self.runs.retain(|(known, _)| *known != id);
        self.runs.push((id, connection_run));
        let has_ended = |connection_run: &ConnectionRun| connection_run.task.is_finished();
        while self.runs.iter().filter(|(_, connection_run)| has_ended(connection_run)).count() > MAX_ENDED_RUNS
            && let Some(at) = self.runs.iter().position(|(_, connection_run)| has_ended(connection_run))
        {
            self.runs.remove(at);
        }
    }

    /// Replaces the task that reports the lost slot of a paused run.
    pub(super) fn replace_slot_watcher(&mut self, id: &str, watcher: AbortHandle) {
        self.slot_watchers.retain(|_, watcher| !watcher.is_finished());
        if let Some(previous) = self.slot_watchers.insert(id.to_owned(), watcher) {
            previous.abort();
        }
    }

    fn check_count(&self) -> Result<(), ApiError> {
        let count = self.runs.iter().filter(|(_, connection_run)| !connection_run.task.is_finished()).count();
        if count < MAX_RUNS {
            return Ok(());
        }
        let detail = format!("a connection can have at most {MAX_RUNS} active runs, and this one has {count}");
        Err(ApiError::new(ErrorKind::Busy, detail).retry_after(1))
    }

    /// Returns the run of a message: the one with its `request_id`, or without it the newest that has started or
    /// is starting.
    ///
    /// # Errors
    /// This connection has no such run.
    pub(super) fn find_run(&self, fields: Fields<'_>) -> Result<(String, ConnectionRun), ApiError> {
        let found = match fields.text("request_id")? {
            Some(id) => {
                let found =
                    self.runs.iter().rev().find(|(known, connection_run)| known == id || connection_run.has_run_id(id));
                found.ok_or_else(|| ApiError::invalid("request_id", format!("this connection has no run '{id}'")))
            }
            None => self
                .runs
                .iter()
                .rfind(|(_, connection_run)| !connection_run.is_not_started())
                .or_else(|| self.runs.last())
                .ok_or_else(|| ApiError::bad_request("this connection has no run; send a config message")),
        };
        found.cloned()
    }

    /// Sends a message.
    ///
    /// # Errors
    /// The client has disconnected.
    pub(super) async fn send_message(&self, message: impl Into<StreamMessage<'_>>) -> Result<(), ApiError> {
        let sent = self.outgoing.send(to_json(&message.into())).await;
        sent.map_err(|error| ApiError::unavailable(error.to_string()))
    }
}

/// Returns true if a configuration only names a run to resume.
fn is_resume(fields: Fields<'_>) -> bool {
    fields.get("prompt").is_none() && fields.get("request_id").is_some()
}
