//! Conversations in the engine: the messages that can be dropped from a full context, and the history that a slot keeps
//! so that the client's next request finds its state again.
//!
//! All positions here are computed from token ids and the prompt's [`Span`](crate::events::Span)s, not from sums of
//! counts that could drift.
//! The code is independent of the chat template. A prompt without spans is not a conversation, and nothing is dropped
//! from it.

pub mod align;
mod codec;
mod eviction;
pub mod history;
pub mod spans;

pub use align::{Alignment, align};
pub use eviction::{droppable_parts, evicted_messages, select_parts};
pub use history::SlotHistory;
pub use spans::eviction_target;
