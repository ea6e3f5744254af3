//! Decides which servers are dead.
//!
//! A server is dead when its count of heartbeats has stayed the same while this server watched it for [`DEAD_AFTER`].
//! Durations are measured by this process alone, so clocks of machines and of the database do not matter. A watch that was
//! interrupted begins again: after an outage of the database, every server has time to come back.

use std::collections::HashMap;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Interval of heartbeats, and of looks at those of the others.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(3);
/// Time without a heartbeat after which a server is dead.
const DEAD_AFTER: Duration = Duration::from_secs(18);
/// Longest time between two looks; after a longer one the watch begins again.
const MAX_GAP: Duration = Duration::from_secs(9);

/// A server's count of heartbeats; `None` for a server that has runs and is not listed.
pub type Heartbeat = Option<i64>;

/// The watch over the other servers.
#[derive(Debug, Default)]
pub struct Watch {
    servers: HashMap<Uuid, (Heartbeat, Instant)>,
    looked: Option<Instant>,
}

impl Watch {
    /// Takes the present counts of all other servers; returns the servers that are dead.
    pub fn look(
        &mut self,
        counts: impl IntoIterator<Item = (Uuid, Heartbeat)>,
        now: Instant,
    ) -> Vec<(Uuid, Heartbeat)> {
        if self.looked.replace(now).is_none_or(|looked| now.duration_since(looked) > MAX_GAP) {
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
        self.servers = seen;
        dead
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks once per interval, at counts that change or not.
    fn watch(looks: u32, count: impl Fn(u32) -> Heartbeat, pause_at: Option<u32>) -> Option<u32> {
        let (mut watch, begin, server) = (Watch::default(), Instant::now(), Uuid::now_v7());
        (0..looks).find(|&look| {
            let pause = if pause_at.is_some_and(|at| look >= at) { 60 * HEARTBEAT_INTERVAL } else { Duration::ZERO };
            !watch.look([(server, count(look))], begin + look * HEARTBEAT_INTERVAL + pause).is_empty()
        })
    }

    #[test]
    fn server_without_heartbeats_is_dead_within_30_seconds() {
        let dead_at = watch(20, |_| Some(7), None).unwrap();
        assert!((dead_at + 2) * HEARTBEAT_INTERVAL <= Duration::from_secs(30));
        assert!(watch(20, |_| None, None).is_some(), "a server that is not listed");
    }

    #[test]
    fn slow_server_is_alive() {
        assert_eq!(watch(40, |look| Some(i64::from(look / 5)), None), None);
    }

    #[test]
    fn outage_of_the_database_counts_for_no_server() {
        assert_eq!(watch(10, |look| Some(i64::from(look >= 9)), Some(4)), None);
    }
}
