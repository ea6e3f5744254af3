//! Items to token instances.
//!
//! Every token that ever entered the sequence is one [`Row`]. Rows are never removed: a token that a mod took back
//! keeps its row and gets the event at which it died. The state after any event is then a filter over the rows, which
//! is what replay, live view and statistics are made of. `ui/assets/replay/fold.js` is the same fold in the browser; the
//! fixtures in `fixtures/folds` hold both to it.

mod action;
mod step;

use crate::events::{Event, EventType, Eviction, Item, ModCall, ModLog, TokenId};
use serde::{Deserialize, Serialize};
use step::Step;

/// `Row::died` of a token that stands at the end of the run.
pub const NEVER: u32 = u32::MAX;

/// Bits of [`Row::flags`].
pub mod flags {
    /// Part of the prompt.
    pub const PROMPT: u8 = 1;
    /// Appended by a mod.
    pub const FORCED: u8 = 2;
    /// Ends the generation: an end-of-generation token, or the token that completed a stop string.
    pub const STOP: u8 = 4;
    /// A special or control token.
    pub const SPECIAL: u8 = 8;
    /// A mod's action concerned it: edited its logits, forced it, or took it back.
    pub const TOUCHED: u8 = 16;
    /// A mod raised at one of its events, or ended the run there with an error.
    pub const ERROR: u8 = 32;
    /// Drawn by the sampler.
    pub const SAMPLED: u8 = 64;
}

/// One token instance. Visible after event `n` ⇔ `born <= n < died`.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Vocabulary id; -1 where a foreign trace does not say.
    pub token: i32,
    /// Its text; "" for an incomplete piece of UTF-8 whose bytes join a later token.
    pub text: String,
    /// Index in the sequence while it is there.
    pub pos: u32,
    /// `sequence_order` of the event since which it is there.
    pub born: u32,
    /// First event at which it is gone; [`NEVER`].
    pub died: u32,
    /// Natural logarithm of its probability in the model's full distribution.
    pub logprob: Option<f32>,
    /// 1 for the model's most probable token.
    pub rank: Option<u32>,
    /// Entropy of the distribution it stood in, in bits.
    pub entropy: Option<f32>,
    /// See [`flags`].
    pub flags: u8,
    /// Milliseconds since the token before it, saturating.
    pub dt_ms: u16,
}

/// Something on the time line that is not a token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The event.
    pub seq: u32,
    /// What it is.
    pub kind: MarkKind,
    /// The mod.
    pub mod_name: String,
    /// What to write next to it, e.g. `Backtrack 3`.
    pub label: String,
    /// Index of the mod call.
    pub call_index: u32,
}

/// What a [`Mark`] marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MarkKind {
    /// An action other than `Noop`.
    Action,
    /// A mod raised.
    Error,
    /// A log line.
    Log,
}

/// Counts that a run list shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Counters {
    /// Tokens of the prompt, as it stands.
    pub prompt_tokens: u32,
    /// Generated tokens that stand.
    pub tokens_out: u32,
    /// Generated tokens that a `Backtrack` removed.
    pub backtracked: u32,
    /// Tokens that mods appended, whether they stand or not.
    pub forced: u32,
    /// Calls that raised, and `EmitError` actions.
    pub errors: u32,
    /// Actions other than `Noop`.
    pub actions: u32,
}

/// An event as the time line needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventPoint {
    /// 0 `Prefilled`, 1 `ForwardPass`, 2 `Sampled`, 3 `Added`.
    pub kind: u8,
    /// Its step.
    pub step: u32,
    /// Milliseconds since the run's first event; 0 if unknown.
    pub time_ms: u32,
}

/// Most rows that a fold invents for tokens which a foreign trace only counts. A few bytes may claim billions.
const MOST_INVENTED: u32 = 65_536;
/// Longest label and name of a mark, and longest text that one draw gives to several tokens, in characters. A few bytes of a
/// foreign trace may repeat each of them as often as they like.
const MOST_LABEL: usize = 80;

