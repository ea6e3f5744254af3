//! Constrained answers: grammars and JSON schemas on every route that accepts them, with a model with random
//! weights, which would not generate such text by itself.

use super::harness::{ErrorTable, Server, recorded_items, server, with_fields};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use thunder::events::{Event, Measurements, TraceItem};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const LLAMA_COMPLETION: &str = "/completion";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "size": {"enum": ["small", "large"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "size", "count", "tags"],
        "additionalProperties": false,
    })
}

/// Asserts that a text is JSON that matches [`schema`].
fn assert_valid(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text:?}"));
    let object = value.as_object().unwrap();
    assert_eq!(object.keys().collect::<Vec<_>>(), ["name", "size", "count", "tags"], "{text}");
    assert!(object["name"].as_str().unwrap().chars().count() <= 12, "{text}");
    assert!(["small", "large"].contains(&object["size"].as_str().unwrap()), "{text}");
    assert!(object["count"].as_u64().unwrap() <= 99, "{text}");
    let tags = object["tags"].as_array().unwrap();
    assert!(tags.len() <= 3 && tags.iter().all(Value::is_boolean), "{text}");
}

#[expect(clippy::needless_pass_by_value, reason = "callers write json!(…) in place")]
fn body(seed: u32, fields: Value) -> Value {
    let body = json!({"messages": [{"role": "user", "content": "Hello!"}], "prompt": "Hello", "seed": seed,
        "temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 200, "ignore_eos": false});
    with_fields(body, &fields)
}

fn format() -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "thing", "strict": true, "schema": schema()}}})
}

/// Returns the text of an answer if the model ended it.
fn complete_text<'a>(answer: &'a Value, pointer: &str) -> Option<&'a str> {
    let choice = &answer["choices"][0];
    (choice["finish_reason"] == "stop").then(|| choice.pointer(pointer).unwrap().as_str().unwrap())
}

/// Returns the recorded events of an answer's run.
async fn recorded_events(server: &Server, answer: &Value) -> Vec<(Event, Measurements)> {
    let items = recorded_items(server, answer["thunder"]["run_id"].as_str().unwrap()).await;
    items
        .into_iter()
        .filter_map(|item| match item {
            TraceItem::Event(mut event) => {
                let measured = event.measured.take().map(|measured| *measured).unwrap_or_default();
                Some((event, measured))
            }
            _ => None,
        })
        .collect()
}

#[tokio::test]
async fn complete_answers_match_their_schema() {
    let server = server().await;
    let mut complete = 0;
    for seed in 0..12 {
        let chat = server.answer(CHAT, &body(seed, format())).await;
        let completion = server.answer(COMPLETIONS, &body(seed, json!({"json_schema": schema()}))).await;
        for text in
            [complete_text(&chat, "/message/content"), complete_text(&completion, "/text")].into_iter().flatten()
        {
            assert_valid(text);
            complete += 1;
        }
    }
    assert!(complete >= 12, "only {complete} answers ended");
}

#[tokio::test]
async fn streamed_answer_satisfies_constraint() {
    let server = server().await;
    let mut complete = 0;
    for seed in 20..26 {
        let mut request = body(seed, format());
        request["stream"] = true.into();
        let events = server.stream(CHAT, &request).await;
        let chunks: Vec<Value> =
            events.iter().filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect();
        let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        if chunks.iter().any(|chunk| chunk["choices"][0]["finish_reason"] == "stop") {
            assert_valid(&text);
            complete += 1;
        }
    }
    assert!(complete >= 3, "only {complete} answers ended");
}

