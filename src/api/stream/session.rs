//! One connection: several runs at once, each by its `request_id`, and what is said to them.

use super::begin::{Beginning, begin, new_id};
use super::read::Config;
use super::run::{EndedBy, Follower, Run};
use super::{control, feedback, message, stored};
use crate::api::peers::{ForwardHeaders, Relay};
use crate::api::shared::{Fields, parameters};
use crate::api::socket::{Close, Message, Outgoing, Socket};
use crate::api::{ApiError, App, Caller, ErrorKind};
use crate::events::Surface;
use serde_json::Value;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

/// Most runs that one connection may have at once.
const MAX_RUNS: usize = 16;

/// Runs that are over and may still be spoken of.
const MOST_OVER: usize = 32;

/// A connection of the streaming protocol.
pub(super) struct Session {
    pub(super) app: App,
    pub(super) caller: Option<Caller>,
    address: Option<SocketAddr>,
    /// Headers for another server that generates a run of this connection.
    pub(super) headers: ForwardHeaders,
    pub(super) outgoing: Outgoing,
    pub(super) tasks: JoinSet<()>,
    /// Runs by their `request_id`, the newest last.
    runs: Vec<(String, Going)>,
}

/// A run of this connection.
#[derive(Clone)]
pub(super) struct Going {
    /// Empty until the run has begun.
    pub(super) begun: Arc<OnceLock<Arc<Run>>>,
    /// Whether the client stopped it before it had begun.
    pub(super) unwanted: Arc<watch::Sender<bool>>,
    /// The way to the server that generates it, if that is another one; `begun` stays empty then.
    pub(super) relay: Option<Relay>,
    pub(super) task: AbortHandle,
}

impl Going {
    fn goes_on(&self) -> bool {
        match &self.relay {
            Some(_) => !self.task.is_finished(),
            None => self.begun.get().is_none_or(|run| !run.is_over()),
        }
    }
}

