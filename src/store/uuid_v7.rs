//! Times in `UUIDv7`s: the ids of runs and deletions.

use chrono::{DateTime, Utc};
use uuid::Uuid;

/// Milliseconds after 1970 of the last time that an id can contain.
const MAX_MS: i64 = (1 << 48) - 1;

/// Returns the smallest id of a time, which is rounded to the range that ids can contain.
pub fn first_id_at(time: DateTime<Utc>) -> Uuid {
    Uuid::from_u128(u128::from(time.timestamp_millis().clamp(0, MAX_MS).unsigned_abs()) << 80)
}

/// Returns the time of an id, in milliseconds.
pub fn time_of(id: Uuid) -> DateTime<Utc> {
    let (seconds, nanos) = id.get_timestamp().map_or((0, 0), |time| time.to_unix());
    DateTime::from_timestamp(i64::try_from(seconds).unwrap_or(0), nanos).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::system;

    #[test]
    fn first_id_is_not_larger_than_an_id_of_the_same_time() {
        let id = system::new_id();
        let first = first_id_at(time_of(id));
        assert_eq!(first.as_u128() >> 80, id.as_u128() >> 80);
        assert!(first <= id);
        assert_eq!(first_id_at(DateTime::<Utc>::MIN_UTC), Uuid::nil());
        assert!(first_id_at(DateTime::<Utc>::MAX_UTC) > id);
    }
}
