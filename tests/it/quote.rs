//! Mods and clients that were written for Quote: steps, schemas, errors, tool calls, keys, request ids.

use super::harness::{Server, message_of, server, with_fields};
use reqwest::{Method, RequestBuilder, StatusCode};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

fn chat(mod_name: &str, fields: &Value) -> Value {
    let body =
        json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 24, "seed": 7, "mods": [mod_name]});
    with_fields(body, fields)
}

#[tokio::test]
async fn steps_of_a_quote_mod_begin_at_zero() {
    let answer = server().await.answer(CHAT, &chat("quote_greets", &json!({}))).await;
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.starts_with("Greetings! ") && content.matches("Greetings!").count() == 1, "{content}");
}

#[tokio::test]
async fn schemas_begin_with_the_response_format() {
    let server = server().await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    let tool = json!({"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}});
    for (fields, expected) in [
        (json!({"response_format": format, "tools": [tool]}), json!([schema, tool])),
        (json!({"response_format": {"type": "json_object"}}), json!([{"type": "json_object"}])),
        (json!({"tools": [tool]}), json!([tool])),
        (json!({}), json!([])),
    ] {
        let mut body = chat("quote_schemas", &fields);
        (body["max_tokens"], body["tool_choice"]) = (json!(400), json!("none"));
        let answer = server.answer(CHAT, &body).await;
        let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!(serde_json::from_str::<Value>(content).unwrap(), expected, "{fields}");
        // The mods of a rerun receive the same schemas.
        let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
        let prompt = &run["events"][0]["details"]["prompt"];
        let rerun = server.answer("/api/v1/reruns", &json!({"prompt": prompt})).await;
        let rerun = server.finished(rerun["run_id"].as_str().unwrap()).await;
        let tokens = |run: &Value| run["events"][1]["added_tokens"].clone();
        assert_eq!((tokens(&run), tokens(&run).is_array()), (tokens(&rerun), true), "{rerun}");
    }
}

#[tokio::test]
async fn emit_error_of_a_quote_mod_returns_status_400() {
    let server = server().await;
    for (stream, path) in [(false, CHAT), (true, CHAT), (false, "/v1/messages"), (false, "/v1/responses")] {
        let body = chat("quote_refuse", &json!({"stream": stream, "input": "Hello!"}));
        let (status, answer) = server.post(path, &body).await;
        assert_eq!((status, answer["error"]["message"].as_str()), (400, Some("not today")), "{path} {answer}");
    }
    let (status, _) = server.post(CHAT, &chat("refuse", &json!({}))).await;
    assert_eq!(status, 422, "an error of a mod that was not written for Quote");
}

#[tokio::test]
async fn tool_calls_of_a_mod_retract_earlier_text() {
    let server = server().await;
    let answer = server.answer(CHAT, &chat("quote_late_call", &json!({}))).await;
    let choice = &answer["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&Value::Null, &json!("tool_calls")));
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "get_weather");
    let run = server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await;
    assert!(run["events"].to_string().contains("Let me look."), "the trace contains the text: {run}");

    let mut text = String::new();
    let streamed = chat("quote_late_call", &json!({"stream": true}));
    for chunk in server.stream(CHAT, &streamed).await {
        let chunk: Value = serde_json::from_str(&chunk).unwrap_or_default();
        for _ in 0..chunk.pointer("/thunder/retract/chars").and_then(Value::as_u64).unwrap_or(0) {
            text.pop().unwrap();
        }
        text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(text, "");

    let message = server.answer("/v1/messages", &chat("quote_late_call", &json!({}))).await;
    let types =
        |items: &Value| -> Vec<Value> { items.as_array().unwrap().iter().map(|item| item["type"].clone()).collect() };
    assert_eq!((types(&message["content"]), &message["stop_reason"]), (vec![json!("tool_use")], &json!("tool_use")));
    let response = server.answer("/v1/responses", &json!({"input": "Hello!", "mods": ["quote_late_call"]})).await;
    assert_eq!(types(&response["output"]), [json!("function_call")], "{response}");
}

#[tokio::test]
async fn request_id_of_active_run_is_rejected() {
    let server = server().await;
    let fields = json!({"request_id": "quote-same-id", "record": false, "ignore_eos": true});
    let mut slow = chat("quote_slow", &fields);
    (slow["stream"], slow["max_tokens"]) = (json!(true), json!(4000));
    let first = server.request(Method::POST, CHAT).json(&slow).send().await.unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    let second = chat("quote_slow", &fields);
    let (status, answer) = server.post(CHAT, &second).await;
    assert_eq!((status, answer["error"]["param"].as_str()), (409, Some("request_id")), "{answer}");
    assert_eq!(
        message_of(&answer),
        "`request_id` 'quote-same-id' is in use by an active run; send another one, or omit it to get the run's own id"
    );
    // In the attention API an id belongs to the connection, so the run gets another id.
    let own =
        json!({"input_ids": [40, 41], "max_new_tokens": 1, "request_id": "quote-same-id", "return_attention": false});
    server.answer("/api/v1/generate", &own).await;
    drop(first);
    let begun = Instant::now();
    while server.post(CHAT, &second).await.0 != 200 {
        assert!(begun.elapsed() < Duration::from_mins(1), "the id is not free after the end of its run");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Returns a request without a key.
fn without_key(server: &Server, method: Method, path: &str) -> RequestBuilder {
    crate::harness::http().request(method, format!("{}{path}", server.base))
}

async fn status(request: RequestBuilder) -> u16 {
    request.send().await.unwrap().status().as_u16()
}

fn trace(request_id: &str, key: Option<&str>) -> Value {
    json!({"request": {"request_id": request_id, "user_api_key": key}, "events": []})
}

const USER_KEY: &str = "user-key-of-ann";
const MOD_KEY: &str = "boss-key-of-bob";
const TRACE_KEY: &str = "trace-key-of-eve";

#[tokio::test]
async fn keys_of_quote_clients_are_accepted() {
    let keys =
        [&format!("--api-key={USER_KEY}"), "--mod-key", MOD_KEY, "--ingest-key", TRACE_KEY, "--allow-mod-upload"];
    let server = Server::start(&keys);
    // The harness has no key; health needs none.
    server.wait_ready().await;
    let header = |name: &str, key: &str| without_key(&server, Method::GET, "/v1/models").header(name, key);
    for (name, key, expected) in [
        ("x-user-api-key", USER_KEY, 200),
        ("x-user-api-key", "wrong", 401),
        ("x-user-api-key", TRACE_KEY, 403),
        ("x-api-key", TRACE_KEY, 403),
    ] {
        assert_eq!(status(header(name, key)).await, expected, "{name}: {key}");
    }
    assert_eq!(status(header("authorization", "Bearer none").header("x-user-api-key", USER_KEY)).await, 200);

    let post = |path: &str, body: &Value| without_key(&server, Method::POST, path).json(body);
    let prompt = |key: Value| json!({"prompt": "a", "max_tokens": 1, "user_api_key": key});
    for (key, expected) in
        [(json!(USER_KEY), 200), (json!("wrong"), 401), (json!(TRACE_KEY), 403), (json!(7), 401), (Value::Null, 401)]
    {
        assert_eq!(status(post("/v1/completions", &prompt(key.clone()))).await, expected, "{key}");
    }
    let mut long = prompt(json!(USER_KEY));
    long["padding"] = "x".repeat(1 << 20).into();
    let rejected = post("/v1/completions", &long).send().await.unwrap();
    assert_eq!(rejected.status(), StatusCode::UNAUTHORIZED);
    // Without Content-Length, the server learns the size of a body by reading it.
    let chunks = futures::stream::iter((0..20).map(|_| Ok::<_, std::io::Error>("x".repeat(1 << 16))));
    let body = reqwest::Body::wrap_stream(chunks);
    let rejected = without_key(&server, Method::POST, "/v1/completions").body(body).send().await.unwrap();
    assert_eq!(rejected.status(), StatusCode::UNAUTHORIZED);
    assert!(rejected.text().await.unwrap().contains("X-User-Api-Key"), "the error names the header");

    let source =
        "from quote_mod_sdk import mod\n\n@mod\ndef noop(event, actions, tokenizer):\n    return actions.noop()\n";
    let upload = |key: &str| json!({"name": "quiet", "language": "python", "entrypoint": "noop", "source": source, "user_api_key": key});
    assert_eq!(status(post("/v1/mods", &upload(USER_KEY))).await, 403);
    assert_eq!(status(post("/v1/mods", &upload(MOD_KEY))).await, 200);

    for (path, key, expected) in [("/ingest", TRACE_KEY, 201), ("/v1/ingest", USER_KEY, 201), ("/ingest", "wrong", 401)]
    {
        let request = post(path, &trace(&format!("of {key}"), Some(USER_KEY))).header("x-api-key", key);
        assert_eq!(status(request).await, expected, "{path} with {key}");
    }
    assert_eq!(status(post("/ingest", &trace("without", None))).await, 401);

    let mut body = prompt(json!(USER_KEY));
    body["mods"] = json!(["quiet"]);
    let answer: Value = post("/v1/completions", &body).send().await.unwrap().json().await.unwrap();
    let path = format!("/api/v1/runs/{}", answer["thunder"]["run_id"].as_str().unwrap());
    let read = |path: String| {
        let request = without_key(&server, Method::GET, &path).header("x-user-api-key", USER_KEY);
        async move { request.send().await.unwrap().text().await.unwrap() }
    };
    let begun = Instant::now();
    while !read(path.clone()).await.contains("\"done\"") {
        assert!(begun.elapsed() < Duration::from_mins(1), "the run is not stored");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for path in [path, "/api/v1/runs".into(), "/v1/mods/quiet/versions".into()] {
        let shown = read(path.clone()).await.replace(&format!("of {USER_KEY}"), "");
        assert!(shown.contains("key-"), "{path} names the key: {shown}");
        for key in [USER_KEY, MOD_KEY, TRACE_KEY] {
            assert!(!shown.contains(key), "{path} shows a key: {shown}");
        }
    }
    for key in [USER_KEY, MOD_KEY, TRACE_KEY] {
        assert!(!server.log().contains(key), "the log shows a key");
    }
}

#[tokio::test]
async fn traces_need_no_key_with_open_ingest() {
    let server = Server::start(&[&format!("--api-key={USER_KEY}"), "--ingest-open"]);
    server.wait_ready().await;
    for path in ["/ingest", "/v1/ingest"] {
        assert_eq!(status(without_key(&server, Method::POST, path).json(&trace(path, None))).await, 201, "{path}");
    }
    assert_eq!(
        status(without_key(&server, Method::POST, "/ingest").header("x-api-key", "x").json(&trace("x", None))).await,
        201
    );
    assert_eq!(status(without_key(&server, Method::GET, "/v1/models")).await, 401);
    // Requests from pages of other sites are rejected, although no key is needed.
    let page = without_key(&server, Method::POST, "/ingest")
        .header("origin", "https://evil.example")
        .json(&trace("page", None));
    assert_eq!(status(page).await, 403);
}

#[tokio::test]
async fn configuration_is_checked_against_the_annotations_of_its_mod() {
    let server = server().await;
    let body = |config: Value| {
        json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200,
                                      "mods": [{"name": "typed_config", "config": config}]})
    };
    let answer = server.answer(CHAT, &body(json!({"every": 2, "words": ["a"]}))).await;
    let config: Value = serde_json::from_str(answer["choices"][0]["message"]["content"].as_str().unwrap()).unwrap();
    assert_eq!(config, json!({"every": 2, "ending": "!", "words": ["a"]}));
    for (config, message) in [
        (json!({}), "`every` is missing"),
        (Value::Null, "`every` is missing"),
        (json!({"every": "two"}), "`every` must be an integer, got \"two\""),
        (json!({"every": 1, "ending": "?"}), "`ending` must be one of \"!\", \".\", got \"?\""),
        (json!({"every": 1, "words": [1]}), "`words[0]` must be a string, got 1"),
        (json!({"every": 1, "evry": 2}), "unknown field `evry`; known fields: every, ending, words"),
    ] {
        let (status, answer) = server.post(CHAT, &body(config)).await;
        assert_eq!((status, answer["error"]["param"].as_str()), (400, Some("mods")), "{answer}");
        assert_eq!(message_of(&answer), format!("mod 'typed_config': {message}"));
    }
    let (_, shown) = server.get("/v1/mods/typed_config").await;
    assert_eq!(shown["schema"]["properties"]["every"], json!({"type": "integer"}));
    assert_eq!(shown["schema"]["required"], json!(["every"]));
}
