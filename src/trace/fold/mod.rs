//! The fold from trace items to token instances.
//!
//! Every token that ever entered the sequence is one [`TokenRow`]. Rows are never deleted: a backtracked token keeps
//! its row and the event that removed it. So the state after any event is a filter over the rows. Replay, live view and
//! statistics all use it. `src/ui/assets/replay/fold.js` implements the same fold in the browser; the fixtures in
//! `fixtures/folds` test both.

mod action;
mod quote;
mod row;
mod step;

use crate::events::{Event, EventType, Eviction, ModCall, ModLog, TokenId, TraceItem};
pub use row::{Counters, EventPoint, Mark, MarkKind, NEVER, TokenRow, client_text, flags};
use row::{placeholder_text, special_flag};
use std::collections::HashMap;
use std::sync::Arc;
use step::StepState;

/// Maximum number of placeholder rows for tokens that a trace of another engine counts but does not list. A few bytes
/// may claim billions of tokens.
const MAX_PLACEHOLDER_ROWS: u32 = 65_536;
/// Maximum characters of a mark's label and name, and of a text that several tokens share. A small trace of another engine
/// may repeat each of them without limit.
const MAX_LABEL_CHARS: usize = 80;

/// The fold over the items of a run. The time for an item is proportional to the rows that it creates, ends or flags.
#[derive(Debug, Clone, Default)]
pub struct Fold {
    rows: Vec<TokenRow>,
    marks: Vec<Mark>,
    events: Vec<EventPoint>,
    counters: Counters,
    /// Indexes of the visible rows, in order of position.
    alive: Vec<u32>,
    /// Number of prompt rows in `alive`.
    prompt_rows: usize,
    /// Length of the prompt if its tokens are unknown.
    base: u32,
    /// State of the newest step.
    step: StepState,
    /// Index of the first row of the newest `Added`.
    added_from: usize,
    /// Index of the first row since the newest `Added` that no exception has flagged.
    unflagged_from: usize,
    /// Type of the newest event.
    newest: Option<EventType>,
    /// Number of mod calls so far.
    calls: u32,
    /// Mod of the newest call.
    caller: String,
    /// Event type of the newest call. In Quote's traces it may differ from the type of the event that the call refers
    /// to.
    call_event_type: Option<EventType>,
    /// True if the newest event is an `Added` and further tokens come from Quote's queue; see [`quote`].
    queued: bool,
    /// Texts of tokens that actions mention.
    texts: HashMap<TokenId, Arc<str>>,
    /// The newest row, if only its text suggests that it ends the generation.
    assumed_end: Option<usize>,
    /// `created_at` of the first event, in milliseconds.
    started_ms: Option<i64>,
    /// Time of the newest token, in microseconds.
    token_us: Option<u64>,
    placeholder_rows: u32,
    /// See [`Fold::set_has_specified_actions`].
    has_specified_actions: bool,
}

impl Fold {
    /// Creates an empty fold.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets whether the actions have the fields of the `/ingest` specification. Then the names of Quote's fields in their
    /// `details` have no meaning; see `quote.rs`.
    pub fn set_has_specified_actions(&mut self, has_specified_actions: bool) {
        self.has_specified_actions = has_specified_actions;
    }

    /// Applies the next item.
    pub fn apply(&mut self, item: &TraceItem) {
        match item {
            TraceItem::Event(event) => self.apply_event(event),
            TraceItem::ModCall(call) => self.apply_call(call),
            TraceItem::ModLog(log) => self.apply_log(log),
            TraceItem::Action(action) => self.apply_action(action),
            TraceItem::Attention(_) => {}
        }
    }

    /// Returns all token instances in the order of their creation.
    #[must_use]
    pub fn rows(&self) -> &[TokenRow] {
        &self.rows
    }

    /// Returns actions, exceptions, log lines and evictions in order.
    #[must_use]
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// Returns all events in order; the index is the `sequence_order`.
    #[must_use]
    pub fn events(&self) -> &[EventPoint] {
        &self.events
    }

    /// Returns the number of events. It is also the index of the final state, which includes the actions of the last
    /// event.
    #[must_use]
    pub fn event_count(&self) -> u32 {
        self.events.len() as u32
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let ended = self.alive.last().is_some_and(|&row| self.rows[row as usize].ends_generation());
        Counters {
            prompt_tokens: self.base + self.prompt_rows as u32,
            tokens_out: (self.alive.len() - self.prompt_rows) as u32 - u32::from(ended),
            ..self.counters
        }
    }

    /// Returns the visible generated tokens in order of position.
    pub fn answer(&self) -> impl Iterator<Item = &TokenRow> {
        self.alive[self.prompt_rows..].iter().map(|&row| &self.rows[row as usize])
    }

    /// Returns the text of the visible generated tokens, without an end-of-generation token.
    #[must_use]
    pub fn answer_text(&self) -> String {
        self.answer().filter(|row| !row.ends_generation()).map(|row| &*row.text).collect()
    }

