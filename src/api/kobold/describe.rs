//! The WebSocket's part of the `AsyncAPI` document.

use serde_json::{Value, json};

/// Channel, operations and messages. Its `done` and `error` are those of the attention API.
pub(in crate::api) fn describe() -> Value {
    let message = |name: &str| json!({ "$ref": format!("#/components/messages/{name}") });
    let of_channel = |name: &str| json!({ "$ref": format!("#/channels/kobold/messages/{name}") });
    let channel = json!({ "$ref": "#/channels/kobold" });
    json!({
        "channels": { "kobold": {
            "address": "/api/extra/generate/stream/ws",
            "title": "Tokens with their attention, as KoboldCPP's fork for Halo Weave tells them",
            "description": "Requests are answered one after the other. Each token is a text frame; where attention is wanted, a \
                binary frame of its row follows, little-endian numbers and nothing else: len(input_ids) + k of them for the k-th \
                new token, and as many for each head of each layer with \"per_layer\". A token without a row has an empty \
                frame. The connection is closed with 1008 behind an error; a client that goes ends its run.",
            "messages": {
                "request": message("kobold_request"),
                "token": message("kobold_token"),
                "numbers": message("kobold_numbers"),
                "done": message("attention_done"),
                "error": message("attention_error"),
            },
        } },
        "operations": {
            "sendKobold": { "action": "receive", "channel": channel, "messages": [of_channel("request")], "summary": "What clients say." },
            "receiveKobold": { "action": "send", "channel": channel, "summary": "What the server says.",
                "messages": [of_channel("token"), of_channel("numbers"), of_channel("done"), of_channel("error")] },
        },
        "components": { "messages": {
            "kobold_request": { "name": "request", "summary": "Begins a generation.", "payload": {
                "type": "object",
                "description": "A body of POST /api/extra/generate/stream.",
                "properties": {
                    "input_ids": { "type": "array", "items": { "type": "integer" }, "description": "The whole context as token ids." },
                    "prompt": { "type": "string", "description": "The same as text, where there are no input_ids." },
                    "max_length": { "type": "integer", "description": "Most tokens." },
                    "output_attentions": { "type": "boolean", "default": true, "description": "Whether tokens come with attention." },
                    "attention_format": { "enum": ["aggregated", "per_layer"], "default": "aggregated",
                        "description": "One number per position, the mean of all heads unless aggregation_mode says otherwise; or everything." },
                    "genkey": { "type": "string", "description": "Name for /api/extra/generate/check and /api/extra/abort." },
                },
            } },
            "kobold_token": { "name": "token", "summary": "A token.", "payload": {
                "type": "object",
                "properties": {
                    "type": { "const": "token" },
                    "request_id": { "type": "string", "description": "The client's name of the request." },
                    "token_id": { "type": "integer", "description": "Its id." },
                    "text": { "type": "string", "description": "Its text; \"\" for an incomplete piece of UTF-8." },
                },
                "required": ["type", "request_id", "token_id", "text"],
            } },
            "kobold_numbers": { "name": "numbers", "summary": "The row that the token before was drawn with.",
                "contentType": "application/octet-stream", "payload": { "type": "string", "format": "binary" } },
        } },
    })
}
