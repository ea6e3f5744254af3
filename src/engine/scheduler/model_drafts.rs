//! Drafts of the draft model. It first decodes the tokens that it lacks, then drafts for several runs in shared
//! decodes.
//!
//! In each batch, the draft model decodes at most one physical batch of missing tokens, such as those of a new prompt,
//! so that the main model's runs are not delayed for long. Each run pays for the time of the draft model, except for
//! the tokens that it had when it got its slot.

use super::batch::PlannedPart;
use super::run_slots::RunSlots;
use super::scheduled_run::ScheduledRun;
use crate::engine::speculation::account::DecodeTimes;
use crate::engine::speculation::draft_context::{CatchUpPart, DraftContext, DraftRequest, MAX_STEP_TOKENS};
use crate::events::TokenId;
use crate::model::ModelError;
use std::time::Instant;

/// A run that needs a draft of the draft model.
pub struct ModelDraftRequest {
    /// Index of the run's part in the batch.
    pub part: usize,
    /// Slot of the run.
    pub slot: usize,
    /// Maximum tokens of the draft; at least 1.
    pub max: usize,
    /// Minimum tokens of the draft; a shorter one is not used.
    pub min: usize,
    /// Minimum probability of each token.
    pub min_probability: f32,
}

/// A drafter that uses a draft model.
pub struct ModelDrafter<'model> {
    context: DraftContext<'model>,
    /// True if runs draft only what their accounts can pay for.
    adaptive: bool,
}

impl<'model> ModelDrafter<'model> {
    /// Creates the drafter.
    pub fn new(context: DraftContext<'model>, adaptive: bool) -> Self {
        Self { context, adaptive }
    }

    /// Parks the threads until the next decode.
    pub fn park_threads(&self) {
        self.context.park_threads();
    }

    /// Drafts for the next decode, which has `runs` runs. Returns each draft with the index of its part in the batch. A
    /// run whose tokens the model has not decoded completely gets no draft.
    ///
    /// # Errors
    /// llama.cpp could not decode; the drafter is then unusable.
    pub fn draft(
        &mut self,
        requests: Vec<ModelDraftRequest>,
        slots: &mut RunSlots,
        times: &mut DecodeTimes,
        runs: usize,
    ) -> Result<Vec<(usize, Vec<TokenId>)>, ModelError> {
        let requests = self.catch_up(requests, slots, times, runs)?;
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let start = Instant::now();
        let drafts = {
            let request = |request: &ModelDraftRequest| {
                let &ModelDraftRequest { slot, max, min_probability, .. } = request;
                let tokens = slots.get(slot).map_or(&[][..], |scheduled| scheduled.run.sequence().tokens());
                DraftRequest { slot, tokens, max, min_probability }
            };
            self.context.draft(&requests.iter().map(request).collect::<Vec<_>>())?
        };
        let steps = drafts.iter().map(|draft| draft.steps).sum();
        let step_cost = times.add_steps(runs, steps, start.elapsed().as_secs_f64());
        let mut used = Vec::new();
        for (request, draft) in requests.into_iter().zip(drafts) {
            if let Some(scheduled) = slots.get_mut(request.slot) {
                scheduled.speculation.account.charge_steps(draft.steps as f64 * step_cost);
            }
            if draft.tokens.len() >= request.min {
                used.push((request.part, draft.tokens));
            }
        }
        Ok(used)
    }

    /// Decodes the tokens that the draft model lacks. Returns the requests of runs that have few enough missing tokens
    /// to draft.
    fn catch_up(
        &mut self,
        requests: Vec<ModelDraftRequest>,
        slots: &mut RunSlots,
        times: &mut DecodeTimes,
        runs: usize,
    ) -> Result<Vec<ModelDraftRequest>, ModelError> {
        let mut room = self.context.max_catch_up();
        let token_cost = times.catch_up_cost(runs);
        let (mut complete, mut parts) = (Vec::new(), Vec::new());
        for request in requests {
            let Some(scheduled) = slots.get(request.slot) else { continue };
            let Some(missing) = self.context.missing(request.slot, scheduled.run.sequence().tokens()) else { continue };
            if missing <= MAX_STEP_TOKENS {
                complete.push(request);
                continue;
            }
            // The first draft step decodes the last missing token.
            let (wanted, part) = (missing - 1, room.min(missing - 1));
            if part == 0 || !self.can_pay(scheduled, wanted, token_cost) {
                continue;
            }
            room -= part;
            parts.push(PlannedPart { slot: request.slot, tokens: part });
            if missing - part <= MAX_STEP_TOKENS {
                complete.push(request);
            }
        }
        if !parts.is_empty() {
            self.decode_missing(&parts, slots, times, runs)?;
        }
        Ok(complete)
    }

    /// Returns true if a run can pay for decoding `tokens` tokens.
    fn can_pay(&self, scheduled: &ScheduledRun, tokens: usize, token_cost: f64) -> bool {
        let charged = tokens.saturating_sub(scheduled.speculation.free_tokens);
        !self.adaptive || scheduled.speculation.account.can_pay(charged as f64 * token_cost)
    }

    /// Decodes the next missing tokens of runs, and charges the runs.
    fn decode_missing(
        &mut self,
        parts: &[PlannedPart],
        slots: &mut RunSlots,
        times: &mut DecodeTimes,
        runs: usize,
    ) -> Result<(), ModelError> {
        let start = Instant::now();
        let part = |&PlannedPart { slot, tokens: count }: &PlannedPart| {
            let tokens = slots.get(slot).map_or(&[][..], |scheduled| scheduled.run.sequence().tokens());
            CatchUpPart { slot, tokens, count }
        };
        self.context.catch_up(&parts.iter().map(part).collect::<Vec<_>>())?;
        let total = parts.iter().map(|part| part.tokens).sum();
        let token_cost = times.add_catch_up(runs, total, start.elapsed().as_secs_f64());
        for &PlannedPart { slot, tokens } in parts {
            let Some(scheduled) = slots.get_mut(slot) else { continue };
            let free = tokens.min(scheduled.speculation.free_tokens);
            scheduled.speculation.free_tokens -= free;
            scheduled.speculation.account.charge_catch_up((tokens - free) as f64 * token_cost);
        }
        Ok(())
    }
}
