//! Dispatch of events to the mods of one run: calls the mods in order, records their replies, and decides whose action
//! wins an event. [`super::state_machine`] applies the actions.

use super::mod_health::ModHealth;
use super::step_logits::EditEffect;
use crate::engine::latencies::ModCalls;
use crate::engine::recording::event_buffer::EventBuffer;
use crate::events::{EventType, LogLevel, ModCall, ModFailures, ModLog, MovedToken, TokenId};
use crate::model::llama::LayerSet;
use crate::model::{Vocabulary, without_nul};
use crate::mods::{Action, Call, ModInstance, ModLogLine, Reply, ReplySender};
use std::sync::Arc;
use std::time::Instant;

/// A mod of one run.
pub struct ActiveMod {
    /// Name of the mod.
    pub name: String,
    /// Hash of its source; Thunder's version for a built-in mod.
    pub version: String,
    /// True if Noop actions are recorded; false for built-in mods.
    pub records_noop: bool,
    /// State of the mod for this run.
    pub instance: Box<dyn ModInstance>,
    /// Failures of the mod in this run.
    pub health: ModHealth,
    /// Counters of its calls in all runs.
    pub calls: Arc<ModCalls>,
}

/// Event during its dispatch to the mods.
#[derive(Debug)]
pub struct DispatchedEvent {
    /// Type of the event.
    pub event: EventType,
    /// Step of the event.
    pub step: u32,
    /// Number of the event.
    order: i32,
    /// Index of the mod that is called, or of the next one.
    next: usize,
    /// Start of the call whose reply is awaited.
    awaited_since: Option<Instant>,
    /// First control action of the event: one that forces or removes tokens or ends the run, instead of editing the
    /// prompt or the logits.
    winner: Option<Action>,
}

impl DispatchedEvent {
    /// Creates an event before its dispatch.
    pub fn new(event: EventType, order: i32, step: u32) -> Self {
        Self { event, step, order, next: 0, awaited_since: None, winner: None }
    }

    /// Makes a control action the winner of the event, if it is the first.
    pub fn set_winner(&mut self, action: Action) {
        self.winner.get_or_insert(action);
    }

    /// Takes the action that won the event.
    pub fn take_winner(&mut self) -> Option<Action> {
        self.winner.take()
    }
}

/// Mods of one run, in the order in which they are called.
pub struct Dispatch {
    mods: Vec<ActiveMod>,
    /// Number of the last call. Late replies to earlier calls are ignored.
    last_call: u64,
}

impl Dispatch {
    /// Creates the dispatch to these mods.
    pub fn new(mods: Vec<ActiveMod>) -> Self {
        Self { mods, last_call: 0 }
    }

    /// Returns true if the run has no mods.
    pub fn is_empty(&self) -> bool {
        self.mods.is_empty()
    }

    /// Returns how many of the last tokens are held back from the client, because mods may still remove them. The
    /// number can change with every token.
    pub fn holdback(&self) -> usize {
        self.enabled().map(|active| active.instance.holdback()).max().unwrap_or(0)
    }

    /// Notifies the mods that all tokens of the answer after the first `generated` were removed.
    pub fn retracted(&mut self, generated: usize) {
        for active in &mut self.mods {
            active.instance.retracted(generated);
        }
    }

    /// Returns how many of the `generated` tokens are part of the answer if the run ends now. Mods will remove the others.
    pub fn kept_tokens(&self, generated: usize) -> usize {
        self.enabled().filter_map(|active| active.instance.discard_from()).fold(generated, usize::min)
    }

    fn enabled(&self) -> impl Iterator<Item = &ActiveMod> {
        self.mods.iter().filter(|active| active.health.disabled.is_none())
    }

    /// Returns the layers after which mods read the hidden state of the last token.
    pub fn hidden_layers(&self) -> LayerSet {
        let is_called = |active: &&ActiveMod| {
            active.health.disabled.is_none() && active.instance.handles().contains(EventType::ForwardPass)
        };
        self.mods.iter().filter(is_called).flat_map(|active| active.instance.hidden_layers()).copied().collect()
    }

    /// Returns the messages of mods that are disabled for the rest of the run.
    pub fn disabled(&self) -> impl Iterator<Item = String> {
        self.mods.iter().filter_map(|active| active.health.disabled.clone())
    }

    /// Returns the mods with failed calls.
    pub fn failures(&self) -> Vec<ModFailures> {
        self.mods.iter().filter_map(|active| active.health.failures(&active.name)).collect()
    }

    /// Notifies the mods that the run has ended.
    pub fn finish(&mut self) {
        for active in &mut self.mods {
            active.instance.finished();
        }
    }

    /// Advances the event to the next mod that handles it. Returns `false` if no mod is left.
    pub fn advance_to_next_mod(&self, event: &mut DispatchedEvent) -> bool {
        while let Some(active) = self.mods.get(event.next) {
            if active.health.disabled.is_none() && active.instance.handles().contains(event.event) {
                return true;
            }
            event.next += 1;
        }
        false
    }

    /// Calls the next mod of the event. Returns `None` if the reply will arrive later, through a sender that
    /// `new_sender` creates for the number of the call.
    pub fn call(
        &mut self,
        event: &mut DispatchedEvent,
        call: &Call<'_>,
        new_sender: impl Fn(u64) -> ReplySender,
    ) -> Option<Reply> {
        self.last_call += 1;
        let (number, start) = (self.last_call, Instant::now());
        let reply = self.mods[event.next].instance.call(call, &|| new_sender(number));
        if reply.is_none() {
            event.awaited_since = Some(start);
        }
        reply.map(|reply| reply.measured_since(start))
    }

