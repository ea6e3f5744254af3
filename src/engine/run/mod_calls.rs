//! Calls of the mods of a run with its events, and their replies. [`super::dispatch`] has the mods.

use super::actions::effect_of;
use super::{AddedTokens, Run, RunResources, RunState};
use crate::events::EventType;
use crate::mods::{Action, Call, CallEvent, Reply};

impl Run {
    /// Calls the next mod with the current event. Returns `false` if the reply comes later.
    pub(super) fn call_mod(&mut self, new_logits: Option<&[f32]>, resources: &RunResources) -> bool {
        let id = self.id;
        let Self { state: RunState::Dispatching(dispatched), dispatch, sequence, step_logits, .. } = self else {
            return false;
        };
        let tokens = sequence.tokens();
        let (evicted, evictions_end) = sequence.evicted_generated();
        let event = match dispatched.event {
            EventType::Prefilled => CallEvent::Prefilled,
            EventType::ForwardPass => CallEvent::ForwardPass {
                logits: step_logits.edited_or_model_logits(new_logits),
                hidden_states: step_logits.hidden_states(),
            },
            EventType::Sampled => {
                let drawn = step_logits.drawn();
                CallEvent::Sampled {
                    token: drawn.map_or(0, |drawn| drawn.token),
                    text: drawn.map_or("", |drawn| drawn.text.as_str()),
                    logprob: drawn.and_then(|drawn| drawn.logprob).unwrap_or(0.0),
                }
            }
            EventType::Added => {
                let AddedTokens { count, forced, logprobs } = &self.added;
                CallEvent::Added { tokens: &tokens[tokens.len() - count..], logprobs, forced: *forced }
            }
        };
        let call = Call {
            run: &self.view,
            step: dispatched.step,
            sequence: tokens,
            prompt_len: sequence.prompt_len(),
            evicted,
            evictions_end,
            max_tokens: self.budget.max_tokens() as u32,
            event,
        };
        let reply = dispatch.call(dispatched, &call, |number| (resources.reply_sender)(id, number));
        // An edit changes a copy of the logits; a reply that comes later may be one.
        if reply.as_ref().is_none_or(|reply| matches!(reply.action, Some(Action::AdjustedLogits { .. }))) {
            step_logits.save(new_logits);
        }
        let Some(reply) = reply else { return false };
        self.apply_reply(reply);
        true
    }

    /// Records the reply of a mod. Applies an edit of the prompt or the logits immediately; a control action is applied
    /// after the dispatch, if it wins the event.
    pub(super) fn apply_reply(&mut self, reply: Reply) {
        let Self { state: RunState::Dispatching(dispatched), dispatch, sequence, step_logits, event_buffer, .. } = self
        else {
            return;
        };
        let vocabulary = &self.view.vocabulary;
        let event = dispatched.event;
        let reply = reply.validate_action(event, vocabulary.len()).limit_tokens(event, sequence.context());
        let recorded = dispatch.record_reply(dispatched, reply, event_buffer);
        let is_recorded = event_buffer.is_recorded();
        let effect = effect_of(&recorded.action, event, sequence, step_logits, is_recorded);
        dispatch.record_action(&recorded, vocabulary, &effect, event_buffer);
        match recorded.action {
            Action::Noop => {}
            Action::AdjustedPrefill { tokens, max_tokens } => {
                sequence.replace_prompt(tokens);
                if let Some(max_tokens) = max_tokens {
                    self.budget.adjust_max_tokens(max_tokens, &self.request.limits);
                }
            }
            Action::AdjustedLogits { edit, temperature } => step_logits.edit(edit, temperature, effect.edit.edited),
            control => dispatched.set_winner(control),
        }
    }
}
