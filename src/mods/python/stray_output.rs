//! Output of a worker that bypassed Python's streams.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io::{self, PipeReader, Read};
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

/// Maximum bytes that are kept.
const MAX_BYTES: usize = 16 * 1024;
/// Maximum reads at once; together they empty a full pipe. A worker that writes all the time must not delay its calls.
const MAX_READS: usize = 16;

/// Last part of the output that bypassed Python's streams and went directly to the descriptors 1 and 2.
pub struct StrayOutput {
    pipe: PipeReader,
    bytes: Vec<u8>,
    /// Total bytes written.
    pub total: usize,
    /// Total bytes at the end of the last call.
    call_end: usize,
}

impl StrayOutput {
    /// Creates an empty output, which is read from the pipe.
    ///
    /// # Errors
    /// The pipe cannot be made nonblocking.
    pub fn new(pipe: PipeReader) -> io::Result<Self> {
        fcntl(&pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok(Self { pipe, bytes: Vec::new(), total: 0, call_end: 0 })
    }

    /// Reads the output that was written. Returns false at its end.
    pub fn read(&mut self) -> bool {
        let mut chunk = [0; 4096];
        for _ in 0..MAX_READS {
            match self.pipe.read(&mut chunk) {
                Ok(0) => return false,
                Ok(count) => self.push(&chunk[..count]),
                Err(error) => return matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
            }
        }
        true
    }

    fn push(&mut self, output: &[u8]) {
        self.bytes.extend_from_slice(output);
        self.total += output.len();
        let over = self.bytes.len().saturating_sub(MAX_BYTES);
        self.bytes.drain(..over);
    }

    /// Marks the end of a call. Output until then does not explain a failure of a later call, which may be of another run.
    pub fn end_call(&mut self) {
        self.read();
        self.call_end = self.total;
    }

    /// Returns the output since the end of the last call, as far as it is kept.
    pub fn since_last_call(&self) -> String {
        self.since(self.call_end)
    }

    /// Returns the output after the first `total` bytes, as far as it is kept.
    pub fn since(&self, total: usize) -> String {
        let new = self.total.saturating_sub(total).min(self.bytes.len());
        String::from_utf8_lossy(&self.bytes[self.bytes.len() - new..]).trim_end().to_owned()
    }
}

/// Collects output until the worker has ended. `pipe` is a second handle of the output's pipe.
pub fn collect(pipe: &PipeReader, into: &Mutex<StrayOutput>) {
    loop {
        let result = poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
        let is_ready = result.is_ok() || result == Err(Errno::EINTR);
        if !is_ready || !into.lock().unwrap_or_else(PoisonError::into_inner).read() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::StrayOutput;
    use std::io::Write;

    #[test]
    fn output_of_earlier_calls_is_separate() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut output = StrayOutput::new(reader).unwrap();
        writer.write_all(b"first\n").unwrap();
        assert!(output.read());
        assert_eq!(output.since_last_call(), "first");
        writer.write_all(b"second\n").unwrap();
        output.end_call();
        assert_eq!(output.since_last_call(), "");
        writer.write_all(b"third\n").unwrap();
        drop(writer);
        assert!(!output.read());
        assert_eq!((output.since_last_call().as_str(), output.since(0).as_str()), ("third", "first\nsecond\nthird"));
    }
}
