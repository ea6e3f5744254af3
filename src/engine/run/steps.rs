//! Events of a step: records each event, and sets the state in which it is dispatched to the mods. Also releases the text
//! of appended tokens.

use super::dispatch::DispatchedEvent;
use super::finish::EndReason;
use super::{Run, RunState};
use crate::engine::output::{Output, TextDelta};
use crate::events::{Alternative, EventType, Fault, FinishReason, Measurements, StageCount, TokenId, TokenMeasurement};
use crate::model::distribution::TokenDistribution;
use crate::model::llama::Candidates;
use crate::model::without_nul;

/// Maximum characters of the sequence's end that are recorded with a `ForwardPass` event.
const INPUT_TEXT_CHARS: usize = 70;

impl Run {
    /// Enters the `ForwardPass` event, which begins a step with the logits at the end of the sequence.
    pub(super) fn enter_forward_pass(&mut self) {
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

    /// Samples a token and enters the `Sampled` event.
    pub(super) fn sample(&mut self, new_logits: Option<&[f32]>, candidates: &mut Candidates) {
        let Self { step_logits, sampler, sequence, view, .. } = self;
        let (logits, temperature) = (step_logits.edited_or_model_logits(new_logits), step_logits.temperature());
        let (draw, redraws) = match sampler.draw(logits, sequence.tokens(), temperature, &view.vocabulary, candidates) {
            Ok(draw) => draw,
            Err(message) => {
                let fault = Some(Fault::Request);
                return self.finish(EndReason { fault, ..EndReason::new(FinishReason::Error, message) });
            }
        };
        let raw = self.step_logits.model_logits(new_logits);
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
                stages: draw.stages.iter().map(|&(name, left)| StageCount { name: name.into(), left }).collect(),
                drafted,
                redraws,
                ..Measurements::default()
            }));
        });
        self.step_logits.set_drawn(measured, client_top);
        self.state = RunState::Dispatching(DispatchedEvent::new(EventType::Sampled, order, step));
    }

    /// Appends the sampled token and enters the `Added` event.
    pub(super) fn append_drawn(&mut self) {
        let Some((drawn, top)) = self.step_logits.take_drawn() else { return self.continue_from_end() };
        self.step_logits.discard_model_logits();
        self.attention.push_drawn();
        self.sequence.push(drawn.token);
        self.enter_added(vec![drawn], Some(top), None, self.budget.step());
    }

    /// Enters the `Added` event of tokens that were appended to the sequence. `top` are the most probable tokens at the
    /// position of a single drawn token; `None` for forced tokens. `note` is recorded with forced tokens.
    pub(super) fn enter_added(
        &mut self,
        mut tokens: Vec<TokenMeasurement>,
        top: Option<Vec<Alternative>>,
        note: Option<String>,
        step: u32,
    ) {
        self.timing.mark_token();
        self.budget.update_longest(self.sequence.answer_len(), step);
        let forced = top.is_none();
        let note = self.process_tokens(&mut tokens).or(note);
        let order = self.record_added_event(&tokens, forced, note, step);
        (self.added.count, self.added.forced) = (tokens.len(), forced);
        if !self.dispatch.is_empty() {
            self.added.logprobs.clear();
            self.added.logprobs.extend(tokens.iter().map(|measured| measured.logprob));
        }
        self.attention.queue(tokens.len());
        self.answer.queue(tokens, top);
        self.state = RunState::Dispatching(DispatchedEvent::new(EventType::Added, order, step));
    }

    fn record_added_event(
        &mut self,
        tokens: &[TokenMeasurement],
        forced: bool,
        note: Option<String>,
        step: u32,
    ) -> i32 {
        let text = self.answer.text();
        // A stop string in tokens that mods will remove does not end the run.
        let is_stopped = text.is_stopped(self.dispatch.kept_tokens(self.sequence.answer_len()));
        let stopped_by = is_stopped.then(|| text.stopped_by()).flatten();
        let ends_generation = tokens.last().is_some_and(|measured| self.view.ends_answer(measured.token));
        let position = self.sequence.len() - tokens.len();
        let evicted = self.sequence.take_unreported_eviction();
        self.event_buffer.event(EventType::Added, step, |event| {
            event.added_tokens = Some(tokens.iter().map(|measured| measured.token).collect());
            event.added_token_count = Some(tokens.len() as i32);
            event.forced = Some(forced);
            event.measured = Some(Box::new(Measurements {
                position: Some(position as u32),
                tokens: tokens.to_vec(),
                stopped_by,
                evicted,
                note,
                ends_generation,
                ..Measurements::default()
            }));
        })
    }

    /// Updates text, reasoning, sampler and constraint with the appended tokens, and sets the texts of the tokens.
    /// Returns a note if the constraint does not permit a token.
    pub(super) fn process_tokens(&mut self, tokens: &mut [TokenMeasurement]) -> Option<String> {
        for measured in &mut *tokens {
            let hidden = self.is_hidden(measured.token);
            let vocabulary = &self.view.vocabulary;
            let piece = vocabulary.piece(measured.token);
            let text = self.answer.push(piece, hidden);
            if let Some(reasoning) = &mut self.reasoning {
                reasoning.push(piece);
            }
            measured.text = if hidden { vocabulary.decode(&[measured.token]) } else { text };
            measured.text = without_nul(std::mem::take(&mut measured.text));
        }
        self.accept_tokens(tokens)
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

    /// Releases the text that is not held back. The tokens that mods will remove are also held back: their number grows
    /// with each token, but a mod's holdback changes only when the mod is called.
    pub(super) fn release_text(&mut self) {
        let generated = self.sequence.answer_len();
        let holdback = self.dispatch.holdback().max(generated - self.dispatch.kept_tokens(generated));
        let ends = self.unreleased_ends_generation();
        let delta = self.answer.take_releasable(holdback, ends);
        self.release(delta);
    }

    /// Releases all text that was held back.
    pub(super) fn release_remaining(&mut self) {
        let ends = self.unreleased_ends_generation();
        let delta = self.answer.take_remaining(ends);
        self.release(delta);
    }

    /// Moves a delta to the outbox, from which the scheduler sends it.
    fn release(&mut self, delta: Option<TextDelta>) {
        let Some(mut delta) = delta else { return };
        delta.rows = self.attention.take(delta.tokens.len());
        self.outbox.push(Output::Text(delta));
    }

    fn unreleased_ends_generation(&self) -> bool {
        self.answer.last_unreleased().is_some_and(|token| self.view.ends_answer(token))
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
