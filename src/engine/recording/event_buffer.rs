//! Buffer of a run's trace items before they are sent to the recorder.

use crate::engine::options::Clock;
use crate::events::{ActionRecord, Event, EventType, ModCall, ModLog, TraceItem};
use chrono::{DateTime, Utc};
use std::time::{Duration, Instant};

/// Buffer of the trace items of one run, which it numbers.
pub struct EventBuffer {
    items: Vec<TraceItem>,
    recorded: bool,
    clock: Clock,
    started: Instant,
    /// `None` before the first flush, so that the first items of a run are sent immediately.
    last_flush: Option<Instant>,
    next_event: i32,
    next_call: i32,
    /// In a forked run, the time of the last event that was copied from the recorded run. Times of new events continue
    /// from it.
    copied_time: Duration,
}

impl EventBuffer {
    /// Creates a buffer. If the run is not `recorded`, the buffer only numbers items and drops them.
    pub fn new(recorded: bool, clock: Clock) -> Self {
        let started = Instant::now();
        Self {
            items: Vec::new(),
            recorded,
            clock,
            started,
            last_flush: None,
            next_event: 0,
            next_call: 0,
            copied_time: Duration::ZERO,
        }
    }

    /// Returns the time at which the run was created.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Returns the time of a new event in the run.
    fn elapsed(&self) -> Duration {
        self.copied_time + self.started.elapsed()
    }

    /// Returns the current time of the engine's clock.
    pub fn now(&self) -> DateTime<Utc> {
        (self.clock)()
    }

    /// Returns true if items are recorded.
    pub fn is_recorded(&self) -> bool {
        self.recorded
    }

    /// Adds an event and returns its number. `fill` is only called if items are recorded.
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

    /// Adds a copy of an item of the recorded run that is forked, with its number and its time.
    pub fn copy(&mut self, item: &TraceItem) {
        let mut item = item.clone();
        match &mut item {
            TraceItem::Event(event) => {
                self.next_event = event.sequence_order + 1;
                self.continue_times(event);
                // `measured` has the same content.
                event.details = None;
            }
            TraceItem::ModCall(_) => self.next_call += 1,
            TraceItem::ModLog(_) | TraceItem::Action(_) => {}
            TraceItem::Attention(_) => return,
        }
        if self.recorded {
            self.items.push(item);
        }
    }

    /// Continues the times of events after the time of an event of the recorded run.
    pub fn continue_times(&mut self, event: &Event) {
        let elapsed = event.measured.as_ref().and_then(|measured| measured.elapsed_us);
        self.copied_time = elapsed.map_or(self.copied_time, Duration::from_micros);
    }

    /// Adds a mod call and returns its number. `create` gets the current time, and is only called if items are recorded.
    pub fn call(&mut self, create: impl FnOnce(DateTime<Utc>) -> ModCall) -> i32 {
        let index = self.next_call;
        self.next_call += 1;
        if self.recorded {
            self.items.push(TraceItem::ModCall(create(self.now())));
        }
        index
    }

    /// Adds a log line. `create` gets the current time, and is only called if items are recorded.
    pub fn log(&mut self, create: impl FnOnce(DateTime<Utc>) -> ModLog) {
        if self.recorded {
            self.items.push(TraceItem::ModLog(create(self.now())));
        }
    }

    /// Adds an action.
    pub fn action(&mut self, action: ActionRecord) {
        if self.recorded {
            self.items.push(TraceItem::Action(action));
        }
    }

    /// Takes the items if a flush is due: after 25 ms, which suffices for a live view, or after 128 items.
    pub fn take_due(&mut self) -> Option<Vec<TraceItem>> {
        const FLUSH_ITEMS: usize = 128;
        const FLUSH_INTERVAL: Duration = Duration::from_millis(25);
        let interval_passed = || self.last_flush.is_none_or(|last| last.elapsed() >= FLUSH_INTERVAL);
        (self.items.len() >= FLUSH_ITEMS || (!self.items.is_empty() && interval_passed())).then(|| self.take_all())
    }

    /// Takes all items.
    pub fn take_all(&mut self) -> Vec<TraceItem> {
        self.last_flush = Some(Instant::now());
        std::mem::take(&mut self.items)
    }
}
