//! Conversations in slots: the messages that can be dropped from a full context, and the history that matches the
//! client's next request with the slot's state.
//!
//! All positions are computed from token ids and the prompt's [`Span`](crate::events::Span)s, independently of the chat
//! template. A prompt without spans is not a conversation; nothing is dropped from it.

pub mod align;
mod codec;
mod eviction;
pub mod history;
pub mod spans;

pub use align::{Alignment, align};
pub use eviction::{droppable_parts, evicted_messages, select_parts};
pub use history::SlotHistory;
pub use spans::eviction_target;
