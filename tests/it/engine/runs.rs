//! Runs: numbering of events, control tokens, counts of prompt tokens, ends, shared batches, clients that
//! disconnect or do not read.

use super::slow_clients::with_silent_mod;
use super::{TestEngine, added_at, follow, model, request, request_tokens, test_engine, test_engine_with, with_mod};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use thunder::engine::{Limits, Output, Overflow, Request, RunActivity, RunControl, RunMetrics, SamplingParams};
use thunder::events::{EndCause, EventType, FinishReason, RunEnd, TraceItem};
use thunder::mods::{Action, Reply};

#[tokio::test]
async fn run_is_reproducible_and_its_events_are_numbered_without_gaps() {
    let mut test_engine = test_engine(1, false).await;
    let first = test_engine.run(request("The sky is", 12)).await;
    let orders: Vec<i32> = first
        .items
        .iter()
        .filter_map(|item| match item {
            TraceItem::Event(event) => Some(event.sequence_order),
            _ => None,
        })
        .collect();
    assert_eq!(orders, (0..orders.len() as i32).collect::<Vec<_>>());
    assert_eq!(
        first.events()[..4],
        [(EventType::Prefilled, 0), (EventType::ForwardPass, 1), (EventType::Sampled, 1), (EventType::Added, 1)]
    );
    assert_eq!(first.end.finish.reason, FinishReason::Length);
    assert_eq!(first.end.finish.usage.completion_tokens, 12);
    assert_eq!(first.text, first.end.finish.text);
    let again = test_engine.run(request("The sky is", 12)).await;
    assert_eq!(first.generated(), again.generated());
    assert!(again.end.finish.usage.cached_tokens > 0, "the second run reuses the state of the first");
}

#[tokio::test]
async fn control_token_is_text_if_requested() {
    let mut test_engine = test_engine(1, false).await;
    let vocabulary = Arc::clone(model().vocabulary());
    let tokens = vocabulary.encode_markup("a<|im_start|>b");
    let marker = *tokens.iter().find(|&&token| vocabulary.is_control(token)).unwrap();
    for (visible, text) in [(vec![], "ab"), (vec![marker], "a<|im_start|>b")] {
        let tokens = tokens.clone();
        let result = test_engine
            .run(with_mod(Request { visible_tokens: visible, ..request("The sky is", 8) }, true, move |call| {
                if added_at(call, 1) { Action::ForceOutput(tokens.clone()) } else { Action::Noop }
            }))
            .await;
        assert_eq!(result.end.finish.text, text);
    }
}

#[tokio::test]
async fn concurrent_streams_equal_a_run_alone() {
    let mut alone = test_engine(1, false).await;
    let prompts = ["The sky is", "Once upon a time there was a small house", "1 2 3", "{\"a\":"];
    let mut expected = Vec::new();
    for prompt in prompts {
        expected.push(alone.run(request(prompt, 20)).await.text);
    }
    let together = test_engine(4, false).await;
    let runs = prompts.map(|prompt| {
        let engine = together.engine.clone();
        tokio::spawn(async move { follow(engine.submit(request(prompt, 20)).await.unwrap().output).await.0 })
    });
    for (run, expected) in runs.into_iter().zip(expected) {
        assert_eq!(run.await.unwrap(), expected);
    }
}

#[tokio::test]
async fn batch_may_be_smaller_than_the_number_of_slots() {
    let alone = test_engine(1, false).await.run(request("Once upon a time", 12)).await.text;
    let test_engine = test_engine_with(6, false, |options| (options.batch_size, options.ubatch_size) = (4, 2)).await;
    let mut outputs = Vec::new();
    for _ in 0..6 {
        outputs.push(test_engine.engine.submit(request("Once upon a time", 12)).await.unwrap().output);
    }
    for output in outputs {
        assert_eq!(follow(output).await.0, alone);
    }
}

#[tokio::test]
async fn small_batch_has_room_for_every_slot() {
    let test_engine = test_engine_with(3, false, |options| (options.batch_size, options.ubatch_size) = (1, 1)).await;
    let endless = [start_endless(&test_engine).await, start_endless(&test_engine).await];
    let last = test_engine.engine.submit(request("The sky is", 12)).await.unwrap();
    let (_, end) = tokio::time::timeout(Duration::from_mins(1), follow(last.output)).await.unwrap();
    assert_eq!(end.finish.usage.completion_tokens, 12);
    for control in endless {
        control.stop(EndCause::ClientStop, "the test ends").await.unwrap();
    }
}

/// Starts a run that only ends when it is stopped, and reads its outputs.
async fn start_endless(test_engine: &TestEngine) -> RunControl {
    start_endless_in_slot(test_engine, None).await.0
}

