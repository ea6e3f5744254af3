//! The WebSocket protocols as one `AsyncAPI` document.

use crate::api::shared::asyncapi::{AsyncApiDocument, AsyncApiInfo};
use crate::api::shared::sse::to_json;
use crate::api::{attention, kobold, stream};
use bytes::Bytes;

/// Path of the document.
pub(super) const PATH: &str = "/api/v1/asyncapi.json";

const DESCRIPTION: &str = "Messages are JSON objects in text frames, unless a channel states otherwise. \
    permessage-deflate is used if the client offers it. The server sends pings and closes a connection that answers \
    none for a minute. If the server has API keys, a client sends its key as a header of the handshake or as api_key in \
    its first message, never in the URL. Before the key is accepted, a client may send up to 16 KiB, and up to 256 \
    connections may wait for a key. Close codes: 1009 for a message that is too large, after an error with the maximum \
    size; 1007 for text that is not UTF-8; 1002 for frames that violate RFC 6455; 1008 for a missing key or an \
    unexpected first message; 1001 when the server stops.";

/// Returns the document for a server whose paths start with `prefix`, which may be empty.
pub(super) fn document(prefix: &str) -> Bytes {
    let info =
        AsyncApiInfo { title: "Thunder's WebSockets", version: env!("CARGO_PKG_VERSION"), description: DESCRIPTION };
    let sockets = [stream::describe(), attention::describe(), kobold::describe()];
    to_json(&AsyncApiDocument::new(info, prefix, sockets)).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn references<'v>(value: &'v Value, found: &mut Vec<&'v str>) {
        match value {
            Value::Object(members) => {
                found.extend(members.get("$ref").and_then(Value::as_str));
                members.values().for_each(|member| references(member, found));
            }
            Value::Array(list) => list.iter().for_each(|member| references(member, found)),
            _ => {}
        }
    }

    #[test]
    fn all_references_resolve() {
        let document: Value = serde_json::from_slice(&document("")).unwrap();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 10);
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }
}
