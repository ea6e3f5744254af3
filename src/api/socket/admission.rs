//! The key of a client that could not send it as a header: it comes with the first message.

use super::{Close, Incoming, Message};
use crate::api::peers::ForwardHeaders;
use crate::api::{ApiError, App, Caller, ErrorKind};
use serde_json::Value;
use std::time::Duration;

/// How long a client may take for its first message, when that must bring the key.
const PATIENCE: Duration = Duration::from_secs(10);

const FIELD: &str = "api_key";
const EXPECTED: &str = "this server needs an API key: send it as the header 'Authorization: Bearer KEY', or in the first \
                        message as \"api_key\", e.g. {\"type\": \"auth\", \"api_key\": \"KEY\"}";

/// Reads the key out of the first message, which may be any message of the protocol with the key as `api_key`, or
/// `{"type": "auth", "api_key": …}`, which says nothing else. Only the former is passed on, without the key.
///
/// # Errors
/// There is no key, or it is not known here.
pub(super) async fn admit(
    app: &App,
    incoming: &mut Incoming,
    headers: &mut ForwardHeaders,
) -> Result<Caller, ApiError> {
    let refused = || ApiError::new(ErrorKind::Unauthorized, EXPECTED);
    let first = tokio::time::timeout(PATIENCE, incoming.next()).await.map_err(|_| refused())?;
    let Message::Text(text) = first else { return Err(refused()) };
    let Ok(Value::Object(mut fields)) = serde_json::from_str(&text) else { return Err(refused()) };
    let Some(Value::String(sent)) = fields.shift_remove(FIELD) else { return Err(refused()) };
    let Some(key) = app.config().server.security.known(&sent) else {
        return Err(ApiError::new(ErrorKind::Unauthorized, "this API key is not known here"));
    };
    headers.set_key(&sent);
    if fields.get("type").and_then(Value::as_str) != Some("auth") {
        incoming.first = Some(Message::Text(Value::Object(fields).to_string()));
    }
    Ok(Caller::of(key))
}

/// How a connection without a key ends.
pub(super) fn refusal() -> Close {
    Close::policy("an API key is needed")
}
