//! Clients that do not read, or disconnect: their runs yield their slots to others, or end.

use super::{TestEngine, follow, request_tokens, test_engine, test_engine_with};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use thunder::engine::{EngineOptions, Generation, Output, Request, RunActivity};
use thunder::events::{EndCause, EventType, FinishReason, RunEnd, RunStatus};
use thunder::mods::{
    Call, EventSet, ModDescription, ModFactory, ModInstance, ModOrigin, ModRef, Reply, ReplySender, RunView,
    SelectedMod,
};
use thunder::recording::Signal;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Maximum number of preempted runs of clients that do not read, as in the engine.
const MAX_PREEMPTED: usize = 16;

async fn activities(generations: &[Generation]) -> Vec<Option<RunActivity>> {
    let mut activities = Vec::new();
    for generation in generations {
        activities.push(generation.control.progress().await.ok().map(|progress| progress.activity));
    }
    activities
}

/// Waits until the activities of runs fulfill a condition.
async fn wait_until(condition: &str, generations: &[Generation], is_met: impl Fn(&[Option<RunActivity>]) -> bool) {
    for _ in 0..3000 {
        if is_met(&activities(generations).await) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("timeout: {condition}: {:?}", activities(generations).await);
}

fn count(activities: &[Option<RunActivity>], activity: RunActivity) -> usize {
    activities.iter().filter(|&&one| one == Some(activity)).count()
}

/// Reads the outputs of a run. Returns the number of texts and the end.
async fn read_all(mut output: mpsc::Receiver<Output>) -> (usize, Arc<RunEnd>) {
    let mut texts = 0;
    loop {
        match output.recv().await.unwrap() {
            Output::Ended(end) => return (texts, end),
            _ => texts += 1,
        }
    }
}

/// Asserts that a run ended because its client did not read. The client receives what was sent before, and the end.
async fn assert_ended_unread(output: mpsc::Receiver<Output>, message: &str) {
    let (texts, end) = read_all(output).await;
    assert_eq!(
        (texts, end.finish.reason, end.finish.cause),
        (256, FinishReason::Cancelled, Some(EndCause::Disconnect))
    );
    assert!(end.finish.message.as_ref().unwrap().contains(message), "{end:?}");
}

#[tokio::test]
async fn preempted_runs_of_slow_clients_are_limited() {
    let test_engine = test_engine(MAX_PREEMPTED as u32, false).await;
    let long = || request_tokens(vec![5; 4], 400);
    let mut unread = Vec::new();
    for _ in 0..2 * MAX_PREEMPTED {
        unread.push(test_engine.engine.submit(long()).await.unwrap());
    }
    // The first runs are preempted because others are queued. The others keep their slots while they wait for their clients.
    wait_until("the first runs are preempted", &unread, |all| {
        count(&all[..MAX_PREEMPTED], RunActivity::Preempted) == MAX_PREEMPTED
            && count(&all[MAX_PREEMPTED..], RunActivity::Running) == MAX_PREEMPTED
    })
    .await;
    // No more runs can be preempted, so the run that was unread for longest ends.
    let reading_run = test_engine.engine.submit(request_tokens(vec![6; 4], 3)).await.unwrap();
    let (_, end) = timeout(Duration::from_mins(2), follow(reading_run.output)).await.unwrap();
    assert_eq!(end.finish.usage.completion_tokens, 3);
    let all = activities(&unread).await;
    let ended: Vec<usize> = (0..all.len()).filter(|&at| all[at].is_none()).collect();
    let [ended] = ended[..] else { panic!("{all:?}") };
    assert!(ended < MAX_PREEMPTED, "{all:?}");
    assert_ended_unread(unread.remove(ended).output, "while other runs waited for a slot").await;
    // A run whose client reads continues.
    let continued = follow(unread.remove(0).output).await.1;
    assert_eq!((continued.finish.reason, continued.finish.usage.completion_tokens), (FinishReason::Length, 400));
    // The runs of disconnected clients end.
    drop(unread);
    let last = test_engine.engine.submit(request_tokens(vec![7; 4], 3)).await.unwrap();
    assert_eq!(follow(last.output).await.1.finish.reason, FinishReason::Length);
    while test_engine.engine.unfinished_runs() > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn unread_runs_end_after_a_time_limit() {
    let short = |options: &mut EngineOptions| options.max_unread_time = Duration::from_millis(50);
    let mut test_engine = test_engine_with(4, false, short).await;
    // The last two generate their whole answers; the client has room for all tokens of the last one, but not for its end.
    let mut unread = Vec::new();
    for tokens in [400, 258, 257, 256] {
        let mut request = request_tokens(vec![5; 4], tokens);
        request.report.per_token = true;
        unread.push(test_engine.engine.submit(request).await.unwrap());
    }
    let run_ids: Vec<_> = unread.iter().map(|generation| generation.run_id).collect();
    let submitted = Instant::now();
    while test_engine.engine.unfinished_runs() > 0 {
        assert!(submitted.elapsed() < Duration::from_mins(2), "the runs do not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let whole = unread.pop().unwrap();
    for generation in unread {
        assert_ended_unread(generation.output, "; the maximum is 0 s").await;
    }
    let (texts, end) = read_all(whole.output).await;
    assert_eq!((texts, end.finish.reason), (256, FinishReason::Length), "a place is kept for the end");
    let mut recorded = Vec::new();
    while let Ok(signal) = test_engine.signals.try_recv() {
        if let Signal::Ended(id, end) = signal {
            recorded.push((run_ids.iter().position(|run| *run == id).unwrap(), end.status));
        }
    }
    recorded.sort_unstable_by_key(|&(run, _)| run);
    let (cancelled, done) = (RunStatus::Cancelled, RunStatus::Done);
    assert_eq!(recorded, [(0, cancelled), (1, cancelled), (2, done), (3, done)]);
}

#[tokio::test]
async fn client_that_does_not_read_receives_the_end_of_a_shutdown() {
    let test_engine = test_engine(1, false).await;
    let mut request = request_tokens(vec![5; 4], 400);
    request.report.per_token = true;
    let unread = test_engine.engine.submit(request).await.unwrap();
    while unread.control.progress().await.unwrap().generated < 257 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    test_engine.engine.stop().await;
    let (texts, end) = read_all(unread.output).await;
    assert_eq!((texts, end.finish.cause), (256, Some(EndCause::Shutdown)));
}

#[tokio::test]
async fn runs_whose_connections_a_stopping_server_closes_end_with_the_shutdown() {
    let mut test_engine = test_engine(1, false).await;
    let mut active = test_engine.engine.submit(request_tokens(vec![5; 4], 400)).await.unwrap();
    let queued = test_engine.engine.submit(request_tokens(vec![5; 4], 400)).await.unwrap();
    active.output.recv().await.unwrap();
    test_engine.engine.announce_stop();
    drop((active, queued));
    let mut causes = Vec::new();
    while causes.len() < 2 {
        let signal = timeout(Duration::from_mins(2), test_engine.signals.recv()).await.expect("the runs do not end");
        if let Some(Signal::Ended(_, end)) = signal {
            causes.push(end.finish.cause);
        }
    }
    assert_eq!(causes, [Some(EndCause::Shutdown); 2]);
}

/// A mod that does not reply to one type of event: the test has to use the senders.
struct SilentMod {
    event_type: EventType,
    pending: Arc<Mutex<Vec<ReplySender>>>,
}

/// Adds a mod to a request that does not reply to events of this type. Returns the senders for its replies.
pub fn with_silent_mod(request: &mut Request, event_type: EventType) -> Arc<Mutex<Vec<ReplySender>>> {
    let pending = Arc::default();
    let factory = Arc::new(SilentMod { event_type, pending: Arc::clone(&pending) });
    let mod_ref = ModRef { name: "silent".into(), config: serde_json::Value::Null };
    request.mods.push(SelectedMod { mod_ref, factory });
    pending
}

impl ModFactory for SilentMod {
    fn describe(&self) -> ModDescription {
        ModDescription {
            name: "silent".into(),
            description: String::new(),
            language: "test".into(),
            version: "1".into(),
            origin: ModOrigin::Builtin,
            ..ModDescription::default()
        }
    }
    fn start(&self, _: &serde_json::Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(Self { event_type: self.event_type, pending: Arc::clone(&self.pending) }))
    }
}

impl ModInstance for SilentMod {
    fn handles(&self) -> EventSet {
        EventSet::ALL
    }
    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        if call.event_type() != self.event_type {
            return Some(Reply::default());
        }
        self.pending.lock().unwrap().push(new_sender());
        None
    }
}

/// Disconnects the client of a run, and asserts that the end of the run is recorded and its slot serves another run.
async fn assert_disconnect_frees_slot(
    test_engine: &mut TestEngine,
    state: &str,
    generation: Generation,
    status: RunStatus,
) {
    let run_id = generation.run_id;
    drop(generation);
    let begun = Instant::now();
    while test_engine.engine.unfinished_runs() > 0 {
        assert!(begun.elapsed() < Duration::from_mins(1), "{state}: the run does not end");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut ends = 0;
    while let Ok(signal) = test_engine.signals.try_recv() {
        if let Signal::Ended(id, end) = signal
            && id == run_id
        {
            assert_eq!(end.status, status, "{state}");
            ends += 1;
        }
    }
    assert_eq!(ends, 1, "{state}");
    assert_eq!(test_engine.run(request_tokens(vec![7; 4], 3)).await.generated().len(), 3, "{state}");
}

#[tokio::test]
async fn disconnected_client_frees_its_slot_in_every_state() {
    let mut test_engine = test_engine(1, false).await;
    let long = |tokens| request_tokens(vec![5; 4], tokens);
    let receive_output = async |generation: &mut Generation| {
        generation.output.recv().await.unwrap();
    };
    let mut running = test_engine.engine.submit(long(500)).await.unwrap();
    receive_output(&mut running).await;
    assert_disconnect_frees_slot(&mut test_engine, "while generating", running, RunStatus::Cancelled).await;

    let running = test_engine.engine.submit(long(500)).await.unwrap();
    let queued = test_engine.engine.submit(long(500)).await.unwrap();
    let run_id = queued.run_id;
    drop(queued);
    while test_engine.engine.unfinished_runs() > 1 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let ended = |signal: &Signal| matches!(signal, Signal::Ended(id, _) if *id == run_id);
    while !ended(&test_engine.signals.recv().await.unwrap()) {}
    assert_disconnect_frees_slot(&mut test_engine, "after a queued run was cancelled", running, RunStatus::Cancelled)
        .await;

    let mut request_with_mod = long(500);
    let pending_replies = with_silent_mod(&mut request_with_mod, EventType::Added);
    let waiting = test_engine.engine.submit(request_with_mod).await.unwrap();
    while pending_replies.lock().unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_disconnect_frees_slot(&mut test_engine, "while a mod is called", waiting, RunStatus::Cancelled).await;
    pending_replies.lock().unwrap().drain(..).for_each(|done| done.reply(Reply::default()));

    for (state, keep_slot_for, activity) in [
        ("while paused", Duration::from_hours(1), RunActivity::Paused),
        ("while preempted", Duration::ZERO, RunActivity::Preempted),
    ] {
        let mut paused = test_engine.engine.submit(long(500)).await.unwrap();
        receive_output(&mut paused).await;
        paused.control.pause(keep_slot_for).await.unwrap();
        let other = if activity == RunActivity::Preempted {
            Some(test_engine.engine.submit(long(1)).await.unwrap())
        } else {
            None
        };
        while paused.control.progress().await.unwrap().activity != activity {
            while paused.output.try_recv().is_ok() {}
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        if let Some(other) = other {
            follow(other.output).await;
        }
        assert_disconnect_frees_slot(&mut test_engine, state, paused, RunStatus::Cancelled).await;
    }

    let unread = test_engine.engine.submit(long(300)).await.unwrap();
    while unread.control.progress().await.is_ok_and(|progress| progress.generated < 257) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_disconnect_frees_slot(&mut test_engine, "while its output is full", unread, RunStatus::Cancelled).await;
}
