//! Replay of the events of a recorded run to a mod.
//!
//! The sequence follows the recorded actions, not those that the mod returns in the replay. A recording has only the
//! most probable tokens of each step. The mod gets these tokens with their probabilities, and all other tokens with
//! equal shares of the remaining probability.

use super::{Action, Call, CallEvent, ModInstance, Pending, Reply, ReplySender, RunView};
use crate::events::{ActionRecord, ActionType, Event, EventType, RequestedAction, TokenId};
use crate::model::Vocabulary;
use serde::Deserialize;
use std::sync::{Arc, mpsc};

/// The sequence of a recorded run at one of its events.
#[derive(Debug, Default)]
pub struct RecordedSequence {
    tokens: Vec<TokenId>,
    prompt_len: usize,
    /// Number of generated tokens evicted from the full context.
    evicted: usize,
    max_steps: u32,
    newest: Option<EventType>,
}

/// Details of a recorded action that change the sequence.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ActionDetails {
    /// Tokens of a new prompt, or appended tokens.
    pub tokens: Vec<TokenId>,
    /// Number of tokens that a Backtrack removed.
    pub removed: Option<usize>,
    /// True if an earlier mod's action won the event.
    pub superseded: bool,
}

impl From<&ActionRecord> for ActionDetails {
    fn from(action: &ActionRecord) -> Self {
        let details = action.details.as_ref();
        details.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default()
    }
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
    /// Applies the next event.
    ///
    /// # Errors
    /// The event has a token that is not in the vocabulary.
    pub fn apply_event(&mut self, event: &Event, vocabulary: &Vocabulary) -> Result<(), String> {
        self.newest = Some(event.event_type);
        let measured = event.measured.as_deref();
        for &(from, to) in measured.and_then(|it| it.evicted.as_ref()).map_or(&[][..], |it| &it.ranges).iter().rev() {
            let (from, to) = (from as usize, (to as usize).min(self.tokens.len()));
            if from < to {
                let of_prompt = self.prompt_len.min(to).saturating_sub(from);
                self.prompt_len -= of_prompt;
                self.evicted += to - from - of_prompt;
                self.tokens.drain(from..to);
            }
        }
        if event.event_type == EventType::Prefilled {
            let prompt = measured.and_then(|measured| measured.prompt.as_ref());
            self.tokens = prompt.map(|prompt| prompt.tokens.clone()).unwrap_or_default();
            self.prompt_len = self.tokens.len();
            self.max_steps = event.max_steps.unwrap_or(0).max(0) as u32;
        }
        self.tokens.extend(event.added_tokens.iter().flatten());
        match self.tokens.iter().find(|&&token| !vocabulary.is_prompt_token(token)) {
            Some(token) => Err(format!("event {}: {token} is not a token of the model", event.sequence_order)),
            None => Ok(()),
        }
    }

    /// Applies a recorded action at the newest event.
    pub fn apply_action(&mut self, action: &ActionRecord) {
        let details = ActionDetails::from(action);
        if details.superseded {
            return;
        }
        match action.action_type {
            ActionType::Backtrack => {
                let unappended = usize::from(self.newest == Some(EventType::Sampled));
                let requested = (action.backtrack_steps.unwrap_or(0).max(0) as usize).saturating_sub(unappended);
                let removed = details.removed.unwrap_or(requested).min(self.tokens.len() - self.prompt_len);
                self.tokens.truncate(self.tokens.len() - removed);
            }
            ActionType::ForceOutput => self.tokens.truncate(self.prompt_len),
            ActionType::AdjustedPrefill if !details.tokens.is_empty() => {
                self.prompt_len = details.tokens.len();
                self.tokens = details.tokens;
                self.max_steps = action.adjusted_max_steps.map_or(self.max_steps, |steps| steps.max(0) as u32);
            }
            _ => {}
        }
    }

    /// Calls a mod with the newest event and waits for its reply. Returns `None` if the mod does not handle the event.
    ///
    /// # Errors
    /// The mod's worker has ended.
    pub fn deliver(
        &self,
        event: &Event,
        instance: &mut dyn ModInstance,
        view: &Arc<RunView>,
    ) -> Result<Option<ReplayedReply>, String> {
        if !instance.handles().contains(event.event_type) {
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
                CallEvent::ForwardPass { logits: &logits }
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
            max_steps: self.max_steps,
            event: call_event,
        };
        let (sender, receiver) = mpsc::channel();
        let done = ReplySender::new(move |reply| {
            let _ = sender.send(reply);
        });
        let reply = match instance.call(&call, done) {
            Ok(reply) => reply,
            Err(Pending) => receiver.recv().map_err(|_| "the mod's worker has ended".to_owned())?,
        };
        Ok(Some(to_replayed_reply(event.event_type, reply)))
    }
}

fn to_replayed_reply(event: EventType, reply: Reply) -> ReplayedReply {
    let action = reply.action.unwrap_or(Action::Noop);
    let (exception, traceback) =
        reply.exception.map_or((None, None), |exception| (Some(exception.message), exception.traceback));
    let exception = exception.or_else(|| action.event_error(event));
    ReplayedReply {
        action: if exception.is_some() { None } else { requested_action(action) },
        exception,
        traceback,
        logs: reply.logs.into_iter().map(|log| format!("{}: {}", log.level.as_str(), log.message)).collect(),
    }
}

fn requested_action(action: Action) -> Option<RequestedAction> {
    let requested = RequestedAction::new(action.kind());
    Some(match action {
        Action::Noop => return None,
        Action::AdjustedPrefill { tokens, max_steps } => {
            RequestedAction { tokens, max_steps: max_steps.map(|steps| steps as i32), ..requested }
        }
        Action::AdjustedLogits { edit, temperature } => {
            // In the number format of the recording: 0.8, not 0.800000011920929.
            let temperature = temperature.and_then(|value| value.to_string().parse().ok());
            RequestedAction { edit: Some(edit.as_str().to_owned()), temperature, ..requested }
        }
        Action::ForceTokens(tokens) | Action::ForceOutput(tokens) => RequestedAction { tokens, ..requested },
        Action::Backtrack { n, tokens } => RequestedAction { steps: Some(n as i32), tokens, ..requested },
        Action::ToolCalls(payload) => RequestedAction { tool_calls: Some(payload), ..requested },
        Action::EmitError { message, .. } => RequestedAction { message: Some(message), ..requested },
    })
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
