//! Requests for runs that another server generates.

use super::{BEARER, Cluster, KEY, cluster, wait_until_stored};
use crate::harness::{Server, SseReader, certificate};
use crate::stream::{Client, endless, with_type};
use reqwest::Method;
use serde_json::{Value, json};

async fn connect(server: &Server) -> Client {
    Client::connect_with(server, &[BEARER]).await.unwrap()
}

/// Starts a run that does not end by itself, and waits until the other server can read it. Returns its client, its id, and the
/// messages up to token 5.
async fn start_run(server: &Server, other: &Server) -> (Client, String, Vec<Value>) {
    let mut client = connect(server).await;
    client.send(&endless()).await;
    let messages = client.until(|message| message["index"] == 5).await;
    let run_id = messages[0]["run_id"].as_str().unwrap().to_owned();
    wait_until_stored(other, &run_id).await;
    (client, run_id, messages)
}

#[tokio::test]
async fn run_is_followed_and_cancelled_from_another_server() {
    let Cluster { a, b, .. } = cluster().await;
    let (mut client, run_id, _) = start_run(a, b).await;
    let path = format!("/api/v1/runs/{run_id}");
    let mut events = SseReader::get(b, &format!("{path}/events")).await;
    let mut items = Vec::new();
    while items.len() < 40 {
        let event = events.next().await.unwrap();
        assert_eq!(event.name, "item", "{}", event.data);
        items.push(event.json());
    }
    let (status, answer) = b.post(&format!("{path}/cancel"), &json!({})).await;
    assert_eq!((status, &answer["run_id"]), (202, &json!(run_id)), "{answer}");
    client.until_end().await;
    let end = loop {
        let event = events.next().await.unwrap();
        if event.name != "item" {
            break event.json();
        }
        items.push(event.json());
    };
    assert_eq!(end["status"], "cancelled");
    let stored = a.request(Method::GET, &format!("{path}/events")).send().await.unwrap().text().await.unwrap();
    let stored: Vec<Value> = stored.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(items, stored, "items are missing or repeated");
    let (status, answer) = b.post(&format!("{path}/cancel"), &json!({})).await;
    assert_eq!(status, 409, "{answer}");
    assert_eq!(b.post("/api/v1/runs/nothing/cancel", &json!({})).await.0, 404);
}

#[tokio::test]
async fn stream_is_resumed_and_controlled_through_another_server() {
    let Cluster { a, b, .. } = cluster().await;
    let (first, run_id, messages) = start_run(a, b).await;
    let id = messages[0]["request_id"].as_str().unwrap().to_owned();
    drop(first);
    // The key is in the first message, where browsers send it.
    let mut client = Client::connect_with(b, &[]).await.unwrap();
    client.send(&json!({"type": "resume", "request_id": id, "after": 5, "api_key": KEY})).await;
    let resumed = client.until(|message| message["index"] == 12).await;
    assert_eq!(
        (&resumed[0]["type"], &resumed[0]["resumed"], &resumed[0]["run_id"]),
        (&json!("init"), &json!(true), &json!(run_id))
    );
    let indices: Vec<u64> = with_type(&resumed, "token").map(|token| token["index"].as_u64().unwrap()).collect();
    assert_eq!(indices, (6..=12).collect::<Vec<_>>());
    client.send(&json!({"type": "control", "action": "pause"})).await;
    client.until_status("pause").await;
    client.send(&json!({"type": "control", "action": "regenerate", "request_id": id})).await;
    let messages = client.until(|message| message["type"] == "init").await;
    let regenerated = messages.last().unwrap();
    assert_eq!(regenerated["replaces"], id);
    client.send(&json!({"type": "control", "action": "stop", "request_id": regenerated["request_id"]})).await;
    let end = client.until_end().await.pop().unwrap();
    assert_eq!((&end["type"], &end["stopped_by"]), (&json!("completion"), &json!("client")), "{end}");
    // The connection can still start runs on its own server.
    let messages = client.run(&json!({"type": "config", "prompt": "Once", "parameters": {"max_tokens": 3}})).await;
    assert_eq!(messages.last().unwrap()["type"], "completion");
}

#[tokio::test]
async fn requests_are_forwarded_over_https() {
    let (chain, key, authority) = (certificate("server.pem"), certificate("server.key"), certificate("authority.pem"));
    let trusting = Server::start_with_env(&["--no-model", "--api-key", KEY], &[("SSL_CERT_FILE", &authority)]);
    trusting.wait_ready().await;
    let generating = trusting.start_beside(&["--api-key", KEY, "--ssl-cert-file", &chain, "--ssl-key-file", &key]);
    generating.wait_ready().await;
    let (first, run_id, messages) = start_run(&generating, &trusting).await;
    drop(first);
    let mut client = connect(&trusting).await;
    client.send(&json!({"type": "resume", "request_id": messages[0]["request_id"], "after": 5})).await;
    let resumed = client.until(|message| message["index"] == 8 || message["type"] == "error").await;
    assert_eq!(resumed.last().unwrap()["index"], 8, "{:?}", resumed.last());
    let (status, answer) = trusting.post(&format!("/api/v1/runs/{run_id}/cancel"), &json!({})).await;
    assert_eq!(status, 202, "{answer}");
    client.until_end().await;
}

#[tokio::test]
async fn forwarded_request_is_not_forwarded_again() {
    let Cluster { a, b, .. } = cluster().await;
    let (mut client, run_id, messages) = start_run(a, b).await;
    let forwarded = ("x-thunder-forwarded-by", "another-server");
    let cancel = b.request(Method::POST, &format!("/api/v1/runs/{run_id}/cancel")).header(forwarded.0, forwarded.1);
    assert_eq!(cancel.send().await.unwrap().status(), 409);
    let mut other = Client::connect_with(b, &[BEARER, forwarded]).await.unwrap();
    other.send(&json!({"type": "resume", "request_id": messages[0]["request_id"]})).await;
    assert_eq!(other.message().await["type"], "error");
    // A request without the key is rejected, too.
    let url = format!("{}/api/v1/runs/{run_id}/cancel", b.base);
    assert_eq!(crate::harness::client().build().unwrap().post(url).send().await.unwrap().status(), 401);
    client.send(&json!({"type": "control", "action": "stop"})).await;
    client.until_end().await;
}

#[tokio::test]
async fn reasoning_is_ended_through_another_server() {
    let Cluster { a, b, .. } = cluster().await;
    let (mut client, run_id, _) = start_run(a, b).await;
    let body = json!({"id": format!("chatcmpl-{run_id}"), "action": "reasoning_end"});
    let (status, direct) = a.post("/v1/chat/completions/control", &body).await;
    let (forwarded, response) = b.post("/v1/chat/completions/control", &body).await;
    assert_eq!((status, forwarded), (200, 200));
    assert_eq!(response, direct, "the generating server must respond");
    let unknown = json!({"id": "chatcmpl-unknown", "action": "reasoning_end"});
    assert_ne!(b.post("/v1/chat/completions/control", &unknown).await.1, direct);
    client.send(&json!({"type": "control", "action": "stop"})).await;
    client.until_end().await;
}
