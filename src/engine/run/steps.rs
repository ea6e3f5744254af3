//! Steps of a run that no mod redirects: forward pass, sampling, append.

use crate::engine::output::{Output, TextDelta};
use crate::engine::run::dispatch::Dispatch;
use crate::engine::run::distribution::TokenDistribution;
use crate::engine::run::reasoning::ReasoningTracker;
use crate::engine::run::{Run, RunState, distribution};
use crate::events::{Alternative, EventType, Fault, FinishReason, Measurements, StageCount, TokenId, TokenMeasurement};
use crate::model::grammar::{AcceptResult, TokenMask};
use crate::model::llama::{Candidates, Draw, SamplerInput};
use crate::model::printable;
use std::sync::Arc;

/// Characters of the sequence recorded with a `ForwardPass` event.
const INPUT_TEXT_CHARS: usize = 70;

impl Run {
    /// Continues after an event for which no mod changed control.
    pub fn advance(&mut self, event: EventType, fresh: Option<&[f32]>, candidates: &mut Candidates) {
        match event {
            EventType::Prefilled => {
                let whole_prompt = self.request.report.prompt_probabilities;
                let outputs_from = if whole_prompt { 0 } else { self.sequence.len() - 1 };
                self.state = RunState::Decode { outputs_from };
            }
            EventType::ForwardPass => self.sample(fresh, candidates),
            EventType::Sampled => self.append_drawn(),
            EventType::Added => {
                self.send_text();
                let closing_tokens =
                    self.thinking.as_ref().and_then(ReasoningTracker::closing_tokens).map(<[TokenId]>::to_vec);
                match (self.end_reason(), closing_tokens) {
                    (Some((reason, message)), _) => self.finish(reason, message, None),
                    (None, Some(closing_tokens)) => self.force(closing_tokens, self.step + 1),
                    (None, None) => match self.make_room(1) {
                        Ok(()) => self.continue_from_end(),
                        Err(message) => self.finish(FinishReason::Length, Some(message), None),
                    },
                }
            }
        }
    }

    /// Continues at the end of the sequence: immediately if its logits are known, else after a decode.
    pub fn continue_from_end(&mut self) {
        if self.saved_logits_valid {
            self.begin_step();
        } else {
            let last = self.sequence.len() - 1;
            self.kv_len = self.kv_len.min(last);
            self.state = RunState::Decode { outputs_from: last };
            if let Some(constraint) = &self.constraint {
                constraint.prepare();
            }
        }
    }

    /// Begins a step: records the `ForwardPass` event for the logits at the end of the sequence.
    pub fn begin_step(&mut self) {
        if self.step >= self.request.limits.max_steps {
            return self.finish_at_max_steps();
        }
        if self.max_tokens == 0 {
            self.finish(FinishReason::Length, None, None);
            return;
        }
        self.step += 1;
        self.edited_logits = None;
        self.edited_distribution = None;
        self.draw_temperature = None;
        let Self { event_buffer, sequence, view, distribution, top, step, evictions, note, .. } = self;
        let order = event_buffer.event(EventType::ForwardPass, *step, |event| {
            event.input_text = Some(tail_text(&view.vocabulary, sequence));
            event.measured = Some(Box::new(Measurements {
                position: Some(sequence.len() as u32),
                entropy: distribution.map(|distribution| distribution.entropy),
                evicted: evictions.unreported.take(),
                model: top.clone(),
                note: note.take(),
                ..Measurements::default()
            }));
        });
        // If a mod removed a sampled token, the same row leads to the next one. It stays with the first event.
        if self.attention_ready.is_none()
            && let Some(captured) = &self.attention
        {
            self.attention_ready = Some((order, Arc::clone(captured)));
        }
        self.state = RunState::Dispatching(Dispatch::new(EventType::ForwardPass, order, self.step));
    }

    fn sample(&mut self, fresh: Option<&[f32]>, candidates: &mut Candidates) {
        let draw = match self.draw(fresh.unwrap_or(&[]), candidates) {
            Ok(draw) => draw,
            Err(message) => {
                self.fault = Some(Fault::Request);
                return self.finish(FinishReason::Error, Some(message), None);
            }
        };
        let raw = if self.saved_logits_valid { self.saved_logits.as_slice() } else { fresh.unwrap_or(&[]) };
        let measured = self.measure(self.distribution.unwrap_or_else(|| TokenDistribution::new(raw)), raw, draw.token);
        let after_mods = self.edited_logits.as_deref().filter(|_| self.event_buffer.is_recorded()).map(|edited| {
            let distribution = self.edited_distribution.unwrap_or_else(|| TokenDistribution::new(edited));
            distribution::top(edited, self.request.alternatives)
                .into_iter()
                .map(|(token, logit)| self.alternative(token, distribution.prob(logit)))
                .collect()
        });
        let after_sampler =
            if self.event_buffer.is_recorded() { self.after_sampler(candidates, &draw) } else { Vec::new() };
        if self.request.report.after_sampler {
            self.top = self.after_sampler(candidates, &draw);
        }
        let position = self.sequence.len() as u32;
        let order = self.event_buffer.event(EventType::Sampled, self.step, |event| {
            event.sampled_token = Some(draw.token);
            event.token_text = Some(measured.text.clone());
            event.measured = Some(Box::new(Measurements {
                position: Some(position),
                tokens: vec![measured.clone()],
                after_mods: after_mods.unwrap_or_default(),
                after_sampler,
                stages: draw.stages.iter().map(|&(name, left)| StageCount { name: name.to_owned(), left }).collect(),
                ..Measurements::default()
            }));
        });
        self.drawn = Some(measured);
        self.state = RunState::Dispatching(Dispatch::new(EventType::Sampled, order, self.step));
    }

