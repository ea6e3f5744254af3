//! Speculative decoding in the batches: drafts for generating runs, whose length depends on measured times.

use super::batch::{BatchPart, PlannedPart};
use super::model_drafts::{ModelDraftRequest, ModelDrafter};
use super::run_slots::RunSlots;
use super::scheduled_run::ScheduledRun;
use crate::engine::kv::slots::KvSlots;
use crate::engine::options::{DraftLimits, EngineOptions, SpeculationOptions};
use crate::engine::recording::Recording;
use crate::engine::run::Run;
use crate::engine::speculation::account::DecodeTimes;
use crate::engine::speculation::draft_context::DraftContext;
use crate::events::{TokenId, is_image_token};
use std::time::Instant;

/// Maximum drafted tokens of a run that captures attention, since each row waits in memory until it is recorded.
const MAX_CAPTURED_DRAFT: usize = 4;

/// Drafter of all runs.
pub struct Drafter<'model> {
    is_enabled: bool,
    options: SpeculationOptions,
    /// Maximum tokens of a batch with drafts.
    max_tokens: usize,
    times: DecodeTimes,
    model: Option<ModelDrafter<'model>>,
}

/// Limits of a run's draft.
struct RunDraftLimits {
    /// Maximum tokens: the lowest limit of options, request, batch and answer.
    max_tokens: usize,
    /// Minimum tokens, except for a draft of the maximum length.
    min_tokens: usize,
    min_probability: f32,
    captures_attention: bool,
}

impl<'model> Drafter<'model> {
    /// Creates the drafter, with the context of the draft model if there is one. `can_truncate` is true if rejected tokens
    /// can be removed from the KV cache.
    pub fn new(options: &EngineOptions, context: Option<DraftContext<'model>>, can_truncate: bool) -> Self {
        Self {
            is_enabled: options.speculation.is_enabled() && can_truncate,
            options: options.speculation,
            max_tokens: options.ubatch_size.min(options.batch_size) as usize,
            times: DecodeTimes::default(),
            model: context.map(|context| ModelDrafter::new(context, options.speculation.adaptive)),
        }
    }

    /// Returns a draft for each of `parts`. Batches that contain prompts get no drafts, because their decode time does
    /// not show the cost of a draft. `capturing_runs` is the number of runs that capture attention.
    pub fn draft(
        &mut self,
        parts: &[PlannedPart],
        slots: &mut RunSlots,
        recording: &Recording,
        capturing_runs: usize,
    ) -> Vec<Vec<TokenId>> {
        let mut drafts = vec![Vec::new(); parts.len()];
        if !self.is_enabled || parts.iter().any(|part| part.tokens != 1) {
            return drafts;
        }
        let Some(token_cost) = self.times.token_cost(parts.len()).or((!self.options.adaptive).then_some(0.0)) else {
            return drafts;
        };
        let mut room = self.max_tokens.saturating_sub(parts.len());
        let mut rows = capturing_runs;
        let mut requests = Vec::new();
        for (part, (&PlannedPart { slot, .. }, draft)) in parts.iter().zip(&mut drafts).enumerate() {
            let Some(scheduled) = slots.get_mut(slot) else { continue };
            let limits = self.limits_of(&scheduled.run, room);
            if limits.max_tokens == 0
                || limits.captures_attention && !recording.has_room_for_attention(rows + limits.max_tokens)
            {
                continue;
            }
            *draft = self.ngram_draft(scheduled, &limits, token_cost);
            let mut reserved = draft.len();
            // A draft model does not see images.
            if draft.is_empty() && self.model.is_some() && scheduled.run.request().images.is_empty() {
                let cost = token_cost + self.times.step_cost(parts.len(), token_cost);
                let tokens = self.affordable(scheduled, cost).min(limits.max_tokens);
                if tokens > 0 {
                    let min = limits.min_tokens.min(tokens);
                    requests.push(ModelDraftRequest {
                        part,
                        slot,
                        max: tokens,
                        min,
                        min_probability: limits.min_probability,
                    });
                }
                reserved = tokens;
            }
            room -= reserved;
            rows += if limits.captures_attention { reserved } else { 0 };
        }
        for (part, draft) in self.model_drafts(requests, slots, parts.len()) {
            drafts[part] = draft;
        }
        drafts
    }

