//! Runs that tests write into a store, as an engine does.

use thunder::events::{RunId, RunMetadata, RunStart, Surface, system};

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
