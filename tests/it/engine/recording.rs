//! The recorder receives everything in order, also if it is slow, and a run that it cannot store ends.

use super::slow_clients::with_silent_mod;
use super::{follow, model, options, request, request_tokens};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use thunder::engine::{Engine, RecordPolicy, Request};
use thunder::events::{EndCause, EventType, RunId, RunStatus, TraceItem};
use thunder::mods::{
    Action, Call, EventSet, ModDescription, ModFactory, ModInstance, ModOrigin, ModRef, Reply, ReplySender, RunView,
    SelectedMod,
};
use thunder::recording::{DurabilityAcks, NotStored, RecorderHandle, Signal};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Signals of a run so far.
#[derive(Debug, Default)]
struct RunSignals {
    started: bool,
    passes: usize,
    rows: usize,
    ended: bool,
}

#[derive(Default)]
struct ReceivedSignals(HashMap<RunId, RunSignals>);

impl ReceivedSignals {
    fn add(&mut self, signal: &Signal) {
        let state = self.0.entry(signal.run_id()).or_default();
        assert!(!state.ended, "a signal follows the end of its run: {signal:?}");
        match signal {
            Signal::Started(_) => assert!(!std::mem::replace(&mut state.started, true)),
            Signal::Items(_, items) => {
                assert!(state.started, "a signal precedes the start of its run");
                for item in items.iter() {
                    match item {
                        TraceItem::Event(event) => {
                            state.passes += usize::from(event.event_type == EventType::ForwardPass);
                        }
                        TraceItem::Attention(_) => state.rows += 1,
                        _ => {}
                    }
                }
            }
            Signal::Ended(..) => {
                assert!(state.started, "a signal precedes the start of its run");
                state.ended = true;
            }
        }
    }

    fn is_complete(&self, runs: usize) -> bool {
        self.0.len() == runs && self.0.values().all(|state| state.ended)
    }
}

/// Starts an engine whose recorder holds this number of signals.
async fn start_engine(capacity: usize) -> (Engine, mpsc::Receiver<Signal>) {
    let (recorder, signals) = mpsc::channel(capacity);
    (Engine::start(model(), options(1, true), recorder).await.unwrap(), signals)
}

fn with_attention(request: Request) -> Request {
    Request { attention: true, ..request }
}

#[tokio::test]
async fn cancelled_runs_do_not_block_the_engine_while_the_recorder_is_full() {
    const CANCELLED: usize = 300;
    let (engine, mut signals) = start_engine(1).await;
    let first = engine.submit(with_attention(request("The sky is", 40))).await.unwrap();
    for _ in 0..CANCELLED {
        drop(engine.submit(with_attention(request_tokens(vec![6; 4], 3))).await.unwrap());
    }
    let wait_timeout = Duration::from_mins(1);
    while engine.unfinished_runs() > 1 {
        timeout(wait_timeout, first.control.progress())
            .await
            .expect("the decode thread waited for the recorder")
            .unwrap();
    }
    let mut received = ReceivedSignals::default();
    while !received.is_complete(1 + CANCELLED) {
        received.add(&timeout(wait_timeout, signals.recv()).await.unwrap().unwrap());
    }
    assert_eq!(follow(first.output).await.1.finish.usage.completion_tokens, 40);
    engine.stop().await;
}

#[tokio::test]
async fn start_of_a_run_is_signaled_before_submit_returns() {
    let (engine, mut signals) = start_engine(8).await;
    let run = engine.submit(request("The sky is", 2)).await.unwrap();
    assert!(matches!(signals.try_recv(), Ok(Signal::Started(start)) if start.run_id == run.run_id));
    follow(run.output).await;
    engine.stop().await;
}

