use super::*;
use proptest::prelude::*;

/// Builds the state that llama.cpp writes for `tokens` in stream `stream` of `streams`, with two layers.
fn written(tokens: &[TokenId], stream: u32, streams: u32, transposed: bool, has_mrope: bool) -> Vec<u8> {
    let mut out = vec![1, 2, 3, 4];
    out.extend(stream.to_le_bytes());
    out.extend(streams.to_le_bytes());
    for at in 0..streams {
        if at != stream {
            out.extend(0u32.to_le_bytes());
            continue;
        }
        out.extend((tokens.len() as u32).to_le_bytes());
        for (position, token) in (0u32..).zip(tokens) {
            out.extend(position.to_le_bytes());
            out.extend(1u32.to_le_bytes());
            if has_mrope {
                out.extend([0; 8]);
                out.extend(token.to_le_bytes());
            }
            out.extend(stream.to_le_bytes());
        }
        for number in [u32::from(transposed), 2, 0, 0] {
            out.extend(number.to_le_bytes());
        }
        for layer in 0..2u8 {
            out.extend(1i32.to_le_bytes());
            out.extend(16u64.to_le_bytes());
            out.extend(std::iter::repeat_n(layer, 16 * tokens.len()));
        }
        for layer in 2..4u8 {
            out.extend(1i32.to_le_bytes());
            if transposed {
                out.extend(2u32.to_le_bytes());
                out.extend(8u32.to_le_bytes());
            } else {
                out.extend(16u64.to_le_bytes());
            }
            out.extend(std::iter::repeat_n(layer, 16 * tokens.len()));
        }
    }
    out
}

fn layout(streams: u32, transposed: bool, has_mrope: bool) -> StateLayout {
    StateLayout::from_state(&written(&[9], 0, streams, transposed, has_mrope), 64, AttentionWindow::None).unwrap()
}

#[test]
fn state_transfers_between_contexts_of_other_sizes() {
    let tokens: Vec<TokenId> = (0..20).collect();
    for (transposed, has_mrope) in [(false, false), (true, false), (false, true), (true, true)] {
        let packed =
            layout(3, transposed, has_mrope).pack(&written(&tokens, 2, 3, transposed, has_mrope), &tokens).unwrap();
        let (state, _) = layout(2, transposed, has_mrope).unpack(&packed, &tokens).unwrap();
        let mut expected = written(&tokens, 0, 2, transposed, has_mrope);
        // The id inside a cell is that of the original sequence; llama.cpp ignores it.
        let (cell, first) = (CELL_BYTES + if has_mrope { MROPE_BYTES } else { 0 }, HEADER_BYTES + 8);
        for index in 0..tokens.len() {
            let id = first + (index + 1) * cell - 4;
            expected[id..id + 4].copy_from_slice(&2u32.to_le_bytes());
        }
        assert_eq!(state, expected);
    }
}

#[test]
fn only_window_layers_may_lack_old_tokens() {
    // One cache without a window, then one with it.
    let both = |tokens: &[TokenId], in_window: &[TokenId]| {
        let mut out = written(tokens, 0, 1, false, false);
        let second = written(in_window, 0, 1, false, false);
        let (first, positions) = (out.len() + 8, tokens.len() - in_window.len());
        out.extend_from_slice(&second[HEADER_BYTES..]);
        for index in 0..in_window.len() {
            let at = first + index * CELL_BYTES;
            out[at..at + 4].copy_from_slice(&((positions + index) as u32).to_le_bytes());
        }
        out
    };
    let layout = StateLayout::from_state(&both(&[9], &[9]), 64, AttentionWindow::Sliding(4)).unwrap();
    assert_eq!(
        (layout.caches.len(), layout.caches[0].window, layout.caches[1].window),
        (2, AttentionWindow::None, AttentionWindow::Sliding(4))
    );
    let tokens: Vec<TokenId> = (0..10).collect();
    let packed = layout.pack(&both(&tokens, &tokens[6..]), &tokens).unwrap();
    assert_eq!(layout.unpack(&packed, &tokens).unwrap().0, both(&tokens, &tokens[6..]));
    let too_few = layout.pack(&both(&tokens, &tokens[7..]), &tokens).unwrap_err();
    assert_eq!(too_few, StateError::Cells { cells: 3, tokens: 10 });
    let plain = StateLayout::from_state(&written(&[9], 0, 1, false, false), 64, AttentionWindow::None).unwrap();
    let mut short = vec![0; 8];
    short.extend_from_slice(&both(&tokens, &tokens[6..])[written(&tokens, 0, 1, false, false).len()..]);
    assert_eq!(plain.pack(&short, &tokens).unwrap_err(), StateError::Cells { cells: 4, tokens: 10 });
}

/// Returns the offset of the position of a cell in a packed state with M-RoPE data.
fn mrope_cell(index: usize) -> usize {
    4 + index * (CELL_BYTES + MROPE_BYTES)
}

