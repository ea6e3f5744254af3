//! Lists of forced tokens: decodes, limits, and ends during their decode.

use super::{
    CONTEXT, act_once, added_at, follow, is_at, model, request, request_tokens, test_engine, test_engine_with, with_mod,
};
use std::pin::pin;
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::task::{Context, Waker};
use thunder::engine::{EngineOptions, Limits, Output, Overflow, ReasoningBudget, ReportOptions, Request, RunControl};
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

/// Returns a request whose prompt ends within reasoning, and the tokens that end it.
fn reasoning_request(budget: u32, max_tokens: u32) -> (Request, Vec<TokenId>) {
    let closing_tokens = model().vocabulary().encode_markup_continuation("</think>");
    let budget = ReasoningBudget {
        tokens: budget,
        open: "<think>".into(),
        close: "</think>".into(),
        closing_tokens: closing_tokens.clone(),
        starts_in_reasoning: true,
    };
    (Request { reasoning_budget: Some(budget), ..request("<think>", max_tokens) }, closing_tokens)
}

#[tokio::test]
async fn reasoning_without_a_budget_ends_at_the_prompt() {
    let mut test_engine = test_engine(1, false).await;
    let (request, closing_tokens) = reasoning_request(0, 8);
    let result = test_engine.run(request).await;
    assert_eq!((&result.generated()[..closing_tokens.len()], result.generated().len()), (&closing_tokens[..], 8));
    // The probabilities of the prompt are also complete if tokens are forced after it.
    let (mut request, _) = reasoning_request(0, 8);
    request.prompt.extend([50, 51, 52]);
    request.report = ReportOptions { prompt_probabilities: true, ..ReportOptions::default() };
    let prompt: Vec<TokenId> = request.prompt.clone();
    let mut output = test_engine.engine.submit(request).await.unwrap().output;
    let Some(Output::PromptProbabilities(tokens)) = output.recv().await else { panic!("no probabilities") };
    assert_eq!(tokens.iter().map(|token| token.measurement.token).collect::<Vec<_>>(), prompt[1..]);
    // A request for no tokens only decodes the prompt.
    let (request, _) = reasoning_request(0, 0);
    let end = test_engine.run(Request { cache_prompt: false, ..request }).await.end;
    assert_eq!((end.finish.reason, end.finish.usage.completion_tokens), (FinishReason::Length, 0));
    assert!(end.finish.prompt_decoded > 0, "{end:?}");
}

#[tokio::test]
async fn used_up_reasoning_budget_permits_no_token_after_a_backtrack() {
    let mut test_engine = test_engine(1, false).await;
    let (request, closing_tokens) = reasoning_request(2, 16);
    let (start, end) = (2, 2 + closing_tokens.len());
    let backtrack = Action::Backtrack { n: closing_tokens.len() as u32, tokens: Vec::new() };
    let result = test_engine.run(with_mod(request, false, act_once(move |call| added_at(call, end), backtrack))).await;
    assert_eq!(result.generated()[start..end], closing_tokens);
    let removed = result
        .items
        .iter()
        .filter(|item| matches!(item, TraceItem::Action(action) if action.backtrack_steps.is_some()));
    assert_eq!(removed.count(), 1);
}

#[tokio::test]
async fn note_of_the_reasoning_budget_belongs_to_its_own_tokens() {
    let mut test_engine = test_engine(1, false).await;
    let (request, closing_tokens) = reasoning_request(2, 16);
    let force = act_once(|call| added_at(call, 2), Action::ForceTokens(vec![50, 51]));
    let result = test_engine.run(with_mod(request, false, force)).await;
    let mut forced = result.items.iter().filter_map(|item| match item {
        TraceItem::Event(event) if event.forced == Some(true) => {
            Some((event.added_tokens.as_deref().unwrap(), event.measured.as_ref().unwrap().note.as_deref()))
        }
        _ => None,
    });
    assert_eq!(forced.next(), Some((&[50, 51][..], None)));
    let note = Some("the budget of 2 reasoning tokens is used up");
    assert_eq!(forced.next(), Some((&closing_tokens[..], note)));
}
