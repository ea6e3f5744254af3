//! Requests on the WebSocket: consecutive, concurrent, cancelled and abandoned.

use super::{
    HEADS, LAYERS, PATH, WAIT_TIMEOUT, base64_floats, connect, generate_request, next, send, tokens_of, until_done,
};
use crate::harness::{Server, folder, model, server};
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use yawc::{Frame, OpCode, Options};

/// Sends the messages that the first version of Halo Weave sends, a web page that displays attention.
#[tokio::test]
async fn requests_of_halo_weave_are_answered() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is blue, and the sea is").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let mut request = generate_request(
        &prompt,
        &json!({"attention_format": "per_layer", "banned_tokens": [1], "logprobs": true, "top_logprobs": 3}),
    );
    let mut run_ids = Vec::new();
    for _ in 0..2 {
        // The request_id can be used again, because the first request has ended.
        send(&mut socket, &request).await;
        let messages = until_done(&mut socket).await;
        assert_eq!(messages.len(), 5, "{messages:?}");
        let mut text = String::new();
        for (index, (message, _)) in messages[..4].iter().enumerate() {
            assert_eq!((&message["type"], &message["request_id"]), (&json!("token"), &request["request_id"]));
            let (token, attention) = (&message["token"], &message["attention"]);
            text.push_str(token["text"].as_str().unwrap());
            let top = token["top_logprobs"].as_array().unwrap();
            assert_eq!((top.len(), &top[0]["token_id"]), (3, &token["token_id"]), "at temperature 0");
            assert!((top[0]["logprob"].as_f64().unwrap() - token["logprob"].as_f64().unwrap()).abs() < 1e-3);
            let length = prompt.len() + index;
            assert_eq!(attention["shape"], json!([LAYERS, HEADS, length]));
            assert_eq!(attention["context_length"], length);
            assert_eq!((&attention["encoding"], &attention["dtype"]), (&json!("base64"), &json!("float32")));
            let values = base64_floats(attention);
            assert_eq!(values.len(), LAYERS * HEADS * length);
            for row in values.chunks_exact(length) {
                assert!(
                    (row.iter().sum::<f32>() - 1.0).abs() < 1e-3 && row.iter().all(|value| (0.0..=1.0).contains(value))
                );
            }
        }
        let done = &messages[4].0;
        assert_eq!((&done["finish_reason"], &done["total_tokens"]), (&json!("length"), &json!(4)));
        assert!(done["generation_time_ms"].is_u64());
        run_ids.push(done["run_id"].as_str().unwrap().to_owned());
        // The next request omits two tokens, so the tokens after them have new positions.
        request["input_ids"].as_array_mut().unwrap().drain(2..4);
        request["input_ids"].as_array_mut().unwrap().extend([json!(40), json!(41)]);
    }
    for run_id in &run_ids {
        assert_eq!(server.finished(run_id).await["run"]["run_id"], *run_id);
    }
    assert_ne!(run_ids[0], run_ids[1]);
    socket.send(Frame::close(yawc::close::CloseCode::Normal, "")).await.unwrap();
    let frame = tokio::time::timeout(WAIT_TIMEOUT, socket.next()).await.unwrap();
    assert!(frame.is_none_or(|frame| frame.opcode() == OpCode::Close), "the server must answer the close frame");
}

#[tokio::test]
async fn token_has_probability_unless_disabled() {
    let server = server().await;
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &generate_request(&[40, 41], &json!({"return_attention": false}))).await;
    let token = until_done(&mut socket).await.remove(0).0["token"].clone();
    assert!(token["logprob"].as_f64().unwrap() <= 0.0, "{token}");
    assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2, "{token}");
    // The default may be sent, too.
    send(&mut socket, &generate_request(&[40, 41], &json!({"return_attention": false, "logprobs": true}))).await;
    let token = until_done(&mut socket).await.remove(0).0["token"].clone();
    assert_eq!(token["top_logprobs"].as_array().map(Vec::len), Some(2), "{token}");
    send(&mut socket, &generate_request(&[40, 41], &json!({"logprobs": false}))).await;
    let token = until_done(&mut socket).await.remove(0).0["token"].clone();
    assert!(token.get("logprob").is_none() && token.get("top_logprobs").is_none(), "{token}");
}

#[tokio::test]
async fn request_receives_errors_in_its_message_format() {
    let server = server().await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let mut error_of = async |fields: Value| {
        send(&mut socket, &generate_request(&[40], &fields)).await;
        let frame = tokio::time::timeout(WAIT_TIMEOUT, socket.next()).await.unwrap().unwrap();
        let is_binary = frame.opcode() == OpCode::Binary;
        let payload = frame.into_payload();
        let error: Value = if is_binary {
            rmp_serde::from_slice(&payload).unwrap()
        } else {
            serde_json::from_slice(&payload).unwrap()
        };
        assert_eq!(error["type"], "error", "{error}");
        (is_binary, error["field"].clone())
    };
    // Before the request is registered, and after.
    for (field, value) in [("request_id", json!("")), ("temperature", json!("hot"))] {
        assert_eq!(error_of(json!({"message_format": "msgpack", field: value})).await, (true, json!(field)));
        assert_eq!(error_of(json!({"message_format": "json", field: value})).await, (false, json!(field)));
    }
    for invalid in [json!("xml"), json!(1)] {
        assert_eq!(error_of(json!({"message_format": invalid})).await, (false, json!("message_format")));
    }
}

