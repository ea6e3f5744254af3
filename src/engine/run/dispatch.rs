//! Dispatch of an event to the mods of one run: calls them in order, records their replies, and decides which action
//! wins the event.

use crate::engine::recording::event_buffer::EventBuffer;
use crate::engine::request::shortest_f64;
use crate::engine::run::distribution::TokenDistribution;
use crate::events::{self, EventType, LogLevel, ModCall, ModLog, RawJson};
use crate::model::{Vocabulary, printable};
use crate::mods::{Action, Call, LogitEdit, ModException, ModInstance, ModLogLine, Pending, Reply, ReplySender};
use serde_json::json;
use std::time::{Duration, Instant};

/// Number of consecutive failed calls, per type of event, after which a mod is disabled for its run.
const MAX_CONSECUTIVE_FAILURES: u8 = 5;

/// A mod of one run.
pub struct ActiveMod {
    /// Name of the mod.
    pub name: String,
    /// Hash of its source; the release for a built-in mod.
    pub version: String,
    /// True if plain Noops are recorded; those of built-in mods are not.
    pub records_noop: bool,
    /// State of the mod for this run.
    pub instance: Box<dyn ModInstance>,
    /// Failures of the mod in this run.
    pub health: ModHealth,
}

/// Failures of a mod, and whether it is still called.
#[derive(Debug, Default)]
pub struct ModHealth {
    /// Consecutive failed calls, by type of event.
    failures: [u8; 4],
    /// Reason why the mod is no longer called.
    pub off: Option<String>,
}

impl ModHealth {
    /// Counts the outcome of a call. Returns a message if the mod is disabled by it.
    fn note(&mut self, active: &str, event: EventType, step: u32, failure: Option<&str>) -> Option<&str> {
        let count = &mut self.failures[event as usize];
        let Some(failure) = failure else {
            *count = 0;
            return None;
        };
        *count = count.saturating_add(1);
        if *count < MAX_CONSECUTIVE_FAILURES {
            return None;
        }
        let event = event.as_str();
        self.off = Some(format!(
            "the mod '{active}' is disabled for the rest of this run, at step {step}: {count} consecutive calls for {event} failed; last failure: {failure}"
        ));
        self.off.as_deref()
    }
}

/// Dispatch of one event to the mods in order.
#[derive(Debug)]
pub struct Dispatch {
    /// Type of the event.
    pub event: EventType,
    /// Number of the event.
    pub order: i32,
    /// Step of the event.
    pub step: u32,
    /// Index of the next mod to call.
    next: usize,
    /// Time at which the awaited call was made.
    called_at: Option<Instant>,
    /// First action that changes control.
    pub winner: Option<Action>,
}

impl Dispatch {
    /// Creates the dispatch of an event that no mod has seen yet.
    pub fn new(event: EventType, order: i32, step: u32) -> Self {
        Self { event, order, step, next: 0, called_at: None, winner: None }
    }

    /// Returns the index of the next mod that handles the event.
    pub fn next_mod(&mut self, mods: &[ActiveMod]) -> Option<usize> {
        while let Some(active) = mods.get(self.next) {
            if active.health.off.is_none() && active.instance.handles().contains(self.event) {
                return Some(self.next);
            }
            self.next += 1;
        }
        None
    }

    /// Calls a mod. Returns `None` if its reply will come through `done`.
    pub fn call(&mut self, instance: &mut dyn ModInstance, call: &Call<'_>, done: ReplySender) -> Option<Reply> {
        let begun = Instant::now();
        self.called_at = Some(begun);
        match instance.call(call, done) {
            Ok(mut reply) => {
                if reply.elapsed.is_zero() {
                    reply.elapsed = begun.elapsed();
                }
                Some(reply)
            }
            Err(Pending) => None,
        }
    }

    /// Records a reply and returns its action, for the engine to apply if it edits prompt or logits. `problem` checks
    /// the values of the action and describes what is wrong; an invalid action counts as Noop.
    pub fn record_reply(
        &mut self,
        active: &mut ActiveMod,
        reply: Reply,
        event_buffer: &mut EventBuffer,
        check: impl FnOnce(&Action) -> Option<String>,
    ) -> RecordedReply {
        self.next += 1;
        let elapsed = if reply.elapsed.is_zero() {
            self.called_at.map_or(Duration::ZERO, |at| at.elapsed())
        } else {
            reply.elapsed
        };
        let mut action = reply.action.unwrap_or(Action::Noop);
        let mut exception = reply.exception;
        if exception.is_none() {
            let wrong = if action.permitted_on(self.event) {
                check(&action)
            } else {
                Some(format!("{} is not permitted at {}", action.kind().as_str(), self.event.as_str()))
            };
            exception = wrong.map(|message| ModException { message, traceback: None });
        }
        if exception.is_some() {
            action = Action::Noop;
        }
        let failure = exception.as_ref().map(|exception| exception.message.as_str());
        let switched_off = active.health.note(&active.name, self.event, self.step, failure).map(|message| {
            tracing::warn!(mod.name = active.name, "{message}");
            ModLogLine { level: LogLevel::Error, message: message.to_owned() }
        });
        let (failed, message, traceback) = match exception {
            Some(exception) => (true, Some(exception.message), exception.traceback),
            None => (false, None, None),
        };
        let call_index = event_buffer.call(ModCall {
            event_sequence_order: self.order,
            mod_name: active.name.clone(),
            event_type: self.event,
            step: self.step as i32,
            created_at: Some(event_buffer.now()),
            execution_time_ms: Some(elapsed.as_secs_f64() * 1000.0),
            exception_occurred: failed,
            exception_message: message,
            exception_traceback: traceback,
        });
        for log in reply.logs.into_iter().chain(switched_off) {
            event_buffer.log(ModLog {
                mod_call_sequence: call_index,
                mod_name: active.name.clone(),
                log_message: log.message,
                log_level: log.level,
                created_at: Some(event_buffer.now()),
            });
        }
        let superseded = action.is_control() && self.winner.is_some();
        RecordedReply { call_index, superseded, action }
    }
}

