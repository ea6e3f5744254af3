//! Conversion of floats for JSON.

/// Converts a float to the double with the same shortest decimal form: 0.8, not 0.800000011920929.
#[must_use]
pub fn shortest_f64(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}
