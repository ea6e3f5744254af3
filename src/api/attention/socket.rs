//! `WS /api/v1/generate/stream`: any number of requests on one connection, each with its `request_id`.
//!
//! A client sends `generate`, `cancel` and `ping`, as JSON texts or as binary `MessagePack`, and is answered in the form in which it
//! asked. Each request is a task of its own; a client that does not read fills the queue of the connection, which stops
//! the tasks and with them their runs.

use super::ask::{self, Dialect};
use super::error;
use super::event::{Carrier, Writer, error_message, pack};
use super::pruning::History;
use super::telling::{Said, Telling};
use crate::api::generation::Runs;
use crate::api::shared::fields::{abbreviate, invalid_value};
use crate::api::shared::{self, Fields, parameters};
use crate::api::socket::{Close, Message, Outgoing, Socket, Upgrade};
use crate::api::{ApiError, App, Caller, ErrorKind};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Requests that one connection can have under way.
const MOST_REQUESTS: usize = 64;

/// A request under way.
struct UnderWay {
    /// Tells it from a later one of the same name.
    number: u64,
    cancel: watch::Sender<bool>,
}

/// What the tasks of a connection share.
#[derive(Clone)]
struct Connection {
    app: App,
    caller: Option<Caller>,
    address: Option<SocketAddr>,
    outgoing: Outgoing,
    history: History,
    /// By the client's names for them.
    requests: Arc<Mutex<HashMap<String, UnderWay>>>,
}

/// Opens the WebSocket: `generate`, `cancel` and `ping` in; `token`, `retract`, `pruning_suggestion`, `done`, `error` and `pong`
/// out, as described at `/api/v1/asyncapi.json`. `?compression=off` leaves messages as they are where the client would have
/// them compressed.
#[utoipa::path(get, path = "/api/v1/generate/stream", tag = "attention", responses(
    (status = 101, description = "The connection is a WebSocket"),
    (status = 400, description = "Not a WebSocket handshake")))]
pub(super) async fn open(State(app): State<App>, request: Request) -> Response {
    let (mut parts, _) = request.into_parts();
    if parts.uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "compression=off")) {
        parts.headers.remove(header::SEC_WEBSOCKET_EXTENSIONS);
    }
    match Upgrade::from_request_parts(&mut parts, &app).await {
        Ok(upgrade) => upgrade.serve(written, move |socket| talk(app, socket)),
        Err(error) => super::AttentionError(error).into_response(),
    }
}

/// Returns when the client has had enough.
async fn until_cancelled(cancelled: &mut watch::Receiver<bool>) {
    // The sender is gone only when the request is over.
    let _ = cancelled.wait_for(|cancelled| *cancelled).await;
}

fn written(error: &ApiError) -> String {
    Value::Object(error::fields(error)).to_string()
}

async fn talk(app: App, socket: Socket) -> Close {
    let Socket { caller, address, mut incoming, outgoing, .. } = socket;
    let connection =
        Connection { app, caller, address, outgoing, history: History::default(), requests: Arc::default() };
    // Dropped with this task when the client goes, and the runs with it.
    let mut tasks = JoinSet::new();
    loop {
        let message = tokio::select! {
            message = incoming.next() => message,
            Some(_) = tasks.join_next() => continue,
        };
        let (carrier, body) = read(&message);
        let body = match body {
            Ok(body) => body,
            Err(error) => {
                if !connection.tell_error(carrier, &error, None).await {
                    return Close::normal();
                }
                continue;
            }
        };
        let id = body.get("request_id").and_then(Value::as_str).map(str::to_owned);
        if let Err(error) = connection.obey(&mut tasks, carrier, body).await
            && !connection.tell_error(carrier, &error, id.as_deref()).await
        {
            return Close::normal();
        }
    }
}

/// The form in which a message is to be answered, and its fields.
fn read(message: &Message) -> (Carrier, Result<Value, ApiError>) {
    match message {
        Message::Text(text) => (Carrier::Json, shared::parse_json(text.as_bytes())),
        Message::Binary(bytes) => (Carrier::Packed, shared::parse_msgpack(bytes)),
    }
}

impl Connection {
    /// Does what a message asks for.
    async fn obey(&self, tasks: &mut JoinSet<()>, carrier: Carrier, body: Value) -> Result<(), ApiError> {
        const TYPES: &str = "\"generate\", \"cancel\" or \"ping\"";
        let fields = Fields::new(&body)?;
        match fields.text("type")? {
            Some("generate") => self.begin(tasks, carrier, body),
            Some("cancel" | "stop") => self.cancel(fields),
            Some("ping") => {
                let pong = pack(carrier, &json!({ "type": "pong" }))?;
                // A client that has gone is noticed by the connection.
                let _ = self.outgoing.send(pong).await;
                Ok(())
            }
            Some(other) => Err(invalid_value("type", TYPES, &Value::from(other))),
            None => {
                Err(ApiError::invalid("type", format!("type is missing; it takes {TYPES}, got {}", abbreviate(&body))))
            }
        }
    }

