//! Choice of the next token: the sampler of a run together with its grammar constraint, whose states both depend on the
//! generated tokens.

use crate::events::{StageCount, TokenId, TokenMeasurement};
use crate::model::Vocabulary;
use crate::model::grammar::{AcceptResult, GrammarMatcher, TokenMask};
use crate::model::llama::{Candidates, Draw, Sampler, SamplerInput, SamplingParams};

/// Sampler of a run, with its constraint.
pub struct TokenSampler {
    sampler: Sampler,
    constraint: Option<GrammarMatcher>,
}

impl TokenSampler {
    /// Creates the sampler of a run that has generated nothing.
    pub fn new(sampler: Sampler, constraint: Option<GrammarMatcher>) -> Self {
        Self { sampler, constraint }
    }

    /// Draws a token that the constraint permits. Returns it with the number of draws before it, whose tokens the
    /// constraint did not permit.
    ///
    /// # Errors
    /// No token can be drawn; the message gives the reason.
    pub fn draw(
        &mut self,
        logits: &[f32],
        sequence: &[TokenId],
        temperature: Option<f32>,
        vocabulary: &Vocabulary,
        candidates: &mut Candidates,
    ) -> Result<(Draw, u32), String> {
        let Self { sampler, constraint } = self;
        let mask = match constraint {
            Some(constraint) => constraint.mask()?,
            None => None,
        };
        let allowed = mask.as_deref().map(TokenMask::as_slice);
        // A token can contain the end of a trigger and text after it that the triggered constraint does not permit.
        // Such tokens are banned in this copy of the logits, and the draw is repeated.
        let mut masked: Vec<f32> = Vec::new();
        let mut redraws = 0;
        loop {
            let logits = if masked.is_empty() { logits } else { &masked };
            let input = SamplerInput { logits, allowed, sequence, temperature };
            let Some(draw) = sampler.sample(&input, candidates) else {
                let remaining = if mask.is_some() {
                    "no token that the constraint permits"
                } else {
                    "no token with a probability above 0"
                };
                return Err(format!("no token can be drawn: mods, bans and biases leave {remaining}"));
            };
            let piece = vocabulary.piece(draw.token);
            if constraint.as_ref().is_none_or(|constraint| constraint.permits(draw.token, piece)) {
                return Ok((draw, redraws));
            }
            if masked.is_empty() {
                masked = logits.to_vec();
            }
            masked[draw.token as usize] = f32::NEG_INFINITY;
            redraws += 1;
        }
    }

    /// Replaces the sampler with one in its initial state.
    pub fn restart(&mut self, sampler: Sampler) {
        self.sampler = sampler;
    }

    /// Returns true if the state of the sampler can be computed from a recorded draw after `redraws` others in its step.
    pub fn can_repeat_draw(&self, redraws: u32) -> bool {
        self.sampler.can_repeat_draw(redraws)
    }

    /// Updates the state of the sampler as if it had made a recorded draw after `redraws` others in its step.
    pub fn repeat_draw(&mut self, drawn: &TokenMeasurement, prob: Option<f32>, stages: &[StageCount], redraws: u32) {
        for _ in 0..=redraws {
            self.sampler.repeat_draw(drawn.token, prob, stages);
        }
    }

    /// Updates sampler and constraint with an appended token; the answer then has `generated` tokens. Returns false if
    /// the constraint does not permit the token, which a mod forced.
    pub fn accept(&mut self, token: TokenId, piece: &[u8], generated: usize, ends_generation: bool) -> bool {
        self.sampler.accept(token, generated);
        let Some(constraint) = &mut self.constraint else { return true };
        if ends_generation {
            constraint.end();
            return true;
        }
        constraint.accept(token, piece) != AcceptResult::Rejected
    }

    /// Returns to the state after the first `generated` tokens of the answer. The `count` tokens after them were
    /// removed.
    pub fn rewind(&mut self, generated: usize, count: usize) {
        self.sampler.rewind(generated);
        if let Some(constraint) = &mut self.constraint {
            constraint.rewind(count);
        }
    }

    /// Computes the constraint's mask for the next token in the background, while the model decodes.
    pub fn prepare(&self) {
        if let Some(constraint) = &self.constraint {
            constraint.prepare();
        }
    }

    /// Returns true if the constraint permits nothing more.
    pub fn is_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(GrammarMatcher::is_complete)
    }

    /// Replaces the sampler. The random number generator keeps its state unless the seed changes.
    pub fn replace(&mut self, mut sampler: Sampler, before: &SamplingParams, after: &SamplingParams) {
        sampler.inherit_state(&mut self.sampler, before, after);
        self.sampler = sampler;
    }
}
