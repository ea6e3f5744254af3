//! Output of a worker that bypassed Python's streams.

use std::io::{self, Read};
use std::sync::{Mutex, PoisonError};

/// Maximum bytes that are kept.
const MAX_BYTES: usize = 16 * 1024;

/// Last part of the output that bypassed Python's streams and went directly to the descriptors 1 and 2.
#[derive(Default)]
pub struct StrayOutput {
    bytes: Vec<u8>,
    /// Total bytes written.
    pub total: usize,
}

impl StrayOutput {
    /// Returns the output after the first `total` bytes, as far as it is kept.
    pub fn since(&self, total: usize) -> String {
        let new = self.total.saturating_sub(total).min(self.bytes.len());
        String::from_utf8_lossy(&self.bytes[self.bytes.len() - new..]).trim_end().to_owned()
    }
}

/// Collects output until the worker has ended.
pub fn collect(mut from: io::PipeReader, into: &Mutex<StrayOutput>) {
    let mut chunk = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut chunk) {
        let mut stray_output = into.lock().unwrap_or_else(PoisonError::into_inner);
        stray_output.bytes.extend_from_slice(&chunk[..count]);
        stray_output.total += count;
        let over = stray_output.bytes.len().saturating_sub(MAX_BYTES);
        stray_output.bytes.drain(..over);
    }
}
