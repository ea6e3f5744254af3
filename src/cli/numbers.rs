//! Numbers of flags.

/// Parses a finite number. JSON has no others.
pub fn finite(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| number.is_finite());
    number.ok_or_else(|| format!("expected a finite number, got '{text}'"))
}
