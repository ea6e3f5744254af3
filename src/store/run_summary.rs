//! The summary of a run, read from its row.

use super::tags;
use crate::events::{EndCause, FinishReason, RunId, RunParent, RunStatus, Surface, Tenant};
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::{Map, Value};
use sqlx::postgres::PgRow;
use sqlx::{FromRow, Row};
use utoipa::ToSchema;
use uuid::Uuid;

/// Selects the columns of a [`RunSummary`]. They exclude the searchable text, which is large; lists also exclude the source
/// text of an ingested run's mod.
macro_rules! select_runs {
    ($mod_text:literal, $rest:literal) => {
        concat!(
            "select run_id, request_id, created_at, completed_at, status, finish_reason, end_cause, message, surface, model,
                owner, user_label, metadata::text as metadata, mods, max_tokens, temperature, seed, ",
            $mod_text,
            " as mod_text, prompt_preview, output_preview, prompt_tokens, completion_tokens, cached_tokens, events,
                backtracked, forced, actions, errors, first_token_us, prompt_us, generation_us, has_attention,
                surprise_strip, version, labels, parent_run, parent_event, parent_step, parent_change::text as parent_change
            from runs ",
            $rest
        )
    };
}

pub(super) use select_runs;

/// The summary of a run.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct RunSummary {
    /// Id of the run.
    #[schema(value_type = String)]
    pub run_id: RunId,
    /// Id chosen by the client.
    pub request_id: String,
    /// Start of the run.
    pub created_at: DateTime<Utc>,
    /// End of the run.
    pub completed_at: Option<DateTime<Utc>>,
    /// Status of the run.
    pub status: RunStatus,
    /// Finish reason; `None` while the run is running, and for an ingested run without one.
    pub finish_reason: Option<FinishReason>,
    /// Cause of an end other than the end of the answer, e.g. a stop request of the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_cause: Option<EndCause>,
    /// Details of the finish reason; for an ingested run its first error.
    pub message: Option<String>,
    /// The API that started the run.
    pub surface: Surface,
    /// Name of the model; `None` for an ingested run without one.
    pub model: Option<String>,
    /// Tenant that owns the run; `None` for a run recorded without API keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub owner: Option<Tenant>,
    /// Label of the API key or user that requested the run.
    pub user_label: Option<String>,
    /// Metadata from the client; the session as `session_id`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<HashMap<String, String>>)]
    pub metadata: Option<Map<String, Value>>,
    /// Tags that people gave to the run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tags: Vec<String>,
    /// Names of the mods, in order; the first 64 of an ingested run.
    pub mods: Vec<String>,
    /// Maximum tokens to generate.
    pub max_tokens: Option<i32>,
    /// Sampling temperature.
    pub temperature: Option<f64>,
    /// Seed of the random generator.
    pub seed: Option<u32>,
    /// Beginning of the prompt or of the last user message, up to 300 characters.
    pub prompt_preview: String,
    /// Beginning of the answer, up to 300 characters.
    pub output_preview: String,
    /// Tokens of the prompt.
    pub prompt_tokens: i32,
    /// Generated tokens in the answer.
    pub completion_tokens: i32,
    /// Tokens of the prompt whose KV state was reused.
    pub cached_tokens: i32,
    /// Number of events.
    pub events: i32,
    /// Generated tokens removed by backtracking.
    pub backtracked: i32,
    /// Tokens forced by mods.
    pub forced: i32,
    /// Actions of mods other than `Noop`.
    pub actions: i32,
    /// Mod calls that raised an exception, and `EmitError` actions.
    pub errors: i32,
    /// Microseconds from the start to the first generated token.
    pub first_token_us: Option<i64>,
    /// Microseconds spent on the prompt.
    pub prompt_us: Option<i64>,
    /// Microseconds from the end of the prompt to the end of the run.
    pub generation_us: Option<i64>,
    /// True if attention was captured.
    pub has_attention: bool,
    /// The generated tokens in up to 96 equal groups; of each group the largest −ln p × 32, saturating at 255.
    pub surprise_strip: Vec<u8>,
    /// The document's `mod_text`, which may be as long as the document allows; `None` in lists.
    pub mod_text: Option<String>,
    /// The run that this one was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<RunParent>,
    /// Version of the row, increased with every change. A finished run with the same version has the same content.
    pub version: i32,
}