    /// Returns the limits of a run's draft, if the batch has room for `room` tokens.
    fn limits_of(&self, run: &Run, room: usize) -> RunDraftLimits {
        let options = &self.options;
        let DraftLimits { max, min, min_probability } = run.request().drafts;
        let limit = max.map_or(options.max_draft, |max| SpeculationOptions::MAX_DRAFT.min(max as usize));
        let captures_attention = run.request().attention;
        let limit = if captures_attention { limit.min(MAX_CAPTURED_DRAFT) } else { limit };
        RunDraftLimits {
            max_tokens: limit.min(run.max_draft()).min(room),
            min_tokens: min.map_or(options.min_draft, |min| min as usize),
            min_probability: min_probability.unwrap_or(options.min_probability),
            captures_attention,
        }
    }

    /// Returns the number of tokens that the account of a run can pay for.
    fn affordable(&self, scheduled: &mut ScheduledRun, token_cost: f64) -> usize {
        if self.options.adaptive { scheduled.speculation.account.max_draft(token_cost) } else { usize::MAX }
    }

    /// Returns a draft from earlier tokens of the run; empty if there is none.
    fn ngram_draft(&self, scheduled: &mut ScheduledRun, limits: &RunDraftLimits, token_cost: f64) -> Vec<TokenId> {
        if !self.options.drafter.uses_ngrams() {
            return Vec::new();
        }
        let tokens = self.affordable(scheduled, token_cost).min(limits.max_tokens);
        if tokens == 0 {
            return Vec::new();
        }
        let ScheduledRun { run, speculation, .. } = scheduled;
        let sequence = run.sequence_mut();
        let unchanged = sequence.take_unchanged();
        speculation.ngrams.update(sequence.tokens(), unchanged);
        let mut draft = speculation.ngrams.draft(sequence.tokens(), tokens);
        if let Some(image) = draft.iter().position(|&token| is_image_token(token)) {
            draft.truncate(image);
        }
        // A draft that has the maximum length is used, even if that is less than the minimum.
        if draft.len() < limits.min_tokens.min(tokens) { Vec::new() } else { draft }
    }

    /// Returns the drafts of the draft model with the numbers of their parts, before a decode of `runs` runs. Stops
    /// using the model if llama.cpp fails.
    fn model_drafts(
        &mut self,
        requests: Vec<ModelDraftRequest>,
        slots: &mut RunSlots,
        runs: usize,
    ) -> Vec<(usize, Vec<TokenId>)> {
        let Some(model) = self.model.as_mut().filter(|_| !requests.is_empty()) else { return Vec::new() };
        model.draft(requests, slots, &mut self.times, runs).unwrap_or_else(|error| {
            tracing::error!(%error, "draft model disabled: its decode failed");
            self.model = None;
            Vec::new()
        })
    }

    /// Parks the threads of the draft model until its next decode.
    pub fn park_threads(&self) {
        if let Some(model) = &self.model {
            model.park_threads();
        }
    }

    /// Measures a decode that started at `start`, and charges its runs for their drafts.
    pub fn charge(&mut self, parts: &[BatchPart], slots: &mut RunSlots, kv: &KvSlots<'_>, start: Instant) {
        if !self.is_enabled || parts.iter().any(|part| part.end - part.from != 1) {
            return;
        }
        // Reading logits waits for the GPU to finish.
        if let Some(&(index, _)) = parts.iter().find_map(|part| part.outputs.first()) {
            let _ = kv.logits(index);
        }
        let seconds = start.elapsed().as_secs_f64();
        let drafted: usize = parts.iter().map(|part| part.draft.len()).sum();
        let token_cost = if drafted == 0 {
            self.times.add_plain(parts.len(), seconds);
            None
        } else {
            self.times.add_drafted(parts.len(), drafted, seconds)
        };
        for part in parts {
            let Some(ScheduledRun { run, speculation, .. }) = slots.get_mut(part.slot) else { continue };
            if part.draft.is_empty() {
                if drafted == 0 {
                    speculation.account.add_plain();
                }
                continue;
            }
            run.count_draft(part.draft.len());
            speculation.account.charge_draft(part.draft.len(), token_cost.unwrap_or_default());
        }
    }
}
