//! Mods in OpenAI's requests and answers.

use super::{CHAT, chat, chunks, forced_start};
use crate::harness::redaction::redact_text;
use crate::harness::{ErrorTable, recorded_items, server};
use serde_json::{Value, json};
use thunder::trace::fold::{Fold, NEVER};

#[tokio::test]
async fn mod_is_selected_by_field_or_model_name() {
    let server = server().await;
    let answer = server.answer(CHAT, &chat(json!({"mods": forced_start("The baker sells bread.")}))).await;
    assert!(answer["choices"][0]["message"]["content"].as_str().unwrap().starts_with("The baker sells bread."));
    let named = server.answer(CHAT, &chat(json!({"model": "tiny/log-top"}))).await;
    let run = server.finished(named["thunder"]["run_id"].as_str().unwrap()).await;
    assert_eq!(run["run"]["mods"], json!(["log-top"]));
}

#[tokio::test]
async fn unknown_mod_error_lists_known_mods() {
    let server = server().await;
    for (fields, param) in [
        (json!({"mods": ["nope"]}), "mods"),
        (json!({"model": "tiny/nope"}), "model"),
        (json!({"mods": [{"name": "nope"}]}), "mods"),
    ] {
        let (status, answer) = server.post(CHAT, &chat(fields)).await;
        let error = &answer["error"];
        assert_eq!((status, error["param"].as_str(), error["code"].as_str()), (400, Some(param), Some("unknown_mod")));
        let message = redact_text(error["message"].as_str().unwrap());
        assert!(message.ends_with("unknown mod 'nope'; known mods: [mods]"), "{message}");
    }
    let (status, answer) =
        server.post(CHAT, &chat(json!({"mods": [{"name": "force-prefix", "config": {"txt": "a"}}]}))).await;
    assert_eq!((status, answer["error"]["param"].as_str()), (400, Some("mods")), "{answer}");
}

#[tokio::test]
async fn invalid_mod_requests_are_rejected() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for mods in
        [json!([{"name": "force-prefix", "conf": {"text": "a"}}]), json!(vec!["log-top"; 65]), json!([{"config": {}}])]
    {
        let answer = server.post(CHAT, &chat(json!({"mods": mods}))).await;
        assert_eq!(answer.1["error"]["param"], "mods", "{}", answer.1);
        errors.add(mods, &answer);
    }
    insta::assert_snapshot!("mods_errors", errors);
}

#[tokio::test]
async fn mod_can_reject_run() {
    let server = server().await;
    for stream in [false, true] {
        let response = server
            .request(reqwest::Method::POST, CHAT)
            .json(&chat(json!({"mods": ["refuse"], "stream": stream})))
            .send()
            .await
            .unwrap();
        assert_eq!(response.status().as_u16(), 422);
        let run_id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
        let error: Value = response.json().await.unwrap();
        assert_eq!(error["error"]["message"], "not today");
        assert_eq!(server.finished(&run_id).await["run"]["status"], "failed");
    }
    let body = chat(json!({"mods": ["refuse_late"], "stream": true, "max_tokens": 30, "ignore_eos": true}));
    let events = server.stream(CHAT, &body).await;
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["message"], "enough");
    assert!(events.len() > 2, "the error must follow some text");
}

#[tokio::test]
async fn mod_can_end_run_with_tool_calls() {
    let server = server().await;
    let body = chat(json!({"mods": ["call_tool"]}));
    let answer = server.answer(CHAT, &body).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("get_weather")));
    let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Oakford"}));

    let mut streamed = body;
    streamed["stream"] = true.into();
    let chunks = chunks(&server.stream(CHAT, &streamed).await);
    let deltas: Vec<&Value> =
        chunks.iter().map(|c| &c["choices"][0]["delta"]["tool_calls"][0]).filter(|d| !d.is_null()).collect();
    assert_eq!(deltas[0]["function"]["name"], "get_weather");
    assert!(deltas[0]["id"].is_string() && deltas[1].get("id").is_none());
    let arguments: String = deltas.iter().filter_map(|delta| delta["function"]["arguments"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), json!({"city": "Oakford"}));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn completion_has_tool_calls_of_mod() {
    let server = server().await;
    for (path, pointer) in
        [("/v1/completions", "/choices/0/thunder/tool_calls"), ("/completion", "/thunder/tool_calls")]
    {
        let mut body = json!({"prompt": "Once", "max_tokens": 6, "ignore_eos": true, "mods": ["call_tool_late"]});
        let whole = server.answer(path, &body).await;
        body["stream"] = true.into();
        let events = server.stream(path, &body).await;
        let last = events.iter().rfind(|event| *event != "[DONE]").unwrap();
        for answer in [whole, serde_json::from_str(last).unwrap()] {
            let calls = answer.pointer(pointer).unwrap_or(&Value::Null);
            assert_eq!(calls[0]["function"]["name"], "find", "{path}: {answer}");
        }
        body["mods"] = json!([]);
        body["stream"] = false.into();
        assert_eq!(server.answer(path, &body).await.pointer(pointer), None, "{path}");
    }
}

