//! The text of a rendered template, with a maximum length.

/// Maximum bytes of a rendering.
pub(super) const MAX_TEXT_BYTES: usize = 64 << 20;

/// A text with a maximum length of [`MAX_TEXT_BYTES`].
#[derive(Debug, Default)]
pub(super) struct LimitedText {
    pub(super) text: Vec<u8>,
    /// True if the text would have become longer.
    pub(super) is_full: bool,
}

impl std::io::Write for LimitedText {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.text.len() + bytes.len() > MAX_TEXT_BYTES {
            self.is_full = true;
            return Err(std::io::Error::other("the text is too long"));
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
