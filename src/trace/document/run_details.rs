//! Details of a recorded run, beyond the specified parts of a document.

use super::integer;
use crate::events::{EndCause, FinishReason, RunEnd, RunMetadata, RunStatus, Usage};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Maximum token count, as the database stores it.
pub(super) const MAX_TOKENS: i64 = i32::MAX as i64;
/// Maximum duration in microseconds, about 116 days. The statistics add durations.
pub(super) const MAX_DURATION_US: i64 = 10_000_000_000_000;
/// Maximum seed.
pub(super) const MAX_SEED: i64 = u32::MAX as i64;
/// Maximum entries of the metadata: those of a request, and those that Thunder adds.
pub(super) const MAX_METADATA: usize = 32;
/// Maximum characters of a key of the metadata. The database indexes keys with their values.
const MAX_KEY_CHARS: usize = RunMetadata::MAX_KEY_CHARS;
/// Maximum characters of a value of the metadata.
const MAX_VALUE_CHARS: usize = RunMetadata::MAX_VALUE_CHARS;
/// The accepted metadata, for errors.
pub(super) const EXPECTED_METADATA: &str = "an object of at most 32 strings, with keys of 1 to 64 characters";
/// The accepted value of an entry of the metadata, for errors.
pub(super) const EXPECTED_VALUE: &str = "a string of at most 512 characters";

/// End, seed, metadata and measurements of a run. Thunder writes them into its exports.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = IngestThunderRun)]
pub struct RunDetails {
    /// Status; default is `done`. A run that was `running` is stored as `interrupted`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<RunStatus>,
    /// Finish reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<FinishReason>,
    /// Cause of an end other than the end of the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end_cause: Option<EndCause>,
    /// Details of the finish reason; the first 2000 characters are stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// Seed of the sampler.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "integer::optional::<MAX_SEED, _, _>"
    )]
    pub seed: Option<u32>,
    /// Metadata of the request; the session as `session_id`. Up to 32 entries, with keys of up to 64 and values of up to 512
    /// characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Text that the list of runs shows for the prompt; the first 300 characters are stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_preview: Option<String>,
    /// Tokens of the prompt. The three token counts replace those from the events if all of them are present.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "integer::optional::<MAX_TOKENS, _, _>"
    )]
    pub prompt_tokens: Option<u32>,
    /// Tokens of the prompt that were in the KV cache; at most `prompt_tokens`.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "integer::optional::<MAX_TOKENS, _, _>"
    )]
    pub cached_tokens: Option<u32>,
    /// Tokens of the answer.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "integer::optional::<MAX_TOKENS, _, _>"
    )]
    pub completion_tokens: Option<u32>,
    /// Microseconds from the start to the first generated token.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "integer::optional::<MAX_DURATION_US, _, _>"
    )]
    pub first_token_us: Option<u64>,
    /// Microseconds spent on the prompt.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "integer::optional::<MAX_DURATION_US, _, _>"
    )]
    pub prompt_us: Option<u64>,
    /// Microseconds from the end of the prompt to the end of the run.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "integer::optional::<MAX_DURATION_US, _, _>"
    )]
    pub generation_us: Option<u64>,
}

impl RunDetails {
    /// Sets the fields that are known at the end of a run.
    pub fn set_end(&mut self, end: &RunEnd) {
        let finish = &end.finish;
        self.status = Some(end.status);
        self.finish_reason = Some(finish.reason);
        self.end_cause = finish.cause;
        self.message.clone_from(&finish.message);
        self.prompt_tokens = Some(finish.usage.prompt_tokens);
        self.cached_tokens = Some(finish.usage.cached_tokens);
        self.completion_tokens = Some(finish.usage.completion_tokens);
        self.first_token_us = finish.first_token_us;
        self.prompt_us = Some(finish.prompt_us);
        self.generation_us = Some(finish.generation_us);
    }

    /// Returns the token counts, if all of them are present.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        Some(Usage {
            prompt_tokens: self.prompt_tokens?,
            cached_tokens: self.cached_tokens?,
            completion_tokens: self.completion_tokens?,
        })
    }
}

/// Returns true for metadata of an accepted size.
pub(super) fn is_accepted_metadata(metadata: &BTreeMap<String, String>) -> bool {
    metadata.len() <= MAX_METADATA
        && metadata.iter().all(|(key, value)| is_accepted_key(key) && is_accepted_value(value))
}

/// Returns true for a key of the metadata of an accepted size.
pub(super) fn is_accepted_key(key: &str) -> bool {
    (1..=MAX_KEY_CHARS).contains(&key.chars().count())
}

/// Returns true for a value of the metadata of an accepted size.
pub(super) fn is_accepted_value(value: &str) -> bool {
    value.chars().count() <= MAX_VALUE_CHARS
}
