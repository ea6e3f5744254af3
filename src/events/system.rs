//! The system's clock and random numbers. Clippy forbids them everywhere else (`.clippy.toml`).
#![expect(clippy::disallowed_methods, reason = "the only place that reads the system's clock and random numbers")]

use chrono::{DateTime, Utc};
use rand::distr::{Distribution, StandardUniform};
use uuid::Uuid;

/// Returns the current time.
#[must_use]
pub fn now() -> DateTime<Utc> {
    Utc::now()
}

/// Returns a random value that cannot be guessed.
#[must_use]
pub fn random<T>() -> T
where
    StandardUniform: Distribution<T>,
{
    rand::random()
}

/// Returns a new `UUIDv7`: later ids are larger.
#[must_use]
pub fn new_id() -> Uuid {
    Uuid::now_v7()
}
