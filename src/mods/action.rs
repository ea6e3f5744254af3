use crate::events::{ActionType, EventType, Fault, TokenId};
use crate::model::grammar::TokenMask;
use serde_json::Value;
use std::sync::Arc;

/// What a mod wants to happen. `engine` applies it; the table of permitted events is [`Action::permitted_on`].
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Go on.
    Noop,
    /// Replace the prompt, and optionally the limit of generated tokens.
    AdjustedPrefill {
        /// The new prompt.
        tokens: Vec<TokenId>,
        /// The new limit.
        max_steps: Option<u32>,
    },
    /// Edit the logits of this step.
    AdjustedLogits {
        /// What to change.
        edit: LogitEdit,
        /// Temperature of this one draw; 0 = argmax.
        temperature: Option<f32>,
    },
    /// Append these tokens.
    ForceTokens(Vec<TokenId>),
    /// Remove the last `n` generated tokens, then append `tokens`.
    Backtrack {
        /// How many. At `Sampled` and `Added` it counts the drawn or just-added token.
        n: u32,
        /// What to append in their place.
        tokens: Vec<TokenId>,
    },
    /// The answer is these tokens; the run ends.
    ForceOutput(Vec<TokenId>),
    /// The run ends with these tool calls: one OpenAI tool call or a list of them.
    ToolCalls(Value),
    /// The run ends with an error.
    EmitError {
        /// The error's text.
        message: String,
        /// The party at fault, which decides the HTTP status.
        fault: Fault,
    },
}

/// A change of the logits.
#[derive(Debug, Clone, PartialEq)]
pub enum LogitEdit {
    /// Nothing changes; only the temperature is meant.
    Keep,
    /// These entries get these values; `f32::NEG_INFINITY` bans a token.
    Set(Vec<(TokenId, f32)>),
    /// These are added to the entries.
    Add(Vec<(TokenId, f32)>),
    /// All entries but those of the mask get `f32::NEG_INFINITY`.
    Allow(Arc<TokenMask>),
    /// The whole vector is replaced. Its length must be the vocabulary's.
    Replace(Vec<f32>),
}

impl Action {
    /// Ends the run with an error.
    pub fn error(message: impl Into<String>) -> Self {
        Self::EmitError { message: message.into(), fault: Fault::Mod }
    }

    /// Which of the eight it is.
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

    /// Whether the event permits the action.
    #[must_use]
    pub const fn permitted_on(&self, event: EventType) -> bool {
        match self {
            Self::Noop | Self::ForceOutput(_) | Self::ToolCalls(_) | Self::EmitError { .. } => true,
            Self::AdjustedPrefill { .. } => matches!(event, EventType::Prefilled),
            Self::AdjustedLogits { .. } => matches!(event, EventType::ForwardPass),
            Self::ForceTokens(_) | Self::Backtrack { .. } => !matches!(event, EventType::Prefilled),
        }
    }

    /// Whether it changes control: the first such action of an event wins.
    #[must_use]
    pub const fn is_control(&self) -> bool {
        !matches!(self, Self::Noop | Self::AdjustedPrefill { .. } | Self::AdjustedLogits { .. })
    }
}
