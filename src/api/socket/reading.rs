//! From frames to messages.

use super::{Close, Message};
use bytes::BytesMut;
use std::time::{Duration, Instant};
use yawc::close::CloseCode;
use yawc::{Frame, OpCode};

/// How long the pieces of one message may take.
const LONGEST_MESSAGE: Duration = Duration::from_secs(30);

/// Puts messages together from frames.
pub(super) struct Assembly {
    limit: usize,
    begun: Option<Begun>,
}

struct Begun {
    text: bool,
    bytes: BytesMut,
    at: Instant,
}

impl Assembly {
    /// For messages of at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, begun: None }
    }

    /// Takes a frame; gives the message that it completes.
    ///
    /// # Errors
    /// How the connection is to be closed: the message is too large, no UTF-8, or its pieces do not belong together.
    pub(super) fn take(&mut self, frame: Frame) -> Result<Option<Message>, Close> {
        let (opcode, last, payload) = frame.into_parts();
        let text = match opcode {
            OpCode::Text => true,
            OpCode::Binary => false,
            OpCode::Continuation => return self.go_on(&payload, last),
            OpCode::Ping | OpCode::Pong | OpCode::Close => return Ok(None),
        };
        if self.begun.is_some() {
            return Err(protocol("a message began before the one before it had ended"));
        }
        self.check_size(payload.len())?;
        if last {
            return if text { utf8(payload.into()).map(Some) } else { Ok(Some(Message::Binary(payload))) };
        }
        self.begun = Some(Begun { text, bytes: BytesMut::from(payload), at: Instant::now() });
        Ok(None)
    }

    fn go_on(&mut self, piece: &[u8], last: bool) -> Result<Option<Message>, Close> {
        let Some(mut begun) = self.begun.take() else {
            return Err(protocol("a piece of a message came, and no message had begun"));
        };
        self.check_size(begun.bytes.len() + piece.len())?;
        if begun.at.elapsed() > LONGEST_MESSAGE {
            return Err(Close::policy("the pieces of a message took more than 30 seconds"));
        }
        begun.bytes.extend_from_slice(piece);
        if !last {
            self.begun = Some(begun);
            return Ok(None);
        }
        let bytes = begun.bytes.freeze();
        if begun.text { utf8(bytes.into()).map(Some) } else { Ok(Some(Message::Binary(bytes))) }
    }

    fn check_size(&self, size: usize) -> Result<(), Close> {
        if size <= self.limit {
            return Ok(());
        }
        Err(Close::too_large(&format!("a message may have {} bytes; see --max-message", self.limit)))
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
    fn pieces_become_a_message_with_pings_between_them() {
        let mut assembly = Assembly::new(6);
        assert_eq!(assembly.take(Frame::text("ab").with_fin(false)), Ok(None));
        assert_eq!(assembly.take(Frame::ping("")), Ok(None));
        assert_eq!(assembly.take(Frame::continuation("\u{e9}").with_fin(false)), Ok(None));
        assert_eq!(assembly.take(Frame::continuation("ef")), Ok(Some(text("ab\u{e9}ef"))));
        assert_eq!(assembly.take(Frame::text("gh")), Ok(Some(text("gh"))));
    }

    #[test]
    fn what_is_no_message_closes_the_connection() {
        let code = |frames: Vec<Frame>| {
            let mut assembly = Assembly::new(4);
            let closed = frames.into_iter().find_map(|frame| assembly.take(frame).err());
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
