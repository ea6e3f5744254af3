//! `KoboldCPP`'s API as its clients use it, for example later versions of Halo Weave.

mod bans;
mod polling;
mod retractions;

use crate::harness::{Server, SseReader, message_of, server};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::{SinkExt, StreamExt};
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;
use thunder::events::system;
use yawc::{Frame, OpCode, WebSocket};

const WAIT_TIMEOUT: Duration = Duration::from_mins(1);

/// Returns the name and the data of each event.
async fn events(server: &Server, body: &Value) -> Vec<(String, Value)> {
    // A page sends JSON as text to avoid a preflight.
    let request = server.request(Method::POST, "/api/extra/generate/stream").header("content-type", "text/plain");
    let response = request.body(body.to_string()).send().await.unwrap();
    let events = SseReader::new(response).await.rest().await.into_iter();
    events.map(|event| (event.name.clone(), event.json())).collect()
}

#[tokio::test]
async fn requests_of_halo_weave_are_answered() {
    let server = server().await;
    let (_, model) = server.get("/api/v1/model").await;
    assert_eq!((&model["result"], &model["model_name"]), (&json!("thunder/tiny"), &json!("tiny")));
    assert!(model["max_context_length"].as_u64().unwrap() > 0);
    // The dimensions and special tokens of the model, with the names of KoboldCPP's fork.
    let (_, info) = server.get("/api/v1/model/info").await;
    for (kobold_name, name) in [
        ("num_layers", "num_layers"),
        ("num_attention_heads", "num_attention_heads"),
        ("num_key_value_heads", "num_key_value_heads"),
        ("vocab_size", "vocab_size"),
        ("embedding_size", "hidden_size"),
        ("max_trained_context", "max_position_embeddings"),
        ("eos_token_id", "eos_token_id"),
    ] {
        assert!(model[kobold_name].is_u64() && model[kobold_name] == info[name], "{kobold_name}: {model} {info}");
    }
    assert!(model["bos_token_id"].is_i64() && model["eot_token_id"].is_i64(), "{model}");
    let tokens = server.answer("/api/v1/tokenize", &json!({"text": "The sky is"})).await;
    let prompt: Vec<i64> = serde_json::from_value(tokens["token_ids"].clone()).unwrap();
    let body = json!({"input_ids": prompt, "max_length": 5, "temperature": 0, "top_p": 0.9, "top_k": 40, "rep_pen": 1.1,
                      "sampler_seed": -1, "stop_sequence": [], "output_attentions": true, "request_id": null, "ignore_eos": true});
    let received = events(server, &body).await;
    assert_eq!(received.len(), 6, "{received:?}");
    for (index, (name, event)) in received[..5].iter().enumerate() {
        assert_eq!((name.as_str(), &event["type"]), ("", &json!("token")));
        assert_eq!(event["attention"]["shape"], json!([4, 4, prompt.len() + index]));
        let data = STANDARD.decode(event["attention"]["data"].as_str().unwrap()).unwrap();
        assert_eq!(data.len(), 4 * 4 * 4 * (prompt.len() + index));
    }
    assert_eq!((&received[5].1["type"], &received[5].1["finish_reason"]), (&json!("done"), &json!("length")));
    let mut aggregated = body.clone();
    aggregated["attention_format"] = json!("aggregated");
    let received = events(server, &aggregated).await;
    let attention = &received[0].1["attention"];
    assert_eq!(attention["context_length"], prompt.len());
    assert_eq!(
        STANDARD.decode(attention["data"].as_str().unwrap()).unwrap().len(),
        4 * prompt.len(),
        "one 32-bit float per token"
    );
    // The stop string is part of the stream.
    let mut stops = body.clone();
    let texts: Vec<&str> = received[..5].iter().map(|(_, event)| event["token"]["text"].as_str().unwrap()).collect();
    let (at, stop) = texts.iter().enumerate().find(|(_, text)| !text.is_empty()).unwrap();
    stops["stop_sequence"] = json!([stop]);
    let received = events(server, &stops).await;
    assert_eq!((received.len(), &received[at].1["token"]["text"]), (at + 2, &json!(stop)));
    assert_eq!(received.last().unwrap().1["finish_reason"], "stop_string");
    // An error that is known before the first token is an HTTP error.
    let (status, error) = server.post("/api/extra/generate/stream", &json!({"input_ids": [100_000]})).await;
    assert_eq!((status, message_of(&error)), (400, "Token ID 100000 not in vocabulary (vocab_size=640)"));
}

