//! The mods of one run: calls them in order, records what they say, and settles which action wins an event.

use super::journal::Journal;
use super::measure::Distribution;
use crate::events::{self, EventType, LogLevel, ModCall, ModLog, RawJson};
use crate::model::{Vocabulary, printable};
use crate::mods::{Action, Call, LogitEdit, ModException, ModInstance, ModLogLine, Pending, Reply, ReplySender};
use serde_json::json;
use std::time::{Duration, Instant};

/// A mod whose calls for one kind of event fail so often in a row is switched off for its run.
const MOST_FAILURES: u8 = 5;

/// A mod of the run.
pub(super) struct ActiveMod {
    /// Its name.
    pub name: String,
    /// Hash of its source, or the release.
    pub version: String,
    /// Whether its plain Noops are worth recording: a built-in's are not.
    pub records_noop: bool,
    /// Its part in this run.
    pub session: Box<dyn ModInstance>,
    /// How it fares.
    pub health: Health,
}

/// Whether a mod is still called.
#[derive(Debug, Default)]
pub(super) struct Health {
    /// Failed calls in a row, for each type of event.
    failures: [u8; 4],
    /// Why it is called no more.
    pub off: Option<String>,
}

impl Health {
    /// Notes how a call went. A message when that was one failure too many.
    fn note(&mut self, active: &str, event: EventType, step: u32, failure: Option<&str>) -> Option<&str> {
        let count = &mut self.failures[event as usize];
        let Some(failure) = failure else {
            *count = 0;
            return None;
        };
        *count = count.saturating_add(1);
        if *count < MOST_FAILURES {
            return None;
        }
        let event = event.as_str();
        self.off = Some(format!(
            "the mod '{active}' is switched off for the rest of this run, at step {step}: {count} calls for {event} failed in a row, the last with: {failure}"
        ));
        self.off.as_deref()
    }
}

/// How far an event has got through the mods.
#[derive(Debug)]
pub(super) struct Passage {
    /// The event.
    pub event: EventType,
    /// Its number.
    pub order: i32,
    /// Its step.
    pub step: u32,
    /// The next mod to call.
    next: usize,
    /// When the mod whose answer is awaited was called.
    called_at: Option<Instant>,
    /// The first action that changes control.
    pub winner: Option<Action>,
}

impl Passage {
    /// An event that no mod has seen yet.
    pub fn new(event: EventType, order: i32, step: u32) -> Self {
        Self { event, order, step, next: 0, called_at: None, winner: None }
    }

    /// The mod that is next to see the event.
    pub fn next_mod(&mut self, mods: &[ActiveMod]) -> Option<usize> {
        while let Some(active) = mods.get(self.next) {
            if active.health.off.is_none() && active.session.handles().contains(self.event) {
                return Some(self.next);
            }
            self.next += 1;
        }
        None
    }

    /// Calls the mod; `None` says that its answer will come through `done`.
    pub fn call(&mut self, session: &mut dyn ModInstance, call: &Call<'_>, done: ReplySender) -> Option<Reply> {
        let begun = Instant::now();
        self.called_at = Some(begun);
        match session.call(call, done) {
            Ok(mut reply) => {
                if reply.elapsed.is_zero() {
                    reply.elapsed = begun.elapsed();
                }
                Some(reply)
            }
            Err(Pending) => None,
        }
    }

    /// Records a reply and returns its action for the engine to apply, when it is one that edits prompt or logits.
    /// `problem` looks at an action's numbers and says what is wrong with them; such an action counts as Noop.
    pub fn settle(
        &mut self,
        active: &mut ActiveMod,
        reply: Reply,
        journal: &mut Journal,
        problem: impl FnOnce(&Action) -> Option<String>,
    ) -> Settled {
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
                problem(&action)
            } else {
                Some(format!("{} is not permitted on {}", action.kind().as_str(), self.event.as_str()))
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
        let call_index = journal.call(ModCall {
            event_sequence_order: self.order,
            mod_name: active.name.clone(),
            event_type: self.event,
            step: self.step as i32,
            created_at: Some(journal.now()),
            execution_time_ms: Some(elapsed.as_secs_f64() * 1000.0),
            exception_occurred: failed,
            exception_message: message,
            exception_traceback: traceback,
        });
        for log in reply.logs.into_iter().chain(switched_off) {
            journal.log(ModLog {
                mod_call_sequence: call_index,
                mod_name: active.name.clone(),
                log_message: log.message,
                log_level: log.level,
                created_at: Some(journal.now()),
            });
        }
        let superseded = action.is_control() && self.winner.is_some();
        Settled { call_index, superseded, action }
    }
}

/// A reply that was recorded up to its action.
pub(super) struct Settled {
    /// The call's number.
    pub call_index: i32,
    /// Whether an earlier mod's action has won the event.
    pub superseded: bool,
    /// What the mod wants.
    pub action: Action,
}

/// What the engine knows of an action's effect.
#[derive(Debug, Default)]
pub(super) struct Effect {
    /// Backtrack: tokens that really leave the sequence.
    pub removed: Option<u32>,
    /// Backtrack: whether it asked for more.
    pub clamped: bool,
    /// `AdjustedLogits`: `(token, before, after)` of the probabilities it moved most.
    pub moved: Vec<(i32, f32, f32)>,
    /// `AdjustedLogits`: the distribution as the edit leaves it, where it was measured.
    pub edited: Option<Distribution>,
}

/// The action as it is recorded.
pub(super) fn record_action(
    settled: &Settled,
    active: &ActiveMod,
    vocabulary: &Vocabulary,
    effect: &Effect,
    journal: &mut Journal,
) {
    let action = &settled.action;
    if !journal.recorded() || (matches!(action, Action::Noop) && !active.records_noop) {
        return;
    }
    let mut record = events::ActionRecord::new(settled.call_index, action.kind(), Some(journal.now()));
    let mut details = serde_json::Map::new();
    details.insert("version".into(), json!(active.version));
    if settled.superseded {
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
            record.adjusted_max_steps = max_steps.map(saturated);
        }
        Action::AdjustedLogits { edit, temperature } => {
            record.logits_shape = Some(format!("[1, {}]", vocabulary.len()));
            record.temperature = temperature.map(super::submit::shortest);
            let kind = match edit {
                LogitEdit::Keep => "keep",
                LogitEdit::Set(_) => "set",
                LogitEdit::Add(_) => "add",
                LogitEdit::Allow(_) => "allow",
                LogitEdit::Replace(_) => "replace",
            };
            details.insert("edit".into(), json!(kind));
            let moved: Vec<_> = effect
                .moved
                .iter()
                .map(|&(token, before, after)| {
                    json!({ "token": token, "text": vocabulary.decode(&[token]), "before": before, "after": after })
                })
                .collect();
            details.insert("moved".into(), json!(moved));
        }
        Action::ForceTokens(tokens) | Action::ForceOutput(tokens) => {
            put_tokens(tokens);
            record.token_count = Some(tokens.len() as i32);
            record.tokens_preview = Some(printable(vocabulary.decode(&tokens[..tokens.len().min(10)])));
        }
        Action::Backtrack { n, tokens } => {
            put_tokens(tokens);
            record.backtrack_steps = Some(saturated(*n));
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
            record.tool_calls = raw(payload);
        }
        Action::EmitError { message, .. } => record.error_message = Some(message.clone()),
    }
    record.details = raw(&serde_json::Value::Object(details));
    journal.action(record);
}

/// A number that a mod chose, as the trace can hold it.
fn saturated(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

fn raw(value: &serde_json::Value) -> Option<RawJson> {
    serde_json::value::to_raw_value(value).ok()
}
