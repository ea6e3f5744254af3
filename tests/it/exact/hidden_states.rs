//! Hidden states that mods read, compared with the reference.

use super::reference::Reference;
use super::variant::{Kind, LAYERS, Variant};
use super::{F32_CACHE, test_engine, tokens};
use crate::engine::{act_once, added_at, request_tokens, test_engine_of, with_reading_mod};
use std::sync::{Arc, Mutex};
use thunder::engine::{DrafterKind, Request, SpeculationOptions};
use thunder::events::TokenId;
use thunder::mods::{Action, Call, CallEvent};

/// Maximum deviation of a value per largest value of its state.
const TOLERANCE: f64 = 2e-3;

/// The hidden states of the last token of a sequence, by layer.
type ReadStates = Vec<(Vec<TokenId>, Vec<Vec<f32>>)>;

/// Returns the request with a mod that reads the states after `layers` at every `ForwardPass`, and acts.
fn reading(
    request: Request,
    layers: &'static [u16],
    act: impl Fn(&Call<'_>) -> Action + Send + Sync + 'static,
) -> (Request, Arc<Mutex<ReadStates>>) {
    let read = Arc::new(Mutex::new(Vec::new()));
    let target = Arc::clone(&read);
    let handler = move |call: &Call<'_>| {
        if let CallEvent::ForwardPass { hidden_states, .. } = call.event {
            let states = hidden_states.expect("every step has hidden states");
            let states = layers.iter().map(|&layer| states.state(layer).expect("a requested layer").to_vec()).collect();
            target.lock().unwrap().push((call.sequence.to_vec(), states));
        }
        act(call)
    };
    (with_reading_mod(request, layers, handler), read)
}

fn assert_near(read: &ReadStates, layers: &[u16], reference: &mut Reference) {
    for (sequence, states) in read {
        reference.row(sequence);
        for (&layer, state) in layers.iter().zip(states) {
            let expected = reference.state(usize::from(layer));
            assert_eq!(state.len(), expected.len());
            let largest = expected.iter().fold(0.0, |largest: f64, value| largest.max(value.abs()));
            for (&value, &expected) in state.iter().zip(expected) {
                assert!(
                    (f64::from(value) - expected).abs() <= TOLERANCE * largest,
                    "{:?}: layer {layer} of a sequence of {}: {value} instead of {expected}",
                    reference.kind,
                    sequence.len()
                );
            }
        }
    }
}

/// After the last layer, llama.cpp computes only the tokens of the batch with logits.
#[tokio::test]
async fn hidden_states_are_exact_with_concurrent_runs_and_after_a_backtrack() {
    const FIRST_AND_LAST: &[u16] = &[LAYERS as u16 - 1, 0];
    for kind in Kind::ALL {
        let variant = Variant::new(kind);
        let mut reference = Reference::new(&variant);
        let mut test_engine = test_engine(&variant, 3, F32_CACHE).await;
        let (first, first_read) = reading(request_tokens(tokens(5, 90), 30), FIRST_AND_LAST, |_| Action::Noop);
        let running = test_engine.engine.submit(first).await.unwrap();
        let backtrack = act_once(|call| added_at(call, 5), Action::Backtrack { n: 3, tokens: vec![90, 91] });
        let (second, second_read) = reading(request_tokens(tokens(3, 70), 14), FIRST_AND_LAST, backtrack);
        // A run with other layers in the same batches.
        let (third, third_read) = reading(request_tokens(tokens(6, 40), 14), &[1], |_| Action::Noop);
        let third = test_engine.engine.submit(third).await.unwrap();
        test_engine.run(second).await;
        for generation in [running, third] {
            crate::engine::follow(generation.output).await;
        }
        for (read, layers, count) in
            [(first_read, FIRST_AND_LAST, 30), (second_read, FIRST_AND_LAST, 14), (third_read, &[1], 14)]
        {
            let read = read.lock().unwrap();
            assert!(read.len() >= count, "{kind:?}: {} of {count} steps", read.len());
            assert_near(&read, layers, &mut reference);
        }
    }
}

#[tokio::test]
async fn accepted_drafts_have_hidden_states() {
    const LAYER: &[u16] = &[1];
    let variant = Variant::new(Kind::Llama);
    let mut test_engine = test_engine_of(variant.model(), 1, true, |options| {
        options.speculation =
            SpeculationOptions { drafter: DrafterKind::Ngram, min_match: 1, adaptive: false, ..Default::default() };
    })
    .await;
    let (request, read) = reading(request_tokens(tokens(1, 40).repeat(3), 40), LAYER, |_| Action::Noop);
    let result = test_engine.run(request).await;
    assert!(result.end.finish.drafts.accepted > 5, "{:?}", result.end.finish.drafts);
    let read = read.lock().unwrap();
    assert_eq!(read.len(), 40);
    assert_near(&read, LAYER, &mut Reference::new(&variant));
}
