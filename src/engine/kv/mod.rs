//! KV state of slots: history of the conversation, prefix matches, host cache, checkpoints and snapshots.
//!
//! This module does not depend on runs or clients; callers pass tokens and numbers.

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