#[tokio::test]
async fn grammar_precedes_schema_on_llama_server_route() {
    let server = server().await;
    let grammar = "root ::= \"<\" [0-9]{2,4} (\";\" [a-c]+)? \">\"";
    for seed in 0..8 {
        let answer = server
            .answer(
                LLAMA_COMPLETION,
                &body(seed, json!({"grammar": grammar, "json_schema": schema(), "n_predict": 60})),
            )
            .await;
        let text = answer["content"].as_str().unwrap();
        let inner = text.strip_prefix('<').unwrap();
        let digits = inner.chars().take_while(char::is_ascii_digit).count();
        assert!((2..=4).contains(&digits), "{text}");
        if answer["stop_type"] != "limit" {
            let rest = &inner[digits..];
            let matches = rest == ">"
                || rest.strip_prefix(';').and_then(|rest| rest.strip_suffix('>')).is_some_and(|letters| {
                    !letters.is_empty() && letters.chars().all(|letter| ('a'..='c').contains(&letter))
                });
            assert!(matches, "{text}");
        }
    }
    let answer = server.answer(LLAMA_COMPLETION, &body(1, json!({"json_schema": {"const": 42}}))).await;
    assert_eq!(answer["content"], "42");
    let answer =
        server.answer(LLAMA_COMPLETION, &body(1, json!({"grammar": "%llguidance {}\nstart: \"a\" | \"b\""}))).await;
    assert!(["a", "b"].contains(&answer["content"].as_str().unwrap()));
}

#[tokio::test]
async fn json_object_format_yields_an_object() {
    let server = server().await;
    let mut complete = 0;
    for seed in 0..10 {
        let request =
            body(seed, json!({"response_format": {"type": "json_object"}, "temperature": 0.7, "max_tokens": 120}));
        let answer = server.answer(CHAT, &request).await;
        if let Some(text) = complete_text(&answer, "/message/content") {
            // A number may be larger than any double.
            let raw: &RawValue = serde_json::from_str(text).unwrap();
            assert!(raw.get().starts_with('{'), "{text}");
            complete += 1;
        }
    }
    assert!(complete > 0);
}

#[tokio::test]
async fn backtracking_mods_respect_constraint() {
    let server = server().await;
    // The key "name" contains an e, so this one is kept.
    let mut request = body(0, format());
    request["mods"] = json!([{"name": "ban-phrases", "config": {"phrases": ["e"]}}]);
    let answer = server.answer(CHAT, &request).await;
    assert_valid(complete_text(&answer, "/message/content").unwrap());
    let mut complete = 0;
    for seed in 0..10 {
        let mut request = body(seed, format());
        request["mods"] = json!([{"name": "ban-phrases", "config": {"phrases": ["small", "true"]}}]);
        let answer = server.answer(CHAT, &request).await;
        if let Some(text) = complete_text(&answer, "/message/content") {
            assert_valid(text);
            assert!(!text.contains("small") && !text.contains("true"), "{text}");
            complete += 1;
        }
    }
    assert!(complete >= 5, "only {complete} answers ended");
}

#[tokio::test]
async fn forced_tokens_override_constraint_and_are_recorded_as_note() {
    let server = server().await;
    let prefix = |text: &str| json!([{"name": "force-prefix", "config": {"text": text}}]);
    let mut compatible = body(3, format());
    compatible["mods"] = prefix("{\"name\":\"forced\"");
    let answer = server.answer(CHAT, &compatible).await;
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.starts_with("{\"name\":\"forced\""), "{text}");
    if let Some(text) = complete_text(&answer, "/message/content") {
        assert_valid(text);
    }

    let mut contradictory = body(3, format());
    contradictory["mods"] = prefix("No JSON");
    contradictory["max_tokens"] = 12.into();
    let answer = server.answer(CHAT, &contradictory).await;
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with("No JSON"));
    let notes: Vec<String> =
        recorded_events(server, &answer).await.into_iter().filter_map(|(_, measured)| measured.note).collect();
    assert_eq!(notes.len(), 1, "{notes:?}");
    assert!(notes[0].contains("is not permitted by the request's `response_format`"), "{notes:?}");
}

