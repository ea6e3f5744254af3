use super::{AttentionCodecError, decode_t0, decode_t1, encode};
use proptest::prelude::*;

/// Returns rows that sum to 1 with most of the mass on few positions, like real attention.
fn attention() -> impl Strategy<Value = (Vec<f32>, usize, usize, usize)> {
    (1_usize..4, 1_usize..4, 1_usize..70)
        .prop_flat_map(|(layers, heads, row_len)| {
            let scores = prop::collection::vec(-12.0_f32..4.0, layers * heads * row_len);
            (scores, Just(layers), Just(heads), Just(row_len))
        })
        .prop_map(|(mut rows, layers, heads, row_len)| {
            for row in rows.chunks_exact_mut(row_len) {
                let sum: f32 = row.iter().map(|score| score.exp()).sum();
                for score in row {
                    *score = score.exp() / sum;
                }
            }
            (rows, layers, heads, row_len)
        })
}

#[test]
fn sink_is_the_position_with_the_largest_mean() {
    let rows = [0.1, 0.7, 0.2, 0.05, 0.8, 0.15, 0.0, 0.5, 0.5, 0.3, 0.3, 0.4];
    let (t0, t1) = encode(&rows, 2, 2, 3).unwrap();
    let overview = decode_t0(&t0).unwrap();
    assert_eq!((overview.sink, overview.layers, overview.heads, overview.row_len), (1, 2, 2, 3));
    let stat = overview.stats[3];
    assert_eq!(stat.peak_position, 2);
    for (found, expected) in [
        (overview.mean[1], 0.575),
        (overview.max[1], 0.8),
        (overview.last_layer[2], 0.45),
        (stat.sink_mass, 0.3),
        (stat.peak, 0.4),
        (stat.entropy, 1.571),
        (decode_t1(&t1, 0).unwrap()[1], 0.75),
    ] {
        assert!((found - expected).abs() < 2e-3, "{found} instead of {expected}");
    }
    assert_eq!(decode_t1(&t1, 2), Err(AttentionCodecError::NoLayer { layer: 2, layers: 2 }));
}

#[test]
fn mismatched_shape_is_rejected() {
    for (values, layers, heads, row_len) in [(5, 1, 2, 3), (0, 0, 2, 3), (0, 2, 2, 0), (4, usize::MAX, 2, 2)] {
        let error = encode(&vec![0.0; values], layers, heads, row_len).unwrap_err();
        assert_eq!(error, AttentionCodecError::Shape { values, layers, heads, row_len });
    }
}

#[test]
fn rows_of_zeros_and_nan_are_encoded() {
    for value in [0.0, f32::NAN, f32::INFINITY, -1.0] {
        let (t0, t1) = encode(&[value; 40], 1, 2, 20).unwrap();
        assert_eq!(decode_t0(&t0).unwrap().row_len, 20);
        assert_eq!(decode_t1(&t1, 0).unwrap().len(), 20);
    }
}

#[test]
fn encoder_with_used_buffers_returns_the_same_bytes() {
    let rows: Vec<f32> = (0..24 * 14 * 1024).map(|i| 1.0 / (1.0 + (i % 1024) as f32)).collect();
    let mut encoder = super::AttentionEncoder::new();
    let first = encoder.encode(&rows, 24, 14, 1024).unwrap();
    encoder.encode(&rows[..2 * 2 * 100], 2, 2, 100).unwrap();
    assert_eq!(encoder.encode(&rows, 24, 14, 1024).unwrap(), first);
}

proptest! {
    #[test]
    fn encoded_rows_decode_within_bounds((rows, layers, heads, row_len) in attention()) {
        let (t0, t1) = encode(&rows, layers, heads, row_len).unwrap();
        let overview = decode_t0(&t0).unwrap();
        let at = |layer: usize, head: usize, position: usize| rows[(layer * heads + head) * row_len + position];
        for layer in 0..layers {
            let exact: Vec<f32> = (0..row_len)
                .map(|position| (0..heads).map(|head| at(layer, head, position)).sum::<f32>() / heads as f32)
                .collect();
            let max = exact.iter().copied().fold(0.0, f32::max);
            for (found, exact) in decode_t1(&t1, layer).unwrap().iter().zip(&exact) {
                let bound = if *exact < max / 4.0 { 0.002 } else { 0.004 };
                prop_assert!((found - exact).abs() < bound * max, "{} instead of {}", found, exact);
            }
            if layer == layers - 1 {
                for (found, exact) in overview.last_layer.iter().zip(&exact) {
                    prop_assert!((found - exact).abs() < 1e-3 * exact + 1e-6);
                }
            }
            for head in 0..heads {
                let stat = overview.stats[layer * heads + head];
                let row: Vec<f32> = (0..row_len).map(|position| at(layer, head, position)).collect();
                let bits: f32 = row.iter().map(|&p| -p * p.max(f32::MIN_POSITIVE).log2()).sum();
                prop_assert!((stat.entropy - bits).abs() < 0.005 + bits * 1e-3, "{} instead of {}", stat.entropy, bits);
                let peak = row[stat.peak_position as usize];
                prop_assert!(row.iter().all(|&other| other <= peak));
                prop_assert!((stat.sink_mass - row[overview.sink as usize]).abs() < 1e-3);
            }
        }
        for position in 0..row_len {
            let all = (0..layers).flat_map(|layer| (0..heads).map(move |head| (layer, head)));
            let values: Vec<f32> = all.map(|(layer, head)| at(layer, head, position)).collect();
            let mean = values.iter().sum::<f32>() / values.len() as f32;
            prop_assert!((overview.mean[position] - mean).abs() < 1e-3 * mean + 1e-6);
            prop_assert!((overview.max[position] - values.iter().copied().fold(0.0, f32::max)).abs() < 1e-3);
        }
    }

    #[test]
    fn hostile_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), layer in 0_usize..5) {
        let _ = decode_t0(&bytes);
        let _ = decode_t0(&[b"ATT0\x01\0", &bytes[..]].concat());
        let _ = decode_t1(&[b"ATT1\x01\0\0\0\x03\0\0\0", &bytes[..]].concat(), layer);
    }

    #[test]
    fn damaged_rows_never_panic((rows, layers, heads, row_len) in attention(), at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
        let (mut t0, mut t1) = encode(&rows, layers, heads, row_len).unwrap();
        for bytes in [&mut t0, &mut t1] {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = decode_t0(&t0);
        let _ = decode_t0(&t0[..cut.index(t0.len())]);
        let _ = decode_t1(&t1, 0);
        let _ = decode_t1(&t1[..cut.index(t1.len())], 0);
    }
}
