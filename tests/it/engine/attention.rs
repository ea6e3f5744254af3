//! Captured rows are distributions and belong to their own run.

use super::{CompletedRun, act_once, added_at, request, test_engine, test_engine_with, with_mod};
use std::time::Duration;
use thunder::engine::{EngineOptions, Request};
use thunder::events::TraceItem;
use thunder::mods::Action;
use thunder::recording::Signal;

#[tokio::test]
async fn attention_rows_are_distributions_over_earlier_positions() {
    for parallel in [1, 3] {
        let mut test_engine = test_engine(parallel, true).await;
        let request = Request { attention: true, ..request("The sky is", 6) };
        let prompt_len = request.prompt.len() as u32;
        let result = test_engine.run(request).await;
        let steps: Vec<_> = result
            .items
            .iter()
            .filter_map(|item| match item {
                TraceItem::Attention(step) => Some(step),
                _ => None,
            })
            .collect();
        assert_eq!(
            steps.iter().map(|step| step.row_len).collect::<Vec<_>>(),
            (prompt_len..prompt_len + 6).collect::<Vec<_>>()
        );
        for step in steps {
            assert_eq!(step.layer_ids.as_ref(), [0, 1, 2, 3]);
            let values: Vec<f32> = step.t0.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
            for row in values.chunks_exact(step.row_len as usize) {
                let sum: f32 = row.iter().sum();
                assert!((sum - 1.0).abs() < 1e-3, "a row sums to {sum}");
            }
        }
    }
}

/// The attention of a run is the same alone, in batches shared with others, and after a backtrack.
#[tokio::test]
async fn attention_of_a_run_is_independent_of_concurrent_runs() {
    let rows = |result: &CompletedRun| -> Vec<Vec<f32>> {
        result
            .items
            .iter()
            .filter_map(|item| match item {
                TraceItem::Attention(step) => {
                    Some(step.t0.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
                }
                _ => None,
            })
            .collect()
    };
    let with_attention = |prompt: &str| Request { attention: true, ..request(prompt, 8) };
    let mut alone = test_engine(1, true).await;
    let expected = rows(&alone.run(with_attention("The sky is blue")).await);
    let mut shared = test_engine(4, true).await;
    let mut others = Vec::new();
    for prompt in [
        "One",
        "Two of them and some more text to make the prompt longer than a physical batch of tokens can be, so that it is cut",
        "Three",
    ] {
        others.push(shared.engine.submit(request(prompt, 60)).await.unwrap());
    }
    let result = shared.run(with_attention("The sky is blue")).await;
    for (a, b) in expected.iter().zip(rows(&result)) {
        let deviation = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(deviation < 2e-3, "rows differ by {deviation}");
    }
    drop(others);
    let backtrack = act_once(|call| added_at(call, 4), Action::Backtrack { n: 3, tokens: vec![] });
    let result = alone.run(with_mod(with_attention("The sky is blue"), false, backtrack)).await;
    let after: Vec<Vec<f32>> = rows(&result).split_off(4);
    for (a, b) in expected[1..].iter().zip(&after) {
        assert_eq!(a.len(), b.len());
        let deviation = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
        assert!(deviation < 2e-3, "rows differ by {deviation}");
    }
}

#[tokio::test]
async fn captured_rows_are_recorded_before_the_engine_stops() {
    let encode_slowly = |options: &mut EngineOptions| {
        options.encode_attention = |_, _, _, _| {
            std::thread::sleep(Duration::from_millis(20));
            Some((vec![1], Vec::new()))
        };
    };
    let mut test_engine = test_engine_with(1, true, encode_slowly).await;
    let mut request = Request { attention: true, ..request("The sky is", 400) };
    request.limits.max_steps = 4000;
    let mut generation = test_engine.engine.submit(request).await.unwrap();
    for _ in 0..20 {
        generation.output.recv().await.unwrap();
    }
    test_engine.engine.stop().await;
    let (mut rows, mut ended) = (0, false);
    while let Ok(signal) = test_engine.signals.try_recv() {
        assert!(!ended, "a signal follows the end of the run");
        match signal {
            Signal::Started(_) => {}
            Signal::Items(_, items) => {
                rows += items.iter().filter(|item| matches!(item, TraceItem::Attention(_))).count();
            }
            Signal::Ended(..) => ended = true,
        }
    }
    assert!(ended && rows >= 15, "{rows} rows, ended: {ended}");
}

#[tokio::test]
async fn row_that_cannot_be_encoded_is_omitted() {
    let mut test_engine = test_engine_with(1, true, |options| {
        options.encode_attention = |values, _, _, row_len| {
            assert!(!row_len.is_multiple_of(2), "an encoder that fails on {} values", values.len());
            Some((Vec::new(), Vec::new()))
        };
    })
    .await;
    for _ in 0..2 {
        // More rows than fit into the encoder's queue.
        let request = Request { attention: true, ..request("The sky is", 150) };
        let result = tokio::time::timeout(Duration::from_mins(2), test_engine.run(request)).await.unwrap();
        assert_eq!(result.generated().len(), 150);
        assert_eq!(result.items.iter().filter(|item| matches!(item, TraceItem::Attention(_))).count(), 75);
    }
}
