//! Tokens removed from the middle of a sequence, on request or because the context is full.

use super::{first_layer_agrees, in_slot, long, rows, with_attention};
use crate::engine::{CONTEXT, follow, model, request, request_tokens, test_engine, with_mod};
use std::time::Duration;
use thunder::engine::{Overflow, SlotError};
use thunder::events::{FinishReason, TraceItem};
use thunder::mods::Action;

#[tokio::test]
async fn shifted_slot_has_its_tokens_in_order() {
    for parallel in [1, 2] {
        let mut test_engine = test_engine(parallel, true).await;
        let slot = parallel - 1;
        for (keep, discard) in [(10, 20), (0, 15), (1, 50)] {
            test_engine.run(in_slot(request_tokens(long(1, 80), 4), slot)).await;
            let mut expected = test_engine.engine.slot_tokens(&thunder::events::Scope::All, slot).await.unwrap().tokens;
            assert_eq!(expected.len(), 83);
            assert_eq!(
                test_engine.engine.shift_slot(&thunder::events::Scope::All, slot, keep, discard).await.unwrap(),
                83 - discard
            );
            expected.drain(keep..keep + discard);
            assert_eq!(
                test_engine.engine.slot_tokens(&thunder::events::Scope::All, slot).await.unwrap().tokens,
                expected
            );
            // A state has its cells in order: a copy continues as the original.
            let saved = test_engine.engine.save_slot(&thunder::events::Scope::All, slot).await.unwrap();
            let mut prompt = expected.clone();
            prompt.extend([50, 60, 70]);
            let result = test_engine.run(with_attention(in_slot(request_tokens(prompt.clone(), 4), slot))).await;
            assert_eq!(result.end.finish.usage.cached_tokens as usize, expected.len());
            first_layer_agrees(&result, &prompt).await;
            test_engine.engine.restore_slot(None, slot, saved.block).await.unwrap();
            let again = test_engine.run(with_attention(in_slot(request_tokens(prompt, 4), slot))).await;
            assert_eq!((again.generated(), rows(&again)), (result.generated(), rows(&result)));
            test_engine.engine.erase_slot(&thunder::events::Scope::All, slot).await.unwrap();
        }
        test_engine.run(in_slot(request_tokens(long(1, 40), 1), slot)).await;
        for (keep, discard) in [(0, 41), (41, 1), (usize::MAX, 2)] {
            let error =
                test_engine.engine.shift_slot(&thunder::events::Scope::All, slot, keep, discard).await.unwrap_err();
            assert!(matches!(error, SlotError::Range { tokens: 40, .. }), "{error}");
        }
        assert_eq!(
            test_engine.engine.shift_slot(&thunder::events::Scope::All, slot, 30, 10).await.unwrap(),
            30,
            "removing the end needs no shift"
        );
        assert_eq!(test_engine.engine.shift_slot(&thunder::events::Scope::All, slot, 0, 30).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn slot_request_waits_for_a_busy_slot_and_is_dropped_on_disconnect() {
    let test_engine = test_engine(2, false).await;
    let mut endless = in_slot(request("The sky is", 400), 0);
    endless.limits.max_steps = 4000;
    let busy = test_engine.engine.submit(endless.clone()).await.unwrap();
    let waiting = tokio::spawn({
        let engine = test_engine.engine.clone();
        async move { engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap().tokens.len() }
    });
    let given_up =
        tokio::time::timeout(Duration::from_millis(1), test_engine.engine.erase_slot(&thunder::events::Scope::All, 0))
            .await;
    assert!(given_up.is_err(), "the slot was not busy");
    // Another run that requests this slot waits too, and is overtaken by runs that accept any slot.
    let pinned = test_engine.engine.submit(in_slot(request("Later", 3), 0)).await.unwrap();
    let free = test_engine.engine.submit(request("Anywhere", 3)).await.unwrap();
    follow(free.output).await;
    assert!(!waiting.is_finished());
    drop(busy);
    assert!(waiting.await.unwrap() > 0, "a canceled request has erased the slot");
    follow(pinned.output).await;
    let refused = test_engine.engine.submit(in_slot(request("x", 1), 2)).await.unwrap_err().to_string();
    assert_eq!(refused, "slot 2 does not exist; slots must be from 0 to 1");
}

#[tokio::test]
async fn full_context_ends_the_answer_or_shifts() {
    let mut test_engine = test_engine(1, true).await;
    let mut endless = request_tokens(long(1, 100), 800);
    endless.limits.max_steps = 10_000;
    let stopped = test_engine.run(endless.clone()).await;
    assert_eq!(stopped.end.finish.reason, FinishReason::Length);
    assert!(stopped.end.finish.truncated && stopped.end.finish.evicted_tokens == 0);
    assert_eq!(stopped.generated().len(), CONTEXT as usize - 100);
    endless.overflow = Overflow::Shift { keep: Some(20), discard: 0 };
    let shifted = test_engine.run(with_attention(endless.clone())).await;
    let finish = &shifted.end.finish;
    assert_eq!(
        (finish.reason, finish.usage.completion_tokens, finish.usage.prompt_tokens),
        (FinishReason::Length, 800, 100)
    );
    // (512 - 20) / 2 each time, until 900 tokens have passed.
    assert!(finish.truncated && finish.evicted_tokens == 2 * 246, "{finish:?}");
    assert_eq!(shifted.generated()[..400], stopped.generated()[..400]);
    assert_eq!(shifted.text, model().vocabulary().decode(&shifted.generated()));
    let rows = rows(&shifted);
    assert_eq!(rows.len(), 800);
    assert!(rows.iter().all(|(len, _)| *len < CONTEXT as usize));
    // The cache holds the final sequence of the run.
    let held = test_engine.engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap().tokens;
    let sequence = [long(1, 100), shifted.generated()].concat();
    assert_eq!(held[..20], sequence[..20]);
    assert_eq!(held[20..], sequence[sequence.len() - (held.len() - 20) - 1..sequence.len() - 1]);
    let mut next = held.clone();
    next.push(99);
    let result = test_engine.run(with_attention(request_tokens(next.clone(), 2))).await;
    first_layer_agrees(&result, &next).await;
    let ranges: Vec<(u32, u32)> = shifted
        .items
        .iter()
        .filter_map(|item| match item {
            TraceItem::Event(event) => event.measured.as_ref()?.evicted.as_ref(),
            _ => None,
        })
        .flat_map(|eviction| eviction.ranges.clone())
        .collect();
    assert_eq!(ranges, [(20, 266), (20, 266)], "the trace shows the removed tokens");
}

#[tokio::test]
async fn backtrack_after_a_shift_removes_the_right_tokens() {
    let mut test_engine = test_engine(1, false).await;
    let mut requested = request_tokens(long(1, 100), 700);
    requested.limits.max_steps = 10_000;
    requested.overflow = Overflow::Shift { keep: Some(10), discard: 0 };
    let done = std::sync::atomic::AtomicBool::new(false);
    let result = test_engine
        .run(with_mod(requested, false, move |call| {
            if call.event_type() == thunder::events::EventType::Added
                && call.sequence.len() == 400
                && call.generated().len() > 300
                && !done.swap(true, std::sync::atomic::Ordering::Relaxed)
            {
                return Action::Backtrack { n: 5, tokens: vec![60, 61] };
            }
            Action::Noop
        }))
        .await;
    assert_eq!(result.end.finish.usage.completion_tokens, 700);
    assert_eq!(result.text, result.end.finish.text);
    assert_eq!(result.text, model().vocabulary().decode(&result.generated()));
}
