//! The native routes on the real server: runs that the engine made and runs that were ingested.

mod attention;
mod hidden_states;
mod lens;

use super::harness::{Server, SseReader, model, server, with_fields};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use thunder::trace::columns;
use thunder::trace::document::item_from_json;
use thunder::trace::fold::Fold;

const SAMPLE: &str = include_str!("../../../fixtures/sample_payload.json");

/// Ingests the example of the specification with this id; returns the shared server.
async fn ingest(request_id: &str) -> &'static Server {
    let server = server().await;
    let body = SAMPLE.replace("req_abc123", request_id);
    assert_eq!(server.request(Method::POST, "/ingest").body(body).send().await.unwrap().status(), 201);
    server
}

/// Generates a run and returns it when it has ended.
async fn generate(server: &Server, fields: Value) -> Value {
    let body =
        json!({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "seed": 3, "ignore_eos": true});
    let answer = server.answer("/v1/chat/completions", &with_fields(body, &fields)).await;
    server.finished(answer["thunder"]["run_id"].as_str().unwrap()).await
}

/// Starts a streamed generation; returns its run id and the stream.
async fn start_stream(server: &Server, body: &Value) -> (String, impl Stream<Item = reqwest::Result<Bytes>> + Unpin) {
    let response = server.request(Method::POST, "/v1/completions").json(body).send().await.unwrap();
    let run_id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    (run_id, Box::pin(response.bytes_stream()))
}

async fn get(server: &Server, path: &str, headers: &[(&str, &str)]) -> Response {
    let request = server.request(Method::GET, path);
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).send().await.unwrap()
}

/// Returns the server-sent events as (name, id, data), up to the end of the stream.
async fn events(response: Response) -> Vec<(String, String, Value)> {
    let events = SseReader::new(response).await.rest().await.into_iter();
    events.map(|event| (event.name.clone(), event.id.clone(), event.json())).collect()
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test]
async fn list_is_paged() {
    for id in ["page-1", "page-2", "page-3"] {
        ingest(id).await;
    }
    let server = server().await;
    let mut seen = Vec::new();
    let mut next = "?q=request%3Apage&limit=2".to_owned();
    loop {
        let (status, page) = server.get(&format!("/api/v1/runs{next}")).await;
        assert_eq!(status, 200, "{page}");
        seen.extend(page["runs"].as_array().unwrap().iter().map(|run| run["request_id"].as_str().unwrap().to_owned()));
        match page["meta"]["next"].as_str() {
            Some(more) => more.clone_into(&mut next),
            None => break,
        }
    }
    assert_eq!(seen, ["page-3", "page-2", "page-1"]);
}

