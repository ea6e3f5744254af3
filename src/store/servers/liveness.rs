//! Decides which servers are dead.
//!
//! A server is dead when its count of heartbeats has stayed the same while this server watched it for [`DEAD_AFTER`].
//! Durations are measured in this process, so clocks of other machines do not matter. After an interruption, such as an
//! outage of the database, all servers count as alive and have time to come back.

use std::collections::HashMap;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Interval of heartbeats, and of checks of the other servers' heartbeats.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
/// Time without a heartbeat after which a server is dead.
const DEAD_AFTER: Duration = Duration::from_secs(18);
/// Maximum time between two checks. After a longer time all servers count as alive again.
const MAX_GAP: Duration = Duration::from_secs(9);

/// A server's count of heartbeats; `None` for a server that has running runs and no row in the list of servers.
pub type HeartbeatCount = Option<i64>;

/// The heartbeats of the other servers.
#[derive(Debug, Default)]
pub struct HeartbeatMonitor {
    servers: HashMap<Uuid, (HeartbeatCount, Instant)>,
    last_check: Option<Instant>,
    has_left: bool,
}

impl HeartbeatMonitor {
    /// Records the current heartbeats of all other servers. Returns the dead servers.
    pub fn check(
        &mut self,
        counts: impl IntoIterator<Item = (Uuid, HeartbeatCount)>,
        now: Instant,
    ) -> Vec<(Uuid, HeartbeatCount)> {
        if self.last_check.replace(now).is_none_or(|last| now.duration_since(last) > MAX_GAP) {
            self.servers.clear();
        }
        let mut seen = HashMap::new();
        let mut dead = Vec::new();
        for (server, count) in counts {
            let since =
                self.servers.get(&server).filter(|(before, _)| *before == count).map_or(now, |(_, since)| *since);
            seen.insert(server, (count, since));
            if now.duration_since(since) >= DEAD_AFTER {
                dead.push((server, count));
            }
        }
        self.has_left = self.servers.keys().any(|server| !seen.contains_key(server));
        self.servers = seen;
        dead
    }

    /// Returns true if the latest check has no heartbeat of a server that the previous one had.
    pub fn has_left(&self) -> bool {
        self.has_left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::system;

    /// Checks once per interval. Returns the first check that reports the server as dead.
    fn first_dead_check(checks: u32, count: impl Fn(u32) -> HeartbeatCount, pause_at: Option<u32>) -> Option<u32> {
        let (mut monitor, begin, server) = (HeartbeatMonitor::default(), Instant::now(), system::new_id());
        (0..checks).find(|&check| {
            let pause = if pause_at.is_some_and(|at| check >= at) { 60 * HEARTBEAT_INTERVAL } else { Duration::ZERO };
            !monitor.check([(server, count(check))], begin + check * HEARTBEAT_INTERVAL + pause).is_empty()
        })
    }

    #[test]
    fn server_without_heartbeats_is_dead_within_30_seconds() {
        let dead_at = first_dead_check(20, |_| Some(7), None).unwrap();
        assert!((dead_at + 2) * HEARTBEAT_INTERVAL <= Duration::from_secs(30));
        assert!(first_dead_check(20, |_| None, None).is_some(), "a server that is not listed");
    }

    #[test]
    fn server_that_left_the_list_is_reported_once() {
        let (mut monitor, begin, servers) = (HeartbeatMonitor::default(), Instant::now(), [1, 2].map(Uuid::from_u128));
        let mut check = |listed: &[Uuid], after: u32| {
            let counts = listed.iter().map(|&server| (server, Some(i64::from(after))));
            monitor.check(counts, begin + after * HEARTBEAT_INTERVAL);
            monitor.has_left()
        };
        assert_eq!([check(&servers, 0), check(&servers, 1)], [false, false]);
        assert_eq!([check(&servers[..1], 2), check(&servers[..1], 3), check(&servers, 4)], [true, false, false]);
    }

    #[test]
    fn slow_server_is_alive() {
        assert_eq!(first_dead_check(40, |check| Some(i64::from(check / 5)), None), None);
    }

    #[test]
    fn database_outage_makes_no_server_dead() {
        assert_eq!(first_dead_check(10, |check| Some(i64::from(check >= 9)), Some(4)), None);
    }
}
