//! Tokens removed from the middle of a sequence, on request or because the context is full.

use super::{assert_first_layer_equals, in_slot, irregular_tokens, rows, with_attention};
use crate::engine::{
    CONTEXT, CompletedRun, act_once, follow, model, request, request_tokens, test_engine, test_engine_with, with_mod,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thunder::engine::{Overflow, SlotError};
use thunder::events::{EventType, FinishReason, Scope, TokenId, TraceItem};
use thunder::mods::{Action, Call, CallEvent};
use thunder::trace::fold::Fold;

#[tokio::test]
async fn shifted_slot_has_its_tokens_in_order() {
    for parallel in [1, 2] {
        let mut test_engine = test_engine(parallel, true).await;
        let slot = parallel - 1;
        for (keep, discard) in [(10, 20), (0, 15), (1, 50)] {
            test_engine.run(in_slot(request_tokens(irregular_tokens(1, 80), 4), slot)).await;
            let mut expected = test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().tokens;
            assert_eq!(expected.len(), 83);
            assert_eq!(test_engine.engine.shift_slot(&Scope::All, slot, keep, discard).await.unwrap(), 83 - discard);
            expected.drain(keep..keep + discard);
            assert_eq!(test_engine.engine.slot_tokens(&Scope::All, slot).await.unwrap().tokens, expected);
            // A saved state has its cells in order, so it continues like the slot.
            let saved = test_engine.engine.save_slot(&Scope::All, slot).await.unwrap();
            let mut prompt = expected.clone();
            prompt.extend([50, 60, 70]);
            let result = test_engine.run(with_attention(in_slot(request_tokens(prompt.clone(), 4), slot))).await;
            assert_eq!(result.end.finish.usage.cached_tokens as usize, expected.len());
            assert_first_layer_equals(&result, &prompt).await;
            test_engine.engine.restore_slot(None, slot, saved.block).await.unwrap();
            let again = test_engine.run(with_attention(in_slot(request_tokens(prompt, 4), slot))).await;
            assert_eq!((again.generated(), rows(&again)), (result.generated(), rows(&result)));
            test_engine.engine.erase_slot(&Scope::All, slot).await.unwrap();
        }
        test_engine.run(in_slot(request_tokens(irregular_tokens(1, 40), 1), slot)).await;
        for (keep, discard) in [(0, 41), (41, 1), (usize::MAX, 2)] {
            let error = test_engine.engine.shift_slot(&Scope::All, slot, keep, discard).await.unwrap_err();
            assert!(matches!(error, SlotError::Range { tokens: 40, .. }), "{error}");
        }
        assert_eq!(
            test_engine.engine.shift_slot(&Scope::All, slot, 30, 10).await.unwrap(),
            30,
            "the end can be removed without a shift"
        );
        assert_eq!(test_engine.engine.shift_slot(&Scope::All, slot, 0, 30).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn slot_action_waits_for_an_active_run_and_is_dropped_on_disconnect() {
    let test_engine = test_engine(2, false).await;
    let mut long_run = in_slot(request("The sky is", 400), 0);
    long_run.limits.max_steps = 4000;
    let active = test_engine.engine.submit(long_run.clone()).await.unwrap();
    let waiting = tokio::spawn({
        let engine = test_engine.engine.clone();
        async move { engine.slot_tokens(&Scope::All, 0).await.unwrap().tokens.len() }
    });
    let abandoned = tokio::time::timeout(Duration::from_millis(1), test_engine.engine.erase_slot(&Scope::All, 0)).await;
    assert!(abandoned.is_err(), "the slot was not active");
    // A run that requests this slot waits, too. Runs that accept any slot do not wait for it.
    let pinned = test_engine.engine.submit(in_slot(request("Later", 3), 0)).await.unwrap();
    let free = test_engine.engine.submit(request("Anywhere", 3)).await.unwrap();
    follow(free.output).await;
    assert!(!waiting.is_finished());
    drop(active);
    assert!(waiting.await.unwrap() > 0, "an abandoned request has erased the slot");
    follow(pinned.output).await;
    let error = test_engine.engine.submit(in_slot(request("x", 1), 2)).await.unwrap_err().to_string();
    assert_eq!(error, "slot 2 does not exist; slots must be from 0 to 1");
}

#[tokio::test]
async fn full_context_ends_the_answer_or_is_shifted() {
    let mut test_engine = test_engine(1, true).await;
    let mut long_run = request_tokens(irregular_tokens(1, 100), 800);
    long_run.limits.max_steps = 10_000;
    let stopped = test_engine.run(long_run.clone()).await;
    assert_eq!(stopped.end.finish.reason, FinishReason::Length);
    assert!(stopped.end.finish.truncated && stopped.end.finish.evicted_tokens == 0);
    assert_eq!(stopped.generated().len(), CONTEXT as usize - 100);
    long_run.overflow = Overflow::Shift { keep: Some(20), discard: 0 };
    let shifted = test_engine.run(with_attention(long_run.clone())).await;
    let finish = &shifted.end.finish;
    assert_eq!(
        (finish.reason, finish.usage.completion_tokens, finish.usage.prompt_tokens),
        (FinishReason::Length, 800, 100)
    );
    // Each of the two shifts removes (511 - 20) / 2 tokens, as in llama-server.
    assert!(finish.truncated && finish.evicted_tokens == 2 * 245, "{finish:?}");
    assert_eq!(shifted.generated()[..400], stopped.generated()[..400]);
    assert_eq!(shifted.text, model().vocabulary().decode(&shifted.generated()));
    let rows = rows(&shifted);
    assert_eq!(rows.len(), 800);
    assert!(rows.iter().all(|(len, _)| *len < CONTEXT as usize));
    // The slot has the final sequence of the run.
    let slot_tokens = test_engine.engine.slot_tokens(&Scope::All, 0).await.unwrap().tokens;
    let sequence = [irregular_tokens(1, 100), shifted.generated()].concat();
    assert_eq!(slot_tokens[..20], sequence[..20]);
    assert_eq!(slot_tokens[20..], sequence[sequence.len() - (slot_tokens.len() - 20) - 1..sequence.len() - 1]);
    let mut next = slot_tokens.clone();
    next.push(99);
    let result = test_engine.run(with_attention(request_tokens(next.clone(), 2))).await;
    assert_first_layer_equals(&result, &next).await;
    let ranges: Vec<(u32, u32)> = shifted
        .items
        .iter()
        .filter_map(|item| match item {
            TraceItem::Event(event) => event.measured.as_ref()?.evicted.as_ref(),
            _ => None,
        })
        .flat_map(|eviction| eviction.ranges.clone())
        .collect();
    assert_eq!(ranges, [(20, 265), (20, 265)], "the trace must contain the removed tokens");
}

#[tokio::test]
async fn backtrack_after_a_shift_removes_the_right_tokens() {
    let mut test_engine = test_engine(1, false).await;
    let mut request = request_tokens(irregular_tokens(1, 100), 700);
    request.limits.max_steps = 10_000;
    request.overflow = Overflow::Shift { keep: Some(10), discard: 0 };
    let is_after_shift = |call: &Call<'_>| {
        call.event_type() == EventType::Added && call.sequence.len() == 400 && call.generated_in_context().len() > 300
    };
    let backtrack = act_once(is_after_shift, Action::Backtrack { n: 5, tokens: vec![60, 61] });
    let result = test_engine.run(with_mod(request, false, backtrack)).await;
    assert_eq!(result.end.finish.usage.completion_tokens, 700);
    assert_eq!(result.text, result.end.finish.text);
    assert_eq!(result.text, model().vocabulary().decode(&result.generated()));
}

/// Returns the context at each event, computed from the recording as the replay does: the visible tokens without evicted
/// ones.
fn recorded_contexts(result: &CompletedRun) -> Vec<Vec<TokenId>> {
    let mut fold = Fold::new();
    result.items.iter().for_each(|item| fold.apply(item));
    let rows = fold.rows();
    let mut left_at: Vec<u32> = rows.iter().map(|row| row.removed_at).collect();
    let context = |left_at: &[u32], n: u32| -> Vec<usize> {
        (0..rows.len()).filter(|&row| rows[row].added_at <= n && n < left_at[row]).collect()
    };
    for mark in fold.marks() {
        let before = context(&left_at, mark.seq);
        for &(start, end) in &mark.evicted {
            before[start as usize..end as usize].iter().for_each(|&row| left_at[row] = mark.seq);
        }
    }
    let tokens = |n| context(&left_at, n).into_iter().map(|row| rows[row].token).collect();
    (0..fold.event_count()).map(tokens).collect()
}

#[tokio::test]
async fn recording_gives_the_context_of_every_event() {
    let mut test_engine = test_engine_with(1, true, |options| options.ctx_size = 64).await;
    let mut request = with_attention(request_tokens(irregular_tokens(1, 10), 200));
    request.limits.max_steps = 4000;
    // Part of the answer is kept, too.
    request.overflow = Overflow::Shift { keep: Some(20), discard: 0 };
    let contexts: Arc<Mutex<Vec<Vec<TokenId>>>> = Arc::default();
    let (seen, backtracks) = (Arc::clone(&contexts), AtomicUsize::new(0));
    let request = with_mod(request, false, move |call| {
        seen.lock().unwrap().push(call.sequence.to_vec());
        match call.event {
            // These tokens fill the context.
            CallEvent::Added { forced: false, .. } if call.sequence.len() == 60 => Action::ForceTokens(vec![60; 4]),
            CallEvent::Added { .. } if call.answer_len() % 23 == 5 => Action::ForceTokens(vec![61; 12]),
            // No step is between these tokens and those of the line above.
            CallEvent::Added { .. } if call.answer_len() % 23 == 17 => Action::ForceTokens(vec![62; 30]),
            CallEvent::Added { .. }
                if call.answer_len() % 31 == 29 && backtracks.fetch_add(1, Ordering::Relaxed) < 6 =>
            {
                Action::Backtrack { n: 40, tokens: Vec::new() }
            }
            _ => Action::Noop,
        }
    });
    let result = test_engine.run(request).await;
    assert_eq!(result.text, model().vocabulary().decode(&result.generated()));
    assert_eq!(recorded_contexts(&result), *contexts.lock().unwrap());
    // Event type of each eviction, and true if forced tokens were added before it.
    let mut evictions = Vec::new();
    let (mut after_forced, mut has_clamped) = (false, false);
    for item in &result.items {
        match item {
            TraceItem::Event(event) => {
                if event.measured.as_ref().is_some_and(|measured| measured.evicted.is_some()) {
                    evictions.push((event.event_type, after_forced));
                }
                after_forced = event.forced == Some(true);
            }
            TraceItem::Action(action) => {
                let details = action.details.as_ref().map_or("", |details| details.get());
                has_clamped |= !evictions.is_empty() && details.contains("\"clamped\":true");
            }
            TraceItem::Attention(step) => {
                let context = &contexts.lock().unwrap()[step.sequence_order as usize];
                assert_eq!(step.row_len as usize, context.len(), "event {}", step.sequence_order);
            }
            _ => {}
        }
    }
    for eviction in [(EventType::ForwardPass, true), (EventType::Added, true)] {
        assert!(evictions.contains(&eviction), "{eviction:?} is not among {evictions:?}");
    }
    assert!(has_clamped, "no backtrack reached the evicted tokens");
}

#[tokio::test]
async fn shift_of_more_tokens_than_possible_leaves_the_last_one() {
    let mut test_engine = test_engine(1, false).await;
    let mut request = request_tokens(irregular_tokens(1, 100), 800);
    request.overflow = Overflow::Shift { keep: Some(20), discard: usize::MAX };
    let finish = test_engine.run(request).await.end.finish.clone();
    assert_eq!((finish.reason, finish.usage.completion_tokens), (FinishReason::Length, 800), "{:?}", finish.message);
    assert_eq!(finish.evicted_tokens, CONTEXT - 20 - 1);
}