#[tokio::test]
async fn invalid_query_error_names_the_field() {
    let server = ingest("queries").await;
    let mut problems = Vec::new();
    for path in [
        "/api/v1/runs?modle=x",
        "/api/v1/runs?limit=0",
        "/api/v1/runs?before=yesterday",
        "/api/v1/runs?q=modle:x",
        "/api/v1/runs/nobody",
        "/api/v1/runs/nobody/columns",
        "/api/v1/runs/queries/events?from=5&to=2",
        "/api/v1/runs/queries/events?from=a",
        "/api/v1/runs/queries/attention",
        "/api/v1/runs/queries/attention?at=1",
        "/api/v1/runs/queries/attention?at=1&view=median",
        "/api/v1/runs/queries/attention?from=0&bins=0",
    ] {
        let (status, problem) = server.get(path).await;
        let suggestion = problem["did_you_mean"].as_str().map(|name| format!(" [{name}]")).unwrap_or_default();
        problems.push(format!("{path}: {status} {}{suggestion}", problem["detail"].as_str().unwrap()));
    }
    insta::assert_snapshot!(problems.join("\n"), @r#"
    /api/v1/runs?modle=x: 400 unknown field `modle`; known fields: q, before, limit
    /api/v1/runs?limit=0: 400 `limit` must be an integer between 1 and 500, got 0
    /api/v1/runs?before=yesterday: 400 `before` must be a UUID, got "yesterday"
    /api/v1/runs?q=modle:x: 400 'modle' is not a field; the fields are model, mod, status, surface, error, request, user, session, tag, feedback, note, metadata, parent, experiment, seed, tokens, backtracks, forced, actions, after, before. Put the term in quotation marks to search for it as text (at character 1 of the filter) [model]
    /api/v1/runs/nobody: 404 no run 'nobody' exists
    /api/v1/runs/nobody/columns: 404 no run 'nobody' exists
    /api/v1/runs/queries/events?from=5&to=2: 400 `from` and `to` must satisfy 0 <= from <= to, got 5 and 2
    /api/v1/runs/queries/events?from=a: 400 `from` must be an integer, got "a"
    /api/v1/runs/queries/attention: 400 send either `at` (an event), or `from` and `to` (a range of events)
    /api/v1/runs/queries/attention?at=1: 404 no attention was recorded at event 1 of this run
    /api/v1/runs/queries/attention?at=1&view=median: 400 `view` must be "mean", "max", "last", "weighted_layers", "layer" or "head", got "median"
    /api/v1/runs/queries/attention?from=0&bins=0: 400 `bins` must be an integer between 1 and 4096, got 0
    "#);
    for (query, pointer) in [("limit=-1", "limit"), ("modle=x", "modle"), ("before=yesterday", "before")] {
        let (_, problem) = server.get(&format!("/api/v1/runs?{query}")).await;
        assert_eq!(problem["pointer"], pointer, "{problem}");
    }
}

#[tokio::test]
async fn items_are_lines_in_order() {
    let server = ingest("lines").await;
    let response = get(server, "/api/v1/runs/lines/events", &[]).await;
    assert_eq!(response.headers()["content-type"], "application/x-ndjson");
    let text = response.text().await.unwrap();
    insta::assert_snapshot!(text, @r#"
    {"kind":"event","event_type":"Prefilled","step":0,"sequence_order":0,"prompt_length":150,"tokens_so_far_len":0,"max_steps":500}
    {"kind":"mod_call","index":0,"event_sequence_order":0,"mod_name":"sample_mod","event_type":"Prefilled","step":0,"execution_time_ms":2.5,"exception_occurred":false}
    {"kind":"mod_log","index":0,"mod_call_sequence":0,"mod_name":"sample_mod","log_message":"Prefill event processed successfully","log_level":"INFO"}
    {"kind":"action","index":0,"mod_call_sequence":0,"action_type":"Noop","action_order":0}
    {"kind":"event","event_type":"ForwardPass","step":1,"sequence_order":1,"input_text":"Once upon a time","top_tokens":[         {"token": 1234, "prob": 0.85},         {"token": 5678, "prob": 0.10}       ]}
    {"kind":"mod_call","index":1,"event_sequence_order":1,"mod_name":"sample_mod","event_type":"ForwardPass","step":1,"execution_time_ms":1.2,"exception_occurred":false}
    {"kind":"mod_log","index":1,"mod_call_sequence":1,"mod_name":"sample_mod","log_message":"Forward pass complete, top token prob: 0.85","log_level":"DEBUG"}
    {"kind":"action","index":1,"mod_call_sequence":1,"action_type":"AdjustedLogits","action_order":0,"logits_shape":"[1, 32000]","temperature":0.8}
    {"kind":"event","event_type":"Sampled","step":1,"sequence_order":2,"sampled_token":1234,"token_text":" there"}
    {"kind":"event","event_type":"Added","step":1,"sequence_order":3,"added_tokens":[1234],"added_token_count":1,"forced":false}
    "#);
    let part = get(server, "/api/v1/runs/lines/events?from=1&to=2", &[]).await.text().await.unwrap();
    let expected: Vec<&str> = text.lines().skip(4).take(4).collect();
    assert_eq!(part.lines().collect::<Vec<_>>(), expected, "items of a part have the same numbers as in the whole run");
}

#[tokio::test]
async fn finished_run_can_be_streamed_and_resumed() {
    let server = ingest("stream").await;
    let accept = ("accept", "text/event-stream");
    let all = events(get(server, "/api/v1/runs/stream/events", &[accept]).await).await;
    let text = get(server, "/api/v1/runs/stream/events", &[]).await.text().await.unwrap();
    let (end, items) = all.split_last().unwrap();
    assert_eq!(items.iter().map(|(_, _, data)| data.clone()).collect::<Vec<_>>(), lines(&text));
    assert_eq!((end.0.as_str(), end.2["request_id"].as_str()), ("end", Some("stream")));
    let resumed = events(get(server, "/api/v1/runs/stream/events", &[accept, ("last-event-id", "1")]).await).await;
    assert_eq!(resumed, all[4..], "the items of the last event are repeated");
    let response = get(server, "/api/v1/runs/stream/events", &[accept, ("last-event-id", "x")]).await;
    assert_eq!(response.status(), 400);
}

/// A client that follows a run receives every item once, in order, equal to the stored items.
#[tokio::test]
async fn active_run_is_followed_live() {
    let server = server().await;
    let mut changes = SseReader::get(server, "/api/v1/runs/live").await;
    let body = json!({"prompt": "Hello", "max_tokens": 150, "ignore_eos": true, "stream": true,
                      "mods": [{"name": "force-prefix", "config": {"text": "one two three"}}]});
    let (run_id, mut output) = start_stream(server, &body).await;
    let path = format!("/api/v1/runs/{run_id}/events");
    let (followed, ()) =
        tokio::join!(async { events(get(server, &path, &[("accept", "text/event-stream")]).await).await }, async {
            while output.next().await.is_some() {}
        });
    let run = server.finished(&run_id).await;
    let (end, items) = followed.split_last().unwrap();
    assert_eq!((end.0.as_str(), &end.2["status"]), ("end", &run["run"]["status"]));
    let stored = lines(&get(server, &path, &[]).await.text().await.unwrap());
    assert_eq!(items.len(), stored.len());
    for ((_, id, item), stored) in items.iter().zip(&stored) {
        assert_eq!(
            (&item["kind"], &item["index"], &item["sequence_order"]),
            (&stored["kind"], &stored["index"], &stored["sequence_order"])
        );
        assert!(!id.is_empty());
    }
    assert!(stored.iter().any(|item| item["kind"] == "action"));
    assert_eq!(changes.next().await.unwrap().name, "change");
}

#[tokio::test]
async fn columns_are_the_fold_of_the_items() {
    let server = server().await;
    let run = generate(server, json!({"mods": [{"name": "force-prefix", "config": {"text": "one two"}}]})).await;
    let path = format!("/api/v1/runs/{}", run["run"]["run_id"].as_str().unwrap());
    let response = get(server, &format!("{path}/columns"), &[]).await;
    assert_eq!(response.headers()["content-type"], "application/octet-stream");
    assert_eq!(response.headers()["cache-control"], "private, no-cache");
    let etag = response.headers()["etag"].to_str().unwrap().to_owned();
    let bytes = response.bytes().await.unwrap();
    let text = get(server, &format!("{path}/events"), &[]).await.text().await.unwrap();
    let mut fold = Fold::new();
    text.lines().for_each(|line| fold.apply(&item_from_json(line.as_bytes()).unwrap()));
    assert_eq!(bytes, columns::encode(&fold));
    assert!(fold.counters().forced > 0 && fold.counters().tokens_out > 0);

    for known in [etag.clone(), format!("W/{etag}"), format!("\"x\", {etag}"), "*".into()] {
        let response = get(server, &format!("{path}/columns"), &[("if-none-match", &known)]).await;
        assert_eq!((response.status().as_u16(), response.headers()["etag"].to_str().unwrap()), (304, etag.as_str()));
    }
    let response = get(server, &format!("{path}/columns"), &[("if-none-match", "\"x\"")]).await;
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn alternatives_of_generated_and_ingested_runs_are_listed() {
    let server = ingest("alternatives").await;
    let (status, foreign) = server.get("/api/v1/runs/alternatives/alternatives").await;
    assert_eq!(status, 200);
    insta::assert_json_snapshot!(foreign, @r#"
    {
      "alternatives": [
        {
          "sequence_order": 1,
          "step": 1,
          "position": null,
          "chosen": 1234,
          "model": [
            {
              "token": 1234,
              "prob": 0.85
            },
            {
              "token": 5678,
              "prob": 0.1
            }
          ],
          "lens": null,
          "after_mods": [],
          "after_sampler": [],
          "stages": [],
          "drafted": null
        }
      ]
    }
    "#);
    let run = generate(server, json!({})).await;
    let id = run["run"]["run_id"].as_str().unwrap();
    let (_, listed) = server.get(&format!("/api/v1/runs/{id}/alternatives?from=0&to=5")).await;
    let steps = listed["alternatives"].as_array().unwrap();
    assert_eq!(steps.len(), 2);
    for step in steps {
        assert!(step["position"].is_u64() && step["chosen"].is_i64(), "{step}");
        assert!(
            !step["model"].as_array().unwrap().is_empty() && !step["stages"].as_array().unwrap().is_empty(),
            "{step}"
        );
    }
}

#[tokio::test]
async fn recorded_run_keeps_the_request_fields_that_shape_its_answer() {
    let server = server().await;
    let fields = json!({
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
        "tool_choice": "none",
        "logit_bias": {"5": -3, "6": 2.5},
    });
    let body = json!({
        "messages": [{"role": "user", "content": "Hello"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "max_tokens": 2,
    });
    let body = with_fields(body, &fields);
    let answer = server.answer("/v1/chat/completions", &body).await;
    let id = answer["thunder"]["run_id"].as_str().unwrap();
    server.finished(id).await;
    let (_, prefilled) = server.get(&format!("/api/v1/runs/{id}/events?from=0&to=1")).await;
    let prompt = &prefilled["details"]["prompt"];
    assert_eq!((&prompt["parameters"]["request"], &prompt["tools"]), (&fields, &body["tools"]), "{prefilled}");
}

#[tokio::test]
async fn run_is_removed_once() {
    let server = ingest("removed").await;
    let delete = async || server.request(Method::DELETE, "/api/v1/runs/removed").send().await.unwrap().status();
    assert_eq!(delete().await, 204);
    assert_eq!(delete().await, 404);
    assert_eq!(server.get("/api/v1/runs/removed").await.0, 404);
    assert_eq!(ingest("removed").await.get("/api/v1/runs/removed").await.0, 200, "its id can be used again");
}

#[tokio::test]
async fn active_run_cannot_be_removed() {
    let server = server().await;
    let body = json!({"prompt": "Hello", "max_tokens": 4000, "ignore_eos": true, "stream": true});
    let (run_id, _output) = start_stream(server, &body).await;
    let path = format!("/api/v1/runs/{run_id}");
    // The run is in the database after the first flush of the recorder, long before its end.
    let status = loop {
        match server.request(Method::DELETE, &path).send().await.unwrap().status().as_u16() {
            404 => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
            status => break status,
        }
    };
    assert_eq!(status, 409);
}

#[tokio::test]
async fn mods_are_listed() {
    let (status, list) = server().await.get("/api/v1/mods").await;
    assert_eq!(status, 200);
    let mods = list["mods"].as_array().unwrap();
    assert!(mods.iter().any(|description| description["name"] == "force-prefix"), "{list}");
    for description in mods {
        assert!(description["description"].as_str().is_some_and(|text| !text.is_empty()), "{description}");
    }
}

/// The token that ended a run is in its trace, but neither counted nor part of the text.
#[tokio::test]
async fn exported_and_ingested_run_has_same_counts() {
    let server = server().await;
    let loaded =
        thunder::model::Model::load(&model(), &thunder::model::llama::ModelOptions::default(), |_| true).unwrap();
    let end = loaded.vocabulary().end_of_generation()[0].to_string();
    let forced = json!([{"name": "force-prefix", "config": {"text": "Hello there"}}]);
    let ended = json!({"prompt": "Once", "max_tokens": 64, "seed": 1, "mods": forced, "logit_bias": {end: 100.0}});
    let stopped = json!({"prompt": "Once", "max_tokens": 64, "seed": 1, "mods": forced, "stop": ["the"]});
    let cut = json!({"prompt": "Once", "max_tokens": 9, "seed": 1, "ignore_eos": true});
    for (name, body) in [("ended", ended), ("stopped", stopped), ("cut", cut)] {
        let answer = server.answer("/v1/completions", &body).await;
        let id = answer["thunder"]["run_id"].as_str().unwrap().to_owned();
        let original = server.finished(&id).await;
        let mut document = original.clone();
        document.as_object_mut().unwrap().remove("run");
        document["request"]["request_id"] = json!(format!("{id}-again"));
        assert_eq!(server.post("/ingest", &document).await.0, 201);
        let (_, copy) = server.get(&format!("/api/v1/runs/{id}-again")).await;
        for field in ["completion_tokens", "prompt_tokens", "events", "forced", "surprise_strip"] {
            assert_eq!(original["run"][field], copy["run"][field], "{name}: {field}");
        }
        assert_eq!(original["run"]["output_preview"], answer["choices"][0]["text"], "{name}");
        assert_eq!(original["run"]["output_preview"], copy["run"]["output_preview"], "{name}");
        assert!(original["run"].get("notes").is_none(), "{name}: only ingested runs have notes");
        assert_eq!(original["run"]["completion_tokens"], answer["usage"]["completion_tokens"], "{name}");
    }
}