#[tokio::test]
async fn slow_recorder_receives_everything_in_order() {
    let (engine, mut signals) = start_engine(1).await;
    let recorder = tokio::spawn(async move {
        let mut received = ReceivedSignals::default();
        while let Some(signal) = signals.recv().await {
            received.add(&signal);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        received
    });
    for tokens in [1, 5, 12] {
        let run = engine.submit(with_attention(request("The sky is", tokens))).await.unwrap();
        follow(run.output).await;
    }
    engine.stop().await;
    let received = recorder.await.unwrap();
    assert!(received.is_complete(3), "{:?}", received.0);
    for state in received.0.values() {
        assert_eq!(state.passes, state.rows, "every step has a row");
    }
}

#[tokio::test]
async fn running_run_that_cannot_be_stored_ends_as_not_recorded() {
    let (recorder, mut signals) = mpsc::channel(100_000);
    let acks = DurabilityAcks::default();
    let handle = RecorderHandle { signals: recorder, durability_acks: Some(acks.clone()), unstored: None };
    let engine = Engine::start(model(), options(1, false), handle).await.unwrap();
    for is_waiting in [false, true] {
        let mut request = request("The sky is", 400);
        request.record = RecordPolicy::Required;
        let pending_replies = is_waiting.then(|| with_silent_mod(&mut request, EventType::Added));
        let mut run = engine.submit(request).await.unwrap();
        if let Some(pending_replies) = pending_replies {
            while pending_replies.lock().unwrap().is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        } else {
            run.output.recv().await.unwrap();
        }
        acks.resolve(run.run_id, Err(NotStored::Rejected));
        let (_, end) = follow(run.output).await;
        let recorded = loop {
            if let Signal::Ended(_, end) = signals.recv().await.unwrap() {
                break end;
            }
        };
        let aborted = (RunStatus::Failed, Some(EndCause::NotRecorded));
        for end in [&recorded, &end] {
            assert_eq!((end.status, end.finish.cause), aborted, "waiting {is_waiting}");
        }
        assert_eq!((&recorded.finish.text, &recorded.finish.message), (&end.finish.text, &end.finish.message));
    }
    engine.stop().await;
}

/// A mod that discards every sampled token. It replies when it is polled.
struct PolledMod;

struct PolledModInstance(Option<ReplySender>);

impl ModFactory for PolledMod {
    fn describe(&self) -> ModDescription {
        ModDescription {
            name: "polled".into(),
            description: String::new(),
            language: "test".into(),
            version: "1".into(),
            origin: ModOrigin::Builtin,
            ..ModDescription::default()
        }
    }
    fn start(&self, _: &serde_json::Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(PolledModInstance(None)))
    }
}

impl ModInstance for PolledModInstance {
    fn handles(&self) -> EventSet {
        EventSet::new(&[EventType::Sampled])
    }
    fn call(&mut self, _: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        self.0 = Some(new_sender());
        None
    }
    fn poll_reply(&mut self) {
        if let Some(done) = self.0.take() {
            done.reply(Action::Backtrack { n: 1, tokens: Vec::new() }.into());
        }
    }
    fn stop_polling(&mut self) {
        self.poll_reply();
    }
}

#[tokio::test]
async fn events_are_recorded_while_a_mod_prevents_decodes() {
    let (engine, mut signals) = start_engine(100_000).await;
    let mut request = request("The sky is", 5);
    request.limits.max_steps = 2000;
    let mod_ref = ModRef { name: "polled".into(), config: serde_json::Value::Null };
    request.mods.push(SelectedMod { mod_ref, factory: Arc::new(PolledMod) });
    let end = follow(engine.submit(request).await.unwrap().output).await.1;
    assert!(end.finish.message.as_ref().unwrap().starts_with("the limit of 2000 steps was reached"), "{end:?}");
    engine.stop().await;
    while let Some(signal) = signals.recv().await {
        if let Signal::Items(_, items) = signal {
            // 128 items, and those of the last step.
            assert!(items.len() < 160, "{} items were kept until they were recorded", items.len());
        }
    }
}
