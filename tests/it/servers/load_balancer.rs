//! The example of a load balancer in the documentation, in front of two servers.

use super::{BEARER, Cluster, KEY, cluster, run_on, wait_until_stored};
use crate::harness::{Server, SseReader, folder, free_port};
use crate::stream::{Client, endless, with_type};
use reqwest::Method;
use serde_json::json;
use std::collections::HashSet;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

const EXAMPLE: &str = include_str!("../../examples/haproxy.cfg");

/// HAProxy, stopped when dropped.
struct Proxy(Child);

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts HAProxy with the configuration of the example in front of these servers; `None` if it is not installed.
async fn proxy(a: &Server, b: &Server) -> Option<(Proxy, Server)> {
    if Command::new("haproxy").arg("-v").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: haproxy is not installed");
        return None;
    }
    let port = free_port();
    let address = |server: &Server| server.base.strip_prefix("http://").unwrap().to_owned();
    let mut config = EXAMPLE.to_owned();
    for (from, to) in
        [(":8080", format!("127.0.0.1:{port}")), ("10.0.0.5:6767", address(a)), ("10.0.0.6:6767", address(b))]
    {
        assert_eq!(config.matches(from).count(), 1, "{from}");
        config = config.replace(from, &to);
    }
    let path = folder().join("haproxy.cfg");
    std::fs::write(&path, config).unwrap();
    let child = Command::new("haproxy").arg("-f").arg(&path).stdout(Stdio::null()).spawn().unwrap();
    let server = Server::external(format!("http://127.0.0.1:{port}"), Some(KEY));
    let begun = Instant::now();
    while server.request(Method::GET, "/healthz").send().await.is_err() {
        assert!(begun.elapsed() < super::WAIT_TIMEOUT, "haproxy does not answer");
        tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    }
    Some((Proxy(child), server))
}

#[tokio::test]
async fn load_balancer_of_the_handbook_distributes_and_forwards_requests() {
    let Cluster { a, b, .. } = cluster().await;
    let Some((_proxy, both)) = proxy(a, b).await else { return };

    // Requests are distributed over both servers, and the run lists contain the runs of both.
    let mut list = SseReader::get(&both, "/api/v1/runs/live").await;
    let mut servers = HashSet::new();
    for _ in 0..4 {
        let body = json!({"prompt": "Once", "max_tokens": 3});
        let answer = both.request(Method::POST, "/v1/completions").json(&body).send().await.unwrap();
        assert_eq!(answer.status(), 200);
        servers.insert(answer.headers()["x-thunder-server"].to_str().unwrap().to_owned());
        let run_id = answer.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
        list.until(|_, data| data["run_id"] == run_id && data["status"] == "done").await;
    }
    assert_eq!(servers.len(), 2, "{servers:?}");
    for server in [a, b] {
        let run_id = run_on(server).await;
        list.until(|_, data| data["run_id"] == run_id && data["status"] == "done").await;
        let page = both.request(Method::GET, "/runs").header("accept", "text/html").send().await.unwrap();
        assert!(page.text().await.unwrap().contains(&run_id));
    }

    // Tokens arrive while the run, which does not end by itself, is active.
    let mut client = Client::connect_with(&both, &[BEARER]).await.unwrap();
    client.send(&endless()).await;
    let messages = client.until(|message| message["index"].as_u64() >= Some(5)).await;
    let (run_id, id) = (messages[0]["run_id"].as_str().unwrap(), &messages[0]["request_id"]);
    for server in [a, b] {
        wait_until_stored(server, run_id).await;
    }
    for _ in 0..2 {
        let mut events = SseReader::get(&both, &format!("/api/v1/runs/{run_id}/events")).await;
        events.until(|name, _| name == "item").await;
    }

    // Two connections, one to each server.
    drop(client);
    let mut after = 5;
    for _ in 0..2 {
        let mut client = Client::connect_with(&both, &[BEARER]).await.unwrap();
        client.send(&json!({"type": "resume", "request_id": id, "after": after})).await;
        let resumed = client.until(|message| message["index"] == after + 5).await;
        let indices: Vec<u64> = with_type(&resumed, "token").map(|token| token["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, (after + 1..=after + 5).collect::<Vec<_>>());
        after += 5;
    }
    let (status, answer) = both.post(&format!("/api/v1/runs/{run_id}/cancel"), &json!({})).await;
    assert_eq!(status, 202, "{answer}");
    assert_eq!(both.finished(run_id).await["run"]["status"], "cancelled");
}
