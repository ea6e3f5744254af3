//! Invalid states and states of other models: each is rejected without side effects.

use super::{in_slot, irregular_tokens, state_of};
use crate::engine::{request, request_tokens, test_engine, test_engine_of, test_engine_with};
use crate::harness::ErrorTable;
use bytes::Bytes;
use std::path::Path;
use std::sync::Arc;
use thunder::engine::SlotError;
use thunder::events::{FinishReason, Scope};
use thunder::model::Model;
use thunder::model::llama::{AdapterSet, AttentionCapture, CacheType, ModelOptions, ScaledAdapter};

#[tokio::test]
async fn incompatible_state_is_rejected_without_side_effects() {
    let mut test_engine = test_engine_with(2, true, |options| options.attention = AttentionCapture::On).await;
    test_engine.run(in_slot(request_tokens(irregular_tokens(1, 50), 4), 0)).await;
    test_engine.run(in_slot(request_tokens(irregular_tokens(2, 70), 4), 1)).await;
    let snapshot = test_engine.engine.save_slot(&Scope::All, 0).await.unwrap().block.to_vec();
    let before = state_of(&mut test_engine, 1).await;
    let tokens = u32::from_le_bytes(snapshot[4..8].try_into().unwrap()) as usize;
    let kv_at = 8 + 4 * tokens;
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut snapshot = snapshot.clone();
        change(&mut snapshot);
        Bytes::from(snapshot)
    };
    // Clients can compute the checksum, so a forged state can have a valid one.
    let forged = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut snapshot = snapshot.clone();
        change(&mut snapshot);
        with_checksum(snapshot)
    };
    let set_number = |at: usize, value: u32| {
        move |snapshot: &mut Vec<u8>| snapshot[at..at + 4].copy_from_slice(&value.to_le_bytes())
    };
    let state_at = kv_at + 56;
    let cells_at = state_at + 4;
    let numbers_at = cells_at + 12 * tokens;
    let mut errors = ErrorTable::default();
    for (name, state) in [
        ("an empty state", Bytes::new()),
        ("a changed first byte", changed(&|snapshot| snapshot[0] = b'X')),
        ("6 bytes", changed(&|snapshot| snapshot.truncate(6))),
        ("100 bytes", changed(&|snapshot| snapshot.truncate(100))),
        ("20 bytes of the KV header", changed(&|snapshot| snapshot.truncate(kv_at + 20))),
        ("all bytes but the last", changed(&|snapshot| snapshot.truncate(snapshot.len() - 1))),
        ("an additional byte", changed(&|snapshot| snapshot.push(0))),
        ("4294967295 tokens", changed(&set_number(4, u32::MAX))),
        ("513 tokens", changed(&set_number(4, 513))),
        ("one token less", changed(&set_number(4, tokens as u32 - 1))),
        ("token 640", changed(&set_number(8, 640))),
        ("token -1", changed(&set_number(12, u32::MAX))),
        ("another token", changed(&set_number(8, 41))),
        ("KV data with another magic", changed(&|snapshot| snapshot[kv_at] = b'X')),
        ("version 9", changed(&set_number(kv_at + 4, 9))),
        ("another model", changed(&|snapshot| snapshot[kv_at + 8] ^= 1)),
        (
            "another type of keys",
            changed(&|snapshot| snapshot[kv_at + 24..kv_at + 32].copy_from_slice(b"q8_0\0\0\0\0")),
        ),
        ("a KV length of 7 bytes", changed(&set_number(kv_at + 40, 7))),
        ("a KV length above 28 GiB", changed(&set_number(kv_at + 44, 7))),
        ("a changed last byte", changed(&|snapshot| *snapshot.last_mut().unwrap() ^= 1)),
        ("3 cells", forged(&set_number(state_at, 3))),
        ("4294967295 cells", forged(&set_number(state_at, u32::MAX))),
        ("a first cell with position 5", forged(&set_number(cells_at, 5))),
        ("a second cell with position -1", forged(&set_number(cells_at + 12, u32::MAX))),
        ("a cell of 2 sequences", forged(&set_number(cells_at + 4, 2))),
        ("without flash attention", forged(&set_number(numbers_at, 0))),
        ("4294967295 layers", forged(&set_number(numbers_at + 4, u32::MAX))),
        ("another rotation of keys", forged(&set_number(numbers_at + 8, 64))),
        ("another type of keys in a layer", forged(&set_number(numbers_at + 16, 8))),
        ("another size of a key", forged(&set_number(numbers_at + 20, 8))),
        ("a size of a key above 4 GiB", forged(&set_number(numbers_at + 24, 1))),
    ] {
        let error = test_engine.engine.restore_slot(None, 1, state).await.unwrap_err();
        assert!(matches!(error, SlotError::State(_)), "{name}: {error:?}");
        errors.add_text(name, &error.to_string());
    }
    insta::assert_snapshot!("invalid_state_errors", errors);
    let mut after = state_of(&mut test_engine, 1).await;
    // The failed requests did not change the tokens of the slot.
    after.0.truncate(before.0.len());
    assert_eq!(after.0, before.0);
    assert_eq!(test_engine.engine.restore_slot(None, 1, Bytes::from(snapshot.clone())).await.unwrap(), tokens);
    // An engine with flash attention has another memory layout of values.
    let mut flash = crate::engine::test_engine(1, false).await;
    let error = flash.engine.restore_slot(None, 0, Bytes::from(snapshot)).await.unwrap_err();
    assert!(error.to_string().contains("flash attention on or off"), "{error}");
    assert_eq!(flash.run(request("The sky is", 3)).await.generated().len(), 3);
}

