//! Slot actions over HTTP: fields of responses, snapshots as bytes and as base64, files, errors.

use crate::harness::{ErrorTable, Server, folder, message_of, server, with_fields};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

const OCTETS: &str = "application/octet-stream";

pub fn completion_request(prompt: &str, slot: u32, n_predict: u32) -> Value {
    json!({"prompt": prompt, "id_slot": slot, "n_predict": n_predict, "temperature": 0, "ignore_eos": true, "return_tokens": true})
}

/// Sends a slot action.
async fn act(server: &Server, slot: u32, action: &str, body: &Value) -> (u16, Value) {
    server.post(&format!("/slots/{slot}?action={action}"), body).await
}

/// Sends a slot action that must succeed.
async fn act_ok(server: &Server, slot: u32, action: &str, body: &Value) -> Value {
    let (status, answer) = act(server, slot, action, body).await;
    assert_eq!(status, 200, "{action}: {answer}");
    answer
}

pub fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[tokio::test]
async fn state_is_saved_and_restored_into_another_slot() {
    let server = Server::start(&["-np", "2"]);
    server.wait_ready().await;
    let prompt = "The quick brown fox jumps over the lazy dog, and then it sleeps.";
    let first = server.answer("/completion", &completion_request(prompt, 0, 8)).await;
    assert_eq!(first["id_slot"], 0);
    let saved = act_ok(&server, 0, "save-state", &json!({})).await;
    assert_eq!(keys(&saved), ["id_slot", "n_tokens", "n_bytes", "t_ms", "state"]);
    let snapshot = STANDARD.decode(saved["state"].as_str().unwrap()).unwrap();
    assert_eq!((snapshot.len() as u64, &snapshot[..4]), (saved["n_bytes"].as_u64().unwrap(), &b"SES1"[..]));
    let count = u32::from_le_bytes(snapshot[4..8].try_into().unwrap());
    assert_eq!(u64::from(count), saved["n_tokens"].as_u64().unwrap());
    let tokens = act_ok(&server, 0, "tokens", &json!({})).await;
    assert_eq!(keys(&tokens), ["id_slot", "n_tokens", "tokens", "n_prompt_tokens_processed"]);
    let listed: Vec<i32> = serde_json::from_value(tokens["tokens"].clone()).unwrap();
    let in_state: Vec<i32> = snapshot[8..8 + 4 * count as usize]
        .chunks_exact(4)
        .map(|b| i32::from_le_bytes(b.try_into().unwrap()))
        .collect();
    assert_eq!((listed.len() as u32, &listed), (count, &in_state));
    // The `Accept` header requests a binary snapshot; `Content-Type` announces one.
    let path = "/slots/0?action=save-state";
    let response = server.request(Method::POST, path).header("accept", OCTETS).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], OCTETS);
    assert_eq!(response.bytes().await.unwrap(), snapshot);
    let longer = format!("{prompt}{}", first["content"].as_str().unwrap());
    let expected = server.answer("/completion", &completion_request(&longer, 0, 12)).await;
    server.answer("/completion", &completion_request("Something else entirely, to fill this slot.", 0, 4)).await;
    let path = "/slots/1?action=restore-state";
    let mut restored = Value::Null;
    for content_type in [None, Some("text/plain"), Some(OCTETS)] {
        let request = server.request(Method::POST, path).body(snapshot.clone());
        let request = content_type.into_iter().fold(request, |request, value| request.header("content-type", value));
        let binary = request.send().await.unwrap();
        assert_eq!(binary.status(), StatusCode::OK, "{content_type:?}");
        restored = binary.json().await.unwrap();
    }
    assert_eq!(keys(&restored), ["id_slot", "n_bytes_read", "success", "t_ms"]);
    assert_eq!((&restored["id_slot"], &restored["success"]), (&json!(1), &json!(true)));
    assert_eq!(restored["n_bytes_read"].as_u64().unwrap() as usize, snapshot.len());
    let again = server.answer("/completion", &completion_request(&longer, 1, 12)).await;
    assert_eq!((&again["tokens"], &again["content"]), (&expected["tokens"], &expected["content"]));
    assert!(again["timings"]["cache_n"].as_u64().unwrap() >= u64::from(count) - 3, "{}", again["timings"]);
    let json = act_ok(&server, 0, "restore-state", &json!({"state": saved["state"]})).await;
    assert_eq!(json["id_slot"], 0);
    let again = server.answer("/completion", &completion_request(&longer, 0, 12)).await;
    assert_eq!(again["tokens"], expected["tokens"]);
}

