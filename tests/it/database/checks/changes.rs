//! Changes of stored mods, feedback, responses and runs.

use crate::database::target::Target;
use reqwest::Method;
use serde_json::json;
use thunder::events::system;
use thunder::store::{ModState, Store};

pub async fn mod_is_disabled_and_enabled(target: &Target) {
    let store = target.store("mods").await;
    let enabled = async |store: &Store| {
        let states = store.mod_states().await.unwrap();
        states.into_iter().find(|state: &ModState| state.name == "calm").map(|state| state.enabled)
    };
    for expected in [false, true] {
        store.set_mod_enabled("calm", expected, system::now(), None).await.unwrap();
        assert_eq!(enabled(&store).await, Some(expected));
    }
    store.remove_mod("calm").await.unwrap();
    assert_eq!(enabled(&store).await, None);
    store.close().await;
}

pub async fn feedback_is_kept(target: &Target) {
    let path = format!("/api/v1/runs/{}/feedback", target.name("chat"));
    let (status, feedback) = target.server.post(&path, &json!({"rating": 1, "text": "good"})).await;
    assert_eq!(status, 201, "{feedback}");
    let (_, list) = target.server.get(&path).await;
    assert_eq!(list["feedback"][0]["text"], "good");
}

pub async fn response_is_continued(target: &Target) {
    let body = json!({"input": "Hello!", "max_output_tokens": 8});
    let first = target.server.answer("/v1/responses", &body).await;
    let id = first["id"].as_str().unwrap();
    let body = json!({"input": "More!", "max_output_tokens": 8, "previous_response_id": id});
    let second = target.server.answer("/v1/responses", &body).await;
    assert_eq!(second["previous_response_id"], json!(id));
    let (status, stored) = target.server.get(&format!("/v1/responses/{id}")).await;
    assert_eq!((status, &stored["id"]), (200, &json!(id)));
}

pub async fn response_is_deleted(target: &Target) {
    let first = target.server.answer("/v1/responses", &json!({"input": "Hello!", "max_output_tokens": 8})).await;
    let path = format!("/v1/responses/{}", first["id"].as_str().unwrap());
    assert_eq!(target.server.request(Method::DELETE, &path).send().await.unwrap().status(), 200);
    assert_eq!(target.server.get(&path).await.0, 404);
}

pub async fn run_is_deleted(target: &Target) {
    assert_eq!(target.ingest("unwanted").await, 201);
    let path = format!("/api/v1/runs/{}", target.name("unwanted"));
    let status = target.server.request(Method::DELETE, &path).send().await.unwrap().status();
    assert!(status.is_success(), "{status}");
    assert_eq!(target.server.get(&path).await.0, 404);
    assert_eq!(target.ingest("unwanted").await, 201, "its id is free again");
}

pub async fn rerun_equals_its_run(target: &Target) {
    let (_, run) = target.server.get(&format!("/api/v1/runs/{}", target.name("text"))).await;
    let prompt = &run["events"][0]["details"]["prompt"];
    let (status, again) = target.server.post("/api/v1/reruns", &json!({"prompt": prompt, "any_version": true})).await;
    assert_eq!(status, 200, "{again}");
    let second = target.server.finished(again["run_id"].as_str().unwrap()).await;
    assert_eq!(second["run"]["output_preview"], run["run"]["output_preview"]);
}