/// Sends a request on `KoboldCPP`'s WebSocket; returns its frames and the code of the close frame. Closes, like
/// clients, after `done`.
pub async fn frames(server: &Server, body: &Value) -> (Vec<Result<Value, Vec<u8>>>, Option<u16>) {
    let url = format!("{}/api/extra/generate/stream/ws", server.base.replace("http", "ws")).parse().unwrap();
    let mut socket = WebSocket::connect(url).await.unwrap();
    socket.send(Frame::text(body.to_string())).await.unwrap();
    let mut frames = Vec::new();
    loop {
        let frame = tokio::time::timeout(WAIT_TIMEOUT, socket.next()).await.expect("no message arrives");
        let Some(frame) = frame else { return (frames, None) };
        match frame.opcode() {
            OpCode::Text => {
                let message: Value = serde_json::from_str(frame.as_str()).unwrap();
                if message["type"] == "done" {
                    socket.send(Frame::close(yawc::close::CloseCode::Normal, "")).await.unwrap();
                }
                frames.push(Ok(message));
            }
            OpCode::Binary => frames.push(Err(frame.into_payload().to_vec())),
            OpCode::Close => return (frames, frame.close_code().map(u16::from)),
            _ => {}
        }
    }
}

#[tokio::test]
async fn attention_is_sent_in_separate_frames() {
    // Rounding depends on the batch, so no other run shares it, and the prompt is computed every time.
    let server = &Server::start(&["--cache-prompt=off"]);
    server.wait_ready().await;
    let tokens = server.answer("/api/v1/tokenize", &json!({"text": "The sky is"})).await;
    let prompt: Vec<i64> = serde_json::from_value(tokens["token_ids"].clone()).unwrap();
    // The client requests neither attention nor a format.
    let body = json!({"input_ids": prompt, "max_length": 4, "temperature": 0, "top_p": 0.9, "top_k": 40, "rep_pen": 1.0,
                      "sampler_seed": -1, "ignore_eos": true});
    let with_request_id = |body: &Value| {
        let mut body = body.clone();
        body["request_id"] = json!(system::new_id());
        body
    };
    for format in ["aggregated", "per_layer"] {
        let mut as_events = body.clone();
        as_events["output_attentions"] = json!(true);
        as_events["attention_format"] = json!(format);
        let received = events(server, &with_request_id(&as_events)).await;
        let request = if format == "aggregated" { &body } else { &as_events };
        let (frames, code) = frames(server, &with_request_id(request)).await;
        assert_eq!((frames.len(), code), (9, Some(1000)), "{frames:?}");
        for (pair, (_, event)) in frames[..8].chunks_exact(2).zip(&received) {
            let [Ok(token), Err(numbers)] = pair else { panic!("expected a text frame and its attention: {pair:?}") };
            assert_eq!((&token["type"], &token["token_id"]), (&json!("token"), &event["token"]["token_id"]));
            assert_eq!(token["text"], event["token"]["text"]);
            let expected = STANDARD.decode(event["attention"]["data"].as_str().unwrap()).unwrap();
            let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
            assert_eq!(numbers.len(), expected.len());
            for (a, b) in numbers.chunks_exact(4).zip(expected.chunks_exact(4)) {
                let (a, b) = (number(a), number(b));
                assert!((a - b).abs() < 1e-4, "{a} instead of {b}");
            }
        }
        let Ok(done) = &frames[8] else { panic!("{frames:?}") };
        assert_eq!(
            (&done["type"], &done["finish_reason"], &done["total_tokens"]),
            (&json!("done"), &json!("length"), &json!(4))
        );
    }
    let mut texts_only = body.clone();
    texts_only["output_attentions"] = json!(false);
    let (received, _) = frames(server, &texts_only).await;
    assert!(received.len() == 5 && received.iter().all(Result::is_ok), "{received:?}");
    let request = json!({"prompt": "The sky is", "max_length": 1, "temperature": 0, "ignore_eos": true});
    let (received, _) = frames(server, &request).await;
    assert_eq!(received.len(), 3, "{received:?}");
    let mut with_nulls = request.clone();
    with_nulls["output_attentions"] = Value::Null;
    with_nulls["attention_format"] = Value::Null;
    let (with_nulls, _) = frames(server, &with_nulls).await;
    let sizes = [received, with_nulls].map(|frames| frames[1].as_ref().err().map(Vec::len));
    assert!(sizes[0].is_some() && sizes[0] == sizes[1], "null counts as absent: {sizes:?}");
    for invalid in
        [json!({"input_ids": [100_000]}), json!({"input_ids": [4], "attention_format": "viz"}), json!({}), json!([])]
    {
        let (received, code) = frames(server, &invalid).await;
        let [Ok(error)] = &received[..] else { panic!("{invalid}: {received:?}") };
        assert_eq!((&error["type"], code), (&json!("error"), Some(1008)), "{invalid}: {error}");
        assert!(error["error"].is_string() && error["error_code"].is_string(), "{error}");
    }
}

