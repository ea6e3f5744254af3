//! Runs of killed servers.

use super::{BEARER, Cluster};
use crate::harness::SseReader;
use crate::stream::{Client, endless};

#[tokio::test]
async fn only_runs_of_killed_server_are_interrupted() {
    let cluster = Cluster::start().await;
    let Cluster { a, b, .. } = &cluster;
    let mut list = SseReader::get(b, "/api/v1/runs/live").await;
    let mut runs = Vec::new();
    let mut clients = Vec::new();
    for server in [a, b] {
        let mut client = Client::connect_with(server, &[BEARER]).await.unwrap();
        client.send(&endless()).await;
        let messages = client.until(|message| message["index"].as_u64() >= Some(5)).await;
        let run_id = messages[0]["run_id"].as_str().unwrap().to_owned();
        // The run must be in the database before its server is killed.
        list.until(|_, data| data["run_id"] == run_id).await;
        runs.push(run_id);
        clients.push(client);
    }
    a.stop("KILL").await;
    list.until(|_, data| data["run_id"] == runs[0] && data["status"] == "interrupted").await;
    assert_eq!(b.finished(&runs[0]).await["run"]["status"], "interrupted");
    assert_eq!(b.get(&format!("/api/v1/runs/{}", runs[1])).await.1["run"]["status"], "running");
    let (status, answer) = b.post(&format!("/api/v1/runs/{}/cancel", runs[1]), &serde_json::json!({})).await;
    assert_eq!(status, 202, "{answer}");
}
