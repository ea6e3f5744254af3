//! The prefix that a prompt shares with a slot or with a state in the host cache is not recomputed.

use super::{assert_first_layer_equals, irregular_tokens, max_difference, rows, with_attention};
use crate::engine::{CompletedRun, TestEngine, request_tokens, test_engine, test_engine_with};
use thunder::engine::Request;
use thunder::events::{Scope, TokenId};

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

/// Starts an engine with one slot, and a host cache with room for `quarters / 4` states of 120 tokens.
async fn engine_with_small_host_cache(quarters: usize) -> TestEngine {
    let mut first = test_engine(1, false).await;
    first.run(request_tokens(irregular_tokens(1, 120), 1)).await;
    let state_bytes = first.engine.save_slot(&Scope::All, 0).await.unwrap().block.len();
    test_engine_with(1, false, |options| options.cache_ram_bytes = quarters * state_bytes / 4).await
}

/// Runs the prompts one after another. Returns the number of cached tokens of each.
async fn cached_tokens(test_engine: &mut TestEngine, prompts: &[Vec<TokenId>]) -> Vec<u32> {
    let mut cached = Vec::new();
    for prompt in prompts {
        cached.push(test_engine.run(request_tokens(prompt.clone(), 1)).await.end.finish.usage.cached_tokens);
    }
    cached
}

#[tokio::test]
async fn replaced_state_does_not_evict_the_cached_state_of_the_next_run() {
    let mut test_engine = engine_with_small_host_cache(6).await;
    let prompts = [1, 2, 1, 2].map(|seed| irregular_tokens(seed, 120));
    assert_eq!(cached_tokens(&mut test_engine, &prompts).await, [0, 0, 119, 119]);
}

#[tokio::test]
async fn host_cache_evicts_the_state_that_was_unused_for_longest() {
    let long = [irregular_tokens(1, 60), irregular_tokens(2, 60)].concat();
    let similar = [irregular_tokens(1, 50), irregular_tokens(5, 70)].concat();
    let other = irregular_tokens(3, 120);
    let continued = |prompt: &[TokenId]| [prompt, &[99]].concat();
    // Room for one state: the one that the slot loses, since it is the only copy.
    let mut test_engine = engine_with_small_host_cache(6).await;
    let prompts = [long.clone(), other.clone(), similar.clone(), continued(&other)];
    assert_eq!(cached_tokens(&mut test_engine, &prompts).await, [0, 0, 50, 120]);
    // Room for two states. The short one is not cached when `similar` replaces it.
    let mut test_engine = engine_with_small_host_cache(9).await;
    let (short, last) = (irregular_tokens(4, 20), irregular_tokens(6, 120));
    let prompts = [long.clone(), other, short, similar, last, continued(&long)];
    assert_eq!(cached_tokens(&mut test_engine, &prompts).await, [0, 0, 0, 50, 0, 120]);
}

#[tokio::test]
async fn host_cache_keeps_a_state_that_is_replaced_by_a_similar_one() {
    let mut test_engine = test_engine(1, false).await;
    let prompt = |seed| [irregular_tokens(1, 300), irregular_tokens(seed, 100)].concat();
    let fresh = |seed| Request { cache_prompt: false, ..request_tokens(prompt(seed), 1) };
    test_engine.run(fresh(2)).await;
    test_engine.run(fresh(3)).await;
    for seed in [2, 3] {
        let usage = test_engine.run(request_tokens(prompt(seed), 1)).await.end.finish.usage;
        assert_eq!(usage.cached_tokens, 399, "{seed}");
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
