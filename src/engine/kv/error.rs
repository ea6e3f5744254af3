//! Errors of operations on a slot's state.

use super::ses1::Ses1Error;

/// Error of an operation on a slot. The slot is unchanged, except after [`SlotError::Failed`].
#[derive(Debug, Clone, thiserror::Error)]
pub enum SlotError {
    /// The slot does not exist.
    #[error("slot {slot} does not exist; slots must be from 0 to {}", slots - 1)]
    NoSuchSlot {
        /// Requested slot.
        slot: u32,
        /// Number of slots.
        slots: u32,
    },
    /// The model has no slots.
    #[error("the model generates no text and has no slots")]
    NoSlots,
    /// The state is not valid for this slot.
    #[error(transparent)]
    State(#[from] Ses1Error),
    /// llama.cpp rejected a validated state.
    #[error("llama.cpp rejected this state; the slot is unchanged")]
    Rejected,
    /// llama.cpp could not save the state.
    #[error("llama.cpp could not save the state; the slot is unchanged")]
    NotSaved,
    /// The range to remove exceeds the tokens of the slot.
    #[error("`n_keep` + `n_discard` must be at most the slot's {tokens} tokens, got {keep} + {discard}")]
    Range {
        /// Tokens to keep.
        keep: usize,
        /// Tokens to remove.
        discard: usize,
        /// Tokens in the slot.
        tokens: usize,
    },
    /// The KV cache cannot remove these tokens, for this reason.
    #[error("tokens cannot be removed: {0}")]
    NotRemovable(&'static str),
    /// llama.cpp failed; the slot is empty.
    #[error("{0}; the slot is empty now")]
    Failed(String),
    /// The identity of the model is not known yet.
    #[error(
        "states cannot be saved or restored yet: the server reads every byte of the model once to identify it, \
         and has read {percent}%; try again in {retry_after_s} seconds"
    )]
    Hashing {
        /// Hashed part of the model, in percent.
        percent: u64,
        /// Estimated seconds until the hash is known.
        retry_after_s: u64,
    },
    /// The identity of the model cannot be determined.
    #[error("states cannot be saved or restored: the model's files cannot be read: {0}")]
    Unidentified(String),
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
}