    /// Returns a reply that arrived later, if it is the awaited one.
    pub fn receive(&self, event: &mut DispatchedEvent, call: u64, reply: Reply) -> Option<Reply> {
        let start = event.awaited_since.take_if(|_| self.last_call == call)?;
        Some(reply.measured_since(start))
    }

    /// Returns the mod whose reply is awaited.
    pub fn awaited_mod(&mut self, event: &DispatchedEvent) -> Option<&mut dyn ModInstance> {
        event.awaited_since?;
        Some(self.mods.get_mut(event.next)?.instance.as_mut())
    }

    /// Records the validated reply of the called mod. Returns its action.
    pub fn record_reply(
        &mut self,
        event: &mut DispatchedEvent,
        reply: Reply,
        event_buffer: &mut EventBuffer,
    ) -> RecordedReply {
        let mod_index = event.next;
        let active = &mut self.mods[mod_index];
        event.next += 1;
        let elapsed = reply.elapsed;
        let action = reply.action.unwrap_or(Action::Noop);
        let exception = reply.exception;
        active.calls.add(elapsed, exception.is_some());
        let failure = exception.as_ref().map(|exception| exception.message.as_str());
        active.health.count_in_run(failure);
        let disabled_log = active.health.count_call(&active.name, event.event, event.step, failure).map(|message| {
            tracing::warn!(mod.name = active.name, "{message}");
            ModLogLine { level: LogLevel::Error, message: message.to_owned() }
        });
        let call_index = event_buffer.call(|now| {
            let (message, traceback) = exception.map(|it| (it.message, it.traceback)).unzip();
            ModCall {
                event_sequence_order: event.order,
                mod_name: active.name.clone(),
                event_type: event.event,
                step: event.step as i32,
                created_at: Some(now),
                execution_time_ms: Some(elapsed.as_secs_f64() * 1000.0),
                exception_occurred: message.is_some(),
                exception_message: message,
                exception_traceback: traceback.flatten(),
            }
        });
        for log in reply.logs.into_iter().chain(disabled_log) {
            event_buffer.log(|now| ModLog {
                mod_call_sequence: call_index,
                mod_name: active.name.clone(),
                log_message: log.message,
                log_level: log.level,
                created_at: Some(now),
            });
        }
        let superseded = action.is_control() && event.winner.is_some();
        RecordedReply { mod_index, call_index, superseded, action }
    }

    /// Records the action of a reply.
    pub fn record_action(
        &self,
        recorded: &RecordedReply,
        vocabulary: &Vocabulary,
        effect: &ActionEffect,
        event_buffer: &mut EventBuffer,
    ) {
        let active = &self.mods[recorded.mod_index];
        let action = &recorded.action;
        if !event_buffer.is_recorded() || (matches!(action, Action::Noop) && !active.records_noop) {
            return;
        }
        let (mut record, mut details) = action.to_record(recorded.call_index, Some(event_buffer.now()), vocabulary);
        details.texts = vocabulary.storable_texts(&details.tokens);
        details.version.clone_from(&active.version);
        details.superseded = recorded.superseded;
        match action {
            Action::Backtrack { .. } => (details.removed, details.clamped) = (effect.removed, effect.clamped),
            Action::AdjustedLogits { .. } => details.moved = Some(moved_tokens(&effect.edit, vocabulary)),
            _ => {}
        }
        record.details = details.to_json();
        event_buffer.action(record);
    }
}

/// A recorded reply. Its action is recorded later, with its effect.
pub struct RecordedReply {
    /// Index of the mod.
    mod_index: usize,
    /// Number of the call.
    call_index: i32,
    /// True for a control action if the control action of an earlier mod has won the event.
    superseded: bool,
    /// Action of the mod.
    pub action: Action,
}

/// Effect of an action.
#[derive(Debug, Default)]
pub struct ActionEffect {
    /// `Backtrack`: number of tokens that are removed from the sequence.
    pub removed: Option<u32>,
    /// `Backtrack`: true if the mod requested the removal of more tokens than were generated.
    pub clamped: bool,
    /// `AdjustedLogits`: changes of probability.
    pub edit: EditEffect,
}

fn moved_tokens(effect: &EditEffect, vocabulary: &Vocabulary) -> Vec<MovedToken> {
    let to_moved = |&(token, before, after): &(TokenId, f32, f32)| {
        let text = without_nul(vocabulary.decode(&[token]));
        let finite = |prob: f32| prob.is_finite().then_some(prob);
        MovedToken { token, text, before: finite(before), after: finite(after) }
    };
    effect.shifted.iter().map(to_moved).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::run::mod_health::MAX_CONSECUTIVE_FAILURES;
    use crate::mods::EventSet;

    struct HoldsBack;

    impl ModInstance for HoldsBack {
        fn handles(&self) -> EventSet {
            EventSet::ALL
        }

        fn holdback(&self) -> usize {
            32
        }

        fn call(&mut self, _: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
            Some(Reply::noop())
        }
    }

    #[test]
    fn disabled_mod_holds_nothing_back() {
        let mut dispatch = Dispatch::new(vec![ActiveMod {
            name: "holds-back".into(),
            version: "1".into(),
            records_noop: false,
            instance: Box::new(HoldsBack),
            health: ModHealth::default(),
            calls: Arc::default(),
        }]);
        for failures in 1..=MAX_CONSECUTIVE_FAILURES {
            assert_eq!(dispatch.holdback(), 32);
            let health = &mut dispatch.mods[0].health;
            let disabled = health.count_call("holds-back", EventType::Added, 1, Some("failed"));
            assert_eq!(disabled.is_some(), failures == MAX_CONSECUTIVE_FAILURES);
        }
        assert_eq!(dispatch.holdback(), 0);
    }
}
