//! Actions that mods request.

use crate::events::{ActionType, EventType, Fault, TokenId};
use crate::model::grammar::TokenMask;
use serde_json::Value;
use std::sync::Arc;

/// Action requested by a mod and applied by the engine. [`Action::permitted_on`] has the table of permitted events.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Continue.
    Noop,
    /// Replace the prompt, and optionally the maximum of tokens in the answer.
    AdjustedPrefill {
        /// New prompt.
        tokens: Vec<TokenId>,
        /// New maximum of tokens in the answer. Recordings and Quote name it `max_steps`.
        max_tokens: Option<u32>,
    },
    /// Edit the logits of this step.
    AdjustedLogits {
        /// Change of the logits.
        edit: LogitEdit,
        /// Temperature for the next token only; 0 takes the most probable token.
        temperature: Option<f32>,
    },
    /// Append these tokens.
    ForceTokens(Vec<TokenId>),
    /// Remove the last `n` generated tokens, then append `tokens`.
    Backtrack {
        /// Number of tokens. At `Sampled` and `Added` it includes the sampled or just-added token.
        n: u32,
        /// Tokens to append in their place.
        tokens: Vec<TokenId>,
    },
    /// End the run with these tokens as the answer.
    ForceOutput(Vec<TokenId>),
    /// End the run with these tool calls: one OpenAI tool call, a list of them, or a message that has them.
    ToolCalls(Value),
    /// End the run with an error.
    EmitError {
        /// Text of the error.
        message: String,
        /// Party at fault, which determines the HTTP status.
        fault: Fault,
    },
}

/// A change of the logits.
#[derive(Debug, Clone, PartialEq)]
pub enum LogitEdit {
    /// No change; only the temperature applies.
    Keep,
    /// Set entries to values; `f32::NEG_INFINITY` bans a token.
    Set(Vec<(TokenId, f32)>),
    /// Add values to entries; [`AVOIDED_TOKEN_BIAS`](crate::model::llama::AVOIDED_TOKEN_BIAS) avoids a token.
    Add(Vec<(TokenId, f32)>),
    /// Set all entries outside of the mask to `f32::NEG_INFINITY`.
    Allow(Arc<TokenMask>),
    /// Replace the whole vector; its length must be the vocabulary's.
    Replace(Vec<f32>),
}

impl LogitEdit {
    /// Returns the name used in recordings.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Keep => "keep",
            Self::Set(_) => "set",
            Self::Add(_) => "add",
            Self::Allow(_) => "allow",
            Self::Replace(_) => "replace",
        }
    }
}

/// Returns the calls in the payload of [`Action::ToolCalls`].
#[must_use]
pub fn tool_calls_of(payload: &Value) -> &[Value] {
    let calls = payload.get("tool_calls").unwrap_or(payload);
    calls.as_array().map_or(std::slice::from_ref(calls), Vec::as_slice)
}

impl Action {
    /// Creates the action that ends the run with an error.
    pub fn error(message: impl Into<String>) -> Self {
        Self::EmitError { message: message.into(), fault: Fault::Mod }
    }

    /// Creates the action that removes the last `count` tokens and then appends `tokens`.
    #[must_use]
    pub fn backtrack(count: usize, tokens: Vec<TokenId>) -> Self {
        Self::Backtrack { n: u32::try_from(count).unwrap_or(u32::MAX), tokens }
    }

    /// Returns the type of the action.
    #[must_use]
    pub const fn kind(&self) -> ActionType {
        match self {
            Self::Noop => ActionType::Noop,
            Self::AdjustedPrefill { .. } => ActionType::AdjustedPrefill,
            Self::AdjustedLogits { .. } => ActionType::AdjustedLogits,
            Self::ForceTokens(_) => ActionType::ForceTokens,
            Self::Backtrack { .. } => ActionType::Backtrack,
            Self::ForceOutput(_) => ActionType::ForceOutput,
            Self::ToolCalls(_) => ActionType::ToolCalls,
            Self::EmitError { .. } => ActionType::EmitError,
        }
    }

    /// Returns true if the action is permitted at the event.
    #[must_use]
    pub const fn permitted_on(&self, event: EventType) -> bool {
        match self {
            Self::Noop | Self::ForceOutput(_) | Self::ToolCalls(_) | Self::EmitError { .. } => true,
            Self::AdjustedPrefill { .. } => matches!(event, EventType::Prefilled),
            Self::AdjustedLogits { .. } => matches!(event, EventType::ForwardPass),
            Self::ForceTokens(_) | Self::Backtrack { .. } => !matches!(event, EventType::Prefilled),
        }
    }

    /// Returns true if the action changes the course of the run. Of several such actions at one event, the first one
    /// wins.
    #[must_use]
    pub const fn is_control(&self) -> bool {
        !matches!(self, Self::Noop | Self::AdjustedPrefill { .. } | Self::AdjustedLogits { .. })
    }
}
