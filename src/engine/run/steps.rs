//! Steps of a run: forward pass, sampling, appending of the sampled token. [`super::actions`] has the steps in which a
//! control action of a mod wins.

use super::dispatch::DispatchedEvent;
use super::finish::EndReason;
use super::reasoning::ReasoningTracker;
use super::{Run, RunState};
use crate::engine::output::{Output, TextDelta};
use crate::events::{Alternative, EventType, Fault, FinishReason, Measurements, StageCount, TokenId, TokenMeasurement};
use crate::model::distribution::TokenDistribution;
use crate::model::llama::Candidates;
use crate::model::without_nul;

/// Maximum characters of the sequence's end that are recorded with a `ForwardPass` event.
const INPUT_TEXT_CHARS: usize = 70;

impl Run {
    /// Continues after an event without a winning control action.
    pub(super) fn advance(&mut self, event: EventType, new_logits: Option<&[f32]>, candidates: &mut Candidates) {
        match event {
            EventType::Prefilled => {
                let whole_prompt = self.request.report.prompt_probabilities;
                let outputs_from = if whole_prompt { 0 } else { self.sequence.len() - 1 };
                self.state = RunState::Decode { outputs_from };
            }
            EventType::ForwardPass => self.sample(new_logits, candidates),
            EventType::Sampled => self.append_drawn(),
            EventType::Added => {
                self.send_text();
                let closing_tokens =
                    self.reasoning.as_ref().and_then(ReasoningTracker::closing_tokens).map(<[TokenId]>::to_vec);
                match (self.end_reason(), closing_tokens) {
                    (Some(end_reason), _) => self.finish(end_reason),
                    (None, Some(closing_tokens)) => self.force(closing_tokens, self.budget.step() + 1),
                    (None, None) => match self.sequence.make_room(1) {
                        Ok(has_evicted) => {
                            if has_evicted {
                                // The logits after forced tokens, and their attention, belong to the longer sequence.
                                self.step_logits.discard_end();
                            }
                            self.continue_from_end();
                        }
                        Err(message) => self.finish(EndReason::new(FinishReason::Length, message)),
                    },
                }
            }
        }
    }

    /// Continues at the end of the sequence: immediately if its logits are saved, otherwise after a decode.
    pub(super) fn continue_from_end(&mut self) {
        if self.step_logits.saved().is_some() {
            self.begin_step();
        } else {
            let last = self.sequence.len() - 1;
            self.sequence.decode_from(last);
            self.state = RunState::Decode { outputs_from: last };
            self.sampler.prepare();
        }
    }

    /// Begins a step with the logits at the end of the sequence: records the `ForwardPass` event.
    pub(super) fn begin_step(&mut self) {
        let step = self.budget.step() + 1;
        if !self.budget.permits(step) {
            return self.finish_at_last_step();
        }
        if self.budget.max_tokens() == 0 {
            return self.finish(FinishReason::Length);
        }
        self.budget.advance_to(step);
        self.step_logits.begin_step();
        let Self { event_buffer, sequence, view, step_logits, note, .. } = self;
        let order = event_buffer.event(EventType::ForwardPass, step, |event| {
            event.input_text = Some(tail_text(&view.vocabulary, sequence.tokens()));
            event.measured = Some(Box::new(Measurements {
                position: Some(sequence.len() as u32),
                entropy: step_logits.distribution().map(|distribution| distribution.entropy),
                evicted: sequence.take_unreported_eviction(),
                model: step_logits.top().to_vec(),
                lens: step_logits.lens().cloned().map(Box::new),
                note: note.take(),
                ..Measurements::default()
            }));
        });
        self.attention.assign_event(order);
        self.state = RunState::Dispatching(DispatchedEvent::new(EventType::ForwardPass, order, step));
    }

