//! Replay of the events of a recorded run to a mod.
//!
//! The sequence follows the recorded actions, not those that the mod returns in the replay. A recording has only the
//! most probable tokens of each step. The mod gets these tokens with their probabilities, and all other tokens with
//! equal shares of the remaining probability.

use super::{Action, Call, CallEvent, ModInstance, Reply, ReplySender, RunView};
use crate::events::{ActionDetails, ActionRecord, ActionType, Event, EventType, RequestedAction, TokenId};
use crate::model::Vocabulary;
use std::sync::{Arc, mpsc};

/// Limits of an engine on the actions of mods.
#[derive(Debug, Clone, Copy)]
pub struct ReplayLimits {
    /// Context size of a slot, in tokens.
    pub context: usize,
    /// Maximum tokens in the answer of any run; `None` for no maximum.
    pub max_tokens: Option<u32>,
}

/// The sequence of a recorded run at one of its events.
#[derive(Debug)]
pub struct RecordedSequence {
    limits: ReplayLimits,
    tokens: Vec<TokenId>,
    prompt_len: usize,
    /// Number of generated tokens evicted from the full context.
    evicted: usize,
    /// Index of the first token that followed all evicted ones; 0 if none were evicted.
    evictions_end: usize,
    max_tokens: u32,
    newest: Option<EventType>,
    /// Action that won the newest event. It takes effect when all mods were called.
    winner: Option<ActionRecord>,
    /// True after a `ForceOutput`. The mods are not called for its tokens.
    has_ended: bool,
}

/// A mod's reply to a replayed event.
#[derive(Debug)]
pub struct ReplayedReply {
    /// The action; `None` for Noop and for a failed call.
    pub action: Option<RequestedAction>,
    /// Message of a failed call.
    pub exception: Option<String>,
    /// Python's traceback of a failed call.
    pub traceback: Option<String>,
    /// Lines that the mod printed and logged, each with its level.
    pub logs: Vec<String>,
}

impl RecordedSequence {
    /// Creates the sequence before the first event.
    #[must_use]
    pub fn new(limits: ReplayLimits) -> Self {
        Self {
            limits,
            tokens: Vec::new(),
            prompt_len: 0,
            evicted: 0,
            evictions_end: 0,
            max_tokens: 0,
            newest: None,
            winner: None,
            has_ended: false,
        }
    }

    /// Applies the next event, after the action that won the event before it.
    ///
    /// # Errors
    /// The event has a token that is not in the vocabulary.
    pub fn apply_event(&mut self, event: &Event, vocabulary: &Vocabulary) -> Result<(), String> {
        self.apply_winner();
        self.newest = Some(event.event_type);
        let measured = event.measured.as_deref();
        // The event of discarded tokens is the last, and not offered to mods.
        self.has_ended |= measured.is_some_and(|measured| measured.discarded > 0);
        for &(from, to) in measured.and_then(|it| it.evicted.as_ref()).map_or(&[][..], |it| &it.ranges).iter().rev() {
            let (from, to) = (from as usize, (to as usize).min(self.tokens.len()));
            if from < to {
                let of_prompt = self.prompt_len.min(to).saturating_sub(from);
                self.prompt_len -= of_prompt;
                self.evicted += to - from - of_prompt;
                self.evictions_end = self.evictions_end.max(to) - (to - from);
                self.tokens.drain(from..to);
            }
        }
        if event.event_type == EventType::Prefilled {
            let prompt = measured.and_then(|measured| measured.prompt.as_ref());
            self.tokens = prompt.map(|prompt| prompt.tokens.clone()).unwrap_or_default();
            self.prompt_len = self.tokens.len();
            self.max_tokens = event.max_steps.unwrap_or(0).max(0) as u32;
        }
        self.tokens.extend(event.added_tokens.iter().flatten());
        match self.tokens.iter().find(|&&token| !vocabulary.is_prompt_token(token)) {
            Some(token) => Err(format!("event {}: {token} is not a token of the model", event.sequence_order)),
            None => Ok(()),
        }
    }

    /// Applies a recorded action at the newest event. A new prompt takes effect for the next mod, any other action when
    /// all mods were called.
    pub fn apply_action(&mut self, action: &ActionRecord) {
        let details = ActionDetails::from(action);
        match action.action_type {
            ActionType::AdjustedPrefill if !details.tokens.is_empty() => {
                self.prompt_len = details.tokens.len();
                self.tokens = details.tokens;
                self.evictions_end = 0;
                if let Some(steps) = action.adjusted_max_steps {
                    let steps = steps.max(0) as u32;
                    self.max_tokens = self.limits.max_tokens.map_or(steps, |max| steps.min(max));
                }
            }
            ActionType::Backtrack | ActionType::ForceOutput if !details.superseded => {
                self.winner.get_or_insert_with(|| action.clone());
            }
            _ => {}
        }
    }

