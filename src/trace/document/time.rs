//! Times in JSON: RFC 3339 text, whose seconds and offset may be missing, or a number of seconds or milliseconds since 1970.
//! Precision is the microsecond, as in PostgreSQL.

use chrono::{DateTime, NaiveDateTime, SecondsFormat, SubsecRound, Utc};
use serde::de::{self, Deserializer, Visitor};
use std::fmt;

/// Description of a valid time for error messages.
pub const EXPECTED: &str = "an RFC 3339 time such as \"2025-12-01T18:30:00Z\", or seconds since 1970";

/// Maximum number of seconds. Larger numbers are milliseconds, because as seconds they would be after the year 5000.
const MAX_SECONDS: f64 = 1e11;
/// End of the year 9999, the last with four digits.
const END_US: i64 = 253_402_300_800_000_000;
/// Start of the year 1.
const BEGIN_US: i64 = -62_135_596_800_000_000;

/// A time in a field of a wire struct.
#[derive(Debug, Clone, Copy)]
pub struct Timestamp(pub DateTime<Utc>);

impl Timestamp {
    /// Parses text; a time without an offset is UTC.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Self> {
        const OFFSET: [&str; 4] =
            ["%Y-%m-%dT%H:%M:%S%.f%#z", "%Y-%m-%d %H:%M:%S%.f%#z", "%Y-%m-%dT%H:%M%#z", "%Y-%m-%d %H:%M%#z"];
        const NAIVE: [&str; 4] = ["%Y-%m-%dT%H:%M:%S%.f", "%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M"];
        let text = text.trim();
        let time = DateTime::parse_from_rfc3339(text)
            .ok()
            .or_else(|| OFFSET.iter().find_map(|form| DateTime::parse_from_str(text, form).ok()))
            .map(|time| time.to_utc())
            .or_else(|| {
                NAIVE.iter().find_map(|form| NaiveDateTime::parse_from_str(text, form).ok()).map(|t| t.and_utc())
            })?;
        // chrono reads a leap second as 23:59:60, which cannot be stored; the conversion to microseconds since 1970
        // turns it into the next second.
        Self::from_micros(time.timestamp_micros())
    }

    /// Converts a number of seconds, or of milliseconds if seconds would lie in the far future.
    #[must_use]
    pub fn from_number(number: f64) -> Option<Self> {
        let seconds = if number.abs() > MAX_SECONDS { number / 1e3 } else { number };
        let micros = (seconds * 1e6).round();
        // The conversion saturates at numbers outside the range of times.
        if micros.is_finite() { Self::from_micros(micros as i64) } else { None }
    }

    fn from_micros(micros: i64) -> Option<Self> {
        let fits = (BEGIN_US..END_US).contains(&micros);
        fits.then(|| DateTime::from_timestamp_micros(micros)).flatten().map(Self)
    }
}

/// Formats a time for the wire.
pub fn write(time: &DateTime<Utc>) -> String {
    time.trunc_subsecs(6).to_rfc3339_opts(SecondsFormat::AutoSi, true)
}

impl<'de> de::Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TimestampVisitor)
    }
}

struct TimestampVisitor;

impl Visitor<'_> for TimestampVisitor {
    type Value = Timestamp;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Timestamp, E> {
        Timestamp::from_text(text).ok_or_else(|| E::custom(EXPECTED))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Timestamp, E> {
        self.visit_f64(number as f64)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Timestamp, E> {
        self.visit_f64(number as f64)
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Timestamp, E> {
        Timestamp::from_number(number).ok_or_else(|| E::custom(EXPECTED))
    }
}

#[cfg(test)]
mod tests {
    use super::{Timestamp, write};

    #[test]
    fn all_notations_parse_to_the_same_time() {
        for text in [
            "2025-12-01T18:30:00.25Z",
            "2025-12-01T19:30:00.250+01:00",
            "2025-12-01 18:30:00.25+0000",
            "2025-12-01T18:30:00.250000",
            "2025-12-01 18:30:00.25",
            "2025-12-01T18:30:00.25+00",
        ] {
            let time = Timestamp::from_text(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(write(&time.0), "2025-12-01T18:30:00.250Z", "{text}");
        }
        for number in [1_764_613_800.25, 1_764_613_800_250.0] {
            assert_eq!(write(&Timestamp::from_number(number).unwrap().0), "2025-12-01T18:30:00.250Z");
        }
    }

    #[test]
    fn seconds_may_be_missing() {
        for text in [
            "2025-12-01T18:30Z",
            "2025-12-01T19:30+01:00",
            "2025-12-01 18:30+0000",
            "2025-12-01T18:30",
            "2025-12-01 18:30",
        ] {
            let time = Timestamp::from_text(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(write(&time.0), "2025-12-01T18:30:00Z", "{text}");
        }
    }

    #[test]
    fn first_and_last_time_are_accepted() {
        for text in ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"] {
            assert_eq!(write(&Timestamp::from_text(text).unwrap_or_else(|| panic!("{text}")).0), text);
        }
        assert!(Timestamp::from_text("9999-12-31T23:59:60Z").is_none());
        assert!(Timestamp::from_number(253_402_300_800_000.0).is_none());
    }

    #[test]
    fn invalid_times_are_rejected() {
        for text in
            ["", "yesterday", "2025-13-01T00:00:00Z", "2025-12-01", "+12025-12-01T00:00:00Z", "0000-01-01T00:00:00Z"]
        {
            assert!(Timestamp::from_text(text).is_none(), "{text}");
        }
        for number in [f64::NAN, f64::INFINITY, 1e17, -1e17] {
            assert!(Timestamp::from_number(number).is_none(), "{number}");
        }
    }
}
