//! Recurrent states, which can be saved, restored, and rolled back to a checkpoint.

use super::invalid_states::{small_state, with_checksum};
use super::memory_types::{RECURRENT, generate_uncached, load};
use super::{alternatives, in_slot, irregular_tokens, max_difference, state_of};
use crate::engine::{act_once, added_at, follow, request_tokens, test_engine, test_engine_of, with_mod};
use crate::harness::ErrorTable;
use bytes::Bytes;
use std::sync::atomic::{AtomicUsize, Ordering};
use thunder::engine::{Request, Ses1Error, SlotError};
use thunder::events::{Scope, Span, TokenId};
use thunder::model::llama::CacheType;
use thunder::mods::Action;

#[tokio::test]
async fn restored_recurrent_slot_continues_like_the_original() {
    for name in RECURRENT {
        let mut first = test_engine_of(load(name), 2, false, |_| {}).await;
        let first_answer = first.run(in_slot(request_tokens(irregular_tokens(1, 60), 8), 0)).await;
        let prompt = [irregular_tokens(1, 60), first_answer.generated()].concat();
        let saved = first.engine.save_slot(&Scope::All, 0).await.unwrap();
        assert_eq!(saved.tokens, 67, "the last token was sampled, but not decoded");
        let expected = first.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await;
        assert_eq!(expected.end.finish.usage.cached_tokens, 67);
        // The state is restored into other slots and into an engine with another number of slots, while another run is active.
        let mut second = test_engine_of(load(name), 3, false, |_| {}).await;
        second.run(in_slot(request_tokens(irregular_tokens(3, 100), 4), 2)).await;
        for (original, slot) in [(true, 1), (true, 0), (false, 2), (false, 0)] {
            let test_engine = if original { &mut first } else { &mut second };
            let other = test_engine
                .engine
                .submit(in_slot(request_tokens(irregular_tokens(5, 50), 30), 1 - slot.min(1)))
                .await
                .unwrap();
            assert_eq!(test_engine.engine.restore_slot(None, slot, saved.block.clone()).await.unwrap(), 67, "{name}");
            assert_eq!(test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().tokens, prompt[..67]);
            // The other run ends first, because sums in shared batches are rounded differently.
            follow(other.output).await;
            let result = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), slot)).await;
            assert_eq!(result.end.finish.usage.cached_tokens, 67, "{name}");
            assert_eq!(result.generated(), expected.generated(), "{name} in slot {slot}");
            assert_eq!(max_difference(&alternatives(&result), &alternatives(&expected)), 0.0, "{name} in slot {slot}");
        }
        // A restored state that is saved again is the same.
        second.engine.restore_slot(None, 0, saved.block.clone()).await.unwrap();
        assert!(second.engine.save_slot(&Scope::All, 0).await.unwrap().block == saved.block, "{name}");
        assert!(saved.block.len() <= second.engine.max_snapshot_bytes().unwrap());
    }
}

#[tokio::test]
async fn truncated_or_forged_state_is_rejected_or_harmless() {
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let expected = test_engine.run(in_slot(request_tokens(irregular_tokens(4, 60), 8), 1)).await.generated();
        let snapshot = small_state(&mut test_engine).await;
        let before = state_of(&mut test_engine, 1).await;
        // All bytes of headers, and a sample of the values.
        let positions = |end: usize| (0..end).filter(move |at| *at < 400 || at % 97 == 0 || end - at < 20);
        for len in positions(snapshot.len()) {
            let forged = if len < 100 { Bytes::new() } else { with_checksum(snapshot[..len].to_vec()) };
            for cut in [Bytes::from(snapshot[..len].to_vec()), forged] {
                let error = test_engine.engine.restore_slot(None, 1, cut).await.unwrap_err();
                assert!(matches!(error, SlotError::State(_)), "{name}: {len} bytes: {error:?}");
            }
        }
        let mut longer = snapshot.clone();
        longer.push(0);
        assert!(matches!(test_engine.engine.restore_slot(None, 1, longer.into()).await, Err(SlotError::State(_))));
        let mut after = state_of(&mut test_engine, 1).await.0;
        after.truncate(before.0.len());
        assert_eq!(after, before.0, "a rejected state has no side effects");
        let (mut rejected, mut accepted) = (0, 0);
        for at in positions(snapshot.len()) {
            for byte in [snapshot[at] ^ 1, snapshot[at] ^ 0x80, 0xff] {
                let mut forged = snapshot.clone();
                forged[at] = byte;
                match test_engine.engine.restore_slot(None, 1, with_checksum(forged)).await {
                    Ok(tokens) => {
                        assert_eq!(tokens, 3, "{name}: byte {at}");
                        accepted += 1;
                    }
                    Err(SlotError::State(_)) => rejected += 1,
                    Err(error) => panic!("{name}: byte {at} as {byte:#x}: {error}"),
                }
            }
        }
        assert!(rejected > 150 && accepted > 150, "{name}: {rejected} rejected, {accepted} accepted");
        assert_eq!(
            generate_uncached(&mut test_engine, &irregular_tokens(4, 60), 8).await,
            expected,
            "{name}: the next run is not affected"
        );
        assert_eq!(test_engine.engine.restore_slot(None, 1, with_checksum(snapshot)).await.unwrap(), 3);
    }
}

