//! Lists of forced tokens: decodes, limits, and ends during their decode.

use super::{
    CONTEXT, act_once, added_at, follow, is_at, request, request_tokens, test_engine, test_engine_with, with_mod,
};
use std::pin::pin;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::task::{Context, Waker};
use thunder::engine::{EngineOptions, Limits, Output, Overflow, ReportOptions, Request, RunControl};
use thunder::events::{EndCause, EventType, FinishReason, TokenId, TraceItem};
use thunder::mods::{Action, Call};

/// Returns a mod's handler that makes these tokens the answer.
fn force_at_start(tokens: Vec<TokenId>) -> impl Fn(&Call<'_>) -> Action + Clone + Send + Sync + 'static {
    act_once(|call| is_at(call, EventType::ForwardPass, 0), Action::ForceTokens(tokens))
}

#[tokio::test]
async fn decode_of_forced_tokens_has_limited_rows_of_logits() {
    let large_batch = |options: &mut EngineOptions| (options.batch_size, options.ubatch_size) = (CONTEXT, CONTEXT);
    let mut test_engine = test_engine_with(1, false, large_batch).await;
    let tokens: Vec<TokenId> = (0..300).map(|index| 40 + index % 50).collect();
    let before = test_engine.engine.status().counts().decodes;
    let result = test_engine.run(with_mod(request("The sky is", 300), false, force_at_start(tokens.clone()))).await;
    assert_eq!(test_engine.engine.status().counts().decodes - before, 1 + 2, "the prompt, 256 tokens, and the rest");
    assert_eq!(result.generated(), tokens);
    let measured = result.items.iter().find_map(|item| match item {
        TraceItem::Event(event) if event.forced == Some(true) => Some(&event.measured.as_ref().unwrap().tokens),
        _ => None,
    });
    assert!(measured.unwrap().iter().all(|token| token.logprob.is_some()));
}

#[tokio::test]
async fn decode_of_forced_tokens_has_few_attention_rows_to_send() {
    const FORCED: usize = 10;
    let test_engine = test_engine(1, true).await;
    let report = ReportOptions { per_token: true, attention_rows: true, ..ReportOptions::default() };
    let request = Request { attention: true, report, ..request("The sky is", FORCED as u32) };
    let prompt_len = request.prompt.len();
    let before = test_engine.engine.status().counts().decodes;
    let forced = with_mod(request, false, force_at_start((50..50 + FORCED as TokenId).collect()));
    let mut generation = test_engine.engine.submit(forced).await.unwrap();
    let mut rows = Vec::new();
    loop {
        match generation.output.recv().await.unwrap() {
            Output::Text(delta) => rows.extend(delta.rows.into_iter().map(|row| row.unwrap().row_len as usize)),
            Output::Ended(_) => break,
            _ => {}
        }
    }
    assert_eq!(rows, (prompt_len..prompt_len + FORCED).collect::<Vec<_>>());
    assert_eq!(test_engine.engine.status().counts().decodes - before, 1 + 3, "the prompt, and up to 4 tokens each");
}

#[tokio::test]
async fn run_that_is_stopped_during_the_decode_of_forced_tokens_does_not_contain_them() {
    let mut test_engine = test_engine(1, false).await;
    let (sender, receiver) = channel::<RunControl>();
    let receiver = Mutex::new(receiver);
    let force_and_stop = move |call: &Call<'_>| {
        if !added_at(call, 4) {
            return Action::Noop;
        }
        // The first poll sends the request, which the decode thread handles before it decodes the forced tokens.
        let control = receiver.lock().unwrap().recv().unwrap();
        let stop = pin!(control.stop(EndCause::ClientStop, "stopped"));
        assert!(stop.poll(&mut Context::from_waker(Waker::noop())).is_pending());
        Action::ForceTokens(vec![50, 51, 52])
    };
    let generation =
        test_engine.engine.submit(with_mod(request("The sky is", 16), false, force_and_stop)).await.unwrap();
    sender.send(generation.control.clone()).unwrap();
    let (text, end) = follow(generation.output).await;
    assert_eq!((end.finish.reason, end.finish.usage.completion_tokens), (FinishReason::Cancelled, 4));
    assert_eq!(text, end.finish.text);
    // The slot's state does not have them either.
    let again = test_engine.run(request("The sky is", 4)).await;
    assert_eq!(again.text, text);
}

#[tokio::test]
async fn forced_tokens_after_the_maximum_evict_nothing() {
    let mut test_engine = test_engine_with(1, false, |options| options.ctx_size = 64).await;
    let request =
        Request { overflow: Overflow::Shift { keep: Some(0), discard: 0 }, ..request_tokens((5..13).collect(), 10) };
    let result = test_engine.run(with_mod(request, false, force_at_start(vec![50; 60]))).await;
    let finish = &result.end.finish;
    assert_eq!((finish.reason, result.generated()), (FinishReason::Length, vec![50; 10]));
    assert_eq!((finish.truncated, finish.evicted_tokens), (false, 0));
}

#[tokio::test]
async fn run_without_limits_ends_if_a_mod_backtracks_endlessly() {
    let mut test_engine = test_engine_with(1, false, |options| options.ctx_size = 64).await;
    let request = Request {
        overflow: Overflow::Shift { keep: None, discard: 0 },
        limits: Limits::default(),
        ..request_tokens((5..13).collect(), 1)
    };
    let backtrack = |call: &Call<'_>| {
        let is_endless = call.event_type() == EventType::Sampled && call.answer_len() == 5;
        if is_endless { Action::Backtrack { n: 1, tokens: Vec::new() } } else { Action::Noop }
    };
    let finish = test_engine.run(with_mod(request, false, backtrack)).await.end.finish.clone();
    assert_eq!((finish.reason, finish.usage.completion_tokens), (FinishReason::Length, 5));
    assert_eq!(
        finish.message.as_deref(),
        Some("the answer did not exceed 5 tokens in the last 512 steps, and has 5 now; a mod may backtrack endlessly")
    );
}
