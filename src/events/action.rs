use super::RawJson;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The eight types of action that a mod can return.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum ActionType {
    /// Does nothing; generation continues.
    Noop,
    /// Replaces the prompt.
    AdjustedPrefill,
    /// Appends the given tokens instead of a sampled one.
    ForceTokens,
    /// Replaces the answer with the given tokens and ends the run.
    ForceOutput,
    /// Removes generated tokens and optionally appends others.
    Backtrack,
    /// Edits the logits.
    AdjustedLogits,
    /// Ends the run with tool calls.
    ToolCalls,
    /// Ends the run with an error.
    EmitError,
}

impl ActionType {
    /// All eight types.
    pub const ALL: [Self; 8] = [
        Self::Noop,
        Self::AdjustedPrefill,
        Self::ForceTokens,
        Self::ForceOutput,
        Self::Backtrack,
        Self::AdjustedLogits,
        Self::ToolCalls,
        Self::EmitError,
    ];

    /// Returns the name used in JSON and in the database.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Noop => "Noop",
            Self::AdjustedPrefill => "AdjustedPrefill",
            Self::ForceTokens => "ForceTokens",
            Self::ForceOutput => "ForceOutput",
            Self::Backtrack => "Backtrack",
            Self::AdjustedLogits => "AdjustedLogits",
            Self::ToolCalls => "ToolCalls",
            Self::EmitError => "EmitError",
        }
    }

    /// Returns the action type with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

/// A recorded action, in the format of the `/ingest` document.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ActionRecord {
    /// Index of the mod call that returned it.
    pub mod_call_sequence: i32,
    /// The type of the action.
    pub action_type: ActionType,
    /// Order among several actions of one call, usually 0.
    pub action_order: i32,
    /// Time at which the action was returned.
    pub created_at: Option<DateTime<Utc>>,
    /// The full action object of another engine, or Thunder's [`ActionDetails`](super::ActionDetails).
    pub details: Option<RawJson>,
    /// `AdjustedPrefill`: the new prompt's text.
    pub new_prompt: Option<String>,
    /// `AdjustedPrefill`: length of the new prompt in tokens.
    pub new_length: Option<i32>,
    /// `AdjustedPrefill`: the new maximum of generated tokens.
    pub adjusted_max_steps: Option<i32>,
    /// `ForceTokens`, `ForceOutput`: number of tokens.
    pub token_count: Option<i32>,
    /// `ForceTokens`, `ForceOutput`: the first ten tokens as text.
    pub tokens_preview: Option<String>,
    /// `Backtrack`: number of tokens that the mod asked to remove.
    pub backtrack_steps: Option<i32>,
    /// `Backtrack`: number of tokens that replace them.
    pub backtrack_token_count: Option<i32>,
    /// `AdjustedLogits`: shape of the logits, e.g. `[1, 32000]`.
    pub logits_shape: Option<String>,
    /// `AdjustedLogits`: temperature of this step only.
    pub temperature: Option<f64>,
    /// `ToolCalls`: true if the payload contains tool calls.
    pub has_tool_calls: Option<bool>,
    /// `ToolCalls`: the payload.
    pub tool_calls: Option<RawJson>,
    /// `EmitError`: the error message.
    pub error_message: Option<String>,
}

impl ActionRecord {
    /// Creates an action; the fields without a parameter are empty, and `action_order` is 0.
    #[must_use]
    pub fn new(mod_call_sequence: i32, action_type: ActionType, created_at: Option<DateTime<Utc>>) -> Self {
        Self {
            mod_call_sequence,
            action_type,
            action_order: 0,
            created_at,
            details: None,
            new_prompt: None,
            new_length: None,
            adjusted_max_steps: None,
            token_count: None,
            tokens_preview: None,
            backtrack_steps: None,
            backtrack_token_count: None,
            logits_shape: None,
            temperature: None,
            has_tool_calls: None,
            tool_calls: None,
            error_message: None,
        }
    }
}
