//! Lists, pages and replays of runs.

use crate::database::target::{Target, urlencode};
use crate::harness::SseReader;
use reqwest::Method;
use thunder::trace::columns;

pub async fn replay_columns_are_stored(target: &Target) {
    let path = format!("/api/v1/runs/{}/columns", target.name("chat"));
    let bytes = target.server.request(Method::GET, &path).send().await.unwrap().bytes().await.unwrap();
    assert!(!columns::decode(&bytes).unwrap().answer_text().is_empty());
}

pub async fn replay_page_is_shown(target: &Target) {
    for path in ["/runs/{}", "/runs/{}?view=text"] {
        let path = path.replace("{}", &target.name("mod"));
        let (status, page) = target.server.get(&path).await;
        assert!(status == 200 && page.as_str().unwrap().contains("force-prefix"), "{path}: {status}");
    }
}

pub async fn events_are_listed(target: &Target) {
    let response = target.server.request(Method::GET, &format!("/api/v1/runs/{}/events", target.name("mod")));
    let text = response.send().await.unwrap().text().await.unwrap();
    for part in ["\"Prefilled\"", "\"mod_call\"", "\"action\"", "\"Added\""] {
        assert!(text.contains(part), "no {part}: {text}");
    }
}

pub async fn alternatives_are_listed(target: &Target) {
    let (status, answer) = target.server.get(&format!("/api/v1/runs/{}/alternatives", target.name("chat"))).await;
    assert_eq!((status, answer["alternatives"].as_array().map(Vec::len)), (200, Some(8)), "{answer}");
}

pub async fn list_changes_are_sent(target: &Target) {
    let mut changes = SseReader::get(&target.server, "/api/v1/runs/live").await;
    assert_eq!(target.ingest("news").await, 201);
    assert_eq!(changes.next().await.unwrap().name, "change");
}

pub async fn list_is_paged(target: &Target) {
    let (mut seen, mut next) =
        (Vec::new(), format!("?q={}&limit=7", urlencode(&format!("request:many request:{}", target.nonce))));
    loop {
        let (status, page) = target.server.get(&format!("/api/v1/runs{next}")).await;
        assert_eq!(status, 200, "{page}");
        seen.extend(page["runs"].as_array().unwrap().iter().map(|run| run["run_id"].as_str().unwrap().to_owned()));
        match page["meta"]["next"].as_str() {
            Some(more) => more.clone_into(&mut next),
            None => break,
        }
    }
    assert_eq!(seen.len(), 24);
    assert!(seen.is_sorted_by(|a, b| a > b), "newest first");
}

pub async fn comparison_page_is_shown(target: &Target) {
    let path = format!("/compare?a={}&b={}", target.name("chat"), target.name("text"));
    assert_eq!(target.server.get(&path).await.0, 200);
}
