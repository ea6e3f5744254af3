//! Frames between the server and a worker: `u32` header length, `u32` body length, header (JSON), body; little-endian.

const PREFIX: usize = 8;
/// Maximum length of a header in bytes; a prompt of a million tokens fits.
const MAX_HEADER: usize = 16 << 20;
/// Maximum length of a body in bytes.
const MAX_BODY: usize = 64 << 20;

/// One message between server and worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Header: JSON, not parsed yet.
    pub header: Vec<u8>,
    /// Body: binary data.
    pub body: Vec<u8>,
}

/// Error for a frame that exceeds the limits of the protocol.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "a frame has a header of {header} bytes and a body of {body} bytes; the maximums are {MAX_HEADER} and {MAX_BODY} bytes"
)]
pub struct FrameTooLong {
    header: usize,
    body: usize,
}

/// Encodes a frame.
pub fn encode(header: &[u8], body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PREFIX + header.len() + body.len());
    bytes.extend_from_slice(&(header.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
    bytes.extend_from_slice(header);
    bytes.extend_from_slice(body);
    bytes
}

/// Returns header and body if the bytes are exactly one frame.
pub fn split_frame(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (prefix, rest) = bytes.split_first_chunk::<PREFIX>()?;
    let (header, body) = lengths(*prefix);
    (header <= MAX_HEADER && body <= MAX_BODY && rest.len() == header + body).then(|| rest.split_at(header))
}

fn lengths(prefix: [u8; PREFIX]) -> (usize, usize) {
    let length = u64::from_le_bytes(prefix);
    ((length & u64::from(u32::MAX)) as usize, (length >> 32) as usize)
}

/// Decoder of frames from a stream of bytes.
#[derive(Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next frame, or `None` until it is complete.
    ///
    /// # Errors
    /// [`FrameTooLong`]; the rest of the stream cannot be decoded.
    pub fn next(&mut self) -> Result<Option<Frame>, FrameTooLong> {
        let Some((prefix, rest)) = self.buffer.split_first_chunk::<PREFIX>() else { return Ok(None) };
        let (header, body) = lengths(*prefix);
        if header > MAX_HEADER || body > MAX_BODY {
            return Err(FrameTooLong { header, body });
        }
        if rest.len() < header + body {
            return Ok(None);
        }
        let frame = Frame { header: rest[..header].to_vec(), body: rest[header..header + body].to_vec() };
        self.buffer.drain(..PREFIX + header + body);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::{Decoder, Frame, encode};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn decoder_reassembles_split_frames(frames: Vec<(Vec<u8>, Vec<u8>)>, cuts in prop::collection::vec(1usize..20, 1..50)) {
            let bytes: Vec<u8> = frames.iter().flat_map(|(header, body)| encode(header, body)).collect();
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let (now, later) = rest.split_at((*cuts.next().unwrap()).min(rest.len()));
                decoder.push(now);
                while let Some(Frame { header, body }) = decoder.next().unwrap() {
                    found.push((header, body));
                }
                rest = later;
            }
            prop_assert_eq!(found, frames);
        }

        #[test]
        fn decoder_never_panics_on_arbitrary_bytes(bytes: Vec<u8>) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(frame)) = decoder.next() {
                prop_assert!(frame.header.len() + frame.body.len() <= bytes.len());
            }
        }
    }

    #[test]
    fn oversized_frame_is_rejected_by_its_prefix() {
        let mut decoder = Decoder::default();
        decoder.push(&[255; 8]);
        assert!(decoder.next().is_err());
    }
}
