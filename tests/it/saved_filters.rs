//! Saved filters of the run list.

use super::harness::{ErrorTable, Server, folder};
use reqwest::Method;
use serde_json::{Value, json};

const ROUTE: &str = "/api/v1/filters";

/// Returns name and text of the filters of a key.
async fn saved(server: &Server, key: &str) -> Vec<(String, String)> {
    let (status, list) = server.send(key, Method::GET, ROUTE, None).await;
    assert_eq!(status, 200, "{list}");
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    list["filters"].as_array().unwrap().iter().map(|filter| (text(&filter["name"]), text(&filter["q"]))).collect()
}

#[tokio::test]
async fn filters_are_saved_for_a_tenant() {
    let keys = folder().join("keys.txt");
    std::fs::write(&keys, "ann-key-1 name=ann\nann-key-2 name=ann\nbob-key name=bob\n").unwrap();
    let server = Server::start(&["--api-key-file", keys.to_str().unwrap()]);
    server.wait_ready().await;
    let save = async |key: &str, name: &str, q: &str| {
        server.send(key, Method::POST, ROUTE, Some(&json!({"name": name, "q": q}))).await
    };
    let (status, filter) = save("ann-key-1", " Slow / <b> ", "tokens>100 -status:done").await;
    assert_eq!(status, 201, "{filter}");
    let created_at = &filter["created_at"];
    assert!(created_at.is_string());
    assert_eq!(filter, json!({"name": "Slow / <b>", "q": "tokens>100 -status:done", "created_at": created_at}));
    assert_eq!(save("ann-key-2", "Errors of a day", "error>0 after:2026-01-01").await.0, 201);
    assert_eq!(save("ann-key-2", "Slow / <b>", "tokens>200").await.0, 201);
    let filters = [("Errors of a day", "error>0 after:2026-01-01"), ("Slow / <b>", "tokens>200")];
    assert_eq!(saved(&server, "ann-key-1").await, filters.map(|(name, q)| (name.to_owned(), q.to_owned())));
    assert_eq!(saved(&server, "bob-key").await, []);
    let page = async |key: &str| {
        server.request(Method::GET, "/runs?q=tokens>200").bearer_auth(key).send().await.unwrap().text().await.unwrap()
    };
    let html = page("ann-key-1").await;
    assert!(html.contains(r#"data-q="tokens&#62;200" aria-current="true">Slow / &#60;b&#62;</a>"#), "{html}");
    assert!(!page("bob-key").await.contains("data-saved"));

    let path = format!("{ROUTE}/Slow%20%2F%20%3Cb%3E");
    assert_eq!(server.send("bob-key", Method::DELETE, &path, None).await.0, 404);
    assert_eq!(server.send("ann-key-1", Method::DELETE, &path, None).await.0, 204);
    assert_eq!(server.send("ann-key-1", Method::DELETE, &path, None).await.0, 404);
    assert_eq!(saved(&server, "ann-key-2").await.len(), 1);

    let long = "x".repeat(65);
    let mut errors = ErrorTable::default();
    for (name, q) in [("", "x"), (&*long, "x"), ("a\nb", "x"), ("empty", "  "), ("bad", "modle:x")] {
        errors.add(format!("{name:?}: {q:?}"), &save("bob-key", name, q).await);
    }
    insta::assert_snapshot!("saved_filter_errors", errors);
    assert_eq!(save("bob-key", "0", &"x".repeat(4000)).await.0, 201, "any filter of the run list can be saved");
    for number in 0..50 {
        assert_eq!(save("bob-key", &number.to_string(), "x").await.0, 201);
    }
    let (status, problem) = save("bob-key", "one more", "x").await;
    assert_eq!(
        (status, &problem["detail"]),
        (409, &json!("there are 50 saved filters already; remove one of them first"))
    );
    assert_eq!(save("bob-key", "49", "y").await.0, 201, "a filter can be replaced");
    server.stop("TERM").await;
}
