//! `WS /api/v1/generate/stream`: concurrent requests on one connection, identified by `request_id`.
//!
//! A client sends `generate`, `cancel` and `ping` as JSON text or as binary `MessagePack` and receives replies in the
//! same format. Each request is a task. A client that stops reading fills the connection's queue, which pauses the
//! tasks and with them their runs.

use crate::api::shared::attention::event::{
    AttentionWriter, MessageFormat, PongMessage, done_message, encode, error_message,
};
use crate::api::shared::attention::pruning::PruningHistory;
use crate::api::shared::attention::request;
use crate::api::shared::attention::request::{AttentionOptions, Transport};
use crate::api::shared::attention::stream::{AttentionStream, SampleEnd};
use crate::api::shared::fields::{abbreviate, invalid_value};
use crate::api::shared::generation::{RunClient, Runs};
use crate::api::shared::sse::to_json;
use crate::api::shared::{self, Fields, parameters};
use crate::events::system;
use crate::server::socket::{Close, Message, Outgoing, Socket, Upgrade};
use crate::server::{ApiError, App, Caller, ErrorCode, ErrorKind};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// Maximum active requests of a connection.
const MAX_REQUESTS: usize = 64;

/// Field with the format of the replies to a message.
const FORMAT_FIELD: &str = "message_format";

/// An active request.
struct ActiveRequest {
    /// Distinguishes the request from a later one with the same id.
    number: u64,
    cancelled: CancellationToken,
}

/// State shared by the tasks of a connection.
#[derive(Clone)]
struct Connection {
    app: App,
    caller: Caller,
    address: Option<SocketAddr>,
    outgoing: Outgoing,
    history: PruningHistory,
    /// Active requests by the client's id.
    requests: Arc<Mutex<HashMap<String, ActiveRequest>>>,
}

/// Opens the WebSocket. Messages in: `generate`, `cancel` and `ping`; out: `token`, `retract`, `pruning_suggestion`,
/// `done`, `error` and `pong`, as described at `/api/v1/asyncapi.json`. `?compression=off` disables compression.
#[utoipa::path(get, path = "/api/v1/generate/stream", tag = "attention", responses(
    (status = 101, description = "The connection is a WebSocket"),
    (status = 400, description = "Not a WebSocket handshake")))]
pub(super) async fn open(State(app): State<App>, request: Request) -> Response {
    let (mut parts, _) = request.into_parts();
    if parts.uri.query().is_some_and(|query| query.split('&').any(|pair| pair == "compression=off")) {
        parts.headers.remove(header::SEC_WEBSOCKET_EXTENSIONS);
    }
    match Upgrade::from_request_parts(&mut parts, &app).await {
        Ok(upgrade) => upgrade.serve(error_text, move |socket| serve(app, socket)),
        Err(error) => super::AttentionError(error).into_response(),
    }
}

fn error_text(error: &ApiError) -> String {
    to_json(&error.attention())
}

async fn serve(app: App, socket: Socket) -> Close {
    let Socket { caller, address, mut incoming, outgoing, .. } = socket;
    let connection =
        Connection { app, caller, address, outgoing, history: PruningHistory::default(), requests: Arc::default() };
    // Dropped with this task when the client disconnects, which ends the runs.
    let mut tasks = JoinSet::new();
    loop {
        let message = tokio::select! {
            message = incoming.next() => message,
            Some(_) = tasks.join_next() => continue,
        };
        let (format, body) = read(&message);
        let body = match body {
            Ok(body) => body,
            Err(error) => {
                if !connection.send_error(format, &error, None).await {
                    return Close::normal();
                }
                continue;
            }
        };
        let id = body.get("request_id").and_then(Value::as_str).map(str::to_owned);
        let format = requested_format(&body).unwrap_or(format);
        if let Err(error) = connection.handle(&mut tasks, format, body).await
            && !connection.send_error(format, &error, id.as_deref()).await
        {
            return Close::normal();
        }
    }
}

/// Returns the format of the reply if the message requests a known one.
fn requested_format(body: &Value) -> Option<MessageFormat> {
    match body.get(FORMAT_FIELD)?.as_str()? {
        "json" => Some(MessageFormat::Json),
        "msgpack" => Some(MessageFormat::Msgpack),
        _ => None,
    }
}

/// Returns the format of a message and its fields.
fn read(message: &Message) -> (MessageFormat, Result<Value, ApiError>) {
    match message {
        Message::Text(text) => (MessageFormat::Json, shared::parse_json(text.as_bytes())),
        Message::Binary(bytes) => (MessageFormat::Msgpack, shared::parse_msgpack(bytes)),
    }
}

impl Connection {
    /// Executes a client message.
    async fn handle(&self, tasks: &mut JoinSet<()>, format: MessageFormat, body: Value) -> Result<(), ApiError> {
        const TYPES: &str = "\"generate\", \"cancel\" or \"ping\"";
        let fields = Fields::new(&body)?;
        match fields.text("type")? {
            Some("generate") => self.start(tasks, format, body),
            Some("cancel" | "stop") => self.cancel(fields),
            Some("ping") => {
                let pong = encode(format, &PongMessage::PONG)?;
                // Sending fails only if the client has disconnected.
                let _ = self.outgoing.send(pong).await;
                Ok(())
            }
            Some(other) => Err(invalid_value("type", TYPES, &Value::from(other))),
            None => Err(ApiError::invalid(
                "type",
                format!("`type` is missing; expected {TYPES}, got {}", abbreviate(&body)),
            )),
        }
    }

