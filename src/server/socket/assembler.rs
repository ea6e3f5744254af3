//! Assembles frames into messages.

use super::activity::MESSAGE_TIMEOUT;
use super::{Close, Message};
use bytes::BytesMut;
use std::time::Instant;
use yawc::close::CloseCode;
use yawc::{Frame, OpCode};

/// Assembler of frames into messages.
pub(super) struct Assembler {
    limit: usize,
    partial: Option<PartialMessage>,
}

struct PartialMessage {
    text: bool,
    bytes: BytesMut,
    started_at: Instant,
}

impl Assembler {
    /// Creates an assembler for messages of up to `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, partial: None }
    }

    /// Adds a frame; returns the message that it completes.
    ///
    /// # Errors
    /// The close frame: the message is too large or not UTF-8, or its frames are out of order.
    pub(super) fn add_frame(&mut self, frame: Frame) -> Result<Option<Message>, Close> {
        let (opcode, last, payload) = frame.into_parts();
        let text = match opcode {
            OpCode::Text => true,
            OpCode::Binary => false,
            OpCode::Continuation => return self.add_continuation(&payload, last),
            OpCode::Ping | OpCode::Pong | OpCode::Close => return Ok(None),
        };
        if self.partial.is_some() {
            return Err(protocol("a message started before the previous one was complete"));
        }
        self.check_size(payload.len())?;
        if last {
            return if text { utf8(payload.into()).map(Some) } else { Ok(Some(Message::Binary(payload))) };
        }
        self.partial = Some(PartialMessage { text, bytes: BytesMut::from(payload), started_at: Instant::now() });
        Ok(None)
    }

    fn add_continuation(&mut self, piece: &[u8], last: bool) -> Result<Option<Message>, Close> {
        let Some(mut partial) = self.partial.take() else {
            return Err(protocol("a continuation frame arrived without a started message"));
        };
        self.check_size(partial.bytes.len() + piece.len())?;
        if partial.started_at.elapsed() > MESSAGE_TIMEOUT {
            return Err(Close::policy("a fragmented message took more than 10 minutes"));
        }
        partial.bytes.extend_from_slice(piece);
        if !last {
            self.partial = Some(partial);
            return Ok(None);
        }
        let bytes = partial.bytes.freeze();
        if partial.text { utf8(bytes.into()).map(Some) } else { Ok(Some(Message::Binary(bytes))) }
    }

    fn check_size(&self, size: usize) -> Result<(), Close> {
        if size <= self.limit { Ok(()) } else { Err(self.too_large()) }
    }

    /// Returns the close frame for a message above the limit.
    pub(super) fn too_large(&self) -> Close {
        Close::too_large(&format!("a message may have at most {} bytes; see --max-message", self.limit))
    }
}

fn utf8(bytes: Vec<u8>) -> Result<Message, Close> {
    let invalid = |_| Close::new(CloseCode::Invalid, "a text message must be UTF-8");
    String::from_utf8(bytes).map(Message::Text).map_err(invalid)
}

fn protocol(reason: &str) -> Close {
    Close::new(CloseCode::Protocol, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(message: &str) -> Message {
        Message::Text(message.to_owned())
    }

    #[test]
    fn fragments_with_pings_between_become_one_message() {
        let mut assembler = Assembler::new(6);
        assert_eq!(assembler.add_frame(Frame::text("ab").with_fin(false)), Ok(None));
        assert_eq!(assembler.add_frame(Frame::ping("")), Ok(None));
        assert_eq!(assembler.add_frame(Frame::continuation("\u{e9}").with_fin(false)), Ok(None));
        assert_eq!(assembler.add_frame(Frame::continuation("ef")), Ok(Some(text("ab\u{e9}ef"))));
        assert_eq!(assembler.add_frame(Frame::text("gh")), Ok(Some(text("gh"))));
    }

    #[test]
    fn invalid_frames_close_the_connection() {
        let code = |frames: Vec<Frame>| {
            let mut assembler = Assembler::new(4);
            let closed = frames.into_iter().find_map(|frame| assembler.add_frame(frame).err());
            closed.map(|close| u16::from(close.code))
        };
        assert_eq!(code(vec![Frame::text("12345")]), Some(1009));
        assert_eq!(code(vec![Frame::text("123").with_fin(false), Frame::continuation("45")]), Some(1009));
        assert_eq!(code(vec![Frame::text(&b"\xff"[..])]), Some(1007));
        assert_eq!(code(vec![Frame::continuation("x")]), Some(1002));
        assert_eq!(code(vec![Frame::text("1").with_fin(false), Frame::text("2")]), Some(1002));
        assert_eq!(code(vec![Frame::binary(&b"\xff"[..])]), None);
    }
}
