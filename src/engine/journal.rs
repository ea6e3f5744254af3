//! What a run has to say: its items in order, on their way to the recorder.

use crate::events::{ActionRecord, Event, EventType, ModCall, ModLog, TraceItem};
use chrono::{DateTime, Utc};
use std::time::{Duration, Instant};

/// Tells the time of day; a parameter, so that a run can be repeated.
pub type Clock = fn() -> DateTime<Utc>;

/// Collects the items of one run and numbers them.
pub(super) struct Journal {
    items: Vec<TraceItem>,
    recorded: bool,
    clock: Clock,
    started: Instant,
    /// `None` before the first: a reader of a run that has just begun must find its beginning.
    last_flush: Option<Instant>,
    next_event: i32,
    next_call: i32,
}

impl Journal {
    /// A journal; one that is not `recorded` only counts.
    pub fn new(recorded: bool, clock: Clock) -> Self {
        let started = Instant::now();
        Self { items: Vec::new(), recorded, clock, started, last_flush: None, next_event: 0, next_call: 0 }
    }

    /// Since the run began.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// The time of day.
    pub fn now(&self) -> DateTime<Utc> {
        (self.clock)()
    }

    /// Whether anything is kept.
    pub fn recorded(&self) -> bool {
        self.recorded
    }

    /// Writes an event and returns its number. `fill` is only called when it is kept.
    pub fn event(&mut self, event_type: EventType, step: u32, fill: impl FnOnce(&mut Event)) -> i32 {
        let order = self.next_event;
        self.next_event += 1;
        if self.recorded {
            let mut event = Event::new(event_type, step as i32, order, Some(self.now()));
            fill(&mut event);
            if let Some(measured) = &mut event.measured {
                measured.elapsed_us = Some(self.elapsed().as_micros() as u64);
            }
            self.items.push(TraceItem::Event(event));
        }
        order
    }

    /// Writes a mod call and returns its number.
    pub fn call(&mut self, call: ModCall) -> i32 {
        let index = self.next_call;
        self.next_call += 1;
        if self.recorded {
            self.items.push(TraceItem::ModCall(call));
        }
        index
    }

    /// Writes a log line.
    pub fn log(&mut self, log: ModLog) {
        if self.recorded {
            self.items.push(TraceItem::ModLog(log));
        }
    }

    /// Writes an action.
    pub fn action(&mut self, action: ActionRecord) {
        if self.recorded {
            self.items.push(TraceItem::Action(action));
        }
    }

    /// Takes what has gathered, once it is worth a message: often enough for a live view, seldom enough for the decode loop.
    pub fn take_due(&mut self) -> Option<Vec<TraceItem>> {
        const MANY: usize = 128;
        const LONG: Duration = Duration::from_millis(25);
        let is_long_ago = || self.last_flush.is_none_or(|last| last.elapsed() >= LONG);
        (self.items.len() >= MANY || (!self.items.is_empty() && is_long_ago())).then(|| self.take_all())
    }

    /// Takes everything.
    pub fn take_all(&mut self) -> Vec<TraceItem> {
        self.last_flush = Some(Instant::now());
        std::mem::take(&mut self.items)
    }
}