#[tokio::test]
async fn incompatible_state_is_rejected_with_reason() {
    let server = Server::start(&["-np", "2"]);
    server.wait_ready().await;
    server.answer("/completion", &completion_request("One prompt, of some length.", 0, 4)).await;
    let saved = act_ok(&server, 0, "save-state", &json!({})).await;
    let snapshot = STANDARD.decode(saved["state"].as_str().unwrap()).unwrap();
    let before = act_ok(&server, 0, "tokens", &json!({})).await;
    let send = async |snapshot: Vec<u8>| {
        let state = STANDARD.encode(snapshot);
        act(&server, 0, "restore-state", &json!({ "state": state })).await
    };
    let mut damaged = snapshot.clone();
    *damaged.last_mut().unwrap() ^= 1;
    let mut errors = ErrorTable::default();
    errors.add("an empty state", &send(Vec::new()).await);
    errors.add("the first half of a state", &send(snapshot[..snapshot.len() / 2].to_vec()).await);
    errors.add("a state and another byte", &send([snapshot.as_slice(), &[0]].concat()).await);
    errors.add("a state with a changed byte", &send(damaged).await);
    for body in [json!({}), json!({"state": 5}), json!({"state": "no base64!"})] {
        errors.add(format!("restore-state {body}"), &act(&server, 0, "restore-state", &body).await);
    }
    for content_type in ["text/plain", OCTETS] {
        let request =
            server.request(Method::POST, "/slots/0?action=restore-state").header("content-type", content_type);
        let response = request.send().await.unwrap();
        let answer = (response.status().as_u16(), response.json().await.unwrap());
        errors.add(format!("an empty body of type {content_type}"), &answer);
    }
    for path in ["/slots/2?action=save-state", "/slots/x?action=save-state", "/slots/0?action=explode", "/slots/0"] {
        errors.add(path, &server.post(path, &json!({})).await);
    }
    insta::assert_snapshot!("state_errors", errors);
    let after = act_ok(&server, 0, "tokens", &json!({})).await;
    assert_eq!(after["tokens"], before["tokens"]);
    let too_large = vec![b'x'; 8 << 20];
    let path = "/slots/0?action=restore-state";
    let large = server.request(Method::POST, path).header("content-type", OCTETS).body(too_large).send().await;
    let large = large.unwrap();
    assert_eq!(large.status(), StatusCode::BAD_REQUEST);
    let error: Value = large.json().await.unwrap();
    let expected = "the snapshot is too large: snapshots of this server's slots have at most ";
    assert!(message_of(&error).starts_with(expected), "{error}");
    // The command `base64` writes lines of 76 characters.
    let text = STANDARD.encode(&snapshot);
    let lines: Vec<&str> = text.as_bytes().chunks(76).map(|line| std::str::from_utf8(line).unwrap()).collect();
    assert_eq!(act(&server, 0, "restore-state", &json!({ "state": lines.join("\n") })).await.0, 200);
    assert_eq!(send(snapshot).await.0, 200);
}

