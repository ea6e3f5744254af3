use super::{ActionRecord, RawJson, TokenId, from_object};
use serde::{Deserialize, Serialize};

/// Thunder's `details` of an [`ActionRecord`]: the engine's annotations, and the parts of an action that have no field of
/// their own. Only the fields that replays and comparisons need are parsed, so that the others have any type in the
/// details of another engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ActionDetails {
    /// Hash of the mod's source; Thunder's version for a built-in mod.
    #[serde(skip_deserializing)]
    pub version: String,
    /// True if the control action of an earlier mod took precedence.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub superseded: bool,
    /// Appended tokens, or the tokens of the new prompt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens: Vec<TokenId>,
    /// Text of each token in `tokens`.
    #[serde(skip_serializing_if = "Vec::is_empty", skip_deserializing)]
    pub texts: Vec<String>,
    /// `AdjustedLogits`: `keep`, `set`, `add`, `allow` or `replace`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub edit: Option<String>,
    /// `AdjustedLogits`: the tokens with the largest change of probability.
    #[serde(skip_serializing_if = "Option::is_none", skip_deserializing)]
    pub moved: Option<Vec<MovedToken>>,
    /// `Backtrack`: number of tokens that were removed from the sequence, without a sampled token that was not appended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub removed: Option<u32>,
    /// `Backtrack`: true if the mod requested the removal of more tokens than were generated.
    #[serde(skip_serializing_if = "std::ops::Not::not", skip_deserializing)]
    pub clamped: bool,
}

/// A token whose probability an edit of the logits changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MovedToken {
    /// The token.
    pub token: TokenId,
    /// Its text.
    pub text: String,
    /// Probability before the edit; `None` if it was not finite.
    pub before: Option<f32>,
    /// Probability after the edit; `None` if it was not finite.
    pub after: Option<f32>,
}

impl ActionDetails {
    /// Returns the details as the JSON of [`ActionRecord::details`].
    #[must_use]
    pub fn to_json(&self) -> Option<RawJson> {
        serde_json::value::to_raw_value(self).ok()
    }
}

impl From<&ActionRecord> for ActionDetails {
    /// Parses the details; JSON of another shape gives empty details.
    fn from(action: &ActionRecord) -> Self {
        let details = action.details.as_ref();
        details.and_then(|raw| from_object(raw.get()).ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::ActionDetails;
    use crate::events::{ActionRecord, ActionType};
    use serde_json::json;

    #[test]
    fn unused_fields_of_another_engine_have_any_type() {
        let details = json!({"version": 2, "texts": [1], "moved": "x", "clamped": null, "tokens": [5], "removed": 3});
        let mut action = ActionRecord::new(0, ActionType::Backtrack, None);
        action.details = serde_json::value::to_raw_value(&details).ok();
        let expected = ActionDetails { tokens: vec![5], removed: Some(3), ..ActionDetails::default() };
        assert_eq!(ActionDetails::from(&action), expected);
    }
}
