//! Models with recurrent layers or an attention window, and quantized caches: continued runs equal fresh ones token for
//! token, and operations that cannot be exact are rejected without side effects.

use super::{in_slot, irregular_tokens, max_difference, rows, with_attention};
use crate::engine::{
    CompletedRun, TestEngine, act_once, added_at, follow, options, request_tokens, test_engine, test_engine_of,
    test_engine_with, with_mod,
};
use std::path::Path;
use std::sync::Arc;
use thunder::engine::{Engine, Overflow, Ses1Error, SlotError, SubmitError, UnsupportedAttention};
use thunder::events::{FinishReason, Scope, TokenId};
use thunder::model::Model;
use thunder::model::llama::{CacheType, ModelOptions};
use thunder::mods::Action;

pub const RECURRENT: [&str; 2] = ["memories/recurrent", "memories/hybrid"];
const WINDOW: &str = "memories/window";

pub fn load(name: &str) -> Arc<Model> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(format!("{name}.gguf"));
    Arc::new(Model::load(&path, &ModelOptions::default(), |_| true).unwrap())
}

/// Returns the tokens of an answer that is generated without cached state.
pub async fn generate_uncached(test_engine: &mut TestEngine, prompt: &[TokenId], count: usize) -> Vec<TokenId> {
    let mut request = in_slot(request_tokens(prompt.to_vec(), count as u32), 1);
    request.cache_prompt = false;
    test_engine.run(request).await.generated()
}

/// Continues a prompt in slot 0 and compares it with a fresh run. Returns the number of reused tokens.
async fn assert_equals_fresh_run(test_engine: &mut TestEngine, prompt: &[TokenId]) -> usize {
    let result = test_engine.run(in_slot(request_tokens(prompt.to_vec(), 10), 0)).await;
    assert_eq!(result.generated(), generate_uncached(test_engine, prompt, 10).await);
    result.end.finish.usage.cached_tokens as usize
}

/// Runs a prompt with a mod that replaces the last five of ten generated tokens by two others.
async fn run_with_backtrack(test_engine: &mut TestEngine, prompt: &[TokenId]) -> CompletedRun {
    let request = in_slot(request_tokens(prompt.to_vec(), 20), 0);
    let backtrack = act_once(|call| added_at(call, 10), Action::Backtrack { n: 5, tokens: vec![60, 61] });
    let result = test_engine.run(with_mod(request, false, backtrack)).await;
    assert_eq!((result.generated().len(), &result.generated()[5..7]), (20, &[60, 61][..]));
    result
}

#[tokio::test]
async fn continued_state_equals_a_fresh_run() {
    for name in [RECURRENT[0], RECURRENT[1], WINDOW] {
        let is_recurrent = name != WINDOW;
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let prompt = irregular_tokens(1, 100);
        let first = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await.generated();
        assert_eq!(first, generate_uncached(&mut test_engine, &prompt, 12).await, "{name}");
        let cached_sequence = [prompt.as_slice(), &first[..11]].concat();
        assert_eq!(
            assert_equals_fresh_run(&mut test_engine, &[cached_sequence.as_slice(), &[77, 78]].concat()).await,
            111,
            "{name}"
        );
        for cut in [99, 90, 40] {
            let reused = assert_equals_fresh_run(
                &mut test_engine,
                &[&prompt[..cut], &irregular_tokens(cut as i32, 20)].concat(),
            )
            .await;
            // A recurrent state can only return to a checkpoint, which is here at the last token of the prompt.
            assert_eq!(reused, if is_recurrent && cut < 99 { 0 } else { cut }, "{name} at {cut}");
        }
        assert_eq!(
            assert_equals_fresh_run(&mut test_engine, &prompt).await,
            if is_recurrent { 99 } else { 40 },
            "{name}"
        );
        // The slot gets another prompt and then a continuation of the first, several times.
        for last in 80..83 {
            assert_equals_fresh_run(&mut test_engine, &irregular_tokens(3, 110)).await;
            let again = [prompt.as_slice(), &first[..9], &[last]].concat();
            assert_eq!(assert_equals_fresh_run(&mut test_engine, &again).await, 109, "{name}");
        }
        let result = run_with_backtrack(&mut test_engine, &prompt).await;
        let (kept, rest) = (result.generated()[..7].to_vec(), result.generated()[7..].to_vec());
        assert_eq!(rest, generate_uncached(&mut test_engine, &[prompt.as_slice(), &kept].concat(), 13).await, "{name}");
        assert_eq!(
            assert_equals_fresh_run(&mut test_engine, &[prompt.as_slice(), &result.generated()].concat()).await,
            119,
            "{name}"
        );
    }
}