    /// Applies the action that won the newest event.
    fn apply_winner(&mut self) {
        let Some(action) = self.winner.take() else { return };
        if action.action_type == ActionType::ForceOutput {
            self.tokens.truncate(self.prompt_len);
            (self.evicted, self.evictions_end) = (0, 0);
            self.has_ended = true;
        } else {
            let unappended = usize::from(self.newest == Some(EventType::Sampled));
            let requested = (action.backtrack_steps.unwrap_or(0).max(0) as usize).saturating_sub(unappended);
            let removed = ActionDetails::from(&action).removed.map_or(requested, |removed| removed as usize);
            self.tokens.truncate(self.tokens.len() - removed.min(self.tokens.len() - self.prompt_len));
        }
    }

    /// Calls a mod with the newest event and waits for its reply. Returns `None` for an event with which a
    /// run does not call the mod.
    ///
    /// # Errors
    /// The mod's worker has ended.
    pub fn deliver(
        &self,
        event: &Event,
        instance: &mut dyn ModInstance,
        view: &Arc<RunView>,
    ) -> Result<Option<ReplayedReply>, String> {
        if self.has_ended || !instance.handles().contains(event.event_type) {
            return Ok(None);
        }
        let measured = event.measured.as_deref();
        let logits;
        let logprobs: Vec<_> =
            measured.into_iter().flat_map(|measured| &measured.tokens).map(|token| token.logprob).collect();
        let call_event = match event.event_type {
            EventType::Prefilled => CallEvent::Prefilled,
            EventType::ForwardPass => {
                logits = recorded_logits(event, &view.vocabulary);
                CallEvent::ForwardPass { logits: &logits, hidden_states: None }
            }
            EventType::Sampled => CallEvent::Sampled {
                token: event.sampled_token.unwrap_or(0),
                text: event.token_text.as_deref().unwrap_or_default(),
                logprob: logprobs.first().copied().flatten().unwrap_or(0.0),
            },
            EventType::Added => CallEvent::Added {
                tokens: &self.tokens[self.tokens.len() - event.added_tokens.as_ref().map_or(0, Vec::len)..],
                logprobs: &logprobs,
                forced: event.forced.unwrap_or(false),
            },
        };
        let call = Call {
            run: view,
            step: event.step.max(0) as u32,
            sequence: &self.tokens,
            prompt_len: self.prompt_len,
            evicted: self.evicted,
            evictions_end: self.evictions_end,
            max_tokens: self.max_tokens,
            event: call_event,
        };
        let (sender, receiver) = mpsc::channel();
        let new_sender = || {
            let sender = sender.clone();
            ReplySender::new(move |reply| {
                let _ = sender.send(reply);
            })
        };
        let reply = instance.call(&call, &new_sender);
        drop(sender);
        let reply = match reply {
            Some(reply) => reply,
            None => receiver.recv().map_err(|_| "the mod's worker has ended".to_owned())?,
        };
        let kind = event.event_type;
        let reply = reply.validate_action(kind, view.vocabulary.len()).limit_tokens(kind, self.limits.context);
        Ok(Some(to_replayed_reply(reply, &view.vocabulary)))
    }
}

fn to_replayed_reply(reply: Reply, vocabulary: &Vocabulary) -> ReplayedReply {
    let (exception, traceback) =
        reply.exception.map_or((None, None), |exception| (Some(exception.message), exception.traceback));
    ReplayedReply {
        action: reply.action.and_then(|action| requested_action(&action, vocabulary)),
        exception,
        traceback,
        logs: reply.logs.into_iter().map(|log| format!("{}: {}", log.level.as_str(), log.message)).collect(),
    }
}

fn requested_action(action: &Action, vocabulary: &Vocabulary) -> Option<RequestedAction> {
    if *action == Action::Noop {
        return None;
    }
    let (record, details) = action.to_record(0, None, vocabulary);
    Some(RequestedAction::new(&record, details))
}

/// Creates logits from the recorded probabilities of the most probable tokens. All other tokens share the rest evenly.
fn recorded_logits(event: &Event, vocabulary: &Vocabulary) -> Vec<f32> {
    let known = event.measured.as_ref().map_or(&[][..], |measured| &measured.model);
    let mass: f32 = known.iter().map(|alternative| alternative.prob).sum();
    let others = vocabulary.len().saturating_sub(known.len()).max(1) as f32;
    let mut logits = vec![((1.0 - mass).max(1e-9) / others).ln(); vocabulary.len()];
    for alternative in known {
        let logit = usize::try_from(alternative.token).ok().and_then(|index| logits.get_mut(index));
        if let Some(logit) = logit {
            *logit = alternative.prob.max(1e-30).ln();
        }
    }
    logits
}
