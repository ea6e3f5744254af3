//! `POST /ingest`: accepted and rejected documents, and their storage.

use super::harness::{Server, message_of, server, with_fields};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use std::io::Write;
use std::process::{Command, Stdio};

const SAMPLE: &[u8] = include_bytes!("../../fixtures/sample_payload.json");

/// Returns the example of the specification with another id.
fn sample(request_id: &str) -> Value {
    let mut payload: Value = serde_json::from_slice(SAMPLE).unwrap();
    payload["request"]["request_id"] = json!(request_id);
    payload
}

async fn post(server: &Server, body: Vec<u8>, headers: &[(&str, &str)]) -> Response {
    let request = server.request(Method::POST, "/ingest").body(body);
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).send().await.unwrap()
}

/// Posts a document and returns the problem of the response, without its request id.
async fn problem(body: &str) -> Value {
    let response = post(server().await, body.into(), &[]).await;
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let mut problem: Value = response.json().await.unwrap();
    assert!(problem.as_object_mut().unwrap().remove("request_id").is_some());
    problem
}

#[tokio::test]
async fn sample_payload_returns_201_without_body() {
    let server = server().await;
    for path in ["/ingest", "/v1/ingest"] {
        let request = server.request(Method::POST, path).header("content-type", "application/json").body(SAMPLE);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 201);
        assert_eq!(response.bytes().await.unwrap().len(), 0);
    }
    let (status, run) = server.get("/api/v1/runs/req_abc123").await;
    assert_eq!(status, 200);
    let mut summary = run["run"].clone();
    (summary["run_id"], summary["version"]) = (json!("[id]"), json!("[version]"));
    insta::assert_json_snapshot!(summary, @r#"
    {
      "run_id": "[id]",
      "request_id": "req_abc123",
      "created_at": "2025-12-01T18:30:00Z",
      "completed_at": "2025-12-01T18:30:05Z",
      "status": "done",
      "finish_reason": null,
      "message": null,
      "surface": "ingest",
      "model": "gemini-2.0-flash",
      "user_label": "user_789",
      "mods": [
        "sample_mod"
      ],
      "max_tokens": 1000,
      "temperature": 0.7,
      "seed": null,
      "prompt_preview": "Once upon a time",
      "output_preview": " there",
      "prompt_tokens": 150,
      "completion_tokens": 1,
      "cached_tokens": 0,
      "events": 4,
      "backtracked": 0,
      "forced": 0,
      "actions": 1,
      "errors": 0,
      "first_token_us": null,
      "prompt_us": null,
      "generation_us": null,
      "has_attention": false,
      "surprise_strip": [
        5
      ],
      "mod_text": "sample_mod.py",
      "version": "[version]"
    }
    "#);
    let mut document: Value = serde_json::from_slice(SAMPLE).unwrap();
    let mut stored = run.as_object().unwrap().clone();
    stored.remove("run");
    // A number keeps its value; its spelling is kept only inside of raw fields.
    document["events"][1]["top_tokens"][1]["prob"] = stored["events"][1]["top_tokens"][1]["prob"].clone();
    assert_eq!(Value::Object(stored), document);
}

#[tokio::test]
async fn floats_keep_their_last_digit() {
    let server = server().await;
    let mut payload = sample("last-digits");
    payload["request"]["temperature"] = json!(123_456_789.123_456_79);
    payload["mod_calls"][0]["execution_time_ms"] = json!(94.527_069_555_392_23);
    assert_eq!(server.post("/ingest", &payload).await.0, 201);
    let (_, run) = server.get("/api/v1/runs/last-digits").await;
    assert_eq!(run["request"]["temperature"], payload["request"]["temperature"]);
    assert_eq!(run["mod_calls"][0]["execution_time_ms"], payload["mod_calls"][0]["execution_time_ms"]);
}

