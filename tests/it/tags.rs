//! Tags of runs, and the filters for tags and for kinds of feedback.

use super::harness::{ErrorTable, Server, server};
use serde_json::json;

const ROUTE: &str = "/api/v1/runs/tags";

/// Generates a run and returns its id when it is stored.
async fn generate(server: &Server, request_id: &str) -> String {
    let body = json!({"prompt": "Hello", "max_tokens": 2, "request_id": request_id});
    let answer = server.answer("/v1/completions", &body).await;
    let run_id = answer["thunder"]["run_id"].as_str().unwrap().to_owned();
    server.finished(&run_id).await;
    run_id
}

/// Returns the ids of the runs that a filter selects, newest first.
async fn runs_matching(server: &Server, q: &str) -> Vec<String> {
    let url = reqwest::Url::parse_with_params("http://localhost/api/v1/runs", [("q", q)]).unwrap();
    let (_, list) = server.get(&format!("{}?{}", url.path(), url.query().unwrap())).await;
    let runs = list["runs"].as_array().unwrap_or_else(|| panic!("{list}"));
    runs.iter().map(|run| run["run_id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn tags_are_added_removed_and_found() {
    let server = server().await;
    let (first, second) = (generate(server, "tags-1").await, generate(server, "tags-2").await);
    // A run has two ids. Repeated runs and tags count once.
    let change = json!({"runs": [second, "tags-1", first], "add": [" to check ", "T-é", "T-é"]});
    let (status, body) = server.post(ROUTE, &change).await;
    let tags = json!(["to check", "T-é"]);
    assert_eq!(status, 200, "{body}");
    assert_eq!(body, json!({"runs": [{"run_id": first, "tags": tags}, {"run_id": second, "tags": tags}]}));
    assert_eq!(runs_matching(server, "tag:\"to check\" tag:T-é").await, [second.clone(), first.clone()]);
    assert_eq!(runs_matching(server, "tag:T-é -request:tags-2").await, [first.as_str()]);
    assert_eq!(runs_matching(server, "tag:t-é").await, Vec::<String>::new());
    let (_, run) = server.get(&format!("/api/v1/runs/{first}")).await;
    assert_eq!(run["run"]["tags"], tags);
    let page = server.request(reqwest::Method::GET, "/runs?q=tag:T-é").send().await.unwrap().text().await.unwrap();
    assert_eq!(page.matches("data-q=\"tag:&#34;to check&#34;\"").count(), 2, "{page}");

    // A tag that is added again becomes the last one. A tag to remove may be absent.
    let (_, body) = server.post(ROUTE, &json!({"runs": [first], "add": ["to check"], "remove": ["absent"]})).await;
    assert_eq!(body, json!({"runs": [{"run_id": first, "tags": ["T-é", "to check"]}]}));
    let (_, body) = server.post(ROUTE, &json!({"runs": [first], "remove": ["T-é", "to check"]})).await;
    assert_eq!(body, json!({"runs": [{"run_id": first, "tags": []}]}));
    assert_eq!(runs_matching(server, "tag:T-é").await, [second]);
}

#[tokio::test]
async fn invalid_change_of_tags_changes_nothing() {
    let server = server().await;
    let run_id = generate(server, "tags-invalid").await;
    let many: Vec<String> = (0..33).map(|number| number.to_string()).collect();
    let (status, _) = server.post(ROUTE, &json!({"runs": [run_id], "add": many[..20]})).await;
    assert_eq!(status, 200);
    let mut errors = ErrorTable::default();
    for change in [
        json!({"runs": [], "add": ["x"]}),
        json!({"runs": vec![run_id.clone(); 101]}),
        json!({"runs": [run_id], "add": many}),
        json!({"runs": [run_id], "add": ["x".repeat(65)]}),
        json!({"runs": [run_id], "remove": [" "]}),
        json!({"runs": [run_id], "add": ["a\nb"]}),
        json!({"runs": [run_id], "add": ["a\"b"]}),
        json!({"runs": [run_id, "tags-unknown"], "add": ["x"]}),
        json!({"runs": [run_id], "add": many[20..], "remove": []}),
    ] {
        errors.add(&change, &server.post(ROUTE, &change).await);
    }
    insta::assert_snapshot!("tag_errors", errors);
    let (_, run) = server.get(&format!("/api/v1/runs/{run_id}")).await;
    assert_eq!(run["run"]["tags"], json!(many[..20]));
}

#[tokio::test]
async fn active_run_keeps_tags_and_feedback_when_it_ends() {
    let server = server().await;
    let body = json!({"prompt": "Hello", "max_tokens": 300, "stream": true, "ignore_eos": true});
    let response = server.request(reqwest::Method::POST, "/v1/completions").json(&body).send().await.unwrap();
    let id = response.headers()["x-thunder-run-id"].to_str().unwrap().to_owned();
    let (status, body) = server.post(ROUTE, &json!({"runs": [id], "add": ["early"]})).await;
    assert_eq!((status, &body["runs"][0]["tags"]), (200, &json!(["early"])));
    for rating in [1.0, 1.0, -0.5] {
        let (status, body) = server.post(&format!("/api/v1/runs/{id}/feedback"), &json!({"rating": rating})).await;
        assert_eq!(status, 201, "{body}");
    }
    response.bytes().await.unwrap();
    let run = server.finished(&id).await;
    assert_eq!((&run["run"]["status"], &run["run"]["tags"]), (&json!("done"), &json!(["early"])));
    assert_eq!(runs_matching(server, "tag:early feedback:good feedback:bad").await, [id]);
    assert_eq!(runs_matching(server, "tag:early feedback:neutral").await, Vec::<String>::new());
    let (status, body) = server.get("/api/v1/runs?q=feedback:goods").await;
    assert_eq!((status, &body["pointer"], &body["did_you_mean"]), (400, &json!("q"), &json!("good")));
}