/// Serves a connection.
pub(super) async fn serve(app: App, socket: Socket) -> Close {
    let Socket { caller, address, headers, mut incoming, outgoing } = socket;
    let mut session = Session { app, caller, address, headers, outgoing, tasks: JoinSet::new(), runs: Vec::new() };
    let mut greeted = false;
    loop {
        let received = tokio::select! {
            received = incoming.next() => received,
            Some(_) = session.tasks.join_next() => continue,
        };
        let heard = match read(received) {
            // Who brings a key that was not asked for, or that a header has brought, may.
            Ok(message) if !greeted && message["type"] == "auth" => continue,
            Ok(message) if !greeted && !opens(&message) => Err(ApiError::bad_request(
                "the first message must be a config message, {\"type\": \"config\", \"prompt\": …}",
            )),
            Ok(message) => {
                greeted = true;
                session.hear(&message).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = heard
            && session.say(message::error(&error, None)).await.is_err()
        {
            return Close::normal();
        }
        if !greeted {
            return Close::policy("the first message must be a config message");
        }
    }
}

fn read(message: Message) -> Result<Value, ApiError> {
    let Message::Text(text) = message else {
        return Err(ApiError::bad_request("messages are JSON objects in text frames, this one is binary"));
    };
    let value: Value = serde_json::from_str(&text)
        .map_err(|error| ApiError::bad_request(format!("the message is not JSON: {error}")))?;
    if value.is_object() { Ok(value) } else { Err(ApiError::bad_request("a message is a JSON object with a \"type\"")) }
}

/// Whether a conversation may begin with it.
fn opens(message: &Value) -> bool {
    matches!(message["type"].as_str(), Some("config" | "resume" | "feedback"))
}

impl Session {
    async fn hear(&mut self, message: &Value) -> Result<(), ApiError> {
        let fields = Fields::new(message)?;
        match fields.text("type")? {
            Some("config") if is_return(fields) => self.resume(fields).await,
            Some("config") => self.configure(message),
            Some("resume") => self.resume(fields).await,
            Some("control") => match self.relay_of(fields) {
                Some(relay) => self.control_remote(&relay, message).await,
                None => control::obey(self, fields).await,
            },
            Some("feedback") => feedback::hear(self, fields),
            Some("ping") => self.say(message::status("ping", 100, "pong", None)).await,
            Some("auth") => Ok(()),
            Some(other) => Err(ApiError::invalid(
                "type",
                format!(
                    "there is no message of type '{other}'; there are config, control, feedback, resume, ping and auth"
                ),
            )),
            None => Err(ApiError::invalid("type", "type is missing: config, control, feedback, resume, ping or auth")),
        }
    }

    fn configure(&mut self, message: &Value) -> Result<(), ApiError> {
        let config = Config::read(message, true)?;
        let request_id = config.request_id().map_or_else(new_id, str::to_owned);
        self.begin(config, request_id, None)
    }

    /// Begins a run; what follows is told by a task of its own.
    pub(super) fn begin(
        &mut self,
        config: Config,
        request_id: String,
        replaces: Option<String>,
    ) -> Result<(), ApiError> {
        self.app.rates().check(self.caller.as_ref(), self.address)?;
        self.check_count()?;
        if self.runs.iter().any(|(id, going)| *id == request_id && going.goes_on()) {
            return Err(ApiError::conflict(format!("request_id '{request_id}' goes on already")).at("request_id"));
        }
        let begun = Arc::new(OnceLock::new());
        let beginning = Beginning {
            request_id: request_id.clone(),
            caller: self.caller.clone(),
            surface: Surface::Websocket,
            replaces,
            keep: self.app.config().server.run_timeouts.disconnected,
        };
        let unwanted = Arc::new(watch::Sender::new(false));
        let (app, outgoing, entry) = (self.app.clone(), self.outgoing.clone(), Arc::clone(&begun));
        let stopped = Arc::clone(&unwanted);
        let task = self.tasks.spawn(async move {
            let _at_work = outgoing.at_work();
            let id = beginning.request_id.clone();
            let mut stop = stopped.subscribe();
            let begun = tokio::select! {
                biased;
                begun = begin(&app, &config, beginning, Some(&outgoing)) => Some(begun),
                _ = stop.wait_for(|&stop| stop) => None,
            };
            let said = match begun {
                Some(Ok(run)) => {
                    let follower = run.follow(0);
                    let _ = entry.set(Arc::clone(&run));
                    // Whoever stopped it meanwhile may not have seen that it has begun.
                    if *stopped.borrow() {
                        run.stop(EndedBy::Client).await;
                    }
                    let init = message::init(follower.run(), None);
                    let echo = message::echo(follower.run());
                    follow(follower, std::iter::once(init).chain(echo), &outgoing).await;
                    return;
                }
                Some(Err(error)) => message::error(&error, Some(&id)),
                None => message::never_begun(&id),
            };
            // Nothing can be told to a client that has gone.
            let _ = outgoing.send(said.to_string()).await;
        });
        self.enter(request_id, Going { begun, unwanted, relay: None, task });
        Ok(())
    }

    /// Hears a run again that another connection has begun, or this one.
    async fn resume(&mut self, fields: Fields<'_>) -> Result<(), ApiError> {
        let Some(id) = parameters::request_id(fields)? else {
            return Err(ApiError::invalid("request_id", "request_id is missing: the one of init"));
        };
        let after = fields.integer("after", 0..=i64::from(u32::MAX))?.unwrap_or(0) as usize;
        self.check_count()?;
        let Some(run) = self.app.streams().find(&id) else {
            if self.resume_remote(&id, after).await? {
                return Ok(());
            }
            for message in stored::messages(&self.app, &id).await? {
                self.say(message).await?;
            }
            return Ok(());
        };
        let begun = Arc::new(OnceLock::new());
        let _ = begun.set(Arc::clone(&run));
        let follower = run.follow(after);
        let outgoing = self.outgoing.clone();
        let task = self.tasks.spawn(async move {
            let _at_work = outgoing.at_work();
            let init = message::init(follower.run(), Some(follower.position()));
            follow(follower, std::iter::once(init), &outgoing).await;
        });
        self.enter(run.request_id.clone(), Going { begun, unwanted: Arc::default(), relay: None, task });
        Ok(())
    }

    pub(super) fn enter(&mut self, id: String, going: Going) {
        self.runs.retain(|(known, _)| *known != id);
        self.runs.push((id, going));
        let over = |going: &Going| going.task.is_finished();
        while self.runs.iter().filter(|(_, going)| over(going)).count() > MOST_OVER
            && let Some(at) = self.runs.iter().position(|(_, going)| over(going))
        {
            self.runs.remove(at);
        }
    }

    fn check_count(&self) -> Result<(), ApiError> {
        let count = self.runs.iter().filter(|(_, going)| !going.task.is_finished()).count();
        if count < MAX_RUNS {
            return Ok(());
        }
        let detail = format!("{count} runs go on on this connection; it may have {MAX_RUNS} at once");
        Err(ApiError::new(ErrorKind::Busy, detail).retry_after(1))
    }

    /// The run that a message means: by its `request_id`, without one the newest.
    ///
    /// # Errors
    /// There is none on this connection.
    pub(super) fn meant(&self, fields: Fields<'_>) -> Result<(String, Going), ApiError> {
        let found = match fields.text("request_id")? {
            Some(id) => {
                let found = self.runs.iter().rev().find(|(known, going)| {
                    known == id
                        || going.begun.get().is_some_and(|run| run.id.to_string() == id)
                        || going.relay.as_ref().is_some_and(|relay| relay.has(id))
                });
                found.ok_or_else(|| ApiError::invalid("request_id", format!("this connection has no run '{id}'")))
            }
            None => self.runs.last().ok_or_else(|| ApiError::bad_request("there is no run yet; send a config message")),
        };
        found.cloned()
    }

    /// Says something.
    ///
    /// # Errors
    /// The client has gone.
    pub(super) async fn say(&self, message: Value) -> Result<(), ApiError> {
        let sent = self.outgoing.send(message.to_string()).await;
        sent.map_err(|gone| ApiError::unavailable(gone.to_string()))
    }
}

/// Whether a configuration only says which run to hear again.
fn is_return(fields: Fields<'_>) -> bool {
    fields.get("prompt").is_none() && fields.get("request_id").is_some()
}

/// Tells a run to its end.
async fn follow(mut follower: Follower, first: impl Iterator<Item = Value>, outgoing: &Outgoing) {
    for message in first {
        if outgoing.send(message.to_string()).await.is_err() {
            return;
        }
    }
    while let Some(message) = follower.next().await {
        if outgoing.send(message.to_string()).await.is_err() {
            return;
        }
    }
    if !follower.has_told_end() {
        let id = &follower.run().request_id;
        let moved = message::status("moved", 100, "another connection hears this run now", Some(id));
        let _ = outgoing.send(moved.to_string()).await;
    }
}
