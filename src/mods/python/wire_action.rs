//! Actions in the replies of a worker.

use super::shared_memory::{MemoryRegion, SharedMemory};
use crate::events::{Fault, TokenId};
use crate::model::Vocabulary;
use crate::mods::{Action, LogitEdit};
use serde::Deserialize;
use serde_json::Value;

/// Maximum bytes of an error with which a mod ends its run.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// Maximum bytes of the tool calls of an action, as JSON.
const MAX_TOOL_CALLS_BYTES: usize = 1 << 20;

/// Action as JSON.
#[derive(Deserialize)]
#[serde(tag = "type")]
pub enum WireAction {
    Noop,
    AdjustedPrefill {
        tokens: Vec<TokenId>,
        max_steps: Option<u32>,
    },
    AdjustedLogits {
        edit: WireEdit,
        temperature: Option<f32>,
    },
    ForceTokens {
        tokens: Vec<TokenId>,
    },
    Backtrack {
        n: u32,
        tokens: Vec<TokenId>,
    },
    ForceOutput {
        tokens: Vec<TokenId>,
    },
    ToolCalls {
        tool_calls: Value,
    },
    EmitError {
        message: String,
        /// True if the mod was written for Quote.
        #[serde(default)]
        is_quote: bool,
    },
}

/// Kind of a logit edit, and the location of its values.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WireEdit {
    /// No edit.
    Keep,
    /// The shared memory has the new logits.
    Memory,
    /// The body has values to set.
    Set,
    /// The body has values to add.
    Add,
}

impl WireAction {
    /// Converts to an action whose size is limited, but whose values are not validated. `logits` is the region of the
    /// call's logits.
    ///
    /// # Errors
    /// The found size and the maximum.
    pub fn decode(
        self,
        body: &[u8],
        vocabulary: &Vocabulary,
        memory: &SharedMemory,
        logits: Option<&MemoryRegion>,
    ) -> Result<Action, String> {
        Ok(match self {
            Self::Noop => Action::Noop,
            Self::AdjustedPrefill { tokens, max_steps } => Action::AdjustedPrefill { tokens, max_tokens: max_steps },
            Self::ForceTokens { tokens } => Action::ForceTokens(tokens),
            Self::Backtrack { n, tokens } => Action::Backtrack { n, tokens },
            Self::ForceOutput { tokens } => Action::ForceOutput(tokens),
            Self::ToolCalls { tool_calls } => {
                let size = serde_json::to_vec(&tool_calls).map_or(0, |text| text.len());
                if size > MAX_TOOL_CALLS_BYTES {
                    return Err(format!("tool calls must have at most {MAX_TOOL_CALLS_BYTES} bytes, got {size}"));
                }
                Action::ToolCalls(tool_calls)
            }
            Self::EmitError { message, is_quote } => {
                if message.len() > MAX_ERROR_BYTES {
                    let size = message.len();
                    return Err(format!("the text of an error must have at most {MAX_ERROR_BYTES} bytes, got {size}"));
                }
                Action::EmitError { message, fault: if is_quote { Fault::QuoteMod } else { Fault::Mod } }
            }
            Self::AdjustedLogits { edit, temperature } => {
                let edit = match edit {
                    WireEdit::Keep => LogitEdit::Keep,
                    WireEdit::Set => LogitEdit::Set(sparse(body, vocabulary.len())?),
                    WireEdit::Add => LogitEdit::Add(sparse(body, vocabulary.len())?),
                    WireEdit::Memory => {
                        let region = logits.ok_or("logits can only be edited at ForwardPass")?;
                        let values = memory
                            .read(region, vocabulary.len())
                            .map_err(|error| format!("the shared memory cannot be read: {error}"))?;
                        LogitEdit::Replace(values)
                    }
                };
                Action::AdjustedLogits { edit, temperature }
            }
        })
    }
}

/// Decodes the entries of an edit, at most `max`.
fn sparse(body: &[u8], max: usize) -> Result<Vec<(TokenId, f32)>, String> {
    let (words, rest) = body.as_chunks::<4>();
    if !rest.is_empty() || words.len() % 2 != 0 {
        return Err(format!("an edit must be a list of tokens and values, got {} bytes", body.len()));
    }
    let (tokens, values) = words.split_at(words.len() / 2);
    if tokens.len() > max {
        let count = tokens.len();
        return Err(format!("an edit must have at most one entry per token of the vocabulary, got {count}"));
    }
    Ok(tokens
        .iter()
        .zip(values)
        .map(|(&token, &value)| (TokenId::from_ne_bytes(token), f32::from_ne_bytes(value)))
        .collect())
}
