//! Recurrent states: saved and restored as a whole, rolled back only to a checkpoint.

use super::invalid_states::{signed, small_state};
use super::memory_types::{RECURRENT, fresh, load};
use super::{in_slot, logprobs, long, state_of, worst};
use crate::engine::{added_at, follow, request_tokens, test_engine, test_engine_of, with_mod};
use bytes::Bytes;
use std::sync::atomic::{AtomicUsize, Ordering};
use thunder::engine::{Ses1Error, SlotError};
use thunder::events::{Span, TokenId};
use thunder::model::llama::CacheType;
use thunder::mods::Action;

#[tokio::test]
async fn restored_slot_continues_as_the_original() {
    for name in RECURRENT {
        let mut first = test_engine_of(load(name), 2, false, |_| {}).await;
        let begun = first.run(in_slot(request_tokens(long(1, 60), 8), 0)).await;
        let prompt = [long(1, 60), begun.generated()].concat();
        let saved = first.engine.save_slot(&thunder::events::Scope::All, 0).await.unwrap();
        assert_eq!(saved.tokens, 67, "the last token was sampled, but not decoded");
        let expected = first.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await;
        assert_eq!(expected.end.finish.usage.cached_tokens, 67);
        // Into another slot, and into an engine with another number of slots, as after a restart, beside another run.
        let mut second = test_engine_of(load(name), 3, false, |_| {}).await;
        second.run(in_slot(request_tokens(long(3, 100), 4), 2)).await;
        for (original, slot) in [(true, 1), (true, 0), (false, 2), (false, 0)] {
            let test_engine = if original { &mut first } else { &mut second };
            let other =
                test_engine.engine.submit(in_slot(request_tokens(long(5, 50), 30), 1 - slot.min(1))).await.unwrap();
            assert_eq!(test_engine.engine.restore_slot(None, slot, saved.block.clone()).await.unwrap(), 67, "{name}");
            assert_eq!(
                test_engine.engine.slot_tokens(&thunder::events::Scope::All, slot).await.unwrap().tokens,
                prompt[..67]
            );
            // Sums in a batch with another run differ in their last bits.
            follow(other.output).await;
            let result = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), slot)).await;
            assert_eq!(result.end.finish.usage.cached_tokens, 67, "{name}");
            assert_eq!(result.generated(), expected.generated(), "{name} in slot {slot}");
            assert_eq!(worst(&logprobs(&result), &logprobs(&expected)), 0.0, "{name} in slot {slot}");
        }
        // A state that is saved again is the same except for the number of its slot.
        second.engine.restore_slot(None, 0, saved.block.clone()).await.unwrap();
        assert!(second.engine.save_slot(&thunder::events::Scope::All, 0).await.unwrap().block == saved.block, "{name}");
        assert!(saved.block.len() <= second.engine.max_snapshot_bytes().unwrap());
    }
}

#[tokio::test]
async fn truncated_or_forged_state_is_rejected_or_harmless() {
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let expected = test_engine.run(in_slot(request_tokens(long(4, 60), 8), 1)).await.generated();
        let block = small_state(&mut test_engine).await;
        let before = state_of(&mut test_engine, 1).await;
        // Headers and the beginning of every row; skips plain numbers.
        let places = |end: usize| (0..end).filter(move |at| *at < 400 || at % 97 == 0 || end - at < 20);
        for len in places(block.len()) {
            let forged = if len < 100 { Bytes::new() } else { signed(block[..len].to_vec()) };
            for cut in [Bytes::from(block[..len].to_vec()), forged] {
                let error = test_engine.engine.restore_slot(None, 1, cut).await.unwrap_err();
                assert!(matches!(error, SlotError::State(_)), "{name}: {len} bytes: {error:?}");
            }
        }
        let mut longer = block.clone();
        longer.push(0);
        assert!(matches!(test_engine.engine.restore_slot(None, 1, longer.into()).await, Err(SlotError::State(_))));
        let mut after = state_of(&mut test_engine, 1).await.0;
        after.truncate(before.0.len());
        assert_eq!(after, before.0, "a rejected state has no side effects");
        let (mut refused, mut taken) = (0, 0);
        for at in places(block.len()) {
            for byte in [block[at] ^ 1, block[at] ^ 0x80, 0xff] {
                let mut forged = block.clone();
                forged[at] = byte;
                match test_engine.engine.restore_slot(None, 1, signed(forged)).await {
                    Ok(tokens) => {
                        assert_eq!(tokens, 3, "{name}: byte {at}");
                        taken += 1;
                    }
                    Err(SlotError::State(_)) => refused += 1,
                    Err(error) => panic!("{name}: byte {at} as {byte:#x}: {error}"),
                }
            }
        }
        assert!(refused > 150 && taken > 150, "{name}: {refused} refused, {taken} taken");
        assert_eq!(fresh(&mut test_engine, &long(4, 60), 8).await, expected, "{name}: the next run is not affected");
        assert_eq!(test_engine.engine.restore_slot(None, 1, signed(block)).await.unwrap(), 3);
    }
}

