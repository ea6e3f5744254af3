//! The store, on databases of the shared PostgreSQL server or on embedded servers.

mod citus;
mod data;
mod deletions;
mod embedded;
mod filters;
mod ingest;
mod mods;
mod recorder;
mod retention;
mod runs;
mod servers;
mod statistics;

use crate::harness::postgres::kill_listeners;
use crate::harness::{psql, run_start, wait_for_psql};
use chrono::{NaiveDate, Utc};
use data::Data;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thunder::events::{
    ActionRecord, ActionType, Alternative, AttentionStep, DraftUsage, Event, EventType, Finish, FinishReason, LogLevel,
    Measurements, ModCall, ModLog, PromptRecord, RunEnd, RunId, RunStart, RunStatus, Scope, StageCount,
    TokenMeasurement, TraceItem, Usage, system,
};
use thunder::recording::Signal;
use thunder::store::{RunChange, RunChanges, RunListUpdate, Store};
use thunder::trace::document::Document;
use uuid::{NoContext, Timestamp, Uuid};

fn kill(pid: i32, signal: &str) {
    let done = std::process::Command::new("kill").args([signal, &pid.to_string()]).status().unwrap();
    assert!(done.success());
}

/// Waits until the run with this id or request id is stored with a status.
async fn wait_for_status(store: &Store, id: &str, status: RunStatus) {
    let begun = Instant::now();
    loop {
        if let Ok(Some(run)) = store.find(&Scope::All, id).await
            && run.status == status
        {
            return;
        }
        assert!(begun.elapsed() < Duration::from_mins(1), "run {id} does not become {status:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the next change of the run list.
async fn next_change(updates: &mut RunChanges) -> RunChange {
    loop {
        let update = tokio::time::timeout(Duration::from_mins(1), updates.recv()).await.expect("no change is reported");
        if let RunListUpdate::Changed(change) = update.unwrap() {
            return change;
        }
    }
}

/// Returns a payload with a number of generated tokens and a mod; 256 tokens become about 2500 rows.
fn payload(request_id: &str, tokens: i32) -> Vec<u8> {
    let mut events = vec![json!({"event_type": "Prefilled", "step": 0, "sequence_order": 0, "prompt_length": 12,
        "tokens_so_far_len": 0, "max_steps": tokens, "created_at": "2025-12-01T18:30:00Z"})];
    for step in 1..=tokens {
        let top: Vec<_> = (0..10).map(|i| json!({"token": step * 10 + i, "prob": 0.5 / f64::from(i + 1)})).collect();
        let order = events.len();
        events.push(json!({"event_type": "ForwardPass", "step": step, "sequence_order": order,
            "input_text": "Once upon a time there was a small engine that could", "top_tokens": top,
            "created_at": "2025-12-01T18:30:01.5Z"}));
        events.push(json!({"event_type": "Sampled", "step": step, "sequence_order": order + 1, "sampled_token": step,
            "token_text": format!(" w{step}"), "details": {"z": 1.0, "a": [1e2, "ä"], "step": step}}));
        events.push(json!({"event_type": "Added", "step": step, "sequence_order": order + 2, "added_tokens": [step],
            "added_token_count": 1, "forced": false}));
    }
    let calls: Vec<_> = events
        .iter()
        .map(|event| {
            json!({"event_sequence_order": event["sequence_order"], "mod_name": "watcher", "event_type": event["event_type"],
                "step": event["step"], "execution_time_ms": 0.25, "exception_occurred": false})
        })
        .collect();
    let logs: Vec<_> = (0..calls.len())
        .step_by(4)
        .map(|call| json!({"mod_call_sequence": call, "mod_name": "watcher", "log_message": format!("call {call}"), "log_level": "DEBUG"}))
        .collect();
    let actions: Vec<_> = (0..calls.len())
        .map(|call| json!({"mod_call_sequence": call, "action_type": "Noop", "action_order": 0}))
        .collect();
    serde_json::to_vec(&json!({
        "request": {"request_id": request_id, "created_at": "2025-12-01T18:30:00Z", "completed_at": "2025-12-01T18:30:05Z",
            "model": "gemini-2.0-flash", "user_api_key": "user_789", "max_tokens": 1000, "temperature": 0.7,
            "mod_text": "watcher.py"},
        "events": events, "mod_calls": calls, "mod_logs": logs, "actions": actions,
    }))
    .unwrap()
}

fn document(request_id: &str, tokens: i32) -> Document {
    Document::parse(&payload(request_id, tokens)).unwrap()
}

/// A run of the engine, which tests send to the recorder signal by signal.
struct LiveRun {
    start: Arc<RunStart>,
    next_event: i32,
    next_call: i32,
    step: i32,
}

impl LiveRun {
    fn new(request_id: &str) -> Self {
        let start = RunStart {
            created_at: now(),
            model: "tiny".into(),
            user_label: Some("me".into()),
            max_tokens: Some(100),
            temperature: Some(0.7),
            seed: Some(u32::MAX),
            mods: vec!["watcher".into()],
            prompt_preview: "Why is the sky blue?".into(),
            ..run_start(RunId::now(), request_id)
        };
        Self { start: Arc::new(start), next_event: 0, next_call: 0, step: 0 }
    }

    /// Returns a run that started at noon of a day.
    fn on_day(request_id: &str, day: NaiveDate) -> Self {
        let noon = day.and_hms_opt(12, 0, 0).unwrap().and_utc();
        let timestamp = Timestamp::from_unix(NoContext, noon.timestamp().cast_unsigned(), 0);
        let mut run = Self::new(request_id);
        let run_id = RunId(Uuid::new_v7(timestamp));
        run.start = RunStart { run_id, created_at: noon, ..(*run.start).clone() }.into();
        run
    }

    fn run_id(&self) -> RunId {
        self.start.run_id
    }

    fn started(&self) -> Signal {
        Signal::Started(Arc::clone(&self.start))
    }

    fn event(&mut self, kind: EventType, measured: Measurements) -> Event {
        let mut event = Event::new(kind, self.step, self.next_event, Some(now()));
        event.measured = Some(Box::new(measured));
        self.next_event += 1;
        event
    }

    fn prefilled(&mut self) -> Signal {
        let prompt = PromptRecord {
            tokens: vec![1, 2, 3],
            texts: vec!["Why".into(), " is".into(), " blue\0".into()],
            parameters: Some(json!({"z": 1, "a": 0.5})),
            ..PromptRecord::default()
        };
        let measured = Measurements { position: Some(0), prompt: Some(Box::new(prompt)), ..Measurements::default() };
        let mut event = self.event(EventType::Prefilled, measured);
        event.prompt_length = Some(3);
        event.tokens_so_far_len = Some(0);
        event.max_steps = Some(100);
        Signal::Items(self.run_id(), Arc::new(vec![TraceItem::Event(event)]))
    }

    /// Returns the signal of one token with a mod call, a log line and attention.
    fn token(&mut self, text: &str) -> Signal {
        self.step += 1;
        let token = 100 + self.step;
        let position = self.step.cast_unsigned() + 2;
        let alternative = |token, prob| Alternative { token, text: format!("t{token}"), prob };
        let measure =
            TokenMeasurement { token, text: text.to_owned(), logprob: Some(-0.25), rank: Some(1), entropy: Some(1.5) };
        let mut forward = self.event(
            EventType::ForwardPass,
            Measurements {
                position: Some(position),
                entropy: Some(1.5),
                model: (0..10).map(|i| alternative(token + i, 0.5 / f32::from(i as i16 + 1))).collect(),
                elapsed_us: Some(1000),
                ..Measurements::default()
            },
        );
        forward.input_text = Some("the end of the text".into());
        let step = AttentionStep {
            sequence_order: forward.sequence_order,
            row_len: position,
            layer_ids: vec![0, 1, 5].into(),
            heads: 2,
            t0: vec![1, 2, 3],
            t1: vec![4; 5000],
            head_rows: vec![7; 9],
        };
        let call = ModCall {
            event_sequence_order: forward.sequence_order,
            mod_name: "watcher".into(),
            event_type: EventType::ForwardPass,
            step: self.step,
            created_at: Some(now()),
            execution_time_ms: Some(0.5),
            exception_occurred: false,
            exception_message: None,
            exception_traceback: None,
        };
        let log = ModLog {
            mod_call_sequence: self.next_call,
            mod_name: "watcher".into(),
            log_message: "NUL \0 in a log".into(),
            log_level: LogLevel::Warning,
            created_at: None,
        };
        let action = ActionRecord::new(self.next_call, ActionType::Noop, Some(now()));
        self.next_call += 1;
        let mut sampled = self.event(
            EventType::Sampled,
            Measurements {
                position: Some(position),
                tokens: vec![measure.clone()],
                after_sampler: vec![alternative(token, 1.0)],
                stages: vec![StageCount { name: "top-k".into(), left: 40 }],
                ..Measurements::default()
            },
        );
        sampled.sampled_token = Some(token);
        sampled.token_text = Some(text.to_owned());
        let mut added = self.event(
            EventType::Added,
            Measurements {
                position: Some(position),
                tokens: vec![measure],
                stopped_by: (text == ".").then(|| ".".into()),
                ..Measurements::default()
            },
        );
        added.added_tokens = Some(vec![token]);
        added.added_token_count = Some(1);
        added.forced = Some(false);
        let items = vec![
            TraceItem::Event(forward),
            TraceItem::ModCall(call),
            TraceItem::ModLog(log),
            TraceItem::Action(action),
            TraceItem::Attention(step),
            TraceItem::Event(sampled),
            TraceItem::Event(added),
        ];
        Signal::Items(self.run_id(), Arc::new(items))
    }

    fn ended(&self) -> Signal {
        let finish = Finish {
            reason: FinishReason::Stop,
            message: None,
            stop_string: Some(".".into()),
            text: " sky is blue.".into(),
            tool_calls: None,
            fault: None,
            cause: None,
            usage: Usage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: self.step.cast_unsigned() },
            first_token_us: Some(10),
            prompt_decoded: 2,
            prompt_us: 5,
            generation_us: 20,
            truncated: false,
            evicted_tokens: 0,
            evicted: Vec::new(),
            drafts: DraftUsage::default(),
            mod_failures: Vec::new(),
        };
        Signal::Ended(self.run_id(), Arc::new(RunEnd { completed_at: now(), status: RunStatus::Done, finish }))
    }

    /// Returns all signals of a short run.
    fn all(&mut self, tokens: usize) -> Vec<Signal> {
        let mut signals = vec![self.started(), self.prefilled()];
        signals.extend((0..tokens).map(|_| self.token(" sky")).collect::<Vec<_>>());
        signals.push(self.ended());
        signals
    }
}

/// Fails if a table has rows of a run.
async fn assert_no_rows(url: &str, run_id: RunId) {
    for table in ["runs", "run_keys", "run_columns", "events", "mod_calls", "mod_logs", "actions", "attention"] {
        let rows = format!("select count(*) from {table} where run_id = '{run_id}'");
        assert_eq!(psql(url, &rows).await, "0", "{table}");
    }
}

/// Returns the time with the precision of PostgreSQL.
fn now() -> chrono::DateTime<Utc> {
    chrono::DateTime::from_timestamp_micros(system::now().timestamp_micros()).unwrap()
}

/// Returns the items of signals as they are stored: without attention, and with NUL characters replaced.
fn expected_items(signals: &[Signal]) -> String {
    let items =
        signals.iter().filter_map(|signal| if let Signal::Items(_, items) = signal { Some(items) } else { None });
    let items: Vec<&TraceItem> =
        items.flat_map(|items| items.iter()).filter(|item| !matches!(item, TraceItem::Attention(_))).collect();
    format!("{items:#?}").replace("NUL \\0", "NUL \u{2400}")
}
