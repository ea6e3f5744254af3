//! A run formatted for pages.

use crate::events::{RunId, RunParent, RunStatus, Surface};
use crate::server::encode_component;
use crate::store::RunSummary;
use crate::ui::error::sentence;
use crate::ui::shell::{TimeView, duration, runs_href, short};
use std::fmt::Write as _;

/// The fields of a run as texts for the templates.
pub(in crate::ui) struct RunSummaryView {
    pub id: String,
    pub request_id: String,
    pub href: String,
    /// The beginning of the prompt; the request id of a run without a text of its prompt.
    pub title: String,
    pub output: String,
    pub model: String,
    pub surface: String,
    pub mods: Vec<String>,
    pub tags: Vec<TagView>,
    pub user: String,
    /// Metadata from the client.
    pub metadata: Vec<(String, String)>,
    pub status: &'static str,
    pub reason: &'static str,
    pub message: String,
    pub created: TimeView,
    pub tokens: i32,
    pub backtracked: i32,
    pub forced: i32,
    pub errors: i32,
    pub events: i32,
    pub speed: String,
    pub first_token: String,
    pub sampling: String,
    pub mod_text: String,
    pub attention: bool,
    pub strip: String,
    pub text_href: String,
    pub export_href: String,
    pub export_name: String,
    pub export_html_href: String,
    pub again_href: String,
    /// Page of the run that this one was forked from; empty for other runs.
    pub parent_href: String,
    /// The step of the fork and its change.
    pub parent_text: String,
    /// True in a list for a fork below another run of its family.
    pub is_branch: bool,
}

/// A tag with a link to its runs.
pub(in crate::ui) struct TagView {
    pub name: String,
    pub q: String,
    pub href: String,
}

impl TagView {
    fn new(name: &str) -> Self {
        let q = if name.contains(char::is_whitespace) { format!("tag:\"{name}\"") } else { format!("tag:{name}") };
        Self { name: name.to_owned(), href: runs_href(&q), q }
    }
}