#[tokio::test]
async fn context_shift_removes_tokens_from_middle() {
    let server = Server::start(&["-np", "1"]);
    server.wait_ready().await;
    let text = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen.";
    server.answer("/completion", &completion_request(text, 0, 1)).await;
    let before = act_ok(&server, 0, "tokens", &json!({})).await;
    let mut tokens: Vec<i32> = serde_json::from_value(before["tokens"].clone()).unwrap();
    let len = tokens.len();
    assert_eq!(before["n_prompt_tokens_processed"], before["n_tokens"]);
    let shift = async |body: Value| act(&server, 0, "context-shift", &body).await;
    let mut errors = ErrorTable::default();
    for body in [
        json!({"n_discard": 1}),
        json!({"n_keep": -1, "n_discard": 1}),
        json!({"n_keep": 1, "n_discard": 0}),
        json!({"n_keep": 2, "n_discard": len}),
    ] {
        errors.add(&body, &shift(body.clone()).await);
    }
    insta::assert_snapshot!("context_shift_errors", errors);
    let answer = act_ok(&server, 0, "context-shift", &json!({"n_keep": 4, "n_discard": 6})).await;
    assert_eq!(answer, json!({"success": true, "new_n_tokens": len - 6}));
    tokens.drain(4..10);
    let after = act_ok(&server, 0, "tokens", &json!({})).await;
    assert_eq!((&after["tokens"], &after["n_prompt_tokens_processed"]), (&json!(tokens), &json!(tokens.len())));
    // The remaining tokens are cached for the next request.
    let mut prompt = tokens.clone();
    prompt.push(60);
    let body = json!({"prompt": prompt, "id_slot": 0, "n_predict": 3, "ignore_eos": true});
    let answer = server.answer("/completion", &body).await;
    assert_eq!(answer["timings"]["cache_n"], json!(tokens.len()));
    let discard = act_ok(&server, 0, "tokens", &json!({})).await["n_tokens"].clone();
    act_ok(&server, 0, "context-shift", &json!({"n_keep": 0, "n_discard": discard})).await;
    let empty = act_ok(&server, 0, "tokens", &json!({})).await;
    assert_eq!((&empty["n_tokens"], &empty["n_prompt_tokens_processed"]), (&json!(0), &json!(0)));
}

#[tokio::test]
async fn reported_cached_tokens_are_those_of_slot() {
    let server = Server::start(&["-np", "1"]);
    server.wait_ready().await;
    let end = server.answer("/tokenize", &json!({"content": "<|im_end|>"})).await["tokens"][0].clone();
    let forced = json!([{"name": "force-prefix", "config": {"text": "One, two, three, four"}}]);
    for (path, fields) in [
        ("/completion", json!({})),
        ("/completion", json!({"mods": forced})),
        ("/completion", json!({"logit_bias": [[end, 1e9]]})),
        ("/v1/completions", json!({"mods": forced})),
        ("/v1/completions", json!({"logit_bias": {"<|im_end|>": 100}})),
        ("/v1/chat/completions", json!({"mods": forced})),
    ] {
        let mut body = with_fields(json!({"prompt": "Once upon", "n_predict": 4, "verbose": true}), &fields);
        if path.contains("chat") {
            body["messages"] = json!([{"role": "user", "content": "Hello!"}]);
        }
        let answer = server.answer(path, &body).await;
        let details = if path == "/completion" { &answer } else { &answer["__verbose"] };
        let slot = act_ok(&server, 0, "tokens", &json!({})).await;
        assert_eq!(details["tokens_cached"], slot["n_tokens"], "{path} {fields}: {answer}");
    }
}

