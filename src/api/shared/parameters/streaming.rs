//! Fields that shape a stream.

use crate::api::shared::fields::Fields;
use crate::server::{ApiError, App};
use serde_json::Value;
use std::time::Duration;

/// Returns true if the client requests a last chunk with token counts: `stream_options.include_usage`.
pub(crate) fn include_usage(fields: Fields<'_>) -> Result<bool, ApiError> {
    let options = fields.object("stream_options")?;
    Ok(options.and_then(|options| options.get("include_usage")).and_then(Value::as_bool).unwrap_or(false))
}

/// Parses `sse_ping_interval`: the time without an event after which a stream sends a comment; `None` sends none.
pub(crate) fn ping_interval(app: &App, fields: Fields<'_>) -> Result<Option<Duration>, ApiError> {
    Ok(match fields.integer("sse_ping_interval", -1..=i64::from(i32::MAX))? {
        None => app.config().server.sse_ping_interval,
        Some(seconds @ 1..) => Some(Duration::from_secs(seconds as u64)),
        Some(_) => None,
    })
}
