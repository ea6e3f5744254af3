//! The `OpenAPI` and `AsyncAPI` documents are valid and complete.

use super::harness::{server, with_fields};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const METHODS: [&str; 7] = ["get", "put", "post", "delete", "options", "head", "patch"];

/// Alternative paths of routes, for clients of llama-server, `KoboldCPP` and older APIs, each with the documented path.
const ALIASES: [(&str, &str); 23] = [
    ("/api/latest/config/max_context_length", "/api/v1/config/max_context_length"),
    ("/api/latest/config/max_length", "/api/v1/config/max_length"),
    ("/api/latest/config/soft_prompt", "/api/v1/config/soft_prompt"),
    ("/api/latest/config/soft_prompts_list", "/api/v1/config/soft_prompts_list"),
    ("/api/latest/info/version", "/api/v1/info/version"),
    ("/api/latest/model", "/api/v1/model"),
    ("/chat/completions", "/v1/chat/completions"),
    ("/chat/completions/control", "/v1/chat/completions/control"),
    ("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"),
    ("/classify", "/v1/classify"),
    ("/completions", "/completion"),
    ("/embedding", "/embeddings"),
    ("/health", "/healthz"),
    ("/models", "/v1/models"),
    ("/rerank", "/v1/rerank"),
    ("/reranking", "/v1/rerank"),
    ("/responses", "/v1/responses"),
    ("/responses/input_tokens", "/v1/responses/input_tokens"),
    ("/responses/{response_id}", "/v1/responses/{response_id}"),
    ("/responses/{response_id}/input_items", "/v1/responses/{response_id}/input_items"),
    ("/v1/health", "/healthz"),
    ("/v1/ingest", "/ingest"),
    ("/v1/reranking", "/v1/rerank"),
];

async fn document() -> Value {
    let (status, document) = server().await.get("/api/v1/openapi.json").await;
    assert_eq!(status, 200, "{document}");
    document
}

/// Returns method, path, and the operation in the document.
fn operations(document: &Value) -> Vec<(&str, &str, &Value)> {
    let paths = document["paths"].as_object().unwrap();
    let all = paths.iter().flat_map(|(path, item)| {
        METHODS.iter().filter_map(move |method| Some((*method, path.as_str(), item.get(method)?)))
    });
    all.collect()
}

#[tokio::test]
async fn openapi_operations_have_unique_ids() {
    let document = document().await;
    let operations = operations(&document);
    assert!(operations.len() > 70, "{}", operations.len());
    let mut seen = BTreeSet::new();
    for (method, path, operation) in operations {
        let id = operation["operationId"].as_str().unwrap_or_default();
        assert!(!id.is_empty() && seen.insert(id), "{method} {path}: operationId {id:?} is empty or used twice");
    }
}

#[tokio::test]
async fn openapi_responses_have_descriptions() {
    let document = document().await;
    for (method, path, operation) in operations(&document) {
        let responses = operation["responses"].as_object().unwrap();
        assert!(!responses.is_empty(), "{method} {path} has no response");
        for (status, response) in responses {
            let description = response["description"].as_str().unwrap_or_default();
            assert!(!description.is_empty(), "{method} {path}: response {status} has no description");
        }
    }
}

#[tokio::test]
async fn openapi_path_parameters_are_declared() {
    let document = document().await;
    for (method, path, operation) in operations(&document) {
        let in_path: BTreeSet<&str> = path.split('{').skip(1).map(|rest| rest.split_once('}').unwrap().0).collect();
        let parameters = operation["parameters"].as_array().map_or(&[][..], Vec::as_slice);
        let declared: Vec<&Value> = parameters.iter().filter(|parameter| parameter["in"] == "path").collect();
        let names: BTreeSet<&str> = declared.iter().filter_map(|parameter| parameter["name"].as_str()).collect();
        assert_eq!(names, in_path, "{method} {path}");
        assert_eq!(names.len(), declared.len(), "{method} {path}: a path parameter is declared twice");
        assert!(declared.iter().all(|parameter| parameter["required"] == true), "{method} {path}");
    }
}

