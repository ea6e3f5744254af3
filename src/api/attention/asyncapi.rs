//! The protocol's part of the `AsyncAPI` document.

use serde_json::{Map, Value, json};

const CHANNEL: &str = "attention";

/// Returns channel, operations and messages.
pub(crate) fn describe() -> Value {
    let client = [
        ("generate", "Starts a request.", generate()),
        ("cancel", "Ends a request.", cancel()),
        ("ping", "Requests a pong.", ping()),
    ];
    let server = [
        ("token", "A token with its attention.", token()),
        ("retract", "A mod removed the last tokens from the answer.", retract()),
        ("pruning_suggestion", "Sentences of the context with little attention; sent before done.", pruning()),
        ("done", "A request or one of its samples has ended.", done()),
        ("error", "A message is invalid or a request failed; the connection stays open.", error()),
        ("pong", "The answer to ping.", object(&[])),
    ];
    let names = |list: &[(&str, &str, Value)]| -> Value {
        list.iter().map(|(name, ..)| json!({ "$ref": format!("#/channels/{CHANNEL}/messages/{name}") })).collect()
    };
    let operations = json!({
        "sendAttention": { "action": "receive", "channel": { "$ref": format!("#/channels/{CHANNEL}") },
                           "messages": names(&client), "summary": "Messages from clients." },
        "receiveAttention": { "action": "send", "channel": { "$ref": format!("#/channels/{CHANNEL}") },
                              "messages": names(&server), "summary": "Messages from the server." },
    });
    let (mut channel, mut messages) = (Map::new(), Map::new());
    for (name, summary, payload) in client.into_iter().chain(server) {
        let known = format!("{CHANNEL}_{name}");
        channel.insert(name.into(), json!({ "$ref": format!("#/components/messages/{known}") }));
        messages.insert(known, json!({ "name": name, "summary": summary, "payload": payload }));
    }
    json!({
        "channels": { CHANNEL: {
            "address": "/api/v1/generate/stream",
            "title": "Tokens with their attention",
            "description": "Up to 64 concurrent requests, identified by request_id, which must be unique among the active requests of \
                the connection. Messages are JSON in text frames. A binary message from the client is MessagePack and is \
                answered in MessagePack, where attention.data is bytes; message_format overrides this. With \
                attention_encoding \"binary\" in JSON a token is a binary frame: little-endian u32 length of the header; the \
                header, which is the token message without data, padded with spaces; the little-endian values at a multiple \
                of 8 bytes. Index i of a row is token i of input_ids followed by the answer; the row of the k-th new token has \
                len(input_ids) + k values, and the values of each head sum to 1 (less in models with attention sinks). \
                ?compression=off in the URL disables compression for clients that always offer permessage-deflate. \
                A client that stops reading pauses its own runs; a disconnect ends them.",
            "messages": channel,
        } },
        "operations": operations,
        "components": { "messages": messages },
    })
}

fn object(fields: &[(&str, Value, bool)]) -> Value {
    let properties: Map<String, Value> =
        fields.iter().map(|(name, schema, _)| ((*name).to_owned(), schema.clone())).collect();
    let required: Vec<&str> = fields.iter().filter(|(.., required)| *required).map(|(name, ..)| *name).collect();
    json!({ "type": "object", "properties": properties, "required": required })
}

fn typed(kind: &str, description: &str) -> Value {
    json!({ "type": kind, "description": description })
}

fn one_of(words: &[&str], description: &str) -> Value {
    json!({ "type": "string", "enum": words, "description": description })
}

fn ids(description: &str) -> Value {
    json!({ "type": "array", "items": { "type": "integer" }, "description": description })
}

fn request_id() -> Value {
    typed("string", "The client's id of the request.")
}

fn kind(name: &str) -> Value {
    json!({ "const": name })
}

fn generate() -> Value {
    object(&[
        ("type", kind("generate"), true),
        ("request_id", typed("string", "1 to 256 bytes; generated if absent."), false),
        ("input_ids", ids("The complete context as token ids."), true),
        (
            "max_new_tokens",
            typed("integer", "Maximum tokens of the answer; default is the rest of the context."),
            false,
        ),
        ("temperature", typed("number", "0 always selects the most probable token."), false),
        ("top_p", typed("number", "0 to 1."), false),
        ("top_k", typed("integer", "0 for all."), false),
        ("repetition_penalty", typed("number", "1 for none."), false),
        ("seed", typed("integer", "The same seed gives the same tokens; -1 for a random seed."), false),
        ("stop_tokens", ids("Tokens that end the answer; not part of it."), false),
        ("banned_tokens", ids("Tokens that are never sampled."), false),
        (
            "stop",
            json!({ "type": "array", "items": { "type": "string" }, "description": "Strings that end the answer; part of it." }),
            false,
        ),
        ("return_attention", typed("boolean", "Send attention with each token; default false."), false),
        (
            "attention_format",
            one_of(
                &["per_layer", "aggregated", "sparse", "viz"],
                "per_layer (default): every head of every layer. aggregated: one value per position. sparse: the strongest positions with \
                 the head mean of each layer. viz: statistics of each layer, entropies in bits.",
            ),
            false,
        ),
        (
            "aggregation_mode",
            one_of(
                &["mean", "max", "last_layer", "weighted_layers"],
                "Default mean. weighted_layers uses the weight 0.5 + l / L for layer l = 0 … L - 1 of the L layers that have \
                 attention, unless layer_weights gives others.",
            ),
            false,
        ),
        (
            "layer_weights",
            json!({ "type": "array", "items": { "type": "number" }, "description": "One weight per layer; default see aggregation_mode." }),
            false,
        ),
        ("attention_top_k", typed("integer", "Positions of the sparse format; default 50."), false),
        ("attention_dtype", one_of(&["float32", "float16"], "Default float32."), false),
        (
            "attention_encoding",
            one_of(&["base64", "binary", "array"], "Default base64, array for aggregated, binary in MessagePack."),
            false,
        ),
        ("message_format", one_of(&["json", "msgpack"], "Default is the format of the request."), false),
        ("logprobs", typed("boolean", "Send each token's log-probability; default true."), false),
        ("top_logprobs", typed("integer", "Alternatives per token, 0 to 100; default 2."), false),
        (
            "num_samples",
            typed("integer", "Number of answers, 1 to 64, numbered by sample, with consecutive seeds."),
            false,
        ),
        ("suggest_pruning", typed("boolean", "Send a pruning_suggestion before done; default false."), false),
        ("prune_below", typed("number", "Maximum attention of a suggested sentence; default 0.05."), false),
        (
            "sentences",
            json!({ "type": "array", "description": "Sentences of input_ids; default: split at full stops and control tokens.",
                    "items": { "type": "object", "required": ["turn_id", "sentence_id", "start", "end"] } }),
            false,
        ),
        ("model", typed("string", "Name of a model; default is the server's default model."), false),
        ("mods", typed("array", "Mods in order of their calls."), false),
        ("record", typed("boolean", "Record the run; default true."), false),
    ])
}

