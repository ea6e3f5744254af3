//! Authentication by the first message, for clients that cannot send the key as a header.

use super::{Close, Incoming, Message};
use crate::server::auth::caller::rejected_key;
use crate::server::peers::ForwardHeaders;
use crate::server::{ApiError, App, Caller, ErrorKind};
use serde_json::Value;
use std::time::Duration;

/// Maximum wait for the first message if it must contain the key.
const AUTH_TIMEOUT: Duration = Duration::from_secs(10);

const FIELD: &str = "api_key";
const KEY_REQUIRED: &str = "an API key is required: send it as the header 'Authorization: Bearer KEY', or in the first \
                        message as \"api_key\", e.g. {\"type\": \"auth\", \"api_key\": \"KEY\"}";

/// Reads the key from the first message: any message of the protocol with an `api_key` field, or `{"type": "auth",
/// "api_key": …}`. The handler receives a message of the protocol without the key.
///
/// # Errors
/// The key is missing or unknown.
pub(super) async fn authenticate(
    app: &App,
    incoming: &mut Incoming,
    headers: &mut ForwardHeaders,
) -> Result<Caller, ApiError> {
    let rejected = || ApiError::new(ErrorKind::Unauthorized, KEY_REQUIRED);
    let first = tokio::time::timeout(AUTH_TIMEOUT, incoming.next()).await.map_err(|_| rejected())?;
    let Message::Text(text) = first else { return Err(rejected()) };
    let Ok(Value::Object(mut fields)) = serde_json::from_str(&text) else { return Err(rejected()) };
    let Some(Value::String(sent)) = fields.shift_remove(FIELD) else { return Err(rejected()) };
    let credentials = app.credentials();
    let security = &credentials.security;
    let Some(key) = security.find_key(&sent) else {
        return Err(rejected_key(security, &[sent.as_str()]));
    };
    headers.set_key(&sent);
    if fields.get("type").and_then(Value::as_str) != Some("auth") {
        incoming.first = Some(Message::Text(Value::Object(fields).to_string()));
    }
    Ok(Caller::new(security, Some(key)))
}

/// Returns the close frame for a connection whose first message has no valid key.
pub(super) fn rejection() -> Close {
    Close::policy("an API key is required")
}
