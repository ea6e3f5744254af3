//! Keys that the cache keeps in 8 bits: llama.cpp turns them by a rotation of its own before it rounds them, and the rows are
//! those of what is left.

use super::reference::Reference;
use super::variant::{Kind, Variant};
use super::{asked, compare, tokens};
use crate::engine::bench_of;
use thunder::engine::Overflow;
use thunder::model::llama::CacheType;

/// Most that a value may be off.
const CLOSE: f64 = 1e-2;

#[tokio::test]
async fn rows_of_quantized_keys_are_nearly_exact() {
    let variant = Variant::new(Kind::Wide);
    let mut reference = Reference::new(&variant);
    let mut bench = bench_of(variant.model(), 2, true, |options| {
        options.ctx_size = 256;
        options.batch_size = 64;
        options.ubatch_size = 32;
        options.cache_type_k = CacheType::Q8_0;
        options.cache_type_v = CacheType::F32;
    })
    .await;
    let prompt = tokens(1, 150);
    let other = bench.engine.submit(asked(tokens(6, 9), 60)).await.unwrap();
    let told = bench.tell(asked(prompt.clone(), 10)).await;
    assert_eq!(compare(&told, &prompt, &mut reference, CLOSE, false), 10);
    drop(other);
    let next = [&prompt[..100], &tokens(2, 21)[..]].concat();
    let told = bench.tell(asked(next.clone(), 5)).await;
    assert!(told.end.finish.usage.cached_tokens > 0);
    assert_eq!(compare(&told, &next, &mut reference, CLOSE, false), 5);
    // Keys that move are turned back, moved, and rounded again.
    let prompt = tokens(4, 245);
    let mut request = asked(prompt.clone(), 25);
    request.overflow = Overflow::Shift { keep: Some(10), discard: 100 };
    let told = bench.tell(request).await;
    assert_eq!(told.end.finish.evicted_tokens, 100, "{:?}", told.end.finish);
    assert_eq!(compare(&told, &prompt, &mut reference, CLOSE, true), 25);
}
