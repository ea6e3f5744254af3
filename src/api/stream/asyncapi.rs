//! The protocol's part of the `AsyncAPI` document.

use serde_json::{Map, Value, json};

/// Returns channel, operations, messages and schemas.
pub(crate) fn describe() -> Value {
    let client = [
        ("config", "Starts a run. Must be the first message, unless that is resume or feedback.", config()),
        (
            "control",
            "Controls an active run: the run with request_id, or without it the newest run of this connection.",
            control(),
        ),
        ("feedback", "Rates a run; stored with the run and shown in the dashboard.", feedback()),
        (
            "resume",
            "Receives a run from the entry after index `after` on, on any connection: without gaps or repeats while the \
                    run is in memory, else the stored run as init and completion. A config with a request_id and no prompt does the \
                    same.",
            resume(),
        ),
        (
            "auth",
            "Sends the API key if it was not sent as a header; any other first message may contain it as api_key instead.",
            object(&[("api_key", text("The key."), true)]),
        ),
        ("ping", "Requests a status with operation ping.", object(&[])),
    ];
    let server = [
        (
            "init",
            "The run has started. `replaces` names the run that regenerate replaced. With `resumed` an earlier run is sent \
                  again from the entry after `index`; `generated_text` is the text up to there.",
            init(),
        ),
        (
            "token",
            "A token. All `token`s together are the text; a token may be empty while a character is incomplete.",
            token(),
        ),
        ("backtrack", "A mod removed the end of the text.", backtrack()),
        ("completion", "The run has ended.", completion()),
        (
            "error",
            "An error. With a request_id and generated_text the run has ended; generated_text is its text so \
                   far.",
            error(),
        ),
        ("status", "Progress, or confirmation of a control message or feedback.", status()),
    ];
    let names = |list: &[(&str, &str, Value)]| -> Value {
        list.iter().map(|(name, ..)| json!({ "$ref": format!("#/channels/generate/messages/{name}") })).collect()
    };
    let operations = json!({
        "sendGenerate": { "action": "receive", "channel": { "$ref": "#/channels/generate" }, "messages": names(&client),
                          "summary": "Messages from clients." },
        "receiveGenerate": { "action": "send", "channel": { "$ref": "#/channels/generate" }, "messages": names(&server),
                             "summary": "Messages from the server." },
    });
    let (mut channel, mut messages) = (Map::new(), Map::new());
    for (name, summary, payload) in client.into_iter().chain(server) {
        let known = format!("generate_{name}");
        channel.insert(name.into(), json!({ "$ref": format!("#/components/messages/{known}") }));
        messages.insert(known, message(name, summary, payload));
    }
    json!({
        "channels": { "generate": {
            "address": "/generate",
            "title": "Streaming inference",
            "description": "Any number of consecutive runs and up to 16 concurrent runs, identified by request_id.",
            "messages": channel,
        } },
        "operations": operations,
        "components": { "messages": messages, "schemas": schemas() },
    })
}

