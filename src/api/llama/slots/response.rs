//! Results of actions on slots and stored sessions.

use crate::events::TokenId;
use serde::Serialize;
use utoipa::ToSchema;

/// The result of an action on a slot.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum SlotActionResponse {
    /// `save-state`: a snapshot.
    SaveState {
        id_slot: u32,
        n_tokens: usize,
        n_bytes: usize,
        t_ms: f64,
        /// The snapshot in base64.
        state: String,
    },
    /// `restore-state`.
    RestoreState {
        id_slot: u32,
        n_bytes_read: usize,
        /// Always true.
        success: bool,
        t_ms: f64,
    },
    /// `tokens`: the tokens of the slot.
    Tokens { id_slot: u32, n_tokens: usize, tokens: Vec<TokenId>, n_prompt_tokens_processed: usize },
    /// `context-shift`.
    ContextShift {
        /// Always true.
        success: bool,
        /// Number of tokens left.
        new_n_tokens: usize,
    },
    /// `save`: a file was written.
    Save {
        id_slot: u32,
        filename: String,
        /// Number of tokens.
        n_saved: usize,
        /// Number of bytes.
        n_written: usize,
        timings: SlotSaveTimings,
    },
    /// `restore`: a file was loaded.
    Restore {
        id_slot: u32,
        filename: String,
        /// Number of tokens.
        n_restored: usize,
        /// Number of bytes.
        n_read: usize,
        timings: SlotRestoreTimings,
    },
    /// `erase`.
    Erase {
        id_slot: u32,
        /// Number of tokens.
        n_erased: usize,
    },
}

/// The time to write a file.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct SlotSaveTimings {
    pub(super) save_ms: f64,
}

/// The time to load a file.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct SlotRestoreTimings {
    pub(super) restore_ms: f64,
}

/// The messages of a slot.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct SlotInfoResponse {
    pub(super) n_tokens: usize,
    /// The end-of-turn token; -1 for none.
    pub(super) boundary_eot: TokenId,
    pub(super) n_messages: usize,
    pub(super) messages: Vec<SlotMessageRange>,
}

/// The first and last token of a message.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct SlotMessageRange {
    /// Index of the message, from 0.
    pub(super) index: usize,
    pub(super) start: usize,
    pub(super) end: usize,
}

/// The result of an action on a stored session.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum SessionActionResponse {
    /// `save`.
    Save { id_session: i64, id_slot: u32, n_tokens: usize, n_bytes: usize, t_ms: f64 },
    /// `restore`.
    Restore {
        id_session: i64,
        id_slot: u32,
        n_bytes_read: usize,
        /// Always true.
        success: bool,
        t_ms: f64,
    },
    /// `remove`.
    Remove {
        id_session: i64,
        /// Always true.
        removed: bool,
        /// The file that was written.
        #[serde(skip_serializing_if = "Option::is_none")]
        file: Option<String>,
        /// Its size.
        #[serde(skip_serializing_if = "Option::is_none")]
        n_bytes: Option<usize>,
    },
}
