//! Loops over raw attention that compile to vector code. Reductions to one value work in fixed-size blocks.

/// Values per block: one 512-bit register, or a few smaller ones.
const LANES: usize = 16;

/// Adds `row` to `sum`, and updates the element-wise `max`.
pub fn accumulate(row: &[f32], sum: &mut [f32], max: &mut [f32]) {
    for ((value, sum), max) in row.iter().zip(sum).zip(max) {
        *sum += value;
        *max = if *value > *max { *value } else { *max };
    }
}

/// Adds `row` to `sum`.
pub fn add(row: &[f32], sum: &mut [f32]) {
    for (value, sum) in row.iter().zip(sum) {
        *sum += value;
    }
}

/// Multiplies every value.
pub fn scale(row: &mut [f32], factor: f32) {
    for value in row {
        *value *= factor;
    }
}

/// Returns the sum of a row.
pub fn sum(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for block in blocks {
        for (lane, value) in lanes.iter_mut().zip(block) {
            *lane += value;
        }
    }
    lanes.iter().chain(rest).sum()
}

/// Returns the largest value; 0 if no value is positive.
pub fn max_value(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for block in blocks {
        for (lane, &value) in lanes.iter_mut().zip(block) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    lanes.iter().chain(rest).fold(0.0, |max, &value| if value > max { value } else { max })
}

/// Returns the first position with a value of `value` or more; 0 if there is none.
pub fn position_of(row: &[f32], value: f32) -> usize {
    let (blocks, _) = row.as_chunks::<LANES>();
    // Skips blocks without the value, with no branch per value.
    let hit = |block: &[f32; LANES]| block.iter().fold(0_u8, |found, &other| found | u8::from(other >= value)) != 0;
    let from = blocks.iter().position(hit).unwrap_or(blocks.len()) * LANES;
    from + row[from..].iter().position(|&other| other >= value).unwrap_or(0)
}

/// Returns the entropy −Σ p log₂ p in bits.
pub fn entropy(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<LANES>();
    let mut lanes = [0.0_f32; LANES];
    for block in blocks {
        for (lane, &p) in lanes.iter_mut().zip(block) {
            *lane += p * log2(p);
        }
    }
    let sum: f32 = lanes.iter().sum::<f32>() + rest.iter().map(|&p| p * log2(p)).sum::<f32>();
    (-sum).max(0.0)
}

/// Returns log₂ of a positive number with an error below 4e-5; about −127 for 0. Contains no calls or branches, so that
/// it compiles to vector code.
///
/// The exponent is read from the bits. For the mantissa m in [1, 2), log₂ m = 2 atanh(t) / ln 2 with t = (m − 1) / (m +
/// 1), computed as a series in t.
#[inline]
fn log2(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    let exponent = ((bits >> 23) - 127) as f32;
    let mantissa = f32::from_bits((bits & 0x007f_ffff | 0x3f80_0000) as u32);
    let t = (mantissa - 1.0) / (mantissa + 1.0);
    let square = t * t;
    // 2 / ln 2 · (t + t³/3 + t⁵/5 + t⁷/7).
    let series = t * (2.885_39 + square * (0.961_796_7 + square * (0.577_078 + square * 0.412_198_6)));
    exponent + series
}

/// Quantizes a row on a square-root scale from 0 to its maximum; negative values and NaN become 0.
pub fn quantize(row: &[f32], max: f32, codes: &mut Vec<u8>) {
    let scale = if max > 0.0 { super::STEPS * super::STEPS / max } else { 0.0 };
    codes.clear();
    // The root is at most STEPS, the maximum of u8, so the cast does not saturate.
    codes.extend(row.iter().map(|&value| {
        let positive = if value > 0.0 { value } else { 0.0 };
        ((positive * scale).sqrt() + 0.5) as u8
    }));
}

#[cfg(test)]
mod tests {
    use super::{entropy, log2, max_value, position_of};

    #[test]
    fn log2_is_exact_to_4e_5() {
        for i in 1..100_000 {
            let x = i as f32 / 100_000.0;
            assert!((log2(x) - x.log2()).abs() < 4e-5, "{x}: {} instead of {}", log2(x), x.log2());
        }
        assert!(log2(1.0).abs() < f32::EPSILON && (0.0 * log2(0.0)).abs() < f32::EPSILON);
    }

    #[test]
    fn reductions_cover_blocks_and_remainder() {
        for len in [1, 15, 16, 17, 100] {
            let mut row = vec![0.25; len];
            row[len - 1] = 0.5;
            assert_eq!((max_value(&row), position_of(&row, 0.5)), (0.5, len - 1));
            let expected = 0.5 * (len as f32 - 1.0) + 0.5;
            assert!((entropy(&row) - expected).abs() < 1e-3 * len as f32);
        }
    }
}