fn cancel() -> Value {
    object(&[("type", kind("cancel"), true), ("request_id", request_id(), true)])
}

fn ping() -> Value {
    object(&[("type", kind("ping"), true)])
}

fn sample() -> (&'static str, Value, bool) {
    ("sample", typed("integer", "Index of the sample, if there are several."), false)
}

fn token() -> Value {
    let token = object(&[
        ("token_id", typed("integer", "Id of the token."), true),
        ("text", typed("string", "Text of the token; empty while a character is incomplete."), true),
        ("logprob", typed("number", "Natural logarithm of its probability, before mods and temperature."), false),
        ("top_logprobs", typed("array", "{token_id, text, logprob}, the most probable first."), false),
    ]);
    let attention = object(&[
        ("format", typed("string", "As requested."), true),
        ("shape", ids("[num_layers, num_heads, context_length], or [context_length] when aggregated."), false),
        ("context_length", typed("integer", "Number of positions."), true),
        ("encoding", typed("string", "Encoding of data."), false),
        ("dtype", typed("string", "float32 or float16."), false),
        ("layer_ids", ids("The layers with attention, in order, if not all layers have it."), false),
        (
            "data",
            json!({ "description": "base64 text, bytes, numbers, or for sparse a list of {position, layers}." }),
            false,
        ),
        ("byte_length", typed("integer", "Bytes after the header of a binary frame."), false),
    ]);
    object(&[
        ("type", kind("token"), true),
        ("request_id", request_id(), true),
        sample(),
        ("token", token, true),
        ("attention", attention, false),
    ])
}

fn retract() -> Value {
    object(&[
        ("type", kind("retract"), true),
        ("request_id", request_id(), true),
        sample(),
        ("tokens", typed("integer", "Number of tokens removed from the end."), true),
    ])
}

fn pruning() -> Value {
    object(&[
        ("type", kind("pruning_suggestion"), true),
        ("request_id", request_id(), true),
        sample(),
        (
            "prunable_sentences",
            typed(
                "array",
                "{turn_id, sentence_id, max_attention, start, end}; max_attention over the last answers on this connection.",
            ),
            true,
        ),
    ])
}

fn done() -> Value {
    object(&[
        ("type", kind("done"), true),
        ("request_id", request_id(), true),
        sample(),
        (
            "finish_reason",
            one_of(&["stop_token", "stop_string", "length", "tool_calls", "cancelled"], "Reason for the end."),
            true,
        ),
        ("total_tokens", typed("integer", "Tokens of the answer."), true),
        ("prompt_tokens", typed("integer", "Tokens of input_ids."), true),
        ("generation_time_ms", typed("integer", "Milliseconds since the request arrived."), true),
    ])
}

fn error() -> Value {
    object(&[
        ("type", kind("error"), true),
        ("request_id", request_id(), false),
        sample(),
        ("error", typed("string", "Cause of the error and the expected value."), true),
        (
            "error_code",
            typed(
                "string",
                "INVALID_TOKEN, INVALID_REQUEST, INVALID_JSON, NESTED_TOO_DEEP, CONTEXT_LENGTH_EXCEEDED, ATTENTION_UNAVAILABLE, NO_MODEL, \
                 MODEL_NOT_FOUND, UNKNOWN_MOD, DUPLICATE_REQUEST_ID, NOT_FOUND, BUSY, OOM, RUN_FAILED, UNAUTHORIZED, FORBIDDEN, \
                 TOO_LARGE, NOT_SUPPORTED or INTERNAL.",
            ),
            true,
        ),
        ("field", typed("string", "The invalid field."), false),
        ("token_count", typed("integer", "With CONTEXT_LENGTH_EXCEEDED: tokens sent."), false),
        (
            "context_length",
            typed(
                "integer",
                "With CONTEXT_LENGTH_EXCEEDED: tokens that fit; with OOM: tokens of the context at that point.",
            ),
            false,
        ),
        ("vram_used_mb", typed("integer", "With OOM, if the server uses a GPU."), false),
        ("vram_total_mb", typed("integer", "With OOM, if the server uses a GPU."), false),
    ])
}
