//! The end of a run: its finish reason, its cause, and its result.

use super::RunStatus;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The reason why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// End-of-generation token, stop string, stop token, complete grammar constraint, or a mod's `ForceOutput`.
    Stop,
    /// The limit of tokens, steps, time or indentation, or the end of the context.
    Length,
    /// Tool calls.
    ToolCalls,
    /// The client disconnected or cancelled the run, or the server shut down.
    Cancelled,
    /// An error.
    Error,
}

impl FinishReason {
    /// Returns the name used in JSON and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
            Self::Cancelled => "cancelled",
            Self::Error => "error",
        }
    }
}

/// Token counts of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that were already in the KV cache.
    pub cached_tokens: u32,
    /// Tokens of the final answer, without the end-of-generation token.
    pub completion_tokens: u32,
}

/// The origin of an error that ended a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// A mod ended the run with `EmitError`.
    Mod,
    /// A mod written for Quote ended the run with `EmitError`; Quote's clients expect the status 400.
    QuoteMod,
    /// The request leaves no token that could be sampled.
    Request,
}

/// Specific cause of a run's end, beyond its finish reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum EndCause {
    /// The client stopped the run.
    ClientStop,
    /// The client requested another answer.
    Regenerate,
    /// The run exceeded the time limit of its request or of the server.
    Timeout,
    /// A request other than the client's own cancelled the run.
    Cancel,
    /// The client disconnected, or did not read for too long.
    Disconnect,
    /// The server shut down.
    Shutdown,
    /// The decode thread stopped while the run was active.
    EngineStopped,
    /// The run requires recording, but cannot be recorded.
    NotRecorded,
    /// A decode ran out of memory.
    OutOfMemory,
    /// A decode failed.
    DecodeFailed,
    /// The model returned logits that are NaN or infinite.
    InvalidLogits,
}

impl EndCause {
    /// All causes.
    pub const ALL: [Self; 11] = [
        Self::ClientStop,
        Self::Regenerate,
        Self::Timeout,
        Self::Cancel,
        Self::Disconnect,
        Self::Shutdown,
        Self::EngineStopped,
        Self::NotRecorded,
        Self::OutOfMemory,
        Self::DecodeFailed,
        Self::InvalidLogits,
    ];

    /// Returns the name used in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ClientStop => "client_stop",
            Self::Regenerate => "regenerate",
            Self::Timeout => "timeout",
            Self::Cancel => "cancel",
            Self::Disconnect => "disconnect",
            Self::Shutdown => "shutdown",
            Self::EngineStopped => "engine_stopped",
            Self::NotRecorded => "not_recorded",
            Self::OutOfMemory => "out_of_memory",
            Self::DecodeFailed => "decode_failed",
            Self::InvalidLogits => "invalid_logits",
        }
    }

    /// Returns the cause with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|cause| cause.as_str() == name)
    }

    /// Returns the finish reason of a run that ends for this cause.
    #[must_use]
    pub const fn finish_reason(self) -> FinishReason {
        match self {
            Self::ClientStop
            | Self::Regenerate
            | Self::Timeout
            | Self::Cancel
            | Self::Disconnect
            | Self::Shutdown
            | Self::EngineStopped => FinishReason::Cancelled,
            Self::NotRecorded | Self::OutOfMemory | Self::DecodeFailed | Self::InvalidLogits => FinishReason::Error,
        }
    }
}

/// The result of a run, as the APIs need it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Finish {
    /// The reason.
    pub reason: FinishReason,
    /// Details that the reason does not contain: the stop string, the limit or the error.
    pub message: Option<String>,
    /// The stop string that ended the run.
    pub stop_string: Option<String>,
    /// The answer: generated text up to the stop string.
    pub text: String,
    /// Tool calls with which a mod ended the run.
    pub tool_calls: Option<serde_json::Value>,
    /// Origin of the error; `None` for an error of the engine.
    #[serde(default)]
    pub fault: Option<Fault>,
    /// Cause, if something other than the answer itself ended the run.
    #[serde(default)]
    pub cause: Option<EndCause>,
    /// Token counts.
    pub usage: Usage,
    /// Microseconds from the start to the first generated token.
    pub first_token_us: Option<u64>,
    /// Tokens of the prompt that were decoded: those not cached, or fewer if the run was aborted.
    #[serde(default)]
    pub prompt_decoded: u32,
    /// Microseconds spent on the prompt.
    pub prompt_us: u64,
    /// Microseconds from the end of the prompt to the end of the run.
    pub generation_us: u64,
    /// True if the context was full: the answer ended there, or tokens were evicted.
    #[serde(default)]
    pub truncated: bool,
    /// Tokens evicted because the context was full.
    #[serde(default)]
    pub evicted_tokens: u32,
    /// Messages evicted because the context was full, in the order of their eviction.
    #[serde(default)]
    pub evicted: Vec<EvictedMessage>,
    /// Drafts of speculative decoding.
    #[serde(default)]
    pub drafts: DraftUsage,
    /// Mods with failed calls, in the order in which they are called.
    #[serde(default)]
    pub mod_failures: Vec<ModFailures>,
}

/// Failed calls of a mod in a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModFailures {
    /// Name of the mod.
    #[serde(rename = "mod")]
    pub mod_name: String,
    /// Calls of the mod.
    pub calls: u32,
    /// Calls that failed.
    pub failed: u32,
    /// Message of the last failed call.
    pub message: String,
}

/// Drafts of speculative decoding in a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DraftUsage {
    /// Number of drafts.
    pub drafts: u32,
    /// Tokens of all drafts.
    pub drafted: u32,
    /// Drafted tokens that the run continued with.
    pub accepted: u32,
}

/// A message evicted because the context was full.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EvictedMessage {
    /// Role of its author.
    pub role: String,
    /// Tokens of its content.
    pub tokens: u32,
    /// Beginning of its content.
    pub text: String,
}

/// The data known when a run ends.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunEnd {
    /// End time.
    pub completed_at: DateTime<Utc>,
    /// Final status.
    pub status: RunStatus,
    /// The result.
    pub finish: Finish,
}

impl RunEnd {
    /// Creates the end of a failed run with only token counts. The finish reason is a placeholder; see
    /// [`RunEnd::set_aborted`].
    #[must_use]
    pub fn empty(completed_at: DateTime<Utc>, usage: Usage) -> Self {
        let finish = Finish {
            reason: FinishReason::Cancelled,
            message: None,
            stop_string: None,
            text: String::new(),
            tool_calls: None,
            fault: None,
            cause: None,
            usage,
            first_token_us: None,
            prompt_decoded: 0,
            prompt_us: 0,
            generation_us: 0,
            truncated: false,
            evicted_tokens: 0,
            evicted: Vec::new(),
            drafts: DraftUsage::default(),
            mod_failures: Vec::new(),
        };
        Self { completed_at, status: RunStatus::Failed, finish }
    }

    /// Marks the run as failed, with the finish reason of the cause.
    pub fn set_aborted(&mut self, cause: EndCause, message: String) {
        self.status = RunStatus::Failed;
        self.finish.reason = cause.finish_reason();
        self.finish.cause = Some(cause);
        self.finish.message = Some(message);
    }
}
