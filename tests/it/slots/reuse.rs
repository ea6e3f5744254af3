//! The prefix that a prompt shares with a slot or with a state in the host cache is not recomputed.

use super::{assert_first_layer_equals, irregular_tokens, max_difference, rows, with_attention};
use crate::engine::{CompletedRun, request_tokens, test_engine, test_engine_with};

#[tokio::test]
async fn shared_prefix_of_a_slot_is_not_recomputed() {
    let mut test_engine = test_engine_with(2, false, |options| options.cache_ram_bytes = 0).await;
    let cached = |result: &CompletedRun| result.end.finish.usage.cached_tokens;
    let first = test_engine.run(request_tokens(irregular_tokens(1, 100), 1)).await;
    assert_eq!(cached(&first), 0);
    assert_eq!(
        cached(&test_engine.run(request_tokens(irregular_tokens(1, 100), 1)).await),
        99,
        "the last token must be evaluated again"
    );
    let mut diverged = irregular_tokens(1, 100);
    diverged.truncate(70);
    diverged.extend(irregular_tokens(5, 30));
    let result = test_engine.run(request_tokens(diverged.clone(), 8)).await;
    assert_eq!(cached(&result), 70, "only the different tokens must be removed");
    let mut uncached = request_tokens(diverged, 8);
    uncached.cache_prompt = false;
    let fresh = test_engine.run(uncached).await;
    assert_eq!((cached(&fresh), fresh.generated()), (0, result.generated()));
    // If less than a tenth of the prompt is cached, the other slot is used, and this one keeps its state.
    let mut mostly_new = irregular_tokens(1, 9);
    mostly_new.extend(irregular_tokens(8, 111));
    assert_eq!(cached(&test_engine.run(request_tokens(mostly_new, 1)).await), 9);
    assert_eq!(cached(&test_engine.run(request_tokens(irregular_tokens(1, 75), 1)).await), 70);
}

#[tokio::test]
async fn cached_chunks_are_shifted_if_requested() {
    let mut test_engine = test_engine(1, true).await;
    test_engine
        .run(request_tokens([irregular_tokens(1, 30), irregular_tokens(7, 20), irregular_tokens(2, 40)].concat(), 1))
        .await;
    let prompt = [irregular_tokens(1, 30), irregular_tokens(2, 40), vec![99, 98]].concat();
    let mut request = with_attention(request_tokens(prompt.clone(), 3));
    request.cache_reuse = 16;
    let result = test_engine.run(request).await;
    assert_eq!(result.end.finish.usage.cached_tokens, 70);
    assert_first_layer_equals(&result, &prompt).await;
    let plain = test_engine.run(request_tokens([irregular_tokens(1, 30), irregular_tokens(2, 20)].concat(), 3)).await;
    assert_eq!(plain.end.finish.usage.cached_tokens, 49);
}

#[tokio::test]
async fn replaced_state_is_kept_in_the_host_cache() {
    let expected = test_engine(1, true)
        .await
        .run(with_attention(request_tokens([irregular_tokens(1, 120), irregular_tokens(3, 5)].concat(), 6)))
        .await;
    for (bytes, cached) in [(64 << 20, 120), (0, 0)] {
        let mut test_engine = test_engine_with(1, true, |options| options.cache_ram_bytes = bytes).await;
        test_engine.run(request_tokens(irregular_tokens(1, 120), 1)).await;
        for other in 2..5 {
            test_engine.run(request_tokens(irregular_tokens(other, 110), 3)).await;
        }
        let result = test_engine
            .run(with_attention(request_tokens([irregular_tokens(1, 120), irregular_tokens(3, 5)].concat(), 6)))
            .await;
        assert_eq!(result.end.finish.usage.cached_tokens, cached);
        assert_eq!(result.generated(), expected.generated());
        for ((_, a), (_, b)) in rows(&result).iter().zip(&rows(&expected)) {
            assert!(max_difference(a, b) < 2e-3);
        }
    }
}

#[tokio::test]
async fn host_cache_keeps_a_state_that_is_used_for_a_short_prefix() {
    let mut test_engine = test_engine(1, false).await;
    let mut cached = async |prompt| test_engine.run(request_tokens(prompt, 1)).await.end.finish.usage.cached_tokens;
    let long = [irregular_tokens(1, 100), irregular_tokens(2, 200)].concat();
    assert_eq!(cached(long.clone()).await, 0);
    assert_eq!(cached(irregular_tokens(3, 110)).await, 0);
    assert_eq!(cached([irregular_tokens(1, 100), irregular_tokens(4, 40)].concat()).await, 100);
    assert_eq!(cached([long, vec![99]].concat()).await, 300);
}
