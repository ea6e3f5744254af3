//! The list of runs: what is known of a run without reading its items.

use crate::events::{FinishReason, RunId, RunStatus, Surface};
use chrono::{DateTime, Utc};
use serde::Serialize;

/// Most runs on one page.
pub const MAX_PAGE: u32 = 500;

/// Which runs to list, newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunQuery {
    /// A filter text, see [`super::filter`]; empty for all runs.
    pub q: String,
    /// Only runs older than this one: `next` of the page before.
    pub before: Option<RunId>,
    /// Most runs to return, 1 … [`MAX_PAGE`]; 0 counts as 50.
    pub limit: u32,
}

/// A page of the run list, newest first.
#[derive(Debug, Clone, Serialize)]
pub struct RunPage {
    /// The runs.
    pub runs: Vec<RunSummary>,
    /// What to give as [`RunQuery::before`] for the next page; `None` on the last one.
    pub next: Option<RunId>,
}

/// A run as the run list shows it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RunSummary {
    /// Ours.
    pub run_id: RunId,
    /// The client's.
    pub request_id: String,
    /// When it began.
    pub created_at: DateTime<Utc>,
    /// When it ended.
    pub completed_at: Option<DateTime<Utc>>,
    /// Its state.
    pub status: RunStatus,
    /// Why it ended; `None` while it runs and where a foreign payload does not say.
    pub finish_reason: Option<FinishReason>,
    /// Why in words, where the reason alone does not say it; for a foreign run its first error.
    pub message: Option<String>,
    /// Where it came from.
    pub surface: Surface,
    /// The model's name; `None` where a foreign payload does not say.
    pub model: Option<String>,
    /// Who asked.
    pub user_label: Option<String>,
    /// Names of its mods, in order.
    pub mods: Vec<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<i32>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Random seed of the draw.
    pub seed: Option<u32>,
    /// What a person would recognise the run by, at most 300 characters.
    pub prompt_preview: String,
    /// The beginning of its answer, at most 300 characters.
    pub output_preview: String,
    /// Tokens of the prompt.
    pub prompt_tokens: i32,
    /// Generated tokens that stand in the answer.
    pub completion_tokens: i32,
    /// Tokens of the prompt whose KV state was reused.
    pub cached_tokens: i32,
    /// Number of events.
    pub events: i32,
    /// Generated tokens that a mod took back.
    pub backtracked: i32,
    /// Tokens that mods appended.
    pub forced: i32,
    /// Actions of mods other than `Noop`.
    pub actions: i32,
    /// Mod calls that raised, and `EmitError` actions.
    pub errors: i32,
    /// Microseconds from the start to the first generated token.
    pub first_token_us: Option<i64>,
    /// Microseconds spent on the prompt.
    pub prompt_us: Option<i64>,
    /// Microseconds from the end of the prompt to the end of the run.
    pub generation_us: Option<i64>,
    /// Whether attention was captured.
    pub has_attention: bool,
    /// The generated tokens in equal groups, at most 96; of each group the largest −ln p × 32, saturating at 255.
    pub surprise_strip: Vec<u8>,
    /// The document's `mod_text`.
    pub mod_text: Option<String>,
    /// Grows with every change of the run's row; equal versions of a finished run mean equal content.
    pub version: i32,
}