#[tokio::test]
async fn repeated_document_returns_201_and_different_one_conflicts() {
    let server = server().await;
    let payload = sample("again");
    for body in [payload.to_string(), serde_json::to_string_pretty(&payload).unwrap(), payload.to_string()] {
        let response = post(server, body.into(), &[]).await;
        assert_eq!((response.status().as_u16(), response.content_length()), (201, Some(0)));
    }
    let mut other = payload.clone();
    other["events"][2]["token_text"] = json!(" here");
    insta::assert_json_snapshot!(problem(&other.to_string()).await, @r#"
    {
      "type": "/problems/conflict",
      "title": "Conflict",
      "status": 409,
      "detail": "request_id 'again' belongs to another run with different content",
      "pointer": "$.request.request_id"
    }
    "#);
    let (_, run) = server.get("/api/v1/runs/again").await;
    assert_eq!(run["events"][2]["token_text"], " there");
}

#[tokio::test]
async fn ingested_export_of_a_run_differs_only_in_its_ids() {
    let server = server().await;
    let request = |fields: &Value| {
        let body = json!({
            "prompt": "A run that is exported", "seed": 7, "max_tokens": 8, "ignore_eos": true, "session_id": "exported",
            "metadata": {"project": "copies"}
        });
        with_fields(body, fields)
    };
    let done = server.answer("/v1/completions", &request(&json!({}))).await["thunder"]["run_id"].clone();
    let body = request(&json!({"stream": true, "max_tokens": 4000}));
    let mut response = server.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let cancelled = json!(response.headers()["x-thunder-run-id"].to_str().unwrap());
    response.chunk().await.unwrap().unwrap();
    drop(response);
    for (id, status, finish_reason) in [(done, "done", "length"), (cancelled, "cancelled", "cancelled")] {
        let mut original = server.finished(id.as_str().unwrap()).await;
        let copy_id = format!("copy-of-{status}");
        original["request"]["request_id"] = json!(copy_id);
        assert_eq!(server.post("/ingest", &original).await.0, 201);
        let (_, mut copy) = server.get(&format!("/api/v1/runs/{copy_id}")).await;
        let run = &copy["run"];
        assert_eq!(
            (&run["status"], &run["finish_reason"], &run["seed"]),
            (&json!(status), &json!(finish_reason), &json!(7))
        );
        assert_eq!(run["metadata"], json!({"project": "copies", "session_id": "exported"}));
        assert!(run["generation_us"].as_i64().unwrap() > 0, "{run}");
        for run in [&mut original["run"], &mut copy["run"]] {
            for name in ["run_id", "request_id", "surface", "version", "mod_text"] {
                run[name].take();
            }
        }
        assert_eq!(copy, original);
        assert_eq!(server.post("/ingest", &copy).await.0, 201, "the export of a copy is the same document");
    }
    let (_, found) = server.get("/api/v1/runs?q=session:exported%20request:copy-of").await;
    assert_eq!(found["runs"].as_array().unwrap().len(), 2, "{found}");
}

#[tokio::test]
async fn concurrent_ingests_with_one_id_create_one_run() {
    let server = server().await;
    let posts = (0..8).map(|i| {
        let mut payload = sample("race");
        payload["request"]["model"] = json!(format!("model-{}", i % 2));
        async move { post(server, payload.to_string().into(), &[]).await.status().as_u16() }
    });
    let mut statuses = futures::future::join_all(posts).await;
    statuses.sort_unstable();
    assert_eq!(statuses, [201, 201, 201, 201, 409, 409, 409, 409]);
}

#[tokio::test]
async fn invalid_document_error_has_json_path() {
    let mut payload = sample("wrong");
    payload["events"][2]["sampled_token"] = json!("1234");
    insta::assert_json_snapshot!(problem(&payload.to_string()).await, @r#"
    {
      "type": "/problems/bad-request",
      "title": "Bad Request",
      "status": 400,
      "detail": "expected an integer from -2147483648 to 2147483647, got \"1234\"",
      "pointer": "$.events[2].sampled_token"
    }
    "#);
    let mut payload = sample("wrong");
    payload["mod_calls"][1]["event_sequence_order"] = json!(9);
    insta::assert_json_snapshot!(problem(&payload.to_string()).await, @r#"
    {
      "type": "/problems/bad-request",
      "title": "Bad Request",
      "status": 400,
      "detail": "expected the `sequence_order` of one of the events, 0 to 3, got 9",
      "pointer": "$.mod_calls[1].event_sequence_order"
    }
    "#);
    insta::assert_json_snapshot!(problem("{\"request\": ").await, @r#"
    {
      "type": "/problems/bad-request",
      "title": "Bad Request",
      "status": 400,
      "detail": "expected valid JSON, got a syntax error: EOF while parsing a value at line 1 column 12",
      "pointer": "$"
    }
    "#);
    insta::assert_json_snapshot!(problem("").await, @r#"
    {
      "type": "/problems/bad-request",
      "title": "Bad Request",
      "status": 400,
      "detail": "expected valid JSON, got a syntax error: EOF while parsing a value at line 1 column 0",
      "pointer": "$"
    }
    "#);
    let (status, _) = server().await.get("/api/v1/runs/wrong").await;
    assert_eq!(status, 404, "no row of an invalid document is stored");
}

#[tokio::test]
async fn request_id_that_would_not_lead_to_the_run_is_rejected() {
    let server = server().await;
    insta::assert_json_snapshot!(problem(&sample("live").to_string()).await, @r#"
    {
      "type": "/problems/bad-request",
      "title": "Bad Request",
      "status": 400,
      "detail": "expected another id, because the API has a route of this name, got \"live\"",
      "pointer": "$.request.request_id"
    }
    "#);
    let (status, error) = server.post("/v1/completions", &json!({"prompt": "a", "request_id": "tags"})).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("request_id")), "{error}");
    assert_eq!(post(server, sample("first").to_string().into(), &[]).await.status(), 201);
    let (_, first) = server.get("/api/v1/runs/first").await;
    let run_id = first["run"]["run_id"].as_str().unwrap();
    assert_eq!(post(server, sample(run_id).to_string().into(), &[]).await.status(), 409);
    let (_, found) = server.get(&format!("/api/v1/runs/{run_id}")).await;
    assert_eq!(found["run"]["request_id"], "first");
}

#[tokio::test]
async fn integers_with_a_fraction_of_zero_are_accepted() {
    let server = server().await;
    let mut payload = sample("floats");
    payload["events"][1]["step"] = json!(1.0);
    payload["events"][2]["sampled_token"] = json!(1234.0);
    payload["events"][3]["added_tokens"] = json!([1234.0]);
    let response = post(server, payload.to_string().into(), &[]).await;
    assert_eq!(response.status(), 201, "{}", response.text().await.unwrap());
    let (_, run) = server.get("/api/v1/runs/floats").await;
    assert_eq!((&run["events"][1]["step"], &run["events"][3]["added_tokens"]), (&json!(1), &json!([1234])));
    // The numbers are the same, so that the document is the same.
    assert_eq!(post(server, sample("floats").to_string().into(), &[]).await.status(), 201);
    payload["events"][1]["step"] = json!(1.5);
    assert_eq!(post(server, payload.to_string().into(), &[]).await.status(), 400);
}

#[tokio::test]
async fn actions_of_a_call_apply_in_their_order() {
    let server = server().await;
    let action = |kind: &str, order: u32| json!({"mod_call_sequence": 0, "action_type": kind, "action_order": order, "backtrack_steps": 1});
    let document = json!({
        "request": {"request_id": "ordered"},
        "events": [
            {"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 2},
            {"event_type": "Added", "step": 1, "sequence_order": 1, "added_tokens": [5, 6], "added_token_count": 2}],
        "mod_calls": [{"event_sequence_order": 1, "mod_name": "m", "event_type": "Added", "step": 1}],
        "actions": [action("ForceOutput", 1), action("Backtrack", 0)]});
    assert_eq!(post(server, document.to_string().into(), &[]).await.status(), 201);
    let (_, run) = server.get("/api/v1/runs/ordered").await;
    assert_eq!(run["run"]["backtracked"], 1, "ForceOutput leaves no token to remove: {}", run["run"]);
    assert_eq!(run["actions"][0]["action_type"], "ForceOutput", "the document keeps its order");
    let items = server.request(Method::GET, "/api/v1/runs/ordered/events").send().await.unwrap().text().await.unwrap();
    let items: Vec<Value> = items.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let types: Vec<&str> = items.iter().filter_map(|item| item["action_type"].as_str()).collect();
    assert_eq!(types, ["Backtrack", "ForceOutput"]);
}

#[tokio::test]
async fn compressed_bodies_of_any_type_are_accepted() {
    let server = server().await;
    let zstd = |id: &str| zstd::encode_all(sample(id).to_string().as_bytes(), 1).unwrap();
    let response = post(server, zstd("zstd"), &[("content-encoding", "zstd"), ("content-type", "text/plain")]).await;
    assert_eq!(response.status(), 201);
    let response = post(server, gzip(sample("gzip").to_string().as_bytes()), &[("content-encoding", "gzip")]).await;
    assert_eq!(response.status(), 201);
    let response = post(server, sample("gz").to_string().into(), &[("content-encoding", "gzip")]).await;
    assert_eq!(response.status(), 400);
    let problem: Value = response.json().await.unwrap();
    assert_eq!(
        message_of(&problem),
        "reading the body failed: Invalid gzip header; check that it is compressed as stated in Content-Encoding"
    );
}

/// Uses the system's program, so that Thunder's dependencies are not tested against themselves.
fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut child = Command::new("gzip").arg("-c").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    child.wait_with_output().unwrap().stdout
}

#[tokio::test]
async fn too_large_document_is_rejected_even_if_compressed() {
    let server = server().await;
    let mut body = sample("large").to_string().into_bytes();
    body.resize(65 * 1024 * 1024, b' ');
    let bomb = zstd::encode_all(body.as_slice(), 1).unwrap();
    assert!(bomb.len() < 100_000);
    for (body, headers) in [(bomb, &[("content-encoding", "zstd")][..]), (body, &[])] {
        let response = post(server, body, headers).await;
        assert_eq!(response.status(), 413);
        let problem: Value = response.json().await.unwrap();
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            detail.starts_with("a document may have at most 64 MiB after decompression; `thunder ingest`"),
            "{detail}"
        );
    }
}

#[tokio::test]
async fn large_document_can_be_replayed() {
    let server = server().await;
    let events: Vec<Value> = (0..9000)
        .map(|order| match order % 3 {
            0 => json!({"event_type": "ForwardPass", "step": order / 3, "sequence_order": order, "input_text": "x".repeat(70),
                        "top_tokens": [{"token": 1, "prob": 0.5}, {"token": 2, "prob": 0.25}]}),
            1 => json!({"event_type": "Sampled", "step": order / 3, "sequence_order": order, "sampled_token": 1, "token_text": " a"}),
            _ => json!({"event_type": "Added", "step": order / 3, "sequence_order": order, "added_tokens": [1], "added_token_count": 1}),
        })
        .collect();
    let payload = json!({"request": {"request_id": "long"}, "events": events});
    assert_eq!(post(server, payload.to_string().into(), &[]).await.status(), 201);
    let (_, run) = server.get("/api/v1/runs?q=request:long").await;
    assert_eq!(run["runs"][0]["completion_tokens"], 3000);
    let text = server.request(Method::GET, "/api/v1/runs/long/events").send().await.unwrap().text().await.unwrap();
    assert_eq!(text.lines().count(), 9000, "the events span several pages");
}

/// A small trace of another engine can declare more tokens and log lines than fit into memory.
#[tokio::test]
async fn small_document_cannot_fill_the_memory() {
    let server = server().await;
    let prefilled = json!({"event_type": "Prefilled", "step": 0, "sequence_order": 0, "details":
        {"evicted": {"ranges": [[0, u32::MAX], [0, u32::MAX]], "messages": []}}});
    let call =
        |name: String| json!({"event_sequence_order": 0, "mod_name": name, "event_type": "Prefilled", "step": 0});
    let log = json!({"mod_call_sequence": 0, "mod_name": "m", "log_message": "x"});
    let documents = [
        json!({"request": {"request_id": "names"}, "events": [prefilled],
            "mod_calls": [call("m".repeat(50_000))], "mod_logs": vec![log; 2000]}),
        json!({"request": {"request_id": "texts"}, "events": [
            {"event_type": "Sampled", "step": 0, "sequence_order": 0, "sampled_token": 1, "token_text": "t".repeat(50_000)},
            {"event_type": "Added", "step": 0, "sequence_order": 1, "added_token_count": 60_000}]}),
        json!({"request": {"request_id": "mods"}, "events": [prefilled],
            "mod_calls": (0..500).map(|number| call(format!("m{number}"))).collect::<Vec<_>>()}),
    ];
    for document in &documents {
        let response = post(server, document.to_string().into_bytes(), &[]).await;
        assert_eq!(response.status(), 201, "{}", document["request"]);
        let id = document["request"]["request_id"].as_str().unwrap();
        let columns = server.request(Method::GET, &format!("/api/v1/runs/{id}/columns")).send().await.unwrap();
        let size = columns.bytes().await.unwrap().len();
        assert!((100..4_000_000).contains(&size), "{id}: {size}");
    }
    let (_, run) = server.get("/api/v1/runs/mods").await;
    assert_eq!(run["run"]["mods"].as_array().unwrap().len(), 64);
    assert_eq!(run["mod_calls"].as_array().unwrap().len(), 500);
}

#[tokio::test]
async fn example_of_api_document_is_accepted() {
    let server = server().await;
    let (_, api) = server.get("/api/v1/openapi.json").await;
    let example = &api["paths"]["/ingest"]["post"]["requestBody"]["content"]["application/json"]["example"];
    let response = post(server, example.to_string().into_bytes(), &[]).await;
    assert_eq!(response.status(), 201, "{example}");
    let (_, run) = server.get(&format!("/api/v1/runs/{}", example["request"]["request_id"].as_str().unwrap())).await;
    assert_eq!(run["run"]["completion_tokens"], 1);
    for section in ["events", "mod_calls", "mod_logs", "actions"] {
        let (given, stored) = (example[section].as_array().unwrap(), run[section].as_array().unwrap());
        assert!(!given.is_empty() && given.len() == stored.len(), "{section}");
    }
}
