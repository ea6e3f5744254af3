//! The protocol's part of the `AsyncAPI` document.

use serde_json::{Map, Value, json};

const CHANNEL: &str = "attention";

/// Channel, operations and messages.
pub(in crate::api) fn describe() -> Value {
    let client = [
        ("generate", "Begins a request.", generate()),
        ("cancel", "Ends a request.", cancel()),
        ("ping", "Is answered.", ping()),
    ];
    let server = [
        ("token", "A token, with the attention it was drawn with.", token()),
        ("retract", "A mod took back the last tokens: they are no part of the answer.", retract()),
        ("pruning_suggestion", "Sentences of the context that the model hardly looked at; before done.", pruning()),
        ("done", "A request, or a sample of it, is over.", done()),
        ("error", "A message is wrong, or a request failed; the connection goes on.", error()),
        ("pong", "The answer to ping.", object(&[])),
    ];
    let names = |list: &[(&str, &str, Value)]| -> Value {
        list.iter().map(|(name, ..)| json!({ "$ref": format!("#/channels/{CHANNEL}/messages/{name}") })).collect()
    };
    let operations = json!({
        "sendAttention": { "action": "receive", "channel": { "$ref": format!("#/channels/{CHANNEL}") },
                           "messages": names(&client), "summary": "What clients say." },
        "receiveAttention": { "action": "send", "channel": { "$ref": format!("#/channels/{CHANNEL}") },
                              "messages": names(&server), "summary": "What the server says." },
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
            "description": "Up to 64 requests at once, each by its request_id, which need only be unique among those under way on \
                this connection. Messages are JSON in text frames; a binary message from the client is MessagePack, and is \
                answered in MessagePack, where attention.data is bytes; message_format in generate overrides that. With \
                attention_encoding \"binary\" in JSON a token is a binary frame: u32 length of the header, little-endian; the \
                header, which is the token message without data, filled up with spaces; the values, little-endian, at a multiple \
                of 8 bytes. Index i of a row is token i of input_ids, or of the answer behind it; the row of the k-th new token has \
                len(input_ids) + k values, and those of each head sum to 1 (to less in models with attention sinks). \
                ?compression=off in the address leaves large rows uncompressed for clients that always offer permessage-deflate. \
                A client that does not read pauses its own runs; one that goes ends them.",
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

fn of(kind: &str, description: &str) -> Value {
    json!({ "type": kind, "description": description })
}

fn one_of(words: &[&str], description: &str) -> Value {
    json!({ "type": "string", "enum": words, "description": description })
}

fn ids(description: &str) -> Value {
    json!({ "type": "array", "items": { "type": "integer" }, "description": description })
}

fn request_id() -> Value {
    of("string", "The client's name of the request.")
}

fn kind(name: &str) -> Value {
    json!({ "const": name })
}

fn generate() -> Value {
    object(&[
        ("type", kind("generate"), true),
        ("request_id", of("string", "1 to 256 bytes; one is made up where it is absent."), false),
        ("input_ids", ids("The whole context as token ids."), true),
        ("max_new_tokens", of("integer", "Most tokens; as many as the context holds when absent."), false),
        ("temperature", of("number", "0 always takes the most probable token."), false),
        ("top_p", of("number", "0 to 1."), false),
        ("top_k", of("integer", "0 for all."), false),
        ("repetition_penalty", of("number", "1 for none."), false),
        ("seed", of("integer", "The same seed gives the same tokens; -1 for any."), false),
        ("stop_tokens", ids("End the answer and are no part of it."), false),
        ("banned_tokens", ids("Are never drawn."), false),
        (
            "stop",
            json!({ "type": "array", "items": { "type": "string" }, "description": "Texts that end the answer; they stay in it." }),
            false,
        ),
        ("return_attention", of("boolean", "Whether tokens come with attention; false when absent."), false),
        (
            "attention_format",
            one_of(
                &["per_layer", "aggregated", "sparse", "viz"],
                "Everything; one value per position; the strongest positions with the head-mean of each layer; statistics of each \
                 layer, entropies in bits. per_layer when absent.",
            ),
            false,
        ),
        (
            "aggregation_mode",
            one_of(
                &["mean", "max", "last_layer", "weighted_layers"],
                "mean when absent. weighted_layers has the weight 0.5 + l / L for layer l = 0 … L - 1 of the L layers that have \
                 attention, unless layer_weights gives others.",
            ),
            false,
        ),
        (
            "layer_weights",
            json!({ "type": "array", "items": { "type": "number" }, "description": "One for each layer; those of aggregation_mode when absent." }),
            false,
        ),
        ("attention_top_k", of("integer", "Positions of the sparse format; 50 when absent."), false),
        ("attention_dtype", one_of(&["float32", "float16"], "float32 when absent."), false),
        (
            "attention_encoding",
            one_of(&["base64", "binary", "array"], "base64 when absent, array for aggregated; binary in MessagePack."),
            false,
        ),
        ("message_format", one_of(&["json", "msgpack"], "As the request was sent, when absent."), false),
        ("logprobs", of("boolean", "Whether tokens have their log-probability; true when absent."), false),
        ("top_logprobs", of("integer", "Alternatives of each token, 0 to 100; 2 when absent."), false),
        ("num_samples", of("integer", "Answers, 1 to 64, told apart by sample; seeds follow each other."), false),
        ("suggest_pruning", of("boolean", "Whether a pruning_suggestion comes before done."), false),
        ("prune_below", of("number", "Largest attention of a sentence that is suggested; 0.05 when absent."), false),
        (
            "sentences",
            json!({ "type": "array", "description": "Sentences of input_ids; found at full stops and control tokens when absent.",
                    "items": { "type": "object", "required": ["turn_id", "sentence_id", "start", "end"] } }),
            false,
        ),
        ("model", of("string", "One of the server's models; the default when absent."), false),
        ("mods", of("array", "Mods in order."), false),
        ("record", of("boolean", "Whether the run is kept; true when absent."), false),
    ])
}

fn cancel() -> Value {
    object(&[("type", kind("cancel"), true), ("request_id", request_id(), true)])
}

fn ping() -> Value {
    object(&[("type", kind("ping"), true)])
}

fn sample() -> (&'static str, Value, bool) {
    ("sample", of("integer", "Which of several samples."), false)
}

fn token() -> Value {
    let token = object(&[
        ("token_id", of("integer", "Its id."), true),
        ("text", of("string", "Empty while a character is incomplete."), true),
        ("logprob", of("number", "Natural logarithm of its probability, before mods and temperature."), false),
        ("top_logprobs", of("array", "{token_id, text, logprob}, the most probable first."), false),
    ]);
    let attention = object(&[
        ("format", of("string", "As asked for."), true),
        ("shape", ids("[num_layers, num_heads, context_length], or [context_length] when aggregated."), false),
        ("context_length", of("integer", "Positions looked at."), true),
        ("encoding", of("string", "How data is written."), false),
        ("dtype", of("string", "float32 or float16."), false),
        ("layer_ids", ids("Where not every layer has attention: those that have, in order."), false),
        (
            "data",
            json!({ "description": "base64 text, bytes, numbers, or for sparse a list of {position, layers}." }),
            false,
        ),
        ("byte_length", of("integer", "Bytes behind the header of a binary frame."), false),
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
        ("tokens", of("integer", "How many tokens are gone from the end."), true),
    ])
}

fn pruning() -> Value {
    object(&[
        ("type", kind("pruning_suggestion"), true),
        ("request_id", request_id(), true),
        sample(),
        (
            "prunable_sentences",
            of(
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
        ("finish_reason", one_of(&["stop_token", "stop_string", "length", "tool_calls", "cancelled"], "Why."), true),
        ("total_tokens", of("integer", "Tokens of the answer."), true),
        ("prompt_tokens", of("integer", "Tokens of input_ids."), true),
        ("generation_time_ms", of("integer", "Since the request was taken, in milliseconds."), true),
    ])
}

fn error() -> Value {
    object(&[
        ("type", kind("error"), true),
        ("request_id", request_id(), false),
        sample(),
        ("error", of("string", "What is wrong, and what would be right."), true),
        (
            "error_code",
            of(
                "string",
                "INVALID_TOKEN, INVALID_REQUEST, INVALID_JSON, NESTED_TOO_DEEP, CONTEXT_LENGTH_EXCEEDED, ATTENTION_UNAVAILABLE, NO_MODEL, \
                 MODEL_NOT_FOUND, UNKNOWN_MOD, DUPLICATE_REQUEST_ID, NOT_FOUND, BUSY, OOM, RUN_FAILED, UNAUTHORIZED, FORBIDDEN, \
                 TOO_LARGE, NOT_SUPPORTED or INTERNAL.",
            ),
            true,
        ),
        ("field", of("string", "The field that is wrong."), false),
        ("token_count", of("integer", "With CONTEXT_LENGTH_EXCEEDED: tokens sent."), false),
        (
            "context_length",
            of(
                "integer",
                "With CONTEXT_LENGTH_EXCEEDED: tokens that fit; with OOM: tokens of the context at that point.",
            ),
            false,
        ),
        ("vram_used_mb", of("integer", "With OOM, where there is a GPU."), false),
        ("vram_total_mb", of("integer", "With OOM, where there is a GPU."), false),
    ])
}
