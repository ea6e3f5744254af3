//! What a mod wrote during one call, within what a call and a run can hold.

use super::keeper::RunContext;
use crate::events::LogLevel;
use crate::mods::ModLogLine;
use std::sync::atomic::Ordering;

/// Log lines that one call can have.
const MOST_LINES: usize = 10_000;
/// Bytes that one call can have. The worker stops long before; this is for one that does not keep to that.
const MOST_BYTES: usize = 2 << 20;

/// The lines of one call.
#[derive(Default)]
pub struct Logs {
    pub lines: Vec<ModLogLine>,
    bytes: usize,
}

impl Logs {
    /// Takes a line, if there is room. `most` is how many bytes the run can have.
    pub fn add(&mut self, log: ModLogLine, run: Option<&RunContext>, most: usize) {
        let size = log.message.len() + 1;
        if self.lines.len() >= MOST_LINES || self.bytes + size > MOST_BYTES {
            return;
        }
        self.bytes += size;
        let before = run.map_or(0, |run| run.logged.fetch_add(size, Ordering::Relaxed));
        if before + size <= most || run.is_none() {
            self.lines.push(log);
        } else if before <= most {
            let message =
                format!("the log of this mod in this run is full ({} KiB); what follows is dropped", most / 1024);
            self.lines.push(ModLogLine { level: LogLevel::Warning, message });
        }
    }
}