/// Returns a JSON value as text, a string without quotation marks.
fn to_text(value: &serde_json::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

impl RunSummaryView {
    /// Creates the view. `q` is the filter of the list that links to the run and is kept in its URL.
    pub(in crate::ui) fn new(run: &RunSummary, q: &str) -> Self {
        let id = run.run_id.to_string();
        let prompt = one_line(&run.prompt_preview);
        Self {
            href: run_href(run.run_id, q),
            title: if prompt.is_empty() { run.request_id.clone() } else { prompt },
            output: one_line(&run.output_preview),
            model: run.model.clone().unwrap_or_default(),
            surface: run.surface.as_str().replace('_', "-"),
            mods: run.mods.clone(),
            tags: run.tags.iter().map(|tag| TagView::new(tag)).collect(),
            user: run.user_label.clone().unwrap_or_default(),
            metadata: run.metadata.iter().flatten().map(|(key, value)| (key.clone(), to_text(value))).collect(),
            status: run.status.as_str(),
            reason: run.finish_reason.map_or("", |reason| match reason.as_str() {
                "tool_calls" => "tool calls",
                "cancelled" | "error" => "",
                other => other,
            }),
            message: run.message.clone().unwrap_or_default(),
            created: run.created_at.into(),
            tokens: run.completion_tokens,
            backtracked: run.backtracked,
            forced: run.forced,
            errors: run.errors,
            events: run.events,
            speed: speed(run),
            first_token: run.first_token_us.map(|us| duration(us as f64)).unwrap_or_default(),
            sampling: sampling(run),
            mod_text: run
                .mod_text
                .clone()
                .filter(|text| !run.mods.contains(text) && *text != run.mods.join(", "))
                .unwrap_or_default(),
            attention: run.has_attention,
            strip: strip_path(&run.surprise_strip),
            text_href: format!("/runs/{id}?view=text"),
            export_href: format!("/api/v1/runs/{id}"),
            export_name: format!("{id}.json"),
            export_html_href: format!("/runs/{id}/export.html"),
            again_href: format!("/playground?from={id}"),
            parent_href: run.parent.as_ref().map(|parent| format!("/runs/{}", parent.run_id)).unwrap_or_default(),
            parent_text: run.parent.as_ref().map(describe_fork).unwrap_or_default(),
            request_id: run.request_id.clone(),
            is_branch: false,
            id,
        }
    }
}

/// Returns the URL of a run's page. `q` is the filter of the list that links to the run.
pub(super) fn run_href(id: RunId, q: &str) -> String {
    let query = if q.is_empty() { String::new() } else { format!("?q={}", encode_component(q)) };
    format!("/runs/{id}{query}")
}

/// Describes the step of a fork and its change.
fn describe_fork(parent: &RunParent) -> String {
    let change = &parent.change;
    let mut changes = Vec::new();
    if let Some(text) = change["text"].as_str() {
        changes.push(format!("“{}”", one_line(text)));
    }
    if let Some(sampling) = change["sampling"].as_object() {
        changes.extend(sampling.iter().map(|(name, value)| format!("{} {}", name.replace('_', " "), to_text(value))));
    }
    if let Some(mods) = change["mods"].as_array() {
        let name = |entry: &serde_json::Value| to_text(entry.get("name").unwrap_or(entry));
        let names: Vec<String> = mods.iter().map(name).collect();
        changes.push(if names.is_empty() { "no mods".into() } else { format!("mods {}", names.join(", ")) });
    }
    if let Some(vectors) = change["steering"].as_array() {
        let vectors: Vec<String> = vectors.iter().map(describe_vector).collect();
        changes.push(if vectors.is_empty() {
            "no steering".into()
        } else {
            format!("steering {}", vectors.join(", "))
        });
    }
    if change["seed"].is_string() {
        changes.push("new seed".into());
    }
    let changes = if changes.is_empty() { "unchanged".to_owned() } else { changes.join(", ") };
    format!("step {}: {changes}", parent.step)
}

/// Describes a control vector with its scale.
fn describe_vector(vector: &serde_json::Value) -> String {
    let scale = vector["scale"].as_f64().unwrap_or(1.0);
    format!("{} {}", to_text(&vector["name"]), short(scale))
}

/// A notice at the top of a run's page.
pub(in crate::ui) struct Banner {
    pub tone: &'static str,
    pub text: String,
}

/// Returns the banners of a run.
pub(in crate::ui) fn banners(run: &RunSummary) -> Vec<Banner> {
    let mut banners = Vec::new();
    let mut add = |tone, text: String| banners.push(Banner { tone, text });
    match run.status {
        RunStatus::Interrupted => {
            let cause = match run.surface {
                Surface::Ingest => "This run was exported before its end, or its server stopped.",
                _ => "The server stopped during this run.",
            };
            add("err", format!("{cause} The recording ends at event {}.", (run.events - 1).max(0)));
        }
        RunStatus::Failed => {
            add(
                "err",
                format!("This run failed: {}", sentence(run.message.as_deref().unwrap_or("no reason was recorded"))),
            );
        }
        RunStatus::Cancelled => {
            add("warn", "This run was cancelled; it shows the tokens generated until then.".to_owned());
        }
        RunStatus::Running | RunStatus::Done => {
            if let Some(message) = run.message.as_deref().filter(|message| !message.is_empty()) {
                // The text may begin with the name of a mod, so it is not capitalized.
                let more = if run.errors > 1 { format!(" ({} errors in total)", run.errors) } else { String::new() };
                add("warn", format!("{message}{more}"));
            } else if run.errors > 0 {
                let calls = if run.errors == 1 { "call of a mod" } else { "calls of mods" };
                add("warn", format!("{} {calls} failed; ticks on the timeline mark the exceptions.", run.errors));
            }
        }
    }
    banners
}

/// Returns a preview on one line. Control characters, which could reorder the line, become spaces.
pub(in crate::ui) fn one_line(text: &str) -> String {
    let is_hidden = |c: char| {
        c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    text.split(|c: char| c.is_whitespace() || is_hidden(c))
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

fn speed(run: &RunSummary) -> String {
    match run.generation_us {
        // The duration of a fork covers only its new tokens, and that of a single token says nothing about the speed.
        Some(us) if us > 0 && run.completion_tokens > 1 && run.parent.is_none() => {
            format!("{:.1} tok/s", f64::from(run.completion_tokens) * 1e6 / us as f64)
        }
        _ => String::new(),
    }
}

fn sampling(run: &RunSummary) -> String {
    let mut parts = Vec::new();
    if let Some(temperature) = run.temperature {
        parts.push(format!("temp {}", short(temperature)));
    }
    if let Some(max) = run.max_tokens {
        parts.push(format!("max {max} tokens"));
    }
    if let Some(seed) = run.seed {
        parts.push(format!("seed {seed}"));
    }
    parts.join(" · ")
}

/// Returns the surprise strip as an SVG path in a box of 96 × 16, one bar per group; empty for a run without numbers.
fn strip_path(strip: &[u8]) -> String {
    if strip.iter().all(|value| *value == 0) {
        return String::new();
    }
    let width = 96.0 / strip.len() as f64;
    let mut path = String::from("M0 16");
    for (i, value) in strip.iter().enumerate() {
        let height = 0.5 + 15.5 * (f64::from(*value) / 255.0).sqrt();
        // Writing to a String cannot fail.
        let _ = write!(path, "V{:.1}H{:.1}", 16.0 - height, (i + 1) as f64 * width);
    }
    path.push_str("V16z");
    path
}

#[cfg(test)]
pub(in crate::ui) fn sample() -> RunSummary {
    use crate::events::FinishReason;
    use chrono::DateTime;
    RunSummary {
        run_id: RunId("0192f0c4-0000-7000-8000-000000000001".parse().unwrap()),
        request_id: "req_abc123".into(),
        created_at: DateTime::from_timestamp(1_760_000_000, 0).unwrap(),
        completed_at: None,
        status: RunStatus::Failed,
        finish_reason: Some(FinishReason::Error),
        end_cause: None,
        message: Some("mod 'x' raised <b>KeyError</b>".into()),
        surface: Surface::LlamaServer,
        model: Some("demo".into()),
        owner: None,
        user_label: Some("key …12".into()),
        metadata: None,
        tags: vec!["interesting".into()],
        mods: vec!["no-ocean".into()],
        max_tokens: Some(10),
        temperature: Some(0.8),
        seed: Some(42),
        prompt_preview: "Explain <script>alert(1)</script>\nwhy\u{202e} it rains".into(),
        output_preview: "Because \"clouds\"".into(),
        prompt_tokens: 12,
        completion_tokens: 812,
        cached_tokens: 0,
        events: 2400,
        backtracked: 4,
        forced: 2,
        actions: 3,
        errors: 1,
        first_token_us: Some(120_000),
        prompt_us: Some(100_000),
        generation_us: Some(20_000_000),
        has_attention: true,
        surprise_strip: vec![0, 10, 255],
        mod_text: None,
        parent: None,
        version: 1,
    }
}

#[cfg(test)]
mod tests {
    use super::{RunSummaryView, banners, describe_fork, sample, strip_path};
    use crate::events::{RunParent, RunStatus, Surface};
    use crate::store::RunSummary;
    use serde_json::json;

    #[test]
    fn run_is_formatted_for_display() {
        let view = RunSummaryView::new(&sample(), "mod:\"a b\"");
        assert_eq!(view.title, "Explain <script>alert(1)</script> why it rains");
        assert_eq!(view.speed, "40.6 tok/s");
        assert_eq!(view.first_token, "120 ms");
        let of_one_token = RunSummary { completion_tokens: 1, ..sample() };
        assert_eq!(RunSummaryView::new(&of_one_token, "").speed, "");
        assert_eq!(view.sampling, "temp 0.8 · max 10 tokens · seed 42");
        assert!(view.href.ends_with("?q=mod%3A%22a%20b%22"));
    }

    #[test]
    fn steering_of_a_fork_is_described() {
        let text = |change| describe_fork(&RunParent { run_id: sample().run_id, sequence_order: 7, step: 3, change });
        let vectors = json!({"steering": [{"name": "calm", "scale": -0.5}, {"name": "joy", "layers": [1, 2]}]});
        assert_eq!(text(vectors), "step 3: steering calm -0.5, joy 1");
        assert_eq!(text(json!({"steering": []})), "step 3: no steering");
    }

    #[test]
    fn banner_of_an_interrupted_run_names_the_cause() {
        for (surface, cause) in [
            (Surface::Openai, "The server stopped during this run."),
            (Surface::Ingest, "This run was exported before its end, or its server stopped."),
        ] {
            let banners = banners(&RunSummary { status: RunStatus::Interrupted, surface, ..sample() });
            assert_eq!(banners[0].text, format!("{cause} The recording ends at event 2399."));
        }
    }

    #[test]
    fn strip_requires_measurements() {
        assert_eq!(strip_path(&[0, 0]), "");
        assert_eq!(strip_path(&[255, 0]), "M0 16V0.0H48.0V15.5H96.0V16z");
    }
}
