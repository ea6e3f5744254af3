//! Rate limits for new runs per key and per address. A middleware of [`super::auth`] checks requests that start runs;
//! WebSockets check each run.

use super::{ApiError, Caller, ErrorCode, ErrorKind};
use crate::config::RateConfig;
use governor::clock::{Clock, DefaultClock};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::num::NonZeroU32;
use std::time::Duration;

/// Number of clients after which idle ones are removed.
const MAX_TRACKED_CLIENTS: usize = 10_000;

/// Login attempts per minute and address, with a burst of the same size.
const MAX_LOGINS_PER_MINUTE: NonZeroU32 = NonZeroU32::MIN.saturating_add(9);

/// Rate limits per key and per address.
pub(crate) struct RateLimits {
    logins: RateLimit<IpAddr>,
    keys: Option<RateLimit<String>>,
    addresses: Option<RateLimit<IpAddr>>,
}

struct RateLimit<K: Hash + Eq + Clone> {
    per_minute: NonZeroU32,
    limiter: DefaultKeyedRateLimiter<K>,
}

impl RateLimits {
    pub(crate) fn new(config: RateConfig) -> Self {
        Self {
            logins: RateLimit::new(MAX_LOGINS_PER_MINUTE, None),
            keys: config.per_key.map(|rate| RateLimit::new(rate, config.burst)),
            addresses: config.per_address.map(|rate| RateLimit::new(rate, config.burst)),
        }
    }

    /// Counts a run that the client starts.
    ///
    /// # Errors
    /// 429 if the limit is exceeded.
    pub(crate) fn check(&self, caller: Option<&Caller>, address: Option<SocketAddr>) -> Result<(), ApiError> {
        // The address first, so that requests beyond its limit do not count against the key.
        if let (Some(rate), Some(address)) = (&self.addresses, address) {
            rate.check(&network(address.ip()), "this address", "start", "runs")?;
        }
        if let (Some(rate), Some(label)) = (&self.keys, caller.and_then(|caller| caller.label.as_ref())) {
            rate.check(label, "this key", "start", "runs")?;
        }
        Ok(())
    }

    /// Counts a login attempt.
    ///
    /// # Errors
    /// 429 if the limit is exceeded.
    pub(crate) fn check_login(&self, address: SocketAddr) -> Result<(), ApiError> {
        self.logins.check(&network(address.ip()), "this address", "try", "logins")
    }
}

impl<K: Hash + Eq + Clone> RateLimit<K> {
    fn new(per_minute: NonZeroU32, burst: Option<NonZeroU32>) -> Self {
        let quota = Quota::per_minute(per_minute).allow_burst(burst.unwrap_or(per_minute));
        Self { per_minute, limiter: RateLimiter::keyed(quota) }
    }

    fn check(&self, key: &K, subject: &str, action: &str, unit: &str) -> Result<(), ApiError> {
        if self.limiter.len() > MAX_TRACKED_CLIENTS {
            self.limiter.retain_recent();
        }
        self.limiter.check_key(key).map_err(|until| {
            let wait = until.wait_time_from(DefaultClock::default().now());
            let seconds = (wait + Duration::from_millis(999)).as_secs().max(1);
            let detail =
                format!("{subject} may {action} {} {unit} per minute; try again in {seconds} s", self.per_minute);
            ApiError::new(ErrorKind::Busy, detail).retry_after(seconds).code(ErrorCode::RateLimited)
        })
    }
}

/// Returns the network that one client typically has: an IPv4 address, or an IPv6 /64.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX))),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{KeyHash, SecurityConfig};

    #[test]
    fn rate_limit_applies_per_client() {
        let rates = RateLimits::new(RateConfig {
            per_key: NonZeroU32::new(60),
            per_address: NonZeroU32::new(6),
            burst: NonZeroU32::new(2),
        });
        let from = |text: &str| Some(SocketAddr::new(text.parse().unwrap(), 1));
        let security = SecurityConfig { keys: vec![KeyHash::new("a"), KeyHash::new("b")], ..SecurityConfig::default() };
        let key = |key: &str| Some(Caller::new(&security, security.find_key(key)));
        assert!(rates.check(None, from("10.0.0.1")).is_ok());
        assert!(rates.check(None, from("10.0.0.1")).is_ok());
        let rejected = rates.check(None, from("10.0.0.1")).unwrap_err();
        assert_eq!(rejected.status(), 429);
        assert!(rejected.problem().detail.contains("this address may start 6 runs per minute; try again in"));
        assert!(rates.check(None, from("10.0.0.2")).is_ok());
        for _ in 0..2 {
            assert!(rates.check(key("a").as_ref(), None).is_ok());
        }
        assert!(rates.check(key("a").as_ref(), None).unwrap_err().problem().detail.contains("this key"));
        // A run that the limit of the address rejects does not count against the key.
        assert!(rates.check(key("b").as_ref(), None).is_ok());
        assert!(
            rates.check(key("b").as_ref(), from("10.0.0.1")).unwrap_err().problem().detail.contains("this address")
        );
        assert!(rates.check(key("b").as_ref(), None).is_ok());
        assert_eq!(network("2001:db8:1:2:3::4".parse().unwrap()), "2001:db8:1:2::".parse::<IpAddr>().unwrap());
        assert_eq!(network("::ffff:10.1.2.3".parse().unwrap()), "10.1.2.3".parse::<IpAddr>().unwrap());
    }
}