    fn sample(&mut self, new_logits: Option<&[f32]>, candidates: &mut Candidates) {
        let Self { step_logits, sampler, sequence, view, .. } = self;
        let (logits, temperature) = (step_logits.logits(new_logits), step_logits.temperature());
        let (draw, redraws) = match sampler.draw(logits, sequence.tokens(), temperature, &view.vocabulary, candidates) {
            Ok(draw) => draw,
            Err(message) => {
                let fault = Some(Fault::Request);
                return self.finish(EndReason { fault, ..EndReason::new(FinishReason::Error, message) });
            }
        };
        let raw = self.step_logits.raw(new_logits);
        let distribution = self.step_logits.distribution().unwrap_or_else(|| TokenDistribution::new(raw));
        let measured = self.measurer.measure(distribution, raw, draw.token);
        let recorded = self.event_buffer.is_recorded();
        let after_mods = self.step_logits.edited().filter(|_| recorded).map(|edited| {
            let distribution = self.step_logits.edited_distribution(edited);
            self.measurer.top(edited, distribution)
        });
        let after_sampler = if recorded { self.measurer.after_sampler(candidates, &draw) } else { Vec::new() };
        let client_top = self.request.report.after_sampler.then(|| self.measurer.after_sampler(candidates, &draw));
        let (step, position) = (self.budget.step(), self.sequence.len() as u32);
        let drafted = self.step_logits.take_drafted();
        let order = self.event_buffer.event(EventType::Sampled, step, |event| {
            event.sampled_token = Some(draw.token);
            event.token_text = Some(measured.text.clone());
            event.measured = Some(Box::new(Measurements {
                position: Some(position),
                tokens: vec![measured.clone()],
                after_mods: after_mods.unwrap_or_default(),
                after_sampler,
                stages: draw.stages.iter().map(|&(name, left)| StageCount { name: name.to_owned(), left }).collect(),
                drafted,
                redraws,
                ..Measurements::default()
            }));
        });
        self.step_logits.set_drawn(measured, client_top);
        self.state = RunState::Dispatching(DispatchedEvent::new(EventType::Sampled, order, step));
    }

    fn append_drawn(&mut self) {
        let Some((drawn, top)) = self.step_logits.take_drawn() else { return self.continue_from_end() };
        self.step_logits.discard_end();
        self.attention.push_drawn();
        self.sequence.push(drawn.token);
        self.record_added(vec![drawn], Some(top), false, self.budget.step());
    }

    /// Processes tokens that were appended to the sequence: updates text, sampler and constraint, and records the
    /// `Added` event. `top` are the most probable tokens at the position of a single drawn token.
    pub(super) fn record_added(
        &mut self,
        mut tokens: Vec<TokenMeasurement>,
        top: Option<Vec<Alternative>>,
        forced: bool,
        step: u32,
    ) {
        self.timing.mark_token();
        self.budget.update_longest(self.sequence.answer_len(), step);
        let note = self.process_tokens(&mut tokens, forced);
        let stopped_by = self.answer.text().stopped_by();
        let ends_generation = tokens.last().is_some_and(|measured| self.view.ends_answer(measured.token));
        let position = self.sequence.len() - tokens.len();
        let evicted = self.sequence.take_unreported_eviction();
        let order = self.event_buffer.event(EventType::Added, step, |event| {
            event.added_tokens = Some(tokens.iter().map(|measured| measured.token).collect());
            event.added_token_count = Some(tokens.len() as i32);
            event.forced = Some(forced);
            event.measured = Some(Box::new(Measurements {
                position: Some(position as u32),
                tokens: tokens.clone(),
                stopped_by,
                evicted,
                note,
                ends_generation,
                ..Measurements::default()
            }));
        });
        (self.added.count, self.added.forced) = (tokens.len(), forced);
        if !self.dispatch.is_empty() {
            self.added.logprobs.clear();
            self.added.logprobs.extend(tokens.iter().map(|measured| measured.logprob));
        }
        self.attention.queue(tokens.len());
        self.answer.queue(tokens, top);
        self.state = RunState::Dispatching(DispatchedEvent::new(EventType::Added, order, step));
    }

