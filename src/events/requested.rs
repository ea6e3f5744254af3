//! The action that a mod requested, for comparisons.

use super::{ActionRecord, ActionType, TokenId};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The content of an action, without the engine's annotations.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RequestedAction {
    /// The type of the action.
    pub action: ActionType,
    /// The appended tokens, or the tokens of the new prompt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<TokenId>,
    /// `Backtrack`: number of tokens to remove.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<i32>,
    /// `AdjustedPrefill`: the new maximum of generated tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<i32>,
    /// `AdjustedLogits`: `keep`, `set`, `add`, `allow` or `replace`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub edit: Option<String>,
    /// `AdjustedLogits`: the temperature of this step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    /// `ToolCalls`: the payload.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Value>,
    /// `EmitError`: the error message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Details {
    tokens: Vec<TokenId>,
    edit: Option<String>,
}

impl RequestedAction {
    /// Creates an action with only a type.
    #[must_use]
    pub const fn new(action: ActionType) -> Self {
        Self {
            action,
            tokens: Vec::new(),
            steps: None,
            max_steps: None,
            edit: None,
            temperature: None,
            tool_calls: None,
            message: None,
        }
    }
}

impl From<&ActionRecord> for RequestedAction {
    fn from(action: &ActionRecord) -> Self {
        let details = action.details.as_ref();
        let details: Details = details.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
        let calls = action.tool_calls.as_ref();
        Self {
            tokens: details.tokens,
            steps: action.backtrack_steps,
            max_steps: action.adjusted_max_steps,
            edit: details.edit,
            temperature: action.temperature,
            tool_calls: calls.and_then(|raw| serde_json::from_str(raw.get()).ok()),
            message: action.error_message.clone(),
            ..Self::new(action.action_type)
        }
    }
}

impl std::fmt::Display for RequestedAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.action.as_str())?;
        if let Some(steps) = self.steps {
            write!(f, " {steps}")?;
        }
        if let Some(edit) = &self.edit {
            write!(f, " ({edit})")?;
        }
        if let Some(temperature) = self.temperature {
            write!(f, ", temperature {temperature}")?;
        }
        if let Some(message) = &self.message {
            write!(f, ": {message}")?;
        }
        if let Some(calls) = &self.tool_calls {
            write!(f, " {calls}")?;
        }
        if !self.tokens.is_empty() {
            write!(f, " {:?}", self.tokens)?;
        }
        Ok(())
    }
}