    fn begin(&self, tasks: &mut JoinSet<()>, carrier: Carrier, body: Value) -> Result<(), ApiError> {
        let fields = Fields::new(&body)?;
        let carrier = match fields.text("message_format")? {
            None => carrier,
            Some("json") => Carrier::Json,
            Some("msgpack") => Carrier::Packed,
            Some(other) => return Err(invalid_value("message_format", "\"json\" or \"msgpack\"", &Value::from(other))),
        };
        let id = parameters::request_id(fields)?.unwrap_or_else(|| uuid::Uuid::now_v7().to_string());
        let (number, (cancel, cancelled)) = (rand::random(), watch::channel(false));
        {
            let mut requests = self.requests();
            if requests.len() >= MOST_REQUESTS {
                let message = format!("a connection can have {MOST_REQUESTS} requests under way; wait for one to end");
                return Err(ApiError::new(ErrorKind::Busy, message));
            }
            if requests.contains_key(&id) {
                let message =
                    format!("the request '{id}' is under way on this connection; give each its own request_id");
                return Err(ApiError::conflict(message).at("request_id").code("duplicate_request_id"));
            }
            requests.insert(id.clone(), UnderWay { number, cancel });
        }
        let connection = self.clone();
        tasks.spawn(async move {
            let at_work = connection.outgoing.at_work();
            let over = || connection.over(&id, number);
            if let Err(error) = connection.generate(carrier, &body, &id, cancelled, &over).await {
                over();
                // A client that has gone is noticed by the connection.
                let _ = connection.tell_error(carrier, &error, Some(&id)).await;
            }
            over();
            drop(at_work);
        });
        Ok(())
    }

    /// The request is not under way any more.
    fn over(&self, id: &str, number: u64) {
        let mut requests = self.requests();
        if requests.get(id).is_some_and(|under_way| under_way.number == number) {
            requests.remove(id);
        }
    }

    fn cancel(&self, fields: Fields<'_>) -> Result<(), ApiError> {
        let id = fields
            .text("request_id")?
            .ok_or_else(|| ApiError::invalid("request_id", "request_id is missing; it says which request to cancel"))?;
        match self.requests().get(id) {
            Some(under_way) => {
                under_way.cancel.send_replace(true);
                Ok(())
            }
            None => Err(ApiError::not_found("request under way on this connection called", id).at("request_id")),
        }
    }

    async fn generate(
        &self,
        carrier: Carrier,
        body: &Value,
        id: &str,
        mut cancelled: watch::Receiver<bool>,
        no_more: &(dyn Fn() + Sync),
    ) -> Result<(), ApiError> {
        let taken = Instant::now();
        self.app.rates().check(self.caller.as_ref(), self.address)?;
        let fields = Fields::new(body)?;
        let loaded = self.app.loaded(fields.text("model")?).await?;
        let dialect = if carrier == Carrier::Packed { Dialect::PackedSocket } else { Dialect::Socket };
        let mut asked = ask::read(&self.app, &loaded, fields, dialect, taken)?;
        for request in &mut asked.requests {
            if let Some(caller) = &self.caller {
                request.user_label.get_or_insert_with(|| caller.label.clone());
            }
        }
        ask::free_ids(&self.app, &mut asked.requests).await?;
        let writer = Writer::new(carrier, id, &asked.answer);
        let samples = asked.answer.samples;
        let mut over = vec![false; samples];
        let begin = Runs::start(self.app.clone(), &loaded, asked.requests);
        let runs = tokio::select! {
            runs = begin => runs?,
            () = until_cancelled(&mut cancelled) => {
                no_more();
                return self.tell_cancelled(&writer, None, &over).await;
            }
        };
        let mut telling = Telling::with_history(runs, asked.answer, self.history.clone());
        loop {
            let said = tokio::select! {
                said = telling.next() => said?,
                () = until_cancelled(&mut cancelled) => {
                    no_more();
                    return self.tell_cancelled(&writer, Some(telling), &over).await;
                }
            };
            let Some(said) = said else { return Ok(()) };
            if let Said::Done(super::telling::Done { sample, .. }) | Said::Failed { sample, .. } = &said {
                over[*sample] = true;
            }
            let message = writer.write(said).await?;
            if over.iter().all(|&over| over) {
                // Before the client hears of the end, so that it can use the name again at once.
                no_more();
            }
            if self.outgoing.send(message).await.is_err() {
                return Ok(());
            }
        }
    }

    /// Ends the samples that are not over.
    async fn tell_cancelled(&self, writer: &Writer, telling: Option<Telling>, over: &[bool]) -> Result<(), ApiError> {
        let going_on = (0..over.len()).filter(|&sample| !over[sample]);
        let ends: Vec<_> = going_on
            .map(|sample| match &telling {
                Some(telling) => telling.cancelled(sample),
                None => super::telling::Done::before_it_began(sample, &writer.answer),
            })
            .collect();
        // Without anybody who listens, the runs end within a token.
        drop(telling);
        for done in ends {
            if self.outgoing.send(writer.done(&done)?).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Sends an error. `false` when the client has gone.
    async fn tell_error(&self, carrier: Carrier, error: &ApiError, id: Option<&str>) -> bool {
        match error_message(carrier, error, id, None) {
            Ok(message) => self.outgoing.send(message).await.is_ok(),
            Err(error) => {
                tracing::error!(error = ?error, "an error could not be written");
                true
            }
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<String, UnderWay>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
