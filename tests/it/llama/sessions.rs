//! Stored sessions over HTTP: saving, listing, restoring and removing, with and without files, up to a size limit.

use super::slots::{completion_request, keys};
use crate::harness::{ErrorTable, Server, folder, message_of, server};
use serde_json::json;

#[tokio::test]
async fn session_is_kept_until_removed() {
    let files = folder();
    let server = Server::start(&["-np", "2", "--slot-save-path", files.to_str().unwrap()]);
    server.wait_ready().await;
    assert_eq!(server.get("/sessions").await, (200, json!([])));
    let prompt = "My name is Alice, and I live in a house by the river.";
    server.answer("/completion", &completion_request(prompt, 0, 6)).await;
    let none = json!({});
    let saved = server.answer("/sessions/42?action=save&slot=0", &none).await;
    assert_eq!(keys(&saved), ["id_session", "id_slot", "n_tokens", "n_bytes", "t_ms"]);
    assert_eq!((&saved["id_session"], &saved["id_slot"]), (&json!(42), &json!(0)));
    let expected = server.answer("/completion", &completion_request(prompt, 0, 12)).await;
    server.answer("/sessions/-7?action=save&slot=0", &none).await;
    let (_, list) = server.get("/sessions").await;
    assert_eq!((&list[0]["id"], &list[1]["id"]), (&json!(-7), &json!(42)));
    assert_eq!(keys(&list[1]), ["id", "size", "created_at", "updated_at"]);
    assert_eq!(list[1]["size"], saved["n_bytes"]);
    assert!(list[1]["created_at"].as_i64().unwrap() > 1_700_000_000);
    let restored = server.answer("/sessions/42?action=restore&slot=1", &none).await;
    assert_eq!(keys(&restored), ["id_session", "id_slot", "n_bytes_read", "success", "t_ms"]);
    let again = server.answer("/completion", &completion_request(prompt, 1, 12)).await;
    assert_eq!(again["tokens"], expected["tokens"]);
    assert!(again["timings"]["cache_n"].as_u64().unwrap() > 8);
    let removed = server.answer("/sessions/42?action=remove", &json!({"file": "session_42.bin"})).await;
    assert_eq!(
        removed,
        json!({"id_session": 42, "removed": true, "file": "session_42.bin", "n_bytes": saved["n_bytes"]})
    );
    assert_eq!(server.answer("/sessions/-7?action=remove", &none).await, json!({"id_session": -7, "removed": true}));
    assert_eq!(server.get("/sessions").await, (200, json!([])));
    assert_eq!(server.post("/sessions/42?action=restore&slot=0", &none).await.0, 404);
    assert_eq!(server.post("/sessions/42?action=remove", &none).await.0, 404);
    let from_file = server.answer("/sessions/42?action=restore&slot=0", &json!({"file": "session_42.bin"})).await;
    assert_eq!(from_file["n_bytes_read"], saved["n_bytes"]);
    let again = server.answer("/completion", &completion_request(prompt, 0, 12)).await;
    assert_eq!(again["tokens"], expected["tokens"]);
}

#[tokio::test]
async fn invalid_session_request_error_names_expected_value() {
    let server = server().await;
    let mut errors = ErrorTable::default();
    for (path, body) in [
        ("/sessions/1?action=save", json!({})),
        ("/sessions/1?action=save&slot=99", json!({})),
        ("/sessions/1?action=save&slot=x", json!({})),
        ("/sessions/x?action=save&slot=0", json!({})),
        ("/sessions/1?action=forget", json!({})),
        ("/sessions/1?action=restore&slot=0", json!({"file": "x"})),
        ("/sessions/1?action=restore&slot=0", json!({"file": 5})),
        ("/sessions/1?action=restore&slot=0", json!({})),
    ] {
        errors.add(format!("{path} {body}"), &server.post(path, &body).await);
    }
    insta::assert_snapshot!("session_errors", errors);
}

#[tokio::test]
async fn session_above_the_memory_limit_is_rejected() {
    let server = Server::start(&["-np", "1", "--session-memory", "40K"]);
    server.wait_ready().await;
    server.answer("/completion", &completion_request("A few words", 0, 4)).await;
    server.answer("/sessions/1?action=save&slot=0", &json!({})).await;
    server.answer("/completion", &completion_request(&"Many more words than before. ".repeat(10), 0, 4)).await;
    let (status, answer) = server.post("/sessions/2?action=save&slot=0", &json!({})).await;
    assert_eq!(status, 507, "{answer}");
    assert!(
        message_of(&answer).ends_with("remove a session or start the server with a larger --session-memory"),
        "{answer}"
    );
    let (_, list) = server.get("/sessions").await;
    assert_eq!(list.as_array().unwrap().len(), 1);
}
