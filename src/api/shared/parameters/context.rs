//! Use of the context by a run: slot, cache, context policy and drafts.

use crate::api::shared::fields::{Fields, invalid_value};
use crate::engine::{DraftLimits, Overflow};
use crate::server::ApiError;
use serde_json::Value;

/// Slot and cache settings of a run, its behavior on a full context, and its drafts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ContextSettings {
    pub(crate) slot: Option<u32>,
    pub(crate) cache_prompt: bool,
    pub(crate) cache_reuse: usize,
    pub(crate) overflow: Overflow,
    pub(crate) drafts: DraftLimits,
}

/// Returns the number of tokens that an answer can have after a prompt of `prompt` tokens, in a slot of `context` tokens.
pub(crate) fn answer_room(overflow: Overflow, context: u32, prompt: usize) -> u32 {
    match overflow {
        Overflow::Stop => (context as usize).saturating_sub(prompt).max(1) as u32,
        Overflow::Shift { .. } => i32::MAX as u32,
        // Only messages of the prompt are dropped.
        Overflow::Evict => context,
    }
}

/// Parses the context settings.
pub(crate) fn context_settings(fields: Fields<'_>) -> Result<ContextSettings, ApiError> {
    let keep = fields.integer("n_keep", -1..=i64::from(i32::MAX))?.unwrap_or(0);
    let discard = fields.integer("n_discard", 0..=i64::from(i32::MAX))?.unwrap_or(0);
    let overflow = match fields.text("context_policy")? {
        None | Some("stop") => Overflow::Stop,
        // -1 is llama-server's value for the whole prompt.
        Some("shift") => Overflow::Shift { keep: usize::try_from(keep).ok(), discard: discard as usize },
        Some("evict") => Overflow::Evict,
        Some(other) => {
            return Err(invalid_value("context_policy", "\"stop\", \"shift\" or \"evict\"", &Value::from(other)));
        }
    };
    let tokens = |name| fields.integer(name, 0..=i64::from(i32::MAX)).map(|tokens| tokens.map(|tokens| tokens as u32));
    let slot = fields.integer("id_slot", -1..=i64::from(i32::MAX))?;
    Ok(ContextSettings {
        slot: slot.and_then(|slot| u32::try_from(slot).ok()),
        cache_prompt: fields.flag("cache_prompt")?.unwrap_or(true),
        cache_reuse: fields.integer("n_cache_reuse", 0..=i64::from(i32::MAX))?.unwrap_or(0) as usize,
        overflow,
        drafts: DraftLimits {
            max: tokens("speculative.n_max")?,
            min: tokens("speculative.n_min")?,
            min_probability: fields.number("speculative.p_min", 0.0..=1.0)?,
        },
    })
}
