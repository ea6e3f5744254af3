//! KV state of slots: what a slot keeps of a conversation, prefix matches, states in host memory, checkpoints, and
//! snapshots.
//!
//! Nothing here knows runs or clients; callers pass tokens and numbers.

pub mod checkpoints;
pub mod conversation;
pub mod error;
pub mod host_cache;
pub mod identity;
pub mod prompt;
pub mod removal;
pub mod ses1;
pub mod slots;
pub mod snapshot;
