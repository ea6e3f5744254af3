//! `WS /api/extra/generate/stream/ws`: the content of `/api/extra/generate/stream`, with attention in binary frames.
//!
//! Some versions of Halo Weave require it. Requests are answered one after the other. Each token is a text frame; if
//! attention is requested, a binary frame follows that contains only little-endian floats. A token without a row has an
//! empty frame because those clients show a token when its frame arrives.

use super::error::KoboldError;
use super::genkeys::{GenerationEntry, Genkeys};
use crate::api::shared::attention;
use crate::api::shared::attention::{
    AttentionEvent, AttentionOptions, AttentionStream, AttentionWriter, MessageFormat, Transport,
};
use crate::api::shared::fields::invalid_value;
use crate::api::shared::generation::RunClient;
use crate::api::shared::sse::to_json;
use crate::api::shared::{self, Fields, parameters};
use crate::model::TokenizeOptions;
use crate::server::socket::{Close, Message, Outgoing, Socket, Upgrade};
use crate::server::{ApiError, App, Caller, ErrorCode, LoadedModel};
use axum::Extension;
use axum::extract::{FromRequestParts, Request, State};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use std::net::SocketAddr;
use std::time::Instant;

/// Opens the WebSocket. Requests: `{input_ids | prompt, max_length?, temperature?, …, output_attentions? (true),
/// attention_format? ("aggregated" or "per_layer")}`, one after the other. Responses: `{type: token, token_id, text}`,
/// a binary frame with its floats, and `{type: done, finish_reason, total_tokens}`. An error is `{type: error, error,
/// error_code}` and closes the connection with 1008.
#[utoipa::path(get, path = "/api/extra/generate/stream/ws", tag = "KoboldCPP", responses(
    (status = 101, description = "The connection is a WebSocket"),
    (status = 400, description = "Not a WebSocket handshake")))]
pub(super) async fn open(State(app): State<App>, genkeys: Extension<Genkeys>, request: Request) -> Response {
    let (mut parts, _) = request.into_parts();
    match Upgrade::from_request_parts(&mut parts, &app).await {
        Ok(upgrade) => upgrade.serve(error_text, move |socket| serve(app, genkeys.0, socket)),
        Err(error) => KoboldError(error).into_response(),
    }
}

fn error_text(error: &ApiError) -> String {
    to_json(&error.attention())
}

async fn serve(app: App, genkeys: Genkeys, socket: Socket) -> Close {
    let Socket { caller, address, mut incoming, outgoing, .. } = socket;
    let connection = Connection { app, genkeys, caller, address, outgoing };
    // These clients close the connection after `done` and treat a close frame from the server as a failure, so the
    // server does not close first.
    loop {
        let message = incoming.next().await;
        let activity = connection.outgoing.mark_active();
        let answered = connection.answer(&message).await;
        drop(activity);
        if let Err(error) = answered {
            if let Ok(message) = attention::error_message(MessageFormat::Json, &error, None, None) {
                // Sending fails only if the client has disconnected.
                let _ = connection.outgoing.send(message).await;
            }
            return Close::policy(&error.public_detail());
        }
    }
}

struct Connection {
    app: App,
    genkeys: Genkeys,
    caller: Caller,
    address: Option<SocketAddr>,
    outgoing: Outgoing,
}

impl Connection {
    /// Runs the request in a message to its end.
    async fn answer(&self, message: &Message) -> Result<(), ApiError> {
        let Message::Text(text) = message else {
            return Err(ApiError::bad_request("expected a text message with JSON, got a binary message")
                .code(ErrorCode::InvalidJson));
        };
        let received = Instant::now();
        let mut body = shared::parse_json(text.as_bytes())?;
        self.app.rate_limits().check(Some(&self.caller), self.address)?;
        let loaded = self.app.get_or_load(Fields::new(&body)?.text("model")?).await?;
        apply_defaults(&mut body, &loaded)?;
        let fields = Fields::new(&body)?;
        let request = attention::parse(&self.app, &loaded, fields, Transport::Frames, received).await?;
        let entry = self.genkeys.register(self.caller.tenant.as_ref(), fields.text("genkey")?.unwrap_or_default());
        let client = RunClient::socket(self.app.clone(), self.caller.clone());
        let (runs, options) = request.submit(&client, &loaded, entry.aborted()).await?;
        self.send_events(AttentionStream::new(runs, options), &entry).await
    }

    async fn send_events(&self, mut stream: AttentionStream, entry: &GenerationEntry) -> Result<(), ApiError> {
        let writer = writer(&stream.options);
        while let Some(event) = stream.next().await? {
            entry.apply(&event);
            let messages = match event {
                AttentionEvent::Failed { error, .. } => return Err(error),
                AttentionEvent::Token(token) => {
                    let (token, numbers) = writer.write_split(*token).await?;
                    [Some(token), numbers]
                }
                event => [Some(writer.write(event).await?), None],
            };
            for message in messages.into_iter().flatten() {
                if self.outgoing.send(message).await.is_err() {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

fn writer(options: &AttentionOptions) -> AttentionWriter {
    AttentionWriter::new(MessageFormat::Json, options.request_id.as_deref().unwrap_or_default(), options)
}

/// Adds the defaults of this route and converts a `prompt` to tokens.
fn apply_defaults(body: &mut Value, loaded: &LoadedModel) -> Result<(), ApiError> {
    let fields = Fields::new(body)?;
    let tokens = match (fields.get("input_ids"), fields.text("prompt")?) {
        (None, Some(prompt)) => Some(parameters::encode(loaded.vocabulary(), prompt, TokenizeOptions::PROMPT)),
        _ => None,
    };
    if let Some(format) = fields.text("attention_format")?
        && !["aggregated", "per_layer"].contains(&format)
    {
        return Err(invalid_value("attention_format", "\"aggregated\" or \"per_layer\"", &Value::from(format)));
    }
    if let Some(object) = body.as_object_mut() {
        // `null` counts as absent.
        object.retain(|_, value| !value.is_null());
        object.entry("output_attentions").or_insert(true.into());
        object.entry("attention_format").or_insert("aggregated".into());
        // Numbers are always binary, and there is only one answer.
        for name in ["attention_encoding", "num_samples"] {
            object.remove(name);
        }
        if let Some(tokens) = tokens {
            object.insert("input_ids".into(), tokens.into());
        }
    }
    Ok(())
}
