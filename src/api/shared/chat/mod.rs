//! Chat requests, shared by all chat protocols.
//!
//! A protocol converts its body into that of a chat completion. [`ChatRequest::parse`] turns that into engine requests:
//! messages become a prompt, tools and response formats become a constraint. A [`ChatStream`] runs them and separates
//! reasoning and tool calls from text; [`sse`] sends the result as server-sent events or
//! as JSON lines.

mod conversation;
mod functions;
pub(crate) mod images;
mod request;
pub(crate) mod sse;
mod stream;

pub(crate) use conversation::{Conversation, InputTokensResponse, PreparedChat};
pub(crate) use request::ChatRequest;
pub(crate) use stream::{ChatDelta, ChatStream, ChatUpdate, ToolCallRef};
