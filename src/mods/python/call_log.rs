//! Log lines of one call, within the limits of a call and a run.

use super::job::RunContext;
use crate::events::LogLevel;
use crate::mods::ModLogLine;
use std::sync::atomic::Ordering;

/// Maximum log lines of one call.
const MAX_LINES: usize = 10_000;
/// Maximum log bytes of one call. The SDK stops earlier; this limit is for a worker that ignores it.
const MAX_BYTES: usize = 2 << 20;

/// Log lines of one call.
#[derive(Default)]
pub struct CallLog {
    pub lines: Vec<ModLogLine>,
    bytes: usize,
}

impl CallLog {
    /// Adds a line if there is room, or one warning when the log of the run is full. `max` is the maximum number of
    /// bytes of the mod's log in the run.
    pub fn add(&mut self, log: ModLogLine, run: Option<&RunContext>, max: usize) {
        let size = log.message.len() + 1;
        if self.lines.len() >= MAX_LINES || self.bytes + size > MAX_BYTES {
            return;
        }
        self.bytes += size;
        let before = run.map_or(0, |run| run.logged.fetch_add(size, Ordering::Relaxed));
        if before + size <= max || run.is_none() {
            self.lines.push(log);
        } else if before <= max {
            let message =
                format!("the log of this mod in this run is full ({} KiB); further lines are dropped", max / 1024);
            self.lines.push(ModLogLine { level: LogLevel::Warning, message });
        }
    }
}
