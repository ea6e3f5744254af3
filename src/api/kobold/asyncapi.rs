//! The WebSocket's part of the `AsyncAPI` document.

use serde_json::{Value, json};

/// Returns channel, operations and messages. `done` and `error` are shared with the attention API.
pub(crate) fn describe() -> Value {
    let message = |name: &str| json!({ "$ref": format!("#/components/messages/{name}") });
    let of_channel = |name: &str| json!({ "$ref": format!("#/channels/kobold/messages/{name}") });
    let channel = json!({ "$ref": "#/channels/kobold" });
    json!({
        "channels": { "kobold": {
            "address": "/api/extra/generate/stream/ws",
            "title": "Tokens with attention, in the format of KoboldCPP's fork for Halo Weave",
            "description": "Requests are answered in order. Each token is a text frame; if attention is requested, a binary \
                frame with its row follows that contains only little-endian numbers: len(input_ids) + k for the k-th \
                new token, and with \"per_layer\" as many for each head of each layer. A token without a row has an empty \
                frame. The connection is closed with 1008 after an error; a disconnect ends the run.",
            "messages": {
                "request": message("kobold_request"),
                "token": message("kobold_token"),
                "numbers": message("kobold_numbers"),
                "done": message("attention_done"),
                "error": message("attention_error"),
            },
        } },
        "operations": {
            "sendKobold": { "action": "receive", "channel": channel, "messages": [of_channel("request")], "summary": "Messages from clients." },
            "receiveKobold": { "action": "send", "channel": channel, "summary": "Messages from the server.",
                "messages": [of_channel("token"), of_channel("numbers"), of_channel("done"), of_channel("error")] },
        },
        "components": { "messages": {
            "kobold_request": { "name": "request", "summary": "Starts a generation.", "payload": {
                "type": "object",
                "description": "A body of POST /api/extra/generate/stream.",
                "properties": {
                    "input_ids": { "type": "array", "items": { "type": "integer" }, "description": "The complete context as token ids." },
                    "prompt": { "type": "string", "description": "The context as text, used if input_ids is absent." },
                    "max_length": { "type": "integer", "description": "Maximum tokens of the answer." },
                    "output_attentions": { "type": "boolean", "default": true, "description": "Send attention with each token." },
                    "attention_format": { "enum": ["aggregated", "per_layer"], "default": "aggregated",
                        "description": "aggregated: one number per position, by default the mean of all heads (see aggregation_mode); per_layer: every head of every layer." },
                    "genkey": { "type": "string", "description": "Key for /api/extra/generate/check and /api/extra/abort." },
                },
            } },
            "kobold_token": { "name": "token", "summary": "A generated token.", "payload": {
                "type": "object",
                "properties": {
                    "type": { "const": "token" },
                    "request_id": { "type": "string", "description": "The client's id of the request." },
                    "token_id": { "type": "integer", "description": "Id of the token." },
                    "text": { "type": "string", "description": "Text of the token; \"\" for incomplete UTF-8." },
                },
                "required": ["type", "request_id", "token_id", "text"],
            } },
            "kobold_numbers": { "name": "numbers", "summary": "Attention row of the preceding token.",
                "contentType": "application/octet-stream", "payload": { "type": "string", "format": "binary" } },
        } },
    })
}