#[tokio::test]
async fn messages_end_at_end_of_turn_tokens() {
    let server = Server::start(&["-np", "1"]);
    server.wait_ready().await;
    let (_, empty) = server.get("/v1/slots/0/info").await;
    assert_eq!((&empty["n_tokens"], &empty["messages"]), (&json!(0), &json!([])));
    let body = json!({"max_tokens": 3, "id_slot": 0, "ignore_eos": true, "messages": [
        {"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "How are you?"}]});
    server.answer("/v1/chat/completions", &body).await;
    let (status, info) = server.get("/v1/slots/0/info").await;
    assert_eq!(status, 200, "{info}");
    assert_eq!(keys(&info), ["n_tokens", "boundary_eot", "n_messages", "messages"]);
    let tokens: Vec<i64> =
        serde_json::from_value(act_ok(&server, 0, "tokens", &json!({})).await["tokens"].clone()).unwrap();
    let eot = info["boundary_eot"].as_i64().unwrap();
    let list = info["messages"].as_array().unwrap();
    assert_eq!((list.len(), &info["n_messages"]), (5, &json!(5)));
    assert_eq!(info["n_tokens"], json!(tokens.len()));
    let mut next = 0;
    for (index, message) in list.iter().enumerate() {
        let end = message["end"].as_u64().unwrap() as usize;
        assert_eq!((&message["index"], &message["start"]), (&json!(index), &json!(next)));
        assert_eq!(tokens[end] == eot, index < 4);
        next = end + 1;
    }
    assert_eq!(next, tokens.len());
    let (status, error) = server.get("/v1/slots/9/info").await;
    assert_eq!((status, message_of(&error)), (400, "slot 9 does not exist; slots must be from 0 to 0"));
}

#[tokio::test]
async fn slot_files_survive_restart() {
    let files = folder();
    let path = files.to_str().unwrap().to_owned();
    let first = Server::start(&["-np", "2", "--slot-save-path", &path]);
    first.wait_ready().await;
    let prompt = "A story about a lighthouse keeper who wrote letters to the sea.";
    first.answer("/completion", &completion_request(prompt, 0, 6)).await;
    let saved = act_ok(&first, 0, "save", &json!({"filename": "lighthouse.bin"})).await;
    assert_eq!(keys(&saved), ["id_slot", "filename", "n_saved", "n_written", "timings"]);
    assert!(saved["timings"]["save_ms"].is_number());
    let written = std::fs::read(files.join("lighthouse.bin")).unwrap();
    assert_eq!(saved["n_written"].as_u64().unwrap() as usize, written.len());
    assert_eq!(std::fs::read_dir(&files).unwrap().count(), 1, "a partial file remains");
    let expected = first.answer("/completion", &completion_request(prompt, 0, 10)).await;
    std::fs::write(files.join("junk"), b"SES1junk").unwrap();
    std::fs::create_dir(files.join("folder")).unwrap();
    std::os::unix::fs::symlink("/dev/zero", files.join("endless")).unwrap();
    let pipe = std::process::Command::new("mkfifo").arg(files.join("pipe")).status().unwrap();
    assert!(pipe.success());
    let mut errors = ErrorTable::default();
    for (action, name) in [
        ("save", Some("../x")),
        ("save", Some("a/b")),
        ("save", Some("")),
        ("save", Some(".x")),
        ("save", Some("/etc/passwd")),
        ("save", Some("folder")),
        ("save", None),
        ("restore", Some("nothing")),
        ("restore", Some("junk")),
        ("restore", Some("folder")),
        ("restore", Some("endless")),
        ("restore", Some("pipe")),
    ] {
        let body = name.map_or(json!({}), |name| json!({ "filename": name }));
        errors.add(format!("{action} {body}"), &act(&first, 0, action, &body).await);
    }
    insta::assert_snapshot!("slot_file_errors", errors);
    let erased = act_ok(&first, 0, "erase", &json!({})).await;
    assert_eq!(keys(&erased), ["id_slot", "n_erased"]);
    assert!(erased["n_erased"].as_u64().unwrap() > 10);
    assert_eq!(act_ok(&first, 0, "tokens", &json!({})).await["n_tokens"], 0);
    first.stop("TERM").await;
    let second = Server::start(&["-np", "1", "--slot-save-path", &path]);
    second.wait_ready().await;
    let restored = act_ok(&second, 0, "restore", &json!({"filename": "lighthouse.bin"})).await;
    assert_eq!(keys(&restored), ["id_slot", "filename", "n_restored", "n_read", "timings"]);
    assert_eq!((&restored["n_restored"], &restored["n_read"]), (&saved["n_saved"], &saved["n_written"]));
    let again = second.answer("/completion", &completion_request(prompt, 0, 10)).await;
    assert_eq!(again["tokens"], expected["tokens"]);
    assert!(again["timings"]["cache_n"].as_u64().unwrap() > 10);
}

#[tokio::test]
async fn disabled_slot_routes_name_required_flag() {
    let plain = server().await;
    for action in ["save", "restore", "erase"] {
        let answer = act(plain, 0, action, &json!({"filename": "x"})).await;
        assert_eq!(
            (answer.0, message_of(&answer.1)),
            (501, "snapshot files are disabled; start the server with --slot-save-path DIR")
        );
        assert_eq!(answer.1["error"]["type"], "not_supported_error");
    }
}

#[tokio::test]
async fn full_context_is_handled_as_requested() {
    let server = Server::start(&["-c", "256", "-np", "1", "--context-shift"]);
    server.wait_ready().await;
    let mut body = completion_request("Once upon a time there was a small house.", 0, 400);
    let shifted = server.answer("/completion", &body).await;
    assert_eq!((&shifted["tokens_predicted"], &shifted["truncated"]), (&json!(400), &json!(true)));
    let evicted = shifted["timings"]["evicted_n"].as_u64().unwrap();
    assert!(evicted > 100);
    let total = shifted["tokens_evaluated"].as_u64().unwrap() + 400 - 1;
    assert_eq!(shifted["tokens_cached"], total - evicted, "evicted tokens must not be in the slot");
    let kobold =
        json!({"prompt": "Once upon a time", "max_length": 300, "max_context_length": 8192, "bypass_eos": true});
    let kobold = server.answer("/api/v1/generate", &kobold).await;
    assert_eq!(kobold["results"][0]["completion_tokens"], 300, "{kobold}");
    body["context_policy"] = "stop".into();
    let stopped = server.answer("/completion", &body).await;
    assert_eq!((&stopped["truncated"], &stopped["stop_type"]), (&json!(true), &json!("limit")));
    assert!(stopped["timings"].get("evicted_n").is_none());
    body["context_policy"] = "forget".into();
    let (status, error) = server.post("/completion", &body).await;
    assert_eq!(
        (status, message_of(&error)),
        (400, "`context_policy` must be \"stop\", \"shift\" or \"evict\", got \"forget\"")
    );
    let long = "word ".repeat(60);
    let chat = json!({"max_tokens": 20, "temperature": 0, "ignore_eos": true, "context_policy": "evict", "messages": [
        {"role": "system", "content": "Brief."},
        {"role": "user", "content": format!("first {long}")}, {"role": "assistant", "content": format!("one {long}")},
        {"role": "user", "content": format!("second {long}")}, {"role": "assistant", "content": "two"},
        {"role": "user", "content": "third"}]});
    let answer = server.answer("/v1/chat/completions", &chat).await;
    let timings = &answer["timings"];
    assert!(timings["evicted_n"].as_u64().unwrap() > 100, "{answer}");
    let evicted = timings["evicted"].as_array().unwrap();
    assert_eq!((&evicted[0]["role"], &evicted[1]["role"], evicted.len()), (&json!("user"), &json!("assistant"), 2));
    assert!(evicted[0]["text"].as_str().unwrap().starts_with("first word"));
    let again = server.answer("/v1/chat/completions", &chat).await;
    let (cached, prompt) =
        (again["timings"]["cache_n"].as_u64().unwrap(), again["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!(cached, prompt - 1, "the messages that remain must be cached for a request with all messages");
    let mut too_long = chat.clone();
    too_long["messages"][0]["content"] = "word ".repeat(300).into();
    let (status, error) = server.post("/v1/chat/completions", &too_long).await;
    assert_eq!(
        (status, message_of(&error)),
        (
            400,
            "the prompt has 1031 tokens and does not fit even without all messages that may be dropped: this model's maximum context length is 256 tokens; system messages, the last user message and the last answer are kept"
        )
    );
}
