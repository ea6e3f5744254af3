//! Clients that resume runs.

use super::{Client, assemble_text, endless, with_type};
use crate::harness::{Server, folder, server};
use serde_json::{Value, json};
use thunder::events::system;

/// Resumes an ended run until the server no longer has it in memory.
async fn stored_run(client: &mut Client, id: &str) -> Vec<Value> {
    loop {
        client.send(&json!({"type": "resume", "request_id": id})).await;
        let received = client.until_end().await;
        if received[0]["stored"] == true {
            return received;
        }
    }
}

#[tokio::test]
async fn resumed_client_receives_each_message_once() {
    let server = server().await;
    let mut config = endless();
    config["parameters"]["max_tokens"] = 600.into();
    config["options"]["generated_text"] = "delta".into();
    let mut client = Client::connect(server).await;
    client.send(&config).await;
    let mut messages = client.until(|message| message["index"] == 40).await;
    let id = messages[0]["request_id"].clone();
    drop(client);
    let mut client = Client::connect(server).await;
    client.send(&json!({"type": "resume", "request_id": id, "after": 40})).await;
    let rest = client.until_end().await;
    let init = &rest[0];
    assert_eq!((&init["type"], &init["resumed"], &init["index"]), (&json!("init"), &json!(true), &json!(40)), "{init}");
    assert_eq!(init["generated_text"], assemble_text(&messages));
    messages.extend(rest);
    let indices: Vec<u64> = with_type(&messages, "token").map(|token| token["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, (1..=600).collect::<Vec<_>>());
    assert_eq!(messages.last().unwrap()["generated_text"], assemble_text(&messages));
    // The run has ended. A configuration with its id and without a prompt repeats all messages.
    client.send(&json!({"type": "config", "request_id": id})).await;
    let repeated = client.until_end().await;
    assert_eq!(with_type(&repeated, "token").count(), 600);
    assert_eq!(repeated.last().unwrap()["generated_text"], messages.last().unwrap()["generated_text"]);
}

#[tokio::test]
async fn resume_moves_control_and_notifies_the_first_connection() {
    let server = server().await;
    let mut first = Client::connect(server).await;
    first.send(&endless()).await;
    let id = first.message().await["request_id"].clone();
    first.until(|message| message["index"] == 3).await;
    let mut second = Client::connect(server).await;
    second.send(&json!({"type": "resume", "request_id": id, "after": 3})).await;
    let messages = second.until(|message| message["index"] == 4).await;
    assert_eq!(with_type(&messages, "status").count(), 0, "the run is not paused: {messages:?}");
    first.until_status("moved").await;
    second.send(&json!({"type": "control", "action": "stop"})).await;
    assert_eq!(second.until_end().await.last().unwrap()["stopped_by"], "client");
}

#[tokio::test]
async fn resumed_client_learns_that_run_is_paused() {
    let server = server().await;
    let mut first = Client::connect(server).await;
    first.send(&endless()).await;
    let id = first.message().await["request_id"].clone();
    first.until(|message| message["index"] == 3).await;
    first.send(&json!({"type": "control", "action": "pause"})).await;
    first.until_status("pause").await;
    drop(first);
    let mut second = Client::connect(server).await;
    second.send(&json!({"type": "resume", "request_id": id, "after": 3})).await;
    let [init, status] = [second.message().await, second.message().await];
    assert_eq!((&init["type"], &status["operation"]), (&json!("init"), &json!("pause")), "{init} {status}");
    assert_eq!((&status["type"], &status["request_id"]), (&json!("status"), &id));
    second.send(&json!({"type": "control", "action": "resume"})).await;
    second.until_status("resume").await;
    second.send(&json!({"type": "control", "action": "stop"})).await;
    second.until_end().await;
}

#[tokio::test]
async fn abandoned_run_ends_and_is_stored() {
    let server = Server::start(&["--stream-keep", "1"]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    let short =
        client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 9, "seed": 1}})).await;
    client
        .send(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 4000, "ignore_eos": true}}))
        .await;
    let abandoned = client.message().await["request_id"].as_str().unwrap().to_owned();
    client.until(|message| message["index"] == 3).await;
    // A paused run cannot end before the client disconnects.
    client.send(&json!({"type": "control", "action": "pause"})).await;
    client.until_status("pause").await;
    drop(client);
    assert_eq!(server.finished(&abandoned).await["run"]["status"], "cancelled");
    let mut client = Client::connect(&server).await;
    let id = short[0]["request_id"].clone();
    // The server keeps an ended run in memory for one second. Then only the database has it.
    let stored: Vec<Value> = loop {
        client.send(&json!({"type": "resume", "request_id": id, "after": 2})).await;
        let messages = client.until_end().await;
        if messages[0]["stored"] == true {
            break messages;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    };
    assert_eq!(stored.len(), 2);
    assert_eq!((&stored[0]["stored"], &stored[1]["stored"]), (&json!(true), &json!(true)), "{stored:?}");
    let (sent, stored_end) = (short.last().unwrap(), &stored[1]);
    assert_eq!(stored_end["generated_text"], sent["generated_text"]);
    assert_eq!((&stored_end["usage"], &stored_end["finish_reason"]), (&sent["usage"], &sent["finish_reason"]));
    client.send(&json!({"type": "resume", "request_id": "nobody"})).await;
    assert_eq!(client.message().await["message"], "no run 'nobody' exists");
}