/// Returns the name of a schema, or its JSON.
fn schema_name(schema: &Value) -> String {
    match schema["$ref"].as_str() {
        Some(target) => target.trim_start_matches("#/components/schemas/").to_owned(),
        None if schema["type"] == "array" => format!("[{}]", schema_name(&schema["items"])),
        None => schema.to_string(),
    }
}

#[tokio::test]
async fn openapi_bodies_have_types() {
    let document = document().await;
    let mut lines = Vec::new();
    for (method, path, operation) in operations(&document) {
        let bodies = |content: &Value| -> Vec<String> {
            let content = content.as_object().into_iter().flatten();
            content.map(|(kind, body)| format!("{kind} {}", schema_name(&body["schema"]))).collect()
        };
        for body in bodies(&operation["requestBody"]["content"]) {
            assert!(!body.ends_with("{}"), "{method} {path} has a request body without a schema");
            lines.push(format!("{method} {path} takes {body}"));
        }
        for (status, response) in operation["responses"].as_object().unwrap() {
            let bodies = bodies(&response["content"]).into_iter();
            lines.extend(bodies.map(|body| format!("{method} {path} returns {status} {body}")));
        }
    }
    insta::assert_snapshot!("openapi_bodies", lines.join("\n"));
}

#[tokio::test]
async fn asyncapi_document_describes_all_messages() {
    let mut document = server().await.get("/api/v1/asyncapi.json").await.1;
    document["info"]["version"] = "[release]".into();
    insta::assert_json_snapshot!("asyncapi", document);
}

#[tokio::test]
async fn references_of_api_documents_resolve() {
    for path in ["/api/v1/openapi.json", "/api/v1/asyncapi.json"] {
        let document = server().await.get(path).await.1;
        let mut references = Vec::new();
        collect_references(&document, &mut references);
        assert!(references.len() > 10, "{path} has {} references", references.len());
        for reference in references {
            let pointer = reference.strip_prefix('#').unwrap_or(reference);
            assert!(document.pointer(pointer).is_some(), "{path}: {reference} does not exist");
        }
    }
}

fn collect_references<'v>(value: &'v Value, found: &mut Vec<&'v str>) {
    match value {
        Value::Object(members) => {
            found.extend(members.get("$ref").and_then(Value::as_str));
            members.values().for_each(|member| collect_references(member, found));
        }
        Value::Array(list) => list.iter().for_each(|member| collect_references(member, found)),
        _ => {}
    }
}

/// Returns the properties of an object schema and of its parts, by name.
fn properties<'d>(document: &'d Value, schema: &'d Value) -> BTreeMap<&'d str, &'d Value> {
    if let Some(target) = schema["$ref"].as_str() {
        return properties(document, document.pointer(target.trim_start_matches('#')).unwrap());
    }
    let own = schema["properties"].as_object().into_iter().flatten();
    let mut all: BTreeMap<&str, &Value> = own.map(|(name, property)| (name.as_str(), property)).collect();
    let parts = schema["allOf"].as_array().into_iter().flatten();
    parts.for_each(|part| all.extend(properties(document, part)));
    all
}

#[tokio::test]
async fn openapi_declares_request_fields_of_the_handbook() {
    let document = document().await;
    let declared = properties(&document, &document["components"]["schemas"]["ChatCompletionRequest"]);
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("templates/docs/api-openai.md");
    let page = std::fs::read_to_string(page).unwrap();
    for section in ["Fields beyond OpenAI's", "Sampling"] {
        let text = page.split(&format!("## {section}\n")).nth(1).unwrap().split("\n## ").next().unwrap();
        let cells = text.lines().filter_map(|row| row.strip_prefix("| `")?.split(" | ").next());
        let names: Vec<&str> =
            cells.flat_map(|cell| cell.split('`').step_by(2)).filter(|name| !name.is_empty()).collect();
        assert!(names.len() > 20, "{names:?}");
        let missing: Vec<&&str> = names.iter().filter(|name| !declared.contains_key(**name)).collect();
        assert!(missing.is_empty(), "{section}: {missing:?} are not declared");
    }
}

