use std::cmp::Ordering;

/// Returns the median.
pub fn median<T: PartialOrd + Copy>(mut values: impl AsMut<[T]>) -> T {
    let values = values.as_mut();
    values.sort_by(|a, b| a.partial_cmp(b).unwrap_or(Ordering::Equal));
    values[values.len() / 2]
}
