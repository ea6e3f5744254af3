//! Responses match the schemas that the `OpenAPI` document declares for them.

use super::chat::forced_answer;
use super::harness::{SseReader, server, with_fields};
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Checks values against the schemas of a document.
struct Schemas(Value);

impl Schemas {
    fn resolve<'s>(&'s self, schema: &'s Value) -> &'s Value {
        match schema["$ref"].as_str() {
            Some(target) => self.resolve(self.0.pointer(target.trim_start_matches('#')).unwrap()),
            None => schema,
        }
    }

    /// Returns an error with the path of the first part that the schema does not describe.
    fn check(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        let schema = self.resolve(schema);
        let list = |name: &str| schema[name].as_array().map_or(&[][..], Vec::as_slice);
        for part in list("allOf") {
            self.check(part, value, at)?;
        }
        for name in ["oneOf", "anyOf"] {
            let errors: Vec<String> = list(name).iter().filter_map(|part| self.check(part, value, at).err()).collect();
            if !errors.is_empty() && errors.len() == list(name).len() {
                return Err(format!("{at}: no part of {name} fits: {}", errors.join("; ")));
            }
        }
        let kinds = match &schema["type"] {
            Value::Array(kinds) => kinds.clone(),
            Value::Null => Vec::new(),
            kind => vec![kind.clone()],
        };
        if !kinds.is_empty() && !kinds.iter().any(|kind| is_of_type(value, kind.as_str().unwrap())) {
            return Err(format!("{at}: {value} is not of type {}", schema["type"]));
        }
        if let Some(allowed) = schema["enum"].as_array()
            && !allowed.contains(value)
        {
            return Err(format!("{at}: {value} is not one of {allowed:?}"));
        }
        if let Value::Object(members) = value {
            for required in list("required") {
                if !members.contains_key(required.as_str().unwrap()) {
                    return Err(format!("{at}: {required} is missing in {value}"));
                }
            }
            for (name, member) in members {
                if let Some(property) = schema["properties"].get(name) {
                    self.check_whole(property, member, &format!("{at}.{name}"))?;
                } else if schema["additionalProperties"].is_object() {
                    self.check_whole(&schema["additionalProperties"], member, &format!("{at}.{name}"))?;
                }
            }
        }
        for (index, item) in value.as_array().into_iter().flatten().enumerate() {
            if schema["items"].is_object() {
                self.check_whole(&schema["items"], item, &format!("{at}[{index}]"))?;
            }
        }
        Ok(())
    }

    /// Checks a value and that the schema declares all its members.
    fn check_whole(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        self.check(schema, value, at)?;
        let mut names = BTreeSet::new();
        if let Value::Object(members) = value
            && self.collect_names(schema, &mut names)
            && let Some(unknown) = members.keys().find(|name| !names.contains(name.as_str()))
        {
            return Err(format!("{at}.{unknown} is not declared"));
        }
        Ok(())
    }

    /// Collects the names of the declared members. Returns false if the schema also permits others.
    fn collect_names<'s>(&'s self, schema: &'s Value, names: &mut BTreeSet<&'s str>) -> bool {
        let schema = self.resolve(schema);
        names.extend(schema["properties"].as_object().map(Map::keys).into_iter().flatten().map(String::as_str));
        let is_open = schema.get("additionalProperties").is_some();
        let parts: Vec<&Value> =
            ["allOf", "oneOf", "anyOf"].iter().filter_map(|name| schema[name].as_array()).flatten().collect();
        let declares = schema["properties"].is_object() || schema["type"] == "null" || !parts.is_empty();
        parts.into_iter().all(|part| self.collect_names(part, names)) && declares && !is_open
    }
}

fn is_of_type(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("unknown type {other}"),
    }
}