/// The fold: feed it the items of a run in order. Each costs O(1), amortised over the rows it makes or ends.
#[derive(Debug, Clone, Default)]
pub struct Fold {
    rows: Vec<Row>,
    marks: Vec<Mark>,
    events: Vec<EventPoint>,
    counters: Counters,
    /// Indexes of the rows that stand, in order of position.
    alive: Vec<u32>,
    /// How many of `alive` are the prompt.
    prompt_rows: usize,
    /// Length of a prompt that is known only by its length.
    base: u32,
    /// What the newest step has shown so far.
    step: Step,
    /// Where the rows of the newest `Added` begin.
    added_from: usize,
    /// The type of the newest event.
    newest: Option<EventType>,
    /// Mod calls so far.
    calls: u32,
    /// The mod of the newest call.
    caller: String,
    /// `created_at` of the first event, in milliseconds.
    began_ms: Option<i64>,
    /// When the newest token came, in microseconds.
    token_us: Option<u64>,
    invented: u32,
}

impl Fold {
    /// Nothing has happened yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next item.
    pub fn apply(&mut self, item: &Item) {
        match item {
            Item::Event(event) => self.event(event),
            Item::ModCall(call) => self.call(call),
            Item::ModLog(log) => self.log(log),
            Item::Action(action) => self.action(action),
            Item::Attention(_) => {}
        }
    }

    /// All token instances in birth order.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Actions, exceptions and log lines in order.
    #[must_use]
    pub fn marks(&self) -> &[Mark] {
        &self.marks
    }

    /// All events in order; index = `sequence_order`.
    #[must_use]
    pub fn events(&self) -> &[EventPoint] {
        &self.events
    }

    /// Number of events. `n` = this number is the state at the end, after the actions of the last event.
    #[must_use]
    pub fn event_count(&self) -> u32 {
        self.events.len() as u32
    }

