//! The WebSocket protocols as one `AsyncAPI` document, merged from each protocol's part.

use crate::api::{attention, kobold, stream};
use bytes::Bytes;
use serde_json::{Value, json};

/// Path of the document.
pub(super) const PATH: &str = "/api/v1/asyncapi.json";

/// Returns the document of a server whose paths start with `prefix`, which may be empty.
pub(super) fn document(prefix: &str) -> Bytes {
    let mut document = build();
    if !prefix.is_empty() {
        document["servers"]["local"]["pathname"] = prefix.into();
    }
    document.to_string().into()
}

fn build() -> Value {
    let mut document = json!({
        "asyncapi": "3.0.0",
        "info": {
            "title": "Thunder's WebSockets",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Messages are JSON objects in text frames, unless a channel says otherwise. permessage-deflate is used \
                where the client offers it. The server pings; a client that answers no ping for a minute is cut off. Where the \
                server has keys, a client sends one as a header of the handshake, or as api_key in its first message, never in \
                the address. Until the key is accepted it may send 16 KiB, and 256 connections may wait for theirs. A message that is too large ends the connection with code 1009 after an error that says how large \
                it may be; text that is not UTF-8 with 1007, frames that break RFC 6455 with 1002, a missing key or a wrong \
                beginning with 1008, a server that stops with 1001.",
        },
        "defaultContentType": "application/json",
        "servers": { "local": { "host": "127.0.0.1:6767", "protocol": "ws" } },
    });
    for part in [stream::describe(), attention::describe(), kobold::describe()] {
        merge(&mut document, part);
    }
    document
}

/// Merges objects recursively.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let document = build();
        let mut found = Vec::new();
        references(&document, &mut found);
        assert!(found.len() > 10);
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
    }
}