/// A recorded reply, whose action is not recorded yet.
pub struct RecordedReply {
    /// Number of the call.
    pub call_index: i32,
    /// True if an earlier mod's action has won the event.
    pub superseded: bool,
    /// Action of the mod.
    pub action: Action,
}

/// Effect of an action, as computed by the engine.
#[derive(Debug, Default)]
pub struct ActionEffect {
    /// Backtrack: number of tokens actually removed from the sequence.
    pub removed: Option<u32>,
    /// Backtrack: true if the mod requested more.
    pub clamped: bool,
    /// `AdjustedLogits`: the largest changes of probability, as `(token, before, after)`.
    pub shifted: Vec<(i32, f32, f32)>,
    /// `AdjustedLogits`: distribution after the edit, if it was computed.
    pub edited: Option<TokenDistribution>,
}

/// Records an action.
pub fn record_action(
    recorded: &RecordedReply,
    active: &ActiveMod,
    vocabulary: &Vocabulary,
    effect: &ActionEffect,
    event_buffer: &mut EventBuffer,
) {
    let action = &recorded.action;
    if !event_buffer.is_recorded() || (matches!(action, Action::Noop) && !active.records_noop) {
        return;
    }
    let mut record = events::ActionRecord::new(recorded.call_index, action.kind(), Some(event_buffer.now()));
    let mut details = serde_json::Map::new();
    details.insert("version".into(), json!(active.version));
    if recorded.superseded {
        details.insert("superseded".into(), json!(true));
    }
    let mut put_tokens = |tokens: &[i32]| {
        if !tokens.is_empty() {
            details.insert("tokens".into(), json!(tokens));
            details.insert("texts".into(), json!(vocabulary.texts(tokens)));
        }
    };
    match action {
        Action::Noop => {}
        Action::AdjustedPrefill { tokens, max_steps } => {
            put_tokens(tokens);
            record.new_prompt = Some(printable(vocabulary.decode(tokens)));
            record.new_length = Some(tokens.len() as i32);
            record.adjusted_max_steps = max_steps.map(saturating_i32);
        }
        Action::AdjustedLogits { edit, temperature } => {
            record.logits_shape = Some(format!("[1, {}]", vocabulary.len()));
            record.temperature = temperature.map(shortest_f64);
            let kind = match edit {
                LogitEdit::Keep => "keep",
                LogitEdit::Set(_) => "set",
                LogitEdit::Add(_) => "add",
                LogitEdit::Allow(_) => "allow",
                LogitEdit::Replace(_) => "replace",
            };
            details.insert("edit".into(), json!(kind));
            let shifted: Vec<_> = effect
                .shifted
                .iter()
                .map(|&(token, before, after)| {
                    json!({ "token": token, "text": vocabulary.decode(&[token]), "before": before, "after": after })
                })
                .collect();
            details.insert("moved".into(), json!(shifted));
        }
        Action::ForceTokens(tokens) | Action::ForceOutput(tokens) => {
            put_tokens(tokens);
            record.token_count = Some(tokens.len() as i32);
            record.tokens_preview = Some(printable(vocabulary.decode(&tokens[..tokens.len().min(10)])));
        }
        Action::Backtrack { n, tokens } => {
            put_tokens(tokens);
            record.backtrack_steps = Some(saturating_i32(*n));
            record.backtrack_token_count = Some(tokens.len() as i32);
            if let Some(removed) = effect.removed {
                details.insert("removed".into(), json!(removed));
            }
            if effect.clamped {
                details.insert("clamped".into(), json!(true));
            }
        }
        Action::ToolCalls(payload) => {
            record.has_tool_calls = Some(true);
            record.tool_calls = to_raw_json(payload);
        }
        Action::EmitError { message, .. } => record.error_message = Some(message.clone()),
    }
    record.details = to_raw_json(&serde_json::Value::Object(details));
    event_buffer.action(record);
}

/// Converts a number chosen by a mod to the trace's type; saturates at the maximum.
fn saturating_i32(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn to_raw_json(value: &serde_json::Value) -> Option<RawJson> {
    serde_json::value::to_raw_value(value).ok()
}