#[tokio::test]
async fn recurrent_streams_are_independent() {
    for name in [RECURRENT[0], RECURRENT[1], WINDOW] {
        let mut test_engine = test_engine_of(load(name), 3, false, |_| {}).await;
        let prompts: Vec<_> = (0..5).map(|index| irregular_tokens(index, 50 + 13 * index as usize)).collect();
        let mut alone = Vec::new();
        for prompt in &prompts {
            alone.push(test_engine.run(in_slot(request_tokens(prompt.clone(), 20), 1)).await.text);
            test_engine.engine.erase_slot(&Scope::All, 1).await.unwrap();
        }
        let mut together = Vec::new();
        for prompt in &prompts {
            together.push(test_engine.engine.submit(request_tokens(prompt.clone(), 20)).await.unwrap());
        }
        for (generation, expected) in together.into_iter().zip(&alone) {
            assert_eq!(&follow(generation.output).await.0, expected, "{name}");
        }
    }
}

#[tokio::test]
async fn remaining_context_is_recomputed_if_cells_cannot_shift() {
    let bf16 = |options: &mut thunder::engine::EngineOptions| {
        (options.cache_type_k, options.cache_type_v) = (CacheType::Bf16, CacheType::Bf16);
    };
    let engines = [
        test_engine_of(load(RECURRENT[0]), 2, false, |_| {}).await,
        test_engine_of(load(RECURRENT[1]), 2, false, |_| {}).await,
        test_engine_with(2, false, bf16).await,
    ];
    for mut test_engine in engines {
        let mut endless = in_slot(request_tokens(irregular_tokens(1, 100), 450), 0);
        endless.limits.max_steps = 10_000;
        endless.overflow = Overflow::Shift { keep: Some(20), discard: 0 };
        let result = test_engine.run(endless).await;
        assert_eq!((result.end.finish.reason, result.end.finish.evicted_tokens), (FinishReason::Length, 245));
        let sequence = [irregular_tokens(1, 100), result.generated()].concat();
        let remaining = [&sequence[..20], &sequence[265..512]].concat();
        assert_eq!(sequence[512..], generate_uncached(&mut test_engine, &remaining, 38).await);
    }
}

/// Asserts that tokens cannot be removed, and that the slot keeps all its tokens.
async fn assert_shift_rejected(test_engine: &mut TestEngine, slot: u32, keep: usize, discard: usize, reason: &str) {
    let before = test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().tokens;
    let error = test_engine.engine.shift_slot(&Scope::All, slot, keep, discard).await.unwrap_err();
    assert!(matches!(error, SlotError::NotRemovable(_)), "{error}");
    assert!(error.to_string().contains(reason), "{error} does not contain {reason:?}");
    assert_eq!(test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().tokens, before);
    let prompt = [before.as_slice(), &[77]].concat();
    let result = test_engine.run(in_slot(request_tokens(prompt, 1), slot)).await;
    assert_eq!(result.end.finish.usage.cached_tokens as usize, before.len());
}

#[tokio::test]
async fn recurrent_state_rejects_shifts_and_states_of_other_models() {
    let foreign = {
        let mut tiny = test_engine(1, false).await;
        tiny.run(request_tokens(irregular_tokens(1, 40), 1)).await;
        tiny.engine.save_slot(&Scope::All, 0).await.unwrap().block
    };
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 1, false, |_| {}).await;
        test_engine.run(request_tokens(irregular_tokens(1, 50), 1)).await;
        assert_shift_rejected(&mut test_engine, 0, 10, 20, "recurrent").await;
        assert_shift_rejected(&mut test_engine, 0, 40, 11, "recurrent").await;
        let error = test_engine.engine.restore_slot(None, 0, foreign.clone()).await.unwrap_err();
        assert!(matches!(error, SlotError::State(Ses1Error::Model)), "{error}");
        let tokens = test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap().tokens.len();
        assert_eq!(
            test_engine.engine.shift_slot(&Scope::All, 0, 0, tokens).await.unwrap(),
            0,
            "all tokens can be removed"
        );
        test_engine.run(request_tokens(irregular_tokens(1, 50), 1)).await;
    }
}