#[tokio::test]
async fn forged_values_of_a_recurrent_state_are_reported() {
    let mut test_engine = test_engine_of(load(RECURRENT[0]), 1, false, |_| {}).await;
    let snapshot = small_state(&mut test_engine).await;
    let before = test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap();
    // The recurrent state follows the magic, the count, three tokens and the header of the KV data.
    let state_at = 8 + 12 + 56;
    let nan = f32::NAN.to_bits();
    let mut errors = ErrorTable::default();
    for (name, at, value) in [
        ("0 states", state_at, 0),
        ("4294967295 states", state_at, u32::MAX),
        ("position 1", state_at + 4, 1),
        ("position -1", state_at + 4, u32::MAX),
        ("a cell of 1 sequence", state_at + 8, 1),
        ("another order of states", state_at + 12, 1),
        ("9 layers", state_at + 16, 9),
        ("16-bit states", state_at + 20, 1),
        ("states of 0 bytes", state_at + 24, 0),
        ("states above 28 GiB", state_at + 28, 7),
        ("a first value of NaN", state_at + 40, nan),
        ("an infinite last value", snapshot.len() - 4, f32::INFINITY.to_bits()),
    ] {
        let mut forged = snapshot.clone();
        forged[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let error = test_engine.engine.restore_slot(None, 0, with_checksum(forged)).await.unwrap_err();
        assert!(matches!(error, SlotError::State(_)), "{name}: {error:?}");
        errors.add_text(name, &error.to_string());
    }
    insta::assert_snapshot!("recurrent_state_errors", errors);
    assert_eq!(test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap(), before);
    let other = test_engine_of(load(RECURRENT[1]), 1, false, |_| {}).await;
    let error = other.engine.restore_slot(None, 0, snapshot.clone().into()).await.unwrap_err();
    assert!(matches!(error, SlotError::State(Ses1Error::Model)), "{error}");
    let with_f32_keys = |options: &mut thunder::engine::EngineOptions| options.cache_type_k = CacheType::F32;
    let mut hybrid = test_engine_of(load(RECURRENT[1]), 1, false, with_f32_keys).await;
    let snapshot = small_state(&mut hybrid).await;
    let error = other.engine.restore_slot(None, 0, snapshot.into()).await.unwrap_err();
    assert!(matches!(error, SlotError::State(Ses1Error::CacheType { .. })), "{error}");
}

#[tokio::test]
async fn repeated_prompt_is_not_recomputed() {
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let prompt = irregular_tokens(1, 300);
        let first = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await;
        assert_eq!(first.end.finish.usage.cached_tokens, 0);
        for slot in [0, 0, 1] {
            // The prompt is cached in its own slot, and copied to the other slot.
            let again = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), slot)).await;
            assert_eq!(again.end.finish.usage.cached_tokens, 299, "{name}");
            assert_eq!(again.generated(), first.generated(), "{name}");
            assert_eq!(test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().processed, 1);
        }
        for slot in [0, 1] {
            test_engine.run(in_slot(request_tokens(irregular_tokens(2, 310), 4), slot)).await;
        }
        let again = test_engine.run(in_slot(request_tokens(prompt.clone(), 12), 0)).await;
        assert_eq!((again.end.finish.usage.cached_tokens, again.generated()), (299, first.generated()), "{name}");
        // No checkpoint is kept without a memory budget.
        let mut without_budget = test_engine_of(load(name), 1, false, |options| options.cache_ram_bytes = 0).await;
        for _ in 0..2 {
            let result = without_budget.run(request_tokens(prompt.clone(), 12)).await;
            assert_eq!((result.end.finish.usage.cached_tokens, result.generated()), (0, first.generated()), "{name}");
        }
    }
}

