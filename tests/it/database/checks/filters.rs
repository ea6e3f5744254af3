//! Filters of the run list.

use crate::database::target::{Target, urlencode};
use serde_json::json;
use std::time::{Duration, Instant};
use tokio::time::sleep;

pub async fn filter_by_request(target: &Target) {
    assert_eq!(target.runs_matching(&format!("request:{}", target.name("mod"))).await, [target.name("mod")]);
}

pub async fn filter_by_model(target: &Target) {
    let found = target.runs_matching("model:GEMINI").await;
    assert!(found.contains(&target.name("doc")) && !found.contains(&target.name("chat")), "{found:?}");
    assert_eq!(target.runs_matching("model:nothing-has-it").await, Vec::<String>::new());
}

pub async fn filter_by_mod(target: &Target) {
    assert_eq!(target.runs_matching("mod:greets").await, [target.name("greets")]);
    assert!(target.runs_matching("mod:SAMPLE").await.contains(&target.name("doc")));
}

pub async fn filter_by_status(target: &Target) {
    assert_eq!(target.runs_matching("status:cancelled").await, [target.name("running")]);
    assert_eq!(target.runs_matching("-status:done").await, [target.name("running")]);
}

pub async fn filter_by_surface(target: &Target) {
    let found = target.runs_matching("surface:ingest").await;
    assert!(found.contains(&target.name("doc")) && !found.contains(&target.name("chat")), "{found:?}");
}

pub async fn filter_by_error(target: &Target) {
    assert_eq!(target.runs_matching("error:\"broken mod\"").await, [target.name("error")]);
    assert!(target.runs_matching("error>0").await.contains(&target.name("error")));
}

pub async fn filter_by_counts(target: &Target) {
    assert!(target.runs_matching("forced>0").await.contains(&target.name("mod")));
    assert!(target.runs_matching("tokens:6").await.contains(&target.name("stream")));
    assert!(target.runs_matching("actions>=1").await.contains(&target.name("mod")));
    assert!(!target.runs_matching("backtracks>0").await.contains(&target.name("chat")));
}

pub async fn filter_by_time(target: &Target) {
    let (new, old) = (target.runs_matching("after:1h").await, target.runs_matching("before:2026-01-01").await);
    assert!(new.contains(&target.name("chat")) && !new.contains(&target.name("doc")), "{new:?}");
    assert!(old.contains(&target.name("doc")) && !old.contains(&target.name("chat")), "{old:?}");
}

/// Waits until a filter selects the expected number of runs. A run is stored shortly after its answer.
async fn wait_for_runs(target: &Target, q: &str, count: usize) {
    let begun = Instant::now();
    loop {
        let (_, page) = target.server.get(&format!("/api/v1/runs?q={}", urlencode(q))).await;
        if page["runs"].as_array().unwrap().len() == count {
            return;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "{q}: {page}");
        sleep(Duration::from_millis(20)).await;
    }
}

pub async fn filter_by_user(target: &Target) {
    let name = target.name("user");
    target.generate(json!({"user": name, "request_id": target.name("user-field")})).await;
    target.generate(json!({"safety_identifier": name, "request_id": target.name("safety")})).await;
    let body = json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}], "metadata": {"user_id": name}});
    target.server.answer("/v1/messages", &body).await;
    wait_for_runs(target, &format!("user:{name}"), 3).await;
    assert_eq!(target.runs_matching(&format!("user:{name} -request:safety")).await, [target.name("user-field")]);
    assert_eq!(target.runs_matching("user:unknown").await, Vec::<String>::new());
}

pub async fn filter_by_session_and_metadata(target: &Target) {
    let metadata = json!({"session_id": target.name("s"), "project": "a b", "stage": "x"});
    let run = target.generate(json!({"metadata": metadata, "request_id": target.name("meta")})).await;
    assert_eq!(run["run"]["metadata"], metadata);
    let body =
        json!({"input": "Hi", "max_output_tokens": 4, "session_id": target.name("s"), "metadata": {"project": "b"}});
    assert_eq!(target.server.answer("/v1/responses", &body).await["metadata"], json!({"project": "b"}));
    assert_eq!(target.runs_matching(&format!("session:{}", target.name("s"))).await, [target.name("meta")]);
    assert_eq!(
        target.runs_matching(&format!("metadata.project:\"a b\" session:{}", target.name("s"))).await,
        [target.name("meta")]
    );
    assert_eq!(target.runs_matching("metadata.project:a").await, Vec::<String>::new());
    wait_for_runs(target, &format!("session:{}", target.name("s")), 2).await;
    let (_, page) = target.server.get(&format!("/runs/{}", target.name("meta"))).await;
    assert!(page.as_str().unwrap().contains("project"), "the page must show the metadata");
    for (metadata, pointer) in [
        (json!({"a": 1}), "metadata.a"),
        (json!({"a": "x".repeat(513)}), "metadata.a"),
        (json!({"k".repeat(65): "x"}), "metadata"),
        (json!((0..17).map(|key| (key.to_string(), "x".into())).collect::<serde_json::Map<_, _>>()), "metadata"),
    ] {
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "metadata": metadata});
        let (status, problem) = target.server.post("/v1/chat/completions", &body).await;
        assert_eq!((status, &problem["error"]["param"]), (400, &json!(pointer)), "{problem}");
    }
}

pub async fn filter_by_words(target: &Target) {
    assert_eq!(target.runs_matching("TALL stor").await, [target.name("mod")]);
}

pub async fn filter_by_phrase(target: &Target) {
    assert_eq!(target.runs_matching("\"tall story\"").await, [target.name("mod")]);
    assert_eq!(target.runs_matching("\"story tall\"").await, Vec::<String>::new());
}

pub async fn filters_combine_and_negate(target: &Target) {
    assert_eq!(
        target.runs_matching("story mod:force status:done forced>0 -error>0 tokens>1").await,
        [target.name("mod")]
    );
    let none = target.runs_matching(&format!("story -mod:force request:{}", target.nonce)).await;
    assert_eq!(none, Vec::<String>::new());
    let models = target.runs_matching("model:gemini -status:failed mod:sample error:nothing").await;
    assert_eq!(models, Vec::<String>::new());
}