#[tokio::test]
async fn attention_is_captured_in_attention_layers() {
    let test_engine = test_engine_of(load(RECURRENT[0]), 1, true, |_| {}).await;
    let error = test_engine.engine.attention().unwrap_err();
    assert!(
        matches!(error, SubmitError::AttentionUnsupported { reason: UnsupportedAttention::Recurrent, .. }),
        "{error}"
    );
    let mut alone = test_engine_of(load(RECURRENT[1]), 1, true, |_| {}).await;
    let expected = alone.run(with_attention(request_tokens(irregular_tokens(1, 100), 5))).await;
    let mut shared = test_engine_of(load(RECURRENT[1]), 3, true, |_| {}).await;
    let other = shared.engine.submit(with_attention(request_tokens(irregular_tokens(2, 70), 40))).await.unwrap();
    let result = shared.run(with_attention(request_tokens(irregular_tokens(1, 100), 5))).await;
    follow(other.output).await;
    assert_eq!(result.generated(), expected.generated());
    for ((len, row), (_, expected)) in rows(&result).iter().zip(rows(&expected)) {
        // Two of the four layers have two heads each.
        assert_eq!(row.len(), 4 * len);
        assert!(max_difference(row, &expected) < 1e-3);
        assert!(row.chunks_exact(*len).all(|one| (one.iter().sum::<f32>() - 1.0).abs() < 1e-3));
    }
}

#[tokio::test]
async fn bf16_keys_cannot_be_shifted() {
    let types = |options: &mut thunder::engine::EngineOptions| options.cache_type_k = CacheType::Bf16;
    let mut test_engine = test_engine_with(1, true, types).await;
    test_engine.run(request_tokens(irregular_tokens(1, 50), 1)).await;
    assert_shift_rejected(&mut test_engine, 0, 10, 20, "bf16").await;
    assert_eq!(test_engine.engine.shift_slot(&Scope::All, 0, 40, 11).await.unwrap(), 40, "the end can be removed");
}

#[tokio::test]
async fn state_with_window_is_restored_and_shifted_only_before_the_window() {
    let mut test_engine = test_engine_of(load(WINDOW), 2, false, |_| {}).await;
    let prompt = irregular_tokens(1, 100);
    let answer = test_engine.run(in_slot(request_tokens(prompt.clone(), 4), 0)).await.generated();
    let snapshot = test_engine.engine.save_slot(&Scope::All, 0).await.unwrap().block;
    let cached_sequence = [prompt.as_slice(), &answer[..3]].concat();
    let restore =
        async |test_engine: &TestEngine| test_engine.engine.restore_slot(None, 1, snapshot.clone()).await.unwrap();
    assert_eq!(restore(&test_engine).await, 103);
    // Layers with a window have only the last tokens, so requests that need earlier ones are rejected or recomputed.
    assert_shift_rejected(&mut test_engine, 1, 90, 13, "window").await;
    restore(&test_engine).await;
    assert_shift_rejected(&mut test_engine, 1, 90, 5, "window").await;
    for (cut, reused) in [(103, 103), (102, 102), (60, 0)] {
        restore(&test_engine).await;
        let prompt = [&cached_sequence[..cut], &[88, 89]].concat();
        let result = test_engine.run(in_slot(request_tokens(prompt.clone(), 10), 1)).await;
        assert_eq!(result.end.finish.usage.cached_tokens, reused, "after {cut}");
        assert_eq!(result.generated(), generate_uncached(&mut test_engine, &prompt, 10).await, "after {cut}");
    }
    // In both slots, tokens before the window can be removed.
    restore(&test_engine).await;
    let mut after = Vec::new();
    for slot in [0, 1] {
        assert_eq!(test_engine.engine.shift_slot(&Scope::All, slot, 10, 20).await.unwrap(), 83);
        let prompt = [&cached_sequence[..10], &cached_sequence[30..], &[77]].concat();
        let result = test_engine.run(in_slot(request_tokens(prompt, 10), slot)).await;
        assert_eq!(result.end.finish.usage.cached_tokens, 83);
        after.push(result.generated());
    }
    assert_eq!(after[0], after[1]);
}