/// The replay of a run, and of its copy, has the answer that the client received.
#[tokio::test]
async fn discarded_text_is_recorded_as_removed() {
    let server = server().await;
    for (path, name) in [
        ("/v1/completions", "discard_from_third"),
        ("/v1/completions", "call_tool_late"),
        ("/v1/completions", "fail_late"),
        (CHAT, "call_tool_late"),
    ] {
        let mut body = chat(json!({"prompt": "Once", "max_tokens": 6, "ignore_eos": true, "mods": [name]}));
        body.as_object_mut().unwrap().remove(if path == CHAT { "prompt" } else { "messages" });
        // The tokens of a failed run are only in the stream.
        let mut text = String::new();
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        let mut run_id = Value::Null;
        for event in server.stream(path, &streamed).await.iter().filter(|event| *event != "[DONE]") {
            let chunk: Value = serde_json::from_str(event).unwrap();
            if run_id.is_null() {
                run_id = chunk["thunder"]["run_id"].clone();
            }
            let retracted = chunk.pointer("/thunder/retract/chars").and_then(Value::as_u64).unwrap_or(0);
            text = text.chars().take(text.chars().count() - retracted as usize).collect();
            let choice = &chunk["choices"][0];
            text += choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str()).unwrap_or_default();
        }
        if name != "fail_late" {
            body["logprobs"] = if path == CHAT { true.into() } else { 1.into() };
            let answer = server.answer(path, &body).await;
            let choice = &answer["choices"][0];
            let whole = choice["text"].as_str().or_else(|| choice["message"]["content"].as_str()).unwrap_or_default();
            assert_eq!(whole, text, "{name}");
            let logprobs = &choice["logprobs"];
            let tokens: String = if path == CHAT {
                logprobs["content"].as_array().into_iter().flatten().filter_map(|it| it["token"].as_str()).collect()
            } else {
                logprobs["tokens"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
            };
            assert_eq!(tokens, text, "{name}: {logprobs}");
        }
        let run_id = run_id.as_str().unwrap();
        let mut document = server.finished(run_id).await;
        let copy_id = format!("copy-of-{run_id}");
        document["request"]["request_id"] = json!(copy_id);
        assert_eq!(server.post("/ingest", &document).await.0, 201);
        for id in [run_id, &copy_id] {
            let mut fold = Fold::new();
            recorded_items(server, id).await.iter().for_each(|item| fold.apply(item));
            assert_eq!(fold.answer_text(), text, "{name}: {id}");
            assert!(fold.rows().iter().any(|row| row.removed_at != NEVER), "{name}: the replay lacks removed tokens");
            assert_eq!(server.finished(id).await["run"]["output_preview"], text, "{name}: {id}");
        }
    }
}

#[tokio::test]
async fn held_back_text_is_not_sent_before_error_of_mod() {
    let server = server().await;
    for stream in [false, true] {
        let body = chat(json!({"mods": ["block"], "stream": stream, "max_tokens": 30, "ignore_eos": true}));
        let (status, answer) = server.post(CHAT, &body).await;
        assert_eq!((status, &answer["error"]["message"]), (422, &json!("blocked by policy")), "{answer}");
    }
}

#[tokio::test]
async fn message_with_tool_calls_replaces_held_back_text() {
    let server = server().await;
    let mut body = chat(json!({"mods": ["convert_call"], "max_tokens": 30, "ignore_eos": true}));
    let answer = server.answer(CHAT, &body).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!((&message["content"], message["tool_calls"].as_array().unwrap().len()), (&Value::Null, 1));
    assert_eq!(message["tool_calls"][0]["function"]["name"], "find");

    body["stream"] = true.into();
    let chunks = chunks(&server.stream(CHAT, &body).await);
    for chunk in &chunks {
        let content = chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        assert!(content.is_empty() && chunk.pointer("/thunder/retract").is_none(), "{chunk}");
    }
    let names: Vec<&str> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"][0]["function"]["name"].as_str())
        .collect();
    assert_eq!(names, ["find"]);
}

#[tokio::test]
async fn backtracked_text_is_retracted_from_stream() {
    let server = server().await;
    let body = chat(json!({"mods": ["replace_start"], "max_tokens": 16, "ignore_eos": true}));
    let whole = server.answer(CHAT, &body).await["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(whole.starts_with("Instead"), "{whole}");
    let mut streamed = body;
    streamed["stream"] = true.into();
    let mut text = String::new();
    for chunk in chunks(&server.stream(CHAT, &streamed).await) {
        if let Some(chars) = chunk.pointer("/thunder/retract/chars").and_then(Value::as_u64) {
            assert_eq!(chunk["choices"][0]["delta"]["content"], "");
            for _ in 0..chars {
                text.pop().unwrap();
            }
        }
        text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(text, whole);
}
