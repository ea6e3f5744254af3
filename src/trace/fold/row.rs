//! The parts of a fold: rows, marks, counters, points on the timeline.

use crate::events::TokenId;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Value of `TokenRow::removed_at` for a token that is visible at the end of the run.
pub const NEVER: u32 = u32::MAX;

/// Bits of [`TokenRow::flags`].
pub mod flags {
    /// Part of the prompt.
    pub const PROMPT: u8 = 1;
    /// Appended by a mod.
    pub const FORCED: u8 = 2;
    /// Ends the generation: an end-of-generation token, or the token that completed a stop string.
    pub const STOP: u8 = 4;
    /// A special or control token.
    pub const SPECIAL: u8 = 8;
    /// An action of a mod edited its logits, forced it, inserted it into the prompt, removed it, or ended the run after
    /// it.
    pub const TOUCHED: u8 = 16;
    /// A mod raised an exception at one of its events, or ended the run there with an error.
    pub const ERROR: u8 = 32;
    /// Appended after sampling, not by a mod.
    pub const SAMPLED: u8 = 64;
}

/// One token instance. Visible after event `n` ⇔ `added_at <= n < removed_at`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRow {
    /// Token id; -1 if a trace of another engine does not contain it.
    pub token: i32,
    /// Its text; "" for an incomplete part of a UTF-8 character whose bytes join a later token. Rows share it, because a
    /// small trace of another engine may append the same token again and again.
    pub text: Arc<str>,
    /// Index among the visible tokens. Tokens after evicted ones have a lower index in the model's context.
    pub pos: u32,
    /// `sequence_order` of the first event after which it is visible.
    pub added_at: u32,
    /// First event after which it is invisible, or [`NEVER`].
    pub removed_at: u32,
    /// Natural logarithm of its probability in the model's full distribution.
    pub logprob: Option<f32>,
    /// 1 for the model's most probable token.
    pub rank: Option<u32>,
    /// Entropy of its distribution, in bits.
    pub entropy: Option<f32>,
    /// Bits of [`flags`].
    pub flags: u8,
    /// Microseconds since the token before it, saturating.
    pub dt_us: u32,
}

/// An entry of the timeline that is not a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// `sequence_order` of the event.
    pub seq: u32,
    /// The kind of the entry.
    pub kind: MarkKind,
    /// Name of the mod, or `engine` for an eviction.
    pub mod_name: String,
    /// Displayed text, e.g. `Backtrack 3`.
    pub label: String,
    /// Index of the mod call.
    pub call_index: u32,
    /// Ranges of the context that an eviction removed; empty for one before the prompt. See [`crate::events::Eviction`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<(u32, u32)>,
}

/// The kind of a [`Mark`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// An action other than `Noop`.
    Action,
    /// An exception of a mod.
    Error,
    /// A log line, or an eviction.
    Log,
}

/// Counters that a run list shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Counters {
    /// Tokens of the current prompt.
    pub prompt_tokens: u32,
    /// Visible generated tokens, without an end-of-generation token.
    pub tokens_out: u32,
    /// Generated tokens that a `Backtrack` removed.
    pub backtracked: u32,
    /// Tokens that mods appended, visible or not.
    pub forced: u32,
    /// Calls with an exception, and `EmitError` actions.
    pub errors: u32,
    /// Actions other than `Noop`.
    pub actions: u32,
}

/// An event as a point on the timeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventPoint {
    /// 0 `Prefilled`, 1 `ForwardPass`, 2 `Sampled`, 3 `Added`.
    pub kind: u8,
    /// Step of the event.
    pub step: u32,
    /// Milliseconds since the run's first event; 0 if unknown.
    pub time_ms: u32,
}

impl TokenRow {
    /// Returns true for an end-of-generation token, which is not part of the answer's text.
    pub(crate) fn ends_generation(&self) -> bool {
        self.flags & (flags::STOP | flags::SPECIAL) == flags::STOP | flags::SPECIAL
    }
}

/// Returns the text that a client received according to the rows of the answer: without control tokens, and without the stop
/// string that ended it. It is an estimate, because only the engine knows which control tokens are visible.
pub fn client_text<'a>(rows: impl Iterator<Item = &'a TokenRow>, stop_string: Option<&str>) -> String {
    let mut text: String = rows.filter(|row| row.flags & flags::SPECIAL == 0).map(|row| &*row.text).collect();
    if let Some(end) = stop_string.and_then(|stop| text.find(stop)) {
        text.truncate(end);
    }
    text
}

/// Returns a placeholder for the text of a token with an unknown text or id.
pub(super) fn placeholder_text(token: TokenId) -> Arc<str> {
    if token < 0 { "⟨?⟩".into() } else { format!("⟨{token}⟩").into() }
}

/// Returns [`flags::SPECIAL`] for the usual notations of control tokens.
pub(super) fn special_flag(text: &str) -> u8 {
    const NAMES: [&str; 12] = [
        "<s>",
        "</s>",
        "<bos>",
        "<eos>",
        "<pad>",
        "<unk>",
        "<mask>",
        "<start_of_turn>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "<|>",
    ];
    let bars = text.starts_with("<|") && text.ends_with("|>");
    let wide_bars = text.starts_with("<｜") && text.ends_with("｜>");
    if bars || wide_bars || NAMES.contains(&text) { flags::SPECIAL } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_text_lacks_control_tokens_and_stop_string() {
        let row = |text: &str| TokenRow {
            token: 1,
            text: text.into(),
            pos: 0,
            added_at: 0,
            removed_at: NEVER,
            logprob: None,
            rank: None,
            entropy: None,
            flags: flags::SAMPLED | special_flag(text),
            dt_us: 0,
        };
        let rows = ["Hel", "<|im_start|>", "lo E", "ND!", "</s>"].map(row);
        assert_eq!(client_text(rows.iter(), None), "Hello END!");
        assert_eq!(client_text(rows.iter(), Some("END")), "Hello ");
    }
}
