//! What a fold is made of: rows, marks, counts, points on the time line.

use crate::events::TokenId;
use serde::{Deserialize, Serialize};

/// `TokenRow::died` of a token that stands at the end of the run.
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
    /// A mod's action concerned it: edited its logits, forced it, or took it back.
    pub const TOUCHED: u8 = 16;
    /// A mod raised at one of its events, or ended the run there with an error.
    pub const ERROR: u8 = 32;
    /// Drawn by the sampler.
    pub const SAMPLED: u8 = 64;
}

/// One token instance. Visible after event `n` ⇔ `born <= n < died`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenRow {
    /// Vocabulary id; -1 where a foreign trace does not say.
    pub token: i32,
    /// Its text; "" for an incomplete piece of UTF-8 whose bytes join a later token.
    pub text: String,
    /// Index in the sequence while it is there.
    pub pos: u32,
    /// `sequence_order` of the event since which it is there.
    pub born: u32,
    /// First event at which it is gone; [`NEVER`].
    pub died: u32,
    /// Natural logarithm of its probability in the model's full distribution.
    pub logprob: Option<f32>,
    /// 1 for the model's most probable token.
    pub rank: Option<u32>,
    /// Entropy of the distribution it stood in, in bits.
    pub entropy: Option<f32>,
    /// See [`flags`].
    pub flags: u8,
    /// Milliseconds since the token before it, saturating.
    pub dt_ms: u16,
}

/// Something on the time line that is not a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The event.
    pub seq: u32,
    /// What it is.
    pub kind: MarkKind,
    /// The mod.
    pub mod_name: String,
    /// What to write next to it, e.g. `Backtrack 3`.
    pub label: String,
    /// Index of the mod call.
    pub call_index: u32,
}

/// What a [`Mark`] marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// An action other than `Noop`.
    Action,
    /// A mod raised.
    Error,
    /// A log line.
    Log,
}

/// Counts that a run list shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Counters {
    /// Tokens of the prompt, as it stands.
    pub prompt_tokens: u32,
    /// Generated tokens that stand.
    pub tokens_out: u32,
    /// Generated tokens that a `Backtrack` removed.
    pub backtracked: u32,
    /// Tokens that mods appended, whether they stand or not.
    pub forced: u32,
    /// Calls that raised, and `EmitError` actions.
    pub errors: u32,
    /// Actions other than `Noop`.
    pub actions: u32,
}

/// An event as the time line needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventPoint {
    /// 0 `Prefilled`, 1 `ForwardPass`, 2 `Sampled`, 3 `Added`.
    pub kind: u8,
    /// Its step.
    pub step: u32,
    /// Milliseconds since the run's first event; 0 if unknown.
    pub time_ms: u32,
}

impl TokenRow {
    /// Whether it is an end-of-generation token, which is no part of the answer's text.
    pub(crate) fn ends_generation(&self) -> bool {
        self.flags & (flags::STOP | flags::SPECIAL) == flags::STOP | flags::SPECIAL
    }
}

/// The text of a token that is known only by its id, or not even by that.
pub(super) fn placeholder_text(token: TokenId) -> String {
    if token < 0 { "⟨?⟩".to_owned() } else { format!("⟨{token}⟩") }
}

/// [`flags::SPECIAL`] for the spellings that vocabularies give to control tokens.
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