#[tokio::test]
async fn runs_with_quantized_caches_equal_fresh_runs() {
    let model = load("models/demo");
    let kinds = [
        (CacheType::Q8_0, CacheType::F16, true),
        (CacheType::Q4_0, CacheType::F32, true),
        (CacheType::Q8_0, CacheType::Q8_0, false),
        (CacheType::Q4_1, CacheType::Iq4Nl, false),
    ];
    for (keys, values, attention) in kinds {
        let types = |options: &mut thunder::engine::EngineOptions| {
            (options.cache_type_k, options.cache_type_v) = (keys, values);
        };
        let mut test_engine = test_engine_of(Arc::clone(&model), 2, attention, types).await;
        let prompt = irregular_tokens(1, 80);
        let first = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await.generated();
        assert_eq!(first, generate_uncached(&mut test_engine, &prompt, 12).await, "{keys} {values}");
        let cached_sequence = [prompt.as_slice(), &first[..11]].concat();
        assert_eq!(
            assert_equals_fresh_run(&mut test_engine, &[cached_sequence.as_slice(), &[77, 78]].concat()).await,
            91
        );
        assert_eq!(
            assert_equals_fresh_run(&mut test_engine, &[&prompt[..50], &irregular_tokens(2, 20)].concat()).await,
            50
        );
        assert_equals_fresh_run(&mut test_engine, &irregular_tokens(3, 110)).await;
        assert_eq!(
            assert_equals_fresh_run(&mut test_engine, &[cached_sequence.as_slice(), &[99]].concat()).await,
            91,
            "the state must come from the host cache"
        );
        run_with_backtrack(&mut test_engine, &prompt).await;
        // A copy continues like the original, also after both were shifted.
        test_engine.run(in_slot(request_tokens(cached_sequence.clone(), 1), 0)).await;
        let snapshot = test_engine.engine.save_slot(&Scope::All, 0).await.unwrap().block;
        test_engine.engine.restore_slot(None, 1, snapshot).await.unwrap();
        let prompt = [&cached_sequence[..10], &cached_sequence[30..], &[50]].concat();
        let mut result = Vec::new();
        for slot in [0, 1] {
            assert_eq!(test_engine.engine.shift_slot(&Scope::All, slot, 10, 20).await.unwrap(), 71);
            let request = in_slot(request_tokens(prompt.clone(), 10), slot);
            result.push(test_engine.run(if attention { with_attention(request) } else { request }).await);
        }
        assert_eq!((result[0].generated(), rows(&result[0])), (result[1].generated(), rows(&result[1])));
        if attention {
            // The first layer equals that of a fresh run only if the shifted keys were rotated correctly.
            let mut uncached = in_slot(with_attention(request_tokens(prompt, 1)), 1);
            uncached.cache_prompt = false;
            let expected = rows(&test_engine.run(uncached).await).remove(0).1;
            let shifted = rows(&result[0]).remove(0).1;
            let difference = max_difference(&shifted[..shifted.len() / 4], &expected[..expected.len() / 4]);
            assert!(
                difference < if keys == CacheType::Q8_0 { 0.02 } else { 0.2 },
                "{keys}: the difference is {difference}"
            );
        }
    }
}

#[tokio::test]
async fn quantized_cache_for_heads_of_another_size_is_rejected() {
    for attention in [true, false] {
        let mut options = options(1, attention);
        options.cache_type_k = CacheType::Q8_0;
        let (recorder, _signals) = tokio::sync::mpsc::channel(1);
        let error = Engine::start(crate::engine::model(), options, recorder).await.err().unwrap().to_string();
        assert_eq!(
            error,
            "a KV cache of q8_0 stores blocks of 32 values, but the heads of this model have 16 values, which is not a multiple of \
             32; use f16, bf16 or f32"
        );
    }
}
