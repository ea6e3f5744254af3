//! `POST /api/extra/generate/stream`: server-sent events. A body with `input_ids` uses the messages of the attention
//! API, one `data:` line per token; a body with a `prompt` uses `KoboldCPP`'s.

use super::error::KoboldError;
use super::generate::{GenerationEvent, KoboldGeneration, start};
use super::genkeys::{GenerationEntry, Genkeys};
use super::request::KoboldStreamRequest;
use super::response::KoboldStreamEvent;
use crate::api::shared::attention;
use crate::api::shared::attention::{AttentionStream, AttentionWriter, MessageFormat, Transport};
use crate::api::shared::generation::{self, RunClient, ThunderFields};
use crate::api::shared::sse::{self, EventSource, KEEP_ALIVE_INTERVAL, PendingEvents, ServerEvent, to_json};
use crate::api::shared::{self, Fields};
use crate::server::ApiError;
use crate::server::socket::Message;
use axum::Extension;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use serde_json::Value;
use std::time::Instant;

/// Streams the answer to a `prompt` as `event: message` with `{token, finish_reason}`, or the answer to `input_ids` as
/// `{type: token, …}` with the attention of each token, and `{type: done, …}`.
#[utoipa::path(post, path = "/api/extra/generate/stream", tag = "KoboldCPP",
    request_body(content = KoboldStreamRequest, content_type = "application/json"),
    responses((status = 200, description = "Server-sent events: with `input_ids` those of the attention API",
                  content((KoboldStreamEvent = "text/event-stream"))),
              (status = 400, description = "A field is invalid; nothing was streamed"),
              (status = 503, description = "No model is loaded")))]
pub(super) async fn generate(
    client: RunClient,
    genkeys: Extension<Genkeys>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, KoboldError> {
    let body = shared::parse_json(&body?)?;
    let response = if attention::has_input_ids(&body) {
        stream_tokens(&client, &genkeys, &body).await?
    } else {
        stream_text(&client, &genkeys, &body).await?
    };
    Ok(response)
}

/// Streams the answer to a `prompt`.
async fn stream_text(client: &RunClient, genkeys: &Genkeys, body: &Value) -> Result<Response, ApiError> {
    let generation = start(client, genkeys, body).await?;
    let run_id = generation.runs.run_id();
    Ok(generation::with_run_id(respond(generation), run_id))
}

impl EventSource for KoboldGeneration {
    async fn advance(&mut self, pending: &mut PendingEvents) -> bool {
        let event = next_event(self).await;
        pending.push_back(ServerEvent::named("message", to_json(&event)));
        !event.is_last()
    }
}

/// Returns the next event of a text.
async fn next_event(generation: &mut KoboldGeneration) -> KoboldStreamEvent {
    let (token, finish_reason, thunder) = match generation.next().await {
        Ok(GenerationEvent::Text(text)) => (text, None, None),
        // `KoboldCPP`'s format has no retraction; clients that support the field `thunder` can apply this one.
        Ok(GenerationEvent::Retract(chars)) => (String::new(), None, Some(ThunderFields::retract_chars(chars))),
        Ok(GenerationEvent::Ended { finish_reason, .. }) => (String::new(), Some(finish_reason), None),
        Err(error) => return KoboldStreamEvent::Error(error.kobold()),
    };
    KoboldStreamEvent::Token { token, finish_reason, thunder }
}

/// Streams the answer to `input_ids`.
async fn stream_tokens(client: &RunClient, genkeys: &Genkeys, body: &Value) -> Result<Response, ApiError> {
    let received = Instant::now();
    let fields = Fields::new(body)?;
    let loaded = client.app.get_or_load(fields.text("model")?).await?;
    let request = attention::parse(&client.app, &loaded, fields, Transport::Events, received).await?;
    let entry = genkeys.register(client.caller.tenant.as_ref(), fields.text("genkey")?.unwrap_or_default());
    let (runs, options) = request.submit(client, &loaded, entry.aborted()).await?;
    let failure = runs.first_end().filter(|(_, end)| !attention::was_stopped(end));
    if let Some(error) = failure.and_then(|(run, end)| runs.failure(run, end)) {
        return Err(error);
    }
    let stream = AttentionStream::new(runs, options);
    let run_id = stream.run_id();
    let request_id = stream.options.request_id.clone().unwrap_or_else(|| run_id.to_string());
    let writer = AttentionWriter::new(MessageFormat::Json, &request_id, &stream.options);
    Ok(generation::with_run_id(respond(TokenEvents { stream, writer, entry }), run_id))
}

/// The events of an answer to `input_ids`.
struct TokenEvents {
    stream: AttentionStream,
    writer: AttentionWriter,
    entry: GenerationEntry,
}

impl TokenEvents {
    /// Returns the data of the next event, and true if more may follow.
    async fn next(&mut self) -> Option<(String, bool)> {
        match self.stream.next().await {
            Ok(None) => None,
            Ok(Some(event)) => {
                self.entry.apply(&event);
                match self.writer.write(event).await {
                    Ok(message) => Some((message_text(Ok(message)), true)),
                    Err(error) => Some((message_text(self.writer.error(&error, None)), false)),
                }
            }
            Err(error) => Some((message_text(self.writer.error(&error, None)), false)),
        }
    }
}

impl EventSource for TokenEvents {
    async fn advance(&mut self, pending: &mut PendingEvents) -> bool {
        let Some((data, has_more)) = self.next().await else { return false };
        pending.push_back(ServerEvent::data(data));
        has_more
    }
}

/// Returns the text of a JSON message.
fn message_text(message: Result<Message, ApiError>) -> String {
    match message {
        Ok(Message::Text(text)) => text,
        Ok(Message::Binary(_)) => String::new(),
        Err(error) => to_json(&error.kobold()),
    }
}

fn respond(source: impl EventSource) -> Response {
    sse::respond(source, PendingEvents::new(), sse::comments(Some(KEEP_ALIVE_INTERVAL)))
}
