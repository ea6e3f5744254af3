//! Keys in an 8-bit cache. llama.cpp rotates keys before it rounds them, and rows are computed from the rounded keys.

use super::reference::Reference;
use super::variant::{Kind, Variant};
use super::{attention_request, compare, tokens};
use crate::engine::test_engine_of;
use thunder::engine::Overflow;
use thunder::model::llama::{AttentionCapture, CacheType};

#[tokio::test]
async fn rows_of_quantized_keys_are_nearly_exact() {
    // Quantized values require flash attention. With flash attention, the rows are computed from its inputs.
    for (capture, values, tolerance) in [
        (AttentionCapture::On, CacheType::F32, 1e-2),
        (AttentionCapture::Flash, CacheType::F16, 2e-2),
        (AttentionCapture::Flash, CacheType::Q8_0, 2e-2),
    ] {
        assert_rows_of_quantized_keys(capture, values, tolerance).await;
    }
}

async fn assert_rows_of_quantized_keys(capture: AttentionCapture, values: CacheType, tolerance: f64) {
    let variant = Variant::new(Kind::Wide);
    let mut reference = Reference::new(&variant);
    let mut test_engine = test_engine_of(variant.model(), 2, true, |options| {
        options.ctx_size = 256;
        options.batch_size = 64;
        options.ubatch_size = 32;
        options.cache_type_k = CacheType::Q8_0;
        options.attention = capture;
        options.cache_type_v = values;
    })
    .await;
    let prompt = tokens(1, 150);
    let other = test_engine.engine.submit(attention_request(tokens(6, 9), 60)).await.unwrap();
    let result = test_engine.run(attention_request(prompt.clone(), 10)).await;
    assert_eq!(compare(&result, &prompt, &mut reference, tolerance, false), 10);
    drop(other);
    let next = [&prompt[..100], &tokens(2, 21)[..]].concat();
    let result = test_engine.run(attention_request(next.clone(), 5)).await;
    assert!(result.end.finish.usage.cached_tokens > 0);
    assert_eq!(compare(&result, &next, &mut reference, tolerance, false), 5);
    // Shifted keys are rotated back, moved, and rounded again.
    let prompt = tokens(4, 245);
    let mut request = attention_request(prompt.clone(), 25);
    request.overflow = Overflow::Shift { keep: Some(10), discard: 100 };
    let result = test_engine.run(request).await;
    assert_eq!(result.end.finish.evicted_tokens, 100, "{:?}", result.end.finish);
    assert_eq!(compare(&result, &prompt, &mut reference, tolerance, true), 25);
}