fn message(name: &str, summary: &str, mut payload: Value) -> Value {
    payload["properties"]["type"] = json!({ "const": name });
    if let Some(required) = payload["required"].as_array_mut() {
        required.insert(0, "type".into());
    }
    json!({ "name": name, "summary": summary, "payload": payload })
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

fn text(description: &str) -> Value {
    typed("string", description)
}

fn number(description: &str) -> Value {
    typed("number", description)
}

fn integer(description: &str) -> Value {
    typed("integer", description)
}

fn flag(description: &str, default: bool) -> Value {
    json!({ "type": "boolean", "description": description, "default": default })
}

fn schema_ref(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/generate_{schema}") })
}

fn id() -> Value {
    text("The run's request_id.")
}

fn config() -> Value {
    object(&[
        (
            "model",
            text("Name of the model, optionally followed by mods; default is the server's default model."),
            false,
        ),
        (
            "prompt",
            json!({ "type": ["string", "array"], "description": "A string, or a list of strings and token ids." }),
            true,
        ),
        ("request_id", text("The client's id of the run, up to 256 bytes; must be unique."), false),
        ("parameters", schema_ref("parameters"), false),
        ("options", schema_ref("options"), false),
        ("mods", typed("array", "Names of mods, or objects of name and config."), false),
    ])
}

fn control() -> Value {
    object(&[
        (
            "action",
            json!({ "enum": ["stop", "pause", "resume", "regenerate", "modify"], "description":
            "stop ends the run with a completion. pause suspends it: it keeps its slot for --pause-timeout, then the slot is given to \
             others. resume continues it. regenerate starts another run with the same, possibly modified configuration, whose init \
             names the replaced run; that run ends without further messages. modify changes parameters from the next token on." }),
            true,
        ),
        ("request_id", id(), false),
        ("parameters", schema_ref("parameters"), false),
    ])
}

fn feedback() -> Value {
    object(&[
        ("rating", json!({ "type": "number", "minimum": -1, "maximum": 1 }), true),
        ("text", text("Comment, up to 10 000 characters."), false),
        ("position", integer("Index of the token in the answer, from 0."), false),
        ("request_id", id(), false),
    ])
}

fn resume() -> Value {
    object(&[
        ("request_id", id(), true),
        (
            "after",
            json!({ "type": "integer", "minimum": 0, "default": 0, "description": "The last index received." }),
            false,
        ),
    ])
}

fn init() -> Value {
    object(&[
        ("request_id", id(), true),
        ("run_id", text("The run's id in the trace: /runs/{run_id} replays it."), true),
        ("model", text("The model."), true),
        ("model_info", schema_ref("model_info"), false),
        ("replaces", text("The request_id of the run that regenerate replaced."), false),
        ("resumed", flag("The run is sent again.", false), false),
        ("stored", flag("The run was loaded from the database.", false), false),
        ("index", integer("Index after which the messages continue; only with resumed."), false),
        ("generated_text", text("The text up to there; only with resumed."), false),
    ])
}

fn token() -> Value {
    object(&[
        ("request_id", id(), true),
        ("index", integer("Number of tokens and backtracks so far, from 1; 0 for the prompt."), true),
        ("token", text("Text of the token."), true),
        ("token_id", integer("Id of the token; with options.include_token_ids."), false),
        ("generated_text", text("The text including this token; not with options.generated_text delta."), false),
        (
            "logprobs",
            json!({ "type": "array", "items": schema_ref("logprob"), "description":
            "The token, followed by the most probable alternatives; with options.include_logprobs." }),
            false,
        ),
        (
            "timing",
            json!({ "type": "object", "properties": { "token_ms": number("Milliseconds since the previous token."),
            "total_ms": number("Milliseconds since the start of the run.") } }),
            false,
        ),
        ("echo", flag("This message repeats the prompt.", false), false),
        (
            "finish_reason",
            json!({ "enum": ["stop", "length", "tool_calls", null], "description":
            "null if not finished, or if the run was stopped or failed; then only its last message has the reason." }),
            true,
        ),
        ("finished", flag("The run ends with this token, if that is already known.", false), true),
    ])
}

fn backtrack() -> Value {
    object(&[
        ("request_id", id(), true),
        ("index", integer("Number of tokens and backtracks so far, from 1."), true),
        ("removed_tokens", integer("Number of removed tokens."), true),
        ("removed_characters", integer("Number of Unicode scalar values to remove from the end of the text."), true),
        ("removed_text", text("The removed text."), true),
        ("generated_text", text("The remaining text; not with options.generated_text delta."), false),
    ])
}

fn completion() -> Value {
    object(&[
        ("request_id", id(), true),
        ("generated_text", text("The complete text."), true),
        ("finish_reason", json!({ "enum": ["stop", "length", "tool_calls"] }), true),
        ("usage", schema_ref("usage"), true),
        (
            "timing",
            json!({ "type": "object", "properties": { "first_token_ms": number("Milliseconds from the start to the first token."),
            "total_ms": number("Milliseconds from the start to the end.") } }),
            false,
        ),
        (
            "stopped_by",
            json!({ "const": "client", "description":
            "Set if a control message stopped the run; the finish_reason is stop." }),
            false,
        ),
        ("stop_string", text("The stop string that ended the run."), false),
        ("tool_calls", typed("array", "The tool calls with which a mod ended the run."), false),
        ("stored", flag("The run was loaded from the database.", false), false),
    ])
}

fn error() -> Value {
    object(&[
        (
            "error",
            json!({ "enum": ["invalid_request", "context_length_exceeded", "content_filter", "memory_pressure", "timeout",
            "internal_error", "model_loading_error", "rate_limited", "unavailable", "unauthorized", "forbidden"],
            "description": "content_filter: a mod ended the run with an error." }),
            true,
        ),
        ("message", text("Text for people."), true),
        ("recoverable", flag("A retry can succeed.", false), true),
        ("recovery_action", json!({ "enum": ["retry", "reduce_prompt", "authenticate", null] }), true),
        ("request_id", id(), false),
        ("parameter", text("The invalid field."), false),
        ("n_prompt_tokens", integer("Tokens of the prompt; with context_length_exceeded."), false),
        ("n_ctx", integer("Size of the context in tokens; with context_length_exceeded."), false),
        ("retry_after_seconds", integer("Seconds after which a retry can succeed."), false),
        ("generated_text", text("The text of the run so far."), false),
        ("usage", schema_ref("usage"), false),
        ("stored", flag("The run was loaded from the database.", false), false),
    ])
}

fn status() -> Value {
    object(&[
        (
            "operation",
            json!({ "enum": ["model_loading", "prompt_processing", "pause", "resume", "modify", "feedback", "ping", "moved"], "description":
            "moved: another connection receives the run now." }),
            true,
        ),
        ("progress", json!({ "type": "integer", "minimum": 0, "maximum": 100 }), true),
        ("message", text("Text for people."), true),
        ("eta_seconds", number("Estimated remaining seconds."), false),
        ("request_id", id(), false),
        ("parameters", schema_ref("parameters"), false),
    ])
}

fn schemas() -> Value {
    let parameters = object(&[
        (
            "max_tokens",
            integer(
                "Maximum tokens of the answer; default and maximum are the rest of the context and --max-tokens-limit. A larger \
                 value is rejected.",
            ),
            false,
        ),
        ("temperature", json!({ "type": "number", "minimum": 0, "maximum": 100, "default": 0.8 }), false),
        ("top_p", json!({ "type": "number", "minimum": 0, "maximum": 1, "default": 0.95 }), false),
        ("top_k", json!({ "type": "integer", "minimum": -1, "default": 40 }), false),
        ("repetition_penalty", json!({ "type": "number", "minimum": 0.01, "maximum": 100, "default": 1 }), false),
        ("stop", json!({ "type": ["string", "array"], "items": { "type": "string" } }), false),
        ("banned_tokens", typed("array", "Token ids, or strings of one token each, that are never sampled."), false),
        ("seed", integer("Seed of the sampler; default is a random seed."), false),
    ]);
    let mut parameters = parameters;
    parameters["description"] =
        "All sampling parameters of the other routes are accepted too, e.g. min_p, logit_bias, samplers. \
        modify accepts sampling parameters and limits."
            .into();
    json!({
        "generate_parameters": parameters,
        "generate_options": object(&[
            ("stream", flag("Send tokens; if false, send only the completion.", true), false),
            ("echo_prompt", flag("Repeat the prompt in generated_text.", false), false),
            ("include_token_ids", flag("Send token_id.", false), false),
            ("include_logprobs", flag("Send logprobs.", false), false),
            ("top_logprobs", json!({ "type": "integer", "minimum": 1, "maximum": 100, "default": 5 }), false),
            ("include_timing", flag("Send timing.", false), false),
            ("generated_text", json!({ "enum": ["cumulative", "delta"], "default": "cumulative", "description":
                "delta omits generated_text from token messages, whose total size grows with the square of the text's length." }), false),
            ("timeout_ms", integer("Maximum duration of the run without pauses; it then ends with the error timeout."), false),
        ]),
        "generate_model_info": object(&[
            ("version", text("The architecture."), true),
            ("max_tokens", integer("Context size of a run in tokens."), true),
            ("quantization", text("Type of the weights."), true),
            ("parameters", integer("Number of weights."), true),
        ]),
        "generate_logprob": object(&[("token", text("The token."), true), ("logprob", number("Natural logarithm."), true)]),
        "generate_usage": object(&[
            ("prompt_tokens", integer("Tokens of the prompt."), true),
            ("completion_tokens", integer("Tokens of the answer."), true),
            ("total_tokens", integer("Sum of both."), true),
        ]),
    })
}
