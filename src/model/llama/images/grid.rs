//! Grid of the patches of an image, for display.
//!
//! llama.cpp reports columns and rows only for projectors with M-RoPE. For the others it reports one row, and the grid
//! is derived from the number of embeddings.

/// Maximum ratio between the aspect ratio of a derived grid and that of its image.
const MAX_DISTORTION: f64 = 1.5;

/// Returns columns and rows of `count` embeddings of an image of `width` × `height` pixels, for which llama.cpp reports
/// `reported`. A number of embeddings without a fitting grid gives one row.
pub(super) fn grid(count: usize, reported: (usize, usize), (width, height): (u32, u32)) -> (u32, u32) {
    let (columns, rows) = reported;
    if rows > 1 && columns.checked_mul(rows) == Some(count) {
        return (columns as u32, rows as u32);
    }
    let root = count.isqrt();
    // Most projectors resize every image to a square.
    if root * root == count {
        return (root as u32, root as u32);
    }
    let aspect_ratio = f64::from(width.max(1)) / f64::from(height.max(1));
    let distortion = |columns: usize| {
        let ratio = (columns as f64 / (count / columns) as f64) / aspect_ratio;
        ratio.max(1.0 / ratio)
    };
    let divisors = (1..=count).filter(|columns| count.is_multiple_of(*columns));
    let best = divisors.min_by(|one, other| distortion(*one).total_cmp(&distortion(*other)));
    match best.filter(|&columns| distortion(columns) <= MAX_DISTORTION) {
        Some(columns) => (columns as u32, (count / columns) as u32),
        None => (count as u32, 1),
    }
}

#[cfg(test)]
mod tests {
    use super::grid;
    use proptest::prelude::*;

    #[test]
    fn reported_grid_is_used_if_it_has_all_embeddings() {
        assert_eq!(grid(12, (4, 3), (100, 100)), (4, 3));
        assert_eq!(grid(14, (4, 3), (700, 200)), (7, 2), "two embeddings more than patches");
    }

    #[test]
    fn grid_is_derived_from_the_number_of_embeddings() {
        assert_eq!(grid(576, (576, 1), (640, 100)), (24, 24), "resized to a square");
        assert_eq!(grid(96, (96, 1), (1200, 800)), (12, 8));
        assert_eq!(grid(96, (96, 1), (800, 1200)), (8, 12));
        assert_eq!(grid(97, (97, 1), (800, 1200)), (97, 1), "a prime number");
        assert_eq!(grid(0, (0, 1), (0, 0)), (0, 0));
    }

    proptest! {
        #[test]
        fn grid_has_all_embeddings(count in 1..5000usize, width in 1..20_000u32, height in 1..20_000u32) {
            let (columns, rows) = grid(count, (count, 1), (width, height));
            prop_assert_eq!(columns as usize * rows as usize, count);
        }
    }
}
