//! The action that a mod requested, for comparisons.

use super::{ActionDetails, ActionRecord, ActionType, TokenId};
use serde::Serialize;
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

impl RequestedAction {
    /// Returns the action of a record with these details.
    #[must_use]
    pub fn new(record: &ActionRecord, details: ActionDetails) -> Self {
        let calls = record.tool_calls.as_ref();
        Self {
            action: record.action_type,
            tokens: details.tokens,
            steps: record.backtrack_steps,
            max_steps: record.adjusted_max_steps,
            edit: details.edit,
            temperature: record.temperature,
            tool_calls: calls.and_then(|raw| serde_json::from_str(raw.get()).ok()),
            message: record.error_message.clone(),
        }
    }
}

impl From<&ActionRecord> for RequestedAction {
    fn from(record: &ActionRecord) -> Self {
        Self::new(record, ActionDetails::from(record))
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