    fn apply_event(&mut self, event: &Event) {
        let seq = self.event_count();
        let time_us = self.time_us(event);
        self.events.push(EventPoint {
            kind: event.event_type as u8,
            step: event.step.max(0) as u32,
            time_ms: time_us.map_or(0, |us| u32::try_from(us / 1000).unwrap_or(u32::MAX)),
        });
        self.newest = Some(event.event_type);
        self.queued = event.event_type == EventType::Added && event.forced == Some(true);
        if let Some(eviction) = event.measured.as_ref().and_then(|measured| measured.evicted.as_ref()) {
            self.apply_eviction(eviction, event.event_type);
        }
        match event.event_type {
            EventType::Prefilled => {
                self.step = StepState::default();
                self.token_us = time_us;
                self.apply_prefilled(event, seq);
            }
            EventType::ForwardPass => self.step = StepState::from_forward_pass(event),
            EventType::Sampled => self.step.record_sampled(event),
            EventType::Added => {
                let dt_us = time_us.zip(self.token_us).map_or(0, |(now, before)| now.saturating_sub(before));
                self.token_us = time_us.or(self.token_us);
                self.apply_added(event, seq, u32::try_from(dt_us).unwrap_or(u32::MAX));
            }
        }
    }

    /// Returns the microseconds since the start of the run.
    fn time_us(&mut self, event: &Event) -> Option<u64> {
        let wall_ms = event.created_at.map(|time| time.timestamp_millis());
        self.started_ms = self.started_ms.or(wall_ms);
        let measured = event.measured.as_ref().and_then(|measured| measured.elapsed_us);
        measured.or_else(|| Some(1000 * (wall_ms? - self.started_ms?).max(0) as u64))
    }

    fn apply_prefilled(&mut self, event: &Event, seq: u32) {
        let prompt = event.measured.as_ref().and_then(|measured| measured.prompt.as_ref());
        // `details` of another engine may have a prompt without tokens.
        if let Some(prompt) = prompt.filter(|prompt| !prompt.tokens.is_empty()) {
            self.replace_prompt(&prompt.tokens, &prompt.texts, seq, 0);
        } else {
            self.replace_prompt(&[], &[], seq, 0);
            self.base = event.prompt_length.unwrap_or(0).max(0) as u32;
        }
    }

    fn apply_added(&mut self, event: &Event, seq: u32, dt_us: u32) {
        self.added_from = self.rows.len();
        self.unflagged_from = self.added_from;
        let forced = event.forced == Some(true);
        let measured = event.measured.as_ref();
        let discarded = measured.map_or(0, |measured| measured.discarded as usize);
        // As after an action, from the next event on.
        self.end_rows(discarded.min(self.alive.len() - self.prompt_rows), seq + 1);
        let measures = measured.map_or(&[][..], |measured| &measured.tokens);
        let assumed_tokens: Vec<TokenId>;
        let tokens = match quote::listed_tokens(event) {
            Some(tokens) => tokens,
            None if !measures.is_empty() => {
                assumed_tokens = measures.iter().map(|measure| measure.token).collect();
                &assumed_tokens
            }
            None => {
                let drawn = self.step.drawn(event.step);
                let token = drawn.as_ref().and_then(|drawn| drawn.token).unwrap_or(-1);
                let count = event.added_token_count.unwrap_or_else(|| i32::from(drawn.is_some()));
                assumed_tokens = vec![token; self.reserve_placeholders(count.max(0) as u32).unwrap_or(0) as usize];
                &assumed_tokens
            }
        };
        let origin = if forced { flags::FORCED | flags::TOUCHED } else { flags::SAMPLED };
        let pending = std::mem::take(&mut self.step.pending);
        for (index, &token) in tokens.iter().enumerate() {
            let drawn = self.step.drawn(event.step);
            let mut drawn = drawn.filter(|drawn| drawn.token.is_none_or(|drawn| drawn == token));
            let measure = measures.get(index).filter(|measure| measure.token == token);
            let text = match measure {
                Some(measure) => measure.text.as_str().into(),
                None => drawn
                    .as_mut()
                    .and_then(|drawn| drawn.take_text())
                    .or_else(|| self.texts.get(&token).cloned())
                    .unwrap_or_else(|| placeholder_text(token)),
            };
            let known = drawn.as_ref().filter(|_| !forced);
            let row = TokenRow {
                token,
                pos: 0,
                added_at: seq,
                removed_at: NEVER,
                logprob: measure.and_then(|m| m.logprob).or_else(|| known.and_then(|drawn| drawn.logprob)),
                rank: measure.and_then(|m| m.rank).or_else(|| known.and_then(|drawn| drawn.rank)),
                entropy: measure.and_then(|m| m.entropy).or_else(|| known.and_then(|drawn| drawn.entropy)),
                flags: origin | pending | special_flag(&text),
                dt_us: if index == 0 { dt_us } else { 0 },
                text,
            };
            self.append(row);
        }
        self.counters.forced += if forced { tokens.len() as u32 } else { 0 };
        if let (Some(measured), Some(row)) = (measured, self.rows[self.added_from..].last_mut()) {
            row.flags |= match (measured.ends_generation, &measured.stopped_by) {
                (true, _) => flags::STOP | flags::SPECIAL,
                (false, Some(_)) => flags::STOP,
                (false, None) => 0,
            };
        }
        if measures.is_empty() && !tokens.is_empty() {
            self.assume_end();
        }
    }