impl FromRow<'_, PgRow> for RunSummary {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let named = |column: &'static str| row.try_get::<Option<String>, _>(column);
        let unknown = |column: &str, value: &str| sqlx::Error::Decode(format!("{column} '{value}' is unknown").into());
        let (status, surface, reason) = (named("status")?, named("surface")?, named("finish_reason")?);
        let (status, surface) = (status.unwrap_or_default(), surface.unwrap_or_default());
        let finish_reason = match reason {
            Some(name) => Some(finish_reason(&name).ok_or_else(|| unknown("finish_reason", &name))?),
            None => None,
        };
        Ok(Self {
            run_id: RunId(row.try_get("run_id")?),
            request_id: row.try_get("request_id")?,
            created_at: row.try_get("created_at")?,
            completed_at: row.try_get("completed_at")?,
            status: RunStatus::from_name(&status).ok_or_else(|| unknown("status", &status))?,
            finish_reason,
            // A newer release may have stored a cause that this one does not know.
            end_cause: named("end_cause")?.as_deref().and_then(EndCause::from_name),
            message: row.try_get("message")?,
            surface: Surface::from_name(&surface).ok_or_else(|| unknown("surface", &surface))?,
            model: row.try_get("model")?,
            owner: named("owner")?.map(Tenant::from),
            user_label: row.try_get("user_label")?,
            metadata: named("metadata")?.and_then(|metadata| serde_json::from_str(&metadata).ok()),
            tags: tags::tags(&row.try_get::<Vec<String>, _>("labels")?),
            mods: row.try_get("mods")?,
            max_tokens: row.try_get("max_tokens")?,
            temperature: row.try_get("temperature")?,
            seed: row.try_get::<Option<i64>, _>("seed")?.and_then(|seed| seed.try_into().ok()),
            prompt_preview: row.try_get("prompt_preview")?,
            output_preview: row.try_get("output_preview")?,
            prompt_tokens: row.try_get("prompt_tokens")?,
            completion_tokens: row.try_get("completion_tokens")?,
            cached_tokens: row.try_get("cached_tokens")?,
            events: row.try_get("events")?,
            backtracked: row.try_get("backtracked")?,
            forced: row.try_get("forced")?,
            actions: row.try_get("actions")?,
            errors: row.try_get("errors")?,
            first_token_us: row.try_get("first_token_us")?,
            prompt_us: row.try_get("prompt_us")?,
            generation_us: row.try_get("generation_us")?,
            has_attention: row.try_get("has_attention")?,
            surprise_strip: row.try_get("surprise_strip")?,
            mod_text: row.try_get("mod_text")?,
            parent: parent(row)?,
            version: row.try_get("version")?,
        })
    }
}

fn parent(row: &PgRow) -> Result<Option<RunParent>, sqlx::Error> {
    let Some(run_id) = row.try_get::<Option<Uuid>, _>("parent_run")? else { return Ok(None) };
    let change: Option<String> = row.try_get("parent_change")?;
    Ok(Some(RunParent {
        run_id: RunId(run_id),
        sequence_order: row.try_get::<Option<i32>, _>("parent_event")?.unwrap_or(0),
        step: row.try_get::<Option<i32>, _>("parent_step")?.unwrap_or(0),
        change: change.and_then(|change| serde_json::from_str(&change).ok()).unwrap_or_default(),
    }))
}

fn finish_reason(name: &str) -> Option<FinishReason> {
    use FinishReason::{Cancelled, Error, Length, Stop, ToolCalls};
    [Stop, Length, ToolCalls, Cancelled, Error].into_iter().find(|reason| reason.as_str() == name)
}
