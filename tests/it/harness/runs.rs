//! Runs that tests write into a store, as an engine does, and the recorded items of runs.

use super::Server;
use reqwest::Method;
use thunder::events::{RunId, RunMetadata, RunStart, Surface, TraceItem, system};
use thunder::trace::document::item_from_json;

/// Returns the start of a run of the model `elsewhere`, with neither mods nor parameters.
pub fn run_start(run_id: RunId, request_id: &str) -> RunStart {
    RunStart {
        run_id,
        request_id: request_id.to_owned(),
        created_at: system::now(),
        surface: Surface::Openai,
        model: "elsewhere".into(),
        owner: None,
        user_label: None,
        metadata: RunMetadata::default(),
        max_tokens: None,
        temperature: None,
        seed: None,
        mods: Vec::new(),
        prompt_preview: String::new(),
        parent: None,
        images: Vec::new(),
    }
}

/// Waits until a run has ended and is stored; returns its items.
pub async fn recorded_items(server: &Server, run_id: &str) -> Vec<TraceItem> {
    server.finished(run_id).await;
    let response = server.request(Method::GET, &format!("/api/v1/runs/{run_id}/events")).send().await.unwrap();
    let lines = response.text().await.unwrap();
    lines.lines().map(|line| item_from_json(line.as_bytes()).unwrap()).collect()
}
