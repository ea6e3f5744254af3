//! What a prompt shares with a slot, or with a state in the machine's memory, is not computed again.

use super::{first_layer_agrees, long, rows, with_attention, worst};
use crate::engine::{Told, bench, bench_with, request_tokens};

#[tokio::test]
async fn shared_prefix_of_a_slot_is_not_recomputed() {
    let mut bench = bench_with(2, false, |options| options.cache_ram_bytes = 0).await;
    let cached = |told: &Told| told.end.finish.usage.cached_tokens;
    let whole = bench.tell(request_tokens(long(1, 100), 1)).await;
    assert_eq!(cached(&whole), 0);
    assert_eq!(cached(&bench.tell(request_tokens(long(1, 100), 1)).await), 99, "one token is always evaluated");
    let mut diverged = long(1, 100);
    diverged.truncate(70);
    diverged.extend(long(5, 30));
    let told = bench.tell(request_tokens(diverged.clone(), 8)).await;
    assert_eq!(cached(&told), 70, "only what differs is thrown away");
    let mut uncached = request_tokens(diverged, 8);
    uncached.cache_prompt = false;
    let fresh = bench.tell(uncached).await;
    assert_eq!((cached(&fresh), fresh.generated()), (0, told.generated()));
    // Below a tenth of the prompt, the other slot is taken, and this one keeps what it has.
    let mut barely = long(1, 9);
    barely.extend(long(8, 111));
    assert_eq!(cached(&bench.tell(request_tokens(barely, 1)).await), 9);
    assert_eq!(cached(&bench.tell(request_tokens(long(1, 75), 1)).await), 70);
}

#[tokio::test]
async fn cached_chunks_are_shifted_if_requested() {
    let mut bench = bench(1, true).await;
    bench.tell(request_tokens([long(1, 30), long(7, 20), long(2, 40)].concat(), 1)).await;
    let prompt = [long(1, 30), long(2, 40), vec![99, 98]].concat();
    let mut asked = with_attention(request_tokens(prompt.clone(), 3));
    asked.cache_reuse = 16;
    let told = bench.tell(asked).await;
    assert_eq!(told.end.finish.usage.cached_tokens, 70);
    first_layer_agrees(&told, &prompt).await;
    let plain = bench.tell(request_tokens([long(1, 30), long(2, 20)].concat(), 3)).await;
    assert_eq!(plain.end.finish.usage.cached_tokens, 49);
}

#[tokio::test]
async fn replaced_state_is_kept_in_the_host_cache() {
    let expected =
        bench(1, true).await.tell(with_attention(request_tokens([long(1, 120), long(3, 5)].concat(), 6))).await;
    for (bytes, kept) in [(64 << 20, 120), (0, 0)] {
        let mut bench = bench_with(1, true, |options| options.cache_ram_bytes = bytes).await;
        bench.tell(request_tokens(long(1, 120), 1)).await;
        for other in 2..5 {
            bench.tell(request_tokens(long(other, 110), 3)).await;
        }
        let told = bench.tell(with_attention(request_tokens([long(1, 120), long(3, 5)].concat(), 6))).await;
        assert_eq!(told.end.finish.usage.cached_tokens, kept);
        assert_eq!(told.generated(), expected.generated());
        for ((_, a), (_, b)) in rows(&told).iter().zip(&rows(&expected)) {
            assert!(worst(a, b) < 2e-3);
        }
    }
}
