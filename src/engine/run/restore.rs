//! Start of a fork: gives a new run the state that a recorded run had before one of its steps, without a decode.
//! [`super::replay`] does the same for the mods of the run.

use super::Run;
use crate::engine::error::SubmitError;
use crate::engine::fork::ForkPoint;
use crate::events::{ActionDetails, ActionRecord, ActionType, Event, EventType, FinishReason, TokenId, TraceItem};
use crate::model::llama::Sampler;

impl Run {
    /// Applies the recorded items before the fork, and copies them into the recording of the new run, except for
    /// attention.
    ///
    /// # Errors
    /// [`SubmitError::NotForkable`].
    pub fn restore(&mut self, fork: &ForkPoint) -> Result<(), SubmitError> {
        let refuse = |reason: String| SubmitError::NotForkable { step: fork.step, reason };
        let mut phases = fork.sampling.iter();
        let Some((_, first)) = phases.next() else { return Err(refuse("it has no sampling parameters".into())) };
        let target = self.request.sampling.clone();
        self.set_sampling(first.clone(), true);
        let mut phases = phases.peekable();
        for item in fork.items.iter() {
            match item {
                TraceItem::Event(event) => {
                    // A run that was forked several times at the same step has several phases from there on.
                    while let Some((_, sampling)) = phases.next_if(|(from, _)| event.step >= *from as i32) {
                        self.set_sampling(sampling.clone(), false);
                    }
                    self.restore_event(event).map_err(refuse)?;
                }
                TraceItem::Action(action) => {
                    self.restore_action(action).map_err(refuse)?;
                    self.event_buffer.copy(item);
                }
                TraceItem::ModCall(_) | TraceItem::ModLog(_) => self.event_buffer.copy(item),
                TraceItem::Attention(_) => {}
            }
        }
        self.set_sampling(target, false);
        self.budget.restore(fork.step.saturating_sub(1), self.sequence.answer_len());
        self.fork_tokens = Some(fork.tokens.clone());
        Ok(())
    }

    /// Discards a run that was not submitted.
    pub fn discard(mut self) {
        self.dispatch.finish();
        self.registration.end();
    }

    /// Begins the first new step: appends `tokens` if there are any; otherwise continues as the recorded run did.
    pub(super) fn begin_fork(&mut self, tokens: Vec<TokenId>) {
        // The client of the recorded run received this text before the step.
        self.release_text();
        if self.budget.tokens_left(self.sequence.answer_len()) == 0 {
            self.finish(FinishReason::Length);
        } else if !tokens.is_empty() {
            self.force(tokens, self.budget.step() + 1, None);
        } else {
            self.continue_after_change();
        }
    }

    /// Sets the sampling parameters. The random number generator keeps its state unless the seed changes or `restart`
    /// is true.
    fn set_sampling(&mut self, sampling: crate::engine::SamplingParams, restart: bool) {
        if sampling != self.request.sampling || restart {
            let sampler = Sampler::new(&sampling, &self.view.vocabulary);
            if restart {
                self.sampler.restart(sampler);
            } else {
                self.sampler.replace(sampler, &self.request.sampling, &sampling);
            }
            self.request.sampling = sampling;
        }
    }

    /// Checks that recorded tokens are in the model's vocabulary, since llama.cpp rejects a whole batch with an unknown
    /// token.
    fn check_tokens(&self, tokens: &[TokenId]) -> Result<(), String> {
        let vocabulary = &self.view.vocabulary;
        let unknown = tokens.iter().find(|&&token| !vocabulary.contains(token));
        unknown.map_or(Ok(()), |token| {
            Err(format!("it has the token {token}; the model's ids are 0 to {}", vocabulary.len() - 1))
        })
    }

    fn restore_event(&mut self, event: &Event) -> Result<(), String> {
        let measured = event.measured.as_deref().ok_or("its events lack measurements")?;
        if measured.evicted.is_some() && event.event_type != EventType::Prefilled {
            return Err(format!("its context was full at step {}", event.step));
        }
        match event.event_type {
            EventType::Prefilled => {
                // The new run records its own parameters.
                self.record_prompt();
                self.event_buffer.continue_times(event);
                return Ok(());
            }
            EventType::ForwardPass => {
                if let Some(note) = &measured.note {
                    return Err(format!(
                        "its parameters were changed while it was running, at step {}: {note}",
                        event.step
                    ));
                }
            }
            EventType::Sampled => {
                if !self.sampler.can_repeat_draw(measured.redraws) {
                    return Err("the state of its adaptive sampling is not recorded".into());
                }
                let drawn = measured.tokens.first().ok_or("a drawn token lacks its measurement")?;
                self.check_tokens(&[drawn.token])?;
                let prob = measured.after_sampler.iter().find(|other| other.token == drawn.token).map(|it| it.prob);
                self.sampler.repeat_draw(drawn, prob, &measured.stages, measured.redraws);
            }
            EventType::Added => {
                let tokens = event.added_tokens.as_deref().unwrap_or_default();
                if measured.tokens.len() != tokens.len() {
                    return Err("its tokens lack measurements".into());
                }
                self.check_tokens(tokens)?;
                measured.tokens.iter().try_for_each(|appended| self.check_tokens(&[appended.token]))?;
                self.sequence.extend(tokens);
                let mut appended = measured.tokens.clone();
                // The returned note is already in the copied event.
                let _ = self.process_tokens(&mut appended);
                self.attention.queue(appended.len());
                self.answer.queue(appended, None);
            }
        }
        self.event_buffer.copy(&TraceItem::Event(event.clone()));
        Ok(())
    }

    fn restore_action(&mut self, action: &ActionRecord) -> Result<(), String> {
        let details = ActionDetails::from(action);
        if details.superseded {
            return Ok(());
        }
        match action.action_type {
            ActionType::AdjustedPrefill => {
                self.check_tokens(&details.tokens)?;
                self.sequence.replace_prompt(details.tokens);
                if let Some(max_tokens) = action.adjusted_max_steps.and_then(|tokens| u32::try_from(tokens).ok()) {
                    self.budget.adjust_max_tokens(max_tokens, &self.request.limits);
                }
            }
            ActionType::Backtrack => {
                let removed = details.removed.ok_or("the length of a backtrack is not recorded")? as usize;
                if removed > self.sequence.generated_in_context() {
                    return Err("a backtrack removes more than was generated".into());
                }
                if removed > 0 {
                    self.sequence.retract(removed);
                    self.process_retraction(removed);
                }
            }
            ActionType::ForceOutput | ActionType::ToolCalls | ActionType::EmitError => {
                return Err(format!("a mod ended it before that step with {}", action.action_type.as_str()));
            }
            ActionType::Noop | ActionType::AdjustedLogits | ActionType::ForceTokens => {}
        }
        Ok(())
    }
}