    /// Assumes that a special token ends the generation while it is the newest token. Traces of other engines do not
    /// mark the token that ends the generation.
    fn assume_end(&mut self) {
        let newest = self.rows.len().checked_sub(1);
        if let Some(row) =
            newest.filter(|&row| self.rows[row].flags & (flags::SPECIAL | flags::PROMPT) == flags::SPECIAL)
        {
            self.rows[row].flags |= flags::STOP;
            self.assumed_end = Some(row);
        }
    }

    fn append(&mut self, row: TokenRow) {
        if let Some(row) = self.assumed_end.take() {
            self.rows[row].flags &= !flags::STOP;
        }
        let pos = self.base.saturating_add(self.alive.len() as u32);
        self.alive.push(self.rows.len() as u32);
        self.rows.push(TokenRow { pos, ..row });
    }

    /// Ends the last `count` visible rows: they are invisible after event `seq` and later.
    fn end_rows(&mut self, count: usize, seq: u32) {
        for row in self.alive.drain(self.alive.len() - count..) {
            let row = &mut self.rows[row as usize];
            row.removed_at = seq;
            row.flags |= flags::TOUCHED;
        }
    }

    /// Ends all visible rows and starts a new sequence with these tokens.
    fn replace_prompt(&mut self, tokens: &[TokenId], texts: &[String], seq: u32, extra: u8) {
        self.end_rows(self.alive.len(), seq);
        self.base = 0;
        for (index, &token) in tokens.iter().enumerate() {
            let text = texts.get(index).map_or_else(|| placeholder_text(token), |text| text.as_str().into());
            self.append(TokenRow {
                token,
                pos: 0,
                added_at: seq,
                removed_at: NEVER,
                logprob: None,
                rank: None,
                entropy: None,
                flags: flags::PROMPT | extra | special_flag(&text),
                dt_us: 0,
                text,
            });
        }
        self.prompt_rows = tokens.len();
    }

    /// Reserves `count` placeholder rows if the limit permits.
    fn reserve_placeholders(&mut self, count: u32) -> Option<u32> {
        let total = self.placeholder_rows.saturating_add(count);
        (total <= MAX_PLACEHOLDER_ROWS).then(|| {
            self.placeholder_rows = total;
            count
        })
    }

    fn apply_call(&mut self, call: &ModCall) {
        self.calls += 1;
        self.call_event_type = Some(call.event_type);
        self.caller.clone_from(&call.mod_name);
        if !call.exception_occurred {
            return;
        }
        self.counters.errors += 1;
        let message = call.exception_message.as_deref().unwrap_or("exception");
        self.push_mark(MarkKind::Error, message, self.calls - 1);
        match self.newest {
            Some(EventType::ForwardPass | EventType::Sampled) => self.step.pending |= flags::ERROR,
            Some(EventType::Added) => {
                // Once per row, because any number of calls may fail at an event.
                self.rows[self.unflagged_from..].iter_mut().for_each(|row| row.flags |= flags::ERROR);
                self.unflagged_from = self.rows.len();
            }
            Some(EventType::Prefilled) | None => {}
        }
    }

    fn apply_log(&mut self, log: &ModLog) {
        self.push_mark(MarkKind::Log, &log.log_message, log.mod_call_sequence as u32);
    }

    /// Records an eviction. The rows stay visible, because they are part of the prompt and the answer. The prompt of a
    /// `Prefilled` event is already without the evicted tokens.
    fn apply_eviction(&mut self, eviction: &Eviction, event_type: EventType) {
        let tokens: u64 = eviction.ranges.iter().map(|&(start, end)| u64::from(end.saturating_sub(start))).sum();
        let roles: Vec<&str> = eviction.messages.iter().map(|message| message.role.as_str()).collect();
        let roles = if roles.is_empty() { String::new() } else { format!(" ({})", roles.join(", ")) };
        let label = format!("context full: {tokens} tokens dropped{roles}");
        self.push_mark_for("engine", MarkKind::Log, &label, self.calls);
        if let Some(mark) = self.marks.last_mut().filter(|_| event_type != EventType::Prefilled) {
            mark.evicted.clone_from(&eviction.ranges);
        }
    }

    fn push_mark(&mut self, kind: MarkKind, label: &str, call_index: u32) {
        let caller = std::mem::take(&mut self.caller);
        self.push_mark_for(&caller, kind, label, call_index);
        self.caller = caller;
    }

    fn push_mark_for(&mut self, mod_name: &str, kind: MarkKind, label: &str, call_index: u32) {
        let short = |text: &str| text.chars().take(MAX_LABEL_CHARS).collect();
        let seq = self.event_count().saturating_sub(1);
        let (mod_name, label) = (short(mod_name), short(label));
        self.marks.push(Mark { seq, kind, mod_name, label, call_index, evicted: Vec::new() });
    }
}

#[cfg(test)]
mod tests;