    /// Draws a token that the constraint permits.
    fn draw(&mut self, fresh: &[f32], candidates: &mut Candidates) -> Result<Draw, String> {
        let Self {
            saved_logits,
            saved_logits_valid,
            edited_logits,
            constraint,
            sampler,
            sequence,
            view,
            draw_temperature,
            ..
        } = self;
        let logits = edited_logits.as_deref().unwrap_or(if *saved_logits_valid { saved_logits } else { fresh });
        let mask = match constraint {
            Some(constraint) => constraint.mask()?,
            None => None,
        };
        let allowed = mask.as_deref().map(TokenMask::as_slice);
        // Logits without tokens that complete a trigger but continue with text that the triggered constraint cannot
        // begin with.
        let mut without: Vec<f32> = Vec::new();
        loop {
            let logits = if without.is_empty() { logits } else { &without };
            let draft = SamplerInput { logits, allowed, sequence, temperature: *draw_temperature };
            let Some(draw) = sampler.sample(&draft, candidates) else {
                let left = if mask.is_some() {
                    "no token that the constraint permits"
                } else {
                    "no token with a probability above 0"
                };
                return Err(format!("no token can be drawn: mods, bans and biases leave {left}"));
            };
            let piece = view.vocabulary.piece(draw.token);
            if constraint.as_ref().is_none_or(|constraint| constraint.permits(draw.token, piece)) {
                return Ok(draw);
            }
            if without.is_empty() {
                without = logits.to_vec();
            }
            without[draw.token as usize] = f32::NEG_INFINITY;
        }
    }

    /// Returns the candidates of the sampling, always including the sampled token.
    fn after_sampler(&self, candidates: &Candidates, draw: &Draw) -> Vec<Alternative> {
        let mut top = candidates.top(self.request.alternatives);
        if !top.iter().any(|&(token, _)| token == draw.token) {
            top.push((draw.token, draw.prob));
        }
        top.into_iter().map(|(token, prob)| self.alternative(token, prob)).collect()
    }

    fn append_drawn(&mut self) {
        let Some(drawn) = self.drawn.take() else { return self.continue_from_end() };
        self.saved_logits_valid = false;
        self.token_attention.push_drawn(self.attention.take());
        self.sequence.push(drawn.token);
        let top = std::mem::take(&mut self.top);
        self.record_added(vec![drawn], vec![top], false, self.step);
    }

    /// Processes tokens that were appended to the sequence: updates text, sampler and constraint, and records the
    /// `Added` event.
    pub fn record_added(
        &mut self,
        mut tokens: Vec<TokenMeasurement>,
        tops: Vec<Vec<Alternative>>,
        forced: bool,
        step: u32,
    ) {
        if self.first_token_us.is_none() {
            self.first_token_us = Some(self.event_buffer.elapsed().as_micros() as u64);
        }
        for measured in &mut tokens {
            let hidden = self.is_hidden(measured.token);
            let vocabulary = &self.view.vocabulary;
            let text = self.output_text.push(vocabulary.piece(measured.token), hidden);
            measured.text = if hidden { vocabulary.decode(&[measured.token]) } else { text };
            measured.text = printable(std::mem::take(&mut measured.text));
        }
        let ended = self.update_reasoning(&tokens, forced);
        let note = self.accept_tokens(&tokens).or(ended);
        let stopped_by = self.output_text.stopped_by();
        let ends_generation = tokens.last().is_some_and(|measured| self.ends_generation(measured.token));
        let position = self.sequence.len() - tokens.len();
        let order = self.event_buffer.event(EventType::Added, step, |event| {
            event.added_tokens = Some(tokens.iter().map(|measured| measured.token).collect());
            event.added_token_count = Some(tokens.len() as i32);
            event.forced = Some(forced);
            event.measured = Some(Box::new(Measurements {
                position: Some(position as u32),
                tokens: tokens.clone(),
                stopped_by,
                note,
                ends_generation,
                ..Measurements::default()
            }));
        });
        self.last_added = (tokens.len(), forced);
        if !self.mods.is_empty() {
            self.last_added_logprobs.clear();
            self.last_added_logprobs.extend(tokens.iter().map(|measured| measured.logprob));
        }
        self.token_attention.added(tokens.len());
        let mut tops = tops.into_iter();
        self.unsent.extend(tokens.into_iter().map(|measured| (measured, tops.next().unwrap_or_default())));
        self.state = RunState::Dispatching(Dispatch::new(EventType::Added, order, step));
    }