#[tokio::test]
async fn forged_values_of_a_recurrent_state_are_reported() {
    let mut test_engine = test_engine_of(load(RECURRENT[0]), 1, false, |_| {}).await;
    let block = small_state(&mut test_engine).await;
    let before = test_engine.engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap();
    // After magic, count, three tokens and the header of the KV data: cells, position, sequences, order, layers, rows.
    let state = 8 + 12 + 56;
    let nan = f32::NAN.to_bits();
    for (at, value, reason) in [
        (state, 0, "has 0 recurrent states"),
        (state, u32::MAX, "4294967295 recurrent states"),
        (state + 4, 1, "position 1"),
        (state + 4, u32::MAX, "position -1"),
        (state + 8, 1, "the number of sequences of a cell is 1"),
        (state + 12, 1, "the order of recurrent states is 1"),
        (state + 16, 9, "the number of layers is 9"),
        (state + 20, 1, "the type of a recurrent state is f16, expected f32"),
        (state + 24, 0, "the size of a recurrent state is 0"),
        (state + 28, 7, "the size of a recurrent state is"),
        (state + 40, nan, "NaN"),
        (block.len() - 4, f32::INFINITY.to_bits(), "NaN"),
    ] {
        let mut forged = block.clone();
        forged[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let error = test_engine.engine.restore_slot(None, 0, signed(forged)).await.unwrap_err();
        assert!(matches!(error, SlotError::State(_)), "{error:?}");
        assert!(error.to_string().contains(reason), "{error} should say {reason}");
    }
    assert_eq!(test_engine.engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap(), before);
    let other = test_engine_of(load(RECURRENT[1]), 1, false, |_| {}).await;
    let error = other.engine.restore_slot(None, 0, block.clone().into()).await.unwrap_err();
    assert!(matches!(error, SlotError::State(Ses1Error::Model)), "{error}");
    let wide = |options: &mut thunder::engine::EngineOptions| options.cache_type_k = CacheType::F32;
    let mut hybrid = test_engine_of(load(RECURRENT[1]), 1, false, wide).await;
    let block = small_state(&mut hybrid).await;
    let error = other.engine.restore_slot(None, 0, block.into()).await.unwrap_err();
    assert!(matches!(error, SlotError::State(Ses1Error::CacheType { .. })), "{error}");
}

#[tokio::test]
async fn repeated_prompt_is_not_recomputed() {
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let prompt = long(1, 300);
        let first = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await;
        assert_eq!(first.end.finish.usage.cached_tokens, 0);
        for slot in [0, 0, 1] {
            // In its own slot, and from a copy of another slot.
            let again = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), slot)).await;
            assert_eq!(again.end.finish.usage.cached_tokens, 299, "{name}");
            assert_eq!(again.generated(), first.generated(), "{name}");
            assert_eq!(test_engine.engine.slot_tokens(&thunder::events::Scope::All, slot).await.unwrap().processed, 1);
        }
        for slot in [0, 1] {
            test_engine.run(in_slot(request_tokens(long(2, 310), 4), slot)).await;
        }
        let again = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await;
        assert_eq!((again.end.finish.usage.cached_tokens, again.generated()), (299, first.generated()), "{name}");
        // No checkpoint is kept without a memory budget.
        let mut without = test_engine_of(load(name), 1, false, |options| options.cache_ram_bytes = 0).await;
        for _ in 0..2 {
            let result = without.run(request_tokens(prompt.clone(), 12)).await;
            assert_eq!((result.end.finish.usage.cached_tokens, result.generated()), (0, first.generated()), "{name}");
        }
    }
}