#[tokio::test]
async fn trace_contains_candidates_left_by_grammar() {
    let server = server().await;
    let answer = server.answer(CHAT, &body(5, format())).await;
    let mut draws = 0;
    for (event, measured) in recorded_events(server, &answer).await {
        if event.sampled_token.is_some() {
            assert_eq!(measured.stages[0].name, "grammar");
            let left = measured.stages[0].left as usize;
            assert!(left >= 1 && measured.after_sampler.len() <= left, "{measured:?}");
            draws += 1;
        }
        if let Some(prompt) = measured.prompt {
            let constraint = &prompt.parameters.unwrap()["constraint"];
            assert_eq!(constraint["field"], "response_format");
            assert_eq!(constraint["kind"], "json_schema");
            assert_eq!(constraint["source"], schema());
        }
    }
    assert!(draws > 5, "{draws}");
}

#[tokio::test]
async fn invalid_grammar_error_names_field() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for (path, fields) in [
        (CHAT, json!({"grammar": "root ::= \"a\"\nx"})),
        (LLAMA_COMPLETION, json!({"grammar": "root ::= y"})),
        (COMPLETIONS, json!({"json_schema": {"type": "array", "uniqueItems": true}})),
        (CHAT, json!({"grammar": "root ::= \"a\"", "json_schema": {}})),
        (CHAT, json!({"response_format": {"type": "yaml"}})),
        (CHAT, json!({"grammar": "x".repeat(300_000)})),
        (CHAT, json!({"samplers": ["top_k", "magic"]})),
        (LLAMA_COMPLETION, json!({"repeat_last_n": -1})),
    ] {
        errors.add(format!("{path} {fields}"), &server.post(path, &body(1, fields.clone())).await);
    }
    insta::assert_snapshot!("constraint_errors", errors);
    // The server still answers.
    let answer = server.answer(LLAMA_COMPLETION, &body(1, json!({"grammar": "root ::= \"ok\""}))).await;
    assert_eq!(answer["content"], "ok");
}

#[tokio::test]
async fn constrained_and_free_runs_share_the_engine() {
    let server = server().await;
    let complete = |seed: u32| async move {
        let fields = if seed.is_multiple_of(2) { format() } else { json!({"max_tokens": 60}) };
        (seed, server.answer(CHAT, &body(seed, fields)).await)
    };
    for (seed, answer) in futures::future::join_all((0..8).map(complete)).await {
        if let (true, Some(text)) = (seed.is_multiple_of(2), complete_text(&answer, "/message/content")) {
            assert_valid(text);
        }
    }
}

#[tokio::test]
async fn all_sampling_parameters_are_accepted() {
    let server = server().await;
    let answer = server
        .answer(
            LLAMA_COMPLETION,
            &json!({"prompt": "Hello", "n_predict": 24, "seed": 4, "samplers": "edskypmxt", "min_keep": 1, "typical_p": 0.9,
                "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.05, "dynatemp_range": 0.2,
                "dynatemp_exponent": 1.2, "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 1,
                "dry_penalty_last_n": 32, "dry_sequence_breakers": ["\n", "."], "repeat_penalty": 1.1,
                "presence_penalty": 0.1, "frequency_penalty": 0.1, "repeat_last_n": 16}),
        )
        .await;
    let settings = &answer["generation_settings"];
    assert_eq!(settings["samplers"][0], "penalties");
    assert_eq!(settings["dry_multiplier"], 0.8);
    assert_eq!(settings["dry_sequence_breakers"], json!(["\n", "."]));
    for mirostat in [1, 2] {
        let body = json!({"prompt": "Hello", "n_predict": 8, "mirostat": mirostat, "ignore_eos": true, "seed": 4});
        assert_eq!(server.answer(LLAMA_COMPLETION, &body).await["tokens_predicted"], 8);
    }
    let body = json!({"prompt": "Hello", "n_predict": 8, "samplers": ["top_k", "adaptive_p"], "adaptive_target": 0.3, "ignore_eos": true});
    assert_eq!(server.answer(LLAMA_COMPLETION, &body).await["tokens_predicted"], 8);
}