/// Returns the state of a slot with so few tokens that a test can change every byte.
pub async fn small_state(test_engine: &mut crate::engine::TestEngine) -> Vec<u8> {
    test_engine.run(in_slot(request_tokens(irregular_tokens(1, 3), 1), 0)).await;
    test_engine.engine.save_slot(&Scope::All, 0).await.unwrap().block.to_vec()
}

/// Returns a state with its valid checksum.
pub fn with_checksum(mut snapshot: Vec<u8>) -> Bytes {
    let tokens = u32::from_le_bytes(snapshot[4..8].try_into().unwrap()) as usize;
    let checksum_at = 8 + 4 * tokens + 48;
    if snapshot.len() >= checksum_at + 8 {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        hash.update(&snapshot[..checksum_at]);
        hash.update(&snapshot[checksum_at + 8..]);
        snapshot[checksum_at..checksum_at + 8].copy_from_slice(&hash.digest().to_le_bytes());
    }
    snapshot.into()
}

#[tokio::test]
async fn truncated_state_is_rejected() {
    let mut test_engine = test_engine(2, true).await;
    let snapshot = small_state(&mut test_engine).await;
    test_engine.run(in_slot(request_tokens(irregular_tokens(2, 40), 3), 1)).await;
    let before = test_engine.engine.slot_tokens(&Scope::All, 1).await.unwrap();
    for len in 0..snapshot.len() {
        for cut in [
            Bytes::from(snapshot[..len].to_vec()),
            if len < 100 { Bytes::new() } else { with_checksum(snapshot[..len].to_vec()) },
        ] {
            let error = test_engine.engine.restore_slot(None, 1, cut).await.unwrap_err();
            assert!(matches!(error, SlotError::State(_)), "{len} bytes: {error:?}");
        }
    }
    assert_eq!(test_engine.engine.slot_tokens(&Scope::All, 1).await.unwrap(), before);
    assert_eq!(test_engine.engine.restore_slot(None, 1, with_checksum(snapshot)).await.unwrap(), 3);
}

#[tokio::test]
async fn forged_state_is_rejected_or_harmless() {
    let mut test_engine = test_engine(2, true).await;
    let expected = test_engine.run(in_slot(request_tokens(irregular_tokens(4, 60), 8), 1)).await;
    let snapshot = small_state(&mut test_engine).await;
    let (mut rejected, mut accepted) = (0, 0);
    for at in 0..snapshot.len() {
        for byte in [snapshot[at] ^ 1, snapshot[at] ^ 0x80, 0xff] {
            let mut forged = snapshot.clone();
            forged[at] = byte;
            match test_engine.engine.restore_slot(None, 1, with_checksum(forged)).await {
                Ok(tokens) => {
                    assert_eq!(tokens, 3, "byte {at}");
                    accepted += 1;
                }
                Err(SlotError::State(_)) => rejected += 1,
                Err(error) => panic!("byte {at} as {byte:#x}: {error}"),
            }
        }
    }
    // Changed headers, counts, types and lengths are rejected; changed tokens, keys and values are accepted.
    assert!(rejected > 600 && accepted > 1000, "{rejected} rejected, {accepted} accepted");
    // The next run in the slot is not affected.
    let mut next = in_slot(request_tokens(irregular_tokens(4, 60), 8), 1);
    next.cache_prompt = false;
    assert_eq!(test_engine.run(next).await.generated(), expected.generated());
}

#[tokio::test]
async fn nan_values_in_a_state_are_rejected() {
    let types = [CacheType::F16, CacheType::F32, CacheType::Bf16];
    for kind in types {
        let mut test_engine =
            test_engine_with(1, true, |options| (options.cache_type_k, options.cache_type_v) = (kind, kind)).await;
        let snapshot = small_state(&mut test_engine).await;
        let tokens = 3;
        let keys_start = 8 + 4 * tokens + 56 + 4 + 12 * tokens + 16 + 12;
        for (at, byte) in [(keys_start, 0xff), (snapshot.len() - 8, 0xff)] {
            let mut forged = snapshot.clone();
            forged[at..at + 8].fill(byte);
            let error = test_engine.engine.restore_slot(None, 0, with_checksum(forged)).await.unwrap_err().to_string();
            assert!(error.contains("NaN"), "{kind}: {error}");
        }
        assert_eq!(test_engine.engine.restore_slot(None, 0, with_checksum(snapshot)).await.unwrap(), tokens);
    }
}

#[tokio::test]
async fn nan_logits_end_the_run_but_not_the_server() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models");
    let options = ModelOptions { adapters: vec![(folder.join("tiny-lora.gguf"), 0.0)], ..ModelOptions::default() };
    let model = Arc::new(Model::load(&folder.join("tiny.gguf"), &options, |_| true).unwrap());
    let mut test_engine = test_engine_of(model, 1, true, |_| {}).await;
    let expected = test_engine.run(request_tokens(irregular_tokens(2, 50), 5)).await;
    let mut request = request_tokens(irregular_tokens(1, 50), 5);
    request.adapters = Some(AdapterSet::new([ScaledAdapter { id: 0, scale: 1e38 }]));
    request.sampling.temperature = 1.0;
    let result = test_engine.run(request).await;
    assert_eq!(result.end.finish.reason, FinishReason::Error);
    assert_eq!(
        result.end.finish.message.as_deref(),
        Some(
            "the model returned logits that are NaN or infinite: its KV state or its weights are damaged; the slot's state is \
             discarded"
        )
    );
    assert!(test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap().tokens.is_empty());
    let result = test_engine.run(request_tokens(irregular_tokens(2, 50), 5)).await;
    assert_eq!((result.end.finish.reason, result.generated()), (FinishReason::Length, expected.generated()));
}