#[tokio::test]
async fn shared_instructions_are_not_recomputed() {
    let chat = |question: i32| {
        let mut request = request_tokens([irregular_tokens(1, 120), irregular_tokens(question, 40)].concat(), 6);
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
            assert_eq!(
                result.generated(),
                generate_uncached(&mut test_engine, &chat(question).prompt, 6).await,
                "{name}"
            );
        }
    }
}

#[tokio::test]
async fn checkpoints_are_planned_after_the_reused_one() {
    let prompt = |tokens: Vec<TokenId>, last_user: u32| {
        let end = tokens.len() as u32;
        let spans = vec![Span { role: "user".into(), start: last_user, end }];
        Request { spans, ..request_tokens(tokens, 1) }
    };
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let mut cached = async |slot, tokens, last_user| {
            let result = test_engine.run(in_slot(prompt(tokens, last_user), slot)).await;
            result.end.finish.usage.cached_tokens
        };
        let first = [irregular_tokens(1, 120), irregular_tokens(2, 180)].concat();
        assert_eq!(cached(0, first.clone(), 120).await, 0, "{name}");
        // 200 tokens match, but the copied state can only return to its checkpoint, which is before the last message.
        let second = [&first[..200], &irregular_tokens(3, 60)].concat();
        assert_eq!(cached(1, second.clone(), 190).await, 120, "{name}");
        let third = [&second[..190], &irregular_tokens(4, 40)].concat();
        assert_eq!(cached(1, third, 190).await, 190, "{name}");
    }
}

/// Runs a prompt with a mod that replaces three tokens after every ten; returns the tokens and the number of decodes.
async fn run_with_backtracks(test_engine: &mut crate::engine::TestEngine, prompt: &[TokenId]) -> (Vec<TokenId>, u64) {
    let before = test_engine.engine.status().counts().decodes;
    let backtracks = AtomicUsize::new(0);
    let request = with_mod(in_slot(request_tokens(prompt.to_vec(), 60), 0), false, move |call| {
        let next = 10 * (backtracks.load(Ordering::Relaxed) + 1);
        if next < 60 && added_at(call, next) {
            backtracks.fetch_add(1, Ordering::Relaxed);
            return Action::Backtrack { n: 3, tokens: vec![60, 61, 62] };
        }
        Action::Noop
    });
    let result = test_engine.run(request).await;
    (result.generated(), test_engine.engine.status().counts().decodes - before)
}

#[tokio::test]
async fn backtrack_recomputes_the_answer_but_not_the_prompt() {
    let prompt = irregular_tokens(1, 400);
    let (_, plain) = run_with_backtracks(&mut test_engine(1, false).await, &prompt).await;
    for name in RECURRENT {
        let mut test_engine = test_engine_of(load(name), 2, false, |_| {}).await;
        let (generated, decodes) = run_with_backtracks(&mut test_engine, &prompt).await;
        // The checkpoint after the prompt takes one more decode.
        assert_eq!(decodes, plain + 1, "{name}");
        let sequence = [prompt.as_slice(), &generated[..53]].concat();
        assert_eq!(generated[53..], generate_uncached(&mut test_engine, &sequence, 7).await, "{name}");
        let mut without_budget = test_engine_of(load(name), 1, false, |options| options.cache_ram_bytes = 0).await;
        let (again, more) = run_with_backtracks(&mut without_budget, &prompt).await;
        assert!(again == generated && more > decodes, "{name}: {more} decodes without a checkpoint");
    }
}

#[tokio::test]
async fn long_backtrack_is_exact_within_any_checkpoint_budget() {
    for bytes in [64 << 20, 1 << 20] {
        let mut test_engine =
            test_engine_of(load(RECURRENT[0]), 2, false, |options| options.cache_ram_bytes = bytes).await;
        let prompt = irregular_tokens(1, 50);
        let backtrack = act_once(|call| added_at(call, 390), Action::Backtrack { n: 300, tokens: vec![60, 61] });
        let request = with_mod(in_slot(request_tokens(prompt.clone(), 400), 0), false, backtrack);
        let generated = test_engine.run(request).await.generated();
        let sequence = [prompt.as_slice(), &generated[..92]].concat();
        assert_eq!(generated[92..], generate_uncached(&mut test_engine, &sequence, 308).await);
    }
}