/// Starts a run that only ends when it is stopped, in this slot or in any, and reads its outputs.
async fn start_endless_in_slot(test_engine: &TestEngine, slot: Option<u32>) -> (RunControl, Arc<RunMetrics>) {
    let overflow = Overflow::Shift { keep: None, discard: 0 };
    let endless = Request { overflow, slot, ..request_tokens(vec![6; 4], 100_000_000) };
    let generation = test_engine.engine.submit(endless).await.unwrap();
    tokio::spawn(follow(generation.output));
    (generation.control, generation.metrics)
}

async fn wait_for_activity(control: &RunControl, activity: RunActivity) {
    while control.progress().await.unwrap().activity != activity {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn preempted_run_that_continues_in_another_slot_reports_that_slot() {
    let test_engine = test_engine(2, false).await;
    let (first, metrics) = start_endless_in_slot(&test_engine, None).await;
    wait_for_activity(&first, RunActivity::Running).await;
    let slot = metrics.slot().unwrap();
    first.pause(Duration::ZERO).await.unwrap();
    wait_for_activity(&first, RunActivity::Preempted).await;
    let (second, _) = start_endless_in_slot(&test_engine, Some(slot)).await;
    wait_for_activity(&second, RunActivity::Running).await;
    first.resume().await.unwrap();
    wait_for_activity(&first, RunActivity::Running).await;
    assert_eq!(metrics.slot(), Some(1 - slot));
    for control in [first, second] {
        control.stop(EndCause::ClientStop, "the test ends").await.unwrap();
    }
}

#[tokio::test]
async fn cached_tokens_of_a_run_that_is_preempted_before_its_first_decode_are_counted() {
    let mut test_engine = test_engine(1, false).await;
    let prompt = vec![6; 100];
    test_engine.run(request_tokens(prompt.clone(), 1)).await;
    let mut request = request_tokens(prompt, 1);
    let pending = with_silent_mod(&mut request, EventType::Prefilled);
    let run = test_engine.engine.submit(request).await.unwrap();
    while pending.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    run.control.pause(Duration::ZERO).await.unwrap();
    pending.lock().unwrap().drain(..).for_each(|sender| sender.reply(Reply::default()));
    wait_for_activity(&run.control, RunActivity::Preempted).await;
    run.control.resume().await.unwrap();
    let finish = follow(run.output).await.1.finish.clone();
    assert_eq!((finish.usage.cached_tokens, finish.prompt_decoded), (99, 1));
}

#[tokio::test]
async fn change_that_ends_a_queued_run_is_reported_immediately() {
    let test_engine = test_engine(1, false).await;
    let mut queued = test_engine.engine.submit(request("The sky is", 400)).await.unwrap();
    queued.output.recv().await.unwrap();
    queued.control.pause(Duration::ZERO).await.unwrap();
    while queued.control.progress().await.unwrap().activity != RunActivity::Preempted {
        while queued.output.try_recv().is_ok() {}
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let endless = start_endless(&test_engine).await;
    wait_for_activity(&endless, RunActivity::Running).await;
    assert_eq!(queued.control.resume().await.unwrap().activity, RunActivity::Queued);
    let limits = Limits { ignore_eos: true, ..Limits::new(1) };
    let modify = || queued.control.modify(SamplingParams::default(), limits.clone(), "max_tokens is 1".into());
    assert_eq!(modify().await.unwrap().activity, RunActivity::Finished);
    assert!(modify().await.is_err(), "the run has ended");
    let (_, end) = tokio::time::timeout(Duration::from_mins(1), follow(queued.output)).await.unwrap();
    assert_eq!(end.finish.reason, FinishReason::Length);
    endless.stop(EndCause::ClientStop, "the test ends").await.unwrap();
}

#[tokio::test]
async fn status_of_slot_has_changed_parameters() {
    let test_engine = test_engine(1, false).await;
    let endless = start_endless(&test_engine).await;
    wait_for_activity(&endless, RunActivity::Running).await;
    let shown = || {
        let slot = test_engine.engine.status().slots().remove(0);
        slot.run.map(|run| (run.limits.max_tokens, run.sampling.top_k))
    };
    let limits = Limits { ignore_eos: true, ..Limits::new(200_000_000) };
    let sampling = SamplingParams { top_k: 7, ..SamplingParams::default() };
    endless.modify(sampling, limits, "max_tokens and top_k".into()).await.unwrap();
    let is_shown = async {
        while shown() != Some((200_000_000, 7)) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), is_shown).await.unwrap();
    endless.stop(EndCause::ClientStop, "the test ends").await.unwrap();
}

#[tokio::test]
async fn disconnected_client_ends_its_run_and_frees_the_slot() {
    let mut test_engine = test_engine(1, false).await;
    let mut endless = request("The sky is", 400);
    endless.limits.max_steps = 4000;
    let generation = test_engine.engine.submit(endless).await.unwrap();
    drop(generation.output);
    let result = tokio::time::timeout(Duration::from_mins(1), test_engine.run(request("The sky is", 3))).await.unwrap();
    assert_eq!(result.generated().len(), 3);
}

#[tokio::test]
async fn only_evaluated_prompt_tokens_are_counted() {
    let test_engine = test_engine_with(1, false, |options| options.batch_size = 64).await;
    // The first run is stopped after at most one batch of its prompt, and the second before any token.
    let (release, released) = std::sync::mpsc::channel();
    let (called, mut calls) = tokio::sync::mpsc::unbounded_channel();
    let released = Mutex::new(released);
    let mut limited = with_mod(request_tokens(vec![6; 400], 8), false, move |call| {
        if call.event_type() == EventType::Prefilled {
            called.send(()).unwrap();
            released.lock().unwrap().recv().unwrap();
        }
        Action::Noop
    });
    limited.report.progress = true;
    let mut first_run = test_engine.engine.submit(limited).await.unwrap();
    calls.recv().await.unwrap();
    let second_run = test_engine.engine.submit(request_tokens(vec![5; 300], 8)).await.unwrap();
    let (first, second, ()) = tokio::join!(
        first_run.control.stop(EndCause::ClientStop, "enough"),
        second_run.control.stop(EndCause::ClientStop, "enough"),
        async { release.send(()).unwrap() }
    );
    assert!(first.is_ok() && second.is_ok());
    let mut decoded = 0;
    let end = loop {
        match first_run.output.recv().await.unwrap() {
            Output::PromptProgress(now) => decoded = now.processed - now.cached,
            Output::Ended(end) => break end,
            _ => {}
        }
    };
    let result = |end: &RunEnd| (end.finish.reason, end.finish.usage.prompt_tokens, end.finish.prompt_decoded);
    assert!((1..=64).contains(&decoded), "{decoded}");
    assert_eq!(result(&end), (FinishReason::Cancelled, 400, decoded));
    let (_, second_end) = follow(second_run.output).await;
    assert_eq!((result(&second_end), second_end.finish.prompt_us), ((FinishReason::Cancelled, 300, 0), 0));
    while test_engine.engine.unfinished_runs() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let total = test_engine.engine.status().counts().total;
    assert_eq!((total.prompt_tokens, total.prompt_us), (decoded.into(), end.finish.prompt_us));
    assert!(total.prompt_us > 0);
    assert_eq!(
        test_engine.engine.slot_tokens(&thunder::events::Scope::All, 0).await.unwrap().processed,
        decoded as usize
    );
}

#[tokio::test]
async fn client_that_does_not_read_pauses_only_its_own_run() {
    let mut test_engine = test_engine(2, false).await;
    let mut slow = request("The sky is", 450);
    slow.limits.max_steps = 4000;
    let slow = test_engine.engine.submit(slow).await.unwrap();
    let result = test_engine.run(request("Quick", 20)).await;
    assert_eq!(result.generated().len(), 20);
    let (_, end) = follow(slow.output).await;
    assert_eq!(end.finish.usage.completion_tokens, 450);
}

#[tokio::test]
async fn stop_strings_stop_tokens_and_context_end_the_run() {
    let mut test_engine = test_engine(1, false).await;
    let plain = test_engine.run(request("The sky is", 20)).await;
    let chars: Vec<char> = plain.text.chars().collect();
    let stop: String = chars[chars.len() / 2..chars.len() / 2 + 2].iter().collect();
    let mut limited = request("The sky is", 20);
    limited.limits.stop = vec![stop.clone()];
    let result = test_engine.run(limited).await;
    assert_eq!(result.end.finish.reason, FinishReason::Stop);
    assert_eq!(result.end.finish.stop_string.as_deref(), Some(stop.as_str()));
    assert_eq!(result.text, plain.text[..plain.text.find(&stop).unwrap()]);
    let mut limited = request("The sky is", 20);
    limited.limits.stop_tokens = vec![plain.generated()[3]];
    let result = test_engine.run(limited).await;
    assert_eq!(result.end.finish.reason, FinishReason::Stop);
    let mut long = request("The sky is", 100_000);
    long.limits.max_steps = 1_000_000;
    let result = test_engine.run(long).await;
    assert_eq!(result.end.finish.message.as_deref(), Some("the context of 512 tokens is full"));
}