#[tokio::test]
async fn socket_generation_ends_on_abort_and_disconnect() {
    let server = server().await;
    let url = || format!("{}/api/extra/generate/stream/ws", server.base.replace("http", "ws")).parse().unwrap();
    let key = format!("FRAMES{}", std::process::id());
    for disconnects in [false, true] {
        let id = format!("{key} {disconnects}");
        let body =
            json!({"input_ids": [40, 41, 42], "max_length": 3000, "ignore_eos": true, "genkey": key, "request_id": id});
        let mut socket = WebSocket::connect(url()).await.unwrap();
        socket.send(Frame::text(body.to_string())).await.unwrap();
        let first = tokio::time::timeout(WAIT_TIMEOUT, socket.next()).await.unwrap().unwrap();
        assert_eq!(first.opcode(), OpCode::Text);
        if disconnects {
            drop(socket);
        } else {
            assert_eq!(server.answer("/api/extra/abort", &json!({"genkey": key})).await["success"], "true");
            let done = loop {
                let frame = tokio::time::timeout(WAIT_TIMEOUT, socket.next())
                    .await
                    .unwrap()
                    .expect("the socket closes before the end");
                if frame.opcode() == OpCode::Text && frame.as_str().contains("\"done\"") {
                    break serde_json::from_str::<Value>(frame.as_str()).unwrap();
                }
            };
            assert_eq!(done["finish_reason"], "cancelled");
        }
        assert_eq!(server.finished(&id).await["run"]["status"], "cancelled");
        let check = server.answer("/api/extra/generate/check", &json!({"genkey": key})).await;
        assert_ne!(check["results"][0]["text"], "", "the text remains");
    }
}

