//! Actions in the replies of a worker, and their validation.

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
    /// Converts to an action and validates it against the vocabulary. `logits` is the region of the call's logits.
    ///
    /// # Errors
    /// The invalid value, and what is expected.
    pub fn check(
        self,
        body: &[u8],
        vocabulary: &Vocabulary,
        memory: &SharedMemory,
        logits: Option<&MemoryRegion>,
    ) -> Result<Action, String> {
        let action = match self {
            Self::Noop => Action::Noop,
            Self::AdjustedPrefill { tokens, max_steps } => Action::AdjustedPrefill { tokens, max_tokens: max_steps },
            Self::ForceTokens { tokens } => Action::ForceTokens(tokens),
            Self::Backtrack { n, tokens } => Action::Backtrack { n, tokens },
            Self::ForceOutput { tokens } => Action::ForceOutput(tokens),
            Self::ToolCalls { tool_calls } => Action::ToolCalls(tool_calls),
            Self::EmitError { message, is_quote } => {
                Action::EmitError { message, fault: if is_quote { Fault::QuoteMod } else { Fault::Mod } }
            }
            Self::AdjustedLogits { edit, temperature } => {
                if let Some(temperature) =
                    temperature.filter(|temperature| !(temperature.is_finite() && *temperature >= 0.0))
                {
                    return Err(format!("`token_temp` must be a number of 0 or more, got {temperature}"));
                }
                let edit = match edit {
                    WireEdit::Keep => LogitEdit::Keep,
                    WireEdit::Set => LogitEdit::Set(sparse(body)?),
                    WireEdit::Add => LogitEdit::Add(sparse(body)?),
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
        };
        check_values(&action, vocabulary)?;
        Ok(action)
    }
}

fn sparse(body: &[u8]) -> Result<Vec<(TokenId, f32)>, String> {
    let (words, rest) = body.as_chunks::<4>();
    if !rest.is_empty() || words.len() % 2 != 0 {
        return Err(format!("an edit must be a list of tokens and values, got {} bytes", body.len()));
    }
    let (tokens, values) = words.split_at(words.len() / 2);
    Ok(tokens
        .iter()
        .zip(values)
        .map(|(&token, &value)| (TokenId::from_ne_bytes(token), f32::from_ne_bytes(value)))
        .collect())
}

fn check_values(action: &Action, vocabulary: &Vocabulary) -> Result<(), String> {
    let check_token = |token: TokenId| {
        if vocabulary.contains(token) {
            return Ok(());
        }
        Err(format!(
            "token {token} is not in the vocabulary; ids must be from 0 to {}",
            vocabulary.len().saturating_sub(1)
        ))
    };
    // −inf bans a token; the sampler cannot handle NaN and +inf.
    let is_usable = |value: f32| !value.is_nan() && value < f32::INFINITY;
    match action {
        Action::AdjustedPrefill { tokens, .. } if tokens.is_empty() => Err("the new prompt is empty".into()),
        Action::AdjustedPrefill { tokens, .. }
        | Action::ForceTokens(tokens)
        | Action::Backtrack { tokens, .. }
        | Action::ForceOutput(tokens) => tokens.iter().try_for_each(|&token| check_token(token)),
        Action::AdjustedLogits { edit: LogitEdit::Set(entries) | LogitEdit::Add(entries), .. }
            if entries.len() > vocabulary.len() =>
        {
            Err(format!("an edit must have at most one entry per token of the vocabulary, got {}", entries.len()))
        }
        Action::AdjustedLogits { edit: LogitEdit::Set(entries) | LogitEdit::Add(entries), .. } => {
            entries.iter().try_for_each(|&(token, value)| {
                check_token(token)?;
                is_usable(value).then_some(()).ok_or_else(|| format!("the logit of token {token} must not be {value}"))
            })
        }
        Action::AdjustedLogits { edit: LogitEdit::Replace(values), .. } => {
            // The loops have no early exit, so that the compiler vectorizes them.
            let unusable: u32 = values.iter().map(|&value| u32::from(!is_usable(value))).sum();
            let possible: u32 = values.iter().map(|&value| u32::from(value > f32::NEG_INFINITY)).sum();
            if let (1.., Some(token)) = (unusable, values.iter().position(|&value| !is_usable(value))) {
                return Err(format!("the logit of token {token} must not be {}", values[token]));
            }
            if possible == 0 {
                return Err("all tokens are banned: every logit is -inf".into());
            }
            Ok(())
        }
        Action::ToolCalls(calls) => {
            let size = serde_json::to_vec(calls).map_or(0, |text| text.len());
            (size <= MAX_TOOL_CALLS_BYTES)
                .then_some(())
                .ok_or_else(|| format!("tool calls must have at most {MAX_TOOL_CALLS_BYTES} bytes, got {size}"))
        }
        Action::EmitError { message, .. } if message.len() > MAX_ERROR_BYTES => {
            Err(format!("the text of an error must have at most {MAX_ERROR_BYTES} bytes, got {}", message.len()))
        }
        _ => Ok(()),
    }
}