#[tokio::test]
async fn resumed_stored_run_has_the_same_last_message() {
    let server = Server::start(&["--stream-keep", "0", "--mods-dir", crate::harness::MODS]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    let mut with_timeout = endless();
    with_timeout["options"]["timeout_ms"] = 100.into();
    let with_mod_error = json!({"type": "config", "prompt": "Once", "mods": ["refuse_late"],
                         "parameters": {"max_tokens": 40, "ignore_eos": true}});
    let with_tool_call = json!({"type": "config", "prompt": "Once", "mods": ["call_tool"]});
    let all_tokens: Vec<u32> = (0..640).collect();
    let without_tokens = json!({"type": "config", "prompt": "Once", "parameters": {"banned_tokens": all_tokens}});
    let mut sent = Vec::new();
    for config in [&with_timeout, &with_mod_error, &with_tool_call, &without_tokens] {
        sent.push(client.run(config).await);
    }
    // Mods that end a run while all of its text is held back.
    for name in ["block", "convert_call"] {
        let config = json!({"type": "config", "prompt": "Once", "mods": [name], "parameters": {"ignore_eos": true}});
        sent.push(client.run(&config).await);
    }
    client.send(&endless()).await;
    let mut stopped = client.until(|message| message["index"] == 2).await;
    client.send(&json!({"type": "control", "action": "stop"})).await;
    stopped.extend(client.until_end().await);
    sent.push(stopped);
    for sent in sent {
        let (id, last) = (sent[0]["request_id"].as_str().unwrap(), sent.last().unwrap());
        server.finished(id).await;
        let stored = stored_run(&mut client, id).await.pop().unwrap();
        for field in
            ["type", "finish_reason", "stopped_by", "error", "recovery_action", "tool_calls", "generated_text", "usage"]
        {
            assert_eq!(stored[field], last[field], "{field}: {stored}");
        }
    }
}

/// The recorded tokens also contain the stop string and hidden control tokens.
#[tokio::test]
async fn resumed_stored_run_has_the_received_answer() {
    let mods = folder();
    // A control token, a letter and a part of a character.
    let source = "from thunder import ForwardPass, mod\n\n\n@mod\ndef force_parts(event, actions, tokenizer):\n    \
                  if isinstance(event, ForwardPass) and event.step == 1:\n        \
                  return actions.force_tokens([1, tokenizer.encode(\"a\")[0], tokenizer.encode(\"😀\")[0]])\n";
    std::fs::write(mods.join("force_parts.py"), source).unwrap();
    let server = Server::start(&["--stream-keep", "0", "--mods-dir", mods.to_str().unwrap()]);
    server.wait_ready().await;
    let mut client = Client::connect(&server).await;
    let with_stop_string = json!({"type": "config", "prompt": "Once",
        "mods": [{"name": "force-prefix", "config": {"text": "one STOP two"}}],
        "parameters": {"max_tokens": 40, "ignore_eos": true, "stop": ["STOP"]}});
    let with_parts = json!({"type": "config", "prompt": "Once", "mods": ["force_parts"],
        "parameters": {"max_tokens": 3, "ignore_eos": true}});
    for (config, text, stop_string) in
        [(with_stop_string, "one ", json!("STOP")), (with_parts, "a\u{fffd}", Value::Null)]
    {
        let sent = client.run(&config).await;
        let (id, last) = (sent[0]["request_id"].as_str().unwrap(), sent.last().unwrap());
        assert_eq!((&last["generated_text"], &last["stop_string"]), (&json!(text), &stop_string), "{last}");
        server.finished(id).await;
        let stored = stored_run(&mut client, id).await.pop().unwrap();
        for field in ["finish_reason", "stop_string", "generated_text", "usage"] {
            assert_eq!(stored[field], last[field], "{field}: {stored}");
        }
    }
}

#[tokio::test]
async fn concurrent_runs_cannot_share_request_id() {
    let server = server().await;
    for _ in 0..5 {
        let id = format!("both-{}", system::new_id());
        let config = json!({"type": "config", "request_id": id, "prompt": "Once", "parameters": {"max_tokens": 3}});
        let (mut one, mut other) = (Client::connect(server).await, Client::connect(server).await);
        let (one, other) = tokio::join!(one.run(&config), other.run(&config));
        let ends = [&one, &other].map(|messages| messages.last().unwrap());
        let started = [&one, &other].iter().filter(|messages| messages[0]["type"] == "init").count();
        assert_eq!(started, 1, "{ends:?}");
        assert!(ends.iter().any(|end| end["parameter"] == "request_id"), "{ends:?}");
    }
}

#[tokio::test]
async fn request_id_of_another_run_is_rejected() {
    let server = server().await;
    let mut client = Client::connect(server).await;
    let id = format!("mine-{}", system::new_id());
    let config = json!({"type": "config", "request_id": id, "prompt": "Once", "parameters": {"max_tokens": 3}});
    assert_eq!(client.run(&config).await[0]["request_id"], id);
    // The server accepts the request if its lookup in the database takes too long.
    let mut error = client.run(&config).await.pop().unwrap();
    for _ in 0..20 {
        if error["parameter"] == "request_id" {
            break;
        }
        error = client.run(&config).await.pop().unwrap();
    }
    assert_eq!(
        error["message"],
        format!("`request_id` '{id}' belongs to another run; send a message of type \"resume\" to receive it")
    );
    assert_eq!(error["parameter"], "request_id");
}
