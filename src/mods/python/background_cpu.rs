//! CPU time that a worker uses without a call.

use std::time::{Duration, Instant};

/// Divisor of the elapsed time without a call; the quotient is the CPU time that does not count. While calls follow each
/// other, one processor does not count: the worker itself polls for the next call.
const IDLE_SHARE: u32 = 10;

/// CPU time that a worker has used without a call, less the time that does not count.
pub struct BackgroundCpu {
    used: Duration,
    /// Time of the last update.
    updated_at: Instant,
    /// CPU time of the worker at the last update.
    cpu: Duration,
    /// Time of all calls until the last update.
    calls: Duration,
}

impl BackgroundCpu {
    /// Starts with a worker that has used the CPU time `cpu`. `calls` is the time of all calls so far.
    pub fn new(now: Instant, cpu: Duration, calls: Duration) -> Self {
        Self { used: Duration::ZERO, updated_at: now, cpu, calls }
    }

    /// Returns the CPU time that the worker has used without a call. Time of calls that was not used is not saved for
    /// later updates.
    pub fn update(&mut self, now: Instant, cpu: Duration, calls: Duration) -> Duration {
        let new = cpu.saturating_sub(self.cpu).saturating_sub(calls.saturating_sub(self.calls));
        let elapsed = now.saturating_duration_since(self.updated_at);
        let free = if calls > self.calls { elapsed } else { elapsed / IDLE_SHARE };
        self.used = (self.used + new).saturating_sub(free);
        (self.updated_at, self.cpu, self.calls) = (now, cpu, calls);
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::BackgroundCpu;
    use std::time::{Duration, Instant};

    /// Returns the CPU time without a call after updates, each with the elapsed, the CPU and the call time since the one
    /// before, in milliseconds.
    fn used(updates: &[(u64, u64, u64)]) -> u64 {
        let (mut now, mut cpu, mut calls) = (Instant::now(), Duration::from_secs(7), Duration::from_secs(3));
        let mut background = BackgroundCpu::new(now, cpu, calls);
        let mut used = Duration::ZERO;
        for &(elapsed, of_cpu, of_calls) in updates {
            now += Duration::from_millis(elapsed);
            cpu += Duration::from_millis(of_cpu);
            calls += Duration::from_millis(of_calls);
            used = background.update(now, cpu, calls);
        }
        used.as_millis() as u64
    }

    #[test]
    fn cpu_time_between_calls_adds_up() {
        assert_eq!(used(&[(1000, 1000, 1000)]), 0, "during calls");
        assert_eq!(used(&[(1000, 80, 0)]), 0, "below the free share");
        assert_eq!(used(&[(1000, 1000, 0)]), 900);
        assert_eq!(used(&[(1000, 900, 100); 9]), 0, "one processor between calls");
        assert_eq!(used(&[(1000, 4000, 100), (1000, 0, 0)]), 2800, "several processors between calls");
    }

    #[test]
    fn unused_time_of_calls_is_not_saved() {
        assert_eq!(used(&[(1000, 0, 1000), (1000, 1000, 0)]), 900);
    }
}