    /// Counts so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let ended = self.alive.last().is_some_and(|&row| self.rows[row as usize].ends_generation());
        Counters {
            prompt_tokens: self.base + self.prompt_rows as u32,
            tokens_out: (self.alive.len() - self.prompt_rows) as u32 - u32::from(ended),
            ..self.counters
        }
    }

    /// The generated tokens that stand, in order of position.
    pub fn answer(&self) -> impl Iterator<Item = &Row> {
        self.alive[self.prompt_rows..].iter().map(|&row| &self.rows[row as usize])
    }

    /// Text of the generated tokens that stand, without an end-of-generation token.
    #[must_use]
    pub fn answer_text(&self) -> String {
        self.answer().filter(|row| !row.ends_generation()).map(|row| row.text.as_str()).collect()
    }

    fn event(&mut self, event: &Event) {
        let seq = self.event_count();
        let time_us = self.time_us(event);
        self.events.push(EventPoint {
            kind: event.event_type as u8,
            step: event.step.max(0) as u32,
            time_ms: time_us.map_or(0, |us| u32::try_from(us / 1000).unwrap_or(u32::MAX)),
        });
        self.newest = Some(event.event_type);
        if let Some(eviction) = event.measured.as_ref().and_then(|measured| measured.evicted.as_ref()) {
            self.evicted(eviction);
        }
        match event.event_type {
            EventType::Prefilled => {
                self.step = Step::default();
                self.token_us = time_us;
                self.prefilled(event, seq);
            }
            EventType::ForwardPass => self.step = Step::begin(event),
            EventType::Sampled => self.step.sampled(event),
            EventType::Added => {
                let dt_us = time_us.zip(self.token_us).map_or(0, |(now, before)| now.saturating_sub(before));
                self.token_us = time_us.or(self.token_us);
                self.added(event, seq, u16::try_from(dt_us / 1000).unwrap_or(u16::MAX));
            }
        }
    }

    /// Microseconds since the run began.
    fn time_us(&mut self, event: &Event) -> Option<u64> {
        let wall_ms = event.created_at.map(|time| time.timestamp_millis());
        self.began_ms = self.began_ms.or(wall_ms);
        let measured = event.measured.as_ref().and_then(|measured| measured.elapsed_us);
        measured.or_else(|| Some(1000 * (wall_ms? - self.began_ms?).max(0) as u64))
    }

    fn prefilled(&mut self, event: &Event, seq: u32) {
        if let Some(prompt) = event.measured.as_ref().and_then(|measured| measured.prompt.as_ref()) {
            self.replace_prompt(&prompt.tokens, &prompt.texts, seq, 0);
        } else {
            self.replace_prompt(&[], &[], seq, 0);
            self.base = event.prompt_length.unwrap_or(0).max(0) as u32;
        }
    }

    fn added(&mut self, event: &Event, seq: u32, dt_ms: u16) {
        self.added_from = self.rows.len();
        let forced = event.forced == Some(true);
        let measured = event.measured.as_ref();
        let measures = measured.map_or(&[][..], |measured| &measured.tokens);
        let drawn = self.step.drawn(event.step);
        let drawn_text = drawn.as_ref().and_then(|drawn| drawn.text.as_deref());
        let shared = drawn_text.is_some_and(|text| text.chars().nth(MOST_LABEL).is_none());
        let invented: Vec<TokenId>;
        let tokens = match &event.added_tokens {
            Some(tokens) => tokens,
            None if !measures.is_empty() => {
                invented = measures.iter().map(|measure| measure.token).collect();
                &invented
            }
            None => {
                let token = drawn.as_ref().and_then(|drawn| drawn.token).unwrap_or(-1);
                let count = event.added_token_count.unwrap_or_else(|| i32::from(drawn.is_some()));
                invented = vec![token; self.invent(count.max(0) as u32).unwrap_or(0) as usize];
                &invented
            }
        };
        let origin = if forced { flags::FORCED | flags::TOUCHED } else { flags::SAMPLED };
        let pending = std::mem::take(&mut self.step.pending);
        for (index, &token) in tokens.iter().enumerate() {
            let drawn = drawn.as_ref().filter(|drawn| drawn.token.is_none_or(|drawn| drawn == token));
            let measure = measures.get(index).filter(|measure| measure.token == token);
            let text = match (measure, drawn.and(drawn_text)) {
                (Some(measure), _) => measure.text.clone(),
                (None, Some(text)) if shared || index == 0 => text.to_owned(),
                (None, _) => nameless(token),
            };
            let known = drawn.filter(|_| !forced);
            let row = Row {
                token,
                pos: 0,
                born: seq,
                died: NEVER,
                logprob: measure.and_then(|m| m.logprob).or_else(|| known.and_then(|drawn| drawn.logprob)),
                rank: measure.and_then(|m| m.rank).or_else(|| known.and_then(|drawn| drawn.rank)),
                entropy: measure.and_then(|m| m.entropy).or_else(|| known.and_then(|drawn| drawn.entropy)),
                flags: origin | pending | special(&text),
                dt_ms: if index == 0 { dt_ms } else { 0 },
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
    }

    fn append(&mut self, row: Row) {
        let pos = self.base.saturating_add(self.alive.len() as u32);
        self.alive.push(self.rows.len() as u32);
        self.rows.push(Row { pos, ..row });
    }

    /// Ends the last `count` rows that stand; they are gone from event `seq` on.
    fn end_rows(&mut self, count: usize, seq: u32) {
        for row in self.alive.drain(self.alive.len() - count..) {
            let row = &mut self.rows[row as usize];
            row.died = seq;
            row.flags |= flags::TOUCHED;
        }
    }

    /// Ends everything that stands and begins a new sequence with these tokens.
    fn replace_prompt(&mut self, tokens: &[TokenId], texts: &[String], seq: u32, extra: u8) {
        self.end_rows(self.alive.len(), seq);
        self.base = 0;
        for (index, &token) in tokens.iter().enumerate() {
            let text = texts.get(index).cloned().unwrap_or_else(|| nameless(token));
            self.append(Row {
                token,
                pos: 0,
                born: seq,
                died: NEVER,
                logprob: None,
                rank: None,
                entropy: None,
                flags: flags::PROMPT | extra | special(&text),
                dt_ms: 0,
                text,
            });
        }
        self.prompt_rows = tokens.len();
    }

    /// Takes `count` rows out of the allowance for invented ones, if it lasts.
    fn invent(&mut self, count: u32) -> Option<u32> {
        let total = self.invented.saturating_add(count);
        (total <= MOST_INVENTED).then(|| {
            self.invented = total;
            count
        })
    }

    fn call(&mut self, call: &ModCall) {
        self.calls += 1;
        self.caller.clone_from(&call.mod_name);
        if !call.exception_occurred {
            return;
        }
        self.counters.errors += 1;
        let message = call.exception_message.as_deref().unwrap_or("exception");
        self.mark(MarkKind::Error, message, self.calls - 1);
        match self.newest {
            Some(EventType::ForwardPass | EventType::Sampled) => self.step.pending |= flags::ERROR,
            Some(EventType::Added) => {
                self.rows[self.added_from..].iter_mut().for_each(|row| row.flags |= flags::ERROR);
            }
            Some(EventType::Prefilled) | None => {}
        }
    }

    fn log(&mut self, log: &ModLog) {
        self.mark(MarkKind::Log, &log.log_message, log.mod_call_sequence as u32);
    }

    /// What went because the context was full. The rows stay where they were: they are what was read and said.
    fn evicted(&mut self, eviction: &Eviction) {
        let tokens: u64 = eviction.ranges.iter().map(|&(start, end)| u64::from(end.saturating_sub(start))).sum();
        let roles: Vec<&str> = eviction.messages.iter().map(|message| message.role.as_str()).collect();
        let who = if roles.is_empty() { String::new() } else { format!(" ({})", roles.join(", ")) };
        let label = format!("context full: {tokens} tokens dropped{who}");
        self.mark_by("engine", MarkKind::Log, &label, self.calls);
    }

    fn mark(&mut self, kind: MarkKind, label: &str, call_index: u32) {
        let caller = std::mem::take(&mut self.caller);
        self.mark_by(&caller, kind, label, call_index);
        self.caller = caller;
    }

    fn mark_by(&mut self, mod_name: &str, kind: MarkKind, label: &str, call_index: u32) {
        let short = |text: &str| text.chars().take(MOST_LABEL).collect();
        let seq = self.event_count().saturating_sub(1);
        self.marks.push(Mark { seq, kind, mod_name: short(mod_name), label: short(label), call_index });
    }
}

impl Row {
    /// Whether it is an end-of-generation token, which is no part of the answer's text.
    fn ends_generation(&self) -> bool {
        self.flags & (flags::STOP | flags::SPECIAL) == flags::STOP | flags::SPECIAL
    }
}

/// The text of a token that is known only by its id, or not even by that.
fn nameless(token: TokenId) -> String {
    if token < 0 { "⟨?⟩".to_owned() } else { format!("⟨{token}⟩") }
}

/// [`flags::SPECIAL`] for the spellings that vocabularies give to control tokens.
fn special(text: &str) -> u8 {
    const NAMES: [&str; 12] = [
        "<s>",
        "</s>",
        "<bos>",
        "<eos>",
        "<pad>",
        "<unk>",
        "<mask>",
        "<start_of_turn>",
        "<end_of_turn>",
        "[INST]",
        "[/INST]",
        "<|>",
    ];
    let bars = text.starts_with("<|") && text.ends_with("|>");
    let wide_bars = text.starts_with("<｜") && text.ends_with("｜>");
    if bars || wide_bars || NAMES.contains(&text) { flags::SPECIAL } else { 0 }
}

#[cfg(test)]
mod tests;