/// Sends a request to `path` and checks the response against the schema that the document declares for `template`, the
/// path with its parameters in braces.
async fn check_response(schemas: &Schemas, method: Method, template: &str, path: &str, body: Option<&Value>) {
    let mut request = server().await.request(method.clone(), path);
    if let Some(body) = body {
        request = request.json(body);
    }
    let response = request.send().await.unwrap();
    let status = response.status().as_u16().to_string();
    let kind = response.headers()["content-type"].to_str().unwrap().split(';').next().unwrap().to_owned();
    let operation = &schemas.0["paths"][template][method.as_str().to_lowercase()];
    let schema = &operation["responses"][&status]["content"][&kind]["schema"];
    let at = format!("{method} {path} {status} {kind}");
    assert!(!schema.is_null() && schema.as_object().is_some_and(|schema| !schema.is_empty()), "{at} has no schema");
    let values = if kind == "text/event-stream" {
        let events = SseReader::new(response).await.rest().await.into_iter();
        events.filter(|event| event.data != "[DONE]").map(|event| event.json()).collect()
    } else {
        vec![response.json().await.unwrap()]
    };
    assert!(!values.is_empty(), "{at} is empty");
    for value in values {
        schemas.check_whole(schema, &value, &at).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[tokio::test]
async fn responses_have_the_declared_schemas() {
    let schemas = Schemas(server().await.get("/api/v1/openapi.json").await.1);
    let chat = json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello!"}]});
    let prompt = json!({"model": "tiny", "max_tokens": 4, "prompt": "Once"});
    let stream = json!({"stream": true, "timings_per_token": true, "stream_options": {"include_usage": true}});
    let forced = json!({"mods": forced_answer("Good day.")});
    let tokens = json!({"input_ids": [40, 41], "max_new_tokens": 2, "return_attention": true, "suggest_pruning": true});
    let posts = [
        ("/v1/chat/completions", chat.clone()),
        ("/v1/chat/completions", with_fields(chat.clone(), &json!({"logprobs": true, "verbose": true, "n": 2}))),
        ("/v1/chat/completions", with_fields(chat.clone(), &stream)),
        ("/v1/chat/completions/input_tokens", chat.clone()),
        ("/v1/completions", with_fields(prompt.clone(), &json!({"logprobs": 2, "echo": true, "verbose": true}))),
        ("/v1/completions", with_fields(prompt.clone(), &stream)),
        ("/v1/responses", with_fields(json!({"model": "tiny", "input": "Hello!"}), &forced)),
        ("/v1/responses", with_fields(json!({"model": "tiny", "input": "Hello!", "stream": true}), &forced)),
        ("/v1/messages", with_fields(chat.clone(), &forced)),
        ("/v1/messages", with_fields(with_fields(chat.clone(), &forced), &json!({"stream": true}))),
        ("/completion", json!({"prompt": "Once", "n_predict": 3, "n_probs": 2, "return_tokens": true})),
        ("/completion", json!({"prompt": "Once", "n_predict": 3, "n_probs": 2, "post_sampling_probs": true})),
        ("/tokenize", json!({"content": "Once upon", "with_pieces": true})),
        ("/v1/generate", with_fields(prompt.clone(), &json!({"include_timing": true}))),
        ("/api/v1/generate", json!({"input_ids": [40, 41], "max_new_tokens": 2})),
        ("/api/v1/generate", tokens),
        ("/api/v1/generate", json!({"max_new_tokens": 2})),
        ("/api/latest/generate", json!({"prompt": "Once", "max_length": 3, "logprobs": true})),
        ("/api/extra/generate/stream", json!({"prompt": "Once", "max_length": 3})),
        ("/api/extra/generate/check", json!({})),
        ("/api/extra/last_logprobs", json!({})),
        ("/api/extra/abort", json!({"genkey": "none"})),
    ];
    for (path, body) in &posts {
        check_response(&schemas, Method::POST, path, path, Some(body)).await;
    }
    for (template, path) in [
        ("/props", "/props"),
        ("/slots", "/slots"),
        ("/v1/slots/{id_slot}/info", "/v1/slots/0/info"),
        ("/v1/models", "/v1/models"),
        ("/healthz", "/healthz"),
        ("/api/v1/model", "/api/v1/model"),
        ("/api/v1/config/soft_prompts_list", "/api/v1/config/soft_prompts_list"),
        ("/api/v1/config/soft_prompt", "/api/v1/config/soft_prompt"),
        ("/api/extra/generate/check", "/api/extra/generate/check"),
    ] {
        check_response(&schemas, Method::GET, template, path, None).await;
    }
}
