//! llama.cpp's split of a batch into physical batches, needed to assign captured rows to tokens.
//!
//! Follows `llama_kv_cache::init_batch` and `llama_batch_allocr::split_simple` / `split_equal` of llama.cpp in the
//! pinned llama-cpp-sys-2: one stream is split in order, several streams (one sequence each) are split into equal parts
//! of sequences with consecutive ids.

/// The position of a batch's token in the physical batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UbatchPosition {
    /// Index of the physical batch.
    pub ubatch: u32,
    /// Index of the sequence within it.
    pub stream: u32,
    /// Index of the token within that sequence's part.
    pub token: u32,
}

/// Returns the position of every token of a batch. `sequences` holds the sequence of each token.
#[must_use]
pub fn ubatch_positions(sequences: &[i32], n_ubatch: usize, has_multiple_streams: bool) -> Vec<UbatchPosition> {
    if has_multiple_streams { split_equal(sequences, n_ubatch) } else { split_simple(sequences.len(), n_ubatch) }
}

/// The column of a token in the nodes of its physical batch, in which the parts of the sequences follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Index of the token.
    pub column: u32,
    /// Number of tokens of the physical batch.
    pub tokens: u32,
    /// Index of the token among those with logits; `None` if it has none.
    pub output: Option<u32>,
    /// Number of tokens of the physical batch with logits.
    pub outputs: u32,
}

/// Returns the column of each token. `has_logits` has one entry per token.
#[must_use]
pub fn columns(positions: &[UbatchPosition], has_logits: &[bool]) -> Vec<Column> {
    let mut order: Vec<usize> = (0..positions.len()).collect();
    order.sort_unstable_by_key(|&index| {
        let UbatchPosition { ubatch, stream, token } = positions[index];
        (ubatch, stream, token)
    });
    let mut columns = vec![Column { column: 0, tokens: 0, output: None, outputs: 0 }; positions.len()];
    for ubatch in order.chunk_by(|&a, &b| positions[a].ubatch == positions[b].ubatch) {
        let outputs = ubatch.iter().filter(|&&index| has_logits[index]).count() as u32;
        let mut next = 0;
        for (column, &index) in (0..).zip(ubatch) {
            let output = has_logits[index].then_some(next);
            next += u32::from(has_logits[index]);
            columns[index] = Column { column, tokens: ubatch.len() as u32, output, outputs };
        }
    }
    columns
}

fn split_simple(n_tokens: usize, n_ubatch: usize) -> Vec<UbatchPosition> {
    (0..n_tokens)
        .map(|index| UbatchPosition { ubatch: (index / n_ubatch) as u32, stream: 0, token: (index % n_ubatch) as u32 })
        .collect()
}

fn split_equal(sequences: &[i32], n_ubatch: usize) -> Vec<UbatchPosition> {
    let unplaced = UbatchPosition { ubatch: u32::MAX, stream: 0, token: 0 };
    let mut ubatch_positions = vec![unplaced; sequences.len()];
    let mut left = sequences.len();
    let mut ubatch = 0;
    while left > 0 {
        let mut chosen: Vec<i32> = Vec::new();
        for (index, &sequence) in sequences.iter().enumerate() {
            if ubatch_positions[index].ubatch == u32::MAX && chosen.last().is_none_or(|&last| sequence == last + 1) {
                chosen.push(sequence);
                if chosen.len() > n_ubatch {
                    break;
                }
            }
        }
        let mut queues: Vec<_> = chosen
            .iter()
            .map(|&sequence| {
                let waiting: Vec<usize> = (0..sequences.len())
                    .filter(|&index| sequences[index] == sequence && ubatch_positions[index].ubatch == u32::MAX)
                    .collect();
                waiting.into_iter()
            })
            .collect();
        let mut token = 0;
        while queues.iter().all(|queue| queue.len() > 0) {
            for (stream, queue) in queues.iter_mut().enumerate() {
                if let Some(index) = queue.next() {
                    ubatch_positions[index] = UbatchPosition { ubatch, stream: stream as u32, token };
                    left -= 1;
                }
            }
            token += 1;
            if (token as usize + 1) * chosen.len() > n_ubatch {
                break;
            }
        }
        ubatch += 1;
    }
    ubatch_positions
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn consecutive_sequences_share_a_physical_batch() {
        let position = |ubatch, stream, token| UbatchPosition { ubatch, stream, token };
        assert_eq!(ubatch_positions(&[0, 1, 3], 512, true), [position(0, 0, 0), position(0, 1, 0), position(1, 0, 0)]);
        assert_eq!(
            ubatch_positions(&[0, 1, 1, 1], 512, true),
            [position(0, 0, 0), position(0, 1, 0), position(1, 0, 0), position(1, 0, 1)]
        );
        assert_eq!(ubatch_positions(&[0, 0, 0], 2, false), [position(0, 0, 0), position(0, 0, 1), position(1, 0, 0)]);
    }

    #[test]
    fn columns_count_tokens_and_outputs_of_each_physical_batch() {
        let positions = ubatch_positions(&[0, 1, 0, 1, 0], 4, true);
        let columns = columns(&positions, &[false, true, true, false, true]);
        let column = |column, tokens, output, outputs| Column { column, tokens, output, outputs };
        let expected = [
            column(0, 4, None, 2),
            column(2, 4, Some(1), 2),
            column(1, 4, Some(0), 2),
            column(3, 4, None, 2),
            column(0, 1, Some(0), 1),
        ];
        assert_eq!(columns, expected);
    }

    proptest! {
        #[test]
        fn every_token_has_a_unique_position(lens in proptest::collection::vec(0usize..40, 1..6), n_ubatch in 1usize..64) {
            let sequences: Vec<i32> = lens.iter().enumerate().flat_map(|(id, &len)| std::iter::repeat_n(id as i32, len)).collect();
            let mut seen = std::collections::HashSet::new();
            for position in ubatch_positions(&sequences, n_ubatch.max(lens.len()), true) {
                prop_assert!(position.ubatch != u32::MAX);
                prop_assert!(seen.insert((position.ubatch, position.stream, position.token)));
            }
        }
    }
}
