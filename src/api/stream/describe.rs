//! The protocol's part of the `AsyncAPI` document.

use serde_json::{Map, Value, json};

/// Channel, operations, messages and what they hold.
pub(in crate::api) fn describe() -> Value {
    let client = [
        ("config", "Begins a run. The first message, unless it is resume or feedback.", config()),
        (
            "control",
            "Speaks to a run that goes on: the one of request_id, without one the newest of this connection.",
            control(),
        ),
        (
            "feedback",
            "Says what the user thinks of a run; it is kept with the run and shown in the dashboard.",
            feedback(),
        ),
        (
            "resume",
            "Hears a run from behind the entry with index `after` on, on any connection: without loss or repeat while the \
                    run is known, else the stored run as init and completion. A config with a request_id and no prompt is the \
                    same.",
            resume(),
        ),
        (
            "auth",
            "Brings the key, where none came as a header; any other first message may bring it as api_key instead.",
            object(&[("api_key", text("The key."), true)]),
        ),
        ("ping", "Is answered by a status with operation ping.", object(&[])),
    ];
    let server = [
        (
            "init",
            "The run exists. `replaces` names the run that regenerate put it in the place of; `resumed` says that it is heard \
                  again, from behind the entry with this index, where the text is `generated_text`.",
            init(),
        ),
        (
            "token",
            "A token. All `token`s together are the text; one may be empty while a character is incomplete.",
            token(),
        ),
        ("backtrack", "A mod took the end of the text back.", backtrack()),
        ("completion", "The run is over.", completion()),
        (
            "error",
            "Something is wrong; with a request_id of a run, that run is over if generated_text is there, which is what it \
                   had said.",
            error(),
        ),
        ("status", "How far something is, or that a control message or feedback has taken effect.", status()),
    ];
    let names = |list: &[(&str, &str, Value)]| -> Value {
        list.iter().map(|(name, ..)| json!({ "$ref": format!("#/channels/generate/messages/{name}") })).collect()
    };
    let operations = json!({
        "sendGenerate": { "action": "receive", "channel": { "$ref": "#/channels/generate" }, "messages": names(&client),
                          "summary": "What clients say." },
        "receiveGenerate": { "action": "send", "channel": { "$ref": "#/channels/generate" }, "messages": names(&server),
                             "summary": "What the server says." },
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
            "description": "Any number of runs after each other, and 16 at once, each by its request_id.",
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

fn whole(description: &str) -> Value {
    typed("integer", description)
}

fn flag(description: &str, default: bool) -> Value {
    json!({ "type": "boolean", "description": description, "default": default })
}

fn of(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/generate_{schema}") })
}

fn id() -> Value {
    text("The run's request_id.")
}

fn config() -> Value {
    object(&[
        ("model", text("The model, with mods behind its name or not; the default one when absent."), false),
        (
            "prompt",
            json!({ "type": ["string", "array"], "description": "A text, or a list of texts and token ids." }),
            true,
        ),
        ("request_id", text("The client's id of the run, at most 256 bytes; must be new."), false),
        ("parameters", of("parameters"), false),
        ("options", of("options"), false),
        ("mods", typed("array", "Names of mods, or objects of name and config."), false),
    ])
}

fn control() -> Value {
    object(&[
        (
            "action",
            json!({ "enum": ["stop", "pause", "resume", "regenerate", "modify"], "description":
            "stop ends the run with a completion. pause lets it rest: it keeps its slot for --pause-timeout, then the slot goes to \
             others. resume lets it go on. regenerate begins another run with the same configuration, changes included, whose init \
             names the one it replaces; that one ends and says nothing more. modify changes parameters from the next token on." }),
            true,
        ),
        ("request_id", id(), false),
        ("parameters", of("parameters"), false),
    ])
}

fn feedback() -> Value {
    object(&[
        ("rating", json!({ "type": "number", "minimum": -1, "maximum": 1 }), true),
        ("text", text("In words, at most 10 000 characters."), false),
        ("position", whole("The token of the answer that it is about, counted from 0."), false),
        ("request_id", id(), false),
    ])
}

fn resume() -> Value {
    object(&[
        ("request_id", id(), true),
        (
            "after",
            json!({ "type": "integer", "minimum": 0, "default": 0, "description": "The last index that was received." }),
            false,
        ),
    ])
}

fn init() -> Value {
    object(&[
        ("request_id", id(), true),
        ("run_id", text("The run's id in the trace: /runs/{run_id} replays it."), true),
        ("model", text("The model."), true),
        ("model_info", of("model_info"), false),
        ("replaces", text("The request_id of the run that regenerate replaced."), false),
        ("resumed", flag("Whether the run is heard again.", false), false),
        ("stored", flag("Whether it comes from the database.", false), false),
        ("index", whole("Where the messages that follow begin; only with resumed."), false),
        ("generated_text", text("The text up to there; only with resumed."), false),
    ])
}

fn token() -> Value {
    object(&[
        ("request_id", id(), true),
        ("index", whole("Counts tokens and backtracks from 1; 0 for the prompt."), true),
        ("token", text("What the token adds to the text."), true),
        ("token_id", whole("Its id; with options.include_token_ids."), false),
        ("generated_text", text("All text with it; not with options.generated_text delta."), false),
        (
            "logprobs",
            json!({ "type": "array", "items": of("logprob"), "description":
            "The token first, then the others most probable; with options.include_logprobs." }),
            false,
        ),
        (
            "timing",
            json!({ "type": "object", "properties": { "token_ms": number("Since the token before."),
            "total_ms": number("Since the run began.") } }),
            false,
        ),
        ("echo", flag("Whether this is the prompt, repeated.", false), false),
        (
            "finish_reason",
            json!({ "enum": ["stop", "length", "tool_calls", null], "description":
            "null if not finished. How a run ends that is stopped or fails, only its last message says." }),
            true,
        ),
        ("finished", flag("Whether the run ends with this token, where that is known already.", false), true),
    ])
}

fn backtrack() -> Value {
    object(&[
        ("request_id", id(), true),
        ("index", whole("Counts tokens and backtracks from 1."), true),
        ("removed_tokens", whole("Tokens that are gone."), true),
        ("removed_characters", whole("Unicode scalar values to remove from the end of the text."), true),
        ("removed_text", text("Those characters."), true),
        ("generated_text", text("What is left; not with options.generated_text delta."), false),
    ])
}

fn completion() -> Value {
    object(&[
        ("request_id", id(), true),
        ("generated_text", text("The whole text."), true),
        ("finish_reason", json!({ "enum": ["stop", "length", "tool_calls"] }), true),
        ("usage", of("usage"), true),
        (
            "timing",
            json!({ "type": "object", "properties": { "first_token_ms": number("From the beginning to the first token."),
            "total_ms": number("From the beginning to the end.") } }),
            false,
        ),
        (
            "stopped_by",
            json!({ "const": "client", "description":
            "Where a control message stopped it; the finish_reason is stop then, as the contract has it." }),
            false,
        ),
        ("stop_string", text("The stop string that ended it."), false),
        ("tool_calls", typed("array", "The calls, where a mod ended the run with some."), false),
        ("stored", flag("Whether it comes from the database.", false), false),
    ])
}

fn error() -> Value {
    object(&[
        (
            "error",
            json!({ "enum": ["invalid_request", "context_length_exceeded", "content_filter", "memory_pressure", "timeout",
            "internal_error", "model_loading_error", "rate_limited", "unavailable", "unauthorized", "forbidden"],
            "description": "content_filter: a mod ended the run with an error of its own." }),
            true,
        ),
        ("message", text("For people."), true),
        ("recoverable", flag("Whether trying again makes sense.", false), true),
        ("recovery_action", json!({ "enum": ["retry", "reduce_prompt", "authenticate", null] }), true),
        ("request_id", id(), false),
        ("parameter", text("The field that is wrong."), false),
        ("n_prompt_tokens", whole("Tokens of the prompt; with context_length_exceeded."), false),
        ("n_ctx", whole("Tokens that the context holds; with context_length_exceeded."), false),
        ("retry_after_seconds", whole("When trying again makes sense."), false),
        ("generated_text", text("What the run had said."), false),
        ("usage", of("usage"), false),
        ("stored", flag("Whether it comes from the database.", false), false),
    ])
}

fn status() -> Value {
    object(&[
        (
            "operation",
            json!({ "enum": ["model_loading", "prompt_processing", "pause", "resume", "modify", "feedback", "ping", "moved"], "description":
            "moved: another connection hears the run now." }),
            true,
        ),
        ("progress", json!({ "type": "integer", "minimum": 0, "maximum": 100 }), true),
        ("message", text("For people."), true),
        ("eta_seconds", number("Estimated time that is left."), false),
        ("request_id", id(), false),
        ("parameters", of("parameters"), false),
    ])
}

fn schemas() -> Value {
    let parameters = object(&[
        (
            "max_tokens",
            whole(
                "Most tokens of the answer; when absent, as many as the context holds, and at most --max-tokens-limit. More \
                 than that is refused.",
            ),
            false,
        ),
        ("temperature", json!({ "type": "number", "minimum": 0, "maximum": 100, "default": 0.8 }), false),
        ("top_p", json!({ "type": "number", "minimum": 0, "maximum": 1, "default": 0.95 }), false),
        ("top_k", json!({ "type": "integer", "minimum": -1, "default": 40 }), false),
        ("repetition_penalty", json!({ "type": "number", "minimum": 0.01, "maximum": 100, "default": 1 }), false),
        ("stop", json!({ "type": ["string", "array"], "items": { "type": "string" } }), false),
        ("banned_tokens", typed("array", "Token ids, or texts of one token each, that are never drawn."), false),
        ("seed", whole("Seed of the draw; a new one each time when absent."), false),
    ]);
    let mut parameters = parameters;
    parameters["description"] =
        "Every sampling parameter of the other routes is taken too, e.g. min_p, logit_bias, samplers. \
        modify takes those that say how tokens are drawn or when the run ends."
            .into();
    json!({
        "generate_parameters": parameters,
        "generate_options": object(&[
            ("stream", flag("Whether tokens are told; else only the completion is.", true), false),
            ("echo_prompt", flag("Repeat the prompt in generated_text.", false), false),
            ("include_token_ids", flag("Tell token_id.", false), false),
            ("include_logprobs", flag("Tell logprobs.", false), false),
            ("top_logprobs", json!({ "type": "integer", "minimum": 1, "maximum": 100, "default": 5 }), false),
            ("include_timing", flag("Tell timing.", false), false),
            ("generated_text", json!({ "enum": ["cumulative", "delta"], "default": "cumulative", "description":
                "delta leaves generated_text out of token messages: all text so far grows with the square of its length." }), false),
            ("timeout_ms", whole("Most time the run may take, rests not counted; then it ends with the error timeout."), false),
        ]),
        "generate_model_info": object(&[
            ("version", text("The architecture."), true),
            ("max_tokens", whole("Tokens of context that a run has."), true),
            ("quantization", text("How the weights are kept."), true),
            ("parameters", whole("Number of weights."), true),
        ]),
        "generate_logprob": object(&[("token", text("The token."), true), ("logprob", number("Natural logarithm."), true)]),
        "generate_usage": object(&[
            ("prompt_tokens", whole("Tokens of the prompt."), true),
            ("completion_tokens", whole("Tokens of the answer."), true),
            ("total_tokens", whole("Both."), true),
        ]),
    })
}
