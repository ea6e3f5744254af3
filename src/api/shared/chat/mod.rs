//! Chat requests, shared by all chat protocols.
//!
//! A protocol converts its body into that of a chat completion. [`ChatRequest::parse`] turns that into engine requests:
//! messages become a prompt, tools and response formats become a constraint. A [`ChatStream`] runs them and separates
//! reasoning and tool calls from text; an [`AnswerWriter`] of the protocol streams the result.

mod answer_writer;
mod conversation;
mod functions;
pub(crate) mod images;
mod request;
mod stream;

pub(crate) use answer_writer::{AnswerWriter, stream_answer_lines, stream_answers};
pub(crate) use conversation::{Conversation, InputTokensResponse, PreparedChat};
pub(crate) use request::{ChatRequest, prepare_chat};
pub(crate) use stream::{ChatDelta, ChatStream, ChatUpdate, ToolCallRef};