#[tokio::test]
async fn declared_request_fields_are_read() {
    let (server, document) = (server().await, document().await);
    let messages = json!([{"role": "user", "content": "a"}]);
    let (chat, prompt) = (json!({"messages": messages, "max_tokens": 1}), json!({"prompt": "a", "max_tokens": 1}));
    let tokens = json!({"input_ids": [40], "max_new_tokens": 1});
    let sparse = with_fields(tokens.clone(), &json!({"attention_format": "sparse"}));
    let weighted = json!({"attention_format": "aggregated", "aggregation_mode": "weighted_layers"});
    let weighted = with_fields(tokens, &weighted);
    let kobold = json!({"input_ids": [40], "max_length": 1});
    let ollama = json!({"messages": messages, "prompt": "a", "stream": false, "logprobs": true,
                        "options": {"num_predict": 1}});
    let responses = json!({"input": "a", "max_output_tokens": 1, "store": false});
    let mut unread = Vec::new();
    for (schema, path, requests) in [
        ("ChatCompletionRequest", "/v1/chat/completions", vec![&chat]),
        ("CompletionBody", "/v1/completions", vec![&prompt]),
        ("LlamaCompletionBody", "/completion", vec![&prompt]),
        ("GenerateAttention", "/api/v1/generate", vec![&sparse, &weighted]),
        ("KoboldStreamRequest", "/api/v1/generate", vec![&prompt, &kobold]),
        ("MessagesBody", "/v1/messages", vec![&chat]),
        ("ResponsesBody", "/v1/responses", vec![&responses]),
        ("OllamaChatBody", "/api/chat", vec![&ollama]),
        ("OllamaGenerateBody", "/api/generate", vec![&ollama]),
    ] {
        for name in properties(&document, &document["components"]["schemas"][schema]).into_keys() {
            let mut rejected = false;
            // No field permits both values.
            let values = [json!(0.25), json!({"?": [{}]})];
            for (value, request) in values.iter().flat_map(|value| requests.iter().map(move |request| (value, request)))
            {
                if !rejected {
                    let body = with_fields((*request).clone(), &json!({ name: value }));
                    rejected = server.post(path, &body).await.0 == 400;
                }
            }
            if !rejected {
                unread.push(format!("{schema}.{name}"));
            }
        }
        for request in requests {
            assert_eq!(server.post(path, request).await.0, 200, "{path} accepts {request} without changes");
        }
    }
    // Only the WebSocket reads the first; any value of the others is permitted.
    let expected = ["GenerateAttention.message_format", "OllamaChatBody.keep_alive", "OllamaGenerateBody.keep_alive"];
    assert_eq!(unread, expected, "no value of these declared fields is rejected");
}

#[tokio::test]
async fn openapi_declares_the_defaults_of_the_server() {
    let document = document().await;
    let (_, props) = server().await.get("/props").await;
    let settings = props["default_generation_settings"]["params"].as_object().unwrap();
    let fields = properties(&document, &document["components"]["schemas"]["GenerationFields"]);
    let is_equal = |a: &Value, b: &Value| if a.is_number() { a.as_f64() == b.as_f64() } else { a == b };
    let mut compared = 0;
    for (name, setting) in settings {
        if let Some(default) = fields.get(name.as_str()).and_then(|field| field.get("default")) {
            assert!(is_equal(default, setting), "{name}: the document has {default}, the server {setting}");
            compared += 1;
        }
    }
    assert!(compared > 20, "only {compared} defaults were compared");
}

#[tokio::test]
async fn openapi_lists_every_route() {
    let document = document().await;
    let paths = document["paths"].as_object().unwrap();
    let mut files = Vec::new();
    rust_files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/api"), &mut files);
    let mut seen = 0;
    for file in files {
        let source = std::fs::read_to_string(&file).unwrap();
        for route in source.split(".route(\"").skip(1).map(|rest| rest.split('"').next().unwrap()) {
            seen += 1;
            let alias = ALIASES.iter().find(|(alias, _)| *alias == route);
            let documented = alias.map_or(route, |(_, target)| target);
            // The WebSocket is in the AsyncAPI document.
            let known = paths.contains_key(documented) || route == "/generate";
            assert!(known, "{}: {route} is neither documented nor an alias of a documented route", file.display());
        }
    }
    assert!(seen >= ALIASES.len(), "only {seen} routes were found in src/api");
}

fn rust_files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}