#[tokio::test]
async fn prompt_is_completed_with_and_without_stream() {
    let server = server().await;
    // `null` counts as absent.
    let body = json!({"prompt": "The sky is", "input_ids": null, "max_length": 8, "temperature": 0, "max_context_length": 512, "rep_pen": 1.0, "n": 1,
                      "quiet": true, "bypass_eos": true, "top_k": 0, "typical": 1, "sampler_order": [6, 0, 1, 3, 4, 2, 5]});
    let answer = server.answer("/api/v1/generate", &body).await;
    let result = &answer["results"][0];
    assert_eq!((&result["finish_reason"], &result["completion_tokens"]), (&json!("length"), &json!(8)), "{answer}");
    let text = result["text"].as_str().unwrap().to_owned();
    let received = events(server, &body).await;
    assert!(received.iter().all(|(name, _)| name == "message"));
    assert_eq!(received.iter().map(|(_, event)| event["token"].as_str().unwrap()).collect::<String>(), text);
    assert_eq!(received.last().unwrap().1["finish_reason"], "length");
    assert!(received[..received.len() - 1].iter().all(|(_, event)| event["finish_reason"].is_null()));
    let stop: String = text.chars().skip(2).take(2).collect();
    let trimmed = text[..text.find(&stop).unwrap()].to_owned();
    for trim in [None, Some(true), Some(false)] {
        let mut stopped = body.clone();
        stopped["stop_sequence"] = json!([stop]);
        if let Some(trim) = trim {
            stopped["trim_stop"] = json!(trim);
        }
        let answer = server.answer("/api/v1/generate", &stopped).await;
        let output = answer["results"][0]["text"].as_str().unwrap();
        let is_expected = if trim == Some(false) { output.contains(&stop) } else { output == trimmed };
        assert!(is_expected, "{trim:?}: {output:?}");
        assert_eq!(answer["results"][0]["finish_reason"], "stop");
    }
    // The start of a prompt that is too long is removed; the field `memory` is kept.
    let long =
        json!({"prompt": "word ".repeat(20_000), "memory": "Remember.", "max_length": 2, "max_context_length": 100});
    let answer = server.answer("/api/v1/generate", &long).await;
    assert!(answer["results"][0]["prompt_tokens"].as_u64().unwrap() <= 98, "{answer}");
    // Without a maximum, the prompt leaves room for an answer.
    let unlimited =
        json!({"prompt": "word ".repeat(200), "max_length": -1, "max_context_length": 100, "bypass_eos": true});
    let answer = server.answer("/api/v1/generate", &unlimited).await;
    assert!(answer["results"][0]["completion_tokens"].as_u64().unwrap() >= 50, "{answer}");
    for max_length in [-1, 100] {
        let limited = json!({"prompt": "Hi", "max_length": max_length, "max_context_length": 32, "bypass_eos": true});
        let result = &server.answer("/api/v1/generate", &limited).await["results"][0];
        let [prompt, answer] = ["prompt_tokens", "completion_tokens"].map(|name| result[name].as_u64().unwrap());
        assert_eq!((prompt + answer, &result["finish_reason"]), (32, &json!("length")), "{result}");
    }
    for wrong in [json!({"prompt": 5}), json!({"prompt": ""}), json!({"prompt": "x", "temperature": "hot"})] {
        let (status, error) = server.post("/api/v1/generate", &wrong).await;
        assert_eq!((status, &error["detail"]["type"]), (400, &json!("bad_input")), "{wrong}: {error}");
    }
}

#[tokio::test]
async fn control_tokens_are_shown_on_request() {
    const CONTROL: &str = "<|im_start|>";
    let server = server().await;
    let tokens = server.answer("/api/extra/tokencount", &json!({"prompt": CONTROL, "special": false})).await;
    let bias = json!([[tokens["ids"][0], 1000]]);
    let body = json!({"prompt": "The sky is", "max_length": 3, "logit_bias": bias, "stop_sequence": ["start|>"]});
    for (render_special, trim_stop, text) in
        [(false, true, ""), (true, true, "<|im_"), (true, false, CONTROL), (false, false, "")]
    {
        let mut body = body.clone();
        (body["render_special"], body["trim_stop"]) = (json!(render_special), json!(trim_stop));
        let answer = server.answer("/api/v1/generate", &body).await;
        assert_eq!(answer["results"][0]["text"], text, "{body}");
        let received = events(server, &body).await;
        assert_eq!(received.iter().map(|(_, event)| event["token"].as_str().unwrap()).collect::<String>(), text);
    }
}

