use super::RawJson;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

/// The eight actions a mod can answer with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ActionType {
    /// Go on.
    Noop,
    /// Replace the prompt.
    AdjustedPrefill,
    /// Append these tokens instead of sampling.
    ForceTokens,
    /// These tokens are the answer.
    ForceOutput,
    /// Remove generated tokens, optionally append others.
    Backtrack,
    /// Edit the logits.
    AdjustedLogits,
    /// End the run with tool calls.
    ToolCalls,
    /// End the run with an error.
    EmitError,
}

impl ActionType {
    /// All eight.
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

    /// The name as it stands on the wire and in the database.
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

    /// The action of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == name)
    }
}

/// A recorded action, in the shape of the `/ingest` document.
///
/// What our engine writes into `details`, beside the document's fields: `tokens` and `texts` (the forced,
/// replacing or prompt tokens), `removed` (tokens a Backtrack really removed from the sequence, after clamping
/// and without a drawn token that was never appended), `clamped` (true when the mod asked for more),
/// `superseded` (true when an earlier mod's action won the event), `moved` (for `AdjustedLogits`: tokens whose
/// probability it moved most, `[{token, text, before, after}]`), `version` (hash of the mod's source).
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ActionRecord {
    /// Index of the mod call that returned it.
    pub mod_call_sequence: i32,
    /// Which of the eight.
    pub action_type: ActionType,
    /// Order among several actions of one call, usually 0.
    pub action_order: i32,
    /// When it was returned.
    pub created_at: Option<DateTime<Utc>>,
    /// The full action object.
    pub details: Option<RawJson>,
    /// `AdjustedPrefill`: the new prompt's text.
    pub new_prompt: Option<String>,
    /// `AdjustedPrefill`: its length in tokens.
    pub new_length: Option<i32>,
    /// `AdjustedPrefill`: the new limit of generated tokens.
    pub adjusted_max_steps: Option<i32>,
    /// `ForceTokens`, `ForceOutput`: how many tokens.
    pub token_count: Option<i32>,
    /// `ForceTokens`, `ForceOutput`: the first ten as text.
    pub tokens_preview: Option<String>,
    /// Backtrack: how many tokens the mod asked to remove.
    pub backtrack_steps: Option<i32>,
    /// Backtrack: how many tokens replace them.
    pub backtrack_token_count: Option<i32>,
    /// `AdjustedLogits`: shape of the logits, e.g. `[1, 32000]`.
    pub logits_shape: Option<String>,
    /// `AdjustedLogits`: temperature of this one draw.
    pub temperature: Option<f64>,
    /// `ToolCalls`: whether there are any.
    pub has_tool_calls: Option<bool>,
    /// `ToolCalls`: the payload.
    pub tool_calls: Option<RawJson>,
    /// `EmitError`: the message.
    pub error_message: Option<String>,
}

impl ActionRecord {
    /// An action with nothing but its place in the run.
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