#[test]
fn cells_of_an_image_share_a_position() {
    let tokens = [1, 2, -7, -8, -9, -10, -11, -12, 3, 4];
    let layout = layout(1, false, true);
    let mut state = written(&tokens, 0, 1, false, true);
    // Two rows of three columns at position 2; the text continues after three positions.
    let cells: Vec<[i32; 4]> = (0..6).map(|index| [2, 2 + index % 3, 2 + index / 3, -1]).collect();
    let after = [[5, 5, 5, 3], [6, 6, 6, 4]];
    for (index, [position, x, y, token]) in (2..).zip(cells.into_iter().chain(after)) {
        let at = HEADER_BYTES + 4 + mrope_cell(index);
        state[at..at + 4].copy_from_slice(&position.to_le_bytes());
        state[at + 8..at + 20].copy_from_slice(&[x, y, token].map(i32::to_le_bytes).concat());
    }
    let packed = layout.pack(&state, &tokens).unwrap();
    let (unpacked, images) = layout.unpack(&packed, &tokens).unwrap();
    assert_eq!(unpacked, state);
    assert_eq!((images.positions(10), images.undivided_prefix(7)), (vec![0, 1, 2, 2, 2, 2, 2, 2, 5, 6], 2));
    let error = |index: usize, field: usize, number: i32| {
        let mut hostile = packed.clone();
        let at = mrope_cell(index) + field;
        hostile[at..at + 4].copy_from_slice(&number.to_le_bytes());
        layout.unpack(&hostile, &tokens).unwrap_err()
    };
    assert_eq!(error(4, 8, 9), StateError::Image(2), "another column");
    assert_eq!(error(4, 16, -9), StateError::Token(4), "a token");
    assert_eq!(error(8, 0, 8), StateError::Position { cell: 8, position: 8 });
    assert_eq!(error(8, 0, -1), StateError::Position { cell: 8, position: -1 });
    assert_eq!(error(2, 0, 3), StateError::Image(3), "the first cell is no longer part of the image");
}

#[test]
fn state_errors_name_the_difference() {
    let (layout, tokens) = (layout(1, false, false), [5, 6, 7]);
    let packed = layout.pack(&written(&tokens, 0, 1, false, false), &tokens).unwrap();
    let error = |bytes: &[u8], tokens: &[TokenId]| layout.unpack(bytes, tokens).unwrap_err().to_string();
    assert_eq!(error(&packed, &[5, 6]), "the KV data has 3 cells for 2 tokens");
    assert_eq!(
        error(&packed[..packed.len() - 1], &tokens),
        format!("the KV data is truncated after byte {}", packed.len() - 1)
    );
    let mut longer = packed.clone();
    longer.push(0);
    assert_eq!(error(&longer, &tokens), "the KV data has 1 extra bytes at its end");
    let mut quantized = packed.clone();
    let keys = 4 + 3 * CELL_BYTES + 16;
    quantized[keys] = 8;
    assert_eq!(
        error(&quantized, &tokens),
        "the KV data does not match this context: the type of keys is q8_0, expected f16"
    );
    let mut moved = packed;
    moved[4] = 1;
    assert!(error(&moved, &tokens).starts_with("cell 0 of the KV data has position 1"));
}

proptest! {
    /// Hostile bytes never panic and never need more memory than the input, and accepted states equal the written one.
    #[test]
    fn hostile_bytes_are_rejected(
        count in 0usize..12, transposed: bool, has_mrope: bool,
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let tokens: Vec<TokenId> = (0..count as i32).collect();
        let layout = layout(2, transposed, has_mrope);
        let written = written(&tokens, 1, 2, transposed, has_mrope);
        let Ok(packed) = layout.pack(&written, &tokens) else {
            prop_assert_eq!(count, 0);
            return Ok(());
        };
        let mut hostile = packed.clone();
        for (at, byte) in &edits {
            let at = at.index(hostile.len());
            hostile[at] = *byte;
        }
        if let Some(cut) = cut {
            hostile.truncate(cut.index(hostile.len()));
        }
        if let Ok((state, _)) = layout.unpack(&hostile, &tokens) {
            prop_assert_eq!(hostile.len(), packed.len());
            // Only keys, values, and numbers that llama.cpp ignores may differ from the written state.
            prop_assert_eq!(layout.pack(&state, &tokens).unwrap(), hostile);
        }
    }

    #[test]
    fn noise_is_rejected(noise: Vec<u8>, count in 0usize..40) {
        let tokens: Vec<TokenId> = (0..count as i32).collect();
        prop_assert!(layout(2, true, false).unpack(&noise, &tokens).is_err());
        prop_assert!(StateLayout::from_state(&noise, 64, AttentionWindow::None).is_none_or(|layout| layout.caches.is_empty() || noise.len() > 40));
    }
}