    /// Updates sampler and constraint with the appended tokens. Returns a note if the constraint does not permit them:
    /// a mod forced them, and the mod wins.
    fn accept_tokens(&mut self, tokens: &[TokenMeasurement]) -> Option<String> {
        let mut note = None;
        let before = self.generated() - tokens.len();
        for (index, measured) in tokens.iter().enumerate() {
            self.sampler.accept(measured.token, before + index + 1);
            let ends = self.ends_generation(measured.token);
            let piece = self.view.vocabulary.piece(measured.token);
            let Some(constraint) = &mut self.constraint else { continue };
            if ends {
                constraint.end();
            } else if constraint.accept(measured.token, piece) == AcceptResult::Rejected {
                note = Some(format!(
                    "{:?} at position {} is not permitted by the request's {}; the constraint is suspended while the token remains",
                    measured.text,
                    self.sequence.len() - tokens.len() + index,
                    self.request.constraint.as_ref().map_or("constraint", |constraint| &constraint.field),
                ));
            }
        }
        note
    }

    /// Updates the count of reasoning tokens. Returns a note if the appended tokens end reasoning whose budget is used
    /// up.
    fn update_reasoning(&mut self, tokens: &[TokenMeasurement], forced: bool) -> Option<String> {
        let thinking = self.thinking.as_mut()?;
        let note = (forced && thinking.closing_tokens().is_some()).then(|| thinking.note());
        for measured in tokens {
            thinking.push(self.view.vocabulary.piece(measured.token));
        }
        note
    }

    /// Sends the client the text that is not held back.
    pub fn send_text(&mut self) {
        // Read on every call: a mod may know that what it watches for can no longer begin in the text so far.
        let holdback = self.mods.iter().map(|active| active.instance.holdback()).max().unwrap_or(0);
        if self.request.report.per_token {
            return self.send_tokens(holdback);
        }
        let text = self.output_text.take_sendable(holdback);
        self.send(text);
    }

    pub fn send(&mut self, text: String) {
        let unsent_from = self.generated() - self.unsent.len();
        let count = self.output_text.sent_tokens().saturating_sub(unsent_from);
        let tokens: Vec<_> = self.unsent.drain(..count.min(self.unsent.len())).collect();
        if !text.is_empty() || !tokens.is_empty() {
            self.outbox.push_back(Output::Text(TextDelta { text, tokens, ..TextDelta::default() }));
        }
    }

    /// Returns the number of generated tokens, including those evicted by a full context.
    pub fn generated(&self) -> usize {
        self.sequence.len() - self.prompt_len + self.evictions.generated
    }

    fn is_hidden(&self, token: TokenId) -> bool {
        (self.view.vocabulary.is_control(token) && !self.request.visible.contains(&token))
            || self.ends_generation(token)
    }

    pub fn measure(&self, distribution: TokenDistribution, logits: &[f32], token: TokenId) -> TokenMeasurement {
        let logit = usize::try_from(token).ok().and_then(|index| logits.get(index)).copied();
        TokenMeasurement {
            token,
            text: printable(self.view.vocabulary.decode(&[token])),
            logprob: logit.map(|logit| distribution.logprob(logit)).filter(|logprob| logprob.is_finite()),
            rank: logit.map(|_| distribution::rank(logits, token)),
            entropy: Some(distribution.entropy),
        }
    }

    pub fn alternative(&self, token: TokenId, prob: f32) -> Alternative {
        Alternative { token, text: printable(self.view.vocabulary.decode(&[token])), prob }
    }
}

/// Returns the last characters of a sequence.
fn tail_text(vocabulary: &crate::model::Vocabulary, sequence: &[TokenId]) -> String {
    // A token is rarely less than a character and usually several. Whole pieces are taken from the end until they
    // suffice.
    let mut bytes = 0;
    let mut from = sequence.len();
    while from > 0 && bytes < 4 * INPUT_TEXT_CHARS {
        from -= 1;
        bytes += vocabulary.piece(sequence[from]).len();
    }
    let text = vocabulary.decode(&sequence[from..]);
    let skip = text.chars().count().saturating_sub(INPUT_TEXT_CHARS);
    printable(text.chars().skip(skip).collect())
}