#[tokio::test]
async fn server_info_and_token_routes_respond() {
    let server = server().await;
    let (_, version) = server.get("/api/extra/version").await;
    assert_eq!((&version["result"], &version["protected"]), (&json!("KoboldCpp"), &json!(false)));
    for path in ["/api/v1/config/max_context_length", "/api/extra/true_max_context_length", "/api/v1/config/max_length"]
    {
        let (status, answer) = server.get(path).await;
        assert!(status == 200 && answer["value"].as_u64().unwrap() > 0, "{path}: {answer}");
    }
    assert_eq!(server.get("/api/v1/info/version").await.1["result"], "1.2.5");
    assert_eq!(server.get("/api/latest/model").await.1["result"], "thunder/tiny");
    assert!(server.get("/api/extra/perf").await.1["queue"].is_u64());
    let count = server.answer("/api/extra/tokencount", &json!({"prompt": "The sky is"})).await;
    assert_eq!(count["value"], count["ids"].as_array().unwrap().len());
    let text = server.answer("/api/extra/detokenize", &json!({"ids": count["ids"]})).await;
    assert_eq!(text, json!({"result": "The sky is", "success": true}));
    let (status, error) = server.post("/api/extra/tokencount", &json!({})).await;
    assert_eq!((status, &error["detail"]["type"]), (400, &json!("bad_input")));
    let (status, error) = server.get("/api/extra/nothing").await;
    assert_eq!((status, &error["detail"]["type"]), (404, &json!("not_found")));
}

/// Tests the CORS headers at both addresses that are hard-coded in clients.
#[tokio::test]
async fn cors_origins_are_enforced() {
    let any_port = "127.0.0.1:0";
    let server = Server::start(&["--listen", any_port, "--listen", any_port, "--cors-origin", "localhost"]);
    server.wait_ready().await;
    let http = crate::harness::http();
    let [first, second] = server.addresses().try_into().unwrap();
    for base in [first, second.replace("127.0.0.1", "localhost")] {
        let origin = "http://localhost:3000";
        let preflight =
            http.request(Method::OPTIONS, format!("{base}/api/extra/generate/stream")).header("origin", origin);
        let preflight = preflight
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "content-type");
        let answer = preflight.send().await.unwrap();
        assert_eq!(answer.headers()["access-control-allow-origin"], origin);
        assert_eq!(answer.headers()["access-control-allow-headers"], "content-type");
        // Otherwise the browser sends a preflight before each message.
        assert!(answer.headers()["access-control-max-age"].to_str().unwrap().parse::<u64>().unwrap() >= 600);
        for body in [json!({"input_ids": [40], "max_length": 1}), json!({"input_ids": [-4]})] {
            let answer = http
                .post(format!("{base}/api/extra/generate/stream"))
                .header("origin", origin)
                .json(&body)
                .send()
                .await;
            assert_eq!(answer.unwrap().headers()["access-control-allow-origin"], origin, "{body}");
        }
    }
}

/// The processes of a server's database, paused until this is dropped.
struct PausedDatabase(Vec<String>);

impl PausedDatabase {
    fn new(server: &Server) -> Self {
        let file = std::fs::read_to_string(server.data_dir.join("postgres/data/postmaster.pid")).unwrap();
        let postmaster = file.lines().next().unwrap().trim().to_owned();
        let is_child = |stat: &str| {
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.split(' ').nth(1) == Some(postmaster.as_str()))
        };
        let processes = std::fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let entry = entry.ok()?;
            let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
            is_child(&stat).then(|| entry.file_name().to_string_lossy().into_owned())
        });
        let paused = Self(processes.chain([postmaster.clone()]).collect());
        paused.send_signal("-STOP");
        paused
    }

    fn send_signal(&self, signal: &str) {
        // A process may have ended in the meantime.
        std::process::Command::new("kill").arg(signal).args(&self.0).status().unwrap();
    }
}

impl Drop for PausedDatabase {
    fn drop(&mut self) {
        self.send_signal("-CONT");
    }
}

/// Each message of a chat has a request id, which is looked up in the database.
#[tokio::test]
async fn hanging_database_delays_no_message() {
    let server = Server::start_embedded(&[]);
    server.wait_ready().await;
    let message = |name: &str| json!({"input_ids": [40, 41], "max_length": 2, "ignore_eos": true, "output_attentions": true, "request_id": name});
    assert_eq!(events(&server, &message("before")).await.len(), 3);
    let paused = PausedDatabase::new(&server);
    let chat = async {
        for number in 0..10 {
            let received = events(&server, &message(&format!("message {number}"))).await;
            assert_eq!((received.len(), &received[2].1["type"]), (3, &json!("done")), "{received:?}");
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, chat).await.expect("each message waited for the database");
    drop(paused);
}
