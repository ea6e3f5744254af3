//! Records of actions, for recordings and for comparisons with them.

use super::Action;
use crate::events::{ActionDetails, ActionRecord, RawJson, TokenId, shortest_f64};
use crate::model::{Vocabulary, without_nul};
use chrono::{DateTime, Utc};
use serde_json::Value;

/// Maximum tokens in the preview of forced tokens.
const PREVIEW_TOKENS: usize = 10;

impl Action {
    /// Returns the record of the action, and its details without texts and the engine's annotations. `record.details` is
    /// empty.
    #[must_use]
    pub fn to_record(
        &self,
        mod_call: i32,
        created_at: Option<DateTime<Utc>>,
        vocabulary: &Vocabulary,
    ) -> (ActionRecord, ActionDetails) {
        let mut record = ActionRecord::new(mod_call, self.kind(), created_at);
        let mut details = ActionDetails::default();
        let decode = |tokens: &[TokenId]| without_nul(vocabulary.decode(tokens));
        match self {
            Self::Noop => {}
            Self::AdjustedPrefill { tokens, max_tokens } => {
                details.tokens.clone_from(tokens);
                record.new_prompt = Some(decode(tokens));
                record.new_length = Some(tokens.len() as i32);
                record.adjusted_max_steps = max_tokens.map(saturating_i32);
            }
            Self::AdjustedLogits { edit, temperature } => {
                record.logits_shape = Some(format!("[1, {}]", vocabulary.len()));
                record.temperature = temperature.map(shortest_f64);
                details.edit = Some(edit.as_str().to_owned());
            }
            Self::ForceTokens(tokens) | Self::ForceOutput(tokens) => {
                details.tokens.clone_from(tokens);
                record.token_count = Some(tokens.len() as i32);
                record.tokens_preview = Some(decode(&tokens[..tokens.len().min(PREVIEW_TOKENS)]));
            }
            Self::Backtrack { n, tokens } => {
                details.tokens.clone_from(tokens);
                record.backtrack_steps = Some(saturating_i32(*n));
                record.backtrack_token_count = Some(tokens.len() as i32);
            }
            Self::ToolCalls(payload) => {
                record.has_tool_calls = Some(true);
                record.tool_calls = to_raw_json(payload);
            }
            Self::EmitError { message, .. } => record.error_message = Some(message.clone()),
        }
        (record, details)
    }
}

/// Converts a number from a mod to the type of the trace; saturates at the maximum.
fn saturating_i32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn to_raw_json(value: &Value) -> Option<RawJson> {
    serde_json::value::to_raw_value(value).ok()
}
