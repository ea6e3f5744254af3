//! Speculative decoding in the batches: drafts for generating runs, whose length depends on measured times.

use super::active_run::ActiveRun;
use super::batch::BatchPart;
use super::slots::ActiveSlots;
use crate::engine::kv::slots::KvSlots;
use crate::engine::options::EngineOptions;
use crate::engine::recording::Recording;
use crate::engine::speculation::SpeculationOptions;
use crate::engine::speculation::account::DecodeTimes;
use crate::events::{TokenId, is_image_token};
use std::time::Instant;

/// Maximum drafted tokens of a run that captures attention, since each row waits in memory until it is recorded.
const MAX_CAPTURED_DRAFT: usize = 4;

/// Drafter of all runs.
pub struct Drafter {
    is_enabled: bool,
    options: SpeculationOptions,
    /// Maximum tokens of a batch with drafts.
    max_tokens: usize,
    times: DecodeTimes,
}

impl Drafter {
    /// Creates the drafter. `can_truncate` is true if rejected tokens can be removed from the KV cache.
    pub fn new(options: &EngineOptions, can_truncate: bool) -> Self {
        Self {
            is_enabled: options.speculation.is_enabled() && can_truncate,
            options: options.speculation,
            max_tokens: options.ubatch_size.min(options.batch_size) as usize,
            times: DecodeTimes::default(),
        }
    }

    /// Returns a draft for each of `parts`, which are slots and numbers of tokens. Batches with prompts get no drafts,
    /// since their time does not show the cost of a draft. `captures` is the number of runs that capture attention.
    pub fn draft(
        &self,
        parts: &[(usize, usize)],
        slots: &mut ActiveSlots,
        recording: &Recording,
        captures: usize,
    ) -> Vec<Vec<TokenId>> {
        let mut drafts = vec![Vec::new(); parts.len()];
        if !self.is_enabled || parts.iter().any(|&(_, tokens)| tokens != 1) {
            return drafts;
        }
        let options = self.options;
        let token_cost = match self.times.token_cost(parts.len()) {
            _ if !options.adaptive => 0.0,
            Some(token_cost) => token_cost,
            None => return drafts,
        };
        let mut room = self.max_tokens.saturating_sub(parts.len());
        let mut rows = captures;
        for (&(slot, _), draft) in parts.iter().zip(&mut drafts) {
            let Some(ActiveRun { run, speculation, .. }) = slots.get_mut(slot) else { continue };
            let limits = run.request().drafts;
            let limit = limits.max.map_or(options.max_draft, |max| SpeculationOptions::MAX_DRAFT.min(max as usize));
            let mut max = limit.min(run.max_draft()).min(room);
            if options.adaptive {
                max = max.min(speculation.account.max_draft(token_cost));
            }
            let captures_attention = run.request().attention;
            if captures_attention {
                max = max.min(MAX_CAPTURED_DRAFT);
                if !recording.has_room_for_attention(rows + max) {
                    continue;
                }
            }
            if max == 0 {
                continue;
            }
            let sequence = run.sequence_mut();
            let unchanged = sequence.take_unchanged();
            speculation.ngrams.update(sequence.tokens(), unchanged);
            *draft = speculation.ngrams.draft(sequence.tokens(), max);
            if let Some(image) = draft.iter().position(|&token| is_image_token(token)) {
                draft.truncate(image);
            }
            let min = limits.min.map_or(options.min_draft, |min| min as usize);
            // A draft that has the maximum length is used, even if that is less than the minimum.
            if draft.len() < min.min(max) {
                draft.clear();
            }
            room -= draft.len();
            rows += if captures_attention { draft.len() } else { 0 };
        }
        drafts
    }

    /// Measures a decode that started at `start`, and charges its runs for their drafts.
    pub fn charge(&mut self, parts: &[BatchPart], slots: &mut ActiveSlots, kv: &KvSlots<'_>, start: Instant) {
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
            let Some(ActiveRun { run, speculation, .. }) = slots.get_mut(part.slot) else { continue };
            if part.draft.is_empty() {
                if drafted == 0 {
                    speculation.account.add_plain();
                }
                continue;
            }
            run.count_draft(part.draft.len());
            speculation.account.add_draft(part.draft.len(), token_cost.unwrap_or_default());
        }
    }
}
