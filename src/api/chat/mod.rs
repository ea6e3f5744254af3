//! The one way of a conversation, whichever dialect it came in.
//!
//! A dialect writes what it was asked as the body of a chat completion. [`Asked::read`] makes the engine's requests of it:
//! messages to a prompt, tools and formats to a constraint, and how the answer is to be read. A [`Talk`] runs them and
//! says what was heard, thoughts and calls told from text; [`stream`] carries that to a client as server-sent events.

mod ask;
mod conversation;
pub(super) mod stream;
mod talk;

pub(super) use ask::Asked;
pub(super) use conversation::{Conversation, Prepared};
pub(super) use talk::{CallOf, Heard, Refused, Said, Talk};