    fn start(&self, tasks: &mut JoinSet<()>, format: MessageFormat, body: Value) -> Result<(), ApiError> {
        let fields = Fields::new(&body)?;
        if let Some(format) = fields.get(FORMAT_FIELD)
            && requested_format(&body).is_none()
        {
            return Err(invalid_value(FORMAT_FIELD, "\"json\" or \"msgpack\"", format));
        }
        let id = parameters::request_id(fields)?.unwrap_or_else(|| system::new_id().to_string());
        let (number, cancelled) = (system::random(), CancellationToken::new());
        {
            let mut requests = self.requests();
            if requests.len() >= MAX_REQUESTS {
                let message =
                    format!("a connection can have at most {MAX_REQUESTS} active requests; wait for one to end");
                return Err(ApiError::new(ErrorKind::Busy, message));
            }
            if requests.contains_key(&id) {
                let message = format!("request '{id}' is already active on this connection; use a unique request_id");
                return Err(ApiError::conflict(message).at("request_id").code(ErrorCode::DuplicateRequestId));
            }
            requests.insert(id.clone(), ActiveRequest { number, cancelled: cancelled.clone() });
        }
        let connection = self.clone();
        tasks.spawn(async move {
            let activity = connection.outgoing.mark_active();
            let deregister = || connection.remove_request(&id, number);
            if let Err(error) = connection.generate(format, &body, &id, cancelled, &deregister).await {
                deregister();
                // Sending fails only if the client has disconnected.
                let _ = connection.send_error(format, &error, Some(&id)).await;
            }
            deregister();
            drop(activity);
        });
        Ok(())
    }

    /// Removes an active request.
    fn remove_request(&self, id: &str, number: u64) {
        let mut requests = self.requests();
        if requests.get(id).is_some_and(|active| active.number == number) {
            requests.remove(id);
        }
    }

    fn cancel(&self, fields: Fields<'_>) -> Result<(), ApiError> {
        let id = fields.text("request_id")?.ok_or_else(|| {
            ApiError::invalid("request_id", "`request_id` is missing; send the id of the request to cancel")
        })?;
        match self.requests().get(id) {
            Some(active) => {
                active.cancelled.cancel();
                Ok(())
            }
            None => Err(ApiError::not_found("active request", id).at("request_id")),
        }
    }

    async fn generate(
        &self,
        format: MessageFormat,
        body: &Value,
        id: &str,
        cancelled: CancellationToken,
        deregister: &(dyn Fn() + Sync),
    ) -> Result<(), ApiError> {
        let received = Instant::now();
        self.app.rate_limits().check(Some(&self.caller), self.address)?;
        let fields = Fields::new(body)?;
        let (runs, options) = tokio::select! {
            biased;
            () = cancelled.cancelled() => {
                deregister();
                return self.send_cancelled_before_start(format, fields, id, received).await;
            }
            started = self.start_runs(format, fields, received, cancelled.clone()) => started?,
        };
        let writer = AttentionWriter::new(format, id, &options);
        let mut stream = AttentionStream::with_history(runs, options, self.history.clone());
        while let Some(event) = stream.next().await? {
            let message = writer.write(event).await?;
            if stream.has_ended() {
                // Removed before the client receives the end, so that it can reuse the id immediately.
                deregister();
            }
            if self.outgoing.send(message).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Waits for the model and starts the runs of a request.
    async fn start_runs(
        &self,
        format: MessageFormat,
        fields: Fields<'_>,
        received: Instant,
        cancelled: CancellationToken,
    ) -> Result<(Runs, AttentionOptions), ApiError> {
        let loaded = self.app.get_or_load(fields.text("model")?).await?;
        let transport = if format == MessageFormat::Msgpack { Transport::MsgpackSocket } else { Transport::Socket };
        let request = request::parse(&self.app, &loaded, fields, transport, received).await?;
        let client = RunClient::socket(self.app.clone(), self.caller.clone());
        request.submit(&client, &loaded, cancelled).await
    }

    /// Sends the end of all samples of a request that was cancelled before it started.
    async fn send_cancelled_before_start(
        &self,
        format: MessageFormat,
        fields: Fields<'_>,
        id: &str,
        received: Instant,
    ) -> Result<(), ApiError> {
        let prompt_tokens = fields.list("input_ids")?.map_or(0, |list| list.len() as u32);
        let samples = request::samples(fields)?;
        for sample in 0..samples {
            let done = SampleEnd::before_start(sample, prompt_tokens, received);
            if self.outgoing.send(done_message(format, id, samples, &done)?).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    /// Sends an error. Returns false if the client has disconnected.
    async fn send_error(&self, format: MessageFormat, error: &ApiError, id: Option<&str>) -> bool {
        match error_message(format, error, id, None) {
            Ok(message) => self.outgoing.send(message).await.is_ok(),
            Err(error) => {
                tracing::error!(error = ?error, "error message not serialized");
                true
            }
        }
    }

    fn requests(&self) -> MutexGuard<'_, HashMap<String, ActiveRequest>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