#[tokio::test]
async fn new_question_after_shared_instructions_computes_only_the_question() {
    let chat = |question: i32| {
        let mut request = request_tokens([long(1, 120), long(question, 40)].concat(), 6);
        let span = |role: &str, start, end| Span { role: role.into(), start, end };
        request.spans = vec![span("system", 2, 118), span("template", 118, 120), span("user", 120, 157)];
        request
    };
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        test_engine.run(in_slot(chat(2), 0)).await;
        for question in [3, 4] {
            let result = test_engine.run(in_slot(chat(question), 0)).await;
            assert_eq!(result.end.finish.usage.cached_tokens, 120, "{name}");
            assert_eq!(result.generated(), fresh(&mut test_engine, &chat(question).prompt, 6).await, "{name}");
        }
    }
}

/// Returns an answer of which a mod removes three tokens at every tenth, and its number of decodes.
async fn run_with_backtracks(test_engine: &mut crate::engine::TestEngine, prompt: &[TokenId]) -> (Vec<TokenId>, u64) {
    let before = test_engine.engine.status().counts().decodes;
    let taken = AtomicUsize::new(0);
    let request = with_mod(in_slot(request_tokens(prompt.to_vec(), 60), 0), false, move |call| {
        let next = 10 * (taken.load(Ordering::Relaxed) + 1);
        if next < 60 && added_at(call, next) {
            taken.fetch_add(1, Ordering::Relaxed);
            return Action::Backtrack { n: 3, tokens: vec![60, 61, 62] };
        }
        Action::Noop
    });
    let result = test_engine.run(request).await;
    (result.generated(), test_engine.engine.status().counts().decodes - before)
}

#[tokio::test]
async fn retraction_recomputes_the_answer_but_not_the_prompt() {
    let prompt = long(1, 400);
    let (_, plain) = run_with_backtracks(&mut test_engine(1, false).await, &prompt).await;
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let (generated, decodes) = run_with_backtracks(&mut test_engine, &prompt).await;
        // A prompt of this length takes two decodes; the checkpoint after it takes one more.
        assert_eq!(decodes, plain + 1, "{name}");
        let upto = [prompt.as_slice(), &generated[..53]].concat();
        assert_eq!(generated[53..], fresh(&mut test_engine, &upto, 7).await, "{name}");
        let mut without = test_engine_of(load(name), 1, false, |options| options.cache_ram_bytes = 0).await;
        let (again, more) = run_with_backtracks(&mut without, &prompt).await;
        assert!(again == generated && more > decodes, "{name}: {more} decodes without a checkpoint");
    }
}

#[tokio::test]
async fn checkpoints_of_a_long_answer_stay_within_their_budget() {
    for bytes in [64 << 20, 1 << 20] {
        let mut test_engine =
            test_engine_of(load(RECURRENT[0]), 2, false, |options| options.cache_ram_bytes = bytes).await;
        let prompt = long(1, 50);
        let done = AtomicUsize::new(0);
        let request = with_mod(in_slot(request_tokens(prompt.clone(), 400), 0), false, move |call| {
            if added_at(call, 390) && done.fetch_add(1, Ordering::Relaxed) == 0 {
                return Action::Backtrack { n: 300, tokens: vec![60, 61] };
            }
            Action::Noop
        });
        let generated = test_engine.run(request).await.generated();
        let upto = [prompt.as_slice(), &generated[..92]].concat();
        assert_eq!(generated[92..], fresh(&mut test_engine, &upto, 308).await);
    }
}
