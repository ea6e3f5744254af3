//! Traces of Quote. They nest the fields of actions in `details`, and have the prompts and the final text.

use super::harness::{Server, server};
use reqwest::Method;
use serde_json::{Value, json};

/// Returns traces that Quote recorded, with every kind of action.
fn traces() -> Vec<Value> {
    serde_json::from_slice(include_bytes!("../../fixtures/quote_traces.json")).unwrap()
}

fn trace(request_id: &str) -> Value {
    traces().into_iter().find(|trace| trace["request"]["request_id"] == request_id).unwrap()
}

async fn page(server: &Server, path: &str) -> String {
    let response = server.request(Method::GET, path).header("accept", "text/html").send().await.unwrap();
    assert_eq!(response.status(), 200, "{path}");
    response.text().await.unwrap()
}

#[tokio::test]
async fn replay_of_quote_traces_ends_with_their_final_text() {
    let server = server().await;
    for trace in traces() {
        assert_eq!(server.post("/ingest", &trace).await.0, 201);
        let request = &trace["request"];
        let id = request["request_id"].as_str().unwrap();
        let (status, run) = server.get(&format!("/api/v1/runs/{}", id.replace(' ', "%20"))).await;
        assert_eq!(status, 200, "{id}");
        assert_eq!(run["run"]["notes"], Value::Null, "{id}");
        assert_eq!(run["run"]["output_preview"], request["final_text"], "{id}");
        let mut stored = run["request"].clone();
        assert!(stored.as_object_mut().unwrap().remove("created_at").is_some());
        assert_eq!(&stored, request, "{id}");
    }
}

#[tokio::test]
async fn quote_request_fields_are_shown() {
    let server = server().await;
    let mut trace = trace("quote Backtrack at Added");
    trace["request"]["request_id"] = json!("quote-shown");
    trace["request"]["user_prompt"] = json!("Where do foxes run?");
    assert_eq!(server.post("/ingest", &trace).await.0, 201);
    let (_, run) = server.get("/api/v1/runs/quote-shown").await;
    assert_eq!(run["run"]["prompt_preview"], "Where do foxes run?");
    assert_eq!(run["actions"][0]["backtrack_steps"], 3);
    let html = page(server, "/runs/quote-shown").await;
    assert!(html.contains("<h1 title=\"Where do foxes run?\">"), "{html}");
    for shown in ["Be brief.", "The[B]x ra", "&quot;generated_tokens&quot;", "Request as the engine reported it"] {
        assert!(html.contains(shown) || html.contains(&shown.replace("&quot;", "&#34;")), "{shown}: {html}");
    }
    assert!(!html.contains("Replayed from the events"), "{html}");
    let text = page(server, "/runs/quote-shown?view=text").await;
    assert!(text.contains("<pre class=\"prose\">The[B]x ra</pre>"), "{text}");
    assert!(text.contains("rewrite: Backtrack 3"), "{text}");
    let (_, found) = server.get("/api/v1/runs?q=foxes%20request:quote-shown").await;
    assert_eq!(found["runs"][0]["request_id"], "quote-shown", "the prompt can be searched");
}

#[tokio::test]
async fn differing_final_text_is_noted_and_shown() {
    let server = server().await;
    let mut trace = trace("quote ForceTokens at Added");
    trace["request"]["request_id"] = json!("quote-differs");
    trace["request"]["final_text"] = json!("Another <text>.");
    assert_eq!(server.post("/ingest", &trace).await.0, 201);
    let (_, run) = server.get("/api/v1/runs/quote-differs").await;
    let note = run["run"]["notes"][0].as_str().unwrap();
    assert!(note.contains("final_text"), "{note}");
    assert_eq!(run["run"]["output_preview"], "Another <text>.", "the text that the client received");
    let html = page(server, "/runs/quote-differs").await;
    assert!(html.contains("Replayed from the events") && html.contains("The fo[F]an."), "{html}");
    assert!(html.contains("Reported by the engine") && !html.contains("Another <text>."), "{html}");
}

#[tokio::test]
async fn actions_with_specified_fields_do_not_have_the_form_of_quote() {
    let server = server().await;
    let document = json!({
        "request": {"request_id": "quote-names"},
        "events": [{"event_type": "Added", "step": 1, "sequence_order": 0, "added_tokens": [5], "added_token_count": 1}],
        "mod_calls": [{"event_sequence_order": 0, "mod_name": "m", "event_type": "Added", "step": 1}],
        "actions": [{"mod_call_sequence": 0, "action_type": "Backtrack", "action_order": 0, "backtrack_steps": 1,
                     "details": {"backtrack_steps": 1}}]});
    assert_eq!(server.post("/ingest", &document).await.0, 201);
    let (_, run) = server.get("/api/v1/runs/quote-names").await;
    assert_eq!((&run["run"]["backtracked"], &run["actions"]), (&json!(1), &document["actions"]));
    assert_eq!(server.post("/ingest", &run).await.0, 201, "the export is the same document");
    let mut quote = trace("quote Backtrack at Added");
    quote["request"]["request_id"] = json!("quote-page");
    assert_eq!(server.post("/ingest", &quote).await.0, 201);
    // The exported page replays the events itself.
    for (id, is_specified) in [("quote-names", true), ("quote-page", false)] {
        let html = page(server, &format!("/runs/{id}/export.html")).await;
        assert_eq!(html.contains("data-items data-specified-actions>"), is_specified, "{id}");
    }
}

#[tokio::test]
async fn nul_characters_are_replaced_and_noted() {
    let server = server().await;
    let mut trace = trace("quote end of generation");
    trace["request"]["request_id"] = json!("quote-nul");
    trace["request"]["mod_text"] = json!("a\0b");
    trace["events"][1]["details"] = json!({"raw": "\0"});
    assert_eq!(server.post("/ingest", &trace).await.0, 201);
    assert_eq!(server.post("/ingest", &trace).await.0, 201, "the same document again");
    let (_, run) = server.get("/api/v1/runs/quote-nul").await;
    assert_eq!(run["request"]["mod_text"], "a\u{fffd}b");
    assert_eq!(run["events"][1]["details"]["raw"], "\u{fffd}");
    let note = run["run"]["notes"][0].as_str().unwrap();
    assert!(note.starts_with("2 NUL characters"), "{note}");
    assert!(page(server, "/runs/quote-nul").await.contains(note));
}

/// The document is one that `thunder run` sends for a mod in a file.
#[tokio::test]
async fn run_sent_by_cli_has_message_as_title_and_cli_surface() {
    let server = server().await;
    let document = json!({
        "request": {"request_id": "quote-cli", "model": "demo", "mod_text": "stamp", "user_prompt": "Hello!"},
        "events": [{"event_type": "Prefilled", "step": 0, "sequence_order": 0, "input_text": "<|im_start|>user\nHello!"}],
        "mod_calls": [{"event_sequence_order": 0, "mod_name": "stamp", "event_type": "Prefilled", "step": 0}],
    });
    let request = server.request(Method::POST, "/ingest").header("x-thunder-surface", "cli");
    assert_eq!(request.body(document.to_string()).send().await.unwrap().status(), 201);
    let (_, run) = server.get("/api/v1/runs/quote-cli").await;
    let run = &run["run"];
    assert_eq!((&run["surface"], &run["prompt_preview"]), (&json!("cli"), &json!("Hello!")));
    assert_eq!(run["mods"], json!(["stamp"]));
}
