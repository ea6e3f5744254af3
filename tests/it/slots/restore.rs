//! States that are saved and restored in the same slot, in another slot, and in another engine.

use super::{alternatives, in_slot, irregular_tokens, max_difference, rows, with_attention};
use crate::engine::{request, request_tokens, test_engine, test_engine_with};
use thunder::engine::{Ses1Error, SlotError};
use thunder::events::Scope;
use thunder::model::llama::CacheType;

#[tokio::test]
async fn restored_slot_continues_like_the_original() {
    for attention in [false, true] {
        let mut first = test_engine(2, attention).await;
        let with_mode = |request| if attention { with_attention(request) } else { request };
        let first_answer = first.run(in_slot(request_tokens(irregular_tokens(1, 60), 8), 0)).await;
        let mut prompt = irregular_tokens(1, 60);
        prompt.extend(first_answer.generated());
        let saved = first.engine.save_slot(&Scope::All, 0).await.unwrap();
        assert_eq!(saved.tokens, 67, "the last token was sampled, but not decoded");
        let expected = first.run(in_slot(with_mode(request_tokens(prompt.clone(), 12)), 0)).await;
        assert_eq!(expected.end.finish.usage.cached_tokens, 67);
        first.run(in_slot(request_tokens(irregular_tokens(2, 90), 4), 0)).await;
        // The state is restored into another slot, and into an engine with another number of slots.
        let mut second = test_engine(3, attention).await;
        second.run(in_slot(request_tokens(irregular_tokens(3, 100), 4), 2)).await;
        for (original, slot) in [(true, 1), (false, 2), (false, 0)] {
            let test_engine = if original { &mut first } else { &mut second };
            assert_eq!(test_engine.engine.restore_slot(None, slot, saved.block.clone()).await.unwrap(), 67);
            assert_eq!(test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().tokens, prompt[..67]);
            let result = test_engine.run(in_slot(with_mode(request_tokens(prompt.clone(), 12)), slot)).await;
            assert_eq!(result.end.finish.usage.cached_tokens, 67);
            assert_eq!(result.generated(), expected.generated());
            assert_eq!(max_difference(&alternatives(&result), &alternatives(&expected)), 0.0);
            assert_eq!(rows(&result), rows(&expected));
            assert_eq!(rows(&result).len(), if attention { 12 } else { 0 });
        }
    }
}

#[tokio::test]
async fn empty_slot_can_be_saved_and_restored() {
    let mut test_engine = test_engine(1, false).await;
    let empty = test_engine.engine.save_slot(&Scope::All, 0).await.unwrap();
    assert_eq!(empty.tokens, 0);
    test_engine.run(request("The sky is", 3)).await;
    assert_eq!(test_engine.engine.restore_slot(None, 0, empty.block).await.unwrap(), 0);
    assert!(test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap().tokens.is_empty());
    assert!(matches!(
        test_engine.engine.save_slot(&Scope::All, 1).await,
        Err(SlotError::NoSuchSlot { slot: 1, slots: 1 })
    ));
}

#[test]
fn cache_type_flags_list_the_known_types() {
    let flags = thunder::config::CacheTypeFlag::ALL.map(thunder::config::CacheTypeFlag::as_str);
    assert_eq!(CacheType::ALL.map(CacheType::as_str), flags);
}

#[tokio::test]
async fn state_of_another_cache_type_is_rejected() {
    let with_f32_cache = |options: &mut thunder::engine::EngineOptions| {
        options.cache_type_k = CacheType::F32;
        options.cache_type_v = CacheType::F32;
    };
    let mut first = test_engine_with(1, true, with_f32_cache).await;
    let expected = first.run(request_tokens(irregular_tokens(1, 64), 20)).await;
    let mut prompt = irregular_tokens(1, 64);
    prompt.extend(&expected.generated()[..10]);
    first.run(request_tokens(prompt.clone(), 1)).await;
    let saved = first.engine.save_slot(&Scope::All, 0).await.unwrap();
    let mut second = test_engine_with(2, true, with_f32_cache).await;
    second.engine.restore_slot(None, 1, saved.block.clone()).await.unwrap();
    let result = second.run(in_slot(request_tokens(prompt, 10), 1)).await;
    assert_eq!(result.generated(), expected.generated()[10..]);
    let with_f16_cache = test_engine(1, true).await;
    let error = with_f16_cache.engine.restore_slot(None, 0, saved.block).await.unwrap_err();
    assert!(matches!(error, SlotError::State(Ses1Error::CacheType { .. })), "{error}");
    assert_eq!(
        error.to_string(),
        "the state was saved with a KV cache of f32 keys and f32 values; this server uses f16 keys and f16 values"
    );
}