    /// Updates text, reasoning, sampler and constraint with the appended tokens, and sets the texts of the tokens.
    /// Returns a note for the trace.
    pub(super) fn process_tokens(&mut self, tokens: &mut [TokenMeasurement], forced: bool) -> Option<String> {
        for measured in &mut *tokens {
            let hidden = self.is_hidden(measured.token);
            let vocabulary = &self.view.vocabulary;
            let text = self.answer.push(vocabulary.piece(measured.token), hidden);
            measured.text = if hidden { vocabulary.decode(&[measured.token]) } else { text };
            measured.text = without_nul(std::mem::take(&mut measured.text));
        }
        let reasoning_note = self.update_reasoning(tokens, forced);
        self.accept_tokens(tokens).or(reasoning_note)
    }

    /// Updates sampler and constraint with the appended tokens. Returns a note if the constraint does not permit a
    /// token. Such a token was forced by a mod, and is kept.
    fn accept_tokens(&mut self, tokens: &[TokenMeasurement]) -> Option<String> {
        let mut note = None;
        let before = self.sequence.answer_len() - tokens.len();
        for (index, measured) in tokens.iter().enumerate() {
            let ends = self.view.ends_answer(measured.token);
            let piece = self.view.vocabulary.piece(measured.token);
            if !self.sampler.accept(measured.token, piece, before + index + 1, ends) {
                note = Some(format!(
                    "{:?} at position {} is not permitted by the request's `{}`; the constraint is suspended while the token remains",
                    measured.text,
                    self.sequence.len() - tokens.len() + index,
                    self.request.constraint.as_ref().map_or("constraint", |constraint| &constraint.field),
                ));
            }
        }
        note
    }

    /// Updates the reasoning budget with the appended tokens. Returns a note if they are the tokens that end the
    /// reasoning.
    fn update_reasoning(&mut self, tokens: &[TokenMeasurement], forced: bool) -> Option<String> {
        let reasoning = self.reasoning.as_mut()?;
        let note = (forced && reasoning.closing_tokens().is_some()).then(|| reasoning.note());
        for measured in tokens {
            reasoning.push(self.view.vocabulary.piece(measured.token));
        }
        note
    }

    /// Sends the client the text that is not held back.
    pub(super) fn send_text(&mut self) {
        let ends = self.unsent_ends_generation();
        let delta = self.answer.take_sendable(self.dispatch.holdback(), self.sequence.answer_len(), ends);
        self.send(delta);
    }

    /// Sends the client all text that was held back.
    pub(super) fn send_remaining(&mut self) {
        let ends = self.unsent_ends_generation();
        let delta = self.answer.take_remaining(self.sequence.answer_len(), ends);
        self.send(delta);
    }

    /// Discards all text that was held back: the client must not receive it.
    pub(super) fn discard_unsent(&mut self) {
        self.answer.discard_unsent(self.sequence.answer_len());
        self.attention.truncate(0);
    }

    fn send(&mut self, delta: Option<TextDelta>) {
        let Some(mut delta) = delta else { return };
        if self.request.report.per_token {
            delta.rows = self.attention.take(delta.tokens.len());
        }
        self.outbox.push(Output::Text(delta));
    }

    fn unsent_ends_generation(&self) -> bool {
        self.answer.last_unsent().is_some_and(|token| self.view.ends_answer(token))
    }

    fn is_hidden(&self, token: TokenId) -> bool {
        (self.view.vocabulary.is_control(token) && !self.request.visible_tokens.contains(&token))
            || self.view.ends_answer(token)
    }
}

/// Returns the last characters of a sequence.
fn tail_text(vocabulary: &crate::model::Vocabulary, sequence: &[TokenId]) -> String {
    // Decodes only the necessary tokens from the end: a character has up to 4 bytes.
    let mut bytes = 0;
    let mut from = sequence.len();
    while from > 0 && bytes < 4 * INPUT_TEXT_CHARS {
        from -= 1;
        bytes += vocabulary.piece(sequence[from]).len();
    }
    let text = vocabulary.decode(&sequence[from..]);
    let skip = text.chars().count().saturating_sub(INPUT_TEXT_CHARS);
    without_nul(text.chars().skip(skip).collect())
}
