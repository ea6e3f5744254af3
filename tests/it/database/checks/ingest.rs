//! Documents of other engines.

use crate::database::target::Target;
use serde_json::json;

pub async fn ingest_stores_document(target: &Target) {
    assert_eq!(target.ingest("doc").await, 201);
    let (status, run) = target.server.get(&format!("/api/v1/runs/{}", target.name("doc"))).await;
    assert_eq!((status, &run["run"]["status"], &run["run"]["mods"]), (200, &json!("done"), &json!(["sample_mod"])));
}

pub async fn ingest_accepts_document_twice(target: &Target) {
    assert_eq!(target.ingest("doc").await, 201);
    assert_eq!(target.runs_matching(&format!("request:{}", target.name("doc"))).await.len(), 1);
}

pub async fn ingest_rejects_other_content(target: &Target) {
    let body = json!({"request": {"request_id": target.name("doc"), "model": "other"}, "events": []});
    let (status, problem) = target.server.post("/ingest", &body).await;
    assert_eq!(status, 409, "{problem}");
}

pub async fn ingest_accepts_many_at_once(target: &Target) {
    let names: Vec<String> = (0..24).map(|number| format!("many{number}")).collect();
    let statuses = futures::future::join_all(names.iter().map(|name| target.ingest(name))).await;
    assert_eq!(statuses, [201; 24]);
}

pub async fn one_of_two_racing_documents_wins(target: &Target) {
    let post = async |model: &str| {
        let body = json!({"request": {"request_id": target.name("race"), "model": model}, "events": []});
        target.server.post("/ingest", &body).await.0
    };
    let (first, second) = tokio::join!(post("one"), post("two"));
    assert_eq!([first.min(second), first.max(second)], [201, 409]);
}

pub async fn document_with_nul_is_stored(target: &Target) {
    let body = json!({"request": {"request_id": target.name("nul"), "model": "a\0b", "mod_text": "\0"}, "events": []});
    let (status, problem) = target.server.post("/ingest", &body).await;
    assert_eq!(status, 201, "{problem}");
    let (_, run) = target.server.get(&format!("/api/v1/runs/{}", target.name("nul"))).await;
    assert_eq!(run["request"]["mod_text"], "\u{fffd}", "{run}");
}
