//! State of slots: after a state is saved, restored, shifted or reused, the model continues as expected. A state from a
//! client is accepted only if it is valid for the model.

mod conversations;
mod invalid_states;
mod memory_types;
mod recurrent;
mod restore;
mod reuse;
mod shared_prefix;
mod shift;
mod undivided_images;

use crate::engine::{CompletedRun, TestEngine, request_tokens, test_engine};
use thunder::engine::Request;
use thunder::events::{Scope, TokenId, TraceItem};

/// Returns an irregular sequence of tokens.
pub fn irregular_tokens(seed: i32, len: usize) -> Vec<TokenId> {
    (0..len as i32).map(|index| 40 + (seed * 7 + index * index + 3 * index) % 500).collect()
}

pub fn in_slot(mut request: Request, slot: u32) -> Request {
    request.slot = Some(slot);
    request
}

pub fn with_attention(mut request: Request) -> Request {
    request.attention = true;
    request
}

/// Returns the rows of attention, `[layer][head][position]`, and their lengths.
pub fn rows(result: &CompletedRun) -> Vec<(usize, Vec<f32>)> {
    result
        .items
        .iter()
        .filter_map(|item| match item {
            TraceItem::Attention(step) => {
                let values = step.t0.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
                Some((step.row_len as usize, values))
            }
            _ => None,
        })
        .collect()
}

/// Returns the largest difference between the elements of two vectors.
pub fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max)
}

/// Returns the probabilities of the alternatives of all steps.
pub fn alternatives(result: &CompletedRun) -> Vec<f32> {
    result
        .items
        .iter()
        .filter_map(|item| match item {
            TraceItem::Event(event) => event.measured.as_ref(),
            _ => None,
        })
        .flat_map(|measured| measured.model.iter().map(|alternative| alternative.prob))
        .collect()
}

/// Returns the tokens of a slot and the tokens that it would generate next.
pub async fn state_of(test_engine: &mut TestEngine, slot: u32) -> (Vec<TokenId>, Vec<TokenId>) {
    let tokens = test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().tokens;
    let mut prompt = tokens.clone();
    prompt.push(77);
    let result = test_engine.run(in_slot(request_tokens(prompt, 6), slot)).await;
    assert_eq!(result.end.finish.usage.cached_tokens as usize, tokens.len());
    (tokens, result.generated())
}

/// Asserts that the attention of the first layer equals that of a fresh slot with the same tokens, because it depends only
/// on tokens and positions. Later layers also depend on removed tokens.
pub async fn assert_first_layer_equals(result: &CompletedRun, prompt: &[TokenId]) {
    let mut fresh = test_engine(1, true).await;
    let mut tokens = prompt.to_vec();
    for (index, (len, row)) in rows(result).into_iter().enumerate() {
        assert_eq!(len, tokens.len(), "the row and the remaining sequence have different lengths");
        let expected = fresh.run(with_attention(request_tokens(tokens.clone(), 1))).await;
        let (_, expected) = rows(&expected).remove(0);
        let first_layer = row.len() / 4;
        let difference = max_difference(&row[..first_layer], &expected[..first_layer]);
        assert!(difference < 4e-3, "row {index}: the first layer differs by {difference}");
        for one in row.chunks_exact(len) {
            assert!((one.iter().sum::<f32>() - 1.0).abs() < 1e-3);
        }
        tokens.push(result.generated()[index]);
    }
}