#[tokio::test]
async fn samples_differ_and_are_numbered() {
    let server = server().await;
    let prompt = tokens_of(server, "Once upon a time").await;
    let fields = json!({"num_samples": 3, "temperature": 1.5, "seed": 7, "max_new_tokens": 12, "request_id": null});
    let answer = server.answer("/api/v1/generate", &generate_request(&prompt, &fields)).await;
    let samples = answer["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 3);
    assert!(samples.iter().all(|sample| sample["attention_data"].as_array().unwrap().len() == 12));
    assert_ne!(samples[0]["generated_tokens"], samples[1]["generated_tokens"]);
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &generate_request(&prompt, &fields)).await;
    let mut done = std::collections::BTreeSet::new();
    let mut texts = vec![String::new(); 3];
    while done.len() < 3 {
        let (message, _) = next(&mut socket).await;
        let sample = message["sample"].as_u64().unwrap() as usize;
        match message["type"].as_str().unwrap() {
            "done" => assert!(done.insert(sample)),
            _ => texts[sample].push_str(message["token"]["text"].as_str().unwrap()),
        }
    }
    assert!(texts.iter().all(|text| !text.is_empty()));
}

#[tokio::test]
async fn only_the_first_sample_waits_for_the_requested_slot() {
    let server = server().await;
    let endless = json!({"id_slot": 0, "max_new_tokens": 1_000_000, "context_policy": "shift", "ignore_eos": true,
                         "return_attention": false});
    let mut holder = connect(server, PATH, Options::default()).await;
    send(&mut holder, &generate_request(&[40, 41, 42], &endless)).await;
    next(&mut holder).await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let fields = json!({"id_slot": 0, "num_samples": 2, "max_new_tokens": 1, "ignore_eos": true});
    send(&mut socket, &generate_request(&[40, 41], &fields)).await;
    let messages = until_done(&mut socket).await;
    assert!(messages.iter().all(|(message, _)| message["sample"] == 1), "{messages:?}");
}

#[tokio::test]
async fn requests_share_a_socket_and_one_can_be_cancelled() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    send(&mut socket, &generate_request(&prompt, &json!({"request_id": "endless", "max_new_tokens": 3000}))).await;
    assert_eq!(next(&mut socket).await.0["request_id"], "endless");
    // The server answers other requests while this one is active.
    assert_eq!(server.get("/api/v1/model/info").await.0, 200);
    tokens_of(server, "quick").await;
    send(&mut socket, &generate_request(&prompt, &json!({"request_id": "short", "return_attention": false}))).await;
    send(&mut socket, &generate_request(&prompt, &json!({"request_id": "endless"}))).await;
    send(&mut socket, &json!({"type": "ping"})).await;
    let (mut short, mut duplicate_rejected, mut pong) = (false, false, false);
    while !(short && duplicate_rejected && pong) {
        let (message, _) = next(&mut socket).await;
        short |= message["type"] == "done" && message["request_id"] == "short";
        pong |= message["type"] == "pong";
        duplicate_rejected |= message["error_code"] == "DUPLICATE_REQUEST_ID";
    }
    send(&mut socket, &json!({"type": "cancel", "request_id": "endless"})).await;
    let end = loop {
        let (message, _) = next(&mut socket).await;
        if message["type"] == "done" {
            break message;
        }
    };
    assert_eq!((&end["request_id"], &end["finish_reason"]), (&json!("endless"), &json!("cancelled")));
    assert_eq!(end["prompt_tokens"], prompt.len());
    send(&mut socket, &json!({"type": "cancel", "request_id": "endless"})).await;
    assert_eq!(next(&mut socket).await.0["error_code"], "NOT_FOUND");
}

#[tokio::test]
async fn request_can_be_cancelled_while_its_model_loads() {
    let models = folder();
    std::fs::copy(model(), models.join("other.gguf")).unwrap();
    // The load waits until no run uses the first model, which would be unloaded for it.
    let flags = ["--models-dir", models.to_str().unwrap(), "--models-max", "1", "--shutdown-grace", "600"];
    let server = Server::start(&flags);
    server.wait_ready().await;
    let mut first = connect(&server, PATH, Options::default()).await;
    let endless = json!({"max_new_tokens": 3500, "context_policy": "shift", "ignore_eos": true});
    send(&mut first, &generate_request(&[40, 41, 42], &endless)).await;
    next(&mut first).await;
    let mut socket = connect(&server, PATH, Options::default()).await;
    let fields = json!({"model": "other", "request_id": "waits", "num_samples": 2});
    send(&mut socket, &generate_request(&[40, 41, 42], &fields)).await;
    send(&mut socket, &json!({"type": "cancel", "request_id": "waits"})).await;
    for sample in 0..2 {
        let (done, _) = next(&mut socket).await;
        assert_eq!((&done["type"], &done["finish_reason"]), (&json!("done"), &json!("cancelled")), "{done}");
        assert_eq!((&done["sample"], &done["total_tokens"]), (&json!(sample), &json!(0)));
        assert_eq!(done["prompt_tokens"], 3);
    }
    send(&mut socket, &json!({"type": "cancel", "request_id": "waits"})).await;
    assert_eq!(next(&mut socket).await.0["error_code"], "NOT_FOUND");
    server.stop("KILL").await;
}

#[tokio::test]
async fn closed_connection_ends_run() {
    let server = server().await;
    let prompt = tokens_of(server, "The sky is").await;
    let mut socket = connect(server, PATH, Options::default()).await;
    let id = format!("left-{}", std::process::id());
    send(&mut socket, &generate_request(&prompt, &json!({"request_id": id, "max_new_tokens": 3500}))).await;
    next(&mut socket).await;
    drop(socket);
    let run = server.finished(&id).await;
    assert_eq!((&run["run"]["status"], &run["run"]["surface"]), (&json!("cancelled"), &json!("attention")), "{run}");
}
