//! The WebSocket protocols as one `AsyncAPI` document.

use crate::api::shared::asyncapi::{AsyncApiDocument, AsyncApiInfo};
use crate::api::shared::sse::to_text;
use crate::api::{attention, kobold, stream};
use bytes::Bytes;

/// Path of the document.
pub(super) const PATH: &str = "/api/v1/asyncapi.json";

const DESCRIPTION: &str = "Messages are JSON objects in text frames, unless a channel says otherwise. permessage-deflate is \
    used where the client offers it. The server pings; a client that answers no ping for a minute is cut \
    off. Where the server has keys, a client sends one as a header of the handshake, or as api_key in \
    its first message, never in the address. Until the key is accepted it may send 16 KiB, and 256 \
    connections may wait for theirs. A message that is too large ends the connection with code 1009 \
    after an error that says how large it may be; text that is not UTF-8 with 1007, frames that break \
    RFC 6455 with 1002, a missing key or a wrong beginning with 1008, a server that stops with 1001.";

/// Returns the document of a server whose paths start with `prefix`, which may be empty.
pub(super) fn document(prefix: &str) -> Bytes {
    let info =
        AsyncApiInfo { title: "Thunder's WebSockets", version: env!("CARGO_PKG_VERSION"), description: DESCRIPTION };
    let sockets = [stream::describe(), attention::describe(), kobold::describe()];
    to_text(&AsyncApiDocument::new(info, prefix, sockets)).into()
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
